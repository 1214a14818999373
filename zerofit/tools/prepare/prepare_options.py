"""The options of `zerofit prepare`: text to corpora in Megatron's format, and what is done with such corpora."""

from dataclasses import dataclass

from zerofit.recipe.base import Recipe
from zerofit.recipe.data_options import ENCODING
from zerofit.recipe.fields import option
from zerofit.strategy.host_memory import usable_cores


@dataclass
class PrepareOptions(Recipe):
    """Text to corpora in Megatron's format"""

    input: list[str] = option(  # noqa: RUF009
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
    json_keys: list[str] = option(["text"], "Keys (columns of tables), each of which becomes a corpus.")  # noqa: RUF009
    workers: int | None = option(None, "Processes that tokenise; by default one for each core.", positive=True)
    skip_bad_lines: bool = option(False, "Leave out and count lines that cannot be read; else the first ends the job.")
    document_separator: str | None = option(
        None, "Of plain text: line, paragraph, file or a mark (default: <|endoftext|>, or file)."
    )
    encoding: str | None = option(
        None, "Encoding of files that are not UTF-8: cp932, euc_jp, gb18030, utf-16, ...", form=ENCODING
    )
    overwrite: bool = option(False, "Replace corpora of that name.")
    trust_remote_code: bool = option(False, "Allow a hub repository to run its own tokenizer code here.")

    @property
    def processes(self) -> int:
        return self.workers or usable_cores()

    def problems(self) -> list[str]:
        problems = super().problems()
        if not (self.tokenizer or self.vocab_file or self.merge_file):
            problems.append("no tokenizer: set --tokenizer to the folder or hub name of the one to train with")
        twice = sorted({key for key in self.json_keys if self.json_keys.count(key) > 1})
        if twice:
            problems.append(f"json_keys has {', '.join(twice)} more than once: name each key once")
        if any("/" in key or not key for key in self.json_keys):
            problems.append(f"json_keys = {' '.join(self.json_keys)!r}: a key has no slash")
        return problems


@dataclass
class JoinOptions(Recipe):
    """Several corpora, one after another, as one"""

    input: list[str] = option(  # noqa: RUF009
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
