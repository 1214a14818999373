"""The trials of a comparison, and the machine that they run on, real or simulated
(zerofit/tools/simulate/csrc/without_data.h). A trial is an ordinary launch of the task at one batch size; an
environment variable makes it measure.

journal.jsonl has a line for each launch and each result; an interrupted comparison resumes from it. A trial's folder
has the request, the answers of the ranks (zerofit/training/measurement.py) and the output of the launch.

`python -m zerofit.tools.compare.trial` prints the machine's description. It is a process of its own, since a process
that uses a GPU through torch occupies half a GiB of its memory until it ends.
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
from zerofit.tools.runs import LaunchedRun, RunningLaunch, failure, kill_launch, mistake
from zerofit.tools.simulate import build
from zerofit.training.measurement import ANSWERS_FILE, MEASURE_VARIABLE

USABLE_MEMORY_FRACTION = 0.9  # part of a device's memory


@dataclass(frozen=True)
class TrialMachine(Machine):
    """The machine that the trials run on.

    Attributes:
        environment: versions, commit and hardware, for the report's provenance.
        simulated: environment variables that give a launch simulated devices; empty: devices are real.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    simulated: dict[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """The values by which the journal distinguishes machines."""
        return {
            "devices": [[device.name, device.total] for device in self.devices],
            "cpu": self.environment["hardware"].get("cpu"),
            "cores": self.environment["hardware"].get("cores"),
            "memory": self.memory,
            "packages": self.environment["packages"],
            **{name: value for name, value in self.simulated.items() if name.startswith("SIMGPU_")},
        }

    def describe(self) -> str:
        """Return the hardware in words."""
        hardware = self.environment["hardware"]
        names = Counter(device.name for device in self.devices)
        devices = [f"{number} x {name}" for name, number in sorted(names.items())]
        cpu = f"{hardware.get('cores')} cores of {hardware.get('cpu') or 'a CPU'}, {size(self.memory)}"
        return ", ".join([*devices, cpu])

    def variables(self, num_processes: int) -> dict[str, str]:
        """Return the environment variables of a launch: simulated devices, and the permission to share devices where
        there are fewer than processes."""
        shares = 0 < len(self.devices) < num_processes
        return {**self.simulated, **({SHARES_DEVICES: "1"} if shares else {})}


def inspect_trial_machine(simulated: dict[str, str] | None = None) -> TrialMachine:
    """Return a description of this machine, or of one with `simulated` devices. Raises RuntimeError: torch cannot be
    used."""
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
    """Return (bytes of its device that a rank may use; None: all, notes on that choice). Raises UserError: the ranks
    of a device together need more than it has."""
    ranks = -(-num_processes // len(machine.devices))
    total = min(device.total for device in machine.devices)
    if limit is None and machine.simulated:
        limit = total
    context = CUDA_CONTEXT_BYTES if machine.kind == "cuda" else 0
    share = (limit or 0) + context
    if ranks * share > total:
        max_processes = total // share * len(machine.devices)
        raise UserError(
            f"num_processes = {num_processes}: {ranks} share a device of {size(total)}, and each needs {size(share)}. "
            f"Use --num_processes {max(1, max_processes)}, or a smaller --memory_limit"
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
    """Return (the precision of timed updates on a machine, why it is not `wanted`; empty: it is)."""
    if wanted == "bf16" and machine.bf16_slowdown:
        return "fp32", f"bf16 products take {machine.bf16_slowdown:.0f} times as long on this CPU"
    if wanted == "fp16" and not machine.devices:
        return "fp32", "fp16 needs a GPU"
    return wanted, ""


def simulated_machine(device: str, num_processes: int) -> TrialMachine:
    """Return this machine with one simulated device per process. `device`: a size such as 24GiB, or a GPU in the table
    of `zerofit plan`. Raises UserError: the size or the name is unknown, or there is no C++ compiler."""
    gpu = GPUS.get(device.lower())
    try:
        total = gpu.usable_bytes if gpu else parse_bytes(device)
    except ValueError:
        raise UserError(f"simulate = {device!r} is neither 24GiB nor one of {', '.join(GPUS)}") from None
    missing = build.missing()
    if missing:
        raise UserError(
            f"simulate = {device}: {missing}. Install g++ and Python's headers (apt install g++ python3-dev)"
        )
    if not build.target().is_file():
        log_lines("the simulated device is being compiled, once for this version of torch: about a minute")
    return inspect_trial_machine(
        {
            **build.environment(build.build_device()),
            "SIMGPU_MEMORY": ",".join([str(total)] * num_processes),
            "SIMGPU_WITHOUT_DATA": "1",
            "SIMGPU_MODEL": f"simulated {gpu.name if gpu else f'device of {size(total)}'}",
            "SIMGPU_NAME": "npu",  # a device type that accelerate lets train in fp16
        }
    )


def recipe_without_weights(values: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe with a model of the same shape that loads no weights, since simulated devices hold no data."""
    name = values.get("model_name_or_path")
    if not name:
        return values
    weight_options = ("model_name_or_path", "ignore_mismatched_sizes", "resize_embeddings")
    tokenizer = name
    if is_adapter(name):  # the LoRA settings are in the recipe
        folder = open_adapter(name, "model_name_or_path")
        name = find_base(folder)[1]
        tokenizer = tokenizer if folder.has_tokenizer else name
    changed = {key: value for key, value in values.items() if key not in weight_options}
    if not any(changed.get(key) for key in ("tokenizer_name", "vocab_file", "train_tokenizer_vocab_size")):
        changed["tokenizer_name"] = tokenizer
    is_architecture = name.lower() in known_architectures() and not Path(name).is_dir()
    return {**changed, "config_name": name.lower() if is_architecture else name}


PROGRESS_S = 60.0  # without an answer for this long, a line says that the launch is still running
KERNEL_KILL_PATTERN = re.compile(
    r"^\s*cause +(the kernel's out-of-memory killer|killed, very likely because memory ran out)", re.M
)
KILLED_RANK_PATTERN = re.compile(r"exitcode\s*:\s*-(6|7|9|11)\b")
# Exit codes of a killed launcher, or of a rank, whose code the launcher takes: SIGABRT, SIGBUS, SIGKILL, SIGSEGV.
KILLED_EXIT_CODES = (-signal.SIGKILL, 134, 135, 137, 139)


def hash_values(**values: Any) -> str:
    """Return a short hash of the settings of a trial; equal settings have equal hashes."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def peak_bytes(line: dict[str, Any], name: str = "reserved") -> int:
    """Return the largest peak of any rank in a result line of the journal, in bytes. `name`: allocated, reserved or
    host."""
    return max(rank[name] for rank in line["ranks"])


class Journal:
    """The journal of a comparison, journal.jsonl. The kinds of its lines: `prediction`, `launch` (a launch begins),
    `size` (the result of a launch: fits, out_of_memory or timed_out) and `end` (a launch has ended)."""

    def __init__(self, file: Path):
        self.file = file
        reader = LineReader(file)
        self.lines = reader.poll()
        reader.drop_rest()

    def add(self, kind: str, **line: Any) -> None:
        """Append a line."""
        add_line(self.file, {"kind": kind, **line})
        self.lines.append({"kind": kind, **line})

    def lines_of(self, key: str, kind: str) -> list[dict[str, Any]]:
        """Return the lines of this kind with this key."""
        return [line for line in self.lines if line["kind"] == kind and line["key"] == key]

    def results(self, key: str, patience_s: float) -> dict[int, dict[str, Any]]:
        """Return {size: its latest result}, without results that timed out with less patience than `patience_s`."""
        lines = [line for line in self.lines_of(key, "size") if line.get("patience_s", math.inf) >= patience_s]
        return {line["size"]: line for line in sorted(lines, key=lambda line: line["size"])}

    def begin(self, **description: Any) -> dict[str, Any]:
        """Write that a launch begins. Returns the line, with the launch's number and the mark of its processes."""
        number = sum(line["kind"] == "launch" for line in self.lines) + 1
        launch = {"launch": number, "mark": uuid.uuid4().hex, **description}
        self.add("launch", **launch)
        return launch

    def end(self, launch: dict[str, Any], how: str, seconds: float | None) -> None:
        """Write that a launch has ended."""
        self.add("end", launch=launch["launch"], key=launch["key"], how=how, seconds=seconds and round(seconds, 1))

    def end_interrupted_launches(self) -> int:
        """Kill the processes that an interrupted comparison left running. Returns the number of their launches."""
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
        trial: the launch; the parent of its output folder is the folder of the trial.
        mark: marks the processes of the launch, so that a later comparison can kill them.
        request: {"steps", "memory_limit"} for zerofit/training/measurement.py.
        patience_s: a launch without a new line for this long has timed out.

    Returns: `outcome`, `seconds_taken`, and by outcome: fits: the measurements. out_of_memory: `where` (device or
    host)
        and `phase`. timed_out: `patience_s`. With a `text` for the user: killed (SIGKILL or a crash, with no sign that
        memory ran out), refused (a mistake in the recipe), failed.
    """
    folder = trial.output.parent
    shutil.rmtree(folder, ignore_errors=True)  # left by a comparison that was killed
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
    """Wait until the ranks answer, the launch ends, or it has shown nothing new for `patience_s`."""
    begun = False
    answered_at = launch.seconds
    shown_at = launch.seconds
    while True:
        has_ended = launch.wait(launch.seconds + 0.1) == "ended"  # then its last answers are read below
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
            reason = f"no progress for {patience_s / 60:.3g} minutes, before the first batch"
            return {"outcome": "failed", "text": f"{reason}. A larger --trial_minutes may help"}


def find_outcome(launch: RunningLaunch) -> dict[str, Any]:
    """Return why a launch ended without an answer from its ranks, in the form of run_trial."""
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
