"""Whether what a run needs is on a machine. Nothing is asked of this machine here: tests make machines up."""

from collections.abc import Mapping
from dataclasses import dataclass

from zerofit.estimate.memory_constants import PROGRAM_BYTES
from zerofit.recipe.words import counted
from zerofit.record.terminal import size
from zerofit.strategy.gpu_table import NO_PEAK, gpu_of
from zerofit.strategy.gpus import ALSO_VISIBLE, NO_DEVICE, VISIBLE
from zerofit.tools.doctor.installation import IMPOSSIBLE, TO_COMPILE, Folder, Installation
from zerofit.tools.doctor.report import ERROR, NOTE, WARNING, Finding

SMALL_SHM = 512 * 2**20  # ds_report's limit
FULL_DISK = 2**30
NO_MEMORY_FREE = 0.9
LIBAIO = "Install libaio's headers (apt install libaio-dev)"


@dataclass(frozen=True)
class Needs:
    """What a run asks of this machine. Sizes are in bytes; None: not known.

    Attributes:
        processes: on this machine.
        precision: None: nothing says.
        visible: devices that the launcher leaves to the run; None: all.
        operations: of DeepSpeed, that the strategy uses.
        state_bytes: weights, gradients and optimizer state of one process on its device.
        host_bytes: of all processes of this machine.
        checkpoint_bytes: of one checkpoint; None too where none is saved.
        examined: a run was looked at; else only the machine.
    """

    processes: int = 1
    num_machines: int = 1
    precision: str | None = None
    deepspeed: bool = False
    visible: int | None = None
    operations: tuple[str, ...] = ()
    state_bytes: int | None = None
    host_bytes: int | None = None
    checkpoint_bytes: int | None = None
    examined: bool = True


def judge(machine: Installation, needs: Needs, variables: Mapping[str, str]) -> list[Finding]:
    """What is wrong.

    Args:
        variables: the environment of a process.
    """
    return [
        *_devices(machine, needs, variables),
        *_deepspeed(machine, needs),
        *_memory(machine, needs),
        *_folders(machine, needs),
        *_variables(variables),
    ]


def _devices(machine: Installation, needs: Needs, variables: Mapping[str, str]) -> list[Finding]:
    findings, there = [], len(machine.devices)
    for maker, count in machine.present.items():
        hiding = [name for name in (VISIBLE[maker], *ALSO_VISIBLE[maker]) if variables.get(name) in NO_DEVICE]
        if hiding and not there:
            findings.append(Finding(
                WARNING, f"{hiding[0]} = {variables[hiding[0]]!r} hides the machine's {count} {maker} "
                f"GPU{'s' if count > 1 else ''}: a run is on the CPU", f"unset {hiding[0]}"))  # fmt: skip
    usable = min(there, needs.visible) if needs.visible is not None else there
    if there and needs.examined and needs.processes > usable:
        findings.append(Finding(
            ERROR, f"{counted(needs.processes, 'process')} on this machine, which has {counted(usable, 'device')}",
            f"Use --num_processes {usable * needs.num_machines}"))  # fmt: skip
    if there and needs.examined and needs.processes < usable:
        findings.append(Finding(
            NOTE, f"this machine has {usable} devices, and the run uses {needs.processes}",
            f"--num_processes {usable * needs.num_machines} uses all of them"))  # fmt: skip
    if not there and needs.processes > machine.cores:
        findings.append(Finding(
            WARNING, f"{counted(needs.processes, 'process')} oversubscribe {counted(machine.cores, 'core')}",
            f"Use --num_processes {machine.cores * needs.num_machines} or less"))  # fmt: skip
    without = sorted({device.name for device in machine.devices if device.has_bf16 is False})
    if needs.precision == "bf16" and without:
        findings.append(Finding(
            WARNING, f"precision = bf16, and a {', a '.join(without)} does not compute in it: torch emulates it, "
            "slowly", "Use --precision fp16"))  # fmt: skip
    findings += [
        Finding(NOTE, NO_PEAK.format(name), "--peak_tflops gives it, and MFU is reported")
        for name in sorted({device.name for device in machine.devices if not gpu_of(device.name)})
    ]
    if needs.precision == "bf16" and machine.bf16_slowdown:
        findings.append(Finding(
            WARNING, f"precision = bf16: its products take {machine.bf16_slowdown:.0f} times as long as fp32 on this "
            "CPU", "Use --precision fp32"))  # fmt: skip
    for number, device in enumerate(machine.devices):
        if device.free < NO_MEMORY_FREE * device.total:
            findings.append(Finding(
                WARNING, f"device {number} ({device.name}): {size(device.total - device.free)} of "
                f"{size(device.total)} are in use by other programs", "nvidia-smi (rocm-smi) shows them"))  # fmt: skip
    largest = min((device.total for device in machine.devices), default=None)
    if needs.state_bytes and largest and needs.state_bytes > largest:
        findings.append(Finding(
            ERROR, f"weights, gradients and optimizer state take {size(needs.state_bytes)} of each device, which has "
            f"{size(largest)}", "Use more devices, or a strategy that shards or offloads more: zerofit plan "
            "--gpu_memory SIZE shows which fit"))  # fmt: skip
    return findings


