"""A checkpoint of Meta's to a transformers folder and back, each proven before the folder gets its name."""

import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import GenerationConfig

from zerofit.model.folders import has_tokenizer, model_folder
from zerofit.model.pretrained_io import atomic_folder, read_config
from zerofit.recipe.errors import UserError
from zerofit.recipe.words import counted
from zerofit.tools.convert.convert_options import FromMetaOptions, ToMetaOptions
from zerofit.tools.convert.meta.config import (
    check_config,
    config_of,
    cut_along_vocabulary,
    params_of,
    scaling_factor,
    sizes_of,
    version_of,
)
from zerofit.tools.convert.meta.folder import INDEX, HfFolder, MetaFolder
from zerofit.tools.convert.meta.layout import choose_cut, same_bits, to_hf, to_meta, weights
from zerofit.tools.meta_tokenizer import ConvertedTokenizer, convert_tokenizer, find_tokenizer

LARGEST_FILE = 4 * 2**30  # bytes, about: what is in memory

# --------------------------------------------------------------------------------------------- Meta's to transformers'


def from_meta(options: FromMetaOptions, output: Path) -> list[str]:
    """Write a checkpoint of Meta's as a transformers folder. Returns lines for the terminal.

    Raises:
        UserError: the checkpoint is incomplete, or not a Llama's; see zerofit/tools/convert/meta/folder.py.
        RuntimeError: the written weights differ from the input. Then no file is left.
    """
    source = Path(options.input).expanduser()
    meta = MetaFolder(source)
    version, factor = version_of(meta.params), scaling_factor(meta)
    tokenizer = convert_tokenizer(find_tokenizer(source, options.tokenizer), meta.sizes.vocab, version)
    config = config_of(meta, tokenizer.ends, factor)
    notes = [*_describe(meta, config, factor), *tokenizer.notes]
    with atomic_folder(output) as partial:
        number = _write_hf(meta, config, tokenizer, partial)
        notes.append(f"written      {len(meta.weights)} weights in {counted(number, 'file')}")
        notes += prove(meta, HfFolder(partial, "output"), config)
    return notes


def _describe(meta: MetaFolder, config, factor: float | None) -> list[str]:
    sizes = meta.sizes
    lines = [
        f"read         {counted(len(meta.files), 'file')}: {sizes.layers} layers of {sizes.dim}, {sizes.heads} heads, "
        f"{sizes.kv_heads} of keys and values, vocabulary {sizes.vocab}, "
        f"{config.max_position_embeddings} positions{', head tied' if meta.tied else ''}"
    ]
    if factor and not meta.params.get("rope_scaling_factor"):
        lines.append(f"note: use_scaled_rope by a factor of {factor:g}; its factor in config.json may be another")
    return lines


