"""`zerofit compare --finish` without launches: which batch is trained, what is not trained again, and the table."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers import ROOT, refusal, write_records

from zerofit.recipe.parse import parse_recipe
from zerofit.tools.compare.candidates import make_recipe
from zerofit.tools.compare.compare import CompareOptions
from zerofit.tools.compare.finish import (
    batch_to_train,
    finished_table,
    read_finished,
    values_to_finish,
)
from zerofit.tools.tool_recipe import read_with_recipe

CLS = ROOT / "recipes" / "cls" / "stdlib-packages.yaml"


def options(*flags, config=CLS):
    return read_with_recipe(CompareOptions, ["--config", str(config), *flags], "zerofit compare")


def row(size, name="ddp"):
    return SimpleNamespace(name=name, best={"size": size} if size else None)


def leave_run(folder: Path, rate: float = 10.0, f1: float = 0.8, **recipe) -> None:
    """What a finished run of 4 updates of 20 samples over 2 epochs leaves, evaluated before, in between and after."""
    (folder / "model").mkdir(parents=True)
    environment = {
        "finished": True,
        "zerofit_commit": "0123",
        "held_out": {"update": 2, "eval_loss": 0.5, "eval_f1": f1},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    recipe = {"global_batch_size": 20, "per_device_eval_batch_size": 8, **recipe}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lines = [{"update": 0, "eval_f1": 0.1, "evaluation_seconds": 9.0, "evaluation_samples_per_s": 5.0}]
    for update in range(1, 5):
        line = {"update": update, "epoch": update / 2, "consumed_samples": 20 * update, "seconds": 20 / rate,
                "loss": 3.0 - update / 2, "peak_memory_bytes": 2**30 + update}  # fmt: skip
        if update % 2 == 0:
            seconds = float(update)  # 2 and 4
            line |= {"eval_f1": 0.9, "evaluation_seconds": seconds, "evaluation_samples_per_s": 45 / seconds}
        lines.append(line)
    write_records(folder / "metrics.jsonl", lines)


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
    assert "Make it a multiple of 3" in said


def test_trials_evaluate_one_batch_on_each_process():
    assert make_recipe(*options("--num_processes", "2")).values["max_eval_samples"] == 2 * 64
    given, cls = options(config=ROOT / "recipes" / "clm" / "compare-small.yaml")
    assert make_recipe(given, cls).values["max_eval_samples"] == given.num_processes, "of text, blocks"


def test_the_table_tells_training_and_evaluation_apart(tmp_path):
    leave_run(tmp_path / "run")
    run = read_finished("ddp", 5, tmp_path / "run")
    assert (run.updates, run.epochs, run.training_s, run.samples_per_s) == (4, 2.0, 8.0, 10.0)
    assert run.evaluation["evaluation_seconds"] == 4.0, "the median of 9, 2 and 4"
    head, line = finished_table([run])
    shown = dict(zip(head, line))
    assert shown["training"] == "8 s"
    assert shown["an epoch"] == "4 s"
    assert (shown["an evaluation"], shown["evaluation samples/s"]) == ("4 s", "11.2")
    assert (shown["f1"], shown["loss"]) == ("0.8000", "0.5000"), "of the weights in model/, not of the last evaluation"
    assert (shown["training loss"], shown["global batch"], shown["eval batch"]) == ("1.0000", "20", "8")
    assert shown["peak"] == "1.00 GiB"
