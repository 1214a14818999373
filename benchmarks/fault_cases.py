"""The cases of faults.py: what is done to a folder or to a run, and what must be seen."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGUSR1

import psutil

RUN_OF_TRAINING = "metrics.jsonl", "checkpoints/update_00000004/manifest.json"


@dataclass(frozen=True)
class Case:
    """One fault, and what must be seen.

    Args:
        start: the folder that the run starts in: new, half (stopped after update 5), done, or died (of another run
            that made no update).
        disk: the folder is on a small disk of its own, where `fill` leaves no room.
        given: changes the run's folder before it starts.
        do: what a rank does to the run, when it comes to `phase` of `update` or of a later one. Phases are those of
            the watchdog, and: import (of torch), saving (a checkpoint is about to get its name).
        ranks: those that do it.
        flags: options of the faulty launch only.
        forked: (processes, machines) of forked ranks.
        launchers: real launchers, one a machine; {run} is the program with its options.
        code: in environment.json; None: there must be none, as after a crash, and in a folder of others.
        exits: of the launchers, or of the ranks that are forked; empty: they are not compared.
        said: words in the output, or in environment.json.
        kept: files of the folder that must be unchanged.
        hole: so many updates may be missing from metrics.jsonl.
        ends: the same command, without the fault, comes to the end of the undisturbed run.
    """

    name: str
    code: int | None
    said: tuple[str, ...] = ()
    start: str = "new"
    disk: bool = False
    given: Callable[[Path], object] | None = None
    do: Callable[[Path], object] | None = None
    phase: str = "forward"
    update: int = 0
    ranks: tuple[int, ...] = (0,)
    flags: str = ""
    forked: tuple[int, int | None] = (1, 1)
    launchers: tuple[str, ...] = ()
    exits: tuple[int, ...] = ()
    kept: tuple[str, ...] = ()
    hole: int = 0
    ends: bool = True


# ------------------------------------------------------------------------------------------ what is done to a folder


def write(*files: str, text: str = "mine\n") -> Callable[[Path], None]:
    def given(run: Path) -> None:
        for name in files:
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text(text)

    return given


def without(*names: str) -> Callable[[Path], None]:
    return lambda run: [(run / name).unlink() for name in names]


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(change((run / name).read_bytes()))


def link(name: str, is_folder: bool = False) -> Callable[[Path], None]:
    """A link in the place of a file of the run, to something precious beside the folder."""

    def given(run: Path) -> None:
        precious = run.parent / "precious"
        write("precious/net.py" if is_folder else "precious")(run.parent)
        run.mkdir(parents=True, exist_ok=True)
        if (run / name).exists():
            (run / name).rename(run.parent / "moved")
        (run / name).symlink_to(precious)

    return given


def fill(left_kib: int = 0) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        with (run.parent / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(run.parent / "filler", (run.parent / "filler").stat().st_size - 1024 * left_kib)

    return do


def read_only(name: str) -> Callable[[Path], None]:
    def given(run: Path) -> None:
        (run / name).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", run / name, run / name], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", run / name], check=True)

    return given


# --------------------------------------------------------------------------------------------- what is done to a run


def send(*numbers: int) -> Callable[[Path], None]:
    """Signals to this rank, a second and more apart."""

    def do(run: Path) -> None:
        for place, number in enumerate(numbers):
            time.sleep(1.5 * (place > 0))
            os.kill(os.getpid(), number)

    return do


def kill_all(run: Path) -> None:
    for process in sorted(psutil.Process(os.getppid()).children(), key=lambda process: process.pid == os.getpid()):
        process.kill()


def signal_launcher(number: int, generations: int) -> Callable[[Path], None]:
    """To accelerate's launcher (1), or to that which has started it (2)."""

    def do(run: Path) -> None:
        psutil.Process().parents()[generations - 1].send_signal(number)
        time.sleep(2.0)

    return do


def signal_group(run: Path) -> None:
    """SIGTERM to the launcher and all ranks, as Slurm sends it."""
    launcher = psutil.Process().parent()
    for process in (launcher, *launcher.children()):
        process.send_signal(SIGTERM)


