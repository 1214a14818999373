"""Megatron's corpora: PREFIX.bin and PREFIX.idx, and PREFIX.json, which says how they were made; and their samples.

megatron-core makes the samples; the files are checked here without it, since its import takes seconds.
The format has no checksum and no end mark, and megatron-core does not check it: a truncated .bin causes an error only
in the middle of training. So the sizes of the files are compared before a corpus is opened.

Megatron's GPT samples: documents shuffled, concatenated, and cut into pieces of block_size + 1 tokens, by
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
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zerofit.compat import UNTIL_THE_RUN_ENDS
from zerofit.compat.megatron import as_first_rank, load_without_pickles
from zerofit.data.order import FixedOrder, samples_of_run
from zerofit.data.pack import DatasetStats, Sample, TextData
from zerofit.data.tables import one_process_at_a_time
from zerofit.model.loss import IGNORE
from zerofit.model.tokenizer import load_tokenizer, producible_tokens
from zerofit.recipe.causal_options import DOCUMENT_RESETS
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import cache_root, is_there, parse_json, put_in_place
from zerofit.recipe.paths import corpus_problem
from zerofit.recipe.tasks import ClmRecipe

# megatron-core's indexed_dataset.py
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_VERSION = 1
INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, ends of documents
DTYPE_OF_CODE: dict[int, type[np.number]] = dict(
    enumerate((np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16), 1)
)
INDEX_FOLDER = "GPTDataset_indices"  # name of the folder of indices, as in Megatron, which puts it next to a corpus
IDS_PER_READ = 1 << 22  # number of ids to read at a time
# Their token ids distinguish tokenizers that have the same vocabulary.
PROBE_TEXTS = (
    "The quick brown fox's 3.14 jumps\n\n\tover  the lazy dog.",
    "def f(x):\n    return x[0] != 1_000",
    "吾輩は猫である。名前はまだ無い。",
    "naïve café — “Ünïcödé” 🙂",
    " leading and trailing ",
)
TRAINING, EVALUATION, TEST = range(3)
SPLITS = ("training", "evaluation")
BLEND_SURPLUS = 1.01  # megatron-core makes half a percent more samples of each corpus of a blend than it uses
MAX_CHECKED_IDS = 2**27  # ids to check before training in a corpus without PREFIX.json


@functools.cache
def import_megatron() -> SimpleNamespace:
    """Import megatron-core's modules for data, which takes seconds. Raises UserError: it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Transformer Engine and Apex, which only models need, are not installed
        try:
            from megatron.core.datasets import (
                blended_dataset,
                blended_megatron_dataset_builder,
                blended_megatron_dataset_config,
                gpt_dataset,
                indexed_dataset,
            )
        except ImportError as error:
            raise UserError(f"pip install '.[megatron]' for megatron-core ({first_line(error)})") from None
    without_pickles = SimpleNamespace(**{**vars(np), "load": _mapped_array})
    load_without_pickles((blended_dataset, gpt_dataset), without_pickles)
    UNTIL_THE_RUN_ENDS.callback(import_megatron.cache_clear)
    return SimpleNamespace(
        builder=blended_megatron_dataset_builder,
        config=blended_megatron_dataset_config,
        gpt=gpt_dataset,
        indexed=indexed_dataset,
    )


