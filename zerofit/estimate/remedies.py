"""What would help a run whose memory has run out, and what the estimate says each remedy saves.

Closed forms over a few numbers: they are computed in a process that has no memory left, so nothing is traced and
nothing is read. `zerofit plan`, whose command the report ends with, searches layouts, batches and adapters.
"""

from dataclasses import dataclass, replace
from typing import Any

from zerofit.estimate.weights import AVERAGE_BYTES, MASTER_BYTES, MOMENTS_BYTES, NF4_BYTES
from zerofit.model.parameters import true_numel
from zerofit.recipe.tasks import TaskRecipe
from zerofit.strategy.engine import Engine
from zerofit.strategy.muon import Muon
from zerofit.strategy.optimizers import SHARDED, state_bytes
from zerofit.strategy.strategy import Strategy

WORKING = ("forward", "loss", "backward")  # phases that hold activations for a backward pass
TRAINING = ("prepare", *WORKING, "update")
NEGLIGIBLE = 0.01  # of what is held: a remedy that saves less is not worth its line
MOST_REMEDIES = 5


@dataclass(frozen=True)
class RankStates:
    """Model states of one rank, in bytes."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def on(self, host: bool, offloads_optimizer: bool, offloads_weights: bool) -> "RankStates":
        """The part that is in host memory, or on the device."""
        states = host == offloads_optimizer
        return RankStates(self.weights * (host == offloads_weights), self.gradients * states, self.optimizer * states)


@dataclass(frozen=True)
class StateSetup:
    """What the model states of a rank follow from (Rajbhandari et al. 2020, ZeRO, table 1).

    Args:
        trained, frozen: elements on a rank before ZeRO or FSDP shard them.
        trained_width, frozen_width: bytes of each.
        optimizer_bytes: what the optimizer keeps of what is trained, before it is sharded.
        stage: of ZeRO; 3 of FSDP2.
        ranks: the states are sharded over.
        moments: bytes of AdamW's or Muon's moments and of the mean of the weights, before they are sharded.
    """

    trained: int
    frozen: int
    trained_width: int
    frozen_width: float
    optimizer_bytes: int
    stage: int
    ranks: int
    moments: int
    offloads_optimizer: bool = False
    offloads_weights: bool = False

    @property
    def states(self) -> RankStates:
        ranks = [self.ranks if self.stage >= stage else 1 for stage in (3, 2, 1)]
        whole = int(self.trained * self.trained_width + self.frozen * self.frozen_width)
        return RankStates(
            whole // ranks[0], self.trained * self.trained_width // ranks[1], self.optimizer_bytes // ranks[2]
        )

    def held(self, on_host: bool) -> RankStates:
        return self.states.on(on_host, self.offloads_optimizer, self.offloads_weights)

    def with_deepspeed(self, stage: int, half: bool, **offload: bool) -> "StateSetup":
        """The same under ZeRO."""
        kept = MASTER_BYTES * self.trained + self.moments
        return replace(self, stage=stage, trained_width=2 if half else 4, optimizer_bytes=kept, **offload)


def state_setup(strategy: Strategy, recipe: TaskRecipe, parameters: int, engine: Engine | None = None) -> StateSetup:
    """Of a run. Before there is an engine an adapter, which is small, is not counted.

    Args:
        parameters: of the whole model.
    """
    with_deepspeed, half = strategy.deepspeed is not None, strategy.precision != "fp32"
    width = 2 if half and (with_deepspeed or recipe.lora) else 4
    if engine is not None:
        every = [*engine.module.parameters()]
        adapted = [one for one in every if one.requires_grad]
        trained = sum(map(true_numel, adapted)) // strategy.layout.tensor
        frozen = sum(map(true_numel, every)) // strategy.layout.tensor - trained
        trained_width = max((one.element_size() for one in adapted), default=width)
        shapes = [tuple(one.shape) for one in adapted]
        matrices = engine.torch_optimizer.matrices if isinstance(engine.torch_optimizer, Muon) else {}
    else:
        of_rank = parameters // strategy.layout.model_size
        trained, frozen, trained_width = 0 if recipe.lora else of_rank, of_rank if recipe.lora else 0, width
        shapes = [] if recipe.optim == "adafactor" else [(trained,)]  # means of rows and columns are next to nothing
        matrices = {}  # not known yet
    averages = AVERAGE_BYTES * trained if recipe.ema_decay else 0
    of_muon = sum(each.shape.numel() for each in matrices.values())
    moments = MOMENTS_BYTES * trained - MOMENTS_BYTES // 2 * of_muon + averages
    if recipe.optim in SHARDED:
        kept = MASTER_BYTES * with_deepspeed * trained + moments
    else:
        kept = sum(state_bytes(recipe.optim, shape) for shape in shapes) + averages
    quantised = NF4_BYTES if recipe.quantised else None
    zero = strategy.deepspeed["zero_optimization"] if strategy.deepspeed else {}
    sections = (zero.get(f"offload_{part}") or {} for part in ("optimizer", "param"))
    offloads = [section.get("device", "none") != "none" for section in sections]
    return StateSetup(
        trained,
        frozen,
        trained_width,
        quantised or width,
        kept,
        strategy.stage,
        strategy.layout.shard_size,
        moments,
        *offloads,
    )


@dataclass(frozen=True)
class PassSizes:
    """What follows from the model's configuration; bytes of a micro-batch.

    Args:
        layer_inputs: of all layers together: what stays of the activations where they are recomputed.
        logits: where they are materialized in full, else 0.
        can_chunk: the loss can be computed in chunks, and is not.
    """

    layers: int = 0
    layer_inputs: int = 0
    logits: int = 0
    can_chunk: bool = False


@dataclass(frozen=True)
class Shortage:
    """Where memory ran out.

    Args:
        on_host: the host's memory did, not the device's.
        on_cpu: the model is computed on the host.
        activations: bytes that the passes took, with what was asked for last.
        host_free: bytes; None: not known.
        unused: bytes that torch's allocator has reserved, in pieces that did not fit.
        copied: bytes of the copies that checkpoints are written from.
    """

    recipe: TaskRecipe
    strategy: Strategy
    setup: StateSetup
    phase: str
    on_host: bool
    on_cpu: bool
    activations: int
    passes: PassSizes = PassSizes()
    local_processes: int = 1
    host_free: int | None = None
    unused: int = 0
    copied: int = 0

    def states(self, setup: StateSetup) -> RankStates:
        """On the memory that ran out, as far as they are there in this phase: all of them once training goes on."""
        held = setup.states if self.on_cpu else setup.held(self.on_host)
        return RankStates(
            held.weights,
            held.gradients if self.phase in TRAINING else 0,
            0 if self.phase == "load" else held.optimizer,
        )


@dataclass(frozen=True)
class Remedy:
    """One thing to do: the option with its value, what it does, and the bytes a rank that it saves (None: unknown)."""

    option: str
    what: str
    saves: int | None = None


def remedies(s: Shortage) -> list[Remedy]:
    """At most five, the largest saving first, those of unknown size last. What is in force already, or has no effect
    where memory ran out, is not among them."""
    found = []
    if s.on_cpu or not s.on_host:
        found += [*_of_passes(s), *_of_states(s)]
    found += _of_host(s) if s.on_host else _of_allocator(s)
    least = NEGLIGIBLE * max(s.activations, s.states(s.setup).total)
    found = [one for one in found if one.saves is None or one.saves > least]
    return sorted(found, key=lambda one: -1 if one.saves is None else one.saves, reverse=True)[:MOST_REMEDIES]


def smaller_batch(micro: int, accumulation: int) -> tuple[int, int] | None:
    """(micro-batch, accumulation) of the same update: the largest micro-batch of at most half the size; None: none."""
    rows = micro * accumulation
    fitting = [size for size in range(1, micro // 2 + 1) if rows % size == 0]
    return (fitting[-1], rows // fitting[-1]) if fitting else None


def _of_passes(s: Shortage) -> list[Remedy]:
    """What makes activations smaller."""
    found: list[Remedy] = []
    if s.phase == "evaluate" and s.recipe.per_device_eval_batch_size > 1:
        rows = s.recipe.per_device_eval_batch_size
        saved = round(s.activations * (1 - rows // 2 / rows))
        found.append(Remedy(f"--per_device_eval_batch_size {rows // 2}", "metrics do not change", saved))
    if s.phase not in WORKING:
        return found
    batches = s.strategy.batches
    if smaller := smaller_batch(batches.micro_batch, batches.accumulation):
        option, what = f"--per_device_train_batch_size {smaller[0]}", "the accumulation follows from global_batch_size"
        if s.recipe.global_batch_size is None:
            option, what = f"{option} --gradient_accumulation_steps {smaller[1]}", "the global batch does not change"
        found.append(Remedy(option, what, round(s.activations * (1 - smaller[0] / batches.micro_batch))))
    which: Any = s.recipe.gradient_checkpointing
    if which is not True and s.passes.layers > 1:
        option = "--gradient_checkpointing" + (" full" if which else "")
        found.append(Remedy(option, "activations are recomputed: slower", _of_recomputation(s)))
    if s.passes.can_chunk and s.passes.logits:
        saved = min(s.passes.logits, s.activations)
        found.append(Remedy("--loss chunked", "logits are never materialized in full", saved))
    if s.strategy.precision == "fp32":
        found.append(Remedy("--precision bf16", "activations in half precision", s.activations // 2))
    return found


def _of_recomputation(s: Shortage) -> int | None:
    """What recomputing every layer saves: the inputs of all layers stay, and one layer in full."""
    which: Any = s.recipe.gradient_checkpointing
    if which == "selective":
        return None
    bodies = max(0, s.activations - s.passes.logits)
    return bodies - s.passes.layer_inputs - bodies // s.passes.layers


def _of_states(s: Shortage) -> list[Remedy]:
    """What makes model states smaller: sharded over the ranks, offloaded to the host, or not needed."""
    now, recipe, layout = s.setup, s.recipe, s.strategy.layout
    half, is_loading = s.strategy.precision != "fp32", s.phase == "load"
    found: list[Remedy] = []

    def add(option: str, what: str, then: StateSetup) -> None:
        known = now.trained + now.frozen > 0
        found.append(Remedy(option, what, s.states(now).total - s.states(then).total if known else None))

    top = 2 if recipe.quantised else 3  # quantised weights cannot be sharded
    offload = {"offloads_optimizer": now.offloads_optimizer, "offloads_weights": now.offloads_weights}
    if now.ranks > 1 and layout.pipeline == 1 and now.stage < top and (top == 3 or not is_loading):
        what = "optimizer state, gradients and weights" if top == 3 else "optimizer state and gradients"
        pair = f"tp_zero{top}" if layout.tensor > 1 else f"zero{top}"
        if now.offloads_optimizer and layout.tensor == 1:
            pair = "zero3_offload_optimizer" if top == 3 else "zero2_offload"
        add(_pair(pair), f"sharded over {now.ranks} processes: {what}", now.with_deepspeed(top, half, **offload))
    if not s.on_cpu and layout.replica_size == 1 and recipe.optim != "muon":  # which is refused there
        to_host = now.with_deepspeed(
            max(2, now.stage), half, offloads_optimizer=True, offloads_weights=now.offloads_weights
        )
        if not now.offloads_optimizer and not is_loading and _host_takes(s, to_host):
            pair = "zero2_offload" if now.stage < 3 else "zero3_offload_optimizer"
            add(_pair(pair), "optimizer state in host memory: slower", to_host)
        everything = now.with_deepspeed(3, half, offloads_optimizer=True, offloads_weights=True)
        if not now.offloads_weights and not recipe.quantised and _host_takes(s, everything):
            add(_pair("zero3_offload"), "optimizer state and weights in host memory: the slowest", everything)
    if is_loading and not half and s.strategy.deepspeed is not None:
        add("--precision bf16", "weights in half precision", replace(now, trained_width=2, frozen_width=2))
    if recipe.model_name_or_path and layout.model_size == 1 and recipe.optim != "muon":
        frozen = replace(now, trained=0, frozen=now.trained + now.frozen, optimizer_bytes=0)
        to_half = " --precision bf16" if is_loading and not half else ""
        if not recipe.lora:
            what = "frozen weights; gradients and optimizer state of the adapter alone"
            add(f"--lora{to_half}", what, replace(frozen, frozen_width=2 if half or to_half else 4))
        if is_loading and not s.on_cpu and not recipe.quantised and now.stage < 3:
            add(
                f"--lora --load_in_4bit{to_half}", "frozen weights, in 4 bits", replace(frozen, frozen_width=NF4_BYTES)
            )
    return found


def _host_takes(s: Shortage, setup: StateSetup) -> bool:
    return s.host_free is None or setup.held(on_host=True).total * s.local_processes < s.host_free


def _of_allocator(s: Shortage) -> list[Remedy]:
    what = "in the environment: torch can use memory that it holds in pieces too small"
    return [Remedy("PYTORCH_ALLOC_CONF=expandable_segments:True", what, s.unused)] if s.unused else []


def _of_host(s: Shortage) -> list[Remedy]:
    found, layout = [], s.strategy.layout
    if s.setup.offloads_optimizer and not s.on_cpu:
        what = "optimizer state (and weights) on the devices, not in host memory"
        found.append(Remedy(_pair(f"zero{s.setup.stage}"), what, s.setup.held(on_host=True).total or None))
    if s.copied:
        found.append(Remedy("--save_async false", "checkpoints are written without a copy of the state", s.copied))
    if workers := s.recipe.dataloader_num_workers:
        found.append(Remedy("--dataloader_num_workers 0", f"{workers} fewer processes per rank"))
    if s.local_processes > 1 and not (s.phase == "load" and s.setup.stage == 3):  # fewer would hold more each
        option = f"--num_processes {layout.world_size // 2}"
        if s.recipe.global_batch_size is None:
            option = f"{option} --gradient_accumulation_steps {2 * s.strategy.batches.accumulation}"
        each = s.states(s.setup).total + s.activations
        saved = each * (s.local_processes - s.local_processes // 2) or None
        found.append(Remedy(option, "half as many processes on each host", saved))
    return found


def _pair(name: str) -> str:
    return f"--config_file accelerate_configs/{name}.yaml"
