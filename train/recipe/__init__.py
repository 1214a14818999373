"""WHAT to train: options as dataclasses, a YAML file and flags over it, checked together. No torch, no accelerate."""

from train.recipe.errors import UserError
from train.recipe.parse import parse_recipe
from train.recipe.tasks import ClmRecipe, ClsRecipe, Seq2SeqRecipe

__all__ = ["ClmRecipe", "ClsRecipe", "Seq2SeqRecipe", "UserError", "parse_recipe"]
