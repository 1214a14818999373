"""A causal model from recipe to first batch: built, its loss installed, and both checked on a few tokens."""

import contextlib
from functools import partial

import torch

from train.model.load import load_model
from train.model.loss import choose_loss, install_loss
from train.model.probe import LENGTH, documents_leak, losses_differ
from train.recipe.errors import UserError
from train.recipe.options import ClmRecipe

TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}  # two orders of the same sum, relative


def build_model(auto_class, config, recipe: ClmRecipe, strategy):
    """Pretrained or random weights in the strategy's dtype, with the memory-saving loss installed."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    scratch = contextlib.nullcontext()
    try:
        if not recipe.model_name_or_path:
            size = _num_parameters(auto_class, config, strategy, recipe.trust_remote_code)
            scratch = strategy.building_from_scratch(size)
        model = load_model(auto_class, config, recipe, recipe.seed, strategy.model_dtype, scratch)
    except (ValueError, ImportError) as error:
        said = " ".join(str(error).split())
        for option in ("attn_implementation", "config_overrides"):
            if getattr(recipe, option):
                raise UserError(f"{option} = {getattr(recipe, option)!r}: {said}") from None
        raise
    kind, _ = choose_loss(recipe.loss, device)
    install_loss(model, kind)
    return model


def _num_parameters(auto_class, config, strategy, trust: bool) -> int:
    """The size of a model that nobody has built yet."""
    if not strategy.shards_parameters:
        return 0
    with strategy.building_from_scratch(0), torch.device("meta"):
        model = auto_class.from_config(config, trust_remote_code=trust)
        return sum(parameter.numel() for parameter in model.parameters())


def settle_loss(engine, recipe: ClmRecipe) -> str:
    """Check the prepared model with a few tokens. Returns the log's line on the loss.

    If the memory-saving loss is not this model's loss (it caps or scales its logits, say), the plain one takes its
    place, and the line says so.

    Raises:
        UserError: documents that are packed into one block would see each other.
    """
    config = engine.module.config
    positions = getattr(config, "max_position_embeddings", None) or 2 * LENGTH
    probe = (engine.module.get_input_embeddings().num_embeddings, engine.device, min(LENGTH, positions // 2))
    kind, why = choose_loss(recipe.loss, engine.device)
    engine.model.eval()
    if recipe.packing == "documents" and documents_leak(engine.model, *probe):
        raise UserError(
            f"packing = documents: with attn_implementation = {config._attn_implementation!r} a {config.model_type} "
            "lets a document see the one before it in its block. Use --attn_implementation sdpa or eager, or "
            "--packing none, or --packing concatenate to accept it"
        )
    if kind != "full":
        difference = losses_differ(engine.model, partial(setattr, engine.module, "loss_kind"), kind, *probe)
        if not difference < TOLERANCE[engine.strategy.precision]:
            finding = f"the {kind} loss is not the loss of a {config.model_type}, it differs by {difference:.1e}"
            if recipe.loss != "auto":
                raise UserError(f"loss = {recipe.loss}: {finding}. Use --loss full")
            engine.module.loss_kind = "full"
            why = f"full: all logits are held, because {finding}"
    engine.model.train()
    return f"loss      {why}"
