"""The tokenizer: loaded, or trained on the training text and cached."""

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from train.recipe.errors import UserError, first_line
from train.recipe.files import is_there, put_in_place
from train.recipe.model_options import ModelOptions

END_OF_TEXT = "<|endoftext|>"
LOOKED_FOR = "tokenizer.json, no vocab.json with merges.txt, no tokenizer.model"
PAIR_TOKENS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
               "bos_token": "[CLS]", "eos_token": "[SEP]"}  # fmt: skip


def get_tokenizer(
    recipe: ModelOptions, config, texts: Callable[[], Iterable[str]], fingerprint: str, pairs: bool = False
):
    """The recipe's tokenizer: loaded, or trained on the training texts where it asks for that.

    Args:
        texts: gives the training texts; called only if a tokenizer is to be trained.
        fingerprint: of those texts.
        pairs: the task reads marked texts and pairs of them (`[CLS] A [SEP] B [SEP]`), not running text.
    """
    from train.recipe.cache import cache_root

    if not recipe.train_tokenizer_vocab_size:
        return load_tokenizer(recipe, config)
    cache = cache_root(recipe.cache_dir)
    return train_tokenizer(texts(), recipe.train_tokenizer_vocab_size, fingerprint, cache, pairs)


def load_tokenizer(recipe: ModelOptions, config):
    """The tokenizer that the recipe names, else the one that comes with the pretrained weights.

    A folder with bare vocabulary files (vocab.json and merges.txt, or tokenizer.model) does not say which kind of
    tokenizer it is for; a config.json beside them does, or else the model's configuration.
    """
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    from train.model.configuration import from_hub_or_folder

    if getattr(recipe, "vocab_file", None):
        return of_vocabulary_files(recipe.vocab_file, recipe.merge_file)
    option = "tokenizer_name" if recipe.tokenizer_name else "model_name_or_path"
    name = getattr(recipe, option)
    told = ("tokenizer.json", "tokenizer_config.json")
    bare = Path(name).is_dir() and not any((Path(name) / file).exists() for file in told)
    if bare and (files := renamed_files(Path(name))):
        return of_vocabulary_files(*files)
    if bare and (Path(name) / "config.json").exists():
        config = from_hub_or_folder(
            option, name, AutoConfig.from_pretrained, trust_remote_code=recipe.trust_remote_code
        )
    kind = getattr(transformers, type(config).__name__.replace("Config", "Tokenizer"), None) if bare else None
    if kind:
        # Meta's own code and published folders begin every text with the beginning-of-text token.
        bos = {"add_bos_token": True} if config.model_type == "llama" else {}
        tokenizer = from_hub_or_folder(option, name, kind.from_pretrained, **bos)
        _refuse_one_that_reads_nothing(tokenizer, option, name, kind.__name__)
        return tokenizer
    return from_hub_or_folder(option, name, AutoTokenizer.from_pretrained, trust_remote_code=recipe.trust_remote_code)


def renamed_files(folder: Path) -> tuple[str, str] | None:
    """A folder's only vocabulary and only merges, where they are not called vocab.json and merges.txt: Megatron's
    scripts name gpt2-vocab.json and gpt2-merges.txt. None: there are no such two, or the folder has a tokenizer."""
    from train.model.pretrained_io import has_tokenizer

    names = [] if has_tokenizer(folder) else sorted(path.name for path in folder.iterdir())
    vocabularies = [name for name in names if name.endswith(("vocab.json", "encoder.json"))]
    merges = [name for name in names if name.endswith(("merges.txt", ".bpe"))]
    if len(vocabularies) != 1 or len(merges) != 1:
        return None
    return str(folder / vocabularies[0]), str(folder / merges[0])