def _write_hf(meta: MetaFolder, config, tokenizer: ConvertedTokenizer, folder: Path) -> int:
    """Write the folder; the weights of one file are in memory. Returns the number of files with weights."""
    found = {weight.hf: weight for weight in meta.weights}
    config.dtype = meta.dtype
    empty = {name: torch.empty(weight.shape, dtype=meta.dtype, device="meta") for name, weight in found.items()}
    files = split_torch_state_dict_into_shards(empty, max_shard_size=LARGEST_FILE)
    for file, names in tqdm(files.filename_to_tensors.items(), "convert", leave=False, disable=None):
        tensors = {name: to_hf(meta.read(found[name]), found[name].heads).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save(folder, config.max_position_embeddings)
    return len(files.filename_to_tensors)


# --------------------------------------------------------------------------------------------- transformers' to Meta's


def to_meta_folder(options: ToMetaOptions, output: Path) -> list[str]:
    """Write a Llama of transformers' as a folder of Meta's. Returns lines for the terminal.

    Raises:
        UserError: it is not a Llama, Meta's code cannot compute it, or it cannot be cut into that many shards.
        RuntimeError: the written weights differ from the input. Then no file is left.
    """
    source = Path(model_folder(options.input))
    if not (source / "config.json").is_file():
        raise UserError(f"input = {options.input!r} has no config.json. Name a model's folder, or a run's")
    config = read_config("input", str(source))
    says = f"input = {str(source)!r}"
    check_config(config, says, options.shards)
    hf = HfFolder(source)
    wrong = hf.wrong_shapes(config)
    if wrong:
        raise UserError(f"{says} is not the Llama of its config.json: it {wrong[0]} ({len(wrong)} such)")
    notes = [f"read         {len(hf.files)} weights"]
    with atomic_folder(output) as partial:
        for index in range(options.shards):
            _write_shard(hf, config, partial, index, options.shards)
        (partial / "params.json").write_text(json.dumps(params_of(config), indent=2) + "\n", encoding="utf-8")
        notes.append(f"written      {counted(options.shards, 'file')}")
        notes += _copy_tokenizer(source, partial)
        meta = MetaFolder(partial, "output")
        notes += prove(meta, hf, config)
    return notes


def _write_shard(hf: HfFolder, config, folder: Path, index: int, number: int) -> None:
    """Write one process' shards of all weights, consolidated.NN.pth. They are in memory together."""
    sizes, shard = sizes_of(config), {}
    for weight in tqdm(weights(sizes), f"shard {index + 1} of {number}", leave=False, disable=None):
        tied = config.tie_word_embeddings and weight.hf == "lm_head.weight"  # Meta's code has a weight for the head
        tensor = to_meta(hf.read("model.embed_tokens.weight" if tied else weight.hf), weight.heads)
        cut = choose_cut(weight, number, sizes.kv_heads, cut_along_vocabulary(config))
        shard[weight.meta] = cut.shard(tensor, index, number).clone()  # of a view torch.save would write all
    torch.save(shard, folder / f"consolidated.{index:02}.pth")


def _copy_tokenizer(source: Path, folder: Path) -> list[str]:
    for file in (source / "original" / "tokenizer.model", source / "tokenizer.model"):
        if file.is_file():
            shutil.copyfile(file, folder / "tokenizer.model")
            return []
    other = "tokenizer.json cannot be turned back" if has_tokenizer(source) else "the input has none"
    return [f"warning: no tokenizer.model is written: {other}. Copy the one that the model started with"]


# ----------------------------------------------------------------------------------------------------------- the proof


def prove(meta: MetaFolder, hf: HfFolder, config) -> list[str]:
    """Compare the two folders: shapes with the configuration, and every weight there and back, bit for bit.

    Returns lines for the terminal. Copies of a replicated weight (norms) may differ between Meta's files: then the
    first is taken, with a warning.

    Raises:
        RuntimeError: they differ.
    """
    wrong = hf.wrong_shapes(config)
    if wrong:
        raise RuntimeError(f"the folder {wrong[0]} ({len(wrong)} such). Nothing is written")
    unlike_copies = []
    for weight in tqdm(meta.weights, "check", leave=False, disable=None):
        stored = hf.read(weight.hf)
        if not same_bits(to_hf(meta.read(weight), weight.heads), stored):
            raise RuntimeError(f"{weight.hf} is not {weight.meta}. Nothing is written")
        unlike = meta.unlike(weight, to_meta(stored, weight.heads))
        if unlike and meta.cuts[weight.meta].axis is None and meta.files[0].name not in unlike:
            unlike_copies.append(weight.meta)
        elif unlike:
            raise RuntimeError(f"{weight.meta} converted back differs from {unlike[0]}. Nothing is written")
    lines = [f"proven       shapes, and {len(meta.weights)} weights there and back, bit for bit"]
    if unlike_copies:
        lines.append(f"warning: {len(unlike_copies)} weights, such as {unlike_copies[0]}, differ; the first are taken")
    return lines
