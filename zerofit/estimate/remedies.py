"""Proposes what would help a run whose memory has run out, with the bytes that each remedy is estimated to save.

Closed forms over a few numbers: they are computed in a process that has no memory left, so nothing is traced and
nothing is read. `zerofit plan`, whose command the report ends with, searches layouts, batches and adapters.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zerofit.estimate.weights import AVERAGE_BYTES, MASTER_BYTES, NF4_BYTES
from zerofit.model.parameters import hidden_matrices, true_numel, true_shape
from zerofit.recipe.tasks import TaskRecipe
from zerofit.strategy.engine import Engine
from zerofit.strategy.optimizers import state_bytes
from zerofit.strategy.strategy import Strategy

WORKING = ("forward", "loss", "backward")  # phases that hold activations for a backward pass
TRAINING = ("prepare", *WORKING, "update")
NEGLIGIBLE = 0.01  # of what is held: a remedy that saves less is not worth its line
MAX_REMEDIES = 5
OFFLOADED = ("", "optimizer state in host memory: slower", "optimizer state and weights in host memory: the slowest")
STRATEGIES = {  # (ZeRO stage, what is offloaded: 0 nothing, 1 the optimizer's state, 2 weights too)
    (2, 0): "zero2",
    (3, 0): "zero3",
    (2, 1): "zero2_offload",
    (3, 1): "zero3_offload_optimizer",
    (3, 2): "zero3_offload",
}


class StateBytes(NamedTuple):
    """Model states of one rank, in bytes."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0


@dataclass(frozen=True)
class StateSetup:
    """The quantities that a rank's model states follow from (Rajbhandari et al. 2020, ZeRO, table 1)."""

    trained: int  # elements on a rank before ZeRO or FSDP shard them
    frozen: int
    trained_width: int  # bytes of each
    frozen_width: float
    kept: int  # bytes that the optimizer keeps beside fp32 copies of the weights, before they are sharded
    has_master: bool  # the optimizer has fp32 copies of the weights: DeepSpeed's
    stage: int  # of ZeRO; 3 of FSDP2
    ranks: int  # the states are sharded over
    offloads: int  # 1: the optimizer's state to the host; 2: weights too

    def held(self, on_host: bool | None = None) -> StateBytes:
        """The states in host memory, or on the device; None: all of them."""
        optimizer = self.kept + (MASTER_BYTES * self.trained if self.has_master else 0)
        weights = int(self.trained * self.trained_width + self.frozen * self.frozen_width)
        has_states, has_weights = (on_host in (None, self.offloads >= part) for part in (1, 2))
        return StateBytes(
            weights // (self.ranks if self.stage >= 3 else 1) if has_weights else 0,
            self.trained * self.trained_width // (self.ranks if self.stage >= 2 else 1) if has_states else 0,
            optimizer // (self.ranks if self.stage >= 1 else 1) if has_states else 0,
        )


def state_setup(strategy: Strategy, recipe: TaskRecipe, parameters: int, engine: Engine | None = None) -> StateSetup:
    """The setup of a run. Before there is an engine an adapter, which is small, is not counted. `parameters`: of the
    whole model."""
    with_deepspeed = strategy.deepspeed is not None
    layout = strategy.layout
    width = trained_width = 2 if strategy.precision != "fp32" and (with_deepspeed or recipe.lora) else 4
    trained, frozen = (0, parameters) if recipe.lora else (parameters, 0)
    others = "adamw" if recipe.optim == "muon" else recipe.optim
    split = layout.model_size
    kept = 0 if others == "adafactor" else state_bytes(others, (trained,))
    if engine is not None:
        of_run = [each for each in engine.module.parameters() if each.requires_grad]
        trained_width = max((each.element_size() for each in of_run), default=width)
        trained = sum(map(true_numel, of_run))
        split = layout.tensor
        frozen = sum(map(true_numel, engine.module.parameters())) - trained
        of_muon = {id(each) for each in hidden_matrices(engine.module).values()} if recipe.optim == "muon" else set()
        kept = sum(state_bytes("muon" if id(each) in of_muon else others, true_shape(each)) for each in of_run)
    zero = strategy.deepspeed["zero_optimization"] if strategy.deepspeed else {}
    sections = (zero.get(f"offload_{part}") or {} for part in ("optimizer", "param"))
    return StateSetup(
        trained=trained // split,
        frozen=frozen // split,
        trained_width=trained_width,
        frozen_width=NF4_BYTES if recipe.quantised else width,
        kept=(kept + (AVERAGE_BYTES * trained if recipe.ema_decay else 0)) // split,
        has_master=with_deepspeed,
        stage=strategy.zero_stage,
        ranks=layout.shard_size,
        offloads=sum(section.get("device", "none") != "none" for section in sections),
    )


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A rank's memory when it ran out, in bytes."""

    recipe: TaskRecipe
    strategy: Strategy
    setup: StateSetup
    phase: str
    on_host: bool | None  # the host's memory ran out, not the device's; None: the model is computed on the host
    held: StateBytes  # model states that are there now
    row_tokens: int = 0
    rest: int = 0  # held else (activations, logits, workspace; on a CPU the program, too), and asked for last
    layers: int = 0
    logits: int = 0  # where they are materialized in full, and could be computed in chunks; else 0
    local_processes: int = 1
    free: int | None = None  # of the memory that ran out; None: not known
    total: int | None = None
    host_free: int | None = None  # bytes of host memory; None: not known

    def expected(self, setup: StateSetup | None = None) -> StateBytes:
        """The model states on this memory, once they are all there."""
        return (setup or self.setup).held(self.on_host)

    def states(self, setup: StateSetup | None = None) -> int:
        """The bytes of those that are there in this phase: all of them once training goes on."""
        weights, gradients, optimizer = self.expected(setup)
        return weights + (gradients if self.phase in TRAINING else 0) + (optimizer if self.phase != "load" else 0)


