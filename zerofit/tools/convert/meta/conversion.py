"""A checkpoint of Meta's to a transformers folder, proven before the folder gets its name."""

import json
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import GenerationConfig

from zerofit.model.pretrained_io import atomic_folder
from zerofit.recipe.parsing import counted
from zerofit.tools.convert.convert_options import FromMetaOptions
from zerofit.tools.convert.meta.config import config_of, scaling_factor, version_of
from zerofit.tools.convert.meta.folder import INDEX, HfFolder, MetaFolder
from zerofit.tools.convert.meta.layout import is_converted, to_hf
from zerofit.tools.meta_tokenizer import ConvertedTokenizer, convert_tokenizer, find_tokenizer

LARGEST_FILE = 4 * 2**30  # bytes, about: what is in memory


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


# ----------------------------------------------------------------------------------------------------------- the proof


def prove(meta: MetaFolder, hf: HfFolder, config) -> list[str]:
    """Compare the two folders: shapes with the configuration, and every weight, bit for bit.

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
        if not is_converted(meta.read(weight), hf.read(weight.hf), weight.heads):
            raise RuntimeError(f"{weight.hf} is not {weight.meta}. Nothing is written")
        unlike = meta.unlike_copies(weight)
        if unlike and meta.cuts[weight.meta].axis is not None:
            raise RuntimeError(f"{weight.meta} differs in {unlike[0]} from its copies. Nothing is written")
        unlike_copies += [weight.meta] if unlike else []
    lines = [f"proven       shapes, and {len(meta.weights)} weights, bit for bit"]
    if unlike_copies:
        lines.append(f"warning: {len(unlike_copies)} weights, such as {unlike_copies[0]}, differ; the first are taken")
    return lines
