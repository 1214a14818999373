"""Samples with a teacher's likeliest tokens, as `zerofit generate --logprobs` writes and train/clm.py reads them.

A record is a sample as it is trained on: a block of packed documents or conversations. Positions without a target have
no tokens of the teacher's, so `teacher_ids` and `teacher_log_probabilities` are (targets * K,).
"""

import re
from collections import Counter
from hashlib import sha256
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, List, Value

from zerofit.data.lengths import choose_length
from zerofit.data.options import DataOptions
from zerofit.data.pack import DatasetStats, Documents, Sample, TextData
from zerofit.data.sources import read_source
from zerofit.data.tables import columns_present, first_records, hold_out
from zerofit.data.token_tables import IDS
from zerofit.model.loss import IGNORE
from zerofit.model.tokenizer import load_tokenizer
from zerofit.recipe.errors import UserError

COLUMNS = ("input_ids", "labels", "position_ids", "teacher_ids")
TABLE = Features(
    {**dict.fromkeys(COLUMNS, IDS), "teacher_log_probabilities": List(Value("float32")),
     "num_tokens": Value("int32"), "top_k": Value("int32"), "vocabulary": Value("string")}
)  # fmt: skip


def vocabulary_key(tokenizer) -> str:
    """What the meaning of token ids depends on."""
    return sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def targets_of(labels: np.ndarray) -> np.ndarray:
    """(T,) whether a position predicts a token that is trained on, the one after it."""
    return np.append(labels[1:] != IGNORE, False)


class DistilledSamples:
    """The samples of a table of TABLE; `teacher_ids` and `teacher_log_probabilities` of one are (T, K)."""

    def __init__(self, table: Dataset):
        self.columns = {name: Documents(table, name) for name in (*COLUMNS, "teacher_log_probabilities")}
        self.num_tokens = np.asarray(table.with_format("numpy")["num_tokens"][:])
        self.lengths = self.sort_key = None
        widths, tokens = self.columns["input_ids"].lengths, int(self.num_tokens.sum())
        self.top_k = int(table[0]["top_k"])
        self.block_size = int(widths.max())
        self.stats = DatasetStats(
            documents=len(table),
            tokens=tokens,
            samples=len(table),
            truncated=0,
            trained=self.columns["teacher_ids"].num_tokens // self.top_k,
            padding=1 - tokens / int(widths.sum()),
        )

    def __len__(self) -> int:
        return len(self.num_tokens)

    def __getitem__(self, index: int) -> Sample:
        sample = {name: column.row(index) for name, column in self.columns.items()}
        has_target = targets_of(sample["labels"])
        for name in ("teacher_ids", "teacher_log_probabilities"):
            known = sample[name].reshape(-1, self.top_k)
            sample[name] = np.zeros((len(has_target), self.top_k), dtype=known.dtype)
            sample[name][has_target] = known
        return {**sample, "num_tokens": np.array(self.num_tokens[index])}


def _check_complete(files: list[Path]) -> None:
    """Raises UserError where files of a set are not there: `zerofit generate` was stopped, or still writes."""
    names = [re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.parquet", file.name) for file in files]
    for (stem, total), found in Counter(name.groups() for name in names if name).items():
        if found < int(total):
            raise UserError(
                f"train_file: {found} of the {int(total)} files {stem}-*-of-{total}.parquet. Let `zerofit generate "
                "--logprobs` write the others, and name all of them"
            )


def read_distilled(options: DataOptions, config, block_size: int | None) -> TextData:
    """The samples of train_file, and a held-out part of them.

    Args:
        config: the student's.
        block_size: the option, which the samples decide where it is None.

    Raises:
        UserError: the files were not written by `zerofit generate --logprobs`, or by one with another K, or for
            another vocabulary, or some are missing; the model has too few positions.
    """
    source = read_source(options)
    table, where = source.parts["train"], source.where("train")
    if missing := [name for name in TABLE if name not in table.column_names]:
        raise UserError(
            f"distill_divergence: {where} has no column {', '.join(missing)}, as `zerofit generate --logprobs` writes "
            f"it; {columns_present(table)}"
        )
    tokenizer = load_tokenizer(options.tokenizer, config)
    if set(table.unique("vocabulary")) != {vocabulary_key(tokenizer)}:
        raise UserError(
            f"distill_divergence: the teacher of {where} has another vocabulary than {tokenizer.name_or_path!r}. Name "
            "the teacher's with tokenizer_name, or take another teacher"
        )
    if len(table.unique("top_k")) > 1:
        raise UserError(
            f"distill_divergence: {where}: not all files have the same --logprobs. Name those of one teacher"
        )
    _check_complete(source.files["train"])
    table = first_records(table.select_columns([*TABLE]), options.max_train_samples)
    parts = {"train": table}
    if options.held_out_fraction > 0:
        parts["train"], parts["validation"] = hold_out(table, options.held_out_fraction)
        parts["validation"] = first_records(parts["validation"], options.max_eval_samples)
    sets = {name: DistilledSamples(part.flatten_indices()) for name, part in parts.items()}
    width = choose_length("block_size", sets["train"].block_size, f"of {where}", config)
    if block_size not in (None, width):
        raise UserError(f"block_size = {block_size}: the samples of {where} have {width} tokens. Leave it out")
    notes = [f"teacher   the {sets['train'].top_k} likeliest tokens of each position"]
    train = sets["train"] if options.trains else None
    return TextData(train, sets.get("validation"), tokenizer, width, notes)
