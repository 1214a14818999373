"""The languages of translation models: the tokens with which their tokenizers mark a text's language.

NLLB, mBART, mBART-50, M2M-100, PLBart and Seamless have a token for each language, in the source and in the target;
Marian's multilingual models have one for the target, written before the source (">>deu<< Good morning").
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

from zerofit.recipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARIAN = re.compile(r"\s*>>[^<>\s]+<<\s?")  # at the beginning of a source
NAMES = ("src_lang", "tgt_lang")  # of the tokenizer; saved in its configuration
SHOWN = 12  # codes in a message


def set_languages(
    tokenizer: "PreTrainedTokenizerBase", source: str | None, target: str | None, prefix: str = ""
) -> str:
    """Let the tokenizer write sources and targets in these languages; the exported tokenizer then does so, too.

    Args:
        source, target: the tokenizer's codes; None: those that are stored with it.
        prefix: the text before each source.

    Returns: the prefix, with the code of the target where the model reads it there (Marian).

    Raises:
        UserError: a code is not one of the tokenizer's, or a tokenizer with languages is given and none is said.
    """
    given = {"source_lang": source, "target_lang": target}
    codes = language_codes(tokenizer)
    if not codes:
        return prefix
    for option, code in given.items():
        if code is not None:
            given[option] = _known(option, code, codes)
    if not _marks_texts(tokenizer):
        return f">>{given['target_lang']}<< {MARIAN.sub('', prefix, count=1)}" if target else prefix
    stored = [tokenizer.init_kwargs.get(name) for name in NAMES]  # src_lang alone may be the class's default
    chosen = [code or (known if all(stored) else None) for code, known in zip(given.values(), stored)]
    if None in chosen:
        raise UserError(
            f"{_named(tokenizer)} marks each text with its language. Say --source_lang and --target_lang, "
            f"two of its codes: {_shown(codes)}"
        )
    for name, code in zip(NAMES, chosen):
        setattr(tokenizer, name, code)
        tokenizer.init_kwargs[name] = code
    return prefix


def check_marked(tokenizer: "PreTrainedTokenizerBase", prefix: str, sources: Iterable[str]) -> None:
    """Raises UserError if sources must begin with the code of the target's language (Marian), and none is said."""
    codes = [] if _marks_texts(tokenizer) else language_codes(tokenizer)
    if codes and not all(MARIAN.match(prefix + source) for source in sources):
        raise UserError(
            f"{_named(tokenizer)} translates into several languages, and a source does not begin with one, such as "
            f">>{codes[0]}<<. Say --target_lang, one of its codes: {_shown(codes)}"
        )


def first_target_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Settings of generation with which a target begins with the token of its language: mBART's decoder starts with
    it, the others write it first. None without languages."""
    if not (language_codes(tokenizer) and _marks_texts(tokenizer) and tokenizer.init_kwargs.get("tgt_lang")):
        return {}
    ids = tokenizer(text_target="a")["input_ids"]
    if ids[-1] != tokenizer.eos_token_id:
        return {"decoder_start_token_id": ids[-1]}
    first = next(token for token in ids if token != tokenizer.eos_token_id)  # Seamless has one before the language
    return {"forced_bos_token_id": first}


def language_codes(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The codes of the languages that the tokenizer has a token for, as its documentation spells them."""
    if found := getattr(tokenizer, "supported_language_codes", None):  # Marian
        return [code[2:-2] for code in found]
    if not _marks_texts(tokenizer):
        return []
    named = getattr(tokenizer, "lang_code_to_id", None) or {
        token: tokenizer.convert_tokens_to_ids(token)
        for token in tokenizer.all_special_tokens
        if re.fullmatch(r"[a-z]{3}_[A-Z][a-z]{3}|__[a-z]{2,3}(_[A-Za-z]+)?__", token)
    }
    return [code.strip("_") for code, token in named.items() if token != tokenizer.unk_token_id]


def describe_languages(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Return the lines of the log that name the languages."""
    names = [tokenizer.init_kwargs.get(name) for name in NAMES]
    if not (_marks_texts(tokenizer) and all(names)):
        return []
    return [f"note      languages: {names[0]} -> {names[1]} (saved with the model)"]


def _marks_texts(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether the tokenizer itself adds the token of a language to each text."""
    return hasattr(tokenizer, "set_tgt_lang_special_tokens")


def _known(option: str, code: str, codes: list[str]) -> str:
    bare = code.strip("_").removeprefix(">>").removesuffix("<<")
    if bare in codes:
        return bare
    near = [known for known in codes if known[:2].lower() == bare[:2].lower()]
    near += [known for known in get_close_matches(bare, codes, n=3) if known not in near]
    similar = f"Similar ones: {', '.join(near[:SHOWN])}. " if near else ""
    raise UserError(f"{option} = {code!r}: the tokenizer has no such language. {similar}Its codes are {_shown(codes)}")


def _shown(codes: list[str]) -> str:
    more = f", ... ({len(codes)} in all)" if len(codes) > SHOWN else ""
    return ", ".join(codes[:SHOWN]) + more


def _named(tokenizer: "PreTrainedTokenizerBase") -> str:
    return f"{type(tokenizer).__name__} of {tokenizer.name_or_path!r}"
