"""Faults, one after another, and whether a run ends as the documents say: damaged folders, foreign files, full disks,
signals in each phase, ranks and launchers that are killed or stopped, mistakes, machines that do not meet.

    python benchmarks/faults.py                       # all cases: about 15 minutes on two cores
    python benchmarks/faults.py --only SIGTERM        # those whose name matches a regular expression
    python benchmarks/faults.py --list

A tiny GPT-2 in fp32, 8 updates, a checkpoint after every second. A case starts in a new folder, or in that of a run
that SIGTERM has stopped after update 5: with `"exit_code": 85` in its environment.json. It is `ok` where the exit code
on record, the launcher's, the messages and the files that must still be there are those of the table, and where the
same command, typed again, comes to the end of the undisturbed run with its losses to 1e-6. A run that is refused (2)
may not have changed any file; only with 1 or no exit code may there be a traceback.

Ranks are forked where the launcher does not matter. Cases of disks need the right to mount (root).
"""

import argparse
import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fault_cases import CASES, Case, meet, send  # noqa: E402
from ranks import LIBRARIES, fork_ranks, rank_environments  # noqa: E402

from zerofit.record.jsonl import JsonlFile  # noqa: E402

UPDATES, LIMIT_S, TOLERANCE = 8, 240.0, 1e-6
AFTERWARDS_S = 60.0  # for ranks whose launcher has been killed
RECIPE = {
    "config_name": "gpt2",
    "config_overrides": "n_layer=1,n_head=2,n_embd=32,n_positions=32,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
    "train_tokenizer_vocab_size": 300,
    "block_size": 32,
    "max_eval_samples": 8,
    "per_device_train_batch_size": 4,
    "global_batch_size": 8,
    "learning_rate": 1e-3,
    "precision": "fp32",
    "max_train_steps": UPDATES,
    "save_steps": 2,
    "eval_steps": 4,
    "sample_tokens": 0,
    "report_to": "none",
}
PROGRAM = """import os, runpy, sys
sys.path.insert(0, {benchmarks!r})
import fault_cases as cases
cases.meet(cases.CASES[{number}], int(os.environ.get("RANK", "0")), cases.Path({run!r}))
sys.argv[0] = {program!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# --------------------------------------------------------------------------------------------------------- the bench


@dataclass
class Seen:
    """What a launch has left: exit codes of ranks or launchers, and its output."""

    codes: list[int]
    text: str


class Bench:
    """The folder of all cases, with the runs that they start from.

    Args:
        folder: what is in it is deleted.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "text.txt").write_text("".join(f"{7919 * n % 10**6} is a number\n" for n in range(2000)))
        files = {"train_file": str(folder / "text.txt"), "cache_dir": str(folder / "cache")}
        (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **files}, sort_keys=False))
        for name, code in (("done", 0), ("half", 85), ("died", None)):
            case = Case(
                name,
                code,
                do={85: send(SIGTERM), None: send(SIGKILL)}.get(code),
                update=5 if code else 1,
                flags="" if name != "died" else "--learning_rate 1e-2",
                ends=False,
            )
            seen = self.fork(case, folder / name)
            if recorded(folder / name).get("exit_code") != code:
                raise RuntimeError(f"the run that cases start from ({name}) ended with {seen.codes}: {seen.text}")
        self.losses = losses(folder / "done")

    def options(self, run: Path) -> list[str]:
        return ["--config", str(self.folder / "recipe.yaml"), "--output_dir", str(run)]

    def fork(self, case: Case, run: Path) -> Seen:
        """Launch in forked ranks."""
        processes, machines = case.forked
        ranks = rank_environments(environment(), processes if processes > 1 else None, machines)
        flags = case.flags.format(case=run.parent, done=self.folder / "done").split()
        words = [str(ROOT / "train" / "clm.py"), *self.options(run), *flags]
        with tempfile.TemporaryDirectory() as logs:
            request = {"words": words, "ranks": ranks, "cwd": str(ROOT), "logs": logs, "timeout": LIMIT_S}
            codes = fork_ranks(request, prepare=lambda rank: meet(case, rank, run))
            text = "\n".join(file.read_text(errors="replace") for file in sorted(Path(logs).iterdir()))
        return Seen(codes, text)

    def launch(self, case: Case, run: Path) -> Seen:
        """Launch with real launchers, all at once."""
        from zerofit.launch.runs import launched

        place, flags = run.parent, case.flags.format(case=run.parent, done=self.folder / "done")
        program = place / "clm.py"
        program.write_text(
            PROGRAM.format(
                benchmarks=str(ROOT / "benchmarks"),
                number=CASES.index(case),
                run=str(run),
                program=str(ROOT / "train" / "clm.py"),
            )
        )
        with ExitStack() as stack:
            holder = stack.enter_context(socket.create_server(("", 0)))
            options, other = (" ".join(self.options(folder)) for folder in (run, place / "other"))
            words = {
                "run": f"{program} {options} {flags}",
                "other": f"{program} {other}",
                "copy": place / "copy",
                "run_of_copy": f"{place}/copy/train/clm.py {options}",
                "case": place,
                "port": free_port(),
                "free": free_port(),
                "taken": holder.getsockname()[1],
            }
            if any("{copy}" in launcher for launcher in case.launchers):
                shutil.copytree(ROOT / "train", place / "copy" / "train", ignore=shutil.ignore_patterns("__pycache__"))
                (place / "copy" / "train" / "more.py").touch()
            launches = [
                stack.enter_context(
                    launched(
                        ["bash", "-c", command(launcher.format(**words))],
                        run,
                        place / f"{number}.log",
                        environment=environment(),
                    )
                )
                for number, launcher in enumerate(case.launchers)
            ]
            late = [launch.wait(LIMIT_S) == "late" for launch in launches]
            until = time.monotonic() + AFTERWARDS_S
            while any(True for launch in launches for _ in launch.members()) and time.monotonic() < until:
                time.sleep(0.2)
            codes = [124 if is_late else launch.process.returncode for launch, is_late in zip(launches, late)]
        return Seen(codes, "\n".join(launch.text for launch in launches))

    def verdict(self, case: Case) -> list[str]:
        """What is wrong with a case."""
        place = self.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        run = place / "run"
        place.mkdir()
        with mounts_removed(place):
            if case.disk:
                subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], check=True)
            if case.start != "new":
                shutil.copytree(self.folder / case.start, run, symlinks=True)
            if case.given is not None:
                case.given(run)
            before = contents(run, case.kept)
            with mounts_removed(run):
                seen = self.launch(case, run) if case.launchers else self.fork(case, run)
                wrong = self.compared(case, run, seen, before)
            (place / "filler").unlink(missing_ok=True)
            if case.ends and case.code != 0:
                seen = self.fork(Case("the same command", 0, forked=case.forked), run)
                wrong += [f"the same command, typed again, ends with {seen.codes}: {seen.text[-1500:]}"] * any(
                    seen.codes
                )
            if case.ends:
                wrong += wrong_losses(losses(run), self.losses, case.hole)
            after = contents(run, case.kept)
            return wrong + [
                f"{name} has changed or is gone"
                for name in case.kept
                if name not in after or after[name] != before.get(name, after[name])
            ]

    def compared(self, case: Case, run: Path, seen: Seen, before: dict[str, bytes]) -> list[str]:
        """What differs from the table at the end of the faulty launch."""
        wrong, found = [], recorded(run)
        if found.get("exit_code") != case.code and not run.is_file():
            wrong.append(f"exit_code {found.get('exit_code')} is on record, and not {case.code}")
        if case.exits and seen.codes != list(case.exits):
            wrong.append(f"it ended with {seen.codes}, and not {list(case.exits)}")
        text = seen.text + json.dumps(found)
        wrong += [f"nothing is said of {words!r}" for words in case.said if words not in text]
        if (
            (case.code not in (1, None) or 2 in case.exits)
            and "Traceback" in seen.text
            and "accelerate" not in "".join(case.launchers)
        ):
            wrong.append("there is a traceback")
        if 2 in (case.code, *case.exits) and case.do is None and not case.launchers:
            after, ours = contents(run, case.kept), ("environment.json", ".lock")
            changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            wrong += [f"{name} was changed by a run that was refused" for name in changed if name not in ours]
        return [*wrong, seen.text[-1500:]] if wrong else []


