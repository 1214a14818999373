"""A checkpoint of Meta's to a transformers folder and back, each proven before the folder gets its name."""

import json
import shutil
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig

from zerofit import __version__
from zerofit.model.export import write_card
from zerofit.model.folders import has_tokenizer, model_folder
from zerofit.model.pretrained_io import (
    atomic_folder,
    read_config,
    read_model,
    read_tokenizer,
)
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import without_folders
from zerofit.tools.convert.convert_options import ConvertOptions, FromMetaOptions, ToMetaOptions
from zerofit.tools.convert.hf_folder import HfFolder, ShardWriter
from zerofit.tools.convert.meta.config import (
    check_config,
    config_of,
    cut_along_vocabulary,
    ffn_size,
    params_of,
    scaling_factor,
    sizes_of,
    version_of,
)
from zerofit.tools.convert.meta.folder import MetaFolder
from zerofit.tools.convert.meta.forward import mean_loss, meta_logits, rows_of
from zerofit.tools.convert.meta.layout import choose_cut, same_bits, to_hf, to_meta, weights
from zerofit.tools.meta_tokenizer import ConvertedTokenizer, convert_tokenizer, find_tokenizer
from zerofit.tools.tool_recipe import parse_bytes

TOLERANCE = 1e-4  # of two mean losses in fp32, which sum in another order


# --------------------------------------------------------------------------------------------- Meta's to transformers'


def from_meta(options: FromMetaOptions, output: Path) -> list[str]:
    """Write a checkpoint of Meta's as a transformers folder. Returns lines for the terminal.

    Raises:
        UserError: the checkpoint is incomplete, or not a Llama's; see zerofit/tools/convert/meta/folder.py.
        RuntimeError: the written weights differ from the input. Then no file is left.
    """
    source = Path(options.input).expanduser()
    meta = MetaFolder(source)
    version, factor = version_of(meta.params), scaling_factor(meta, options.rope_scaling_factor)
    if options.rope_scaling_factor and not factor:
        raise UserError(f"rope_scaling_factor = {options.rope_scaling_factor:g}: params.json has no use_scaled_rope")
    tokenizer = convert_tokenizer(find_tokenizer(source, options.tokenizer), meta.sizes.vocab, version)
    config = config_of(meta, tokenizer.ends, options.max_position_embeddings, factor)
    ids = _check_ids(options, tokenizer.tokenizer, config)
    notes = [*_describe(meta, config, factor), *tokenizer.notes]
    with atomic_folder(output) as partial:
        number = _write_hf(meta, config, tokenizer, partial, parse_bytes(options.max_shard_size))
        notes.append(f"written      {len(meta.weights)} weights in {_files(number)}")
        notes += prove(meta, HfFolder(partial, "output"), config)
        if ids is not None:
            notes.append(compare_losses(meta, partial, config, ids))
        _write_card(partial, source, notes)
    return notes


def _describe(meta: MetaFolder, config, factor: float | None) -> list[str]:
    sizes, params = meta.sizes, meta.params
    lines = [
        f"read         {_files(len(meta.files))}: {sizes.layers} layers of {sizes.dim}, {sizes.heads} heads, "
        f"{sizes.kv_heads} of keys and values, vocabulary {sizes.vocab}, "
        f"{config.max_position_embeddings} positions{', head tied' if meta.tied else ''}"
    ]
    derived = ffn_size(sizes.dim, params.get("multiple_of", 256), params.get("ffn_dim_multiplier"))
    if derived != sizes.ffn:
        lines.append(
            f"warning: by params.json the FFN has {derived} channels, and by the weights {sizes.ffn}: these are used"
        )
    if factor and not params.get("rope_scaling_factor"):
        lines.append(f"note: use_scaled_rope by a factor of {factor:g}; --rope_scaling_factor changes that")
    return lines


def _write_hf(meta: MetaFolder, config, tokenizer: ConvertedTokenizer, folder: Path, limit: int) -> int:
    writer = ShardWriter(folder, limit)
    for weight in _with_bar(meta.weights, "convert"):
        tensor = to_hf(meta.read(weight), weight.heads)
        config.dtype = config.dtype or tensor.dtype  # the embeddings'
        if writer.add(weight.hf, tensor):
            meta.release()
    number = writer.finish()
    meta.release()
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save(folder, config.max_position_embeddings)
    return number


# --------------------------------------------------------------------------------------------- transformers' to Meta's


