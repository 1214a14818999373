"""Tokenizers as they are published: bare vocabulary files, and corpora in Megatron's format."""

import io
import json
import struct
from pathlib import Path

import numpy as np

from .records import JAPANESE
from .texts import documents

MARKS = ["<pad>", "<s>", "</s>", "<unk>", "<s_AGAIN>", "<pad_AGAIN>", "</s_AGAIN>", "<unk_AGAIN>"]
PADS = [f"__FP16_PAD_{number}__" for number in range(4)]


def write_tokenizers(folder: Path) -> None:
    texts = [*documents(), *(f" {text}" for text in JAPANESE * 40)]  # few: most of its characters stay bytes
    _write_byte_level(folder / "tokenizers" / "gpt2", texts, 3000, last=["<|endoftext|>"])
    _write_byte_level(folder / "tokenizers" / "blenderbot", texts, 2000, first=MARKS, last=PADS)
    write_sentencepiece(folder / "tokenizers" / "llama", texts, 2000)


def _write_byte_level(
    folder: Path, texts: list[str], size: int, first: list[str] | None = None, last: list[str] | None = None
) -> None:
    """vocab.json and merges.txt of a byte-level BPE; `first` and `last` are tokens around the learnt ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    first, last = first or [], last or []
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learnt = size - len(first) - len(last)
    trainer = trainers.BpeTrainer(vocab_size=learnt, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    vocabulary = {piece: number for number, piece in enumerate([*first, *pieces, *last])}
    folder.mkdir(parents=True)
    tokenizer.model.save(str(folder))  # for its merges.txt
    (folder / "vocab.json").write_text(json.dumps(vocabulary))


def write_sentencepiece(folder: Path, texts: list[str], size: int) -> None:
    """tokenizer.model with the settings of Llama's: BPE, byte fallback, digits alone, text as it is."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in text.splitlines() if line.strip()),
        model_writer=written, vocab_size=size, model_type="bpe", byte_fallback=True, split_digits=True,
        allow_whitespace_only_pieces=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=0.99995, unk_surface=" \u2047 ", num_threads=1, minloglevel=2,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(written.getvalue())


def write_corpora(folder: Path) -> None:
    """Two corpora of 100 documents in gpt2's tokens, as Megatron wrote them when it wrote int32."""
    from transformers import GPT2Tokenizer

    tokenizer = GPT2Tokenizer.from_pretrained(folder / "tokenizers" / "gpt2")
    (folder / "megatron").mkdir()
    for number, name in enumerate(("first", "second")):
        rows = tokenizer(documents()[number * 100 : number * 100 + 100])["input_ids"]
        _write_corpus(folder / "megatron" / f"{name}_document", rows)


def _write_corpus(prefix: Path, rows: list[list[int]]) -> None:
    """Megatron's format (core/datasets/indexed_dataset.py): lengths, places in bytes, where documents begin."""
    lengths = np.array([len(row) for row in rows], np.int32)
    places = (np.cumsum(lengths, dtype=np.int64) - lengths) * 4
    int32 = 4
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, int32, len(rows), len(rows) + 1)
    index = lengths.tobytes() + places.tobytes() + np.arange(len(rows) + 1, dtype=np.int64).tobytes()
    Path(f"{prefix}.idx").write_bytes(head + index)
    Path(f"{prefix}.bin").write_bytes(np.concatenate([np.array(row, np.int32) for row in rows]).tobytes())
