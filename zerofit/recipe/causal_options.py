"""Options of causal language modelling: text, corpora, chats, pairs of answers, a teacher, streams, and samples."""

import math
import re
from dataclasses import dataclass

from zerofit.recipe.base import Recipe, option
from zerofit.recipe.data_options import WARMUP_FORM, InferenceOptions, problems_of_weights, split_weights
from zerofit.recipe.files import parse_bytes
from zerofit.recipe.paths import is_weight

DOCUMENT_RESETS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")  # after an end-of-document token


class OptionsOfOtherGroups:
    """Annotations of the options that a group reads and another one declares. It is not a dataclass, and declares none
    itself."""

    train_file: list[str] | None
    validation_file: list[str] | None
    predict_file: list[str] | None
    max_train_steps: int | None
    preference_loss: str | None = None  # only train/dpo.py has it
    teacher: str | None = None  # only train/distill.py has it
    distill_divergence: str | None = None


@dataclass
class TextOptions(Recipe):
    """Samples of text"""

    text_column: str | None = option(
        None,
        "Column of the text; by default `text`, or the only column of text.",
        shapes_input=True,
        needs="!data_path !preference_loss",
    )
    document_separator: str | None = option(
        None,
        "What separates documents in a text file: line, paragraph, file (no separator), or the separator itself. By "
        "default <|endoftext|> if the file has it; else file, and with --packing none line.",
        shapes_input=True,
        needs="!data_path !streaming",
    )
    block_size: int | None = option(
        None,
        "Length of a sample in tokens; by default the model's maximum, at most 1024.",
        minimum=2,
        aliases=("seq_length",),
        common=True,
        shapes_input=True,
    )
    block_size_warmup: str | None = option(
        None,
        "START@UPDATES, as 64@2000: samples of text are cut to START tokens in the first update, and grow in steps of "
        "START to block_size, reached after UPDATES updates. What is cut off is not read in that epoch.",
        form=WARMUP_FORM,
        phase="train",
        needs="!tokens_per_batch !preference_loss",
    )
    packing: str = option(
        "documents",
        "documents: several documents per block, attention stays inside each document; concatenate: the same without "
        "boundaries, as group_texts does; none: one document per row, truncated at block_size and padded. A "
        "conversation is never split over two blocks.",
        choices=("documents", "concatenate", "none"),
        shapes_input=True,
        needs="!data_path",
        noted="!preference_loss",
    )
    append_eos: bool | None = option(
        None,
        "Append the end-of-text token to each document; by default yes, except with --packing concatenate.",
        shapes_input=True,
        needs="!data_path",
    )
    make_vocab_size_divisible_by: int | None = option(
        None,
        "From scratch: pad the model's vocabulary to a multiple of this; model/ is exported without the padding.",
        positive=True,
        phase="train",
        needs="!model_name_or_path",
    )


def has_documents(split: str) -> bool:
    """Return whether up to three proportions give training or evaluation documents."""
    parts = [float(part) for part in re.split("[,/]", split)]
    return len(parts) <= 3 and min(parts) >= 0 and 0 < sum(parts[:2]) < math.inf


@dataclass
class CorpusOptions(Recipe, phase="data", needs="data_path"):
    """Corpora in Megatron's format"""

    data_path: list[str] | None = option(
        None,
        "Path of a corpus without .bin and .idx; or several corpora, each after its weight: 0.3 A 0.7 B.",
        common=True,
        needs="!streaming !tokens_per_batch !preference_loss",
    )
    split: str = option(
        "969,30,1",
        "Proportions of the documents for training, evaluation and test.",
        form=(has_documents, "proportions of training, evaluation and test, such as 949,50,1"),
    )
    reset_position_ids: bool = option(
        False, "Restart position ids after each end-of-document token.", shapes_input=True
    )
    reset_attention_mask: bool = option(
        False, "Attend only within a document (after the last end-of-document token).", shapes_input=True
    )
    eod_mask_loss: bool = option(
        False, "Do not train on the token that follows an end-of-document token.", shapes_input=True
    )

    def __post_init__(self) -> None:
        if self.data_path:  # A.bin means A, in the run's recipe.yaml as well
            self.data_path = [word.removesuffix(".bin").removesuffix(".idx") for word in self.data_path]

    @property
    def blend(self) -> list[tuple[float | None, str]]:
        """Return (weight, prefix) of each corpus; all weights are None where none was given."""
        sources = split_weights(self.data_path)
        return [(weight, name) for weight, names in sources for name in names] or [
            (None, name) for name in self.data_path or []
        ]

    def problems(self) -> list[str]:
        problems = super().problems()
        if not self.data_path:
            return problems
        if self.trains and not float(re.split("[,/]", self.split)[0]):
            problems.append(f"split = {self.split!r} leaves training no documents")
        problems += problems_of_weights("data_path", self.data_path, most_names=1)
        return problems if all(self.data_path) else [*problems, "data_path: a corpus has no name"]