def contents(run: Path, kept: tuple[str, ...] = ()) -> dict[str, bytes]:
    """The bytes of all files of a folder by their names, and of those that are named."""
    below = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()] if run.is_dir() else []
    named = [name for name in kept if (run / name).is_file()]
    return {name: (run / name).read_bytes() for name in (*below, *named)}


def recorded(run: Path) -> dict:
    """environment.json; empty where there is none."""
    with suppress(OSError, ValueError):
        return json.loads((run / "environment.json").read_text())
    return {}


def losses(run: Path) -> dict[int, list[float]]:
    """{update: the losses of its lines in metrics.jsonl}"""
    found = {}
    for line in JsonlFile(run / "metrics.jsonl").read():
        found.setdefault(line["update"], []).append(line.get("loss"))
    return found


def wrong_losses(ours: dict[int, list[float]], reference: dict[int, list[float]], hole: int) -> list[str]:
    """What differs from the undisturbed run, but for so many lines at the beginning that may be missing."""
    missing = [update for update in range(1, UPDATES + 1) if len(ours.get(update, ())) != 1]
    if set(missing) - set(range(1, hole + 1)):
        return [f"metrics.jsonl has not one line each of update {missing}"]
    pairs = [(*values, *reference[update]) for update, values in ours.items() if update]
    largest = max(abs(loss - expected) / expected for loss, expected in pairs)
    return [f"the loss differs by {largest:.1e}"] if not largest <= TOLERANCE else []


