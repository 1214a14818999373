"""Options of data that are read while training goes on."""

from dataclasses import dataclass

from zerofit.recipe.base import Recipe
from zerofit.recipe.fields import option
from zerofit.recipe.parsing import parse_bytes
from zerofit.recipe.paths import is_weight

NOT_STREAMED = (  # options that need all records, or a tokenizer that is not there yet
    "dataset_name", "data_path", "encoding", "delimiter", "field", "validation_split_percentage", "max_train_samples",
    "preprocessing_num_workers", "tokens_per_batch", "train_tokenizer_vocab_size",
    "document_separator", "mixture_temperature", "preference_loss",
)  # fmt: skip
NO_HELD_OUT = "nothing is held out of a stream. Name the data to evaluate with validation_file"


@dataclass
class StreamOptions(Recipe):
    """Streaming"""

    streaming: str | None = option(
        None,
        "Size, as 256MiB: read train_file (.parquet, .jsonl, .tar of WebDataset; paths, globs, or addresses such as "
        "s3://bucket/*.parquet) while training goes on, in windows of about so many bytes of records, which are "
        "shuffled together. For data that do not fit the disk.",
    )

    def problems(self) -> list[str]:
        problems, stated = super().problems(), f"streaming = {self.streaming}"
        if self.streaming is None:
            return problems
        if not self.trains:
            return problems if self.validation_file or self.predict_file else [*problems, f"{stated}: {NO_HELD_OUT}"]
        try:
            parse_bytes(self.streaming)
        except ValueError:
            problems.append(f"{stated}: expected a size such as 256MiB")
        if not self.train_file:
            problems.append(f"{stated}: name the shards with train_file")
        if any(map(is_weight, self.train_file or [])):
            problems.append(f"{stated}: shards have no weights. Remove them, or stream one source")
        if not self.max_train_steps:
            problems.append(f"{stated}: nobody has counted the records. Say max_train_steps, the updates of the run")
        return problems + [
            f"{name} ({self.source(name)}) is not supported with {stated}: the records are read as they come"
            for name in NOT_STREAMED
            if hasattr(self, name) and self.is_changed(name)
        ]
