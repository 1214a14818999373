"""The learning rate: transformers' shapes, counted in updates, and DeepSpeed's scheduler held against it."""

import itertools

import pytest
import torch
from helpers import check_refusal, recipe_of
from transformers import get_scheduler

from zerofit.recipe import ClmRecipe
from zerofit.recipe.options import Schedule, make_schedule
from zerofit.strategy.deepspeed_config import resolve_config
from zerofit.strategy.layout import ParallelLayout


def curve(schedule: Schedule) -> list[float]:
    return [schedule(update) for update in range(schedule.num_updates)]


WARMED_UP = [(shape, warmup) for shape in ("linear", "cosine", "constant_with_warmup") for warmup in (0, 7)]


@pytest.mark.parametrize(("shape", "warmup"), [("constant", 0), *WARMED_UP])
def test_shapes_are_those_of_transformers(shape, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    theirs = get_scheduler(shape, optimizer, num_warmup_steps=warmup, num_training_steps=50)
    expected = []
    for _ in range(50):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert curve(Schedule(shape, 3e-4, 50, warmup)) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_wsd_rises_stays_and_falls_to_the_smallest_rate():
    values = curve(Schedule("wsd", 1.0, 100, 10, min_ratio=0.1, num_decay=20))
    assert values[:10] == pytest.approx([update / 10 for update in range(10)])
    assert set(values[10:81]) == {1.0}
    assert values[-1] == pytest.approx(0.1 + 0.9 / 20)
    assert all(later < earlier for earlier, later in itertools.pairwise(values[80:]))


@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd"])
def test_the_decay_may_end_before_the_run(shape):
    """As Megatron's --lr-decay-iters: the curve of a shorter run, then its smallest rate."""
    options = {"lr_scheduler_type": shape, "learning_rate": 1.0, "min_lr_ratio": 0.1, "warmup_ratio": 0.1}
    schedule = make_schedule(ClmRecipe(**options, lr_decay_steps=50), 80)
    whole = make_schedule(ClmRecipe(**options), 50)
    assert schedule.warning is None
    assert curve(schedule)[:50] == curve(whole)
    assert curve(schedule)[50:] == pytest.approx([0.1] * 30)


def deepspeed(kind: str, **params) -> dict:
    return {"scheduler": {"type": kind, "params": params}}


def resolve(config: dict, options: ClmRecipe) -> ClmRecipe:
    resolved, _ = resolve_config({"zero_optimization": {"stage": 2}, **config}, "ds.json", options, ParallelLayout())
    assert "scheduler" not in resolved, "the recipe sets the rate of each update"
    return options


def test_a_scheduler_block_is_taken_into_the_recipe():
    auto = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    options = resolve(deepspeed("WarmupDecayLR", **auto), recipe_of(num_warmup_steps=10, learning_rate=1e-3))
    assert (options.lr_scheduler_type, options.num_warmup_steps, options.lr_decay_steps) == ("linear", 10, None)
    options = resolve(deepspeed("WarmupLR", warmup_num_steps=12, warmup_max_lr=1e-4), recipe_of())
    assert (options.lr_scheduler_type, options.num_warmup_steps) == ("constant_with_warmup", 12)
    assert (options.learning_rate, options.source("learning_rate")) == (1e-4, "ds.json")
    options = resolve(deepspeed("WarmupCosineLR", total_num_steps=60, cos_min_ratio=0.1), recipe_of())
    assert (options.lr_scheduler_type, options.lr_decay_steps, options.min_lr_ratio) == ("cosine", 60, 0.1)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (deepspeed("WarmupDecayLR", warmup_type="log"), {}, ["warmup_type", "log", "linear"]),
        (deepspeed("WarmupDecayLR", warmup_num_steps=5), {"warmup_ratio": 0.1}, ["= 5", "warmup_ratio"]),
        (deepspeed("WarmupDecayLR", warmup_max_lr=1.0), {"learning_rate": 1e-4}, ["warmup_max_lr = 1.0", "0.0001"]),
        (deepspeed("WarmupLR"), {"lr_scheduler_type": "cosine"}, ["WarmupLR", "cosine", "recipe.yaml, line 3"]),
        (deepspeed("WarmupLR", warmup_num_stepss=5), {}, ["warmup_num_stepss", "Did you mean warmup_num_steps?"]),
        (deepspeed("WarmupDecayLR", total_steps=5), {}, ["total_steps", "Did you mean total_num_steps?"]),
    ],
)
def test_a_schedule_that_is_not_the_recipes_is_refused(config, options, words):
    check_refusal(words, resolve, config, recipe_of("recipe.yaml, line 3", **options))
