"""Proposes remedies for a run that is out of memory, with the bytes that each is estimated to save.

The estimates are closed forms over a few numbers, as they are computed in a process that has no memory left: nothing
is traced or read. `zerofit plan`, whose command the report ends with, searches layouts, batches and adapters.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zerofit.estimate.weights import AVERAGE_BYTES, MASTER_BYTES, NF4_BYTES
from zerofit.model.parameters import hidden_matrices, true_numel, true_shape
from zerofit.recipe.tasks import TaskRecipe
from zerofit.strategy.engine import Engine
from zerofit.strategy.optimizers import state_bytes
from zerofit.strategy.strategy import Strategy

ACTIVATION_PHASES = ("forward", "loss", "backward")  # phases that hold activations for a backward pass
TRAINING_PHASES = ("prepare", *ACTIVATION_PHASES, "update")
MIN_SAVED_SHARE = 0.01  # share of the memory in use: a remedy that saves less is not listed
MAX_REMEDIES = 5
HOST_EFFECT = ("", "optimizer state in host memory: slower", "optimizer state and weights in host memory: the slowest")
OFFLOAD_STRATEGIES = {  # (ZeRO stage, what is offloaded: 0 nothing, 1 the optimizer's state, 2 weights too)
    (2, 0): "zero2",
    (3, 0): "zero3",
    (2, 1): "zero2_offload",
    (3, 1): "zero3_offload_optimizer",
    (3, 2): "zero3_offload",
}


class StateBytes(NamedTuple):
    """The model states of one rank, in bytes."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0


@dataclass(frozen=True)
class StateSetup:
    """The quantities that a rank's model states follow from (Rajbhandari et al. 2020, ZeRO, table 1)."""

    trained: int  # elements on a rank before ZeRO or FSDP shard them
    frozen: int
    trained_width: int  # bytes of an element
    frozen_width: float
    kept: int  # bytes that the optimizer keeps in addition to fp32 copies of the weights, before they are sharded
    has_master: bool  # True if the optimizer has fp32 copies of the weights, as DeepSpeed's has
    stage: int  # the ZeRO stage; 3 for FSDP2
    ranks: int  # number of ranks that the states are sharded over
    offloads: int  # 1: the optimizer's state is offloaded to the host; 2: the weights too

    def held(self, on_host: bool | None = None) -> StateBytes:
        """Return the states in host memory (True), on the device (False), or all of them (None)."""
        optimizer = self.kept + (MASTER_BYTES * self.trained if self.has_master else 0)
        weights = int(self.trained * self.trained_width + self.frozen * self.frozen_width)
        has_states, has_weights = (on_host in (None, self.offloads >= part) for part in (1, 2))
        return StateBytes(
            weights // (self.ranks if self.stage >= 3 else 1) if has_weights else 0,
            self.trained * self.trained_width // (self.ranks if self.stage >= 2 else 1) if has_states else 0,
            optimizer // (self.ranks if self.stage >= 1 else 1) if has_states else 0,
        )


