"""Options of a launch that trains nothing: it evaluates a model, or lets it answer the records of a file."""

from dataclasses import dataclass

from train.recipe.fields import option
from train.recipe.options import Recipe

# Options of training. A launch that trains nothing forgets them: a run's recipe or command serves it as it is.
OF_TRAINING = (
    "gradient_checkpointing", "train_tokenizer_vocab_size", "make_vocab_size_divisible_by", "config_name",
    "model_type", "lora_r", "lora_alpha", "lora_dropout", "lora_bias", "lora_target_modules", "lora_modules_to_save",
    "use_dora", "use_rslora", "ignore_mismatched_sizes", "max_train_samples", "per_device_train_batch_size",
    "gradient_accumulation_steps", "global_batch_size", "num_train_epochs", "max_train_steps",
    "dataloader_num_workers", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "max_grad_norm", "lr_scheduler_type", "num_warmup_steps", "warmup_ratio", "min_lr_ratio", "lr_decay_steps",
    "wsd_decay_ratio", "logging_steps", "eval_steps", "eval_on_start", "metric_for_best_model", "save_best",
    "early_stopping_patience", "early_stopping_threshold", "load_best_model_at_end", "save_strategy", "save_steps",
    "save_total_limit", "save_keep_every", "save_minutes", "save_only_model", "save_async", "on_save_failure",
    "resume", "max_hours", "on_fault", "spike_threshold", "record_samples", "with_tracking", "report_to",
    "report_name", "run_name", "sample_tokens", "sample_prompt", "length_grouping",
)  # fmt: skip
OF_DATA = (  # what predict_file takes the place of
    "dataset_name", "dataset_config_name", "train_file", "validation_file", "validation_mismatched_file",
    "validation_split_percentage", "max_eval_samples", "max_eval_batches", "data_path", "split", "data_cache_path",
    "reset_position_ids", "reset_attention_mask", "eod_mask_loss", "predict_with_generate",
)  # fmt: skip
MODEL = "the weights are those of model_name_or_path: a hub name, a folder such as outputs/RUN/model, or an adapter's"


@dataclass
class AnswerOptions(Recipe):
    """Evaluation and predictions, without training"""

    evaluate_only: bool = option(
        False, "Train nothing: evaluate model_name_or_path on the held-out data.", common=True
    )
    predict_file: list[str] | None = option(  # noqa: RUF009
        None,
        "Train nothing: let model_name_or_path answer each record of this file, which needs no labels.",
        aliases=("test_file",),
        common=True,
    )

    @property
    def trains(self) -> bool:
        return not (self.evaluate_only or self.predict_file)

    @property
    def without_effect(self) -> list[str]:
        """The flags that a launch without training has forgotten."""
        return self.__dict__.get("_without_effect", [])

    def settle(self) -> None:
        """Forget what a launch without training does not need."""
        super().settle()
        if self.trains or not self.model_name_or_path:
            return
        forgotten = [*OF_TRAINING]
        if self.config_name or self.model_type:
            forgotten.append("config_overrides")  # they made the architecture, which the weights' folder has
        if self.predict_file:
            forgotten += OF_DATA
        elif self.validation_file:
            forgotten += ["dataset_name", "dataset_config_name", "train_file", "validation_split_percentage"]
        self._without_effect = [source for name in forgotten if (source := self.forget(name)) and source[:2] == "--"]

    def problems(self) -> list[str]:
        found = super().problems()
        asked = [f"--{name}" for name in ("evaluate_only", "predict_file") if getattr(self, name)]
        if len(asked) > 1:
            found.append(f"{' and '.join(asked)}: these are two launches, keep one of them")
        if asked and not self.model_name_or_path:
            found.append(f"{asked[0]}: {MODEL}. Name it")
        if self.evaluate_only and self.train_file and not self.validation_split_percentage:
            found.append(
                "evaluate_only: nothing is held out (validation_split_percentage = 0). Name a validation_file"
            )
        return found
