"""Options of a launch without training: it evaluates a model, or predicts for the records of a file."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from zerofit.recipe.base import Recipe
from zerofit.recipe.fields import option

# Options of training. A launch without training resets them, so that a run's recipe or command can be used unchanged.
TRAINING_OPTIONS = (
    "gradient_checkpointing", "activation_offload", "train_tokenizer_vocab_size", "make_vocab_size_divisible_by",
    "config_name", "model_type", "resize_embeddings", "lora_r", "lora_alpha", "lora_dropout", "lora_bias",
    "lora_target_modules", "lora_modules_to_save", "use_dora", "use_rslora", "ignore_mismatched_sizes",
    "max_train_samples",
    "per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size", "num_train_epochs",
    "max_train_steps", "dataloader_num_workers", "optim", "learning_rate", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_epsilon", "max_grad_norm", "lr_scheduler_type", "num_warmup_steps", "warmup_ratio",
    "min_lr_ratio", "lr_decay_steps", "wsd_decay_ratio", "logging_steps", "eval_steps", "eval_on_start",
    "metric_for_best_model", "save_best", "early_stopping_patience", "early_stopping_threshold",
    "load_best_model_at_end", "save_strategy", "save_steps", "save_total_limit", "save_keep_every", "save_minutes",
    "save_only_model", "save_async", "on_save_failure", "resume", "max_hours", "on_anomaly", "spike_threshold",
    "record_samples", "with_tracking", "report_to", "report_name", "run_name", "sample_tokens", "sample_prompt",
    "length_grouping", "global_batch_warmup", "block_size_warmup", "peak_tflops",
    "tokens_per_batch", "class_weights", "focal_gamma", "label_smoothing", "z_loss", "profile", "profile_ranks",
    "profile_memory", "layer_decay", "ema_decay", "distill_weight", "distill_temperature", "mirror", "push_to_hub",
    "hub_strategy", "stop_source",
)  # fmt: skip
DATA_OPTIONS = (  # of the data that predict_file replaces
    "dataset_name", "dataset_config_name", "train_file", "validation_file", "validation_mismatched_file",
    "validation_split_percentage", "max_eval_samples", "data_path", "split", "data_cache_path",
    "reset_position_ids", "reset_attention_mask", "eod_mask_loss", "predict_with_generate", "mixture_temperature",
)  # fmt: skip
# What shapes the inputs of a model, in any task: it is stored with the model and used when the model is evaluated.
INPUT_OPTIONS = (
    "max_length", "text_columns", "label_column", "choice_columns", "source_prefix", "turn_separator",
    "max_source_length", "max_target_length", "val_max_target_length", "val_min_target_length", "source_lang",
    "target_lang", "dialogue_column", "source_column", "target_column", "block_size", "packing", "document_separator",
    "append_eos", "data_format", "messages_column", "text_column", "system_prompt", "train_on_prompt",
    "reset_position_ids", "reset_attention_mask", "eod_mask_loss",
)  # fmt: skip
OF_MODEL = "the model"  # the source of such an option
MODEL = "the weights are those of model_name_or_path: a hub name, a folder such as outputs/RUN/model, or an adapter's"


@dataclass
class InferenceOptions(Recipe):
    """Evaluation and predictions, without training"""

    evaluate_only: bool = option(False, "Do not train: evaluate model_name_or_path on the held-out data.", common=True)
    predict_file: list[str] | None = option(  # noqa: RUF009
        None,
        "Do not train: predict with model_name_or_path for each record of this file, which needs no labels.",
        aliases=("test_file",),
        common=True,
    )

    @property
    def trains(self) -> bool:
        return not (self.evaluate_only or self.predict_file)

    @property
    def inputs(self) -> dict[str, Any]:
        """The options that shape what the model reads, stored with it."""
        return {name: getattr(self, name) for name in INPUT_OPTIONS if hasattr(self, name)}

    def adopt_inputs(self, trained: dict[str, Any]) -> list[str]:
        """Read as in training, but for what the user has set. Returns notes.

        Args:
            trained: the `inputs` of training.
        """
        used, notes = [], []
        for name, value in trained.items():
            of_other_data = name in DATA_OPTIONS and (self.predict_file or not getattr(self, "data_path", None))
            if name not in self.inputs or value == getattr(self, name) or of_other_data:
                continue
            if source := self.source(name):
                was = f"trained with {_shown(value)}" if value is not None else "trained without it"
                notes.append(f"{name} = {_shown(getattr(self, name))} ({source}): the model was {was}")
            elif value is not None:
                self.adopt(name, value, OF_MODEL)
                used.append(f"{name} = {_shown(value)}")
        return [f"as in training: {option}" for option in used] + notes

    def columns_in(self, present: Iterable[str]) -> Self:
        """The same without the columns of training that data of another form lacks: its own are found."""
        present, other = set(present), self
        for name in INPUT_OPTIONS:
            value = getattr(self, name, None)
            if self.source(name) != OF_MODEL or not name.endswith(("_column", "_columns")):
                continue
            if not {*([value] if isinstance(value, str) else value)} <= present:
                other = self.draft() if other is self else other
                other.reset_option(name)
        return other

    @property
    def without_effect(self) -> list[str]:
        """The flags that have no effect on a launch without training."""
        return self.__dict__.get("_without_effect", [])

    def settle(self) -> None:
        """Reset the options of training in a launch without training."""
        super().settle()
        if self.trains or not self.model_name_or_path:
            return
        reset = [*TRAINING_OPTIONS]
        if self.config_name or self.model_type:
            reset.append("config_overrides")  # they made the architecture, which the weights' folder has
        if self.predict_file:
            reset += DATA_OPTIONS
        elif self.validation_file:
            reset += ["dataset_name", "dataset_config_name", "train_file", "validation_split_percentage"]
            reset.append("mixture_temperature")
        sources = [self.reset_option(name) for name in reset]
        self._without_effect = [source for source in sources if source and source.startswith("--")]

    def problems(self) -> list[str]:
        problems = super().problems()
        chosen = [f"--{name}" for name in ("evaluate_only", "predict_file") if getattr(self, name)]
        if len(chosen) > 1:
            problems.append(f"{' and '.join(chosen)}: these are two launches, keep one of them")
        if chosen and not self.model_name_or_path:
            problems.append(f"{chosen[0]}: {MODEL}. Name it")
        if self.evaluate_only and self.train_file and not self.validation_split_percentage:
            problems.append(
                "evaluate_only: nothing is held out (validation_split_percentage = 0). Name a validation_file"
            )
        return problems


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else repr(value) if isinstance(value, str) else str(value)
