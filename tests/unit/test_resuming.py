"""Which run goes on, with how many processes, and whether a place in the data is a place in this data."""

import json

import numpy as np
import pytest
import yaml
from helpers import refusal

from train.recipe import ClmRecipe, parse_recipe
from train.run.checkpoints import ASKED, Checkpoints
from train.run.folder import RunFolder, identity
from train.run.resuming import check_data, differences_from, fingerprint, keep_global_batch, recorded_run
from train.strategy.batches import resolve_batches


def recipe(*flags: str) -> ClmRecipe:
    basic = ["--config_name", "gpt2", "--tokenizer_name", "x", "--train_file", "x.txt"]
    return parse_recipe(ClmRecipe, [*basic, "--per_device_train_batch_size", "4", *flags], prog="clm.py")


def leave_a_run(folder, options: ClmRecipe, global_batch: int, processes: int) -> RunFolder:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(identity(options, global_batch)))
    (folder / "strategy.yaml").write_text(yaml.safe_dump({"num_processes": processes}))
    (folder / "metrics.jsonl").write_text('{"update": 1, "loss": 2.0}\n{"update": 2, "lo')
    return RunFolder(folder)


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_the_global_batch_stays_and_the_accumulation_follows(tmp_path, processes, accumulation):
    options = recipe("--gradient_accumulation_steps", "3")
    recorded = recorded_run(options, leave_a_run(tmp_path, options, 24, 2))
    note = keep_global_batch(options, recorded, processes)
    sizes = resolve_batches(options, processes)
    assert (sizes.global_batch, sizes.accumulation) == (24, accumulation)
    assert (note is None) == (processes == 2)
    assert note is None or "the global batch stays 24, and the accumulation follows" in note


def test_where_it_cannot_the_message_says_which_numbers_could(tmp_path):
    options = recipe("--gradient_accumulation_steps", "3")
    keep_global_batch(options, recorded_run(options, leave_a_run(tmp_path, options, 24, 2)), 4)
    message = refusal(resolve_batches, options, 4)
    assert "global_batch_size = 24 (the run that goes on, of 2 processes)" in message
    assert "per_device_train_batch_size could be 1, 2, 3, 6, or the number of processes could be 1, 2, 3, 6" in message


def test_what_the_user_says_of_the_global_batch_is_heeded(tmp_path):
    options = recipe("--global_batch_size", "16")
    recorded = recorded_run(options, leave_a_run(tmp_path, options, 24, 2))
    assert keep_global_batch(options, recorded, 1) is None
    message = refusal(RunFolder(tmp_path).refuse_a_different_run, options, 16, recorded)
    assert "global_batch_size was 24, now 16" in message


def test_a_run_goes_on_with_other_ways_of_watching_it(tmp_path):
    before, now = recipe("--save_steps", "3"), recipe("--save_minutes", "5", "--on_fault", "skip", "--max_hours", "2")
    folder = leave_a_run(tmp_path, before, 8, 2)
    folder.refuse_a_different_run(now, 8, recorded_run(now, folder))
    other = recipe("--learning_rate", "1e-3")
    assert "learning_rate was 5e-05, now 0.001" in refusal(folder.refuse_a_different_run, other, 8, folder.recorded())


def test_overwriting_replaces_another_run_and_lets_the_same_one_go_on(tmp_path):
    """It stands in the job scripts of many, who would lose the run at every restart."""
    folder = leave_a_run(tmp_path, recipe(), 8, 2)
    assert recorded_run(recipe("--overwrite_output_dir", "--learning_rate", "1e-3"), folder) is None
    assert recorded_run(recipe("--overwrite_output_dir"), folder)["num_processes"] == 2


def named_checkpoint(folder, run: dict):
    checkpoints = Checkpoints(folder / "checkpoints")
    (checkpoints.partial(3) / "state").mkdir(parents=True)
    (checkpoints.partial(3) / "state" / "progress.json").write_text(json.dumps({"run": run}))
    checkpoints.finish(3, ASKED, False, {})
    return checkpoints.folder(3)


def test_a_checkpoint_that_is_named_may_be_of_another_recipe(tmp_path):
    before = recipe()
    checkpoint = named_checkpoint(tmp_path, {**identity(before, 8), "num_processes": 2})
    now = recipe("--resume", str(checkpoint), "--learning_rate", "1e-3", "--num_train_epochs", "9")
    recorded = recorded_run(now, RunFolder(tmp_path / "other"))
    assert sorted(differences_from(now, 8, recorded)) == [
        "learning_rate was 5e-05, now 0.001", "num_train_epochs was 3.0, now 9.0"
    ]  # fmt: skip
    for flags, global_batch, text in ((["--seed", "1"], 8, "seed was 42, now 1"), ([], 16, "was 8, now 16")):
        message = refusal(differences_from, recipe("--resume", str(checkpoint), *flags), global_batch, recorded)
        assert text in message
        assert "place in the data" in message


@pytest.mark.parametrize(
    ("path", "text"), [("nowhere", "there is no such folder"), (".", "it has no state/ folder"),
                       ("checkpoints", "its checkpoints are update_00000003")]
)  # fmt: skip
def test_what_is_no_checkpoint_is_refused_at_once(tmp_path, path, text):
    named_checkpoint(tmp_path, {})
    assert text in refusal(recorded_run, recipe("--resume", str(tmp_path / path)), RunFolder(tmp_path))


class Samples(list):
    def __getitem__(self, index: int):
        return {"input_ids": np.array(super().__getitem__(index))}


def test_data_that_has_changed_is_refused(tmp_path):
    data = [[index, index + 1] for index in range(500)]
    before = fingerprint(Samples(data), "none")
    check_data(before, json.loads(json.dumps(before)), tmp_path)
    more = fingerprint(Samples([*data, [7]]), "none")
    assert "had 500 samples, and has 501 now" in refusal(check_data, more, before, tmp_path)
    moved = fingerprint(Samples(data[::-1]), "none")
    assert "had other samples" in refusal(check_data, moved, before, tmp_path)
    grouped = fingerprint(Samples(data), "window")
    assert "was grouped by 'none'" in refusal(check_data, grouped, before, tmp_path)
