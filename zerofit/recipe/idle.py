"""Options that are set and have no effect: a run says so, and so does `zerofit doctor`."""

from collections.abc import Callable
from typing import Any

from zerofit.recipe.base import Recipe

# {options: (when they have no effect, what would change that)}
IDLE: dict[tuple[str, ...], tuple[Callable[[Any], Any], str]] = {
    ("report_to", "report_name"): (
        lambda recipe: not recipe.with_tracking and recipe.report_to != "none",
        "Set with_tracking",
    ),
    ("num_train_epochs",): (lambda recipe: recipe.max_train_steps, "max_train_steps overrides it: keep one of them"),
    ("warmup_ratio", "num_warmup_steps"): (
        lambda recipe: recipe.lr_scheduler_type == "constant",
        "constant_with_warmup has a warm-up, constant has none",
    ),
    ("min_lr_ratio", "lr_decay_steps"): (
        lambda recipe: recipe.lr_scheduler_type in ("constant", "constant_with_warmup"),
        "The learning rate stays constant: choose linear, cosine or wsd as lr_scheduler_type, or remove it",
    ),
    ("wsd_decay_ratio",): (
        lambda recipe: recipe.lr_scheduler_type != "wsd",
        "It belongs to lr_scheduler_type = wsd",
    ),
    ("num_beams", "val_max_target_length", "val_min_target_length", "n_val_batch_generations"): (
        lambda recipe: not recipe.predict_with_generate and recipe.trains,
        "Set predict_with_generate, or remove it",
    ),
    ("adam_beta1", "adam_beta2", "adam_epsilon"): (
        lambda recipe: recipe.optim == "adafactor",
        "adafactor has nothing of the kind",
    ),
    ("profile_ranks", "profile_memory"): (lambda recipe: not recipe.profile, "They belong to --profile N:M"),
    ("dataset_config_name",): (lambda recipe: not recipe.dataset_name, "It belongs to dataset_name"),
    ("validation_split_percentage",): (lambda recipe: recipe.validation_file, "validation_file overrides it"),
}


def idle_options(recipe: Recipe) -> list[str]:
    """A sentence for each, with its remedy, of a recipe whose combination of options is right."""
    return [
        f"{name} = {getattr(recipe, name)} ({recipe.source(name)}) has no effect. {remedy}"
        for names, (is_idle, remedy) in IDLE.items()
        for name in names
        if hasattr(recipe, name) and recipe.is_changed(name) and is_idle(recipe)
    ]
