"""The options that every task has: batches, optimizer, strategy, run folder, evaluation, checkpoints, trackers.

Those of the model and of the data are in model_options.py and data_options.py.
"""

from dataclasses import dataclass

from train.recipe.base import Recipe
from train.recipe.data_options import SourceOptions
from train.recipe.fields import option
from train.recipe.model_options import LoraOptions, ModelOptions

SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "wsd")
WITHOUT_TRAINING = "To train nothing, say --evaluate_only, or --predict_file FILE"
TRACKERS = ("all", "wandb", "tensorboard", "none")


@dataclass
class BatchOptions(Recipe):
    """Batches and length of the run"""

    per_device_train_batch_size: int = option(
        8, "Micro-batch: samples on one device in one pass.", positive=True, aliases=("micro_batch_size",), common=True
    )
    per_device_eval_batch_size: int = option(8, "The same in evaluation.", positive=True)
    gradient_accumulation_steps: int | None = option(None, "Micro-batches in one update (default 1).", positive=True)
    global_batch_size: int | None = option(
        None, "Samples in one update over all devices; the accumulation follows from it.", positive=True, common=True
    )
    num_train_epochs: float = option(
        3.0, "Passes over the training data.", positive=True, common=True, zero=WITHOUT_TRAINING
    )
    max_train_steps: int | None = option(
        None, "Updates to make; overrides num_train_epochs.", positive=True, aliases=("train_iters",), common=True,
        zero=WITHOUT_TRAINING,
    )  # fmt: skip
    seed: int = option(42, "Seeds the order of samples, the initial weights and dropout.", minimum=0)
    dataloader_num_workers: int | None = option(
        None, "Processes that load batches on each rank; by default 2 with a GPU, and none on a CPU.", minimum=0
    )


@dataclass
class OptimizerOptions(Recipe):
    """Optimizer, schedule and precision"""

    learning_rate: float = option(5e-5, "Peak learning rate.", minimum=0, aliases=("lr",), common=True)
    weight_decay: float = option(0.0, "AdamW's weight decay, for matrices only (not for biases and norms).", minimum=0)
    adam_beta1: float = option(0.9, "AdamW's first decay rate.", minimum=0)
    adam_beta2: float = option(0.999, "AdamW's second decay rate.", minimum=0)
    adam_epsilon: float = option(1e-8, "AdamW's epsilon.", minimum=0, aliases=("adam_eps",))
    max_grad_norm: float = option(
        1.0, "Clip the gradient's norm to this; 0 turns clipping off.", minimum=0, aliases=("clip_grad",)
    )
    lr_scheduler_type: str = option(
        "linear", "Shape of the learning-rate schedule.", choices=SCHEDULES, aliases=("lr_decay_style",), common=True
    )
    num_warmup_steps: int = option(0, "Updates of linear warm-up.", minimum=0, aliases=("lr_warmup_iters",))
    warmup_ratio: float | None = option(
        None,
        "Warm-up as a share of the updates of the schedule (lr_decay_steps, else all).",
        minimum=0,
        aliases=("lr_warmup_fraction",),
        common=True,
    )
    min_lr_ratio: float = option(
        0.0, "Smallest learning rate as a share of the peak (linear, cosine, wsd).", minimum=0
    )
    lr_decay_steps: int | None = option(
        None, "Updates after which the learning rate is at its smallest and stays there; by default the whole run.",
        positive=True, aliases=("lr_decay_iters",),
    )  # fmt: skip
    wsd_decay_ratio: float = option(0.2, "Share of these updates in which wsd decays, at its end.", positive=True)
    precision: str | None = option(
        None,
        "By default what the accelerate YAML or the DeepSpeed JSON says, else fp32.",
        choices=("fp32", "bf16", "fp16"),
        common=True,
    )

    def problems(self) -> list[str]:
        found = super().problems()
        if self.warmup_ratio is not None and self.num_warmup_steps:
            found.append(
                f"num_warmup_steps = {self.num_warmup_steps} and warmup_ratio = {self.warmup_ratio:g}: "
                "keep one of the two"
            )
        for name in ("adam_beta1", "adam_beta2", "warmup_ratio", "min_lr_ratio", "wsd_decay_ratio"):
            value = getattr(self, name)
            if (value is not None and value > 1) or (value == 1 and name.startswith("adam")):
                found.append(f"{name} = {value:g}: it must be {'below' if name.startswith('adam') else 'at most'} 1")
        return found


@dataclass
class StrategyOptions(Recipe):
    """The strategy, under torchrun; accelerate launch has --config_file"""

    strategy: str | None = option(None, "A name in accelerate_configs/, or a .yaml file. A flag only.", common=True)
    deepspeed_config: str | None = option(None, "A DeepSpeed JSON without a YAML. A flag only.")


@dataclass
class RunOptions(Recipe):
    """The run's folder and its record"""

    output_dir: str | None = option(None, "The run's folder; by default outputs/ and the recipe's name.", common=True)
    overwrite_output_dir: bool = option(
        False, "Allow output_dir to hold a different run, and replace that; this very run goes on all the same."
    )
    logging_steps: int = option(
        10,
        "Updates between two lines of the log where there is no terminal.",
        positive=True,
        aliases=("log_interval",),
    )
    record_samples: bool = option(
        False, "Write samples.jsonl: which samples of the training set each update was made of."
    )


