"""WHAT to train: options as dataclasses, a YAML file and flags over it, checked together. No torch, no accelerate."""

from zerofit.recipe.errors import UserError
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.tasks import ClmRecipe, ClsRecipe, DistillRecipe, DpoRecipe, Seq2SeqRecipe

__all__ = ["ClmRecipe", "ClsRecipe", "DistillRecipe", "DpoRecipe", "Seq2SeqRecipe", "UserError", "parse_recipe"]
