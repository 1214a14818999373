"""Simulated devices for `zerofit compare --simulate`: real launches on devices that hold no data.

Floating-point tensors are address space that is never touched, and their kernels are skipped (shapes come from torch's
meta kernels); integers and masks are real; collectives of floating-point tensors move nothing; the allocator counts
and refuses as a GPU's does (zerofit/tools/simulate/csrc/without_data.h).
"""

from dataclasses import dataclass
from pathlib import Path

from zerofit.model.configuration import known_architectures
from zerofit.recipe.errors import UserError, nearest
from zerofit.record.terminal import say, size
from zerofit.strategy.gpu_table import GPUS
from zerofit.tools.compare.trial_machine import TrialMachine, inspect_trial_machine
from zerofit.tools.simulate import build
from zerofit.tools.tool_recipe import parse_bytes

NOT_COUNTED = (
    "Simulated: the launches and the allocator's figures are real, the devices are not. Not in the peaks: workspaces "
    "of kernels and of NCCL, fragmentation, and what the driver takes for each process (on CUDA about half a GiB). "
    "Host memory is not limited"
)
NAME = "npu"  # of the device's type, for accelerate has a list of those that it lets train in fp16


@dataclass(frozen=True)
class Timer:
    """The real machine, which times what simulated devices hold."""

    machine: TrialMachine

    def precision(self, wanted: str) -> tuple[str, str]:
        """(the precision of timed updates, why it is not the wanted one: empty if it is)."""
        if wanted == "bf16" and self.machine.bf16_slowdown:
            return "fp32", f"bf16 products take {self.machine.bf16_slowdown:.0f} times as long on this CPU"
        if wanted == "fp16" and not self.machine.devices:
            return "fp32", "fp16 needs a GPU"
        return wanted, ""

    def note(self, wanted: str) -> str:
        """Where updates are timed, and in which precision: a sentence."""
        precision, why = self.precision(wanted)
        return f"Timed on {self.machine.describe()} without a memory limit, in {precision}{', for ' * bool(why)}{why}"


def simulated_machine(device: str, num_processes: int) -> TrialMachine:
    """This machine with one simulated device a process.

    Args:
        device: its size, such as 24GiB, or the name of a GPU in the table of `zerofit plan`.

    Raises:
        UserError: the size or the name is unknown, or there is no C++ compiler.
    """
    total, model = _device(device)
    lacks = build.missing()
    if lacks:
        raise UserError(
            f"simulate = {device}: {lacks}, and the simulated device has to be compiled once. Install a C++ compiler "
            "and Python's headers (on Debian and Ubuntu: apt install g++ python3-dev)"
        )
    if not build.target().is_file():
        say("the simulated device is being compiled, once for this version of torch: about a minute")
    return inspect_trial_machine(
        {
            **build.environment(build.build()),
            "SIMGPU_MEMORY": ",".join([str(total)] * num_processes),
            "SIMGPU_WITHOUT_DATA": "1",
            "SIMGPU_MODEL": model,
            "SIMGPU_NAME": NAME,
        }
    )


def _device(text: str) -> tuple[int, str]:
    """(bytes, what the device calls itself)."""
    gpu = GPUS.get(text.lower())
    if gpu is not None:
        return gpu.usable_bytes, f"simulated {gpu.name}"
    try:
        total = parse_bytes(text)
    except ValueError:
        close = nearest(text.lower(), GPUS)
        suggestion = f"Did you mean {close}? " if close else ""
        raise UserError(
            f"simulate = {text!r} is neither a size such as 24GiB nor a known GPU. {suggestion}Known are "
            f"{', '.join(GPUS)}"
        ) from None
    return total, f"simulated device of {size(total)}"


def without_weights(values: dict) -> dict:
    """The recipe's options for a model of the same shape that reads no weights: they would hold no data."""
    name = values.get("model_name_or_path")
    if not name:
        return values
    of_weights = ("model_name_or_path", "ignore_mismatched_sizes")
    changed = {key: value for key, value in values.items() if key not in of_weights}
    if not any(changed.get(key) for key in ("tokenizer_name", "vocab_file", "train_tokenizer_vocab_size")):
        changed["tokenizer_name"] = name
    known = name.lower() in known_architectures() and not Path(name).is_dir()
    return {**changed, "config_name": name.lower() if known else name}
