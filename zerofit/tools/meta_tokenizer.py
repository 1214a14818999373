"""The conversion of Meta's tokenizer.model, of sentencepiece (Llama 1 and 2) or tiktoken (Llama 3), to transformers.

Sources of Llama 3's special tokens: tokenizer.py of github.com/meta-llama/llama3 and llama-models.
"""

import base64
import binascii
import itertools
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# "-" stands for a token reserved_special_token_N.
LLAMA_3_TOKENS = ("begin_of_text end_of_text - - - - start_header_id end_header_id - eot_id").split()
LLAMA_3_1_TOKENS = (
    "begin_of_text end_of_text - - finetune_right_pad_id - start_header_id end_header_id eom_id eot_id python_tag"
).split()
NUM_LLAMA_3_SPECIAL = 256  # number of special tokens in every Llama 3 model
END_TOKENS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")


@dataclass
class ConvertedTokenizer:
    """A converted tokenizer, and what the conversion of a model needs to know of it."""

    tokenizer: Any  # of transformers; None: --tokenizer none
    ends: tuple[int, int | list[int]]  # token ids of the beginning of a text, and of its end (Llama 3 has several)
    notes: list[str]  # lines for the terminal
    source: Path | None = None  # Meta's tokenizer.model

    def save(self, folder: Path, positions: int) -> None:
        """Write the tokenizer, and Meta's file: tiktoken's in original/, so that it is not read as sentencepiece's."""
        if self.tokenizer is None or self.source is None:
            return
        self.tokenizer.model_max_length = positions
        self.tokenizer.save_pretrained(folder)
        original = folder / "original" if isinstance(self.ends[1], list) else folder
        original.mkdir(exist_ok=True)
        shutil.copyfile(self.source, original / "tokenizer.model")


def find_tokenizer(folder: Path, chosen: str | None) -> Path | None:
    """Return the tokenizer.model of --tokenizer, of the folder or of the folder above it; None: --tokenizer none."""
    if chosen == "none":
        return None
    candidates = [Path(chosen).expanduser()] if chosen else [folder, folder.resolve().parent]
    for path in candidates:
        file = path / "tokenizer.model" if path.is_dir() else path
        if file.is_file():
            return file
    where = f"tokenizer = {chosen!r}: there is" if chosen else f"input = {str(folder)!r} and the folder above it have"
    raise UserError(f"{where} no tokenizer.model. Name it with --tokenizer FILE, or use --tokenizer none")


def convert_tokenizer(file: Path | None, vocab: int, version: str) -> ConvertedTokenizer:
    """Convert a tokenizer file of Meta's for embeddings of `vocab` rows. Llama 3's special tokens depend on the
    model's version, such as "3.1"."""
    if file is None:
        ends = (vocab - 256, vocab - 255) if version.startswith("3") else (1, 2)
        return ConvertedTokenizer(None, ends, ["warning: the folder has no tokenizer (--tokenizer none)"])
    ranks = read_tiktoken_ranks(file)
    converted = _convert_tiktoken(file, ranks, vocab, version) if ranks else _convert_sentencepiece(file)
    size = max(converted.tokenizer.get_vocab().values()) + 1
    if size > vocab:
        raise UserError(f"{file} has {size} tokens, and the model {vocab}: name this model's tokenizer")
    return converted


def load_meta_tokenizer(file: Path) -> "PreTrainedTokenizerBase":
    """Load a tokenizer.model without a model. The params.json next to a Llama 3 tokenizer says which special tokens it
    has; without that file they are those of Llama 3.1."""
    params = file.with_name("params.json")
    ranks = len(read_tiktoken_ranks(file) or ())
    values = json.loads(read_text(params)) if params.is_file() else {"use_scaled_rope": True}
    special = (
        max(NUM_LLAMA_3_SPECIAL, (values.get("vocab_size") or 0) - ranks) if ranks > 1000 else len(LLAMA_3_TOKENS)
    )
    vocab = ranks + special if ranks else sys.maxsize
    return convert_tokenizer(file, vocab, "3.1" if values.get("use_scaled_rope") else "3").tokenizer


def read_tiktoken_ranks(file: Path) -> dict[bytes, int] | None:
    """Return {token: rank} of a file with lines `base64 rank`; None: the file has another format."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines} or None
    except (ValueError, binascii.Error):
        return None


def _convert_sentencepiece(file: Path) -> ConvertedTokenizer:
    from sentencepiece import SentencePieceProcessor
    from transformers import LlamaTokenizer

    try:
        pieces = SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as error:
        raise UserError(f"{file} is neither sentencepiece's nor tiktoken's: {first_line(error)}") from None
    with tempfile.TemporaryDirectory() as folder:  # otherwise other files next to it would be read
        shutil.copyfile(file, Path(folder) / "tokenizer.model")
        tokenizer = LlamaTokenizer.from_pretrained(folder, add_bos_token=True)
    return ConvertedTokenizer(tokenizer, (pieces.bos_id(), pieces.eos_id()), [], file)


def make_special_tokens(version: str, number: int) -> list[str]:
    """Return the first `number` special tokens of Llama 3: named ones, with numbered ones between and after them."""
    names = LLAMA_3_1_TOKENS if version == "3.1" else LLAMA_3_TOKENS
    numbered = itertools.count()
    tokens = [f"reserved_special_token_{next(numbered)}" if name == "-" else name for name in [*names, *"-" * number]]
    return [f"<|{name}|>" for name in tokens[:number]]


def _convert_tiktoken(file: Path, ranks: dict[bytes, int], vocab: int, version: str) -> ConvertedTokenizer:
    from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(_: str) -> dict[bytes, int]:
            return ranks  # transformers' own method needs the package tiktoken to read the same lines

    names = make_special_tokens(version, vocab - len(ranks))
    if len(names) < len(LLAMA_3_TOKENS):
        raise UserError(f"{file} has {len(ranks)} tokens, and the model {vocab} with special ones: name its own")
    bpe = Converter(vocab_file=str(file), extra_special_tokens=names).converted()
    start = len(ranks)
    begin = TemplateProcessing(
        single=f"{names[0]} $A", pair=f"{names[0]} $A {names[0]}:1 $B:1", special_tokens=[(names[0], start)]
    )
    bpe.post_processor = Sequence([ByteLevel(trim_offsets=False), begin])
    names_of = {"bos_token": names[0], "eos_token": names[1], "model_input_names": ["input_ids", "attention_mask"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False, **names_of)
    end_tokens = [name for name in END_TOKENS if name in names]
    note = f"note: no chat template; generation ends at any of {', '.join(end_tokens)}"
    return ConvertedTokenizer(tokenizer, (start, [start + names.index(name) for name in end_tokens]), [note], file)
