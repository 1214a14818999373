"""The options that every task has: optimizer, strategy, run folder, evaluation, checkpoints, trackers; and the rate
that they describe, a pure function of the update: it has no state that could be stepped too often.

Those of batches, of the model and of the data are in data_options.py and model_options.py.
"""

import math
import re
from dataclasses import dataclass

from zerofit.recipe.base import FOLDER_FORM, Recipe, option
from zerofit.recipe.data_options import BatchOptions, SourceOptions
from zerofit.recipe.errors import UserError
from zerofit.recipe.model_options import LoraOptions, ModelOptions
from zerofit.recipe.paths import is_address

SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "wsd")
# All trackers of accelerate 1.15.
TRACKERS = ("tensorboard", "wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio")
NEEDS_HELD_OUT = "validation_split_percentage|validation_file|dataset_name|data_path"  # one of them, to evaluate on
OPTIMIZERS = ("adamw", "muon", "adamw_8bit", "adafactor")


@dataclass
class OptimizerOptions(Recipe, phase="train"):
    """Optimizer, schedule and precision"""

    optim: str = option(
        "adamw",
        "Optimizer. muon: orthogonal updates for the matrices of the blocks, AdamW for the rest. With less state, of "
        "one process and under ddp: adamw_8bit (moments in 8 bits, by bitsandbytes), adafactor (no first moment, and "
        "of the second one means of rows and columns).",
        choices=OPTIMIZERS,
    )
    learning_rate: float = option(5e-5, "Peak learning rate.", minimum=0, aliases=("lr",), common=True)
    weight_decay: float = option(
        0.0, "Weight decay (decoupled), for matrices only (not for biases and norms).", minimum=0
    )
    adam_beta1: float = option(0.9, "AdamW's first decay rate.", minimum=0, below=1, noted="!optim=adafactor")
    adam_beta2: float = option(0.999, "AdamW's second decay rate.", minimum=0, below=1, noted="!optim=adafactor")
    adam_epsilon: float = option(1e-8, "AdamW's epsilon.", minimum=0, aliases=("adam_eps",), noted="!optim=adafactor")
    ema_decay: float = option(
        0.0,
        "Also keep an exponential moving average (EMA) of the weights: in each update "
        "ema = X * ema + (1 - X) * weights. It is exported to model/ema. 0: none.",
        minimum=0,
        below=1,
    )
    max_grad_norm: float = option(
        1.0, "Maximum norm of the gradient, which is clipped to it. 0: no clipping.", minimum=0, aliases=("clip_grad",)
    )
    lr_scheduler_type: str = option(
        "linear", "Shape of the learning-rate schedule.", choices=SCHEDULES, aliases=("lr_decay_style",), common=True
    )
    num_warmup_steps: int = option(
        0,
        "Updates of linear warm-up.",
        minimum=0,
        aliases=("lr_warmup_iters",),
        noted="!lr_scheduler_type=constant",
        excludes="warmup_ratio",
    )
    warmup_ratio: float | None = option(
        None,
        "Warm-up as a fraction of the updates of the schedule (lr_decay_steps, else all updates).",
        minimum=0,
        at_most=1,
        aliases=("lr_warmup_fraction",),
        common=True,
        noted="!lr_scheduler_type=constant",
    )
    min_lr_ratio: float = option(
        0.0,
        "Smallest learning rate as a fraction of the peak (linear, cosine, wsd).",
        minimum=0,
        at_most=1,
        noted="lr_scheduler_type=linear|cosine|wsd",
    )
    lr_decay_steps: int | None = option(
        None,
        "Update at which the learning rate reaches its minimum, and stays there; by default the last one.",
        positive=True,
        aliases=("lr_decay_iters",),
        noted="lr_scheduler_type=linear|cosine|wsd",
    )
    wsd_decay_ratio: float = option(
        0.2,
        "Fraction of the schedule's updates (lr_decay_steps, else all), its last ones, in which wsd decays.",
        positive=True,
        at_most=1,
        noted="lr_scheduler_type=wsd",
    )
    precision: str | None = option(
        None,
        "Precision of computation; by default that of the accelerate YAML or the DeepSpeed JSON, else fp32.",
        choices=("fp32", "bf16", "fp16"),
        common=True,
        phase="always",
    )
    residual_in_fp32: bool = option(
        False,
        "In bf16, where weights are in fp32 (one process, DDP): keep the residual stream in fp32 as well. Without it "
        "the residual stream is in bf16, as under ZeRO and FSDP2, which is faster and takes less memory.",
        phase="always",
    )