def to_meta_folder(options: ToMetaOptions, output: Path) -> list[str]:
    """Write a Llama of transformers' as a folder of Meta's. Returns lines for the terminal.

    Raises:
        UserError: it is not a Llama, Meta's code cannot compute it, or it cannot be cut into that many shards.
        RuntimeError: the written weights differ from the input. Then no file is left.
    """
    source = Path(model_folder(options.input))
    if not (source / "config.json").is_file():
        raise UserError(
            f"input = {options.input!r} is not a folder with a config.json. Name a model's folder, or a run's"
        )
    config = read_config("input", str(source))
    says = f"input = {str(source)!r}"
    check_config(config, says, options.shards)
    hf = HfFolder(source)
    wrong = hf.wrong_shapes(config)
    if wrong:
        raise UserError(f"{says} is not the Llama of its config.json: it {wrong[0]} ({len(wrong)} such)")
    tokenizer = read_tokenizer("input", str(source), config) if options.check_text else None
    ids = _check_ids(options, tokenizer, config)
    notes = [f"read         {len(hf.files)} weights"]
    with atomic_folder(output) as partial:
        for index in range(options.shards):
            _write_shard(hf, config, partial, index, options.shards)
        (partial / "params.json").write_text(json.dumps(params_of(config), indent=2) + "\n", encoding="utf-8")
        notes.append(f"written      {_files(options.shards)}")
        notes += _copy_tokenizer(source, partial)
        meta = MetaFolder(partial, "output")
        notes += prove(meta, hf, config)
        if ids is not None:
            notes.append(compare_losses(meta, source, config, ids))
        _write_card(partial, source, notes)
    return notes


def _write_shard(hf: HfFolder, config, folder: Path, index: int, number: int) -> None:
    """Write one process' shards of all weights, consolidated.NN.pth. They are in memory together."""
    sizes, shard = sizes_of(config), {}
    for weight in _with_bar(weights(sizes), f"shard {index + 1} of {number}"):
        tied = (
            config.tie_word_embeddings and weight.hf == "lm_head.weight"
        )  # Meta's code reads the head from its own weight
        tensor = to_meta(hf.read("model.embed_tokens.weight" if tied else weight.hf), weight.heads)
        cut = choose_cut(weight, number, sizes.kv_heads, cut_along_vocabulary(config))
        shard[weight.meta] = cut.shard(
            tensor, index, number
        ).clone()  # torch.save writes all of the tensor that a view belongs to
    torch.save(shard, folder / f"consolidated.{index:02}.pth")
    hf.release()


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
    for weight in _with_bar(meta.weights, "check"):
        stored = hf.read(weight.hf)
        if not same_bits(to_hf(meta.read(weight), weight.heads), stored):
            raise RuntimeError(f"{weight.hf} is not {weight.meta}. Nothing is written")
        unlike = meta.unlike(weight, to_meta(stored, weight.heads))
        if unlike and meta.cuts[weight.meta].axis is None and meta.files[0].name not in unlike:
            unlike_copies.append(weight.meta)
        elif unlike:
            raise RuntimeError(f"{weight.meta} converted back differs from {unlike[0]}. Nothing is written")
    meta.release()
    hf.release()
    lines = [f"proven       shapes, and {len(meta.weights)} weights there and back, bit for bit"]
    if unlike_copies:
        lines.append(
            f"warning: {len(unlike_copies)} weights, such as {unlike_copies[0]}, should be the same in all of Meta's "
            "files and are not: those of the first are taken"
        )
    return lines


def _check_ids(options: ConvertOptions, tokenizer, config):
    """The tokens to compare losses on; None without --check_text."""
    if options.check_text is None:
        return None
    if tokenizer is None:
        raise UserError(f"check_text = {options.check_text!r} needs a tokenizer: remove it, or --tokenizer none")
    return rows_of(options.check_text, tokenizer, config.max_position_embeddings)


def compare_losses(meta: MetaFolder, folder: Path, config, ids) -> str:
    """A line for the terminal on the mean losses, of Meta's computation and of transformers', in fp32.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    rope = config.rope_parameters
    ours = mean_loss(meta_logits(meta, ids, rope.get("factor")), ids)
    model, _ = read_model(AutoModelForCausalLM, "check_text", str(folder), config, precision="fp32")
    with torch.no_grad():
        theirs = mean_loss(model(input_ids=ids).logits, ids)
    if not abs(ours - theirs) <= TOLERANCE * max(1.0, abs(ours)):
        raise RuntimeError(f"the mean loss is {ours:.6f} by Meta's files and {theirs:.6f} by transformers'")
    return f"mean loss    {ours:.6f} as Meta computes it, {theirs:.6f} in transformers, on {ids.numel()} tokens"


def _files(number: int) -> str:
    return f"{number} file{'s' if number > 1 else ''}"


def _with_bar(items: list, what: str):
    if not sys.stderr.isatty():
        return items
    return tqdm(items, desc=what, unit="weight", dynamic_ncols=True)


def _write_card(folder: Path, source: Path, notes: list[str]) -> None:
    write_card(
        folder,
        "\n".join(
            [
                "---",
                "library_name: transformers",
                "tags: [zerofit]",
                "---",
                "",
                f"# {source.resolve().name}, converted",
                "",
                f"{without_folders(str(source))} converted by zerofit {__version__}.",
                "",
                "```",
                *notes,
                "```",
                "",
            ]
        ),
    )
