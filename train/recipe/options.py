"""The options that every task has, in groups."""

import codecs
import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

from train.recipe.fields import option
from train.recipe.files import without_folders

SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "wsd")
TEXTS = ("sample_prompt", "system_prompt", "source_prefix")  # options that hold what a user has written
WITHOUT_TRAINING = "To train nothing, say --evaluate_only, or --predict_file FILE"
TRACKERS = ("all", "wandb", "tensorboard", "none")


@dataclass
class Recipe:
    """Base of all recipes: remembers who set each value, and checks what one option alone cannot."""

    def remember_sources(self, sources: dict[str, str]) -> None:
        self._sources = dict(sources)

    def source(self, name: str) -> str | None:
        """Who set this option: `--flag`, `file.yaml, line 3`, a file of the strategy pair; None if nobody did."""
        return self.__dict__.get("_sources", {}).get(name)

    def is_changed(self, name: str) -> bool:
        """Whether somebody has set this option to another value than its default (a run's recipe.yaml sets all)."""
        return bool(self.source(name)) and hasattr(self, name) and getattr(self, name) != self._default(name)

    def _default(self, name: str) -> Any:
        field = next(field for field in dataclasses.fields(self) if field.name == name)
        return field.default_factory() if field.default is dataclasses.MISSING else field.default

    def adopt(self, name: str, value: Any, source: str) -> None:
        """Take a value that somebody else owns (a user's DeepSpeed JSON, say) for an option that nobody set. Only
        while a run's configuration is resolved: it is frozen then."""
        setattr(self, name, value)
        self.__dict__.setdefault("_sources", {})[name] = source

    def draft(self) -> "Recipe":
        """A copy, to be resolved and then frozen."""
        copied = copy.copy(self)
        copied.__dict__.pop("_frozen", None)
        copied.remember_sources(self.__dict__.get("_sources", {}))
        return copied

    def freeze(self) -> None:
        """Let no option change any more."""
        self.__dict__["_frozen"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_frozen"):
            raise AttributeError(f"{name}: the recipe is resolved, and frozen")
        super().__setattr__(name, value)

    @property
    def trains(self) -> bool:
        """Whether weights are to move."""
        return True

    def forget(self, name: str) -> str | None:
        """Give an option its default again, if the task has it. Returns who had set it."""
        if not hasattr(self, name):
            return None
        setattr(self, name, self._default(name))
        return self.__dict__.get("_sources", {}).pop(name, None)

    def settle(self) -> None:
        """Let options follow from each other, once all are known."""

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_publish(self) -> dict[str, Any]:
        """The same for model cards and trackers, without the folders of this machine."""
        return {name: value if name in TEXTS else without_folders(value) for name, value in self.to_dict().items()}

    def problems(self) -> list[str]:
        """What is wrong with this combination of options; empty if nothing is."""
        return []


@dataclass
class ModelOptions(Recipe):
    """Model and tokenizer"""

    model_name_or_path: str | None = option(None, "Pretrained weights: a folder or a hub name.", common=True)
    config_name: str | None = option(
        None,
        "Architecture to train from scratch: gpt2-xl, open-calm-7b, llama-2-7b, ..., a folder or a hub name.",
        common=True,
    )
    model_type: str | None = option(
        None, "Architecture family to train from scratch with its default sizes: gpt2, ..."
    )
    config_overrides: str | None = option(None, "Changes to the configuration: n_layer=4,n_embd=256.")
    tokenizer_name: str | None = option(
        None, "Tokenizer folder or hub name, if it is not the model's own.", common=True
    )
    vocab_file: str | None = option(
        None, "A byte-level BPE's vocabulary, as GPT-2's vocab.json, in place of tokenizer_name; with merge_file."
    )
    merge_file: str | None = option(None, "Its merges, as GPT-2's merges.txt.", aliases=("merges_file",))
    train_tokenizer_vocab_size: int | None = option(
        None, "Train a byte-level BPE tokenizer of this size on the training text (cached).", minimum=258
    )
    trust_remote_code: bool = option(False, "Allow a hub repository to run its own model code here.")
    attn_implementation: str | None = option(None, "eager, sdpa, flash_attention_2, ...: the attention kernel to use.")
    gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward pass: less memory, slower.", common=True
    )
    torch_compile: bool = option(False, "Compile the model with torch.compile.")

    def problems(self) -> list[str]:
        found = super().problems()
        starts = [name for name in ("model_name_or_path", "config_name", "model_type") if getattr(self, name)]
        if not starts:
            found.append(
                "no model: set model_name_or_path (pretrained weights) or config_name (from scratch), "
                "e.g. --config_name gpt2"
            )
        if "model_name_or_path" in starts and len(starts) > 1:
            found.append(
                f"model_name_or_path = {self.model_name_or_path!r} and {starts[1]} = {getattr(self, starts[1])!r}: "
                "the first loads weights, the second starts from scratch; keep one"
            )
        files = [name for name in ("vocab_file", "merge_file") if getattr(self, name)]
        named = [name for name in ("tokenizer_name", "train_tokenizer_vocab_size") if getattr(self, name)]
        if not (self.model_name_or_path or named or files):
            found.append(
                "no tokenizer: a model from scratch needs tokenizer_name, or train_tokenizer_vocab_size to train one"
            )
        if len(named) > 1:
            found.append("tokenizer_name and train_tokenizer_vocab_size are both set: name a tokenizer or train one")
        found += wrong_vocabulary_files(self, named)
        found.extend(_bad_overrides(self.config_overrides))
        return found


