"""The predicted peak of a strategy: the largest of the moments of an update, with its parts and its phase."""

from collections.abc import Iterator
from dataclasses import dataclass

from train.tools.plan.constants import (
    CPU_DEEPSPEED_BYTES,
    CPU_PROGRAM_BYTES,
    CUBLAS_WORKSPACE_BYTES,
    CUDA_CONTEXT_BYTES,
    FRAGMENTATION,
    NCCL_BYTES,
)
from train.tools.plan.states import States
from train.tools.plan.trace import Step

ACTIVATIONS, HEAD, WORKSPACE = "activations", "head and loss", "workspace"


@dataclass(frozen=True)
class Moment:
    """A moment of an update, and what is on the device then."""

    phase: str
    components: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True)
class Peak:
    """A predicted peak of one process.

    Attributes:
        allocated: as torch.cuda.max_memory_allocated; on a CPU, what a process takes beyond what it took before the
            model.
        reserved: as torch.cuda.max_memory_reserved.
        device: as the driver shows it: with context and communication buffers.
        host: of one process, beside the program itself.
    """

    phase: str
    components: dict[str, int]
    allocated: int
    reserved: int
    device: int
    host: int


def find_peak(
    states: States,
    training: list[Step],
    evaluation: list[Step],
    accumulation: int,
    world_size: int,
    on_gpu: bool,
    with_deepspeed: bool = False,
) -> Peak:
    """The peak over all moments.

    Args:
        training: the forward and backward pass of a micro-batch.
        evaluation: the forward pass of an evaluation batch; empty where nothing is evaluated.
    """
    moments = [*_moments(states, training, evaluation, accumulation)]
    host = sum(states.host.values())
    if not on_gpu:  # offloaded states lie in the same memory
        program = CPU_PROGRAM_BYTES + (CPU_DEEPSPEED_BYTES if with_deepspeed else 0)
        beside = {"offloaded": host, "program": program}
        moments = [Moment(one.phase, one.components | beside) for one in moments]
    largest = max(moments, key=lambda moment: moment.total)
    components = {name: size for name, size in largest.components.items() if size}
    if not on_gpu:
        return Peak(largest.phase, components, largest.total, largest.total, largest.total, host)
    allocated = largest.total + CUBLAS_WORKSPACE_BYTES
    components[WORKSPACE] = components.get(WORKSPACE, 0) + CUBLAS_WORKSPACE_BYTES
    reserved = int(allocated * (1 + FRAGMENTATION))
    context = CUDA_CONTEXT_BYTES + (NCCL_BYTES if world_size > 1 else 0)
    return Peak(largest.phase, components, allocated, reserved, reserved + context, host)


def _moments(states: States, training: list[Step], evaluation: list[Step], accumulation: int) -> Iterator[Moment]:
    held = {"weights": states.weights, "optimizer": states.optimizer, "buffers": states.buffers}
    yield Moment("start", {"weights": states.load})
    yield Moment("optimizer step", _sum(held, states.step))
    held["gathered weights"] = states.gathered
    for step in training:
        yield _pass(held, states, step, states.gradients, states.keeps_first)
        if accumulation > 1:
            yield _pass(held, states, step, states.gradients_later, False)
    for step in evaluation:
        parts = {"gradients": states.gradients, ACTIVATIONS: step.start, WORKSPACE: step.rise}
        yield Moment("evaluation", _sum(held, parts))


def _pass(held: dict[str, int], states: States, step: Step, gradients: int, keeps: bool) -> Moment:
    backward = states.backward if step.phase == "backward" else {}
    parts = {
        "gradients": gradients + (step.earlier_gradients if keeps else 0),
        ACTIVATIONS: max(0, step.start - step.head),
        HEAD: step.head,
    }
    rise = step.rise_kept if keeps else step.rise
    parts[HEAD if step.phase == "loss" else WORKSPACE] = parts.get(HEAD, 0) + rise if step.phase == "loss" else rise
    return Moment(step.phase, _sum(held, parts, backward))


def _sum(*parts: dict[str, int]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, size in part.items():
            total[name] = total.get(name, 0) + size
    return total
