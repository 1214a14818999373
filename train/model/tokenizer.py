"""The tokenizer: loaded, or trained on the training text and cached."""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from train.recipe.errors import UserError
from train.recipe.options import ModelOptions

END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(recipe: ModelOptions, config):
    """The tokenizer that the recipe names, else the one that comes with the pretrained weights.

    A folder with bare vocabulary files (vocab.json and merges.txt, or tokenizer.model) does not say which kind of
    tokenizer it is for; the model's configuration does.
    """
    import transformers
    from transformers import AutoTokenizer

    from train.model.configuration import from_hub_or_folder

    option = "tokenizer_name" if recipe.tokenizer_name else "model_name_or_path"
    name = getattr(recipe, option)
    told = ("tokenizer.json", "tokenizer_config.json")
    bare = Path(name).is_dir() and not any((Path(name) / file).exists() for file in told)
    kind = getattr(transformers, type(config).__name__.replace("Config", "Tokenizer"), None) if bare else None
    if kind:
        # Meta's own code and published folders begin every text with the beginning-of-text token.
        bos = {"add_bos_token": True} if config.model_type == "llama" else {}
        return from_hub_or_folder(option, name, kind.from_pretrained, **bos)
    return from_hub_or_folder(option, name, AutoTokenizer.from_pretrained, trust_remote_code=recipe.trust_remote_code)


def train_tokenizer(texts: Iterable[str], vocab_size: int, key: str, cache: Path):
    """A byte-level BPE tokenizer trained on `texts`, kept under `cache` by `key` and `vocab_size`.

    Args:
        texts: the training documents; read only if the cache has nothing.
        key: a fingerprint of the texts.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    name = hashlib.sha256(f"bpe-1 {vocab_size} {key}".encode()).hexdigest()[:20]
    folder = cache / f"tokenizer-{name}"
    if not folder.is_dir():
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[END_OF_TEXT])
        trained = PreTrainedTokenizerFast(
            tokenizer_object=bpe._tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
        )
        partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
        trained.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if len(tokenizer) < vocab_size:
        raise UserError(
            f"train_tokenizer_vocab_size = {vocab_size}: the training text yields only {len(tokenizer)} tokens. "
            f"Choose {len(tokenizer)} or less, or train on more text"
        )
    return tokenizer


def check_vocabulary(config, tokenizer, recipe: ModelOptions) -> str | None:
    """See that model and tokenizer speak of the same tokens; from scratch, give the model the tokenizer's size.

    A model may have more rows than the tokenizer has tokens (a size padded to a multiple), not fewer, and not so many
    more that the tokenizer must belong to another model.

    Returns: a sentence for the log if the configuration was changed.
    """
    from train.model.configuration import overrides_of

    from_scratch = not recipe.model_name_or_path
    vocab_size_is_set = "vocab_size" in overrides_of(recipe.config_overrides)
    tokens, rows, padding = len(tokenizer), config.vocab_size, 1024
    if tokens <= rows <= tokens + padding:
        return None
    if from_scratch and not vocab_size_is_set:
        config.vocab_size = tokens
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
        return (
            f"note      vocabulary: {tokens:,} tokens, as the tokenizer has (the published architecture has {rows:,})"
        )
    option = "config_overrides vocab_size" if vocab_size_is_set else "the model"
    raise UserError(
        f"vocabulary: the tokenizer {tokenizer.name_or_path!r} has {tokens:,} tokens and {option} has {rows:,} rows: "
        "they do not belong together. Set tokenizer_name to the model's own tokenizer"
        + (", or leave vocab_size out of config_overrides" if vocab_size_is_set else "")
    )
