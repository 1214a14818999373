"""The exported model: a folder that transformers loads, with the tokenizer and a model card."""

import copy
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from zerofit.model.configuration import usable_positions
from zerofit.model.families import family_of

LARGEST_FILE = 5 * 10**9  # bytes, about: what is in memory at once of a model that is written in parts

Weights = Iterable[tuple[str, torch.Tensor]]  # (name, full weight on the CPU)


def export_model(model, weights: Weights, tokenizer, folder: Path, card: str) -> None:
    """Write weights (safetensors), configuration, tokenizer and README.md.

    Args:
        model: the unwrapped transformers model; only its configuration and its class are used.
        weights: one after another; what is written is not kept.

    Raises:
        RuntimeError: a weight is empty or is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = copy.copy(model)  # the model may still be training, and depends on its configuration
    for name in ("config", "generation_config"):
        if getattr(model, name, None) is not None:
            setattr(written, name, copy.deepcopy(getattr(model, name)))
            getattr(written, name).use_cache = True
    make_consistent(getattr(written, "generation_config", None))
    _write_weights(written, weights, folder)
    positions = usable_positions(model.config)
    if positions and tokenizer.model_max_length > 10**9:  # not set; truncation=True would cut nothing
        tokenizer.model_max_length = positions
    tokenizer.save_pretrained(folder)
    _copy_sentencepiece_model(Path(tokenizer.name_or_path), folder)
    write_card(folder, card)


def _write_weights(written, weights: Weights, folder: Path) -> None:
    """Write the weights and the configuration: in one file, or, of a family whose weights have the names on the disk
    that they have in memory but for renaming, in several."""
    expected = {name for name, _ in written.named_parameters()}
    tied = {name for name, _ in written.named_parameters(remove_duplicate=False)} - expected
    without_padding, in_parts = _padding_remover(written), family_of(written.config).stage_plan is not None
    part, files, size = {}, [], 0
    for name, tensor in weights:
        if name in tied:  # each weight once
            continue
        if tensor.numel() == 0:
            raise RuntimeError(f"the gathered weights are incomplete: {name} is empty")
        if in_parts and part and size + tensor.nbytes > LARGEST_FILE:
            files.append(_write_part(written, part, folder, len(files)))
            part, size = {}, 0
        part[name] = without_padding(name, tensor)
        expected.discard(name)
        size += part[name].nbytes
    if expected:
        raise RuntimeError(f"the gathered weights are incomplete: missing {sorted(expected)[:3]}")
    if not files:
        written.save_pretrained(folder, state_dict=part)
        return
    files.append(_write_part(written, part, folder, len(files)))
    _write_index(files, folder)


def _write_part(written, part: dict[str, torch.Tensor], folder: Path, number: int) -> Path:
    """Write a part as transformers writes a whole model, which knows the weights' names on the disk."""
    place, file = folder / "part", folder / f"part_{number}.safetensors"
    written.save_pretrained(place, state_dict=part)
    (place / "model.safetensors").rename(file)
    for other in place.iterdir():
        other.replace(folder / other.name)
    place.rmdir()
    return file


def _write_index(files: list[Path], folder: Path) -> None:
    """Give the parts the names that transformers looks for, and write down which weight is where."""
    where, size = {}, 0
    for number, file in enumerate(files, 1):
        named = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        file.rename(named)
        with safe_open(named, "pt") as opened:
            where |= dict.fromkeys(opened.keys(), named.name)
        size += named.stat().st_size
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def make_consistent(generation) -> None:
    """Remove settings without effect. Published models have some (a temperature without sampling, early_stopping
    with one beam), and transformers refuses to save them."""
    if generation is None:
        return
    unused = (
        ()
        if generation.do_sample
        else ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
    )
    if (generation.num_beams or 1) == 1:
        unused += ("early_stopping", "length_penalty")
    for name in unused:
        if getattr(generation, name, None) is not None:
            setattr(generation, name, None)


def _copy_sentencepiece_model(source: Path, folder: Path) -> None:
    """Copy the tokenizer.model that the tokenizer was converted from: it cannot be converted back, and other programs
    (Meta's code, `zerofit convert hf-to-meta`) read it."""
    for name in ("tokenizer.model", "original/tokenizer.model"):
        if (source / name).is_file() and not (folder / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)


def _padding_remover(written) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Remove a padded vocabulary's extra rows from the configuration. Returns what removes them from a weight.

    Args:
        written: a copy of the model with a configuration of its own.
    """
    rows = written.config.__dict__.pop("unpadded_vocab_size", None)
    if rows is None:
        return lambda name, tensor: tensor
    written.config.vocab_size = rows
    over_tokens = (written.get_input_embeddings(), written.get_output_embeddings())
    padded = {id(parameter) for module in over_tokens for parameter in module.parameters(recurse=False)}
    names = {name for name, parameter in written.named_parameters(remove_duplicate=False) if id(parameter) in padded}
    return lambda name, tensor: tensor[:rows].contiguous() if name in names else tensor


def write_card(folder: Path, card: str) -> None:
    """Write README.md, and give the weights its permissions: safetensors lets only the owner read them."""
    readme = folder / "README.md"
    readme.write_text(card, encoding="utf-8")
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(readme, weights)
