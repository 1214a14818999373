"""The tokenizer of a run, and the tokens with which those of translation models mark a text's language.

NLLB, mBART, mBART-50, M2M-100, PLBart and Seamless have a token for each language, in the source and in the target;
Marian's multilingual models have one for the target, written before the source (">>deu<< Good morning").
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import ByteLevelBPETokenizer, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from zerofit.model.configuration import STORED_ROWS, from_hub_or_folder, has_tokenizer, parse_overrides, read_config
from zerofit.model.families import family_of
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import cache_root, is_there, put_in_place, read_text, temporary_path
from zerofit.recipe.model_options import ModelOptions

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from zerofit.recipe.options import TrainingRecipe
    from zerofit.recipe.tasks import ClmRecipe

MARIAN_CODE = re.compile(r"\s*>>[^<>\s]+<<\s?")  # at the beginning of a source
LANGUAGE_FIELDS = ("src_lang", "tgt_lang")  # fields of the tokenizer, saved in its configuration
MAX_LISTED_CODES = 12  # codes in a message


def set_languages(
    tokenizer: "PreTrainedTokenizerBase", source: str | None, target: str | None, prefix: str = ""
) -> str:
    """Let the tokenizer write sources and targets in these languages; the exported tokenizer then does so, too. Raises
    UserError: a code is not one of the tokenizer's, or a tokenizer with languages is given and none is said.

    Args:
        source, target: the tokenizer's codes; None: those that are stored with it.
        prefix: the text before each source.

    Returns: the prefix, with the code of the target where the model reads it there (Marian).
    """
    given = {"source_lang": source, "target_lang": target}
    codes = language_codes(tokenizer)
    if not codes:
        return prefix
    for option, code in given.items():
        bare = code.strip("_").removeprefix(">>").removesuffix("<<") if code is not None else None
        if bare is not None and bare not in codes:
            similar_codes = [known for known in codes if known[:2].lower() == bare[:2].lower()]
            similar = f"Similar ones: {', '.join(similar_codes[:MAX_LISTED_CODES])}. " if similar_codes else ""
            problem = f"{option} = {code!r}: the tokenizer has no such language"
            raise UserError(f"{problem}. {similar}Its codes are {_list_codes(codes)}")
        given[option] = bare
    if not _marks_texts(tokenizer):
        return f">>{given['target_lang']}<< {MARIAN_CODE.sub('', prefix, count=1)}" if target else prefix
    stored = [tokenizer.init_kwargs.get(name) for name in LANGUAGE_FIELDS]  # src_lang alone may be the class's default
    chosen = [code or (known if all(stored) else None) for code, known in zip(given.values(), stored)]
    if None in chosen:
        raise UserError(
            f"{tokenizer.name_or_path!r} marks each text with its language. Say --source_lang and --target_lang, "
            f"two of its codes: {_list_codes(codes)}"
        )
    for name, code in zip(LANGUAGE_FIELDS, chosen):
        setattr(tokenizer, name, code)
        tokenizer.init_kwargs[name] = code
    return prefix


def check_marked(tokenizer: "PreTrainedTokenizerBase", prefix: str, sources: Iterable[str]) -> None:
    """Raises UserError if sources must begin with the code of the target's language (Marian), and none is said."""
    codes = [] if _marks_texts(tokenizer) else language_codes(tokenizer)
    if codes and not all(MARIAN_CODE.match(prefix + source) for source in sources):
        raise UserError(
            f"{tokenizer.name_or_path!r} translates into several languages, and a source does not begin with one, "
            f"such as >>{codes[0]}<<. Say --target_lang, one of its codes: {_list_codes(codes)}"
        )


def first_target_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Return the generation settings with which a target begins with the token of its language: mBART's decoder starts
    with it, the others write it first. Empty without languages."""
    if not (language_codes(tokenizer) and _marks_texts(tokenizer) and tokenizer.init_kwargs.get("tgt_lang")):
        return {}
    ids = tokenizer(text_target="a")["input_ids"]
    if ids[-1] != tokenizer.eos_token_id:
        return {"decoder_start_token_id": ids[-1]}
    first = next(token for token in ids if token != tokenizer.eos_token_id)  # Seamless has one before the language
    return {"forced_bos_token_id": first}


def language_codes(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Return the codes of the languages that the tokenizer has a token for, as its documentation spells them."""
    if marian_codes := getattr(tokenizer, "supported_language_codes", None):  # Marian
        return [code[2:-2] for code in marian_codes]
    if not _marks_texts(tokenizer):
        return []
    token_ids = getattr(tokenizer, "lang_code_to_id", None) or {
        token: tokenizer.convert_tokens_to_ids(token)
        for token in tokenizer.all_special_tokens
        if re.fullmatch(r"[a-z]{3}_[A-Z][a-z]{3}|__[a-z]{2,3}(_[A-Za-z]+)?__", token)
    }
    return [code.strip("_") for code, token in token_ids.items() if token != tokenizer.unk_token_id]