def of_vocabulary_files(vocab_file: str, merge_file: str):
    """The tokenizer in GPT-2's two files, whatever they are called.

    Raises:
        UserError: they are no such files.
    """
    from transformers import GPT2Tokenizer

    try:
        vocabulary = json.loads(Path(vocab_file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"vocab_file = {vocab_file!r} is no JSON file: {first_line(error)}") from None
    if not isinstance(vocabulary, dict) or END_OF_TEXT not in vocabulary:
        raise UserError(
            f"vocab_file = {vocab_file!r} has no {END_OF_TEXT}, so it is no vocabulary of GPT-2's kind. Name a folder "
            "with a tokenizer.json"
        )
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(Path(vocab_file).expanduser(), Path(folder) / "vocab.json")
        shutil.copyfile(Path(merge_file).expanduser(), Path(folder) / "merges.txt")
        try:
            tokenizer = GPT2Tokenizer.from_pretrained(folder)
        except Exception as error:  # tokenizers raises nothing but Exception
            raise UserError(f"merge_file = {merge_file!r} is not that of vocab_file: {first_line(error)}") from None
    tokenizer.name_or_path = vocab_file
    return tokenizer


def _refuse_one_that_reads_nothing(tokenizer, option: str, name: str, kind: str) -> None:
    """Raises UserError where vocabulary files were read as those of another kind of tokenizer: GPT-2's as a Llama's,
    say, which makes one unknown token of a whole sentence."""
    sentence = "The quick brown fox jumps over the lazy dog."
    tokens = tokenizer(sentence, add_special_tokens=False)["input_ids"]
    if len(tokens) < len(sentence.split()):
        raise UserError(
            f"{option} = {name!r} has bare vocabulary files, and read as the model's own kind ({kind}) they make "
            f"{len(tokens)} tokens of {sentence!r}: they are of another kind. Name a folder with a tokenizer.json, a "
            "model of that kind, or GPT-2's two files with --vocab_file and --merge_file"
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int, key: str, cache: Path, pairs: bool = False):
    """A byte-level BPE tokenizer trained on `texts`, kept under `cache` by `key` and `vocab_size`.

    Args:
        texts: the training documents; read only if the cache has nothing.
        vocab_size: what is asked for; a short text yields fewer tokens.
        key: a fingerprint of the texts.
        pairs: mark texts and pairs as BERT does, with the special tokens that this takes.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    name = hashlib.sha256(f"bpe-1 {vocab_size} {key}{' pairs-2' if pairs else ''}".encode()).hexdigest()[:20]
    folder = cache / f"tokenizer-{name}"
    if not is_there(folder):
        roles = PAIR_TOKENS if pairs else dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
        bpe = ByteLevelBPETokenizer(add_prefix_space=pairs)
        special = list(dict.fromkeys(roles.values()))
        bars = sys.stdout.isatty()  # elsewhere each of its three bars is an empty line
        bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=special, show_progress=bars)
        if pairs:
            bpe._tokenizer.post_processor = _marks(bpe)
        names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if pairs else {}
        trained = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **roles, **names)
        partial = folder.with_name(f"{folder.name}.partial-{platform.node()}-{os.getpid()}")
        trained.save_pretrained(partial)
        put_in_place(partial, folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.asked_size = vocab_size
    return tokenizer


def _marks(bpe):
    """`[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`, with 1 as the token type of B."""
    from tokenizers.processors import TemplateProcessing

    tokens = [(token, bpe.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    return TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=tokens)


def check_vocabulary(config, tokenizer, recipe: ModelOptions) -> str | None:
    """See that model and tokenizer speak of the same tokens; from scratch, give the model the tokenizer's size.

    A model may have more rows than the tokenizer has tokens (a size padded to a multiple), not fewer, and not so many
    more that the tokenizer must belong to another model.

    Returns: sentences for the log if the configuration was changed, or the tokenizer is smaller than asked for.
    """
    fitted, asked = _fit_vocabulary(config, tokenizer, recipe), getattr(tokenizer, "asked_size", 0)
    if not asked or len(tokenizer) >= asked:
        return fitted
    few = f"note      train_tokenizer_vocab_size = {asked}: the text yields no more than {len(tokenizer):,} tokens"
    return f"{few}\n{fitted}" if fitted else few


def _fit_vocabulary(config, tokenizer, recipe: ModelOptions) -> str | None:
    from train.model.configuration import overrides_of

    from_scratch = not recipe.model_name_or_path
    vocab_size_is_set = "vocab_size" in overrides_of(recipe.config_overrides)
    tokens, rows, padding = producible_tokens(tokenizer), config.vocab_size, 1024
    if from_scratch:
        _take_special_tokens(config, tokenizer)
    if tokens <= rows <= tokens + padding:
        return None
    if from_scratch and not vocab_size_is_set:
        config.vocab_size = tokens
        return (
            f"note      vocabulary: {tokens:,} tokens, as the tokenizer has (the published architecture has {rows:,})"
        )
    option = "config_overrides vocab_size" if vocab_size_is_set else "the model"
    raise UserError(
        f"vocabulary: the tokenizer {tokenizer.name_or_path!r} has {tokens:,} tokens and {option} has {rows:,} rows: "
        "they do not belong together. Set tokenizer_name to the model's own tokenizer"
        + (", or leave vocab_size out of config_overrides" if vocab_size_is_set else "")
    )


def pad_vocabulary(config, recipe) -> str | None:
    """Round the vocabulary of a model from scratch up to the multiple that the recipe names. Export cuts it again.

    Returns: a sentence for the log if there is something to add.
    """
    tokens, multiple = config.vocab_size, recipe.make_vocab_size_divisible_by
    rows = -(-tokens // (multiple or 1)) * (multiple or 1)
    if rows == tokens:
        return None
    config.vocab_size, config.unpadded_vocab_size = rows, tokens
    return f"note      vocabulary: {tokens:,} tokens, padded to {rows:,} rows; model/ has {tokens:,} again"


def _take_special_tokens(config, tokenizer) -> None:
    """A model from scratch marks beginnings, ends and padding as its tokenizer does."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    if all(getattr(config, name, None) == getattr(tokenizer, name) for name in names):
        return  # the tokenizer is the published one of this architecture
    for name in names:
        setattr(config, name, getattr(tokenizer, name))
    if config.is_encoder_decoder:
        by_padding = config.model_type in ("t5", "mt5", "umt5", "longt5", "pegasus")
        config.decoder_start_token_id = config.pad_token_id if by_padding else config.bos_token_id
        if getattr(config, "forced_eos_token_id", None) is not None:
            config.forced_eos_token_id = config.eos_token_id


def padding_token(tokenizer) -> int:
    """An id to fill rows with; it is never trained on and never attended to, so any will do."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0):
        if token is not None:
            return token
    raise AssertionError("0 is an id")


def end_with_eos(tokenizer) -> None:
    """Let the tokenizer itself end every text with its end-of-text token, where it marks texts with nothing at all.

    Encoder-decoder models are trained so; BlenderBot's tokenizer, made from vocab.json and merges.txt, has lost it in
    transformers 5. The exported tokenizer then gives what the model was trained on.
    """
    from tokenizers.processors import TemplateProcessing

    end, backend = tokenizer.eos_token, getattr(tokenizer, "backend_tokenizer", None)
    bare = tokenizer("a")["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]
    if bare and end is not None and backend is not None:
        backend.post_processor = TemplateProcessing(
            single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
        )


def settle_padding(config, tokenizer) -> None:
    """Give tokenizer and model a padding token, the same one: a Llama finds the end of a row by it."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding_token(tokenizer))
    config.pad_token_id = tokenizer.pad_token_id


def fillers(tokenizer) -> dict[str, int]:
    """{column that a classifier reads: what pads it}."""
    known = {"input_ids": padding_token(tokenizer), "token_type_ids": tokenizer.pad_token_type_id}
    return {name: filler for name, filler in known.items() if name in tokenizer.model_input_names}


def producible_tokens(tokenizer) -> int:
    """The number of rows that the ids of ordinary text take.

    transformers adds a mask token where a published vocabulary has none (BlenderBot's 8,008 become 8,009); no text
    contains it, and no model has a row for it.
    """
    ids = set(tokenizer.get_vocab().values())
    return max(ids - {tokenizer.mask_token_id} if tokenizer.mask_token_id == max(ids) else ids) + 1
