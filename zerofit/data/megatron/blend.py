"""Megatron's GPT samples: documents shuffled, concatenated, and cut into pieces of block_size + 1 tokens, by
megatron-core itself. So a run has the same samples as Megatron-LM with the same seed, split and blend.

Source: megatron-core's gpt_dataset.py, blended_dataset.py and blended_megatron_dataset_builder.py.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import warnings
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from zerofit.compat.megatron import as_first_rank
from zerofit.data.megatron.corpus import Corpus, megatron
from zerofit.data.pack import DatasetStats, Sample
from zerofit.data.tables import one_process_at_a_time
from zerofit.model.loss import IGNORE
from zerofit.recipe.causal_options import RESETS
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import is_there, put_in_place

TRAINING, HELD_OUT, TEST = range(3)
PARTS = ("training", "evaluation")
SURPLUS = 1.01  # megatron-core makes half a percent more samples of each corpus of a blend than it uses


@dataclasses.dataclass(frozen=True)
class Blend:
    """Corpora, the proportion of samples from each, and the split of the documents."""

    corpora: list[Corpus]
    weights: list[float] | None  # those of data_path; None: in proportion to the size of each corpus
    split: str  # the text of the option, which megatron-core parses
    block_size: int  # tokens of a sample, without the one more that is only predicted
    seed: int

    @functools.cached_property
    def bounds(self) -> list[tuple[float, float] | None]:
        """Return (start, end) of training, evaluation and test, as fractions of the documents; None for an empty
        part."""
        config = megatron().config
        return config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(self.split))

    def documents(self, corpus: Corpus, part: int) -> range:
        """The documents of a part, cut as megatron-core cuts: in the order of the corpus."""
        count = float(len(corpus.lengths))
        return range(*(round(end * count) for end in self.bounds[part] or (0.0, 0.0)))

    def tokens(self, corpus: Corpus, part: int) -> int:
        """Tokens of a part of a corpus."""
        held = self.documents(corpus, part)
        return int(corpus.lengths[held.start : held.stop].sum(dtype=np.int64))

    def samples(self, corpus: Corpus, part: int) -> int:
        """Number of samples in one pass over a part of a corpus."""
        return max(0, (self.tokens(corpus, part) - 1) // self.block_size)

    def samples_per_epoch(self, part: int) -> int:
        """Number of samples in one pass over a part of all corpora together."""
        return sum(self.samples(corpus, part) for corpus in self.corpora)

    @property
    def proportions(self) -> list[float]:
        """The proportion of the samples that comes from each corpus."""
        part = TRAINING if self.bounds[TRAINING] else HELD_OUT
        weights = self.weights or [self.samples(corpus, part) for corpus in self.corpora]
        return [weight / sum(weights) for weight in weights]

    def max_samples_without_repeats(self, part: int) -> int:
        """Number of samples of a part that can be drawn in these proportions, each at most once."""
        if self.weights is None:
            return self.samples_per_epoch(part)
        limits = (
            self.samples(corpus, part) / proportion for corpus, proportion in zip(self.corpora, self.proportions)
        )
        return max(1, int(min(limits) / SURPLUS))

    def check(self) -> None:
        """Raises UserError if a part of the split would have no document, or no sample."""
        problems = [
            f"split = {self.split!r} leaves {PARTS[part]} {self.tokens(corpus, part):,} tokens of {corpus.prefix}: "
            f"fewer than block_size = {self.block_size} and one. Give it a larger proportion, or 0"
            for corpus in self.corpora
            for part in (TRAINING, HELD_OUT)
            if self.bounds[part] is not None and not self.samples(corpus, part)
        ]
        if problems:
            raise UserError(problems)


class CorpusSamples:
    """A part of a blend in the order of the run: sample k is the k-th of the run.

    Args:
        dataset: megatron-core's GPTDataset or BlendedDataset.
        count: number of samples in use.
        rows: number of tokens of the tokenizer; a larger id is refused when it is read.
        resets: whether positions, and attention, restart after an end-of-document token.
    """

    lengths = sort_key = None

    def __init__(self, dataset: Any, count: int, block_size: int, rows: int, eod: int, *, resets: tuple[bool, bool]):
        self.dataset, self.count, self.rows, self.eod, self.block_size = dataset, count, rows, eod, block_size
        self.reset_positions, self.reset_attention = resets
        tokens = count * block_size
        self.stats = DatasetStats(documents=count, tokens=tokens, samples=count, truncated=0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        """input_ids and next_tokens, each (block_size,) int64, and the columns for the resets. Raises UserError: an id
        is beyond the vocabulary."""
        native = self.dataset[int(index)]
        tokens, targets, counts = (native[name].numpy() for name in ("tokens", "labels", "loss_mask"))
        for number in (min(tokens.min(), targets.min()), max(tokens.max(), targets.max())):
            if not 0 <= number < self.rows:
                raise UserError(beyond_the_vocabulary(int(number), self.rows, f"sample {index}"))
        sample = {"input_ids": tokens, "next_tokens": np.where(counts > 0, targets, IGNORE)}
        if self.reset_positions:
            sample["position_ids"] = native["position_ids"].numpy()
            if not self.reset_attention:  # without a mask transformers takes such positions for separate documents
                sample["attention_mask"] = np.ones_like(tokens)
        elif self.reset_attention:
            ends = tokens == self.eod
            sample["documents"] = np.cumsum(ends) - ends
        return sample


def beyond_the_vocabulary(number: int, rows: int, where: str) -> str:
    """The message for an id that the tokenizer does not have."""
    return f"data_path: {where} holds token {number:,}, the tokenizer has {rows:,}. Set tokenizer_name to its own"


def build_samples(
    blend: Blend, num_samples: int, num_held_out: int, rows: int, eod: int, *, resets: tuple[str, ...], root: Path
) -> tuple[CorpusSamples | None, CorpusSamples | None]:
    """Return (training, held-out) samples. The first process makes their index; all processes map it into memory.
    Raises UserError: the index cannot be written.

    Args:
        num_samples: of the full run: documents are shuffled over all its epochs. 0: no training.
        num_held_out: 0: none.
        rows: tokens of the tokenizer.
        eod: the token at the end of a document.
        resets: those of RESETS that are set.
        root: the folder of indices.
    """
    sizes = (num_samples, num_held_out)
    flags = {name: name in resets for name in RESETS}
    # what megatron-core's datasets read of a tokenizer: the end of a document, and its identity
    ends = SimpleNamespace(vocab_size=rows, eod=eod, unique_identifiers=OrderedDict(eod=eod))
    folder = root / _name(blend, sizes, eod)
    try:
        if not is_there(folder):
            root.mkdir(parents=True, exist_ok=True)
            with one_process_at_a_time(root):
                if not is_there(folder):  # complete or absent: a killed run leaves no partial index
                    partial = folder.with_name(f"{folder.name}.partial-{platform.node()}")
                    shutil.rmtree(partial, ignore_errors=True)
                    _datasets(blend, sizes, ends, flags, partial)
                    put_in_place(partial, folder)
        datasets = _datasets(blend, sizes, ends, flags, folder)
    except OSError as error:
        is_file = isinstance(error, (FileExistsError, NotADirectoryError))
        why = "it is not a folder" if is_file else error.strerror or error
        raise UserError(f"samples cannot be indexed in {root}: {why}. Name a --cache_dir") from None
    restarts = (flags["reset_position_ids"], flags["reset_attention_mask"])
    counts = (len(datasets[TRAINING]) if num_samples else 0, num_held_out)
    train, held_out = (
        CorpusSamples(dataset, count, blend.block_size, rows, eod, resets=restarts) if dataset is not None else None
        for dataset, count in zip(datasets, counts)
    )
    return train, held_out


def _name(blend: Blend, sizes: tuple[int, int], eod: int) -> str:
    """The name of an index: a hash of all that it depends on. megatron-core's names omit what the files hold."""
    files = [f"{os.path.realpath(corpus.prefix)}.idx" for corpus in blend.corpora]
    key = {
        "corpora": [[file, os.stat(file).st_size, os.stat(file).st_mtime_ns] for file in files],
        "weights": blend.weights,
        "split": blend.split,
        "block_size": blend.block_size,
        "seed": blend.seed,
        "sizes": sizes,
        "eod": eod,
    }
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]


