"""Decides what `--torch_compile auto` compiles: once, from the recipe and the kind of machine, never from a clock."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from zerofit.data.collate import GPU_MULTIPLE, round_up
from zerofit.data.lengths import DEFAULT_BLOCK_SIZE, LENGTHS
from zerofit.model.compilation import GRAPHS, failing_compiler
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import counted
from zerofit.recipe.tasks import model_kind
from zerofit.strategy.strategy import Strategy, all_gather_objects

MIN_UPDATES = 300  # from here on a graph has paid for its compiling, which takes some 10 s: docs/strategies.md
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # of a configuration of transformers


class Compilation(NamedTuple):
    """The part of a model that is compiled ("blocks", "model", False), and the reason, for the log and the record."""

    value: bool | str
    why: str


def choose(
    recipe: Any,
    strategy: Any,
    config: Any = None,
    num_updates: int | None = None,
    missing: str | None = None,
    *,
    compiled_before: bool | str | None = None,
) -> Compilation:
    """Choose what `--torch_compile auto` compiles for training on CUDA devices.

    Args:
        num_updates: of the whole run; None: not known, and taken for enough.
        compiled_before: what was compiled of the run that this one resumes; None: it resumes none.
    """
    experts = strategy.divides_experts or any((getattr(config, name, None) or 1) > 1 for name in EXPERTS)
    widths = widths_of(recipe)
    reasons = {  # why nothing is compiled: whether that is so
        "the run that it resumes was not": compiled_before is not None and not compiled_before,
        f"{strategy.name} gathers the weights of each module as it is called": strategy.shards_parameters,
        f"{strategy.name} splits rows": strategy.layout.sequence > 1,
        f"precision is {strategy.precision}": strategy.precision == "fp32",
        "the model has experts": experts,
        f"{recipe.quantised} is on": bool(recipe.quantised),
        "activation_offload is on": recipe.activation_offload,
        f"{missing}": missing is not None,
    }
    if compiled_before is None:
        reasons |= {
            "block_size_warmup lets rows grow": getattr(recipe, "block_size_warmup", None),
            "tokens_per_batch makes batches of many shapes": getattr(recipe, "tokens_per_batch", None),
            f"rows are padded to up to {widths} widths, more than {GRAPHS}": widths > GRAPHS,
            f"{num_updates} updates, fewer than {MIN_UPDATES}": num_updates is not None and num_updates < MIN_UPDATES,
        }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        return Compilation(False, reason)
    if compiled_before:
        return Compilation(compiled_before, "so was the run that it resumes")
    length = "of" if num_updates is None else f"{num_updates:,} updates in"
    return Compilation("blocks", f"{length} {strategy.precision}, rows of {counted(widths, 'width')}")


def widths_of(recipe: Any) -> int:
    """Count the widths that the rows of a run may have on a GPU: 1 if they are packed or of a corpus."""
    is_packed = getattr(recipe, "packing", "none") != "none" and not getattr(recipe, "preference_loss", None)
    if is_packed or getattr(recipe, "data_path", None):
        return 1
    lengths = (getattr(recipe, name) or DEFAULT_BLOCK_SIZE for name in LENGTHS[model_kind(recipe.task)])
    return math.prod(len(np.unique(round_up(np.arange(1, length + 1), GPU_MULTIPLE))) for length in lengths)


def decide(
    recipe: Any,
    strategy: Strategy,
    config: Any,
    num_updates: int,
    compiled_before: bool | str | None,
    *,
    device: torch.device,
) -> tuple[str | None, list[str]]:
    """Give torch_compile its value where it is "auto". All ranks call it together, before weights are loaded.

    Returns: (what was taken and why, for the record; None where nothing was open), notes for the log.

    Raises:
        UserError: it is on, and torch's compiler does not work.
    """
    is_auto, on_gpu = recipe.torch_compile == "auto", recipe.trains and device.type == "cuda"
    if not (is_auto or on_gpu):
        return None, []
    chosen = Compilation(recipe.torch_compile, recipe.source("torch_compile") or "")
    if is_auto:
        chosen = Compilation(False, "without a GPU to train on")
        if on_gpu:
            chosen = choose(recipe, strategy, config, num_updates, compiled_before=compiled_before)
    broken = None
    if on_gpu:
        faults = all_gather_objects(failing_compiler(device) if chosen.value else None)
        broken = next(filter(None, faults), None)
    if not is_auto:
        if broken:
            raise UserError(
                f"torch_compile = {chosen.value} ({chosen.why}): {broken}. Install what is missing, or say "
                "--torch_compile false"
            )
        return None, []
    if broken:
        chosen = Compilation(False, broken)
    recipe.torch_compile = chosen.value
    note = f"layers are not compiled: {chosen.why}"
    if chosen.value:
        note = f"layers are compiled: {chosen.why}; the first update takes longer. --torch_compile false turns it off"
    return f"auto: {str(chosen.value).lower()}, {chosen.why}", [note] if on_gpu else []
