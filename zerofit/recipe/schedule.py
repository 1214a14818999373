"""The learning rate as a pure function of the update: it has no state that could be stepped too often.

The shapes and their first value are those of `transformers.get_scheduler`, with a smallest rate added.
"""

import math
from dataclasses import dataclass

from zerofit.recipe.errors import UserError
from zerofit.recipe.options import OptimizerOptions


@dataclass(frozen=True)
class Schedule:
    """Peak rate, shape and lengths in updates. `schedule(k)` is the rate of update k, counted from 0.

    The curve reaches its minimum at update `num_until_minimum`, and stays there (Megatron's --lr-decay-iters).
    """

    shape: str
    peak: float
    num_updates: int
    num_warmup: int
    min_ratio: float = 0.0
    num_decay: int = 0  # wsd only
    num_until_minimum: int | None = None  # None: the whole run

    @property
    def warning(self) -> str | None:
        """A sentence for the log if the rate never reaches its peak; else None."""
        if self.num_warmup < self.num_updates or self.shape == "constant":
            return None
        return (
            f"num_warmup_steps = {self.num_warmup} and the run has {self.num_updates} updates: "
            f"the learning rate never reaches its peak of {self.peak:g}"
        )

    def __call__(self, update: int) -> float:
        return self.peak * self.factor(update)

    def factor(self, update: int) -> float:
        if self.shape == "constant":
            return 1.0
        if update < self.num_warmup:
            return update / self.num_warmup
        if self.shape == "constant_with_warmup":
            return 1.0
        decay_end = self.num_until_minimum or self.num_updates
        if self.shape == "wsd":
            left = (decay_end - update) / max(1, self.num_decay)
            return self.min_ratio + (1 - self.min_ratio) * min(1.0, max(0.0, left))
        done = min(1.0, (update - self.num_warmup) / max(1, decay_end - self.num_warmup))
        height = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[self.shape]
        return self.min_ratio + (1 - self.min_ratio) * max(0.0, height)


def make_schedule(recipe: OptimizerOptions, num_updates: int) -> Schedule | None:
    """The recipe's schedule for a run of `num_updates`; None where nothing is trained. Raises UserError: the warm-up
    is not over when the decay has ended."""
    if not num_updates:
        return None
    warmup, decay_steps = warmup_updates(recipe, num_updates), recipe.lr_decay_steps
    decays = recipe.lr_scheduler_type not in ("constant", "constant_with_warmup")
    if decay_steps and decays and warmup >= decay_steps:
        raise UserError(
            f"lr_decay_steps = {decay_steps} and a warm-up of {warmup} updates: the decay would end before it "
            "begins. Make lr_decay_steps larger, or the warm-up shorter"
        )
    return Schedule(
        shape=recipe.lr_scheduler_type,
        peak=recipe.learning_rate,
        num_updates=num_updates,
        num_warmup=warmup,
        min_ratio=recipe.min_lr_ratio,
        num_decay=round(recipe.wsd_decay_ratio * (decay_steps or num_updates)),
        num_until_minimum=decay_steps,
    )


def warmup_updates(recipe: OptimizerOptions, num_updates: int) -> int:
    """Updates of warm-up; a ratio is of the updates until the rate is at its minimum, as in Megatron."""
    if recipe.warmup_ratio is not None:
        return math.ceil(recipe.warmup_ratio * (recipe.lr_decay_steps or num_updates))
    return recipe.num_warmup_steps
