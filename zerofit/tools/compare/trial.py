"""The trials of a comparison, each an ordinary launch of the task at one batch size, told by its environment to
measure; and the machine that they run on, real or simulated (zerofit/tools/simulate/csrc/without_data.h).

journal.jsonl has a line for each launch and each result; from it an interrupted comparison resumes. A trial's folder
has the request, the answers of the ranks (zerofit/training/measurement.py) and the output of the launch.

`python -m zerofit.tools.compare.trial` prints the machine's description, as another process: one that uses a GPU
through torch takes half a GiB of it until it ends.
"""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerofit.estimate.peak import CUDA_CONTEXT_BYTES
from zerofit.health.out_of_memory import exhausted_memory_in
from zerofit.launch.runs import LaunchedRun, RunningLaunch, failure, kill_launch, mistake
from zerofit.model.adapter_folder import find_base, open_adapter
from zerofit.model.configuration import is_adapter, known_architectures
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import parse_bytes
from zerofit.record.environment import describe_environment
from zerofit.record.metrics import LineReader, add_line
from zerofit.record.terminal import duration, log_lines, size
from zerofit.strategy.gpu_table import GPUS
from zerofit.strategy.launch import SHARES_DEVICES
from zerofit.tools.machine import Device, Machine, inspect_machine
from zerofit.tools.simulate import build
from zerofit.training.measurement import ANSWERS_FILE, MEASURE_VARIABLE

USABLE_MEMORY_FRACTION = 0.9  # part of a device's memory


@dataclass(frozen=True)
class TrialMachine(Machine):
    """The machine that trials run on.

    Attributes:
        environment: versions, commit and hardware, for the report's provenance.
        simulated: variables that put a launch on simulated devices; empty: its devices are real.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    simulated: dict[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """The values that distinguish this machine from others."""
        return {
            "devices": [[device.name, device.total] for device in self.devices],
            "cpu": self.environment["hardware"].get("cpu"),
            "cores": self.environment["hardware"].get("cores"),
            "memory": self.memory,
            "packages": self.environment["packages"],
            **{name: value for name, value in self.simulated.items() if name.startswith("SIMGPU_")},
        }

    def describe(self) -> str:
        hardware = self.environment["hardware"]
        names = Counter(device.name for device in self.devices)
        devices = [f"{number} x {name}" for name, number in sorted(names.items())]
        cpu = f"{hardware.get('cores')} cores of {hardware.get('cpu') or 'a CPU'}, {size(self.memory)}"
        return ", ".join([*devices, cpu])

    def variables(self, num_processes: int) -> dict[str, str]:
        """Environment variables of a launch: the simulated devices, and that processes may share real ones where there
        are fewer."""
        shares = 0 < len(self.devices) < num_processes
        return {**self.simulated, **({SHARES_DEVICES: "1"} if shares else {})}


def inspect_trial_machine(simulated: dict[str, str] | None = None) -> TrialMachine:
    """Return the machine that this runs on, with `simulated` devices if given. Raises RuntimeError: torch cannot
    be used."""
    root = Path(__file__).resolve().parents[3]
    finished = subprocess.run(
        [sys.executable, "-m", "zerofit.tools.compare.trial"],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, **(simulated or {})},
    )
    if finished.returncode:
        raise RuntimeError(f"the description of the machine failed:\n{finished.stderr}")
    description = json.loads(finished.stdout.splitlines()[-1])
    devices = tuple(Device(**device) for device in description.pop("devices"))
    return TrialMachine(devices=devices, **description, simulated=simulated or {})


def choose_limit(machine: TrialMachine, num_processes: int, limit: int | None) -> tuple[int | None, list[str]]:
    """Return (bytes that each rank may use of its device; None: all of it, notes that say what was chosen). Raises
    UserError: a device has less than its ranks together may use."""
    ranks = -(-num_processes // len(machine.devices))
    total = min(device.total for device in machine.devices)
    if limit is None and machine.simulated:
        limit = total
    context = CUDA_CONTEXT_BYTES if machine.kind == "cuda" else 0
    share = (limit or 0) + context
    if ranks * share > total:
        room = total // share * len(machine.devices)
        raise UserError(
            f"num_processes = {num_processes}: {ranks} share a device of {size(total)}, and each needs {size(share)}. "
            f"Use --num_processes {max(1, room)}, or a smaller --memory_limit"
        )
    if ranks == 1:
        return limit, []
    notes = ["processes share a device: what they exchange goes over gloo, which is slower than NCCL"]
    if limit is None:
        limit = int(USABLE_MEMORY_FRACTION * (total - ranks * context) / ranks)
        notes.append(f"memory_limit {size(limit)}: {ranks} processes share a device of {size(total)}")
    return limit, notes


NOT_COUNTED = (
    "Simulated: not in the peaks are workspaces of kernels and of NCCL, fragmentation, and what the driver takes for "
    "each process (on CUDA 640 MiB). Host memory is not limited"
)


def timed_precision(machine: TrialMachine, wanted: str) -> tuple[str, str]:
    """Return (the precision of timed updates on a machine, why it is not the wanted one: empty if it is)."""
    if wanted == "bf16" and machine.bf16_slowdown:
        return "fp32", f"bf16 products take {machine.bf16_slowdown:.0f} times as long on this CPU"
    if wanted == "fp16" and not machine.devices:
        return "fp32", "fp16 needs a GPU"
    return wanted, ""


def simulated_machine(device: str, num_processes: int) -> TrialMachine:
    """This machine with one simulated device a process: of a size such as 24GiB, or a GPU in the table of `zerofit
    plan`. Raises UserError: the size or the name is unknown, or there is no C++ compiler."""
    gpu = GPUS.get(device.lower())
    try:
        total = gpu.usable_bytes if gpu else parse_bytes(device)
    except ValueError:
        raise UserError(f"simulate = {device!r} is neither 24GiB nor one of {', '.join(GPUS)}") from None
    lacks = build.missing()
    if lacks:
        raise UserError(
            f"simulate = {device}: {lacks}. Install g++ and Python's headers (apt install g++ python3-dev)"
        )
    if not build.target().is_file():
        log_lines("the simulated device is being compiled, once for this version of torch: about a minute")
    return inspect_trial_machine(
        {
            **build.environment(build.build_device()),
            "SIMGPU_MEMORY": ",".join([str(total)] * num_processes),
            "SIMGPU_WITHOUT_DATA": "1",
            "SIMGPU_MODEL": f"simulated {gpu.name if gpu else f'device of {size(total)}'}",
            "SIMGPU_NAME": "npu",  # of the device's type: accelerate has a list of those that it lets train in fp16
        }
    )


def recipe_without_weights(values: dict[str, Any]) -> dict[str, Any]:
    """The recipe's options for a model of the same shape that reads no weights: they would hold no data."""
    name = values.get("model_name_or_path")
    if not name:
        return values
    of_weights = ("model_name_or_path", "ignore_mismatched_sizes", "resize_embeddings")
    tokenizer = name
    if is_adapter(name):  # its settings are in the recipe
        folder = open_adapter(name, "model_name_or_path")
        name = find_base(folder)[1]
        tokenizer = tokenizer if folder.has_tokenizer else name
    changed = {key: value for key, value in values.items() if key not in of_weights}
    if not any(changed.get(key) for key in ("tokenizer_name", "vocab_file", "train_tokenizer_vocab_size")):
        changed["tokenizer_name"] = tokenizer
    is_architecture = name.lower() in known_architectures() and not Path(name).is_dir()
    return {**changed, "config_name": name.lower() if is_architecture else name}