class Remedy(NamedTuple):
    """One thing to do: the option with its value, what it does, and the bytes per rank that it saves."""

    option: str
    what: str
    saves: int


def remedies(s: Shortage) -> list[Remedy]:
    """Return at most five, the largest saving first. What is in force already is not among them; nor is what saves
    host memory beside a device: the watchdog's advice has that."""
    found = [] if s.on_host else [*_of_passes(s), *_of_states(s)]
    least = NEGLIGIBLE * max(s.rest, s.states())
    found = [each for each in found if each.saves > least]
    return sorted(found, key=lambda each: each.saves, reverse=True)[:MAX_REMEDIES]


def _of_passes(s: Shortage) -> list[Remedy]:
    """Remedies that make activations smaller."""
    recipe = s.recipe
    batches = s.strategy.batches
    found: list[Remedy] = []
    if s.phase == "evaluate" and (rows := recipe.per_device_eval_batch_size) > 1:
        saved = round(s.rest * (1 - rows // 2 / rows))
        found.append(Remedy(f"--per_device_eval_batch_size {rows // 2}", "metrics do not change", saved))
    if s.phase not in WORKING:
        return found
    of_update = batches.micro_batch * batches.accumulation
    if smaller := [size for size in range(1, batches.micro_batch // 2 + 1) if of_update % size == 0]:
        option = f"--per_device_train_batch_size {smaller[-1]}"
        if recipe.global_batch_size is None:
            option += f" --gradient_accumulation_steps {of_update // smaller[-1]}"
        saved = round(s.rest * (1 - smaller[-1] / batches.micro_batch))
        found.append(Remedy(option, "the global batch does not change", saved))
    which: Any = recipe.gradient_checkpointing
    if which is not True and s.layers > 1:
        bodies = max(0, s.rest - s.logits)
        saves = bodies - bodies // s.layers  # one layer in full; the inputs of layers are not counted
        option = "--gradient_checkpointing full" if which else "--gradient_checkpointing"
        found.append(Remedy(option, "activations are recomputed: slower", saves))
    if s.logits:
        saves = min(s.logits, s.rest)
        found.append(Remedy("--loss chunked", "logits are never materialized in full", saves))
    if s.strategy.precision == "fp32":
        found.append(Remedy("--precision bf16", "activations in half precision", s.rest // 2))
    return found


def _of_states(s: Shortage) -> list[Remedy]:
    """Remedies that make model states smaller: sharded over the ranks, offloaded to the host, or not needed."""
    now = s.setup
    recipe = s.recipe
    layout = s.strategy.layout
    found: list[Remedy] = []
    half = s.strategy.precision != "fp32"

    def add(option: str, what: str, then: StateSetup) -> None:
        found.append(Remedy(option, what, s.states() - s.states(then)))

    top = 2 if recipe.quantised else 3  # quantised weights cannot be sharded
    candidates = set()
    if now.ranks > 1 and layout.pipeline == 1:
        candidates.add((top, now.offloads if layout.tensor == 1 else 0))
    if s.on_host is not None and layout.replica_size == 1 and recipe.optim != "muon":  # which is refused there
        candidates |= {(max(2, now.stage), 1), (top, 2)}
    for stage, offloads in candidates:
        name = STRATEGIES.get((stage, offloads))
        zero = replace(now, stage=stage, offloads=offloads, has_master=True)
        zero = replace(zero, trained_width=2 if half else 4)
        to_host = sum(zero.held(on_host=True)) * s.local_processes
        if name and (stage, offloads) > (now.stage, now.offloads) and (s.host_free is None or to_host < s.host_free):
            what = OFFLOADED[offloads] or f"sharded over {now.ranks} processes: optimizer state and gradients"
            what += ", and weights" if stage == 3 and not offloads else ""
            pair = f"tp_{name}" if layout.tensor > 1 else name
            add(f"--config_file accelerate_configs/{pair}.yaml", what, zero)
    if recipe.model_name_or_path and layout.model_size == 1 and recipe.optim != "muon" and not recipe.quantised:
        frozen = replace(now, trained=0, frozen=now.trained + now.frozen, frozen_width=2 if half else 4, kept=0)
        if s.phase == "load" and s.on_host is not None and now.stage < 3:
            option = "--lora --load_in_4bit" if half else "--lora --load_in_4bit --precision bf16"
            add(option, "frozen weights, in 4 bits", replace(frozen, frozen_width=NF4_BYTES))
        elif not recipe.lora:
            add("--lora", "frozen weights; gradients and optimizer state of the adapter alone", frozen)
    return found