@dataclass
class StrategyOptions(Recipe, identity=False):
    """Strategy, under torchrun (with accelerate launch: its --config_file)"""

    strategy: str | None = option(
        None,
        "A name in accelerate_configs/, a .yaml file, or a DeepSpeed .json without a YAML. Only as a flag.",
        aliases=("deepspeed_config",),
        common=True,
    )


def profiled(text: str) -> range:
    """Parse `N:M` into the range of these updates; empty if the text has another form."""
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", text)
    return range(int(match[1]), int(match[2]) + 1) if match else range(0)


@dataclass
class RunOptions(Recipe, phase="train", identity=False):
    """Run folder and logs"""

    output_dir: str | None = option(
        None,
        "The run folder; by default outputs/ and the name of the recipe.",
        form=FOLDER_FORM,
        common=True,
        phase="always",
    )
    overwrite_output_dir: bool = option(
        False, "Replace another run in output_dir; files that no run has written stay.", phase="always"
    )
    logging_steps: int = option(
        10,
        "Updates between two lines of the log, if the output is not a terminal.",
        positive=True,
        aliases=("log_interval",),
    )
    record_samples: bool = option(False, "Write samples.jsonl: the indices of the training samples of each update.")
    profile: str | None = option(
        None,
        "N:M: write a trace of the updates N to M (torch's profiler), and show the costliest operators.",
        form=(profiled, 'N:M, the first and the last update, such as 10:12 (in a YAML file "10:12", in quotes)'),
    )

    @property
    def profiled_updates(self) -> range:
        """The updates of which `profile` records a trace; empty without it."""
        return profiled(self.profile or "")


@dataclass
class EvaluationOptions(Recipe, phase="train"):
    """Evaluation and the best model"""

    eval_steps: int | None = option(
        None,
        "Updates between two evaluations; by default at the end of each epoch.",
        positive=True,
        aliases=("eval_interval",),
        common=True,
    )
    eval_on_start: bool = option(True, "Evaluate before the first update.")
    metric_for_best_model: str | None = option(
        None,
        "Evaluation metric that decides which evaluation is the best; the default depends on the task. The weights of "
        "the best are kept in checkpoints/ if this is set, or the task has metrics besides the loss.",
        follows="predict_with_generate preference_loss task_name regression",
        identity=False,
    )
    early_stopping_patience: int | None = option(
        None, "Stop after this many evaluations in a row without an improvement.", positive=True, needs=NEEDS_HELD_OUT
    )
    load_best_model_at_end: bool | None = option(
        None,
        "Export the best weights to model/ instead of the last; by default on with early stopping.",
        aliases=("load_best_model",),
        identity=False,
        needs=NEEDS_HELD_OUT,
    )


@dataclass
class CheckpointOptions(Recipe, phase="train", identity=False):
    """Checkpoints and resuming"""

    save_strategy: str | None = option(
        None,
        "When to save a checkpoint: no, epoch (at the end of each epoch), or steps (every save_steps updates).",
        choices=("no", "epoch", "steps"),
        common=True,
    )
    save_steps: int | None = option(
        None,
        "Updates between two checkpoints.",
        positive=True,
        aliases=("save_interval",),
        excludes="save_strategy=no|epoch",
    )
    save_total_limit: int | None = option(
        None,
        "Keep this many of the newest checkpoints, and the best; by default all.",
        positive=True,
        needs="save_strategy|save_steps",
    )
    save_minutes: float = option(
        30.0, "Minutes between two additional checkpoints for resuming; the last two are kept. 0: none.", minimum=0
    )
    save_async: bool | None = option(
        None, "Write checkpoints while training continues; by default if memory has room for a copy of the state."
    )
    resume: str = option(
        "auto",
        "auto: resume from the newest complete checkpoint in output_dir, if there is one; never: start again; or the "
        "folder of a checkpoint.",
        aliases=("resume_from_checkpoint",),
    )
    mirror: str | None = option(
        None,
        "Address of an object store, as s3://bucket/run: checkpoints and results are copied there while training "
        "continues, and a run whose output_dir has been lost resumes from there.",
        form=(is_address, "an address, such as s3://bucket/run"),
    )
    push_to_hub: str | None = option(
        None, "Hub repository, owner/name, to push model/ to; a new one is private.", form=(".*/.*", "owner/name")
    )
    max_hours: float | None = option(
        None, "Stop after this many hours, counted from its start: save, then exit with code 85.", positive=True
    )

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.save_strategy == "steps" and not self.save_steps:
            problems.append("save_strategy = steps: set the number of updates with save_steps")
        return problems


