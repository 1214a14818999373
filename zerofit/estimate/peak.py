"""The predicted peak of a strategy: the largest of the moments of an update, with its parts and its phase; and
the keys and values of texts that are generated for an evaluation batch."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerofit.estimate.allocations import Unused
from zerofit.estimate.model_states import GradientMemory, States
from zerofit.estimate.traced_steps import TracedStep

# Sizes that no configuration and no trace gives, each with its source. None is fitted to a published table.

# What the driver holds for a process beside torch's allocator, and outside its limit: the CUDA context and the
# libraries' code. Source: 287 MB at first, and 667 MB with all of torch's kernels loaded (pytorch/pytorch#86509).
CUDA_CONTEXT_BYTES = 640 * 2**20

# Buffers of an NCCL communicator, in each process of a group of several. Source: NCCL's documentation of
# NCCL_BUFFSIZE (4 MiB for each channel and peer; rings of 16 to 32 channels, send and receive). An estimate.
NCCL_BYTES = 256 * 2**20

# On a CPU, beyond what the process takes with its libraries imported: buffers of MKL,
# and what is too small to be a tensor. Under DeepSpeed also the stacks of the three threads of its second gloo group,
# 8 MiB each (pthread_create(3): as large as `ulimit -s` allows). Source: measured with models of two layers, 8 wide,
# whose tensors take next to nothing (docs/measurements/plan.md).
CPU_PROGRAM_BYTES = 8 * 2**20
CPU_DEEPSPEED_BYTES = 26 * 2**20

# On a CPU, the stacks of a gloo group's three threads, and the groups that a process has beside the two of plain
# DeepSpeed. Source: threads of a process under tp, sp and pp, less those under zero2.
CPU_GROUP_BYTES = 3 * 8 * 2**20
CPU_GROUPS = {"tensor": 3, "sequence": 1, "pipeline": 5}  # a pipeline's grid has those of its tensor parallelism too

# cuBLAS keeps a workspace for each handle and stream: 32 MiB on Hopper, 8 MiB before. Source: torch's documentation
# of CUBLAS_WORKSPACE_CONFIG.
CUBLAS_WORKSPACE_BYTES = 32 * 2**20

ACTIVATIONS = "activations"
HEAD = "head and loss"
WORKSPACE = "workspace"
STREAMS = ("computing", "gathered", "reduced")  # of a Moment


@dataclass(frozen=True)
class Moment:
    """A moment of a phase, or the one with most on the device; in bytes. The last three have streams of their own
    where communication overlaps, and no stream gets another's memory: of a phase each is the most at any moment."""

    phase: str
    components: dict[str, int]
    computing: int = 0  # what the stream that computes holds, beside states
    gathered: int = 0  # weights that ZeRO-3 has gathered
    reduced: int = 0  # temporaries of gradients on their way to other processes

    @property
    def total(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True)
class Peak:
    """A predicted peak of one process."""

    phase: str
    components: dict[str, int]
    # as torch.cuda.max_memory_allocated; on a CPU, what a process takes beyond what it took before the model
    allocated: int
    reserved: int  # as torch.cuda.max_memory_reserved, where there is enough
    device: int  # as the driver shows it then: with context and communication buffers
    needed: int  # of `device`, what training takes at least: the rest goes back to the driver when memory runs out
    host: int  # of one process, beside the program itself
    disk: int = 0  # of one process, what is offloaded to a disk
    context: int = 0  # of `needed`, what CUDA and NCCL take

    @property
    def parts(self) -> dict[str, int]:
        """{name: bytes}: what `needed` consists of."""
        reserve = self.needed - self.allocated - self.context
        beside = {"allocator's reserve": reserve, "CUDA and NCCL": self.context}
        return self.components | {name: count for name, count in beside.items() if count}


@dataclass(frozen=True)
class InFlight:
    """The memory of a pipeline's stage beside the micro-batch that it works on; sizes in bytes."""

    micro_batches: int  # of which it holds what their backward passes need, this one included
    received: int  # of each, beside the activations
    buffers: int  # for what is received and sent


