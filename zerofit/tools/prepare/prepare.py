"""`zerofit prepare`: converts text to corpora in Megatron's format (.bin and .idx), which training memory-maps.

    zerofit prepare --input 'texts/**/*.jsonl' --output_prefix corpora/wiki --tokenizer gpt2 --append_eod
    zerofit prepare merge --input corpora/a_text_document corpora/b_text_document --output_prefix corpora/both

The files equal, byte for byte, those that Megatron-LM's tools/preprocess_data.py makes of the same documents and
tokenizer, for any number of workers. A worker splits chunks of the input into documents and encodes these.
"""

from dataclasses import dataclass

from zerofit.recipe.base import Recipe, option
from zerofit.recipe.data_options import ENCODING_FORM
from zerofit.recipe.errors import EXIT_USER_ERROR, leave
from zerofit.recipe.parse import parse_recipe
from zerofit.record.terminal import log_lines
from zerofit.tools.runs import ending_in_order

KEPT_WHOLE_HINT = "remove it: documents are kept whole, as they are, in the order of the input"
WORKERS_HINT = "remove it: the --workers, by default one per core, read parts of files"
NAME_TOKENIZER_HINT = "say --tokenizer: a folder, a hub name, or a tokenizer.model"
PREPARE_HINTS = {  # for options of Megatron's tools/preprocess_data.py and tools/merge_datasets.py
    **dict.fromkeys(("tokenizer_type", "tokenizer_model", "tokenizer_name_or_path"), NAME_TOKENIZER_HINT),
    **dict.fromkeys(("dataset_impl", "data_impl"), "remove it: the .bin and .idx of mmap are what is written"),
    **dict.fromkeys(("partitions", "chunk_size", "find_optimal_num_workers"), WORKERS_HINT),
    **dict.fromkeys(("keep_sequential_samples", "keep_newlines", "split_sentences", "lang"), KEPT_WHOLE_HINT),
    "log_interval": "remove it: progress is always shown",
    "vocab_size": "remove it: the tokenizer knows",
    "seq_length": "remove it: samples are cut in training, by --block_size",
    "multimodal": "remove it: corpora hold text",
}


@dataclass
class PrepareOptions(Recipe):
    """Text to corpora in Megatron's format"""

    input: list[str] = option(
        None,
        "Files, folders, globs (** too): .jsonl, .json, .csv, .tsv, .xlsx, .parquet, .txt; also .gz, .bz2, .xz, .zst.",
        required="no input: set --input to files, folders or globs, e.g. --input 'texts/**/*.jsonl'",
    )
    output_prefix: str = option(
        None,
        "PREFIX_KEY_document.bin, .idx and .json are written, of each key.",
        required="no output: set --output_prefix, e.g. corpora/wiki for corpora/wiki_text_document.bin",
    )
    tokenizer: str = option(None, "A folder, a hub name, or a tokenizer.model: the one to train with.")
    vocab_file: str | None = option(
        None, "GPT-2's vocab.json or one like it, with merge_file.", needs="merge_file", excludes="tokenizer"
    )
    merge_file: str | None = option(
        None, "Its merges, as GPT-2's merges.txt.", aliases=("merges_file",), needs="vocab_file"
    )
    append_eod: bool = option(False, "End every document with the tokenizer's end-of-text token.")
    json_keys: list[str] = option(["text"], "Keys (columns of tables); each becomes a corpus.")
    workers: int | None = option(None, "Processes that tokenise; by default one for each core.", positive=True)
    skip_bad_lines: bool = option(False, "Leave out and count lines that cannot be read; else the first ends the job.")
    document_separator: str | None = option(
        None, "Of plain text: line, paragraph, file or a mark (default: <|endoftext|>, or file)."
    )
    encoding: str | None = option(
        None, "Encoding of files that are not UTF-8: cp932, euc_jp, gb18030, utf-16, ...", form=ENCODING_FORM
    )
    overwrite: bool = option(False, "Replace corpora of that name.")
    trust_remote_code: bool = option(False, "Allow a hub repository to run its own tokenizer code here.")

    def problems(self) -> list[str]:
        problems = super().problems()
        if not (self.tokenizer or self.vocab_file or self.merge_file):
            problems.append("no tokenizer: set --tokenizer to the folder or hub name of the one to train with")
        return problems


@dataclass
class JoinOptions(Recipe):
    """Several corpora, one after another, as one"""

    input: list[str] = option(
        None,
        "Prefixes of corpora, what stands before .bin; or folders of them, taken in the order of their names.",
        required="no input: set --input to prefixes of corpora, what stands before .bin, or to a folder",
    )
    output_prefix: str = option(
        None,
        "What the new corpus is called, without .bin.",
        required="no output: set --output_prefix to what the new corpus is to be called",
    )
    overwrite: bool = option(False, "Replace a corpus of that name.")


def main(argv: list[str]) -> int:
    if argv and argv[0] == "merge":
        merged = parse_recipe(JoinOptions, argv[1:], prog="zerofit prepare merge", tool=True, hints=PREPARE_HINTS)
        from zerofit.tools.prepare.documents import join_corpora

        with ending_in_order():
            join_corpora(merged)
        return 0
    try:
        options = parse_recipe(PrepareOptions, argv, prog="zerofit prepare", tool=True, hints=PREPARE_HINTS)
    except SystemExit:
        print("\nAlso: zerofit prepare merge   several corpora, one after another, as one")
        raise
    if not argv:
        return EXIT_USER_ERROR
    from zerofit.tools.prepare.corpora import prepare_corpora

    try:
        with ending_in_order():
            log_lines(*prepare_corpora(options))
    except SystemExit as end:  # after a signal: the interpreter would wait for the threads of the pool
        leave(int(end.code or 0))
    return 0
