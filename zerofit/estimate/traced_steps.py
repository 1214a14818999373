"""Builds the passes of the full model, or of a pipeline's stage, from a trace of few layers.

A stage of a pipeline has some of the layers (zerofit/model/stages.py); the first one also has the embedding, the last
one head and loss. Under 1F1B a stage keeps the activations of several micro-batches at once: `stages - number`, or all
of an update (deepspeed/runtime/pipe/schedule.py, TrainSchedule).

The module also has stand-ins for what a single process on a CPU lacks: other ranks, their experts, a GPU's casts,
host memory. As in a run, layers are split by model/tensor_parallel, rows by strategy/sequence.py, and experts by
strategy/expert_parallel.py; only the collectives exchange nothing, and the trace records their sizes. The number of
tokens for a rank's experts depends on the routers; here they are balanced.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import distributed

from zerofit.compat import replaced
from zerofit.compat.deepspeed import exchanging_heads_with
from zerofit.compat.torch import Ring
from zerofit.compat.transformers import exchanging_tokens_with
from zerofit.estimate.allocations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    REDUCE_SCATTER,
    ModuleVisit,
    Operation,
    TraceSegment,
)
from zerofit.estimate.weights import Weights, layer_number
from zerofit.model.families import StagePlan
from zerofit.model.tensor_parallel import TensorGroup
from zerofit.strategy import expert_parallel


class TracedStep(NamedTuple):
    """A traced segment in the passes of the full model. Sizes are in bytes, without completed gradients."""

    phase: str
    name: str
    place: tuple[str, int] | None  # (stack, number of the layer)
    start: int  # live bytes at its start
    rise: int  # bytes of the peak above the start
    end: int  # live bytes after it
    head: int  # the part of `start` that head and loss hold
    completed: str = ""  # the parameter of the full model whose gradient is completed at its end
    gradient: int = 0  # bytes of that gradient
    operations: tuple[Operation, ...] = ()
    visit: ModuleVisit | None = None  # the visit to a module at its start
    offloaded: int = 0  # bytes that are offloaded to the host
    blocks: tuple[int, ...] = ()  # allocated, and (negative) freed, in order


def repeat_layers(segments: list[TraceSegment], stacks: dict[str, int]) -> list[TracedStep]:
    """Return the passes of the full model, where the last traced layer of each stack is repeated. `stacks`: {name of
    a stack: number of its layers in the full model}."""
    steps = []
    live = 0
    head = 0
    backward = False
    traced: dict[str, int] = {}  # the last layer
    for _, *layer in (segment.name for segment in segments):
        if len(layer) == 2:
            traced[layer[0]] = max(layer[1], traced.get(layer[0], 0))
    trains = any(segment.name[0].startswith("backward") for segment in segments)
    runs = [list(run) for _, run in itertools.groupby(segments, key=lambda segment: segment.name)]
    for index, run in enumerate(runs):
        name, *layer = run[0].name
        backward = backward or name.startswith("backward")
        is_last_of_forward = not backward and (
            index + 1 == len(runs) or runs[index + 1][0].name[0].startswith("backward")
        )
        phase = "backward" if backward else ("loss" if is_last_of_forward else "forward")
        contents = [(tuple(segment.operations), tuple(segment.blocks)) for segment in run]
        places = _places(layer, traced, stacks, backward)
        for place in places:
            if not backward and place != places[0]:
                live -= sum(segment.offloaded for segment in run)  # the input of the previous layer has been freed
            before = live
            full_name = _renaming(layer, place)
            for segment, (computed, blocks) in zip(run, contents):
                end = live + segment.delta
                steps.append(
                    TracedStep(
                        phase,
                        name,
                        place,
                        live,
                        segment.rise,
                        end,
                        head,
                        full_name(segment.completed),
                        segment.gradient,
                        computed,
                        _rename_visit(segment.visit, full_name),
                        segment.offloaded,
                        blocks,
                    )
                )
                if is_last_of_forward or name == "backward of after":
                    head = max(0, head + segment.delta)
                live = end
            if not trains and place != places[-1]:  # only a backward pass needs the inputs of layers
                live = before
    return steps


def _places(
    layer: list[Any], traced: dict[str, int], stacks: dict[str, int], backward: bool
) -> list[tuple[str, int] | None]:
    """Return the layers of the full model that a traced layer stands for, in the order of the pass."""
    if len(layer) < 2:
        return [None]
    stack, index = layer
    if index < traced[stack]:
        return [(stack, index)]
    numbers = range(index, stacks[stack])
    return [(stack, number) for number in (reversed(numbers) if backward else numbers)]


def _renaming(layer: list[Any], place: tuple[str, int] | None) -> Callable[[str], str]:
    """Return a function: name in the traced model -> name in the full model, for the layer at `place`."""
    if place is None or place[1] == layer[1]:
        return str
    traced = f"{place[0]}.{layer[1]}."
    full = f"{place[0]}.{place[1]}."
    return lambda name: full + name[len(traced) :] if name.startswith(traced) else name


def _rename_visit(visit: ModuleVisit | None, full_name: Callable[[str], str]) -> ModuleVisit | None:
    if visit is None or full_name is str:
        return visit
    module, enters, forward, *weights = visit
    renamed = (tuple(map(full_name, names)) for names in weights)
    return ModuleVisit(full_name(f"{module}.")[:-1], enters, forward, *renamed)


def extrapolate_steps(
    first: list[TracedStep], first_size: int, second: list[TracedStep], second_size: int, batch_size: int
) -> list[TracedStep]:
    """Return the steps of a larger batch, extrapolated linearly from those of two smaller batches."""
    factor = (batch_size - second_size) / (second_size - first_size)

    def extrapolate(small: int, large: int) -> int:
        return round(large + factor * (large - small))

    return [
        b._replace(
            start=extrapolate(a.start, b.start),
            rise=extrapolate(a.rise, b.rise),
            end=extrapolate(a.end, b.end),
            head=extrapolate(a.head, b.head),
            offloaded=extrapolate(a.offloaded, b.offloaded),
            blocks=tuple(map(extrapolate, a.blocks, b.blocks)),
        )
        for a, b in zip(first, second, strict=True)
    ]


@dataclass(frozen=True)
class Stage:
    """One of `stages` stages of a pipeline; it has `layers` layers."""

    number: int
    stages: int
    layers: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.stages - 1

    def in_flight(self, micro_batches: int) -> int:
        """Return the maximum number of micro-batches between their forward and their backward pass."""
        return min(micro_batches, self.stages - self.number)


WHOLE_MODEL = Stage(0, 1, 0)  # no pipeline


def weights_of_stage(weights: Weights, stage: Stage, plan: StagePlan, body: str) -> Weights:
    """Return the weights of a stage, with the names of the model's first layers. `body`: name of the model's body."""
    stack = f"{body}.{plan.layers}"
    before = tuple(f"{body}.{name}." for name in plan.before)
    is_tied = not weights.head

    def belongs(name: str) -> bool:
        if name.startswith(f"{stack}."):
            return layer_number(name, stack) < stage.layers
        if name.startswith(before):
            return stage.is_first or (stage.is_last and is_tied and name.startswith(before[0]))
        return stage.is_last

    return replace(weights, all=tuple(weight for weight in weights.all if belongs(weight.name)))


def steps_of_stage(
    steps: list[TracedStep], stage: Stage, weights: Weights, hidden: int, width: int, *, embedded: int = 0
) -> list[TracedStep]:
    """Return the passes of a micro-batch through a stage.

    The received hidden states replace the embedding's output, and the tensors computed from positions and masks.

    Args:
        steps: passes of a model with the stage's layers, embedding, head and loss.
        weights: weights of the stage.
        hidden: bytes of the hidden states that stages exchange.
        width: bytes of an element of a gradient.
        embedded: bytes of the embedding's output, if layers keep parts of it: the model's code holds it until its
            forward pass ends.
    """
    stage_steps: list[TracedStep] = []
    live = 0
    first_place: tuple[str, int] | tuple[()] | None = None  # (): the pass has left the first layer
    for index, step in enumerate(steps):
        in_head = step.phase == "loss" or step.name == "backward of after"
        if (in_head and not stage.is_last) or (step.name == "backward of before" and not stage.is_first):
            continue
        if step.phase == "backward" and not stage.is_last:
            if first_place is None:
                live = live - embedded
                first_place = step.place
            elif first_place and step.place != first_place:  # the received gradient stays in its buffer
                live = live + hidden
                first_place = ()
        operations = step.operations
        completed = step.completed
        gradient = step.gradient
        if step.name == "before" and not stage.is_first:
            operations = tuple(operation for operation in operations if operation.kind not in COLLECTIVES)
        delta = step.end - step.start
        is_run_end = index + 1 == len(steps) or steps[index + 1].name != step.name
        if stage.is_last and step.name == "backward of after" and is_run_end and not completed:
            # The weight that head and embedding share: nothing else adds to its gradient in this stage.
            completed_last = (other.completed for other in steps if other.name == "backward of before")
            tied = next((name for name in completed_last if name in weights.sizes), "")
            if tied:
                completed = tied
                gradient = width * weights.sizes[tied]
                delta -= gradient
        if completed and completed not in weights.sizes:
            completed = ""
            gradient = 0
        stage_steps.append(
            step._replace(
                start=live,
                end=live + delta,
                operations=operations,
                completed=completed,
                gradient=gradient,
                head=step.head if stage.is_last else 0,
            )
        )
        live += delta
    return stage_steps


@dataclass(frozen=True)
class FakeGroup:
    """Stands for a process group."""

    size: int
    group_name: str = "plan"


class FakeCollectives:
    """Replaces torch.distributed and deepspeed.comm for ranks that share layers or rows.

    Args:
        note: is called with each collective, as an operation.
        size: number of ranks in the group.
    """

    ReduceOp = distributed.ReduceOp
    ProcessGroup = FakeGroup
    AsyncCollectiveTensor = type("AsyncCollectiveTensor", (), {})  # no tensor here is of this type

    def __init__(self, note: Callable[[Operation], None], size: int):
        self.note = note
        self.size = size

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
        self._noted(ALL_REDUCE, tensor, tensor.nbytes)

    def all_gather(self, parts: list[torch.Tensor], local: torch.Tensor, group: Any = None) -> None:
        self._noted(ALL_GATHER, local, sum(part.nbytes for part in parts))

    def all_gather_into_tensor(self, full: torch.Tensor, local: torch.Tensor, group: Any = None) -> None:
        self._noted(ALL_GATHER, local, full.nbytes)

    def reduce_scatter_tensor(self, local: torch.Tensor, full: torch.Tensor, group: Any = None) -> None:
        self._noted(REDUCE_SCATTER, local, full.nbytes)

    def permute_tensor(self, tensor: torch.Tensor, destinations: list[int], group: Any) -> torch.Tensor:
        self._noted(ALL_TO_ALL, tensor, tensor.nbytes)
        return tensor.clone()

    def get_world_size(self, group: Any = None) -> int:
        return self.size

    def get_rank(self, group: Any = None) -> int:
        return 0

    def _noted(self, kind: str, tensor: torch.Tensor, size: int) -> None:
        self.note(Operation(kind, tensor.is_floating_point() and tensor.itemsize < 4, 0, size))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context in which these collectives replace the real ones."""
        from zerofit.model import tensor_parallel

        if self.size == 1:
            yield
            return
        with contextlib.ExitStack() as replacements:
            replacements.enter_context(replaced(tensor_parallel, "distributed", self))
            for replacement in (Ring.communicating_with, exchanging_heads_with):
                with contextlib.suppress(ImportError):
                    replacements.enter_context(replacement(self))
            yield


