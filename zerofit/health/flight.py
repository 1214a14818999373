"""Records of torch's flight recorder, written and read: where each rank is in its collectives when a run hangs.

The recorder is on by default for NCCL and for gloo (torch 2.13, FlightRecorder.hpp: the last 2,000 collectives;
TORCH_FR_BUFFER_SIZE=0 switches it off). A rank's record is a pickle, as torch writes it: NCCL's own watchdog writes to
the same place (TORCH_FR_DUMP_TEMP_FILE), and torch's analyzer reads it:

    python -m torch.distributed.flight_recorder.fr_trace outputs/RUN/flight -p rank_ --allow-incomplete-ranks

The watchdog process reads records, so reading needs only Python's standard library. Writing needs torch.
"""

import contextlib
import os
import pickle
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

FLIGHT_FOLDER = "flight"
RECORD_PREFIX = "rank_"
MAX_RECORD_BYTES = 2**28  # larger records are not read
MAX_SHOWN_GROUPS = 3  # process groups in a summary
MAX_SHOWN_NAMES = 8  # ranks or machines in a message


def write_record(folder: str, rank: int) -> None:
    """Write this rank's record into a run's folder, if a run has begun there. Never fails."""
    has_begun = os.path.isfile(os.path.join(os.path.dirname(folder), "files.json"))
    if "torch.distributed.distributed_c10d" not in sys.modules or not has_begun:
        return
    with contextlib.suppress(Exception):
        from zerofit.compat.torch import flight_record

        record = flight_record()
        os.makedirs(folder, exist_ok=True)
        target = os.path.join(folder, f"{RECORD_PREFIX}{rank}")
        with open(f"{target}.partial", "wb") as file:
            pickle.dump(record, file)
        os.replace(f"{target}.partial", target)


def find_records(folder: str, since: float) -> dict[int, str]:
    """Return {rank: the file of its record} of the records that were written after `since` (as time.time())."""
    files = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            rank = entry.name.removeprefix(RECORD_PREFIX)
            if rank.isdigit() and since <= entry.stat().st_mtime and entry.stat().st_size < MAX_RECORD_BYTES:
                files[int(rank)] = entry.path
    return files


class PlainUnpickler(pickle.Unpickler):
    """An unpickler of numbers, texts and containers only, so that no code is run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a record holds no {module}.{name}")


def read_flight_records(folder: str, since: float = 0.0) -> dict[int, dict[str, Any]]:
    """Return {rank: its record} of the records that were written after `since` (as time.time())."""
    records = {}
    for rank, path in find_records(folder, since).items():
        with contextlib.suppress(Exception), open(path, "rb") as file:
            record = PlainUnpickler(file).load()
            records[rank] = {key: record[key] for key in ("entries", "pg_config")}
    return records


def describe_waits(records: dict[int, dict[str, Any]], world_size: int = 1, machines: Sequence[str] = ()) -> list[str]:
    """Return lines that name the collective each group waits in, and the ranks that have not come to it. `machines`:
    the names of all machines; each machine has the same number of ranks."""

    def describe_ranks(ranks: list[int]) -> str:
        if len(machines) < 2:
            return join_names(ranks)
        by_machine = groupby(ranks, lambda rank: machines[rank * len(machines) // world_size])
        return ", ".join(f"{join_names(list(local_ranks))} on {machine}" for machine, local_ranks in by_machine)

    groups: dict[str, list[int]] = {}
    entries: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for rank, record in records.items():
        for name, config in record["pg_config"].items():
            groups[name] = [int(number) for number in config["ranks"].strip("[]").split(",")]
        for entry in record["entries"]:
            entries.setdefault(entry["process_group"][0], {}).setdefault(rank, []).append(entry)
    lines = []
    for name, entries_by_rank in entries.items():
        members = groups.get(name, sorted(entries_by_rank))
        waits = [entry for of_rank in entries_by_rank.values() for entry in of_rank if _waits(entry)]
        if not waits:
            continue
        first = min(waits, key=_number)
        waiting = [rank for rank, of_rank in entries_by_rank.items() if max(map(_number, of_rank)) >= _number(first)]
        late = [rank for rank in members if rank in records and rank not in waiting]
        unknown = [rank for rank in members if rank not in records]
        lines.append(
            f"{_describe_entry(first)}: rank {describe_ranks(sorted(waiting))} waits"
            + (f", rank {describe_ranks(late)} has not come to it" if late else "")
            + (f", rank {describe_ranks(unknown)} has left no record" if unknown else "")
        )
    return lines[:MAX_SHOWN_GROUPS]


def describe_last(record: dict[str, Any]) -> list[str]:
    """Return a line on the last collective of a rank; gloo's records do not say which collective has failed."""
    return [f"{_describe_entry(entry)} was the last" for entry in record["entries"][-1:]]


def _describe_entry(entry: dict[str, Any]) -> str:
    name, description = entry["process_group"]
    collective = f"{entry['profiling_name']} of {entry['input_sizes']}"
    return f"{collective}, number {_number(entry)} in group {description or name}"


def _number(entry: dict[str, Any]) -> int:
    return int(entry["collective_seq_id"])


def _waits(entry: dict[str, Any]) -> bool:
    """Return True if a collective has not ended. gloo records no states (torch 2.13); NCCL retires those given up."""
    of_gloo = entry["profiling_name"].startswith("gloo:")
    return not entry["is_p2p"] and (not entry["retired"] if of_gloo else entry["state"] != "completed")


def join_names(ranks: Sequence[object]) -> str:
    """Join ranks or machines to a text that names at most MAX_SHOWN_NAMES."""
    more = len(ranks) - MAX_SHOWN_NAMES
    return ", ".join(map(str, ranks[:MAX_SHOWN_NAMES])) + (f" and {more} more" if more > 0 else "")