def _mapped_array(path: str, **_: Any) -> np.ndarray:
    """Map an array file into memory, for megatron-core's datasets. Raises UserError: the file is not an array."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        problem = f"{path} is not an index: {first_line(error)}"
        raise UserError(f"{problem}. Remove its folder: it is made again") from None


@dataclass(frozen=True)
class CorpusCard:
    """PREFIX.json, which `zerofit prepare` writes. A corpus from another program has none. `documents, tokens`: their
    numbers; documents without a token count as well."""

    tokenizer: str  # name
    fingerprint: str  # see `tokenizer_fingerprint`
    vocab_size: int  # ids are below it
    eod: int | None  # the id after each document; None where there is none
    documents: int
    tokens: int
    largest_id: int  # the largest id in the corpus
    sources: list[str]  # the files or corpora that it was made from
    made_by: str  # the program and its version

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass
class Corpus:
    """A corpus with consistent files, mapped into memory. `lengths`: (sequences,) tokens of each sequence, int32.
    Megatron's own tool makes one sequence of a document."""

    prefix: str  # the path without .bin
    dtype: type[np.number]  # type of a token id
    lengths: np.ndarray
    pointers: np.ndarray  # (sequences,) the start of each in the .bin, in bytes, int64
    ends: np.ndarray  # (documents + 1,) the first sequence of each document, and the end of the last, int64
    card: CorpusCard | None  # None without PREFIX.json

    @property
    def documents(self) -> int:
        return len(self.ends) - 1

    @property
    def tokens(self) -> int:
        return os.path.getsize(f"{self.prefix}.bin") // self.dtype().itemsize

    def ids(self) -> np.ndarray:
        """Return (tokens,) all ids, mapped."""
        return np.memmap(f"{self.prefix}.bin", dtype=self.dtype, mode="r")


def open_corpus(option: str, prefix: str) -> Corpus:
    """Open PREFIX.bin and PREFIX.idx after a check of their sizes. `prefix` may have one of the two suffixes. Raises
    UserError: a file is missing, of another format or version, truncated, or not of the same corpus. `option`: the
    option that names the prefix, for messages."""
    prefix = str(Path(prefix.removesuffix(".bin").removesuffix(".idx")).expanduser())
    setting = f"{option} = {prefix!r}"
    index = Path(f"{prefix}.idx")
    content = Path(f"{prefix}.bin")
    if missing := corpus_problem(prefix):
        raise UserError(f"{setting}: {missing}")
    with index.open("rb") as file:
        head = file.read(INDEX_HEADER.size).ljust(INDEX_HEADER.size, b"\0")
    magic, version, code, sequences, documents = INDEX_HEADER.unpack(head)
    dtype = DTYPE_OF_CODE.get(code, np.float32)
    if (magic, version) != (INDEX_MAGIC, INDEX_VERSION) or not np.issubdtype(dtype, np.integer):
        problem = f"{magic!r}, version {version}, ids of type {code}"
        raise UserError(
            f"{setting}: {index} is not an index of Megatron's (MMIDIDX, version 1, integers), but {problem}"
        )
    expected = INDEX_HEADER.size + 12 * sequences + 8 * documents
    size = index.stat().st_size
    if size not in (expected, expected + sequences):  # the second has a mode of each sequence
        raise UserError(f"{setting}: {index} has {size:,} bytes, and by its header {expected:,}: it is truncated")
    if not sequences or documents < 2:
        raise UserError(f"{setting}: it holds no document")
    columns = []
    offset = INDEX_HEADER.size
    for kind, count in ((np.int32, sequences), (np.int64, sequences), (np.int64, documents)):
        columns.append(np.memmap(index, kind, "r", offset, (count,)))
        offset += columns[-1].nbytes
    lengths, pointers, ends = columns
    width = dtype().itemsize
    tokens = int(lengths.sum(dtype=np.int64))
    num_bytes = content.stat().st_size
    portions = (ends[offset : offset + IDS_PER_READ + 1] for offset in range(0, len(ends), IDS_PER_READ))
    rises = ends[0] == 0 and ends[-1] == len(lengths) and all((part[1:] >= part[:-1]).all() for part in portions)
    if lengths.min() < 0 or int(pointers[-1]) + int(lengths[-1]) * width != tokens * width or not rises:
        raise UserError(f"{setting}: {index} contradicts itself. Prepare the corpus again, or copy it again")
    if num_bytes != tokens * width:
        problem = f"{content} has {num_bytes:,} bytes, and {index} {tokens:,} tokens of {width} bytes"
        raise UserError(f"{setting}: {problem}. Copy both again")
    return Corpus(prefix, dtype, lengths, pointers, ends, read_card(prefix))