def find_peak(
    states: States,
    moments: list[Moment],
    unused: Unused,
    num_groups: int,
    on_gpu: bool,
    *,
    program: int = CPU_PROGRAM_BYTES,
    on_host: int = 0,
) -> Peak:
    """The peak over the moments.

    Args:
        unused: of the allocator, as a training pass leaves it.
        num_groups: groups of processes that this one communicates in; 0: it is alone.
        program: on a CPU, bytes beside tensors.
        on_host: bytes on the host beside the states.
    """
    host = states.offloaded + on_host
    if not on_gpu:  # offloaded states lie in the same memory
        beside = {"offloaded": host, "program": program}
        moments = [replace(one, components=one.components | beside) for one in moments]
    largest = max(moments, key=lambda moment: moment.total)
    components = {name: size for name, size in largest.components.items() if size}
    total = largest.total
    if not on_gpu:
        return Peak(largest.phase, components, total, total, total, total, host, states.disk)
    allocated = total + CUBLAS_WORKSPACE_BYTES
    components[WORKSPACE] = components.get(WORKSPACE, 0) + CUBLAS_WORKSPACE_BYTES
    apart = 0  # of streams whose largest moments are not those of the peak
    if states.overlaps:
        streams = [max(getattr(one, name) for one in moments) for name in STREAMS]
        apart = max(0, sum(_held(states).values()) + sum(streams) - total)
    reserved = allocated + apart + unused.held
    context = CUDA_CONTEXT_BYTES + NCCL_BYTES * num_groups
    needed = allocated + unused.needed + context
    return Peak(largest.phase, components, allocated, reserved, reserved + context, needed, host, states.disk, context)


def training_moments(
    states: States, training: list[TracedStep], accumulation: int, in_flight: InFlight | None = None
) -> Iterator[Moment]:
    """Yield the moments of an update with most on the device: start, optimizer step, passes.

    Args:
        training: the forward and backward pass of a micro-batch.
        in_flight: of a stage of a pipeline.
    """
    held = _held(states)
    engine = states.engine()
    yield Moment("start", {"weights": states.load})
    yield Moment("optimizer step", _sum(held, states.step))
    for number in range(min(accumulation, 2)):  # those between the first and the last one need no more than the last
        is_last = in_flight is None and (number == accumulation - 1 or number == 1)
        engine.begin(first=number == 0, last=is_last)
        moments = [*_moments_of_pass(states, engine, training)]
        largest = max(moments, key=lambda one: one.total)
        others: dict[str, int] = {}  # what a stage holds for micro-batches that are not in their backward pass
        if in_flight:
            kept = next((step.start for step in training if step.phase == "backward"), 0) + in_flight.received
            count = min(in_flight.micro_batches, accumulation - number) - 1
            others = {ACTIVATIONS: count * kept + in_flight.received, "buffers": in_flight.buffers}
        streams = (max(getattr(one, name) for one in moments) for name in STREAMS)
        yield Moment(largest.phase, _sum(held, largest.components, others), *streams)
    if in_flight:  # gradients are exchanged when all passes are done
        engine.begin(first=False, last=True)
        exchanged = max([*(engine.complete(step.completed) for step in training if step.completed), engine.finish()])
        yield Moment("gradients", _sum(held, {"gradients": exchanged, "buffers": in_flight.buffers}))


def evaluation_moments(
    states: States, training: list[TracedStep], evaluation: list[TracedStep], generated: dict[str, int]
) -> Iterator[Moment]:
    """Yield the moments of an evaluation with most on the device.

    Args:
        evaluation: the forward pass of an evaluation batch.
        generated: what is on the device beside weights while texts are generated for it; empty: none are.
    """
    held = _held(states)
    engine = states.engine()
    engine.begin(first=True, last=True)
    most_gathered = 0
    for step, (at_first, gathered) in zip(evaluation, _gathered(states, training, evaluation)):
        at_first += engine.enter(step) - engine.gradients
        most_gathered = max(most_gathered, at_first)
        rise = max(0, gathered + engine.gathered + step.rise - at_first)
        parts = {"gathered weights": at_first, ACTIVATIONS: step.start, WORKSPACE: rise, "gradients": engine.gradients}
        yield Moment("evaluation", _sum(held, parts))
    if generated:
        yield Moment(
            "generation", _sum(held, generated | {"gathered weights": most_gathered, "gradients": engine.gradients})
        )


