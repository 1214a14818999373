"""Samples of labelled data: the held-out parts, all that a run needs, and texts as rows of token ids."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase

from zerofit.data.labelled.labels import Labels
from zerofit.data.lengths import report_data_loss
from zerofit.data.options import PARTS
from zerofit.data.pack import SampleSet
from zerofit.data.token_tables import IDS, TableCache, encode_table, fingerprint
from zerofit.data.tokenized import TokenizedDataset
from zerofit.model.tokenizer import padding_values


class LabelledSamples(SampleSet, Protocol):
    """Samples with a label each."""

    labels: np.ndarray  # (N,) int64 classes or float32 numbers


@dataclass
class HeldOut:
    """A held-out part: its samples, its texts (for predictions.jsonl), and the part's name in figures.

    Args:
        numbers: of records without labels: their numbers in the file, for a submission.
    """

    samples: LabelledSamples
    texts: Dataset
    suffix: str  # "" or "_mismatched"
    numbers: list | None = None


@dataclass
class ExampleData:
    """Samples of all parts (TokenizedDataset; ChoiceRows for multiple choice; no `train` without training), the
    labels, and the tokenizer that made them."""

    train: SampleSet | None
    held_out: list[HeldOut]
    labels: Labels
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    notes: list[str] = field(default_factory=list)


def encode_texts(
    texts: Dataset, tokenizer, length: int, cache: TableCache, labels: np.ndarray | None = None
) -> TokenizedDataset:
    """Token ids of the text or the pair, the longer text is truncated first if both do not fit."""
    columns = tuple(padding_values(tokenizer))

    def encode(batch: dict) -> dict:
        given = [[text or "" for text in column] for column in batch.values()]
        encoded = tokenizer(
            *given, return_attention_mask=False, return_token_type_ids="token_type_ids" in columns, verbose=False
        )
        rows = {name: list(encoded[name]) for name in columns}
        truncated = [0] * len(given[0])
        for index, ids in enumerate(rows["input_ids"]):
            if len(ids) > length:
                cut = tokenizer(*(column[index] for column in given), truncation=True, max_length=length)
                truncated[index] = len(ids) - len(cut["input_ids"])
                for name in columns:
                    rows[name][index] = cut[name]
        return {**rows, "truncated": truncated}

    features = Features({**dict.fromkeys(columns, IDS), "truncated": Value("int32")})
    table = encode_table(texts, encode, features, (fingerprint(tokenizer), length, columns), cache)
    return TokenizedDataset(table, columns, labels)


def truncation_notes(rows: TokenizedDataset, part: str, what: str, length: int, config) -> list[str]:
    """Notes about truncated texts.

    Args:
        what: texts or choices.
    """
    message = f"{PARTS.get(part, PARTS['validation'])} {what} are cut at {length} tokens (max_length)"
    cut, lengths = int((rows.truncated > 0).sum()), rows.lengths + rows.truncated
    return report_data_loss(False, cut, len(rows), message, lengths, "max_length", config, stops=False)