def wrong_vocabulary_files(recipe: Recipe, others: list[str]) -> list[str]:
    """What is wrong with vocab_file and merge_file.

    Args:
        others: options that are set, and name a tokenizer too.
    """
    files = [name for name in ("vocab_file", "merge_file") if getattr(recipe, name)]
    if len(files) == 1:
        return [f"{files[0]} = {getattr(recipe, files[0])!r}: vocab_file and merge_file go together"]
    return [f"{' and '.join(files)}, and {' and '.join(others)}: name one tokenizer"] if files and others else []


def _bad_overrides(overrides: str | None) -> list[str]:
    parts = [part for part in (overrides or "").split(",") if part]
    return [
        f"config_overrides: {part!r} is not of the form name=value, e.g. n_layer=4,n_embd=256"
        for part in parts
        if part.count("=") != 1
    ]


@dataclass
class LoraOptions(Recipe):
    """LoRA: an adapter is trained, not the model itself"""

    lora: bool = option(False, "Train a LoRA adapter and not the model's own weights.", common=True)
    lora_r: int = option(8, "Rank of the adapter.", positive=True)
    lora_alpha: int = option(16, "Its scale: what it adds is multiplied by lora_alpha / lora_r.", positive=True)
    lora_dropout: float = option(0.0, "Dropout on the adapter's input.", minimum=0)
    lora_bias: str = option("none", "Biases that are trained as well.", choices=("none", "all", "lora_only"))
    lora_target_modules: list[str] | None = option(  # noqa: RUF009
        None, "Modules that get an adapter, by the end of their names, or all-linear; by default the family's own."
    )
    lora_modules_to_save: list[str] | None = option(  # noqa: RUF009
        None, "Modules that are trained whole and saved with the adapter."
    )
    use_dora: bool = option(False, "DoRA: train the norm of each weight's rows beside the adapter.")
    use_rslora: bool = option(False, "rsLoRA: scale by lora_alpha / sqrt(lora_r).")
    load_in_4bit: bool = option(False, "QLoRA: hold the frozen weights in 4 bits (NF4, through bitsandbytes).")
    load_in_8bit: bool = option(False, "Hold the frozen weights in 8 bits (LLM.int8, through bitsandbytes).")

    def problems(self) -> list[str]:
        found = super().problems()
        if self.lora_dropout >= 1:
            found.append(f"lora_dropout = {self.lora_dropout:g}: it must be below 1")
        if self.load_in_4bit and self.load_in_8bit:
            found.append("load_in_4bit and load_in_8bit are both set: keep one of the two")
        names = [field.name for field in dataclasses.fields(LoraOptions) if field.name != "lora"]
        if not self.lora and not self.source("lora"):  # an explicit `lora: false` turns a whole block of them off
            useless = [name for name in names if self.source(name)]
            if useless:
                found.append(f"{', '.join(useless)} ({self.source(useless[0])}): no effect without --lora")
        return found

    @property
    def quantised(self) -> str | None:
        """The option that quantises the frozen weights, if one does."""
        wanted = [name for name in ("load_in_4bit", "load_in_8bit") if self.lora and getattr(self, name)]
        return wanted[0] if wanted else None


