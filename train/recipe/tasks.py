"""The options of single tasks, and the recipe of each: a flat dataclass that joins the groups it needs."""

import math
import re
from dataclasses import dataclass

from train.recipe.answers import AnswerOptions
from train.recipe.fields import option
from train.recipe.options import Recipe, TrainingRecipe

GLUE_TASKS = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli")
GLUE_ON_THE_HUB = "nyu-mll/glue"
RESETS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")  # what happens at an end of document
OF_TEXT = (  # options of data that is read as text, without effect on corpora
    "dataset_name", "dataset_config_name", "train_file", "validation_file", "encoding", "field",
    "validation_split_percentage", "allow_data_loss",
    "max_train_samples", "preprocessing_num_workers", "train_tokenizer_vocab_size", "skip_bad_records", "text_column",
    "document_separator", "packing", "append_eos", "data_format", "messages_column", "chat_template", "system_prompt",
    "train_on_prompt", "cache_dir", "overwrite_cache",
)  # fmt: skip


@dataclass
class LossOptions(Recipe):
    """The loss over the vocabulary"""

    loss: str = option(
        "auto",
        "How the loss is computed. auto: the memory-saving one where there is one; full: hold all logits.",
        choices=("auto", "full", "chunked", "liger"),
    )


@dataclass
class RecordOptions(Recipe):
    """Records that cannot be used"""

    skip_bad_records: bool = option(
        False, "Leave out records that cannot be used (an empty text, no label, no answer), and count them."
    )


@dataclass
class PaddingOptions(Recipe):
    """Batches of rows that differ in length"""

    pad_to_max_length: bool = option(False, "Pad every row to the longest length allowed, not to its batch's longest.")
    length_grouping: str = option(
        "window",
        "Who shares a batch. window: rows of similar length; update: an update's rows are drawn at random, and only "
        "its micro-batches hold similar lengths; none: at random.",
        choices=("window", "update", "none"),
    )


@dataclass
class LabelOptions(Recipe):
    """What is classified"""

    task_name: str | None = option(
        None, "A GLUE task: its columns, labels and metric.", choices=GLUE_TASKS, common=True
    )
    text_columns: list[str] | None = option(None, "Column of the text, or the two of a pair.", common=True)  # noqa: RUF009
    label_column: str | None = option(None, "Column of the label; by default `label` or a name like it.", common=True)
    choice_columns: list[str] | None = option(  # noqa: RUF009
        None,
        "Multiple choice: columns of the choices, or one of lists; by default choice0, choice1, ... and the like.",
    )
    regression: bool | None = option(
        None, "Predict a number; by default where the labels are numbers with a fractional part."
    )
    validation_mismatched_file: list[str] | None = option(  # noqa: RUF009
        None, "MNLI's second held-out set, beside validation_file."
    )
    max_length: int = option(128, "Longest row in tokens.", minimum=4, aliases=("max_seq_length",), common=True)
    ignore_mismatched_sizes: bool = option(
        False, "Give a pretrained model with another number of labels a new, random head."
    )

    def problems(self) -> list[str]:
        found = super().problems()
        if self.text_columns and len(self.text_columns) > 2:
            found.append(f"text_columns = {' '.join(self.text_columns)}: name one column, or the two of a pair")
        if self.choice_columns and (self.task_name or self.regression):
            other = f"task_name = {self.task_name}" if self.task_name else "regression = true"
            found.append(f"choice_columns = {' '.join(self.choice_columns)} and {other}: keep one of the two")
        if self.validation_mismatched_file and self.task_name != "mnli":
            found.append("validation_mismatched_file belongs to --task_name mnli")
        if self.task_name and self.regression is not None and self.regression != (self.task_name == "stsb"):
            found.append(f"regression = {self.regression} and task_name = {self.task_name}: leave regression out")
        return found


@dataclass
class PairOptions(Recipe):
    """Sources and targets"""

    dialogue_column: str | None = option(None, "Column of the conversation, a list of turns; by default a known name.")
    source_column: str | None = option(
        None, "Column of the source text, where there is no conversation.", aliases=("text_column",), common=True
    )
    target_column: str | None = option(
        None,
        "Column of the target text (of the reply to a conversation).",
        aliases=("summary_column", "response_column"),
        common=True,
    )
    turn_separator: str | None = option(None, "What stands between two turns; by default the model's own.")
    source_prefix: str = option("", "Text before every source, e.g. 'summarize: ' for T5.")
    max_source_length: int = option(128, "Longest source in tokens; of a conversation the latest turns are kept.",
                                    minimum=4, common=True)  # fmt: skip
    max_target_length: int = option(128, "Longest target in tokens; the rest is cut away.", minimum=2, common=True)