def split_layers(model: Any, size: int) -> None:
    """Keep one rank's share of the layers: the last rank's, which has the largest part of an uneven vocabulary."""
    if size > 1:
        from zerofit.model.tensor_parallel import split_model

        split_model(model, TensorGroup(FakeGroup(size), size - 1, size))


@contextlib.contextmanager
def rows_split(model: torch.nn.Module, size: int) -> Iterator[None]:
    """Return a context in which a model with an installed loss computes one rank's part of its rows."""
    if size == 1:
        yield
        return
    from zerofit.strategy import sequence
    from zerofit.strategy.layout import ParallelLayout

    class Groups:
        get_sequence_parallel_group = staticmethod(lambda: FakeGroup(size))

    with replaced(sequence, "sequence_groups", lambda layout: Groups):
        with contextlib.closing(sequence.SplitRows(model, ParallelLayout(size, sequence=size))):
            yield


@dataclass(frozen=True)
class FakeMesh:
    """Stands for a device mesh of one dimension."""

    ranks: int
    device_type: str = "cpu"

    def size(self) -> int:
        return self.ranks

    def get_group(self) -> list[int]:
        return list(range(self.ranks))


def expert_names(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the experts' parameters, which ranks divide."""
    divided = {id(parameter) for module in expert_parallel.find_experts(model) for parameter in module.parameters()}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in divided)