def unknown_encoding(name: str | None) -> list[str]:
    """A problem, if there is no such encoding of text."""
    try:
        return [] if name is None or codecs.lookup(name)._is_text_encoding else [_NO_ENCODING.format(name)]
    except LookupError:
        return [_NO_ENCODING.format(name)]


_NO_ENCODING = (
    "encoding = {!r}: there is no such encoding. Known are cp932, euc_jp, gb18030, cp950, utf-16, cp1252, ..."
)


@dataclass
class SourceOptions(Recipe):
    """Where the data comes from"""

    dataset_name: str | None = option(
        None,
        "A dataset on the hub, or a folder that the datasets library can load. Made from Python's own library and not "
        "from the hub: stdlib-docstrings (text, label: its package) and stdlib-functions (source, target).",
        common=True,
    )
    dataset_config_name: str | None = option(None, "Its configuration.")
    # RUF009 does not see that option() is dataclasses.field(): no list is shared between recipes.
    train_file: list[str] | None = option(  # noqa: RUF009
        None, ".txt, .json(l), .csv, .tsv, .parquet, also .gz: files or globs.", common=True
    )
    validation_file: list[str] | None = option(None, "The same for the held-out data.", common=True)  # noqa: RUF009
    encoding: str | None = option(
        None, "Encoding of text, .json(l), .csv and .tsv files that are not UTF-8: cp932, euc_jp, gb18030, utf-16, ..."
    )
    field: str | None = option(
        None, 'Key of the records in .json files that hold one object: data for {"data": [...]}; a.b for a key in it.'
    )
    validation_split_percentage: float = option(
        5.0, "Share of the training data to hold out where there is no validation data, in percent.", minimum=0
    )
    max_train_samples: int | None = option(
        None, "Use only this many records for training (of conversations: pairs).", positive=True, aliases=("n_train",)
    )
    max_eval_samples: int | None = option(
        None, "Use only this many records for evaluation (or pairs).", positive=True, aliases=("n_val",)
    )
    allow_data_loss: bool = option(
        False, "Train although more than half of the samples are left out, or more than half of the answers are cut."
    )
    preprocessing_num_workers: int | None = option(
        None, "Processes that tokenise; by default the tokenizer's own threads do.", positive=True
    )
    cache_dir: str | None = option(None, "Where prepared data is kept; by default the datasets library's cache.")
    overwrite_cache: bool = option(False, "Prepare the data anew.")

    def problems(self) -> list[str]:
        found = super().problems()
        what = "train_file" if self.trains else "validation_file"
        known = (
            "dataset_name",
            "train_file",
            "data_path",
            *(() if self.trains else ("validation_file", "predict_file")),
        )
        if not any(getattr(self, name, None) for name in known):
            found.append(f"no data: set dataset_name, or {what} to a .txt, .jsonl, .csv or .parquet file")
        if self.dataset_name and self.train_file:
            found.append(
                f"dataset_name = {self.dataset_name!r} and train_file = {self.train_file}: keep one of the two"
            )
        found += unknown_encoding(self.encoding)
        for name in ("validation_file", "validation_mismatched_file", "encoding", "field"):
            if self.dataset_name and getattr(self, name, None):
                found.append(
                    f"{name} goes with train_file; with dataset_name = {self.dataset_name!r} it has no effect"
                )
        if self.validation_split_percentage >= 100:
            found.append(
                f"validation_split_percentage = {self.validation_split_percentage:g}: "
                "it leaves no sample to train on; choose a value below 100"
            )
        return found


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