@dataclass
class GenerationOptions(Recipe):
    """Evaluation by generation"""

    predict_with_generate: bool = option(True, "Generate from the held-out sources, and measure BLEU and ROUGE.")
    num_beams: int | None = option(None, "Beams of the search; by default the model's own number, else 1.",
                                   positive=True, common=True)  # fmt: skip
    val_max_target_length: int | None = option(
        None, "Longest generated text in tokens; by default max_target_length.", positive=True
    )
    val_min_target_length: int | None = option(
        None, "Shortest generated text in tokens; by default the model's own.", minimum=0
    )
    n_val_batch_generations: int = option(
        3, "Held-out batches from which a generated text is shown (predictions.jsonl has all).", minimum=0
    )

    def problems(self) -> list[str]:
        found = super().problems()
        longest = self.val_max_target_length or getattr(self, "max_target_length", None)
        if self.val_min_target_length and longest and self.val_min_target_length > longest:
            found.append(
                f"val_min_target_length = {self.val_min_target_length} is more than the longest generated text, "
                f"{longest} (val_max_target_length, by default max_target_length)"
            )
        return found


@dataclass
class TextOptions(Recipe):
    """How text becomes samples"""

    text_column: str | None = option(None, "Column that holds the text; by default `text`, or the only text column.")
    document_separator: str | None = option(
        None,
        "How a text file is cut into documents: line, paragraph, file, or the separator itself. By default the mark "
        "<|endoftext|> where the file has it; else each line is one without packing, and the whole file with it.",
    )
    block_size: int | None = option(
        None,
        "Length of a sample in tokens; by default the model's, at most 1024.",
        minimum=2,
        aliases=("seq_length",),
        common=True,
    )
    packing: str = option(
        "documents",
        "documents: fill blocks, attention stays inside each document; concatenate: fill blocks and ignore "
        "boundaries, as group_texts does; none: one document a row, cut at block_size and padded. Conversations are "
        "packed whole.",
        choices=("documents", "concatenate", "none"),
    )
    max_eval_batches: int | None = option(
        None,
        "Evaluate on the first so many batches of each process; by default on all that is held out.",
        positive=True,
    )
    append_eos: bool | None = option(
        None, "End each document with the end-of-text token; by default yes, except with --packing concatenate."
    )
    make_vocab_size_divisible_by: int | None = option(
        None,
        "From scratch: give the model a vocabulary that is a multiple of this; model/ has the tokenizer's again.",
        positive=True,
    )

    def problems(self) -> list[str]:
        found = super().problems()
        if self.make_vocab_size_divisible_by and getattr(self, "model_name_or_path", None):
            found.append(
                f"make_vocab_size_divisible_by = {self.make_vocab_size_divisible_by} has no effect with "
                "model_name_or_path: pretrained weights have the size they have. Leave it out"
            )
        return found


@dataclass
class CorpusOptions(Recipe):
    """Corpora in Megatron's format, made by `zerofit prepare` or Megatron's tool"""

    data_path: list[str] | None = option(  # noqa: RUF009
        None,
        "A corpus, named by what stands before .bin and .idx; or several, each after its weight: 0.3 A 0.7 B.",
        common=True,
    )
    split: str = option("969,30,1", "Shares of the documents for training, evaluation and test.")
    data_cache_path: str | None = option(
        None, "Where the index of the samples is kept; by default beside the (first) corpus."
    )
    reset_position_ids: bool = option(False, "Count positions anew after each end-of-document token.")
    reset_attention_mask: bool = option(False, "Let attention not look back over an end-of-document token.")
    eod_mask_loss: bool = option(False, "Do not train on the token after an end-of-document token.")

    def __post_init__(self):
        if self.data_path:  # A.bin is A, in the record of the run as well
            self.data_path = [word.removesuffix(".bin").removesuffix(".idx") for word in self.data_path]

    @property
    def blend(self) -> list[tuple[float | None, str]]:
        """(weight, prefix) of each corpus; all weights are None where none was given."""
        words = self.data_path or []
        weights = [_number(word) for word in words]
        if len(words) % 2 or any(weight is None for weight in weights[::2]):
            return [(None, word) for word in words]
        return list(zip(weights[::2], words[1::2]))

    def problems(self) -> list[str]:
        found = super().problems()
        if not self.data_path:
            names = ("split", "data_cache_path", *RESETS)
            return found + [f"{name} has no effect without data_path" for name in names if self.is_changed(name)]
        useless = [name for name in OF_TEXT if self.is_changed(name)]
        found += [
            f"{name} ({self.source(name)}) has no effect with data_path: a corpus is tokenised already, and --split "
            "shares it out"
            for name in useless
        ]
        if not self._split_is_sound():
            found.append(
                f"split = {self.split!r}: expected shares of training, evaluation and test, the first above 0, such "
                "as 949,50,1"
            )
        return found + self._problems_of_the_blend()

    def _split_is_sound(self) -> bool:
        if not re.fullmatch(r"[\d.]+([,/][\d.]+){0,2}", self.split.replace(" ", "")):
            return False
        shares = [_number(text) for text in re.split("[,/]", self.split)]
        return None not in shares and (shares[0] > 0 or (not self.trains and sum(shares[1:2]) > 0))

    def _problems_of_the_blend(self) -> list[str]:
        shown = f"data_path = {' '.join(self.data_path)}"
        blend = self.blend
        stray = [prefix for weight, prefix in blend if weight is None and _number(prefix) is not None]
        if stray:
            return [
                f"{shown}: {stray[0]} stands where a corpus was expected. Write WEIGHT CORPUS WEIGHT CORPUS ..., with "
                "a weight before each, or corpora alone"
            ]
        weights = [weight for weight, _ in blend if weight is not None]
        if any(weight < 0 or not math.isfinite(weight) for weight in weights):
            return [f"{shown}: a weight must be a number above 0"]
        if weights and not sum(weights):
            return [f"{shown}: the weights add up to 0. Give at least one corpus a weight above 0"]
        if 0 in weights:
            return [f"{shown}: a corpus of weight 0 would not be read. Leave it out"]
        return [] if all(prefix for _, prefix in blend) else [f"{shown}: a corpus has no name"]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass
