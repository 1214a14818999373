"""Writes and reads torch's flight recorder: where each rank stands in its collectives when a run hangs.

The recorder is on by default for NCCL and for gloo (torch 2.13, FlightRecorder.hpp: the last 2,000 collectives;
TORCH_FR_BUFFER_SIZE=0 switches it off). A rank's record is a pickle, as torch writes it: NCCL's own watchdog writes to
the same place (TORCH_FR_DUMP_TEMP_FILE), and torch's analyzer reads it:

    python -m torch.distributed.flight_recorder.fr_trace outputs/RUN/flight -p rank_ --allow-incomplete-ranks

Reading takes Python's own library alone, since the watchdog process does it; writing takes torch.
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
MAX_RECORD_BYTES = 2**28  # bytes of a record that is read
MAX_SHOWN_GROUPS = 3  # groups in a summary


def write_record(folder: str, rank: int) -> None:
    """Write this rank's record into a run's folder, unless no run has begun there. Nothing is raised."""
    begun = os.path.isfile(os.path.join(os.path.dirname(folder), "files.json"))
    if "torch.distributed.distributed_c10d" not in sys.modules or not begun:
        return
    with contextlib.suppress(Exception):
        from zerofit.compat.torch import flight_record

        record = flight_record()
        os.makedirs(folder, exist_ok=True)
        target = os.path.join(folder, f"{RECORD_PREFIX}{rank}")
        with open(f"{target}.partial", "wb") as file:
            pickle.dump(record, file)
        os.replace(f"{target}.partial", target)


def recorded(folder: str, since: float) -> dict[int, str]:
    """{rank: the file of its record}, of those that were written after `since` (seconds since the epoch)."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            rank = entry.name.removeprefix(RECORD_PREFIX)
            if rank.isdigit() and since <= entry.stat().st_mtime and entry.stat().st_size < MAX_RECORD_BYTES:
                found[int(rank)] = entry.path
    return found


class PlainUnpickler(pickle.Unpickler):
    """Unpickles numbers, texts and containers only, so that no code is run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a record holds no {module}.{name}")


def read_flight_records(folder: str, since: float = 0.0) -> dict[int, dict[str, Any]]:
    """{rank: its record}, of those that were written after `since`."""
    found = {}
    for rank, path in recorded(folder, since).items():
        with contextlib.suppress(Exception), open(path, "rb") as file:
            record = PlainUnpickler(file).load()
            found[rank] = {key: record[key] for key in ("entries", "pg_config")}
    return found


def describe(records: dict[int, dict[str, Any]], world_size: int = 1, machines: Sequence[str] = ()) -> list[str]:
    """Return lines that name the collective each group waits in, and the ranks that have not come to it. `machines`:
    in words; each has as many of the world's ranks as any other."""

    def placed(ranks: list[int]) -> str:
        if len(machines) < 2:
            return listed(ranks)
        places = groupby(ranks, lambda rank: machines[rank * len(machines) // world_size])
        return ", ".join(f"{listed(list(those))} on {machine}" for machine, those in places)

    groups: dict[str, list[int]] = {}
    entries: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for rank, record in records.items():
        for name, config in record["pg_config"].items():
            groups[name] = [int(number) for number in config["ranks"].strip("[]").split(",")]
        for entry in record["entries"]:
            entries.setdefault(entry["process_group"][0], {}).setdefault(rank, []).append(entry)
    lines = []
    for name, of_ranks in entries.items():
        members = groups.get(name, sorted(of_ranks))
        waits = [entry for mine in of_ranks.values() for entry in mine if _waits(entry)]
        if not waits:
            continue
        first = min(waits, key=lambda entry: entry["collective_seq_id"])
        number = first["collective_seq_id"]
        came = {rank for rank, mine in of_ranks.items() if any(each["collective_seq_id"] >= number for each in mine)}
        late = [rank for rank in members if rank in records and rank not in came]
        unknown = [rank for rank in members if rank not in records]
        lines.append(
            f"{_named(first)}: rank {placed(sorted(came))} waits"
            + (f", rank {placed(late)} has not come to it" if late else "")
            + (f", rank {placed(unknown)} has left no record" if unknown else "")
        )
    return lines[:MAX_SHOWN_GROUPS]


def last(record: dict[str, Any]) -> list[str]:
    """The last collective of a rank: where gloo has ended one with an error, it is not told from the others."""
    return [f"{_named(entry)} was the last" for entry in record["entries"][-1:]]


def _named(entry: dict[str, Any]) -> str:
    name, description = entry["process_group"]
    what = f"{entry['profiling_name']} of {entry['input_sizes']}"
    return f"{what}, number {entry['collective_seq_id']} in group {description or name}"


def _waits(entry: dict[str, Any]) -> bool:
    """Return True if a collective has not ended. gloo knows no states (torch 2.13); NCCL retires what is given up."""
    of_gloo = entry["profiling_name"].startswith("gloo:")
    return not entry["is_p2p"] and (not entry["retired"] if of_gloo else entry["state"] != "completed")


def listed(ranks: Sequence[object]) -> str:
    """Join ranks or machines to a text, at most eight of them."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
