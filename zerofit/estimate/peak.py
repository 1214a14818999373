"""Predicts the peak memory of a strategy, the largest of the moments of an update, with its parts and its phase; and
the size of the key-value cache when texts are generated for an evaluation batch."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerofit.estimate.allocations import UnusedBytes
from zerofit.estimate.model_states import GradientMemory, ModelStates
from zerofit.estimate.traced_steps import TracedStep

# Sizes that no configuration and no trace gives, each with its source. None is fitted to a published table.

# Memory that the driver holds for a process in addition to torch's allocator, outside its limit: the CUDA context and
# the libraries' code. Source: 287 MB at first, and 667 MB with all of torch's kernels loaded (pytorch/pytorch#86509).
CUDA_CONTEXT_BYTES = 640 * 2**20

# Buffers of an NCCL communicator, in each process of a group of several. Source: NCCL's documentation of
# NCCL_BUFFSIZE (4 MiB for each channel and peer; rings of 16 to 32 channels, send and receive). An estimate.
NCCL_BYTES = 256 * 2**20

# On a CPU, memory beyond that of the process with its libraries imported: buffers of MKL, and small allocations that
# are not tensors. Under DeepSpeed also the stacks of the three threads of its second gloo group, 8 MiB each
# (pthread_create(3): as large as `ulimit -s` allows). Source: measured with models of two layers, 8 wide, whose
# tensors take almost nothing (docs/measurements/plan.md).
CPU_PROGRAM_BYTES = 8 * 2**20
CPU_DEEPSPEED_BYTES = 26 * 2**20

# On a CPU, the stacks of a gloo group's three threads, and the number of groups that a process has in addition to the
# two of plain DeepSpeed. Source: threads of a process under tp, sp and pp, minus those under zero2.
CPU_GROUP_BYTES = 3 * 8 * 2**20
CPU_GROUPS = {"tensor": 3, "sequence": 1, "pipeline": 5}  # a pipeline's grid has those of its tensor parallelism too

# cuBLAS keeps a workspace for each handle and stream: 32 MiB on Hopper, 8 MiB before. Source: torch's documentation
# of CUBLAS_WORKSPACE_CONFIG.
CUBLAS_WORKSPACE_BYTES = 32 * 2**20

ACTIVATIONS = "activations"
HEAD_AND_LOSS = "head and loss"
WORKSPACE = "workspace"
STREAM_FIELDS = ("computing", "gathered", "reduced")  # the fields of a Moment that are separate CUDA streams


@dataclass(frozen=True)
class Moment:
    """The memory on the device at a moment of a phase, or at the phase's peak; in bytes. The last three fields are
    separate CUDA streams where communication overlaps. A stream cannot use another's memory, so for a phase each field
    is its own maximum over the moments."""

    phase: str
    components: dict[str, int]
    computing: int = 0  # memory of the compute stream without the states
    gathered: int = 0  # weights that ZeRO-3 has gathered
    reduced: int = 0  # temporaries of gradients on their way to other processes

    @property
    def total(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True)
class PeakMemory:
    """The predicted peak memory of one process, in bytes."""

    phase: str
    components: dict[str, int]
    # torch.cuda.max_memory_allocated; on a CPU, the memory of the process beyond that before the model was made
    allocated: int
    reserved: int  # torch.cuda.max_memory_reserved, if there is enough memory
    device: int  # the driver's figure: with context and communication buffers
    needed: int  # minimum that training needs: the rest of `device` returns to the driver when memory runs out
    host: int  # host memory of one process, without the program itself
    disk: int = 0  # bytes that one process offloads to a disk
    context: int = 0  # the part of `needed` that CUDA and NCCL take

    @property
    def parts(self) -> dict[str, int]:
        """{name: bytes} of the parts of `needed`."""
        reserve = self.needed - self.allocated - self.context
        overhead = {"allocator's reserve": reserve, "CUDA and NCCL": self.context}
        return self.components | {name: count for name, count in overhead.items() if count}


@dataclass(frozen=True)
class PipelineMemory:
    """The memory of a pipeline's stage in addition to the micro-batch that it works on; sizes in bytes."""

    micro_batches: int  # number of micro-batches whose activations it holds, including the current one
    received: int  # received bytes of each, in addition to the activations
    buffers: int  # buffers for sending and receiving


