"""Steps that the scripts of causal models (clm.py, dpo.py, distill.py) have in common."""

from typing import Any

from zerofit.model.attention import choose_attention
from zerofit.model.preflight import (
    check_loss,
    check_mask_support,
    check_packing,
    check_split_rows,
    install_chosen_loss,
)
from zerofit.model.tokenizer import check_vocabulary, pad_vocabulary
from zerofit.recipe.tasks import ClmRecipe
from zerofit.strategy.engine import Engine
from zerofit.training.run import Run


def fit_vocabulary(config: Any, tokenizer: Any, recipe: ClmRecipe) -> list[str | None]:
    """Give the model's configuration as many rows as the tokenizer needs. Returns notes for the log. Raises UserError:
    model and tokenizer do not belong together."""
    return [check_vocabulary(config, tokenizer, recipe), pad_vocabulary(config, recipe)]


def choose_loss_and_attention(model: Any, run: Run) -> None:
    """Install the loss that the recipe names (in full, or in chunks that never hold all logits), and the attention
    kernel that keeps packed documents apart."""
    recipe: Any = run.recipe  # a ClmRecipe
    install_chosen_loss(model, recipe)
    if recipe.is_packed:
        run.log_at_start(choose_attention(model, recipe.attn_implementation, run.strategy.precision))


def try_kernels(engine: Engine, recipe: ClmRecipe, collate: Any) -> list[str | None]:
    """Choose by trial, on random tokens, the attention kernel that keeps packed documents apart and the loss that is
    the model's own; check that ranks that split rows find what one finds. Returns notes for the log. Raises UserError:
    one of these is not so.

    Args:
        collate: lays rows out as in training; it learns how the attention kernel takes packed rows.
    """
    notes: list[str | None] = []
    if recipe.is_packed:
        notes.append(check_packing(engine, recipe, collate))
    elif recipe.reset_attention_mask or recipe.reset_position_ids:
        check_mask_support(engine)
    if not recipe.predict_file:
        notes += [check_loss(engine, recipe), check_split_rows(engine, collate, recipe.is_packed)]
    return notes
