"""What would help a run whose memory has run out, and about how much each remedy saves: sums over plain numbers.

Nothing here looks at the machine. The sizes are measured, or follow from the recipe and the model's configuration
(zerofit/health/out_of_memory.py). A remedy that is in force already, or has no effect where memory ran out, is not
named.
"""

from dataclasses import dataclass, field

WORKING = ("forward", "loss", "backward")  # phases that hold activations for a backward pass
IN_SHARES = 24 / 34  # of a layer's activations, what ranks that share it divide (Korthikanti et al. 2022, section 4.2)
NEGLIGIBLE = 0.01  # of what is held: a remedy that saves less is not worth its line


@dataclass(frozen=True)
class Held:
    """Bytes of one rank on the memory that ran out."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0  # moments and fp32 copies
    rest: int = 0  # activations, logits, workspace: the peak without the above

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.rest


@dataclass(frozen=True)
class Situation:
    """Where memory ran out, and what is in force. Sizes in bytes, None or 0 where not known.

    Args:
        where: device or host, which ran out.
        on_cpu: the model itself is computed on the host.
        due: what weights come to once they are loaded, gradients and optimizer once the first update is done.
        parameters: of the whole model.
        element: bytes of a weight as it is loaded.
        keeps_fp32: weights that are trained are in fp32 in every precision.
        logits: what the logits of a micro-batch take where they are held whole, else 0.
        layer_inputs: the inputs of all layers together: what stays of the activations where they are recomputed.
        lengths: the options that say how long a row is, with their values.
        pretrained: its weights are loaded, and an adapter could be trained in their place.
        copies: host memory of the program's other processes and copies, where there are any now: {option: bytes}.
        is_sure: whether the error says in so many words that memory ran out.
    """

    where: str
    phase: str
    on_cpu: bool = False
    rank: int = 0
    update: int | None = None
    world_size: int = 1
    tensor: int = 1  # processes that share each layer
    sequence: int = 1  # processes that split each row
    pipeline: int = 1  # stages, each with some of the layers
    can_share_layers: bool = False  # two processes could
    can_split_rows: bool = False
    local_processes: int = 1
    asked: int | None = None
    free: int | None = None
    total: int | None = None
    host_free: int | None = None
    others: int | None = None  # other processes on the device
    unused: int | None = None  # reserved by torch's allocator, in pieces that did not fit
    process_limit: int | None = None  # ulimit
    held: Held = Held()
    due: Held = Held()
    parameters: int = 0
    element: int = 4
    keeps_fp32: bool = False
    stage: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    strategy: str = ""
    precision: str = "fp32"
    micro_batch: int = 1
    accumulation: int = 1
    global_batch_is_set: bool = False
    eval_batch: int = 1
    beams: int = 1
    generates: bool = False
    row_tokens: int | None = None
    lengths: dict[str, int] = field(default_factory=dict)
    layers: int = 0
    layer_inputs: int = 0
    logits: int = 0
    can_chunk: bool = False
    gradient_checkpointing: bool | str | int = False
    can_offload_inputs: bool = False
    lora: bool = False
    optim: str = "adamw"
    quantised: bool = False  # such weights cannot be sharded by ZeRO-3
    pretrained: bool = False
    dataloader_workers: int = 0
    copies: dict[str, int] = field(default_factory=dict)
    is_sure: bool = True

    @property
    def activations(self) -> int:
        """What the passes took, with what was asked for last."""
        return self.held.rest + (self.asked or 0)

    @property
    def in_training(self) -> bool:
        return self.phase in ("prepare", *WORKING, "update")

    @property
    def weights(self) -> int:
        return max(self.held.weights, self.due.weights)

    @property
    def optimizer(self) -> int:
        """Held, or soon to be held: what makes room for now only would run out again."""
        return max(self.held.optimizer, self.due.optimizer * self.in_training)

    @property
    def gradients(self) -> int:
        return max(self.held.gradients, self.due.gradients * self.in_training)

    @property
    def whole(self) -> int:
        """Weights, gradients and optimizer state of this rank on the memory that ran out, once all are there."""
        optimizer, gradients = (max(getattr(self.held, part), getattr(self.due, part))
                                for part in ("optimizer", "gradients"))  # fmt: skip
        return self.weights + gradients + optimizer

    @property
    def limit(self) -> int | None:
        """What this rank may have of the memory that ran out."""
        share = self.total and self.total // (self.local_processes if self.where == "host" else 1)
        return min(filter(None, (share, self.process_limit)), default=None)

    @property
    def holds_model(self) -> bool:
        """Whether the memory that ran out is the one that the model is computed in."""
        return self.where == "device" or self.on_cpu


@dataclass(frozen=True)
class Remedy:
    """One thing to do: the option with its value, what it does, and the bytes a rank that it saves (None: unknown)."""

    option: str
    what: str
    saves: int | None = None


def remedies(s: Situation) -> list[Remedy]:
    """All that apply, the largest saving first, those of unknown size last."""
    applicable = []
    if s.holds_model:
        if s.phase in WORKING:
            applicable += _of_batch(s) + _of_activations(s)
        elif s.phase == "evaluate":
            applicable += _of_evaluation(s)
        elif s.phase == "load":
            applicable += _of_loading(s)
        applicable += _of_state(s) + _of_replicas(s)
    applicable += _of_allocator(s) if s.where == "device" else _of_host(s)
    least = NEGLIGIBLE * max(s.held.total, s.asked or 0, s.weights)
    applicable = [remedy for remedy in applicable if remedy.saves is None or remedy.saves > least]
    return sorted(applicable, key=lambda remedy: -1 if remedy.saves is None else remedy.saves, reverse=True)


def smaller_batch(micro: int, accumulation: int) -> tuple[int, int] | None:
    """(micro-batch, accumulation) of the same update: the largest micro-batch of at most half the size; None: none."""
    rows = micro * accumulation
    fitting = [size for size in range(1, micro // 2 + 1) if rows % size == 0]
    return (fitting[-1], rows // fitting[-1]) if fitting else None


def _of_batch(s: Situation) -> list[Remedy]:
    smaller = smaller_batch(s.micro_batch, s.accumulation)
    if smaller is None:
        return []
    micro, accumulation = smaller
    option, what = f"--per_device_train_batch_size {micro}", "the accumulation follows from global_batch_size"
    if not s.global_batch_is_set:
        option, what = f"{option} --gradient_accumulation_steps {accumulation}", "the global batch stays as it is"
    return [Remedy(option, what, round(s.activations * (1 - micro / s.micro_batch)))]


def _of_activations(s: Situation) -> list[Remedy]:
    applicable, bodies = [], max(0, s.activations - s.logits)
    if s.gradient_checkpointing is not True and s.layers > 1:
        option = "--gradient_checkpointing" + (" full" if s.gradient_checkpointing else "")
        saved = _of_recomputation(s, bodies)
        applicable.append(Remedy(option, "activations are computed anew: slower", saved))
    elif s.where == "device" and not s.on_cpu and s.can_offload_inputs and s.layers > 2:
        saved = s.layer_inputs * (s.layers - 2) // s.layers  # two are on the device at a time
        applicable.append(Remedy("--activation_offload", "the inputs of layers wait on the host: slower", saved))
    if s.can_chunk and s.logits:
        applicable.append(Remedy("--loss chunked", "logits are never held whole", min(s.logits, s.activations)))
    if s.precision == "fp32":
        applicable.append(Remedy("--precision bf16", "activations in half precision", s.activations // 2))
    return applicable + _of_length(s)


def _of_recomputation(s: Situation, bodies: int) -> int | None:
    """What recomputing each layer saves of `bodies`. The inputs of all layers stay, and one layer whole."""
    if s.gradient_checkpointing == "selective":
        return None
    recomputed = -(-s.layers // s.gradient_checkpointing) if s.gradient_checkpointing else 0
    whole = (bodies - s.layer_inputs * recomputed // s.layers) // (s.layers - recomputed)
    return bodies - s.layer_inputs - whole


def _of_length(s: Situation) -> list[Remedy]:
    halves = {name: value // 2 for name, value in s.lengths.items() if value >= 64}
    options = " ".join(f"--{name} {value}" for name, value in halves.items())
    return [Remedy(options, "shorter rows: this changes what is trained on", s.activations // 2)] if halves else []


def _of_evaluation(s: Situation) -> list[Remedy]:
    applicable = []
    if s.eval_batch > 1:
        half = s.eval_batch // 2
        saved = round(s.activations * (1 - half / s.eval_batch))
        applicable.append(Remedy(f"--per_device_eval_batch_size {half}", "the figures stay as they are", saved))
    if s.generates and s.beams > 1:
        saved = round(s.activations * (1 - 1 / s.beams))
        applicable.append(Remedy("--num_beams 1", "this changes the generated texts", saved))
    return applicable


def _of_loading(s: Situation) -> list[Remedy]:
    """Fewer bytes a weight. Without DeepSpeed what is trained is held in fp32, and only frozen weights are not."""
    applicable, half = [], "" if s.precision != "fp32" else " --precision bf16"
    if s.element == 4 and s.stage and not s.keeps_fp32:
        applicable.append(Remedy("--precision bf16", "weights in half precision", s.weights // 2))
    elif s.element == 4 and s.pretrained:
        applicable.append(Remedy(f"--lora{half}", "frozen weights, in half precision", s.weights // 2))
    if s.where == "device" and s.pretrained and not s.quantised and s.stage < 3:
        saved = s.weights - s.weights // (2 * s.element)
        applicable.append(Remedy(f"--lora --load_in_4bit{half}", "frozen weights, in 4 bits", saved))
    return applicable


def _of_state(s: Situation) -> list[Remedy]:
    """Weights, gradients and optimizer state: sharded over the processes, moved to the host, or not needed."""
    known = s.weights > 0
    sharers = s.world_size // (s.tensor * s.pipeline)
    shared = 1 - 1 / sharers
    optimizer = 0 if s.offload_optimizer and s.where == "device" else s.optimizer
    gains = {1: optimizer * shared, 2: s.gradients * shared, 3: s.weights * shared}
    parts = {1: "optimizer state", 2: "optimizer state and gradients", 3: "optimizer state, gradients and weights"}
    applicable = []
    for stage in range(s.stage + 1, 3 if s.quantised else 4) if sharers > 1 and s.pipeline == 1 else ():
        saved = round(sum(gains[step] for step in range(s.stage + 1, stage + 1)))
        what = f"sharded over {sharers} processes: {parts[stage]}"
        if stage == 3 or s.phase != "load":
            applicable.append(Remedy(_pair(_with_offload(s, stage)), what, saved if known else None))
    if s.where == "device" and not s.on_cpu and s.tensor * s.sequence * s.pipeline == 1:
        applicable += _of_offload(s, optimizer, gains, known)
    if s.optim == "adamw" and s.keeps_fp32 and not s.stage and s.phase != "load":
        what = "another optimizer, with next to no state, for a run that starts anew"
        applicable.append(Remedy("--optim adafactor", what, s.optimizer if known else None))
    if s.pretrained and not s.lora and s.phase != "load":
        what = "no gradients and no optimizer state but the adapter's"
        applicable.append(Remedy("--lora", what, s.gradients + optimizer if known else None))
    return applicable


def _of_replicas(s: Situation) -> list[Remedy]:
    """Two processes that hold a replica together: they share each layer, or split each row. There are half as many
    replicas then, and each accumulates twice as much."""
    if s.world_size % 2 or s.tensor * s.sequence * s.pipeline > 1:
        return []
    more = "" if s.global_batch_is_set else f" --gradient_accumulation_steps {2 * s.accumulation}"
    activations = s.activations if s.phase in WORKING else 0
    stage, shared = max(1, s.stage), 1 - 1 / s.world_size
    optimizer = 0 if s.stage else s.optimizer * shared
    applicable = []
    if s.can_share_layers:
        state = optimizer + (s.gradients / 2 if stage < 2 else 0) + (s.weights / 2 if stage < 3 else 0)
        name = "tp" if stage == 1 else f"tp_zero{stage}"
        what = "2 processes share each layer: half of its weights, and of most activations"
        saved = round(state + activations * IN_SHARES / 2)
        applicable.append(Remedy(_pair(name) + more, what, saved if s.weights else None))
    if s.can_split_rows and activations:
        state = optimizer + (s.gradients * shared if s.stage < 2 else 0) + (s.weights * shared if s.stage < 3 else 0)
        what = "2 processes split each row: half of the activations; the rest as under zero3"
        applicable.append(Remedy(_pair("sp") + more, what, round(state + activations / 2) if s.weights else None))
    return applicable


def _with_offload(s: Situation, stage: int) -> str:
    """The pair of this stage that offloads what is offloaded now, and splits layers where they are split."""
    if s.tensor > 1:
        return f"tp_zero{stage}"
    if not s.offload_optimizer:
        return f"zero{stage}"
    return "zero3_offload_optimizer" if stage == 3 else "zero2_offload"


def _of_offload(s: Situation, optimizer: int, gains: dict[int, float], known: bool) -> list[Remedy]:
    """The pairs with offload, where the host has room for what they move."""
    applicable, gradients = [], gains[2] if s.stage < 2 else 0
    moved = optimizer if s.stage else optimizer / s.world_size
    if not s.offload_optimizer and s.phase != "load" and _host_takes(s, moved):
        pair = "zero2_offload" if s.stage < 3 else "zero3_offload_optimizer"
        what = "the optimizer's state in host memory: slower"
        applicable.append(Remedy(_pair(pair), what, round(optimizer + gradients) if known else None))
    moved += s.weights if s.stage == 3 else s.weights / s.world_size
    if not s.offload_parameters and not s.quantised and _host_takes(s, moved):
        what = "optimizer state and weights in host memory: the slowest"
        saved = round(optimizer + gradients + s.weights)
        applicable.append(Remedy(_pair("zero3_offload"), what, saved if known else None))
    return applicable


def _host_takes(s: Situation, moved: float) -> bool:
    return s.host_free is None or moved * s.local_processes < s.host_free


def _of_allocator(s: Situation) -> list[Remedy]:
    if not s.unused:
        return []
    what = "(in the environment) lets torch use memory that it holds in pieces too small"
    return [Remedy("PYTORCH_ALLOC_CONF=expandable_segments:True", what, s.unused)]


def _of_host(s: Situation) -> list[Remedy]:
    applicable = []
    if s.offload_optimizer and not s.on_cpu:
        pair = f"zero{s.stage}"
        what = "optimizer state (and weights) on the devices, not in host memory"
        applicable.append(Remedy(_pair(pair), what, s.held.optimizer + s.held.weights or None))
    if s.copies.get("save_async"):
        what = "checkpoints are written without a copy of the state"
        applicable.append(Remedy("--save_async false", what, s.copies["save_async"]))
    if s.dataloader_workers:
        what = f"{s.dataloader_workers} fewer processes a rank"
        applicable.append(Remedy("--dataloader_num_workers 0", what, s.copies.get("dataloader_num_workers")))
    if s.local_processes > 1 and not (s.phase == "load" and s.stage == 3):  # of ZeRO-3 fewer would hold more each
        option, what = f"--num_processes {s.world_size // 2}", "half as many processes on each host"
        if not s.global_batch_is_set:
            option = f"{option} --gradient_accumulation_steps {2 * s.accumulation}"
        each = max(s.held.total, s.weights if s.holds_model else 0)
        applicable.append(Remedy(option, what, each * (s.local_processes - s.local_processes // 2) or None))
    return applicable


def _pair(name: str) -> str:
    return f"--config_file accelerate_configs/{name}.yaml"