class ChatOptions(Recipe):
    """Instructions and chats"""

    data_format: str = option(
        "auto",
        "What a record is. text: running text; instruction: instruction (, input) and output; prompt: prompt and "
        "completion; messages: turns with roles. By default what the columns say.",
        choices=("auto", "text", "instruction", "prompt", "messages"),
    )
    messages_column: str | None = option(None, "Column of the turns; by default `messages`, or a name like it.")
    chat_template: str | None = option(
        None,
        "How a conversation is written: llama-2-chat, instruction, instruction-ja, none (prompt and answer one after "
        "the other), or a .jinja file; by default as the tokenizer's own template has it.",
        common=True,
    )
    system_prompt: str | None = option(None, "System text for conversations that have none of their own.")
    train_on_prompt: bool = option(False, "Train on the whole conversation, not on the answers only.")

    def problems(self) -> list[str]:
        found = super().problems()
        text_column, packing = getattr(self, "text_column", None), getattr(self, "packing", None)
        columns = {"text_column": text_column, "messages_column": self.messages_column}
        named = [f"{name} = {column!r}" for name, column in columns.items() if column]
        if len(named) > 1:
            found.append(f"{' and '.join(named)}: keep one of the two")
        elif self.data_format != "auto":
            meant = {"text": "text_column", "messages": "messages_column"}.get(self.data_format)
            useless = [line for line in named if not (meant and line.startswith(meant))]
            found += [f"{line} has no effect with data_format = {self.data_format}" for line in useless]
        if self.data_format not in ("auto", "text") and packing == "concatenate":
            found.append(
                f"packing = concatenate and data_format = {self.data_format}: samples are packed whole, "
                "use --packing documents"
            )
        return found


@dataclass
class SampleOptions(Recipe):
    """A look at the result"""

    sample_tokens: int = option(0, "Generate this many tokens after training, for a look at the result.", minimum=0)
    sample_prompt: str | None = option(None, "What the sample (of sample_tokens) continues, or, of a chat, answers.")

    def problems(self) -> list[str]:
        found = super().problems()
        if self.sample_prompt is not None and not self.sample_tokens:
            found.append("sample_prompt has no effect without sample_tokens")
        return found


@dataclass
class WritingOptions(Recipe):
    """What is written for predict_file"""

    max_new_tokens: int = option(128, "Longest answer to a prompt of predict_file, in tokens.", positive=True)

    def problems(self) -> list[str]:
        found = super().problems()
        if self.is_changed("max_new_tokens") and not self.predict_file:
            found.append("max_new_tokens has no effect without predict_file (a sample has its sample_tokens)")
        return found


@dataclass
class ClmRecipe(
    SampleOptions, WritingOptions, AnswerOptions, TrainingRecipe, ChatOptions, RecordOptions, CorpusOptions,
    TextOptions, LossOptions,
):  # fmt: skip
    """Causal language modelling, from scratch or continued."""


@dataclass
class ClsRecipe(AnswerOptions, TrainingRecipe, PaddingOptions, RecordOptions, LabelOptions):
    """Classification and regression of sentences and pairs."""

    def __post_init__(self):
        others = () if self.trains else (self.validation_file, self.predict_file)
        if self.task_name and not any((self.dataset_name, self.train_file, *others)):
            self.dataset_name, self.dataset_config_name = GLUE_ON_THE_HUB, self.task_name


@dataclass
class Seq2SeqRecipe(
    AnswerOptions, TrainingRecipe, GenerationOptions, PaddingOptions, RecordOptions, PairOptions, LossOptions
):
    """Encoder-decoder training: dialogue, or any source and target."""