PROGRESS_S = 60.0  # without an answer, after which a line says that the launch is still at work
KERNEL_KILL_PATTERN = re.compile(
    r"^\s*cause +(the kernel's out-of-memory killer|killed, very likely because memory ran out)", re.M
)
KILLED_RANK_PATTERN = re.compile(r"exitcode\s*:\s*-(6|7|9|11)\b")
# The launcher itself; or a rank, as the launcher ends with its code: SIGABRT, SIGBUS, SIGKILL, SIGSEGV.
KILLED_EXIT_CODES = (-signal.SIGKILL, 134, 135, 137, 139)


def hash_values(**values: Any) -> str:
    """Return a short hash of the values that a trial was made with; equal values have the same hash."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def peak_bytes(line: dict[str, Any], name: str = "reserved") -> int:
    """The largest peak of any rank in a result of the journal, in bytes."""
    return max(rank[name] for rank in line["ranks"])


class Journal:
    """The journal of a comparison, journal.jsonl. Its lines have the kinds `prediction`, `launch` (a launch begins),
    `size` (the result of a launch: fits, out_of_memory or timed_out) and `end`."""

    def __init__(self, file: Path):
        self.file = file
        reader = LineReader(file)
        self.lines = reader.poll()
        reader.drop_rest()

    def add(self, kind: str, **line: Any) -> None:
        add_line(self.file, {"kind": kind, **line})
        self.lines.append({"kind": kind, **line})

    def lines_of(self, key: str, kind: str) -> list[dict[str, Any]]:
        """The lines of this kind with this key."""
        return [line for line in self.lines if line["kind"] == kind and line["key"] == key]

    def results(self, key: str, patience_s: float) -> dict[int, dict[str, Any]]:
        """{size: its latest result}; without those that timed out with less patience than this."""
        lines = [line for line in self.lines_of(key, "size") if line.get("patience_s", math.inf) >= patience_s]
        return {line["size"]: line for line in sorted(lines, key=lambda line: line["size"])}

    def begin(self, **about: Any) -> dict[str, Any]:
        """Write that a launch begins. Returns its number, its key and the mark of its processes."""
        number = sum(line["kind"] == "launch" for line in self.lines) + 1
        launch = {"launch": number, "mark": uuid.uuid4().hex, **about}
        self.add("launch", **launch)
        return launch

    def end(self, launch: dict[str, Any], how: str, seconds: float | None) -> None:
        self.add("end", launch=launch["launch"], key=launch["key"], how=how, seconds=seconds and round(seconds, 1))

    def end_interrupted_launches(self) -> int:
        """Kill the processes of launches that a killed comparison has left. Returns the number of such launches."""
        ended = {line["launch"] for line in self.lines if line["kind"] == "end"}
        unfinished = [line for line in self.lines if line["kind"] == "launch" and line["launch"] not in ended]
        for line in unfinished:
            kill_launch(line["mark"])
            self.end(line, "interrupted", None)
        return len(unfinished)


def run_trial(
    trial: LaunchedRun,
    num_processes: int,
    mark: str,
    request: dict[str, Any],
    environment: dict[str, str],
    *,
    patience_s: float,
) -> dict[str, Any]:
    """Launch a trial and follow it until its result is known.

    Args:
        trial: its output lies in the folder of the trial.
        request: steps and memory_limit, as the measured run reads them.
        patience_s: a launch without a new line for this long has timed out.

    Returns: `outcome` and what belongs to it. fits: what was measured. out_of_memory: `where` (device or host) and the
        `phase`. timed_out: patience_s. Else, with a `text` for the user: killed (SIGKILL or a crash, with no sign that
        memory ran out), refused (a mistake in the recipe), failed. All have `seconds_taken`.
    """
    folder = trial.output.parent
    shutil.rmtree(folder, ignore_errors=True)  # left by a comparison that was killed at this point
    folder.mkdir(parents=True)
    file = folder / "request.json"
    file.write_text(json.dumps(request) + "\n", encoding="utf-8")
    environment = {**environment, MEASURE_VARIABLE: str(file.absolute())}
    command = trial.command(num_processes)
    log = folder / "log.txt"
    with RunningLaunch(command, trial.output, log, mark=mark, environment=environment) as launch:
        result = _follow(launch, LineReader(folder / ANSWERS_FILE), patience_s)
        return {**result, "seconds_taken": launch.seconds}


def _follow(launch: RunningLaunch, answers: LineReader, patience_s: float) -> dict[str, Any]:
    begun = False
    answered_at = launch.seconds
    shown_at = launch.seconds
    while True:
        has_ended = launch.wait(launch.seconds + 0.1) == "ended"  # answers from before are read below
        for line in answers.poll():
            begun = True
            answered_at = launch.seconds
            shown_at = launch.seconds
            if (event := line.pop("event")) != "begins":
                return {"outcome": event, **line}
        if has_ended:
            return find_outcome(launch)
        if launch.seconds - shown_at > PROGRESS_S:
            shown_at = launch.seconds
            log_lines(f"  {'its updates' if begun else 'starts'}, for {duration(launch.seconds - answered_at)} now")
        if launch.seconds - answered_at > patience_s:
            if begun:
                return {"outcome": "timed_out", "patience_s": patience_s}
            early = f"no progress for {patience_s / 60:.3g} minutes, before the first batch"
            return {"outcome": "failed", "text": f"{early}. A larger --trial_minutes may help"}


def find_outcome(launch: RunningLaunch) -> dict[str, Any]:
    """Say why a launch has ended without an answer from its ranks, as run_trial returns it."""
    code = launch.exit_code
    text = launch.text
    if not code:
        return {"outcome": "failed", "text": "it ended without a result"}
    if refused := mistake(launch):
        return {"outcome": "refused", "text": refused}
    if where := "host" if KERNEL_KILL_PATTERN.search(text) else exhausted_memory_in(text):
        return {"outcome": "out_of_memory", "where": where}
    if code in KILLED_EXIT_CODES or KILLED_RANK_PATTERN.search(text):
        return {"outcome": "killed", "text": "a process was killed (SIGKILL), or crashed"}
    return {"outcome": "failed", "text": failure(launch, "ended") or ""}


if __name__ == "__main__":
    machine = inspect_machine()
    print(json.dumps({**asdict(machine), "environment": describe_environment([], torch.device(machine.kind))}))