def divide_experts(model: torch.nn.Module, ranks: int, dtype: torch.dtype) -> None:
    """Keep one rank's experts, and exchange tokens with the other ranks.

    Args:
        ranks: number of ranks that divide the experts; 0: they are not divided.
        dtype: dtype of the matrix products. Trained experts are stored in fp32, as the optimizer needs them.
    """
    if not ranks:
        return
    from transformers.distributed import expert_parallel as library

    class Balanced(library.AllToAllEP):
        """The exchange of tokens, with sizes that are known in advance: fake tensors have no values."""

        def __init__(self, experts: Any, mesh: FakeMesh, alone: FakeMesh) -> None:  # in no process group
            self.experts_forward = experts.forward
            self.num_local_experts = experts.num_experts
            self.ep_mesh: Any = mesh
            self.tp_mesh: Any = alone
            self.shares_batch = False

        def __call__(self, hidden_states: Any, top_k_index: torch.Tensor, top_k_weights: Any) -> Any:
            total = top_k_index.numel()  # it is divided into parts that differ by at most one
            with KnownItems([len(range(part, total, ranks)) for part in range(ranks)]):
                return super().__call__(hidden_states, top_k_index, top_k_weights)

    half = None if dtype == torch.float32 else dtype
    for module in expert_parallel.find_experts(model):
        for name, full in list(module.named_parameters(recurse=False)):
            stored = torch.float32 if full.requires_grad else full.dtype
            local = torch.empty(len(full) // ranks, *full.shape[1:], dtype=stored, device=full.device)
            setattr(module, name, torch.nn.Parameter(local, full.requires_grad))
        expert_parallel.dispatch(module, FakeMesh(ranks), FakeMesh(1), half, Balanced)


@contextlib.contextmanager
def tokens_exchanged(ranks: int, note: Callable[[Operation], None]) -> Iterator[None]:
    """Return a context in which a model with divided experts computes one rank's part. `note`: is called with each
    collective, as an operation."""
    if not ranks:
        yield
        return

    def exchanged(rows: torch.Tensor, received: list[int]) -> torch.Tensor:
        note(Operation(ALL_TO_ALL, rows.is_floating_point() and rows.itemsize < 4, 0, rows.nbytes))
        return rows.contiguous().new_empty(sum(received), *rows.shape[1:])

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
            ctx.sent = sent
            return exchanged(rows, received)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            return exchanged(gradient, ctx.sent), None, None

    def all_to_all(rows: torch.Tensor, received: list[int], sent: list[int], group: Any) -> torch.Tensor:
        return Exchange.apply(rows, received, sent)

    def all_to_all_of_counts(received: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
        exchanged(sent, [len(sent)])

    # Like to_local, a view has its backward after that of the whole module, and gradients wait for it.
    viewed = replaced(expert_parallel, "local_experts", lambda parameter: parameter.view_as(parameter))
    with viewed, exchanging_tokens_with(all_to_all_of_counts, all_to_all):
        yield


class KnownItems(torch.overrides.TorchFunctionMode):
    """Makes Tensor.item return the given numbers in turn, since fake tensors have no values."""

    def __init__(self, values: list[int]):
        super().__init__()
        self.values = itertools.cycle(values)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(self.values) if function is torch.Tensor.item else function(*args, **(kwargs or {}))


class CudaCasts(torch.overrides.TorchFunctionMode):
    """Casts to fp32 the inputs that autocast casts only on a GPU (torch/amp, "Ops that autocast to float32")."""

    FUNCTIONS = ("layer_norm", "softmax", "log_softmax", "pow", "rms_norm", "group_norm", "cumsum", "sum", "norm")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in self.FUNCTIONS and torch.is_autocast_enabled("cpu"):
            args = [_widened(value) for value in args]
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


class _FusedNorm(torch.autograd.Function):
    """A stand-in for a GPU's RMSNorm kernel: its operations read, write and keep the same number of bytes."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32))
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, _, _ = ctx.saved_tensors
        return gradient * hidden, gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None


def fused_norm(hidden: torch.Tensor, shape: Any, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return a result like that of torch.nn.functional.rms_norm on a GPU, with the same memory."""
    return _FusedNorm.apply(hidden, weight)


def loss_of_chunk(logits: torch.Tensor, target: Any, gradient: torch.Tensor, *terms: float) -> torch.Tensor:
    """Replace the compiled loss of a chunk (chunked_loss.py): logits are read twice, their gradient is written."""
    gradient.copy_(logits)
    return logits.amax(-1)


def _widened(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


class FakeHostStore:
    """A stand-in for host memory: saved tensors leave the device at once. `offloaded` is called with the bytes of each
    tensor."""

    def __init__(self) -> None:
        self.offloaded: Callable[[int], None] = lambda size: None

    def saved(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        self.offloaded(tensor.nbytes)
        return tensor.size(), tensor.stride(), tensor.dtype, tensor.device

    def _unpack(self, packed: tuple[Any, ...]) -> torch.Tensor:
        size, stride, dtype, device = packed
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


class LinearOfZero3(torch.overrides.TorchFunctionMode):
    """Makes linear layers compute as under deepspeed.zero.Init (memory_efficient_linear)."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from deepspeed.runtime.zero.linear import zero3_linear_wrap

        function = zero3_linear_wrap if function is torch.nn.functional.linear else function
        return function(*args, **(kwargs or {}))
