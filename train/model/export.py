"""The exported model: a folder that transformers loads, with the tokenizer and a model card."""

import copy
import shutil
from pathlib import Path

import torch

from train.model.configuration import usable_positions


def export_model(model, state: dict[str, torch.Tensor], tokenizer, folder: Path, card: str) -> None:
    """Write weights (safetensors), configuration, tokenizer and README.md.

    Args:
        model: the unwrapped transformers model; only its configuration and its class are used.
        state: the full weights by name, on the CPU.

    Raises:
        RuntimeError: a tensor of `state` is empty or is missing. An incomplete model is never written.
    """
    expected = {name for name, _ in model.named_parameters()}
    broken = sorted(name for name in expected if name in state and state[name].numel() == 0)
    missing = sorted(expected - state.keys())
    if broken or missing:
        raise RuntimeError(f"the gathered weights are incomplete: empty {broken[:3]}, missing {missing[:3]}")
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - expected
    state = {name: tensor for name, tensor in state.items() if name not in tied}  # each weight once
    folder.mkdir(parents=True, exist_ok=True)
    written = copy.copy(model)  # the model may still be training, and depends on its configuration
    for name in ("config", "generation_config"):
        if getattr(model, name, None) is not None:
            setattr(written, name, copy.deepcopy(getattr(model, name)))
            getattr(written, name).use_cache = True
    make_consistent(getattr(written, "generation_config", None))
    state = without_padding(written, state)
    written.save_pretrained(folder, state_dict=state)
    positions = usable_positions(model.config)
    if positions and tokenizer.model_max_length > 10**9:  # not set; truncation=True would cut nothing
        tokenizer.model_max_length = positions
    tokenizer.save_pretrained(folder)
    _copy_sentencepiece_model(Path(tokenizer.name_or_path), folder)
    write_card(folder, card)


def make_consistent(generation) -> None:
    """Remove settings without effect. Published models have some (a temperature without sampling, early_stopping
    with one beam), and transformers refuses to save them."""
    if generation is None:
        return
    unused = () if generation.do_sample else (
        "temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")  # fmt: skip
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


def without_padding(written, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Remove a padded vocabulary's extra rows from embeddings and head, and from the configuration.

    Args:
        written: a copy of the model with a configuration of its own.
    """
    rows = written.config.__dict__.pop("unpadded_vocab_size", None)
    if rows is None:
        return state
    written.config.vocab_size = rows
    over_tokens = (written.get_input_embeddings(), written.get_output_embeddings())
    padded = {id(parameter) for module in over_tokens for parameter in module.parameters(recurse=False)}
    names = {name for name, parameter in written.named_parameters(remove_duplicate=False) if id(parameter) in padded}
    return {name: tensor[:rows].contiguous() if name in names else tensor for name, tensor in state.items()}


def write_card(folder: Path, card: str) -> None:
    """Write README.md, and give the weights its permissions: safetensors lets only the owner read them."""
    readme = folder / "README.md"
    readme.write_text(card, encoding="utf-8")
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(readme, weights)