def too_much_memory(run: Path) -> None:
    import torch

    torch.empty(2**55)


def launch_again(run: Path) -> None:
    """The same command while this one is at work."""
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    again = subprocess.run([sys.executable, *sys.argv], env=variables, capture_output=True, text=True)
    print(f"the second launch ends with {again.returncode}: {again.stderr}", file=sys.stderr)


def meet(case: Case, rank: int, run: Path) -> None:
    """Let this rank do what is done in a case."""
    if case.do is None or rank not in case.ranks:
        return
    from zerofit.health.watchdog import Watchdog

    done, enter, rename = [], Watchdog.phase, os.rename

    def come(phase: str, update: int) -> None:
        if phase == case.phase and update >= case.update and not done:
            done.append(phase)
            case.do(run)

    def phase(self, name: str, update: int | None = None, **patience) -> None:
        enter(self, name, update, **patience)
        come(name, update or 0)

    def renamed(source, target, **how) -> None:
        if checkpoint := re.fullmatch(r"update_(\d{8})", Path(target).name):
            come("saving", int(checkpoint[1]))
        rename(source, target, **how)

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "torch":
                come("import", 0)

    Watchdog.phase, os.rename = phase, renamed
    sys.meta_path.insert(0, Finder)


# --------------------------------------------------------------------------------------------------------- the cases

ZEROFIT = "zerofit launch --num_processes 2 {run}"
ACCELERATE = (
    "accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 --main_process_port 0 {run}"
)
MACHINE = (
    "zerofit launch --num_processes 2 --num_machines 2 --machine_rank {rank} --main_process_ip 127.0.0.1 "
    "--main_process_port {{port}} --rendezvous_minutes 0.5 {{run}}"
)
MACHINE_0, MACHINE_1 = MACHINE.format(rank=0), MACHINE.format(rank=1)
HALF = {"start": "half", "kept": RUN_OF_TRAINING[1:]}
FOREIGN = ("no run has written",)
OTHER = {"flags": "--learning_rate 1e-2", "said": ("learning_rate was 0.001, now 0.01",)}

