"""The recipe of each task, a flat dataclass that joins groups of options; and the options of single tasks."""

import math
from dataclasses import dataclass, fields
from pathlib import Path

from zerofit.recipe.base import Recipe, option
from zerofit.recipe.causal_options import (
    ChatOptions,
    CorpusOptions,
    DistillationOptions,
    PreferenceOptions,
    SampleOptions,
    StreamOptions,
    TextOptions,
)
from zerofit.recipe.data_options import InferenceOptions, PaddingOptions
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import read_yaml
from zerofit.recipe.options import TrainingRecipe

GLUE_TASK_NAMES = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli")
BALANCED = "balanced"  # value of class_weights


@dataclass
class TaskRecipe(InferenceOptions, TrainingRecipe):
    """The options that every task has, with those of a launch without training."""


@dataclass
class LossOptions(Recipe):
    """The loss over the vocabulary"""

    loss: str = option(
        "auto",
        "How the loss is computed. auto: with less memory if possible; full: with all logits in memory; chunked: with "
        "less memory, refused for a model that scales or caps its logits (T5, Gemma 2).",
        choices=("auto", "full", "chunked"),
        identity=False,
    )
    label_smoothing: float = option(
        0.0,
        "Train on 1 - X for the next token, and on X divided among the vocabulary.",
        minimum=0,
        below=1,
        phase="train",
        needs="!preference_loss",
        aliases=("label_smoothing_factor",),
    )
    z_loss: float = option(
        0.0,
        "Add X times the square of the logsumexp of a token's logits, which keeps logits small; 1e-4 is usual.",
        minimum=0,
        phase="train",
        needs="!preference_loss",
    )


@dataclass
class LabelOptions(Recipe):
    """Texts and labels"""

    task_name: str | None = option(
        None, "GLUE task, which sets the columns, labels and metric.", choices=GLUE_TASK_NAMES, common=True
    )
    text_columns: list[str] | None = option(
        None, "Column of the text, or two columns of a pair of texts.", common=True, shapes_input=True
    )
    label_column: str | None = option(
        None, "Column of the label; by default `label` or a similar name.", common=True, shapes_input=True
    )
    choice_columns: list[str] | None = option(
        None,
        "Multiple choice: columns of the choices, or one column of lists; by default choice0, choice1, ...",
        shapes_input=True,
        excludes="task_name regression",
    )
    regression: bool | None = option(
        None, "Predict a number; by default if the labels are numbers with a fractional part."
    )
    validation_mismatched_file: list[str] | None = option(
        None, "Second held-out set of MNLI (mismatched).", phase="data", needs="task_name=mnli !dataset_name"
    )
    max_length: int = option(
        128,
        "Maximum length of a row in tokens; longer rows are truncated.",
        minimum=4,
        aliases=("max_seq_length",),
        common=True,
        shapes_input=True,
    )
    ignore_mismatched_sizes: bool = option(
        False, "Replace a pretrained head that has another number of labels.", phase="train"
    )

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.text_columns and len(self.text_columns) > 2:
            problems.append(f"text_columns = {' '.join(self.text_columns)}: name one column, or the two of a pair")
        if self.task_name and self.regression is not None and self.regression != (self.task_name == "stsb"):
            problems.append(f"regression = {self.regression} and task_name = {self.task_name}: remove regression")
        return problems


def is_class_weight(word: str) -> bool:
    """Return whether a word is "balanced", or NAME=WEIGHT with a weight above 0."""
    name, _, weight = word.rpartition("=")
    return word == BALANCED or (bool(name) and 0 < float(weight) < math.inf)


@dataclass
class ClassLossOptions(Recipe, phase="train"):
    """The loss of classes, and the learning rates of layers"""

    class_weights: list[str] | None = option(
        None,
        "What an example weighs in the loss, by its class: balanced (all classes weigh the same in the whole training "
        "set), or NAME=WEIGHT for some classes; the others weigh 1.",
        form=(is_class_weight, f"{BALANCED}, or words NAME=WEIGHT, each weight above 0"),
    )
    focal_gamma: float = option(
        0.0, "Focal loss: multiply the loss of an example by (1 - p)^X, p being its class's probability.", minimum=0
    )
    label_smoothing: float = option(
        0.0,
        "Train on 1 - X for the class of the label, and on X divided among all classes.",
        minimum=0,
        below=1,
        aliases=("label_smoothing_factor",),
    )
    layer_decay: float = option(
        1.0,
        "Multiply a layer's learning rate by X for each layer above it, and for the head; 1: all learn alike.",
        positive=True,
        at_most=1,
        needs="!optim=muon",
    )

    @property
    def weight_of_class(self) -> dict[str, float]:
        """{class: weight} of the words NAME=WEIGHT; empty where the classes are balanced."""
        pairs = (word.rpartition("=") for word in self.class_weights or [])
        return {name: float(weight) for name, _, weight in pairs if name}

    def problems(self) -> list[str]:
        problems = super().problems()
        words = self.class_weights or []
        if len(self.weight_of_class) < len(words) and words != [BALANCED]:
            problems.append(f"class_weights = {' '.join(words)}: name each class once, or say {BALANCED} alone")
        return problems