def find_peak(
    states: ModelStates,
    moments: list[Moment],
    unused: UnusedBytes,
    num_groups: int,
    on_gpu: bool,
    *,
    program: int = CPU_PROGRAM_BYTES,
    on_host: int = 0,
) -> PeakMemory:
    """Return the peak over the moments.

    Args:
        unused: unused bytes of the allocator after a training pass.
        num_groups: process groups that this process communicates in; 0: it is a single process.
        program: on a CPU, bytes in addition to tensors.
        on_host: bytes on the host in addition to the states.
    """
    host = states.offloaded + on_host
    if not on_gpu:  # offloaded states are in the same memory
        extra = {"offloaded": host, "program": program}
        moments = [replace(moment, components=moment.components | extra) for moment in moments]
    largest = max(moments, key=lambda moment: moment.total)
    components = {name: size for name, size in largest.components.items() if size}
    total = largest.total
    if not on_gpu:
        return PeakMemory(largest.phase, components, total, total, total, total, host, states.disk)
    allocated = total + CUBLAS_WORKSPACE_BYTES
    components[WORKSPACE] = components.get(WORKSPACE, 0) + CUBLAS_WORKSPACE_BYTES
    stream_extra = 0  # additional bytes, as the streams reach their maxima at different moments
    if states.overlaps:
        streams = [max(getattr(moment, name) for moment in moments) for name in STREAM_FIELDS]
        stream_extra = max(0, sum(_resident(states).values()) + sum(streams) - total)
    reserved = allocated + stream_extra + unused.held
    context = CUDA_CONTEXT_BYTES + NCCL_BYTES * num_groups
    needed = allocated + unused.needed + context
    device = reserved + context
    return PeakMemory(largest.phase, components, allocated, reserved, device, needed, host, states.disk, context)


def training_moments(
    states: ModelStates, training: list[TracedStep], accumulation: int, in_flight: PipelineMemory | None = None
) -> Iterator[Moment]:
    """Yield the moments of an update with the most memory on the device: start, optimizer step, passes.

    Args:
        training: the forward and backward pass of a micro-batch.
        in_flight: the additional memory of a pipeline's stage; None: there is no pipeline.
    """
    resident = _resident(states)
    engine = states.engine()
    yield Moment("start", {"weights": states.load})
    yield Moment("optimizer step", _sum(resident, states.step))
    for number in range(min(accumulation, 2)):  # micro-batches in between need no more than the last one
        is_last = in_flight is None and (number == accumulation - 1 or number == 1)
        engine.begin(first=number == 0, last=is_last)
        moments = [*_moments_of_pass(states, engine, training)]
        largest = max(moments, key=lambda moment: moment.total)
        waiting: dict[str, int] = {}  # memory of micro-batches that wait for their backward pass
        if in_flight:
            kept = next((step.start for step in training if step.phase == "backward"), 0) + in_flight.received
            count = min(in_flight.micro_batches, accumulation - number) - 1
            waiting = {ACTIVATIONS: count * kept + in_flight.received, "buffers": in_flight.buffers}
        streams = (max(getattr(moment, name) for moment in moments) for name in STREAM_FIELDS)
        yield Moment(largest.phase, _sum(resident, largest.components, waiting), *streams)
    if in_flight:  # gradients are exchanged after all passes
        engine.begin(first=False, last=True)
        exchanged = max([*(engine.complete(step.completed) for step in training if step.completed), engine.finish()])
        yield Moment("gradients", _sum(resident, {"gradients": exchanged, "buffers": in_flight.buffers}))


def evaluation_moments(
    states: ModelStates, training: list[TracedStep], evaluation: list[TracedStep], generated: dict[str, int]
) -> Iterator[Moment]:
    """Yield the moments of an evaluation with the most memory on the device.

    Args:
        evaluation: the forward pass of an evaluation batch.
        generated: {name: bytes} on the device, without weights, while texts are generated; empty: none are generated.
    """
    resident = _resident(states)
    engine = states.engine()
    engine.begin(first=True, last=True)
    max_gathered = 0
    for step, (at_first, gathered) in zip(evaluation, _gathered(states, training, evaluation)):
        at_first += engine.enter(step) - engine.gradients
        max_gathered = max(max_gathered, at_first)
        rise = max(0, gathered + engine.gathered + step.rise - at_first)
        parts = {"gathered weights": at_first, ACTIVATIONS: step.start, WORKSPACE: rise, "gradients": engine.gradients}
        yield Moment("evaluation", _sum(resident, parts))
    if generated:
        yield Moment(
            "generation", _sum(resident, generated | {"gathered weights": max_gathered, "gradients": engine.gradients})
        )