@dataclass
class AnomalyOptions(Recipe, phase="train", identity=False):
    """Anomalies and hangs"""

    on_anomaly: str = option(
        "stop",
        "If the loss or gradient norm is NaN, infinite or a spike: stop before the weights change, skip the update, "
        "or rewind to the last checkpoint and continue without the samples of that update.",
        choices=("stop", "skip", "rewind"),
    )
    spike_threshold: float = option(
        10.0, "Robust z-score from which a loss (or a gradient norm without clipping) is a spike. 0: never.", minimum=0
    )
    watchdog_minutes: float = option(
        30.0, "End the run when a process has made no progress for this long. 0: never.", minimum=0, phase="always"
    )


@dataclass
class TrackingOptions(Recipe, phase="train", identity=False):
    """Trackers"""

    with_tracking: bool = option(False, "Send the metrics to a tracker (report_to).", common=True)
    report_to: str = option(
        "all",
        "Tracker: one of accelerate's, all (those installed) or none.",
        choices=("all", *TRACKERS, "none"),
        noted="with_tracking",
    )
    report_name: str | None = option(
        None, "Project name at the tracker; by default zerofit and the task.", noted="with_tracking"
    )


@dataclass
class TrainingRecipe(
    TrackingOptions,
    AnomalyOptions,
    CheckpointOptions,
    EvaluationOptions,
    RunOptions,
    StrategyOptions,
    OptimizerOptions,
    BatchOptions,
    SourceOptions,
    LoraOptions,
    ModelOptions,
):
    """The options that every task has."""


@dataclass(frozen=True)
class Schedule:
    """Peak rate, shape and lengths in updates. `schedule(k)` is the rate of update k, counted from 0.

    The curve reaches its minimum at update `num_until_minimum`, and stays there (Megatron's --lr-decay-iters).
    """

    shape: str
    peak: float
    num_updates: int
    num_warmup: int
    min_ratio: float = 0.0
    num_decay: int = 0  # wsd only
    num_until_minimum: int | None = None  # None: the whole run

    @property
    def warning(self) -> str | None:
        """A sentence for the log if the rate never reaches its peak; else None."""
        if self.num_warmup < self.num_updates or self.shape == "constant":
            return None
        return (
            f"num_warmup_steps = {self.num_warmup} and the run has {self.num_updates} updates: "
            f"the learning rate never reaches its peak of {self.peak:g}"
        )

    def __call__(self, update: int) -> float:
        if self.shape == "constant":
            return self.peak
        if update < self.num_warmup:
            return self.peak * (update / self.num_warmup)
        if self.shape == "constant_with_warmup":
            return self.peak
        decay_end = self.num_until_minimum or self.num_updates
        if self.shape == "wsd":
            height = (decay_end - update) / max(1, self.num_decay)
        else:
            done = min(1.0, (update - self.num_warmup) / max(1, decay_end - self.num_warmup))
            height = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[self.shape]
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * min(1.0, max(0.0, height)))


def make_schedule(recipe: OptimizerOptions, num_updates: int) -> Schedule | None:
    """The recipe's schedule for a run of `num_updates`; None where nothing is trained. Raises UserError: the warm-up
    is not over when the decay has ended."""
    if not num_updates:
        return None
    warmup = warmup_updates(recipe, num_updates)
    decay_steps = recipe.lr_decay_steps
    decays = recipe.lr_scheduler_type not in ("constant", "constant_with_warmup")
    if decay_steps and decays and warmup >= decay_steps:
        raise UserError(
            f"lr_decay_steps = {decay_steps} and a warm-up of {warmup} updates: the decay would end before it "
            "begins. Make lr_decay_steps larger, or the warm-up shorter"
        )
    return Schedule(
        shape=recipe.lr_scheduler_type,
        peak=recipe.learning_rate,
        num_updates=num_updates,
        num_warmup=warmup,
        min_ratio=recipe.min_lr_ratio,
        num_decay=round(recipe.wsd_decay_ratio * (decay_steps or num_updates)),
        num_until_minimum=decay_steps,
    )


def warmup_updates(recipe: OptimizerOptions, num_updates: int) -> int:
    """Return the number of warm-up updates; a ratio is of the updates until the rate is at its minimum, as in
    Megatron."""
    if recipe.warmup_ratio is not None:
        return math.ceil(recipe.warmup_ratio * (recipe.lr_decay_steps or num_updates))
    return recipe.num_warmup_steps