def describe_languages(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Return the line of the log that names the languages, if there are any."""
    names = [tokenizer.init_kwargs.get(name) for name in LANGUAGE_FIELDS]
    if not (_marks_texts(tokenizer) and all(names)):
        return []
    return [f"note      languages: {names[0]} -> {names[1]} (saved with the model)"]


def _marks_texts(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether the tokenizer itself adds the token of a language to each text."""
    return hasattr(tokenizer, "set_tgt_lang_special_tokens")


def _list_codes(codes: list[str]) -> str:
    other_codes = f", ... ({len(codes)} in all)" if len(codes) > MAX_LISTED_CODES else ""
    return ", ".join(codes[:MAX_LISTED_CODES]) + other_codes


START_FIELD = "decoder_start_token_id"
END_OF_TEXT = "<|endoftext|>"  # GPT-2's only special token
PAIR_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "bos_token": "[CLS]",
    "eos_token": "[SEP]",
}


def get_tokenizer(
    recipe: ModelOptions,
    config: "PretrainedConfig",
    texts: Callable[[], Iterable[str]],
    fingerprint: str,
    pairs: bool = False,
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer, or train it (train_tokenizer_vocab_size) on the texts that `texts` returns."""
    if not recipe.train_tokenizer_vocab_size:
        return load_tokenizer(recipe, config)
    cache = cache_root(getattr(recipe, "cache_dir", None))
    return train_tokenizer(texts(), recipe.train_tokenizer_vocab_size, fingerprint, cache, pairs)


def load_tokenizer(recipe: ModelOptions, config: "PretrainedConfig | None") -> "PreTrainedTokenizerBase":
    """Load the tokenizer that a recipe names, else that of the pretrained weights; GPT-2's two files override both."""
    if vocab_file := getattr(recipe, "vocab_file", None):
        return tokenizer_from_vocabulary_files(vocab_file, recipe.merge_file or "")
    option = "tokenizer_name" if recipe.tokenizer_name else "model_name_or_path"
    return load_named_tokenizer(option, getattr(recipe, option) or "", config, recipe.trust_remote_code)


def load_named_tokenizer(
    option: str, name: str, config: "PretrainedConfig | None", trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer in a folder, or of a name on the hub. A folder with bare vocabulary files (vocab.json and
    merges.txt, or tokenizer.model) does not name its tokenizer's class; a config.json next to them does, or else the
    model's configuration. `option`: that names it, for messages."""
    import transformers
    from transformers import AutoTokenizer

    folder = Path(name)
    kind = AutoTokenizer
    options = {"trust_remote_code": trust_remote_code}
    self_describing = ("tokenizer.json", "tokenizer_config.json")
    is_bare = folder.is_dir() and not any((folder / file).exists() for file in self_describing)
    if is_bare:
        if files := find_vocabulary_files(folder):
            return tokenizer_from_vocabulary_files(*files)
        if (folder / "config.json").exists():
            config = read_config(option, name, trust_remote_code)
        tokenizer_class = getattr(transformers, type(config).__name__.replace("Config", "Tokenizer"), None)
        file_names = getattr(tokenizer_class, "vocab_files_names", {"": "tokenizer.json"}).values()
        if file_names and not has_tokenizer(folder) and not any((folder / file).exists() for file in file_names):
            raise UserError(
                f"{option} = {name!r}: the folder has no tokenizer. Copy the model's tokenizer files into it, or in "
                "training name their folder with --tokenizer_name"
            )
        if tokenizer_class and config is not None:
            kind = tokenizer_class
            options = dict(family_of(config).bare_tokenizer_options)
    tokenizer = from_hub_or_folder(option, name, kind.from_pretrained, **options)
    if is_bare:
        words = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
        cased = [token for token in words if token != token.lower()]
        if getattr(tokenizer, "do_lower_case", False) and len(cased) > len(tokenizer) / 20:  # a BERT with capitals
            tokenizer = from_hub_or_folder(option, name, kind.from_pretrained, do_lower_case=False, **options)
        from sentencepiece import SentencePieceProcessor

        # Files of another class of tokenizer may make one unknown token of a complete sentence, or others than those
        # of sentencepiece, whose file it is.
        sentence = "the quick brown fox jumps over the lazy dog."
        pieces = tokens = tokenizer.convert_ids_to_tokens(tokenizer(sentence, add_special_tokens=False)["input_ids"])
        for file in folder.glob("*.model"):
            with suppress(RuntimeError, OSError):  # tiktoken's file is called so, too
                pieces = SentencePieceProcessor(model_file=str(file)).encode(sentence, out_type=str)
        if len(tokens) < len(sentence.split()) or tokens != pieces:
            raise UserError(
                f"{option} = {name!r} has vocabulary files of another tokenizer than {type(tokenizer).__name__}. Name "
                "a folder with a tokenizer.json, or GPT-2's two files with --vocab_file and --merge_file"
            )
    ends = getattr(config, "eos_token_id", None) if option == "model_name_or_path" else None
    ends = [ends] if isinstance(ends, int) else ends
    if ends and tokenizer.eos_token is None:  # a tokenizer.json alone does not name it
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    return tokenizer


def find_vocabulary_files(folder: Path) -> tuple[str, str] | None:
    """Return a folder's only vocabulary and only merges, where they are not called vocab.json and merges.txt:
    Megatron's scripts name gpt2-vocab.json and gpt2-merges.txt. None: there are no such two files, or the folder has a
    tokenizer."""
    names = [] if has_tokenizer(folder) else sorted(path.name for path in folder.iterdir())
    vocabularies = [name for name in names if name.endswith(("vocab.json", "encoder.json"))]
    merges = [name for name in names if name.endswith(("merges.txt", ".bpe"))]
    if len(vocabularies) != 1 or len(merges) != 1:
        return None
    return str(folder / vocabularies[0]), str(folder / merges[0])


def tokenizer_from_vocabulary_files(vocab_file: str, merge_file: str) -> "PreTrainedTokenizerBase":
    """Make the tokenizer of GPT-2's two files, by any names. Raises UserError where they hold something else."""
    from transformers import GPT2Tokenizer

    try:
        vocabulary = json.loads(read_text(Path(vocab_file).expanduser()))
    except (OSError, ValueError) as error:
        raise UserError(f"vocab_file = {vocab_file!r} is not a JSON file: {first_line(error)}") from None
    if not isinstance(vocabulary, dict) or END_OF_TEXT not in vocabulary:
        raise UserError(f"vocab_file = {vocab_file!r} has no {END_OF_TEXT}. Name a folder with a tokenizer.json")
    try:
        contents: Any = BPE.read_file(*(str(Path(file).expanduser()) for file in (vocab_file, merge_file)))
        tokenizer = GPT2Tokenizer(*contents)
    except Exception as error:  # tokenizers raises nothing but Exception
        raise UserError(f"merge_file = {merge_file!r} is not of vocab_file: {first_line(error)}") from None
    tokenizer.name_or_path = vocab_file
    return tokenizer


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, key: str, cache: Path, pairs: bool = False
) -> "PreTrainedTokenizerBase":
    """Train a byte-level BPE tokenizer on `texts` (tokens occur at least twice), or read it from the cache.

    Args:
        texts: the training documents; read only if the tokenizer is not in the cache.
        vocab_size: the requested size; a short text yields fewer tokens.
        key: a fingerprint of the texts.
        cache: the tokenizer is saved here, by `key` and `vocab_size`.
        pairs: add the special tokens `[CLS]` and `[SEP]` to texts and pairs.
    """
    from transformers import PreTrainedTokenizerFast

    name = hashlib.sha256(f"bpe-1 {vocab_size} {key}{' pairs-2' if pairs else ''}".encode()).hexdigest()[:20]
    folder = cache / f"tokenizer-{name}"
    if not is_there(folder):
        roles = PAIR_TOKENS if pairs else dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
        special = list(dict.fromkeys(roles.values()))
        shows_progress = sys.stdout.isatty()  # elsewhere each of its three bars is an empty line
        trained = ByteLevelBPETokenizer(add_prefix_space=pairs)
        trained.train_from_iterator(texts, vocab_size, special_tokens=special, show_progress=shows_progress)
        bpe = Tokenizer.from_str(trained.to_str())
        if pairs:  # 1 is the token type of B
            marks = [(token, bpe.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
            template = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
            bpe.post_processor = TemplateProcessing(**template, special_tokens=marks)
        names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if pairs else {}
        partial = temporary_path(folder)
        PreTrainedTokenizerFast(tokenizer_object=bpe, **roles, **names).save_pretrained(partial)
        put_in_place(partial, folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def check_vocabulary(
    config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase", recipe: "TrainingRecipe"
) -> str | None:
    """Check that model and tokenizer belong together: a model may have up to 1,024 rows more than the tokenizer has
    tokens (a padded size), but not fewer. A model from scratch gets the tokenizer's size, beginning, end and padding;
    a pretrained one its size, with resize_embeddings. Returns a sentence for the log."""
    from_scratch = not recipe.model_name_or_path
    vocab_size_is_set = "vocab_size" in parse_overrides(recipe.config_overrides)
    tokens = producible_tokens(tokenizer)
    rows = config.vocab_size
    max_padding = 1024
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    # If they are the same, the tokenizer is the published one of this architecture.
    if from_scratch and any(getattr(config, name, None) != getattr(tokenizer, name) for name in special):
        for name in special:
            setattr(config, name, getattr(tokenizer, name))
        if config.is_encoder_decoder:
            starts_with_padding = family_of(config).decoder_starts_with_padding
            config.decoder_start_token_id = config.pad_token_id if starts_with_padding else config.bos_token_id
            if getattr(config, "forced_eos_token_id", None) is not None:
                config.forced_eos_token_id = config.eos_token_id
    if tokens <= rows <= tokens + max_padding:
        idle = recipe.resize_embeddings and f"note      resize_embeddings: all tokens have one of the {rows:,} rows"
        return idle or None
    if from_scratch and not vocab_size_is_set:
        config.vocab_size = tokens
        return f"note      vocabulary: {tokens:,} tokens, as the tokenizer has (published: {rows:,})"
    if recipe.resize_embeddings and tokens > rows and not vocab_size_is_set:
        config.vocab_size = max(tokens, len(tokenizer))
        setattr(config, STORED_ROWS, rows)
        trained = "; with the adapter, embeddings and head are trained and saved in full" if recipe.lora else ""
        return (
            f"note      vocabulary: the embeddings' {rows:,} rows become {config.vocab_size:,}; the new ones begin as "
            f"the mean of the others{trained}"
        )
    remedy = "remove vocab_size from config_overrides"
    if not vocab_size_is_set:
        remedy = "if tokens were added to the model's own, give it more rows: --resize_embeddings"
    problem = f"vocabulary: {tokenizer.name_or_path!r} has {tokens:,} tokens, the model {rows:,} rows"
    raise UserError(f"{problem}. Set tokenizer_name, or {remedy}")


def pad_vocabulary(config: "PretrainedConfig", recipe: "ClmRecipe") -> str | None:
    """Round the vocabulary of a model from scratch up to a multiple of make_vocab_size_divisible_by; export removes
    the added rows. Returns a sentence for the log if there are some."""
    tokens = config.vocab_size
    multiple = recipe.make_vocab_size_divisible_by
    rows = -(-tokens // (multiple or 1)) * (multiple or 1)
    if rows == tokens:
        return None
    config.vocab_size = rows
    config.unpadded_vocab_size = tokens
    return f"note      vocabulary: {tokens:,} tokens, padded to {rows:,} rows; model/ has {tokens:,} again"


def padding_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return an id to pad rows with; it is never trained on and never attended to, so every id works."""
    return next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)


def end_with_eos(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Let the tokenizer end every text with its end-of-text token, if it adds no special token: encoder-decoder models
    are trained with it. The exported tokenizer does so, too."""
    end = tokenizer.eos_token
    backend = getattr(tokenizer, "backend_tokenizer", None)
    bare = tokenizer("a")["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]
    if bare and end is not None and backend is not None:
        backend.post_processor = TemplateProcessing(
            single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
        )


def read_by_words(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Let the tokenizer read lists of words, each as it would be read after a space (of RoBERTa and GPT-2:
    add_prefix_space); the exported one does so, too. Raises UserError where it cannot say which word a token is of."""
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer_name = {tokenizer.name_or_path!r}: {type(tokenizer).__name__} cannot say which word a token "
            "is of, as tags need it. Name a fast tokenizer (one with a tokenizer.json)"
        )
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    if isinstance(splitter, ByteLevel):
        splitter.add_prefix_space = tokenizer.add_prefix_space = True


def set_decoder_start_token(config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Set the token with which the decoder begins: that of the target's language (mBART); else, where a configuration
    from scratch has none, a usual one. Raises UserError where neither has one."""
    config.decoder_start_token_id = first_target_tokens(tokenizer).get(START_FIELD, getattr(config, START_FIELD, None))
    if config.decoder_start_token_id is None:
        candidates = (config.bos_token_id, tokenizer.cls_token_id, config.pad_token_id)
        config.decoder_start_token_id = next((token for token in candidates if token is not None), None)
    if config.decoder_start_token_id is None:
        raise UserError(
            "the decoder needs a token to begin with, and neither the configuration nor the tokenizer has a start, "
            "class or padding token. Name one's number: --config_overrides decoder_start_token_id=N"
        )


def set_padding_token(config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Give tokenizer and model the same padding token: classifiers with a decoder find the end of a row by it."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding_token(tokenizer))
    config.pad_token_id = tokenizer.pad_token_id


def padding_values(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Return {column that a classifier reads: the value that pads it}."""
    values = {"input_ids": padding_token(tokenizer), "token_type_ids": tokenizer.pad_token_type_id}
    return {name: value for name, value in values.items() if name in tokenizer.model_input_names}


def producible_tokens(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the number of embedding rows that the ids of ordinary text need."""
    ids = set(tokenizer.get_vocab().values())
    return max(ids - {tokenizer.mask_token_id} if tokenizer.mask_token_id == max(ids) else ids) + 1
