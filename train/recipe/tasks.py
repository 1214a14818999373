"""The options of single tasks, and the recipe of each: a flat dataclass that joins the groups it needs."""

from dataclasses import dataclass

from train.recipe.fields import option
from train.recipe.options import Recipe, TrainingRecipe

GLUE_TASKS = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli")
GLUE_ON_THE_HUB = "nyu-mll/glue"


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

    task_name: str | None = option(None, "A GLUE task: its columns, labels and metric.", choices=GLUE_TASKS)
    text_columns: list[str] | None = option(None, "Column of the text, or the two of a pair.")  # noqa: RUF009
    label_column: str | None = option(None, "Column of the label; by default `label` or a name like it.")
    regression: bool | None = option(
        None, "Predict a number; by default where the labels are numbers with a fractional part."
    )
    validation_mismatched_file: list[str] | None = option(  # noqa: RUF009
        None, "MNLI's second held-out set, beside validation_file."
    )
    max_length: int = option(128, "Longest row in tokens.", minimum=4, aliases=("max_seq_length",))
    ignore_mismatched_sizes: bool = option(
        False, "Give a pretrained model with another number of labels a new, random head."
    )

    def problems(self) -> list[str]:
        found = super().problems()
        if self.text_columns and len(self.text_columns) > 2:
            found.append(f"text_columns = {' '.join(self.text_columns)}: name one column, or the two of a pair")
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
        None, "Column of the source text, where there is no conversation.", aliases=("text_column",)
    )
    target_column: str | None = option(
        None,
        "Column of the target text (of the reply to a conversation).",
        aliases=("summary_column", "response_column"),
    )
    turn_separator: str | None = option(None, "What stands between two turns; by default the model's own.")
    source_prefix: str = option("", "Text before every source, e.g. 'summarize: ' for T5.")
    max_source_length: int = option(128, "Longest source in tokens; of a conversation the latest turns are kept.",
                                    minimum=4)  # fmt: skip
    max_target_length: int = option(128, "Longest target in tokens; the rest is cut away.", minimum=2)


@dataclass
class GenerationOptions(Recipe):
    """Evaluation by generation"""

    predict_with_generate: bool = option(True, "Generate from the held-out sources, and measure BLEU and ROUGE.")
    num_beams: int | None = option(None, "Beams of the search; by default the model's own number, else 1.",
                                   positive=True)  # fmt: skip
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
        None, "Length of a sample in tokens; by default the model's, at most 1024.", minimum=2
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
class ClmRecipe(SampleOptions, TrainingRecipe, ChatOptions, RecordOptions, TextOptions, LossOptions):
    """Causal language modelling, from scratch or continued."""


@dataclass
class ClsRecipe(TrainingRecipe, PaddingOptions, RecordOptions, LabelOptions):
    """Classification and regression of sentences and pairs."""

    def __post_init__(self):
        if self.task_name and not (self.dataset_name or self.train_file):
            self.dataset_name, self.dataset_config_name = GLUE_ON_THE_HUB, self.task_name


@dataclass
class Seq2SeqRecipe(TrainingRecipe, GenerationOptions, PaddingOptions, RecordOptions, PairOptions, LossOptions):
    """Encoder-decoder training: dialogue, or any source and target."""
