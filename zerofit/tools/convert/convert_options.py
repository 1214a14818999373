"""The options of `zerofit convert`'s commands."""

from dataclasses import dataclass

from zerofit.recipe.fields import option
from zerofit.recipe.options import Recipe


@dataclass
class FromMetaOptions(Recipe):
    """Meta's consolidated.*.pth, params.json and tokenizer.model to a folder that transformers loads"""

    input: str | None = option(None, "The folder of the checkpoint.")
    output: str | None = option(None, "The folder to write; it must not exist yet, or be empty.")
    tokenizer: str | None = option(None, "tokenizer.model; by default the input's or the folder's above. none: no.")

    def problems(self) -> list[str]:
        problems = super().problems()
        if not self.input:
            problems.append("no input: set --input to the folder of the checkpoint")
        if not self.output:
            problems.append("no output: set --output to the folder that the checkpoint is to be written to")
        return problems


@dataclass
class MegatronArgsOptions(Recipe):
    """A Megatron command line (pretrain_gpt.py, preprocess_data.py, merge_datasets.py) to a recipe and a strategy"""

    output: str | None = option(None, "The folder to write; by default outputs/megatron-converted.")
    overwrite: bool = option(False, "Replace files of an earlier conversion.")
    tokenizer_name: str | None = option(None, "The tokenizer's folder or hub name, instead of Megatron's files.")
    model_name_or_path: str | None = option(None, "Weights to begin with, instead of Megatron's --load.")
    num_processes: int | None = option(None, "Processes; by default as many as the launcher starts.", positive=True)
