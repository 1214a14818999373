"""`zerofit prepare`: text to corpora in Megatron's format (.bin and .idx), ready to be mapped into memory.

    zerofit prepare --input 'texts/**/*.jsonl' --output_prefix corpora/wiki --tokenizer gpt2 --append_eod
    zerofit prepare merge --input corpora/a_text_document corpora/b_text_document --output_prefix corpora/both

The files are byte for byte what Megatron-LM's tools/preprocess_data.py makes of the same documents and tokenizer, for
any number of workers. Parts of the input go to worker processes, which cut them into documents and encode these
(encode.py). The answers are written in the order of the input (corpora.py).
"""

import sys

from zerofit.launch.runs import ending_in_order
from zerofit.recipe.errors import EXIT_USER_ERROR, UserError, leave
from zerofit.recipe.megatron_flags import PREPARE_HINTS
from zerofit.recipe.parse import parse_recipe
from zerofit.record.terminal import say
from zerofit.tools.prepare.prepare_options import JoinOptions, PrepareOptions

MORE = "\nAlso: zerofit prepare merge   several corpora, one after another, as one"


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] == "merge":
        merged = parse_recipe(JoinOptions, argv[1:], prog="zerofit prepare merge", tool=True, hints=PREPARE_HINTS)
        from zerofit.tools.prepare.merge_corpora import join

        with ending_in_order():
            return join(merged)
    if argv and not argv[0].startswith("-"):
        raise UserError(f"zerofit prepare {argv[0]}: use zerofit prepare --input ..., or merge")
    hints = {**PREPARE_HINTS, "word_memo": "remove it: whole documents go through the tokenizer"}
    try:
        options = parse_recipe(PrepareOptions, argv, prog="zerofit prepare", tool=True, hints=hints)
    except SystemExit:
        print(MORE)
        raise
    if not argv:
        return EXIT_USER_ERROR
    from zerofit.tools.prepare.corpora import prepare

    try:
        with ending_in_order():
            say(*prepare(options))
    except SystemExit as end:  # after a signal: the interpreter would wait for the threads of the pool
        leave(int(end.code or 0))
    return 0