@dataclass
class PairOptions(Recipe, shapes_input=True):
    """Sources and targets"""

    dialogue_column: str | None = option(
        None, "Column of the conversation, a list of turns; by default `dialogue` or a similar name."
    )
    source_column: str | None = option(
        None, "Column of the source text, if the records are not conversations.", aliases=("text_column",), common=True
    )
    target_column: str | None = option(
        None, "Column of the target, or of the reply.", aliases=("summary_column", "response_column"), common=True
    )
    turn_separator: str | None = option(None, "Text between two turns; by default that of the model.")
    source_prefix: str = option("", "Text before each source, e.g. 'summarize: ' for T5.")
    source_lang: str | None = option(
        None,
        "Language of the sources: the tokenizer's code (NLLB eng_Latn, mBART en_XX, M2M-100 en), or the name of a "
        "column; by default what is saved with the model.",
    )
    target_lang: str | None = option(None, "Language of the targets, as source_lang; also for Marian's >>deu<<.")
    max_source_length: int = option(
        128, "Longest source in tokens; of a conversation the latest turns are kept.", minimum=4, common=True
    )
    max_target_length: int = option(
        128, "Longest target in tokens; longer ones are truncated.", minimum=2, common=True
    )


@dataclass
class GenerationOptions(PairOptions, noted="predict_with_generate"):
    """Evaluation by generation"""

    predict_with_generate: bool = option(
        True, "Generate for the held-out sources and compute BLEU and ROUGE.", phase="data", noted=""
    )
    num_beams: int | None = option(
        None, "Number of beams; by default that of the model, else 1.", positive=True, common=True
    )
    val_max_target_length: int | None = option(
        None, "Longest generated text in tokens; by default max_target_length.", positive=True, shapes_input=True
    )
    val_min_target_length: int | None = option(
        None, "Shortest generated text in tokens; by default the model's.", minimum=0, shapes_input=True
    )
    n_val_batch_generations: int = option(
        3, "From how many held-out batches to print a text (predictions.jsonl has all).", minimum=0, identity=False
    )

    def problems(self) -> list[str]:
        problems = super().problems()
        longest = self.val_max_target_length or self.max_target_length
        if self.val_min_target_length and longest and self.val_min_target_length > longest:
            problems.append(
                f"val_min_target_length = {self.val_min_target_length} is more than the longest generated text, "
                f"{longest} (val_max_target_length, by default max_target_length)"
            )
        return problems


@dataclass
class ClmRecipe(
    SampleOptions,
    TaskRecipe,
    StreamOptions,
    ChatOptions,
    CorpusOptions,
    TextOptions,
    LossOptions,
):
    """Causal language modelling, from scratch or continued."""

    task = "clm"

    @property
    def is_packed(self) -> bool:
        """True if documents are kept apart by positions that restart, which transformers' attention must respect."""
        if self.predict_file or self.preference_loss:
            return False
        if self.data_path:
            return self.reset_position_ids and self.reset_attention_mask
        return self.packing == "documents"

    @property
    def is_masked(self) -> bool:
        """Return whether a token does not see all that stand before it in its row."""
        return self.is_packed or self.reset_position_ids or self.reset_attention_mask


@dataclass
class DpoRecipe(PreferenceOptions, ClmRecipe):
    """Preferences: pairs of a better and a worse answer."""

    task = "dpo"


@dataclass
class DistillRecipe(DistillationOptions, ClmRecipe):
    """Causal language modelling, with the distribution of a teacher."""

    task = "distill"


@dataclass
class ClsRecipe(TaskRecipe, PaddingOptions, ClassLossOptions, LabelOptions):
    """Classification and regression of sentences and pairs."""

    task = "cls"

    def __post_init__(self) -> None:
        evaluation_files = () if self.trains else (self.validation_file, self.predict_file)
        if self.task_name and not any((self.dataset_name, self.train_file, *evaluation_files)):
            self.dataset_name = "nyu-mll/glue"
            self.dataset_config_name = self.task_name


@dataclass
class Seq2SeqRecipe(TaskRecipe, GenerationOptions, PaddingOptions, PairOptions, LossOptions):
    """Encoder-decoder training: dialogue, or any source and target."""

    task = "seq2seq"


TASKS: dict[str, type[TaskRecipe]] = {  # name of the script in train/: recipe
    "clm": ClmRecipe,
    "dpo": DpoRecipe,
    "distill": DistillRecipe,
    "cls": ClsRecipe,
    "seq2seq": Seq2SeqRecipe,
}
CAUSAL_TASKS = ("clm", "dpo", "distill")


def model_kind(task: str) -> str:
    """Return the kind of model that a task trains: clm, cls or seq2seq. That of dpo and distill is clm."""
    return "clm" if task in CAUSAL_TASKS else task


def task_of_recipe(file: str) -> str | None:
    """The task of a recipe's file: the name of its folder; else the task that knows most of its options (clm where its
    three scripts know as many); None: it does not say."""
    folder = Path(file).resolve().parent.name
    if folder in TASKS:
        return folder
    try:
        content = read_yaml(Path(file))
    except UserError:  # which reading the recipe says
        return None
    names = set(content) if isinstance(content, dict) else set()
    unknown = {task: len(names - {field.name for field in fields(cls)}) for task, cls in TASKS.items()}
    best = [task for task, count in unknown.items() if count == min(unknown.values())]
    return best[0] if len(best) == 1 or set(best) == set(CAUSAL_TASKS) else None