def _datasets(
    blend: Blend, sizes: tuple[int, int], ends: SimpleNamespace, flags: dict[str, bool], cache: Path
) -> list[Any]:
    """megatron-core's datasets of training and evaluation, None for an empty part; the index is read from or written
    to `cache`. The parts are made one by one: their orders do not depend on each other, but their weights may."""
    core, found = megatron(), list[Any]()
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    for part, count in enumerate(sizes):
        if not count:
            found.append(None)
            continue
        weights = blend.weights
        if part == TRAINING and len(blend.corpora) > 1 and weights is None and count > blend.samples_per_epoch(part):
            weights = blend.proportions  # without weights megatron-core makes only one pass
        config = core.gpt.GPTDatasetConfig(
            random_seed=blend.seed,
            sequence_length=blend.block_size,
            blend=([os.path.realpath(corpus.prefix) for corpus in blend.corpora], weights),
            split=blend.split,
            create_attention_mask=False,
            path_to_cache=str(cache),
            tokenizer=ends,
            **flags,
        )
        config.split_matrix = [bounds if place == part else None for place, bounds in enumerate(config.split_matrix)]
        counts = [count if place == part else 0 for place in range(len(config.split_matrix))]
        with as_first_rank(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            builder = core.builder.BlendedMegatronDatasetBuilder(core.gpt.GPTDataset, counts, lambda: True, config)
            found.append(builder.build()[part])
    return found