CASES = [
    # a folder that is damaged: nothing may be lost
    Case("metrics.jsonl is empty", 0, **HALF, given=write("metrics.jsonl", text=""), hole=5),
    Case("metrics.jsonl is missing", 0, **HALF, given=without("metrics.jsonl"), hole=5),
    Case("metrics.jsonl is torn", 0, **HALF, given=edit("metrics.jsonl", lambda text: text[:-30]), hole=5),
    Case(
        "metrics.jsonl has a broken line",
        0,
        **HALF,
        given=edit("metrics.jsonl", lambda text: text.replace(b'{"update": 3', b'{"upd\x00')),
        hole=5,
    ),
    Case("recipe.yaml is missing", 0, **HALF, given=without("recipe.yaml")),
    Case("recipe.yaml is broken", 0, **HALF, given=write("recipe.yaml", text="a: [1\n")),
    Case("strategy.yaml is missing", 0, **HALF, given=without("strategy.yaml")),
    Case("files.json is missing", 0, **HALF, given=without("files.json")),
    Case("files.json is empty", 0, **HALF, given=write("files.json", text="")),
    Case("environment.json is missing", 0, **HALF, given=without("environment.json")),
    Case(
        "the whole record is missing",
        0,
        **HALF,
        hole=5,
        given=without("metrics.jsonl", "recipe.yaml", "strategy.yaml", "files.json", "environment.json"),
    ),
    Case(
        "the newest checkpoint is cut off",
        0,
        ("rank_00000.safetensors",),
        **HALF,
        given=edit("checkpoints/update_00000005/state/rank_00000.safetensors", lambda data: data[:100]),
    ),
    Case("the newest manifest is missing", 0, **HALF, given=without("checkpoints/update_00000005/manifest.json")),
    Case("without metrics.jsonl, another run", 2, **HALF, **OTHER, given=without("metrics.jsonl"), hole=5),
    Case("without recipe.yaml, another run", 2, **HALF, **OTHER, given=without("recipe.yaml")),
    Case(
        "without metrics.jsonl, from the start",
        2,
        ("--overwrite_output_dir",),
        **HALF,
        flags="--resume never",
        given=without("metrics.jsonl"),
        hole=5,
    ),
    Case(
        "without metrics.jsonl, overwritten",
        0,
        start="half",
        flags="--resume never --overwrite_output_dir",
        given=without("metrics.jsonl"),
    ),
    # a folder of others
    Case("another run is there", 2, **HALF, **OTHER),
    Case(
        "another run is there, overwritten",
        0,
        start="half",
        flags="--learning_rate 1e-2 --overwrite_output_dir",
        ends=False,
    ),
    Case("a finished run", 0, ("already finished",), start="done", kept=("metrics.jsonl", "model/model.safetensors")),
    Case("the folder is a file", 2, ("is a file",), given=lambda run: run.write_text("mine"), ends=False),
    *(
        Case(f"{name} of the user", None, FOREIGN, given=write(name), exits=(2,), ends=False)
        for name in (
            "notes.txt",
            "model/net.py",
            "checkpoints/mine.bin",
            "checkpoints/best/mine.bin",
            "predictions_mine.jsonl",
            "metrics.jsonl",
            "recipe.yaml",
            "loss.png",
        )
    ),
    Case(
        "notes.txt of the user, overwritten",
        0,
        given=write("notes.txt", "a.tsv", "checkpoints/mine.bin"),
        flags="--overwrite_output_dir",
        kept=("notes.txt", "a.tsv", "checkpoints/mine.bin"),
    ),
    Case(
        "model/net.py of the user, overwritten",
        None,
        FOREIGN,
        given=write("model/net.py"),
        flags="--overwrite_output_dir",
        exits=(2,),
        ends=False,
    ),
    Case(
        "files of the user in a run",
        0,
        start="half",
        given=write("notes.txt", "checkpoints/mine.bin", "x/y.tsv"),
        kept=("notes.txt", "checkpoints/mine.bin", "x/y.tsv", *RUN_OF_TRAINING[1:]),
    ),
    Case(
        "a table of the user, evaluation",
        None,
        FOREIGN,
        given=write("mine.tsv"),
        exits=(2,),
        ends=False,
        flags="--evaluate_only --model_name_or_path {done}/model",
    ),
    *(
        Case(f"{name} is a link", 2, FOREIGN, start="half", given=link(name), kept=("../precious",), ends=False)
        for name in (".lock", "metrics.jsonl", "recipe.yaml")
    ),
    Case(
        "environment.json is a link",
        None,
        FOREIGN,
        start="half",
        given=link("environment.json"),
        kept=("../precious",),
        exits=(2,),
        ends=False,
    ),
    *(
        Case(
            f"{name} is a link",
            None,
            FOREIGN,
            given=link(name, True),
            kept=("../precious/net.py",),
            exits=(2,),
            ends=False,
        )
        for name in ("model", "checkpoints")
    ),
    # a disk
    Case("full before the start", None, ("No space left",), disk=True, given=fill(), exits=(2,)),
    Case("full before a resume", 2, ("No space left",), start="half", disk=True, given=fill()),
    Case(
        "full from update 3 to the end",
        2,
        ("No space left",),
        disk=True,
        do=fill(),
        update=3,
        flags="--save_async false",
        kept=("checkpoints/update_00000002/manifest.json",),
    ),
    Case(
        "full from update 3, save or stop",
        86,
        ("could not be saved",),
        disk=True,
        do=fill(),
        update=3,
        flags="--save_async false --on_save_failure stop",
        kept=("checkpoints/update_00000002/manifest.json",),
    ),
    Case(
        "full from update 3, SIGTERM",
        86,
        ("could not be saved",),
        disk=True,
        update=3,
        flags="--save_async false",
        do=lambda run: (fill()(run), send(SIGTERM)(run)),
    ),
    Case(
        "full in the middle of a save",
        2,
        ("No space left",),
        disk=True,
        do=fill(64),
        phase="save",
        update=4,
        flags="--save_async false",
        kept=("checkpoints/update_00000002/manifest.json",),
    ),
    Case("checkpoints/ is read-only", 2, ("Read-only",), **HALF, given=read_only("checkpoints")),
    Case("the folder is read-only", None, ("Read-only",), given=read_only("."), exits=(2,), ends=False),
    # signals
    Case(
        "SIGTERM while it imports",
        85,
        ("while the run was starting",),
        do=send(SIGTERM),
        phase="import",
        launchers=(ACCELERATE.replace("ddp", "single").replace("processes 2", "processes 1"),),
    ),
    *(
        Case(f"SIGTERM in phase {phase}", 85, ("while the run was starting",), do=send(SIGTERM), phase=phase)
        for phase in ("data", "load", "prepare")
    ),
    Case("SIGTERM while it resumes", 85, ("while the run was starting",), **HALF, do=send(SIGTERM), phase="prepare"),
    *(
        Case(f"SIGTERM in phase {phase}", 85, ("stopped     by SIGTERM",), do=send(SIGTERM), phase=phase, update=4)
        for phase in ("forward", "backward", "save", "saving", "evaluate")
    ),
    Case("SIGTERM in the last evaluation", 0, do=send(SIGTERM), phase="evaluate", update=8),
    Case("SIGTERM in phase export", 0, do=send(SIGTERM), phase="export"),
    Case("SIGUSR1 in phase data", 85, ("SIGUSR1",), do=send(SIGUSR1), phase="data"),
    Case("SIGUSR1 in phase forward", 85, ("SIGUSR1",), do=send(SIGUSR1), update=3),
    Case("SIGINT in phase data", 130, ("interrupted",), do=send(SIGINT), phase="data"),
    Case("SIGINT in phase forward", 85, ("Ctrl-C",), do=send(SIGINT), update=3),
    Case("a second SIGTERM", 143, ("second signal",), do=send(SIGTERM, SIGTERM), update=3),
    Case("a second SIGUSR1", 143, ("second signal",), do=send(SIGUSR1, SIGUSR1), update=3),
    Case("a second SIGINT", 130, ("second signal",), do=send(SIGINT, SIGINT), update=3),
    Case("SIGTERM to one of two ranks", 85, do=send(SIGTERM), update=3, ranks=(1,), forked=(2, 1)),
    Case("--max_hours", 85, ("max_hours",), flags="--max_hours 0.000001"),
    # processes that are killed
    *(
        Case(f"SIGKILL in phase {phase}", None, do=send(SIGKILL), phase=phase, update=update)
        for phase, update in (("data", 0), ("prepare", 0), ("forward", 3), ("saving", 4), ("export", 0))
    ),
    Case("SIGKILL of all ranks while saving", None, do=kill_all, phase="saving", update=4, forked=(2, 1)),
    *(
        Case(
            f"SIGKILL of rank {rank} of two in phase {phase}",
            1,
            (f"rank {rank}", "ended without a message"),
            do=send(SIGKILL),
            phase=phase,
            update=update,
            ranks=(rank,),
            forked=(2, 1),
        )
        for rank in (0, 1)
        for phase, update in (("forward", 3), ("save", 4))
    ),
    Case(
        "SIGKILL of rank 1 of two in phase load",
        1,
        ("rank 1",),
        do=send(SIGKILL),
        phase="load",
        ranks=(1,),
        launchers=(ZEROFIT,),
        exits=(1,),
    ),
    Case(
        "SIGSTOP of rank 1 of two",
        None,
        ("rank 1", "stopped"),
        do=send(SIGSTOP),
        update=3,
        ranks=(1,),
        flags="--watchdog_minutes 0.1",
        launchers=(ZEROFIT,),
        exits=(137,),
    ),
    Case("SIGKILL of zerofit launch", 85, do=signal_launcher(SIGKILL, 2), update=3, launchers=(ZEROFIT,), exits=(-9,)),
    Case("SIGTERM to zerofit launch", 85, do=signal_launcher(SIGTERM, 2), update=3, launchers=(ZEROFIT,), exits=(85,)),
    Case("SIGINT to zerofit launch", 85, do=signal_launcher(SIGINT, 2), update=3, launchers=(ZEROFIT,), exits=(85,)),
    Case("SIGTERM to accelerate launch and its ranks", 85, do=signal_group, update=3, launchers=(ACCELERATE,)),
    Case("| head", 0, launchers=(ZEROFIT + " | head -1; exit ${{PIPESTATUS[0]}}",), exits=(0,)),
    # mistakes, where 85 was on record
    Case("a mistyped option", 2, ("learning_rate",), **HALF, flags="--learnin_rate 1"),
    Case(
        "a broken recipe",
        2,
        ("broken.yaml",),
        **HALF,
        flags="--config {case}/broken.yaml",
        given=write("../broken.yaml", text="a: ["),
    ),
    Case("a missing file", 2, ("train_file",), **HALF, flags="--train_file {case}/none.txt"),
    Case("a missing recipe", 2, ("none.yaml",), **HALF, flags="--config {case}/none.yaml"),
    Case(
        "broken JSON of DeepSpeed",
        2,
        ("broken.json",),
        **HALF,
        given=write("../broken.json", text='{"a": 1,,}'),
        flags="--deepspeed_config {case}/broken.json",
    ),
    Case(
        "an unknown strategy",
        2,
        ("zero4",),
        **HALF,
        launchers=(ZEROFIT.replace("--num", "--strategy zero4 --num"),),
        exits=(2,),
    ),
    Case(
        "a mistyped option, accelerate launch",
        2,
        ("learning_rate",),
        **HALF,
        flags="--learnin_rate 1",
        launchers=(ACCELERATE,),
        exits=(1,),
    ),
    Case(
        "an anomaly", 86, ("anomaly",), ends=False, flags="--learning_rate 1e38 --max_grad_norm 0 --num_warmup_steps 0"
    ),
    Case("out of memory", 87, do=too_much_memory, update=3),
    # launches beside each other
    Case("a second launch into the folder", 0, ("ends with 2", "another run is at work"), do=launch_again, update=3),
    Case("after another run that died before its first update", 0, start="died"),
    Case(
        "a port that is in use",
        0,
        ("already in use",),
        exits=(0,),
        launchers=(ZEROFIT.replace("--num", "--main_process_port {taken} --num"),),
    ),
    Case("two launches at once", 0, launchers=(ZEROFIT, ZEROFIT.replace("{run}", "{other}")), exits=(0, 0)),
    # machines
    Case(
        "data is missing on machine 1",
        2,
        ("machine 1", "none.txt"),
        exits=(2, 2),
        launchers=(MACHINE_0, MACHINE_1 + " --train_file {case}/none.txt"),
    ),
    Case("machine 1 never starts", 2, ("machine 1", "never come"), launchers=(MACHINE_0,), exits=(2,)),
    Case(
        "a wrong address",
        None,
        ("has not reached machine 0",),
        exits=(2,),
        launchers=(MACHINE_1.replace("{port}", "{free}"),),
    ),
    Case(
        "the same machine number twice",  # whoever comes second is refused, and the others train
        0,
        ("takes part in this run already",),
        launchers=(MACHINE_0, MACHINE_1, MACHINE_1),
    ),
    Case(
        "other code on machine 1",
        0,
        ("runs other code",),
        exits=(0, 0),
        launchers=(MACHINE_0, "PYTHONPATH={copy} " + MACHINE_1.replace("{run}", "{run_of_copy}")),
    ),
    Case(
        "SIGKILL of the launcher of machine 1",
        85,
        do=signal_launcher(SIGKILL, 2),
        update=3,
        ranks=(1,),
        launchers=(MACHINE_0, MACHINE_1),
        exits=(85, -9),
    ),
    # Both machines have one address here: the message cannot name the lost one, as it does on two hosts.
    Case(
        "SIGKILL of the rank of machine 1",
        1,
        ("another process is gone",),
        do=send(SIGKILL),
        update=3,
        ranks=(1,),
        launchers=(MACHINE_0, MACHINE_1),
        exits=(1, 1),
    ),
]