@dataclass
class ChatOptions(Recipe, shapes_input=True, needs="!data_path"):
    """Instructions and chats"""

    chat_template: str | None = option(
        None,
        "Chat template: chatml, llama-2-chat, instruction, instruction-ja, none (the answer follows the prompt), or "
        "a .jinja file; by default the tokenizer's own.",
        common=True,
        shapes_input=False,
    )
    system_prompt: str | None = option(None, "System prompt for conversations without one.")
    train_on_prompt: bool = option(
        False,
        "Train on the prompts too, not only on the answers.",
        shapes_input=True,
        needs="!data_path !preference_loss",
    )


REFERENCE_LOSSES = ("dpo", "ipo", "hinge")
PREFERENCE_LOSSES = (*REFERENCE_LOSSES, "simpo", "orpo")


@dataclass
class PreferenceOptions(InferenceOptions, TextOptions, OptionsOfOtherGroups):
    """Pairs of answers"""

    preference_loss: str = option(
        "dpo",
        "The loss of pairs of answers (columns chosen and rejected). dpo, ipo and hinge (SLiC) compare with the model "
        "before training; simpo and orpo need no reference.",
        choices=PREFERENCE_LOSSES,
        common=True,
    )
    preference_beta: float | None = option(
        None, "Factor of the rewards; by default 0.1, and 2.0 for simpo.", positive=True
    )
    preference_label_smoothing: float = option(
        0.0, "dpo: the probability that a pair is labelled wrongly.", minimum=0, below=0.5, needs="preference_loss=dpo"
    )
    simpo_gamma: float = option(
        0.5, "simpo: the margin between the two rewards.", minimum=0, needs="preference_loss=simpo"
    )

    def problems(self) -> list[str]:
        problems = super().problems()
        loss = self.preference_loss
        if not self.trains and not self.predict_file and loss in REFERENCE_LOSSES:
            problems.append(
                f"evaluate_only is not supported with preference_loss = {loss}: the reference is the model before "
                "training. Evaluate while it trains (eval_steps)"
            )
        return problems


@dataclass
class DistillationOptions(Recipe, OptionsOfOtherGroups):
    """Distillation"""

    teacher: str | None = option(
        None, "The teacher, a folder or a hub name; each process holds all of it.", common=True
    )
    distill_divergence: str = option(
        "forward",
        "forward: KL(teacher || student), or reverse: KL(student || teacher).",
        choices=("forward", "reverse"),
    )
    distill_weight: float = option(
        0.5, "Weight of the divergence; the loss of the next token weighs 1 - X.", minimum=0, at_most=1, phase="train"
    )
    distill_temperature: float = option(
        1.0, "Temperature of both; the divergence is multiplied by its square.", positive=True, phase="train"
    )

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.trains and not self.teacher:
            problems.append("train/distill.py: name the teacher with --teacher, a folder or a hub name")
        return problems


@dataclass
class StreamOptions(Recipe, OptionsOfOtherGroups):
    """Streaming"""

    streaming: str | None = option(
        None,
        "Size, as 256MiB: read train_file (.parquet, .jsonl, .tar of WebDataset; paths, globs, or addresses such as "
        "s3://bucket/*.parquet) while training goes on, in windows of about this many bytes of records, which are "
        "shuffled together. For data that do not fit the disk.",
        form=(parse_bytes, "a size such as 256MiB"),
        needs="!preference_loss",
    )

    def problems(self) -> list[str]:
        problems = super().problems()
        stated = f"streaming = {self.streaming}"
        if not self.streaming:
            return problems
        if self.trains and not self.train_file:
            problems.append(f"{stated}: name the shards with train_file")
        if self.trains and not self.max_train_steps:
            problems.append(f"{stated}: nobody has counted the records. Say max_train_steps, the updates of the run")
        if self.trains and any(map(is_weight, self.train_file or [])):
            problems.append(f"{stated}: shards have no weights. Remove them, or stream one source")
        if not (self.trains or self.validation_file or self.predict_file):
            problems.append(
                f"{stated}: nothing is held out of a stream. Name the data to evaluate with validation_file"
            )
        return problems


@dataclass
class SampleOptions(Recipe, phase="train", identity=False):
    """Texts that the model writes"""

    sample_tokens: int = option(0, "Generate this many tokens after training and print them. 0: none.", minimum=0)
    sample_prompt: str | None = option(None, "Prompt of that sample.", needs="sample_tokens")
    max_new_tokens: int = option(
        128,
        "Maximum number of tokens to generate for a prompt of predict_file.",
        positive=True,
        needs="predict_file",
        phase="always",
    )