def state_setup(strategy: Strategy, recipe: TaskRecipe, parameters: int, engine: Engine | None = None) -> StateSetup:
    """Return the setup of a run. Before there is an engine, an adapter is not counted: it is small. `parameters`: the
    number of parameters of the full model."""
    with_deepspeed = strategy.deepspeed is not None
    layout = strategy.layout
    width = trained_width = 2 if strategy.precision != "fp32" and (with_deepspeed or recipe.lora) else 4
    trained, frozen = (0, parameters) if recipe.lora else (parameters, 0)
    fallback = "adamw" if recipe.optim == "muon" else recipe.optim
    num_parts = layout.model_size
    kept = 0 if fallback == "adafactor" else state_bytes(fallback, (trained,))
    if engine is not None:
        trainable = [each for each in engine.module.parameters() if each.requires_grad]
        trained_width = max((each.element_size() for each in trainable), default=width)
        trained = sum(map(true_numel, trainable))
        num_parts = layout.tensor
        frozen = sum(map(true_numel, engine.module.parameters())) - trained
        muon_ids = {id(each) for each in hidden_matrices(engine.module).values()} if recipe.optim == "muon" else set()
        kept = sum(state_bytes("muon" if id(each) in muon_ids else fallback, true_shape(each)) for each in trainable)
    zero = strategy.deepspeed["zero_optimization"] if strategy.deepspeed else {}
    sections = (zero.get(f"offload_{part}") or {} for part in ("optimizer", "param"))
    return StateSetup(
        trained=trained // num_parts,
        frozen=frozen // num_parts,
        trained_width=trained_width,
        frozen_width=NF4_BYTES if recipe.quantised else width,
        kept=(kept + (AVERAGE_BYTES * trained if recipe.ema_decay else 0)) // num_parts,
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
    on_host: bool | None  # True if the host's memory ran out, not the device's; None: the model runs on the host
    held: StateBytes  # model states that exist now
    row_tokens: int = 0
    rest: int = 0  # activations, logits, workspace, on a CPU also the program, and the allocation that failed
    layers: int = 0
    logits: int = 0  # bytes of logits that are materialized in full, and could be computed in chunks; else 0
    local_processes: int = 1
    free: int | None = None  # free bytes of the memory that ran out; None: not known
    total: int | None = None
    host_free: int | None = None  # free bytes of host memory; None: not known

    def expected(self, setup: StateSetup | None = None) -> StateBytes:
        """Return the model states in this memory after all of them have been allocated."""
        return (setup or self.setup).held(self.on_host)

    def states(self, setup: StateSetup | None = None) -> int:
        """Return the bytes of the model states that exist in this phase; while the run trains, all of them do."""
        weights, gradients, optimizer = self.expected(setup)
        has_gradients = self.phase in TRAINING_PHASES
        return weights + (gradients if has_gradients else 0) + (optimizer if self.phase != "load" else 0)


class Remedy(NamedTuple):
    """One remedy: the option with its value, its effect, and the bytes per rank that it saves."""

    option: str
    effect: str
    saves: int


def find_remedies(s: Shortage) -> list[Remedy]:
    """Return at most five remedies, the largest saving first. Options that are set already are not among them. Where
    host memory ran out on a machine with devices there are none: the watchdog's message has advice for that case."""
    remedies = [] if s.on_host else [*_activation_remedies(s), *_state_remedies(s)]
    min_bytes = MIN_SAVED_SHARE * max(s.rest, s.states())
    remedies = [remedy for remedy in remedies if remedy.saves > min_bytes]
    return sorted(remedies, key=lambda remedy: remedy.saves, reverse=True)[:MAX_REMEDIES]


def _activation_remedies(s: Shortage) -> list[Remedy]:
    """Return the remedies that make activations smaller."""
    recipe = s.recipe
    batches = s.strategy.batches
    remedies: list[Remedy] = []
    if s.phase == "evaluate" and (rows := recipe.per_device_eval_batch_size) > 1:
        saved = round(s.rest * (1 - rows // 2 / rows))
        remedies.append(Remedy(f"--per_device_eval_batch_size {rows // 2}", "metrics do not change", saved))
    if s.phase not in ACTIVATION_PHASES:
        return remedies
    rows_per_update = batches.micro_batch * batches.accumulation
    if smaller := [size for size in range(1, batches.micro_batch // 2 + 1) if rows_per_update % size == 0]:
        option = f"--per_device_train_batch_size {smaller[-1]}"
        if recipe.global_batch_size is None:
            option += f" --gradient_accumulation_steps {rows_per_update // smaller[-1]}"
        saved = round(s.rest * (1 - smaller[-1] / batches.micro_batch))
        remedies.append(Remedy(option, "the global batch does not change", saved))
    recomputation: Any = recipe.gradient_checkpointing
    if recomputation is not True and s.layers > 1:
        bodies = max(0, s.rest - s.logits)
        saves = bodies - bodies // s.layers  # one layer stays in full; the inputs of the layers are not counted
        option = "--gradient_checkpointing full" if recomputation else "--gradient_checkpointing"
        remedies.append(Remedy(option, "activations are recomputed: slower", saves))
    if s.logits:
        saves = min(s.logits, s.rest)
        remedies.append(Remedy("--loss chunked", "logits are never materialized in full", saves))
    if s.strategy.precision == "fp32":
        remedies.append(Remedy("--precision bf16", "activations in half precision", s.rest // 2))
    return remedies


def _state_remedies(s: Shortage) -> list[Remedy]:
    """Return the remedies that make model states smaller: shard them over the ranks, offload them, or avoid them."""
    setup = s.setup
    recipe = s.recipe
    layout = s.strategy.layout
    remedies: list[Remedy] = []
    half = s.strategy.precision != "fp32"

    def add(option: str, effect: str, changed: StateSetup) -> None:
        remedies.append(Remedy(option, effect, s.states() - s.states(changed)))

    max_stage = 2 if recipe.quantised else 3  # quantised weights cannot be sharded
    candidates = set()
    if setup.ranks > 1 and layout.pipeline == 1:
        candidates.add((max_stage, setup.offloads if layout.tensor == 1 else 0))
    if s.on_host is not None and layout.replica_size == 1 and recipe.optim != "muon":  # which is refused there
        candidates |= {(max(2, setup.stage), 1), (max_stage, 2)}
    for stage, offloads in candidates:
        name = OFFLOAD_STRATEGIES.get((stage, offloads))
        changed = replace(setup, stage=stage, offloads=offloads, has_master=True)
        changed = replace(changed, trained_width=2 if half else 4)
        to_host = sum(changed.held(on_host=True)) * s.local_processes
        saves_more = (stage, offloads) > (setup.stage, setup.offloads)
        if name and saves_more and (s.host_free is None or to_host < s.host_free):
            effect = HOST_EFFECT[offloads] or f"sharded over {setup.ranks} processes: optimizer state and gradients"
            effect += ", and weights" if stage == 3 and not offloads else ""
            pair = f"tp_{name}" if layout.tensor > 1 else name
            add(f"--config_file accelerate_configs/{pair}.yaml", effect, changed)
    if recipe.model_name_or_path and layout.model_size == 1 and recipe.optim != "muon" and not recipe.quantised:
        frozen = replace(setup, trained=0, frozen=setup.trained + setup.frozen, frozen_width=2 if half else 4, kept=0)
        if s.phase == "load" and s.on_host is not None and setup.stage < 3:
            option = "--lora --load_in_4bit" if half else "--lora --load_in_4bit --precision bf16"
            add(option, "frozen weights, in 4 bits", replace(frozen, frozen_width=NF4_BYTES))
        elif not recipe.lora:
            add("--lora", "frozen weights; gradients and optimizer state of the adapter alone", frozen)
    return remedies
