"""preprocess_data.py and merge_datasets.py as lines of `zerofit prepare`."""

import shlex

from zerofit.recipe.megatron_flags import PREPARE_HINTS
from zerofit.tools.convert.megatron_args.ledger import Call, FlagLedger

TOKENIZER = ("tokenizer_name_or_path", "tokenizer_model", "vocab_file", "merge_file", "vocab", "tokenizer_type")


def convert_preparation(call: Call, tokenizer: str | None) -> tuple[str, FlagLedger]:
    """(a command line of zerofit prepare, the ledger of flags)."""
    flags = FlagLedger.of(call)
    if call.program == "merge_datasets.py":
        line = ["zerofit", "prepare", "merge"]
        for name in ("input", "output_prefix"):
            line += _option(flags, name, needed=True)
    else:
        line = _preprocess(flags, tokenizer)
    for name in flags.flags:
        if name not in flags.rows and name in PREPARE_HINTS:
            flags.none(name, PREPARE_HINTS[name].removeprefix("remove it: "))
    return shlex.join(line), flags


def _preprocess(flags: FlagLedger, tokenizer: str | None) -> list[str]:
    line = ["zerofit", "prepare"]
    for name in ("input", "output_prefix"):
        line += _option(flags, name, needed=True)
    files = _option(flags, "vocab_file") + _option(flags, "merge_file") if not tokenizer else []
    tokenizer_options = files if len(files) == 4 else ["--tokenizer", tokenizer or _tokenizer(flags)]
    line += tokenizer_options
    for name in TOKENIZER:
        if flags.has(name) and name not in flags.rows:
            flags.carried(name, " ".join(tokenizer_options))
    if flags.has("split_sentences"):
        flags.wrong("split_sentences", "splitting into sentences is for BERT. Remove it for GPT")
    for name in ("json_keys", "json_key", "workers"):  # json_key: an older spelling
        option = _option(flags, name)
        line += ["--json_keys", *option[1:]] if option and name == "json_key" else option
    for name in ("append_eod", "trust_remote_code"):
        if flags.has(name):
            flags.carried(name, f"--{name}")
            line.append(f"--{name}")
    if flags.text("dataset_impl", "mmap") != "mmap":
        flags.none("dataset_impl", "corpora are written as .bin and .idx of mmap")
    return line


def _tokenizer(flags: FlagLedger) -> str:
    kind = (flags.text("tokenizer_type") or "").lower()
    if kind.startswith("bert"):
        flags.wrong("tokenizer_type", "corpora for BERT are not supported")
        return "-"
    name = flags.text("tokenizer_name_or_path") or flags.text("tokenizer_model")
    if name:
        return name
    if not flags.problems:
        flags.wrong("tokenizer_type" if kind else "", "the tokenizer is not known: add --tokenizer_name FOLDER")
    return "-"


def _option(flags: FlagLedger, name: str, needed: bool = False) -> list[str]:
    words = flags.words(name)
    if words:
        flags.carried(name, f"--{name} {' '.join(words)}")
        return [f"--{name}", *words]
    if needed and not (flags.has(name) and flags.problems):
        flags.wrong("", f"there is no --{name.replace('_', '-')}")
    return []
