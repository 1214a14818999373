"""`zerofit compare --finish` without launches: which batch is trained, and with which recipe."""

from types import SimpleNamespace

import pytest
import yaml
from helpers import ROOT, refusal

from zerofit.recipe.parse import parse_recipe
from zerofit.tools.compare.candidates import make_recipe
from zerofit.tools.compare.compare import CompareOptions
from zerofit.tools.compare.finish import batch_to_train, values_to_finish
from zerofit.tools.tool_recipe import read_with_recipe

CLS = ROOT / "recipes" / "cls" / "stdlib-packages.yaml"


def options(*flags, config=CLS):
    return read_with_recipe(CompareOptions, ["--config", str(config), *flags], "zerofit compare")


def row(size, name="ddp"):
    return SimpleNamespace(name=name, best={"size": size} if size else None)


@pytest.mark.parametrize(("best", "global_batch", "size"), [
    (44, None, 44), (44, 64, 32), (44, 88, 44), (44, 90, 15), (8, 1024, 8), (200, 64, 32), (44, 2, 1),
])  # fmt: skip
def test_the_batch_divides_the_global_batch(best, global_batch, size):
    assert batch_to_train(row(best), global_batch, 2) == size


def test_runs_have_the_recipe_as_it_is(tmp_path):
    given, cls = options("--finish", "--save_steps", "50", "--eval_steps", "9", "--gradient_accumulation_steps", "4",
                         "--global_batch_size", "32")  # fmt: skip
    values = values_to_finish(given, cls)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    flags = ["--per_device_train_batch_size", "8", "--output_dir", "x"]
    run = parse_recipe(cls, ["--config", str(recipe), *flags])
    assert (run.global_batch_size, run.gradient_accumulation_steps) == (32, None)
    assert (run.eval_steps, run.save_steps, run.num_train_epochs) == (9, 50, given.num_train_epochs)
    assert "output_dir" not in values
    trials = make_recipe(given, cls).values
    assert not {"save_steps", "eval_steps", "global_batch_size"} & trials.keys(), "trials have no use for them"


def test_flags_without_effect_are_still_refused():
    said = refusal(make_recipe, *options("--finish", "--output_dir", "x"))
    assert "--output_dir has no effect" in said
    said = refusal(values_to_finish, *options("--finish", "--num_processes", "3"))
    assert "global_batch_size = 32" in said
    assert "no multiple of 3" in said


def test_trials_evaluate_one_batch_on_each_process():
    assert make_recipe(*options("--num_processes", "2")).values["max_eval_samples"] == 2 * 64
    given, cls = options(config=ROOT / "recipes" / "clm" / "compare-small.yaml")
    assert make_recipe(given, cls).values["max_eval_samples"] == given.num_processes, "of text, blocks"