@contextmanager
def mounts_removed(folder: Path) -> Iterator[None]:
    """At the end of the block nothing is mounted in the folder, nor on it."""
    try:
        yield
    finally:
        points = [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines()]
        for point in sorted((point for point in points if point.is_relative_to(folder)), reverse=True):
            subprocess.run(["umount", "--lazy", point], check=True)


def command(launcher: str) -> str:
    """A line for bash, which a signal to the launcher does not reach instead of it."""
    programs = {
        "zerofit launch": f"{sys.executable} -m zerofit.cli launch",
        "accelerate launch": f"{Path(sys.executable).parent / 'accelerate'} launch",
    }
    for name, program in programs.items():
        launcher = launcher.replace(name, program)
    return launcher if "|" in launcher else f"exec env {launcher}"


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def environment() -> dict[str, str]:
    """This environment without what an outer launcher may have left in it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "MASTER_"))}
    return {**{name: value for name, value in ours.items() if name not in names}, "OMP_NUM_THREADS": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression: cases whose name it is found in")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "benchmarks" / "faults")
    options = parser.parse_args()
    chosen = [case for case in CASES if re.search(options.only, case.name)]
    if options.list:
        print(*(case.name for case in chosen), sep="\n")
        return 0
    os.chdir(ROOT)
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "OMP_WAIT_POLICY": "PASSIVE",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
    for name in LIBRARIES:
        importlib.import_module(name)
    bench, num_wrong, not_run = Bench(options.folder.resolve()), 0, 0
    for case in chosen:
        try:
            wrong = bench.verdict(case)
        except subprocess.CalledProcessError as error:  # of mount
            not_run += 1
            print(f"{case.name:<60} not run: {error}", flush=True)
            continue
        num_wrong += bool(wrong)
        shown = "wrong: " + "; ".join(wrong) if wrong else "ok"
        print(f"{case.name:<60} {'none' if case.code is None else case.code:>4}  {shown}", flush=True)
    print(f"\n{len(chosen) - num_wrong - not_run} of {len(chosen)} as documented, {not_run} not run\n")
    from provenance import provenance

    print(provenance("1 and 2 processes", "torch", "accelerate", "deepspeed", "transformers"))
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