def _resident(states: ModelStates) -> dict[str, int]:
    """Return {kind: bytes} of the states that stay on the device during the whole update."""
    return {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "buffers": states.buffers,
    }


def _moments_of_pass(states: ModelStates, engine: GradientMemory, steps: list[TracedStep]) -> Iterator[Moment]:
    """Yield the moments of a pass, without the states."""
    gathered_bytes = 0

    def moment(step: TracedStep, alive: int, rise: int = 0, reduced: int = 0, completed: int = 0) -> Moment:
        gathered = engine.gathered
        gradients = engine.gradients
        buffers = engine.buffers
        in_loss = step.phase == "loss"
        head = min(step.head, alive)
        above = rise + reduced
        parts = {
            "gathered weights": gathered_bytes + gathered,
            "gradients": gradients + completed,
            "buffers": buffers,
            ACTIVATIONS: alive - head,
            HEAD_AND_LOSS: head + (above if in_loss else 0),
            WORKSPACE: 0 if in_loss else above,
        }
        return Moment(step.phase, parts, sum(parts.values()) - gathered_bytes - reduced, gathered_bytes, reduced)

    for step, (at_first, gathered_after) in zip(steps, _gathered(states, steps)):
        entering = engine.enter(step)
        gathered_bytes = at_first
        yield moment(step, step.start, entering - engine.held)
        gathered_bytes = gathered_after
        yield moment(step, step.start, step.rise)
        if step.completed:
            exchanged = engine.complete(step.completed)
            yield moment(step, step.end, 0, exchanged - engine.held, step.gradient)
    exchanged = engine.finish()
    yield moment(steps[-1], steps[-1].end, 0, exchanged - engine.held)


def _gathered(
    states: ModelStates, training: list[TracedStep], evaluation: list[TracedStep] | None = None
) -> list[tuple[int, int]]:
    steps = training if evaluation is None else evaluation
    return states.gathered.follow(training, evaluation) if states.gathered else [(0, 0)] * len(steps)


def _sum(*parts: dict[str, int]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, size in part.items():
            total[name] = total.get(name, 0) + size
    return total


PROBE_TOKENS = 2  # positions of the pass that shows what is cached


@dataclass(frozen=True)
class KeyValueCache:
    """The sizes of the keys and values that an encoder-decoder caches, in elements."""

    written: int  # for each generated token, in all layers
    read: int  # for each token of the source, in all layers
    layers: int  # number of the decoder's layers
    hidden: int  # encoder's output for each token of the source
    vocabulary: int  # logits of a token

    def parts(self, recipe: Any, rows: int, width: int) -> dict[str, int]:
        """Return {part: bytes} at the last token, when the beam search reorders the cache tensor by tensor
        (transformers/cache_utils.py, reorder_cache), or scores the next token (generation/utils.py, _beam_search).

        Args:
            rows: rows of the batch times the number of beams.
            width: bytes of an element.
        """
        written = (recipe.val_max_target_length or recipe.max_target_length) * self.written
        read = recipe.max_source_length * self.read
        scores = 4 * rows * self.vocabulary  # logits and log probabilities, in fp32
        reordered = rows * width * max(written, read) // (2 * self.layers)
        return {
            "keys and values": rows * width * (written + read),
            "activations": rows * width * recipe.max_source_length * self.hidden,
            "workspace": 2 * scores + max(scores, reordered),
        }


@functools.cache
@torch.no_grad()
def trace_cache(model: torch.nn.Module) -> KeyValueCache:
    """Run one short row through an encoder-decoder on "meta", and return the sizes of its cache."""
    tokens = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device="meta")
    mask = torch.zeros(1, 1, PROBE_TOKENS, PROBE_TOKENS, device="meta")  # 4-D: transformers does not read its values
    was_training = model.training
    output = model.eval()(
        input_ids=tokens, decoder_input_ids=tokens, attention_mask=mask, decoder_attention_mask=mask, use_cache=True
    )
    model.train(was_training)
    caches = output.past_key_values.self_attention_cache, output.past_key_values.cross_attention_cache
    written, read = (sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) for cache in caches)
    hidden = output.encoder_last_hidden_state.shape[-1]
    vocabulary = output.logits.shape[-1]
    return KeyValueCache(written // PROBE_TOKENS, read // PROBE_TOKENS, len(caches[0].layers), hidden, vocabulary)
