"""WHAT to train: options as dataclasses, a YAML file and flags over it, checked together. No torch, no accelerate."""

from train.recipe.errors import UserError
from train.recipe.options import ClmRecipe
from train.recipe.parse import parse_recipe

__all__ = ["ClmRecipe", "UserError", "parse_recipe"]
