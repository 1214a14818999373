"""preprocess_data.py and merge_datasets.py as lines of `zerofit prepare`."""

import dataclasses
import shlex

from zerofit.recipe.errors import UserError
from zerofit.recipe.megatron_flags import PREPARE_HINTS
from zerofit.recipe.parse import parse_recipe
from zerofit.tools.convert.megatron_args.ledger import Call, FlagLedger
from zerofit.tools.prepare.prepare_options import JoinOptions, PrepareOptions

TOKENIZER = ("tokenizer_type", "tokenizer_name_or_path", "tokenizer_model", "vocab_file", "merge_file", "vocab")


def convert_preparation(call: Call, tokenizer: str | None) -> tuple[str, FlagLedger]:
    """(a command line of zerofit prepare, the ledger of flags)."""
    flags, merges = FlagLedger.of(call), call.program == "merge_datasets.py"
    options, line = (JoinOptions if merges else PrepareOptions), ["merge"] if merges else []
    name = tokenizer or flags.text("tokenizer_name_or_path") or flags.text("tokenizer_model")
    chosen = ["--tokenizer", name] if name else []
    for flag, words in flags.flags.items():
        option = "json_keys" if flag == "json_key" else flag  # an older spelling
        if flag in TOKENIZER and (chosen or flag == "tokenizer_type"):
            flags.carried(flag, shlex.join(chosen) or "vocab_file and merge_file")
        elif option in {field.name for field in dataclasses.fields(options)}:
            line += [f"--{option}", *words]
            flags.carried(flag, shlex.join([f"--{option}", *words]))
        elif flag in PREPARE_HINTS:
            flags.none(flag, PREPARE_HINTS[flag].removeprefix("remove it: "))
    line += chosen
    if flags.has("split_sentences") or (flags.text("tokenizer_type") or "").lower().startswith("bert"):
        flags.wrong("split_sentences", "corpora are for GPT only, and not for BERT")
    try:
        parse_recipe(options, line[merges:], prog="zerofit prepare", tool=True)
    except UserError as error:
        for problem in error.problems:
            flags.wrong("", problem)
    return shlex.join(["zerofit", "prepare", *line]), flags
