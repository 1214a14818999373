"""GPT-2 (Radford et al. 2019): learned positions, and a byte-level BPE in two files."""

import json
import shutil
import tempfile
from pathlib import Path

from zerofit.model.families.family import Family, StagePlan, TensorPlan
from zerofit.model.folders import has_tokenizer
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import read_text

END_OF_TEXT = "<|endoftext|>"  # the only special token


def widths(config) -> dict[str, int]:
    return {"n_head": config.n_head, "n_inner": config.n_inner or 4 * config.n_embd}


FAMILIES = (
    Family(
        model_types=("gpt2",),
        lora_targets=("c_attn",),
        classifier_heads=("score",),
        splits_rows=True,
        tensor_plan=TensorPlan(
            columns={"c_attn": 3, "c_fc": 1},  # c_attn: query, key and value side by side
            rows=("c_proj",),
            widths=widths,
            own_widths=("split_size",),
        ),
        stage_plan=StagePlan(layers="h", before=("wte", "wpe", "drop"), after=("ln_f",), added=("wpe",)),
    ),
)


def find_vocabulary_files(folder: Path) -> tuple[str, str] | None:
    """A folder's only vocabulary and only merges, where they are not called vocab.json and merges.txt: Megatron's
    scripts name gpt2-vocab.json and gpt2-merges.txt. None: there are no such two, or the folder has a tokenizer."""
    names = [] if has_tokenizer(folder) else sorted(path.name for path in folder.iterdir())
    vocabularies = [name for name in names if name.endswith(("vocab.json", "encoder.json"))]
    merges = [name for name in names if name.endswith(("merges.txt", ".bpe"))]
    if len(vocabularies) != 1 or len(merges) != 1:
        return None
    return str(folder / vocabularies[0]), str(folder / merges[0])


def tokenizer_from_vocabulary_files(vocab_file: str, merge_file: str):
    """The tokenizer in GPT-2's two files, whatever they are called.

    Raises:
        UserError: the files hold something else.
    """
    from transformers import GPT2Tokenizer

    try:
        vocabulary = json.loads(read_text(Path(vocab_file).expanduser()))
    except (OSError, ValueError) as error:
        raise UserError(f"vocab_file = {vocab_file!r} is no JSON file: {first_line(error)}") from None
    if not isinstance(vocabulary, dict) or END_OF_TEXT not in vocabulary:
        raise UserError(f"vocab_file = {vocab_file!r} has no {END_OF_TEXT}. Name a folder with a tokenizer.json")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(Path(vocab_file).expanduser(), Path(folder) / "vocab.json")
        shutil.copyfile(Path(merge_file).expanduser(), Path(folder) / "merges.txt")
        try:
            tokenizer = GPT2Tokenizer.from_pretrained(folder)
        except Exception as error:  # tokenizers raises nothing but Exception
            raise UserError(f"merge_file = {merge_file!r} is not of vocab_file: {first_line(error)}") from None
    tokenizer.name_or_path = vocab_file
    return tokenizer