def _deepspeed(machine: Installation, needs: Needs) -> list[Finding]:
    """DeepSpeed itself, and what it compiles when it is needed first."""
    if machine.deepspeed_problem:
        level = ERROR if needs.deepspeed else WARNING
        return [Finding(level, f"DeepSpeed cannot be imported: {machine.deepspeed_problem}",
                        "make setup, or use --strategy ddp")]  # fmt: skip
    level = ERROR if needs.examined else WARNING
    needed = needs.operations if needs.examined else tuple(machine.operations)
    missing = [name for name in needed if machine.operations.get(name) == IMPOSSIBLE] if needs.examined else []
    findings = [Finding(ERROR, f"DeepSpeed has no {name} for this machine",
                        LIBAIO + _or_without([name]) if name == "async_io" else _without(name))
                for name in missing]  # fmt: skip
    compiled = [name for name in needed if machine.operations.get(name) == TO_COMPILE]
    names = " and ".join(compiled)
    if compiled and not machine.ninja:
        findings.append(Finding(
            level, f"ninja is not on PATH, and DeepSpeed compiles {names} with it at the first run",
            "pip install ninja, and activate the environment that has it (zerofit launch does)"))  # fmt: skip
    if compiled and not machine.compiler:
        findings.append(Finding(
            level, f"there is no C++ compiler (c++, or CXX), and DeepSpeed compiles {names} at the first run",
            f"Install g++ 9 or newer (apt install g++, module load gcc){_or_without(compiled)}"))  # fmt: skip
    with_toolkit = [name for name in compiled if name in ("fused_adam", "async_io")]
    if with_toolkit and machine.kind == "cuda" and machine.cuda_toolkit == "not found":
        findings.append(Finding(
            level, f"there is no CUDA toolkit (nvcc), and DeepSpeed compiles {' and '.join(with_toolkit)} with it at "
            "the first run", f"Install it and set CUDA_HOME{_or_without(with_toolkit)}"))  # fmt: skip
    if compiled and needs.examined and not findings:
        findings.append(Finding(NOTE, f"DeepSpeed compiles {names} at the first run: up to two minutes, once for this "
                             "machine"))  # fmt: skip
    findings += [Finding(WARNING, f"{lock} was left by a build that was killed", f"rm {lock} (a run removes it too)")
              for lock in machine.locks]  # fmt: skip
    return findings


def _without(name: str) -> str:
    """How to do without an operation of DeepSpeed."""
    if name == "async_io":
        return "Use --strategy zero3_offload"
    return (
        'Write "torch_adam": true in optimizer.params of the JSON' if name.endswith("adam") else "Use --strategy ddp"
    )


def _or_without(names: list[str]) -> str:
    return f"; or {_without(names[0])[0].lower()}{_without(names[0])[1:]}" if len(names) == 1 else ""


def _memory(machine: Installation, needs: Needs) -> list[Finding]:
    findings, several = [], needs.processes > 1
    if machine.shm is not None and machine.shm < SMALL_SHM and (machine.devices or several):
        findings.append(Finding(
            WARNING, f"/dev/shm has {size(machine.shm)}: processes that exchange data through it (NCCL, data loaders, "
            "DeepSpeed on a CPU) may die with a bus error",
            "Start the container with --shm-size=1g or more"))  # fmt: skip
    program = needs.processes * PROGRAM_BYTES
    total = program + (needs.host_bytes or 0)
    if not needs.examined or total <= machine.memory_free:
        return findings
    parts = f"about {size(total)} of host memory: {size(program)} for {counted(needs.processes, 'process')}" + (
        f", {size(needs.host_bytes)} for the state that they keep there" if needs.host_bytes else "")  # fmt: skip
    if total > machine.memory:
        findings.append(Finding(
            ERROR, f"the run takes {parts}; this machine has {size(machine.memory)}",
            "Offload less (zero3 offloads nothing), or use more machines" if machine.devices else
            "Use fewer processes, a smaller model, or another machine"))  # fmt: skip
    else:
        findings.append(Finding(WARNING, f"the run takes {parts}; {size(machine.memory_free)} are free now",
                             "End other programs, or use fewer processes"))  # fmt: skip
    return findings


def _folders(machine: Installation, needs: Needs) -> list[Finding]:
    findings = []
    for folder in machine.folders:
        is_output = folder.what == "output"
        if folder.problem and not is_output:  # of that, the recipe's own check tells
            findings.append(Finding(ERROR if needs.examined else WARNING,
                                 f"{folder.path} ({folder.what}) {folder.problem}", _elsewhere(folder)))  # fmt: skip
        elif folder.free < FULL_DISK:
            findings.append(Finding(WARNING, f"{folder.path} ({folder.what}): the disk is full but for "
                                 f"{size(folder.free)}", f"Make room. {_elsewhere(folder)}"))  # fmt: skip
        elif is_output and needs.checkpoint_bytes and folder.free < 2 * needs.checkpoint_bytes:
            fits = folder.free >= needs.checkpoint_bytes
            findings.append(Finding(
                WARNING if fits else ERROR, f"{folder.path} has {size(folder.free)} free, and a checkpoint takes "
                f"{size(needs.checkpoint_bytes)}{': the second has no room' if fits else ''}",
                f"Make room. {_elsewhere(folder)}"))  # fmt: skip
        if is_output and needs.num_machines > 1 and not folder.shared:
            findings.append(Finding(
                WARNING, f"{folder.path} seems to be on a disk of this machine alone, and there are "
                f"{needs.num_machines} machines", "output_dir must be on a file system that all machines "
                "share"))  # fmt: skip
    return findings


def _elsewhere(folder: Folder) -> str:
    return f"Name another folder with {folder.option}"


def _variables(variables: Mapping[str, str]) -> list[Finding]:
    """Variables of debugging that somebody has forgotten."""
    slow = {
        "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
        "TORCH_DISTRIBUTED_DEBUG": "every collective is checked",
        "NCCL_P2P_DISABLE": "GPUs exchange data through the host",
    }
    return [Finding(WARNING, f"{name} = {variables[name]}: {why}, which is slow", f"unset {name}")
            for name, why in slow.items() if variables.get(name, "") not in ("", "0", "OFF", "INFO")]  # fmt: skip