def pinned(sizes: list[int]) -> int:
    """Bytes of page-locked memory: torch rounds each block up to a power of two (CachingHostAllocator)."""
    return sum(1 << (size - 1).bit_length() for size in sizes)


def _held(states: States) -> dict[str, int]:
    """Return the bytes that are there throughout an update, by kind."""
    return {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "buffers": states.buffers,
    }


def _moments_of_pass(states: States, engine: GradientMemory, steps: list[TracedStep]) -> Iterator[Moment]:
    """The tensors that are held beside the states."""
    at_hand = 0

    def moment(step: TracedStep, alive: int, rise: int = 0, reduced: int = 0, completed: int = 0) -> Moment:
        gathered = engine.gathered
        gradients = engine.gradients
        buffers = engine.buffers
        in_loss = step.phase == "loss"
        head = min(step.head, alive)
        above = rise + reduced
        parts = {
            "gathered weights": at_hand + gathered,
            "gradients": gradients + completed,
            "buffers": buffers,
            ACTIVATIONS: alive - head,
            HEAD: head + (above if in_loss else 0),
            WORKSPACE: 0 if in_loss else above,
        }
        return Moment(step.phase, parts, sum(parts.values()) - at_hand - reduced, at_hand, reduced)

    for step, (at_first, after) in zip(steps, _gathered(states, steps)):
        entering = engine.enter(step)
        at_hand = at_first
        yield moment(step, step.start, entering - engine.held)
        at_hand = after
        yield moment(step, step.start, step.rise)
        if step.completed:
            exchanged = engine.complete(step.completed)
            yield moment(step, step.end, 0, exchanged - engine.held, step.gradient)
    exchanged = engine.finish()
    yield moment(steps[-1], steps[-1].end, 0, exchanged - engine.held)


def _gathered(
    states: States, training: list[TracedStep], evaluation: list[TracedStep] | None = None
) -> list[tuple[int, int]]:
    steps = training if evaluation is None else evaluation
    return states.gathered.follow(training, evaluation) if states.gathered else [(0, 0)] * len(steps)


def _sum(*parts: dict[str, int]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, size in part.items():
            total[name] = total.get(name, 0) + size
    return total


PROBE = 2  # positions of the pass that shows what is cached


@dataclass(frozen=True)
class KeyValueCache:
    """The keys and values that an encoder-decoder caches, in elements."""

    written: int  # of each generated token, in all layers
    read: int  # of each token of the source, in all layers
    layers: int  # of the decoder
    hidden: int  # of the encoder's output, of each token of the source
    vocabulary: int  # logits of a token

    def parts(self, recipe: Any, rows: int, width: int) -> dict[str, int]:
        """Bytes at the last token, when the search reorders the cache tensor by tensor (`reorder_cache` of
        transformers' cache_utils.py), or when it scores the next token (generation/utils.py, _beam_search).

        Args:
            rows: of the batch, each as often as there are beams.
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
def cache_of(model: torch.nn.Module) -> KeyValueCache:
    """Run one short row through an encoder-decoder on "meta", and return what it caches."""
    tokens = torch.zeros(1, PROBE, dtype=torch.int64, device="meta")
    mask = torch.zeros(1, 1, PROBE, PROBE, device="meta")  # as attention takes it: nothing is asked of its values
    was_training = model.training
    made = model.eval()(
        input_ids=tokens, decoder_input_ids=tokens, attention_mask=mask, decoder_attention_mask=mask, use_cache=True
    )
    model.train(was_training)
    caches = made.past_key_values.self_attention_cache, made.past_key_values.cross_attention_cache
    written, read = (sum(one.keys.numel() + one.values.numel() for one in cache.layers) for cache in caches)
    hidden = made.encoder_last_hidden_state.shape[-1]
    return KeyValueCache(written // PROBE, read // PROBE, len(caches[0].layers), hidden, made.logits.shape[-1])