@dataclass
class EvaluationOptions(Recipe):
    """Evaluation, and which one is the best"""

    eval_steps: int | None = option(
        None,
        "Updates between evaluations; by default at the end of each epoch.",
        positive=True,
        aliases=("eval_interval",),
        common=True,
    )
    eval_on_start: bool = option(True, "Evaluate before the first update.")
    metric_for_best_model: str | None = option(
        None, "Held-out figure that says which evaluation is the best; by default the task's own."
    )
    save_best: bool | None = option(
        None, "Keep the best evaluation's weights in checkpoints/; by default where the task has more than a loss."
    )
    early_stopping_patience: int | None = option(
        None, "Stop after this many evaluations in a row without a better one.", positive=True
    )
    early_stopping_threshold: float = option(0.0, "How much better counts as better.", minimum=0)
    load_best_model_at_end: bool | None = option(
        None,
        "Leave the best weights in model/, not the last; by default with early stopping.",
        aliases=("load_best_model",),
    )

    def problems(self) -> list[str]:
        found = super().problems()
        if self.load_best_model_at_end and self.save_best is False:
            found.append("load_best_model_at_end = true and save_best = false: there would be no best to load")
        if self.early_stopping_threshold and not self.early_stopping_patience:
            found.append("early_stopping_threshold has no effect without early_stopping_patience")
        return found


@dataclass
class CheckpointOptions(Recipe):
    """Checkpoints, and going on from them"""

    save_strategy: str | None = option(
        None,
        "When checkpoints/ gets a model: no, epoch (at the end of each), or steps (every save_steps updates).",
        choices=("no", "epoch", "steps"),
        common=True,
    )
    save_steps: int | None = option(
        None, "Updates between two checkpoints.", positive=True, aliases=("save_interval",)
    )
    save_total_limit: int | None = option(
        None, "Keep the last so many checkpoints, and the best; by default all.", positive=True
    )
    save_keep_every: int | None = option(
        None, "Beside these, keep each checkpoint whose update is a multiple of this.", positive=True
    )
    save_minutes: float = option(
        30.0,
        "Minutes between checkpoints to go on from, beside those of save_strategy; the last two are kept. 0: none.",
        minimum=0,
    )
    save_only_model: bool = option(False, "Checkpoints hold the model only: smaller, and no run can go on from them.")
    save_async: bool | None = option(
        None, "Write checkpoints while training goes on; by default where memory has room for a copy of the state."
    )
    on_save_failure: str = option(
        "continue", "Where a checkpoint cannot be written: continue, or stop.", choices=("continue", "stop")
    )
    resume: str = option(
        "auto",
        "auto: go on from the newest whole checkpoint in output_dir, if there is one; never: start over; or the "
        "folder of a checkpoint.",
        aliases=("resume_from_checkpoint",),
    )
    max_hours: float | None = option(
        None, "Stop after this many hours, counted from the start of the program: save, and leave with code 85.",
        positive=True,
    )  # fmt: skip

    def problems(self) -> list[str]:
        found = super().problems()
        if self.save_strategy == "steps" and not self.save_steps:
            found.append("save_strategy = steps: say how many with save_steps")
        if self.save_steps and self.save_strategy in ("no", "epoch"):
            found.append(f"save_steps = {self.save_steps} and save_strategy = {self.save_strategy}: keep one of them")
        if self.save_total_limit and self.save_strategy in (None, "no") and not self.save_steps:
            found.append("save_total_limit has no effect without save_strategy")
        if self.save_only_model and self.save_strategy in (None, "no") and not self.save_steps:
            found.append("save_only_model has no effect without save_strategy")
        return found


@dataclass
class FaultOptions(Recipe):
    """When something goes wrong"""

    on_fault: str = option(
        "stop",
        "Where loss or gradient norm is NaN, infinite or a spike: stop before the weights move, skip the update, or "
        "rewind to the last checkpoint and go on without its samples.",
        choices=("stop", "skip", "rewind"),
    )
    spike_threshold: float = option(
        10.0,
        "What is a spike of the loss (and of a gradient norm that is not clipped): its robust z-score. 0: none.",
        minimum=0,
    )
    watchdog_minutes: float = option(
        30.0, "End the run when a process has shown no sign of life for this long. 0: never.", minimum=0
    )

    def problems(self) -> list[str]:
        found = super().problems()
        if getattr(self, "save_only_model", False) and self.on_fault == "rewind":
            found.append("save_only_model = true and on_fault = rewind: there would be nothing to go back to")
        return found


@dataclass
class TrackingOptions(Recipe):
    """Trackers"""

    with_tracking: bool = option(False, "Send the metrics to the trackers of report_to.", common=True)
    report_to: str = option("all", "Tracker: wandb, tensorboard, all (those installed) or none.", choices=TRACKERS)
    report_name: str | None = option(None, "Project name at the tracker; by default zerofit and the task.")
    run_name: str | None = option(None, "Name of the run at the tracker; by default the output folder's.")


@dataclass
class TrainingRecipe(
    TrackingOptions, FaultOptions, CheckpointOptions, EvaluationOptions, RunOptions, StrategyOptions, OptimizerOptions,
    BatchOptions, SourceOptions, LoraOptions, ModelOptions,
):  # fmt: skip
    """What every task has."""