def read_card(prefix: str) -> CorpusCard | None:
    """Read PREFIX.json; None if it does not exist. Raises UserError: `zerofit prepare` did not write it."""
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return None
    try:
        card = parse_json(path.read_text(encoding="utf-8"))
        return CorpusCard(**{field.name: card[field.name] for field in dataclasses.fields(CorpusCard)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of `zerofit prepare` ({type(error).__name__}). Rename it") from None


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a hash of the vocabulary and of the token ids of a few texts. It does not depend on how the tokenizer is
    stored, or on added tokens, such as one for padding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = set(getattr(tokenizer, "added_tokens_decoder", {}))
    vocabulary = backend.get_vocab(with_added_tokens=False) if backend is not None else tokenizer.get_vocab()
    digest = hashlib.sha256()
    for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        if number not in added:
            digest.update(f"{number} {token}\n".encode("utf-8", "surrogatepass"))
    for text in PROBE_TEXTS:
        digest.update(repr(list(tokenizer(text)["input_ids"])).encode())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Blend:
    """Corpora, the proportion of samples from each, and the split of the documents."""

    corpora: list[Corpus]
    weights: list[float] | None  # the weights in data_path; None: in proportion to the size of each corpus
    split: str  # the text of the option, which megatron-core parses
    block_size: int  # tokens of a sample, without the one more that is only predicted
    seed: int

    @functools.cached_property
    def bounds(self) -> list[tuple[float, float] | None]:
        """Return (start, end) of training, evaluation and test, as fractions of the documents; None for an empty
        part."""
        config = import_megatron().config
        return config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(self.split))

    def tokens(self, corpus: Corpus, part: int) -> int:
        """Return the number of tokens in a part of a corpus. As in megatron-core, documents are split in their
        order."""
        count = float(len(corpus.lengths))
        start, stop = (round(end * count) for end in self.bounds[part] or (0.0, 0.0))
        return int(corpus.lengths[start:stop].sum(dtype=np.int64))

    def samples(self, corpus: Corpus, part: int) -> int:
        """Return the number of samples in one pass over a part of a corpus."""
        return max(0, (self.tokens(corpus, part) - 1) // self.block_size)

    def samples_per_epoch(self, part: int) -> int:
        """Return the number of samples in one pass over a part of all corpora together."""
        return sum(self.samples(corpus, part) for corpus in self.corpora)

    @property
    def proportions(self) -> list[float]:
        """Return the proportion of the samples that comes from each corpus."""
        part = TRAINING if self.bounds[TRAINING] else EVALUATION
        weights = self.weights or [self.samples(corpus, part) for corpus in self.corpora]
        return [weight / sum(weights) for weight in weights]

    def max_samples_without_repeats(self, part: int) -> int:
        """Return the number of samples of a part that can be drawn in these proportions, each at most once."""
        if self.weights is None:
            return self.samples_per_epoch(part)
        limits = (
            self.samples(corpus, part) / proportion for corpus, proportion in zip(self.corpora, self.proportions)
        )
        return max(1, int(min(limits) / BLEND_SURPLUS))

    def check(self) -> None:
        """Check the split. Raises UserError if a part of the split would have no document, or no sample."""
        problems = [
            f"split = {self.split!r} leaves {SPLITS[part]} {self.tokens(corpus, part):,} tokens of {corpus.prefix}: "
            f"fewer than block_size = {self.block_size} and one. Give it a larger proportion, or 0"
            for corpus in self.corpora
            for part in (TRAINING, EVALUATION)
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
        resets: those of DOCUMENT_RESETS that are set: what restarts after an end-of-document token.
    """

    lengths = sort_key = None

    def __init__(self, dataset: Any, count: int, block_size: int, rows: int, eod: int, *, resets: tuple[str, ...]):
        self.dataset = dataset
        self.count = count
        self.rows = rows
        self.eod = eod
        self.resets = resets
        self.stats = DatasetStats(documents=count, tokens=count * block_size, samples=count, truncated=0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        """Return input_ids and next_tokens, each (block_size,) int64, and the columns for the resets. Raises
        UserError: an id is beyond the vocabulary."""
        native = self.dataset[int(index)]
        tokens, targets, counts = (native[name].numpy() for name in ("tokens", "labels", "loss_mask"))
        for number in (min(tokens.min(), targets.min()), max(tokens.max(), targets.max())):
            if not 0 <= number < self.rows:
                raise UserError(unknown_token_message(int(number), self.rows, f"sample {index}"))
        sample = {"input_ids": tokens, "next_tokens": np.where(counts > 0, targets, IGNORE)}
        if "reset_position_ids" in self.resets:
            sample["position_ids"] = native["position_ids"].numpy()
            if "reset_attention_mask" not in self.resets:  # transformers takes restarted positions for documents
                sample["attention_mask"] = np.ones_like(tokens)
        elif "reset_attention_mask" in self.resets:
            ends = tokens == self.eod
            sample["documents"] = np.cumsum(ends) - ends
        return sample


def unknown_token_message(number: int, rows: int, where: str) -> str:
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
        resets: those of DOCUMENT_RESETS that are set.
        root: the folder of indices.
    """
    sizes = (num_samples, num_held_out)
    flags = {name: name in resets for name in DOCUMENT_RESETS}
    # megatron-core's datasets read two things of a tokenizer: the end of a document, and its identity
    ends = SimpleNamespace(vocab_size=rows, eod=eod, unique_identifiers=OrderedDict(eod=eod))
    files = [f"{os.path.realpath(corpus.prefix)}.idx" for corpus in blend.corpora]
    key = {  # all that the index depends on; megatron-core's names omit what the files hold
        "corpora": [[file, os.stat(file).st_size, os.stat(file).st_mtime_ns] for file in files],
        "weights": blend.weights,
        "split": blend.split,
        "block_size": blend.block_size,
        "seed": blend.seed,
        "sizes": sizes,
        "eod": eod,
    }
    folder = root / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]
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
    counts = (len(datasets[TRAINING]) if num_samples else 0, num_held_out)
    train, held_out = (
        CorpusSamples(dataset, count, blend.block_size, rows, eod, resets=resets) if dataset is not None else None
        for dataset, count in zip(datasets, counts)
    )
    return train, held_out


def _datasets(
    blend: Blend, sizes: tuple[int, int], ends: SimpleNamespace, flags: dict[str, bool], cache: Path
) -> list[Any]:
    """Build megatron-core's datasets of training and evaluation, None for an empty part; the index is read from or
    written to `cache`. The parts are made one by one: their orders are independent, but their weights may not be."""
    core = import_megatron()
    datasets: list[Any] = []
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    for part, count in enumerate(sizes):
        if not count:
            datasets.append(None)
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
            datasets.append(builder.build()[part])
    return datasets


def prepare_blend(
    recipe: ClmRecipe, config: PretrainedConfig, block_size: int, consumed: Callable[[int], int]
) -> TextData:
    """Open the corpora that the recipe names, and make the samples of the run. Raises UserError: a corpus is missing
    or damaged, was made with another tokenizer, or a part of it is empty. `consumed`: (number of
    updates) -> their samples."""
    weighted_prefixes = recipe.blend
    resets = tuple(name for name in DOCUMENT_RESETS if getattr(recipe, name))
    corpora = [open_corpus("data_path", prefix) for _, prefix in weighted_prefixes]
    prefixes: dict[str, str] = {}
    for corpus in corpora:
        earlier = prefixes.setdefault(os.path.realpath(corpus.prefix), corpus.prefix)
        if earlier is not corpus.prefix:  # named twice, perhaps in two ways
            raise UserError(f"data_path: {earlier} and {corpus.prefix} are one corpus. Name it once")
    weights = [weight for weight, _ in weighted_prefixes if weight is not None] or None
    tokenizer = load_tokenizer(recipe, config)
    rows = producible_tokens(tokenizer)
    notes = check_tokenizer(corpora, tokenizer, rows)
    eod_of_corpora = [corpus.card.eod if corpus.card else tokenizer.eos_token_id for corpus in corpora]
    eods = {eod for eod in eod_of_corpora if eod is not None}
    if len(eods) > 1:
        ends = ", ".join(map(str, sorted(eods)))
        raise UserError(f"data_path: documents of these corpora end differently ({ends}). Prepare them alike")
    if resets and not eods:
        raise UserError(f"{', '.join(resets)}: no token ends documents of {corpora[0].prefix}: use --append_eod")
    eod = eods.pop() if eods else -1
    blend = Blend(corpora, weights, recipe.split, block_size, recipe.seed)
    blend.check()
    per_epoch = blend.samples_per_epoch(TRAINING)
    total = 0
    if recipe.trains:
        total = samples_of_run(recipe.num_train_epochs, recipe.max_train_steps, per_epoch, consumed)
    held_out = blend.max_samples_without_repeats(EVALUATION) if blend.bounds[EVALUATION] else 0
    if not (held_out or recipe.trains):
        raise UserError(f"split = {recipe.split!r} holds nothing out. 0,1 evaluates on all documents")
    root = cache_root(recipe.cache_dir) / INDEX_FOLDER
    held_out = min(held_out, recipe.max_eval_samples or held_out)
    train, validation = build_samples(blend, total, held_out, rows, eod, resets=resets, root=root)
    order = FixedOrder(len(train)) if train is not None else None
    split_text = ", ".join((recipe.split, *resets))
    return TextData(
        train=train,
        validation=validation,
        tokenizer=tokenizer,
        block_size=block_size,
        notes=notes,
        kind=f"Megatron's GPT samples of {block_size:,} + 1 tokens, split {split_text}; samples of one pass:",
        order=order,
        samples_per_epoch=per_epoch,
        report=blend_table(blend, total, validation),
    )


def check_tokenizer(corpora: list[Corpus], tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str]:
    """Check that the corpora were made with the tokenizer of the run. Returns notes for the log. Raises UserError:
    they were made with another one, or hold ids that it does not have. `rows`: number of tokens of the tokenizer."""
    notes = []
    problems = []
    fingerprint = None
    for corpus in corpora:
        card = corpus.card
        if card is not None:
            fingerprint = fingerprint or tokenizer_fingerprint(tokenizer)
            if card.fingerprint != fingerprint:
                problems.append(f"data_path: {corpus.prefix} is of {card.tokenizer}. Set tokenizer_name to that")
            elif card.eod is None:
                notes.append(f"hint      {corpus.prefix} has no --append_eod: nothing marks where a document ends")
            continue
        stride = max(1, corpus.tokens // MAX_CHECKED_IDS)  # one portion in this many is checked
        ids = corpus.ids()
        portions = (ids[start : start + IDS_PER_READ] for start in range(0, len(ids), stride * IDS_PER_READ))
        ranges = [(int(portion.min()), int(portion.max())) for portion in portions]
        smallest = min(low for low, _ in ranges)
        largest = max(high for _, high in ranges)
        if smallest < 0 or largest >= rows:
            problems.append(unknown_token_message(smallest if smallest < 0 else largest, rows, corpus.prefix))
        checked = "its ids are" if stride == 1 else "those of its ids that were looked at are"
        notes.append(f"note      {corpus.prefix} has no .json; {checked} below {largest + 1:,}")
    if problems:
        raise UserError(problems)
    return notes


def blend_table(blend: Blend, total: int, validation: CorpusSamples | None) -> list[tuple[str, ...]]:
    """Return the table for the log: one row per corpus, with its size and the number of epochs of the run."""
    head = ("corpus", "share", "documents", "tokens", "training", "evaluation", "test", "epochs")
    rows = []
    for corpus, proportion in zip(blend.corpora, blend.proportions):
        samples = [blend.samples(corpus, part) for part in (TRAINING, EVALUATION, TEST)]
        times = total * proportion / samples[0] if samples[0] else 0.0
        counts = [f"{count:,}" for count in (corpus.documents, corpus.tokens, *samples)]
        rows.append((corpus.prefix, f"{proportion:.1%}", *counts, f"{times:.3g}"))
    used = f"{len(validation):,}" if validation is not None else "0"
    return [head, *rows, ("of the run", "", "", "", f"{total:,}", used, "0", "")]
