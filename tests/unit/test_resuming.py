"""Which run goes on, with how many processes, and whether a data position is a place in this data."""

import json

import numpy as np
import pytest
import yaml
from helpers import ROOT, refusal
from test_run_folder import checkpoint

from zerofit.checkpoint.manager import EarlierRuns, check_data, data_fingerprint, differences_from
from zerofit.recipe import ClmRecipe, parse_recipe
from zerofit.recipe.errors import NothingToDo
from zerofit.record.run_folder import NAMES, RunFolder, identity_options
from zerofit.strategy.batches import resolve_batches
from zerofit.strategy.deepspeed_config import resolve_config
from zerofit.strategy.layout import ParallelLayout


def recipe(*flags: str) -> ClmRecipe:
    basic = ["--config_name", "gpt2", "--tokenizer_name", "x", "--train_file", "x.txt"]
    return parse_recipe(ClmRecipe, [*basic, "--per_device_train_batch_size", "4", *flags], prog="clm.py")


def leave_a_run(folder, options: ClmRecipe, global_batch: int, processes: int) -> RunFolder:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(identity_options(options, global_batch)))
    (folder / "strategy.yaml").write_text(yaml.safe_dump({"options_given_for": processes}))
    (folder / "metrics.jsonl").write_text('{"update": 1, "loss": 2.0}\n{"update": 2, "lo')
    run = RunFolder(folder)
    run.written.add(NAMES)
    return run


class Resume:
    """What a run resumes from, in the two steps of its configuration."""

    def __init__(self, options: ClmRecipe, folder: RunFolder, processes: int):
        self.options, self.folder, self.earlier = options, folder, EarlierRuns.read(options, folder)
        self.given_for, self.stays, self.note = self.earlier.keep_global_batch(options, processes)

    def plan(self, global_batch: int) -> list[str]:
        plan = self.earlier.plan(self.options, global_batch, self.folder)
        self.sources = list(plan.sources)
        return [*([self.note] if self.note else []), *plan.notes]


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_the_global_batch_stays_and_the_accumulation_follows(tmp_path, processes, accumulation):
    options = recipe("--gradient_accumulation_steps", "3")
    origin = Resume(options, leave_a_run(tmp_path, options, 24, 2), processes)
    sizes = resolve_batches(options, processes)
    assert (sizes.global_batch, sizes.accumulation) == (24, accumulation)
    said = "".join(origin.plan(sizes.global_batch))
    assert ("the global batch stays 24, and the accumulation follows" in said) == (processes != 2)
    assert origin.sources == ["auto"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--gradient_accumulation_steps", "3"),
        ("--global_batch_size", "24"),
        ("--global_batch_size", "24", "--gradient_accumulation_steps", "3"),
    ],
)
@pytest.mark.parametrize(("replicas", "micro"), [(4, 3), (8, 3), (12, 2), (24, 1), (3, 4), (2, 4)])
def test_the_micro_batch_follows_where_the_accumulation_cannot(tmp_path, flags, replicas, micro):
    """Whoever states the global batch of 24: the options, their product, or both."""
    options = recipe(*flags)
    resumed = Resume(options, leave_a_run(tmp_path, options, 24, 2), replicas)
    sizes = resolve_batches(options, replicas, total_stays=resumed.stays)
    assert (sizes.global_batch, sizes.micro_batch, options.per_device_train_batch_size) == (24, micro, micro)
    resumed.plan(sizes.global_batch)
    assert resumed.sources == ["auto"]


@pytest.mark.parametrize(
    ("total", "growth", "replicas", "replica_size", "words"),
    [
        (24, None, 5, 1, ["which 5 processes cannot share", "can: 1, 2, 3, 4, 6, 8, 12, 24"]),
        (24, None, 16, 1, ["which 16 processes cannot share"]),
        (24, "8@10", 3, 1, ["begins with 8", "can: 1, 2, 4, 8"]),
        (24, None, 5, 4, ["which 20 processes (5 replicas of 4)", "can: 4, 8, 12, 16, 24, 32, 48, 96"]),
        (7, None, 2, 1, ["can: 1, 7"]),
        (5040, None, 11, 1, ["can: 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 18"]),
    ],
)
def test_a_number_of_processes_that_cannot_share_the_batch(total, growth, replicas, replica_size, words):
    """What is advised can be done: nobody may change the global batch of a run that resumes."""
    options = recipe("--global_batch_size", str(total), *(["--global_batch_warmup", growth] if growth else []))
    said = refusal(resolve_batches, options, replicas, replica_size, total_stays=True)
    assert not [word for word in words if word not in said], said
    assert "make it" not in said
    for number in map(int, said.rpartition("can: ")[2].split(", ")):
        again = options.draft()
        assert resolve_batches(again, number // replica_size, total_stays=True).global_batch == total


@pytest.mark.parametrize(("processes", "total", "expected"), [(8, 8, (1, 1)), (4, 24, (3, 2)), (2, 24, (4, 3))])
def test_it_follows_under_deepspeed_too(processes, total, expected):
    """Also where a flag states the micro-batch of 4 that the run began with, and the JSON leaves it open."""
    options = recipe("--global_batch_size", str(total))
    config = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
    layout = ParallelLayout(world_size=processes)
    resolved, _ = resolve_config(config, "zero3.json", options, layout, total_stays=True)
    assert resolved["train_batch_size"] == total
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert tuple(resolved[key] for key in keys) == expected


def test_the_same_command_resumes_it_again_on_what_is_left(tmp_path):
    """First on 2 processes, then twice on 1: the options are still those of 2, whose accumulation is another."""
    flags = "--gradient_accumulation_steps", "3"
    folder = leave_a_run(tmp_path, recipe(*flags), 24, 2)
    for _ in range(2):
        options = recipe(*flags)
        resumed = Resume(options, folder, 1)
        assert resolve_batches(options, 1).accumulation == 6
        assert "the accumulation follows" in resumed.note
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**options.to_dict(), **identity_options(options, 24)}))
        laid_out = {"num_processes": 1, "data_parallel": 1, "options_given_for": resumed.given_for}
        (tmp_path / "strategy.yaml").write_text(yaml.safe_dump(laid_out))
    options = recipe(*flags)
    assert Resume(options, folder, 2).note is None, "back on 2, they are right as they are"
    assert resolve_batches(options, 2).global_batch == 24


def test_a_run_goes_on_with_other_ways_of_watching_it_only(tmp_path):
    before = recipe("--save_steps", "3")
    now = recipe("--save_minutes", "5", "--on_anomaly", "skip", "--max_hours", "2")
    folder = leave_a_run(tmp_path, before, 8, 2)
    origin = Resume(now, folder, 2)
    assert origin.plan(8) == []
    assert origin.sources == ["auto"]
    for flags in (["--learning_rate", "1e-3"], ["--learning_rate", "1e-3", "--resume", "never"]):
        message = refusal(Resume(recipe(*flags), folder, 2).plan, 8)
        assert "holds a different run: learning_rate was 5e-05, now 0.001" in message
    never = Resume(recipe("--resume", "never"), folder, 2)
    assert never.plan(8) == []
    assert never.sources == []


def test_overwriting_replaces_another_run_and_lets_the_same_one_go_on(tmp_path):
    """It stands in the job scripts of many, who would lose the run at every restart."""
    folder = leave_a_run(tmp_path, recipe(), 8, 2)
    other = Resume(recipe("--overwrite_output_dir", "--learning_rate", "1e-3"), folder, 1)
    assert other.plan(4) == []
    assert other.sources == []
    same = Resume(recipe("--overwrite_output_dir"), folder, 2)
    same.plan(8)
    assert same.sources == ["auto"]


def test_a_finished_run_is_left_alone(tmp_path):
    folder = leave_a_run(tmp_path, recipe(), 8, 2)
    (tmp_path / "model").mkdir()
    folder.write_environment({"exit_code": 2, "finished": True})
    with pytest.raises(NothingToDo, match="--overwrite_output_dir repeats it"):
        Resume(recipe(), folder, 2).plan(8)
    again = Resume(recipe("--overwrite_output_dir"), folder, 2)
    again.plan(8)
    assert again.sources == []


def test_only_one_run_is_at_work_in_a_folder(tmp_path):
    folder = RunFolder(tmp_path)
    folder.lock()
    folder.lock()
    assert "another run is at work there (process " in refusal(RunFolder(tmp_path).lock)
    del folder
    RunFolder(tmp_path).lock()
    RunFolder(tmp_path / "not yet there").lock()


def test_a_checkpoint_that_is_named_may_be_of_another_recipe(tmp_path):
    named = checkpoint(tmp_path, 3)
    now = recipe("--resume", str(named), "--learning_rate", "1e-3", "--num_train_epochs", "9")
    origin = Resume(now, RunFolder(tmp_path / "other"), 2)
    assert sorted(origin.plan(8)) == [
        "resumes with a change: learning_rate was 5e-05, now 0.001",
        "resumes with a change: num_train_epochs was 3.0, now 9.0",
    ]
    assert origin.sources == [str(named)]
    recorded = {**identity_options(recipe(), 8), "num_processes": 2}
    for flags, global_batch, text in ((["--seed", "1"], 8, "seed was 42, now 1"), ([], 16, "was 8, now 16")):
        message = refusal(differences_from, recipe("--resume", str(named), *flags), global_batch, recorded)
        assert text in message
        assert "the data position" in message
    message = refusal(differences_from, recipe("--resume", str(named), "--ema_decay", "0.9"), 8, recorded)
    assert "ema_decay was 0.0, now 0.9" in message


def test_a_named_checkpoint_and_a_folder_that_holds_a_run(tmp_path):
    """Another run is refused or replaced; this one, begun there and killed, goes on from its own newest first."""
    (tmp_path / "here").mkdir()
    path = str(checkpoint(tmp_path / "there", 3))
    folder = leave_a_run(tmp_path / "here", recipe(), 8, 2)
    named = ["--resume", path]
    assert "holds a different run" in refusal(Resume(recipe(*named, "--learning_rate", "1e-3"), folder, 2).plan, 8)
    replaced = Resume(recipe(*named, "--learning_rate", "1e-3", "--overwrite_output_dir"), folder, 2)
    replaced.plan(8)
    assert replaced.sources == [path]
    again = Resume(recipe(*named), folder, 2)
    again.plan(8)
    assert again.sources == ["auto", path]


class Samples(list):
    def __getitem__(self, index: int):
        return {"input_ids": np.array(super().__getitem__(index))}


def test_data_that_has_changed_is_refused(tmp_path):
    data = [[index, index + 1] for index in range(500)]
    before = data_fingerprint(Samples(data), "none")
    check_data(before, json.loads(json.dumps(before)), tmp_path)
    more = data_fingerprint(Samples([*data, [7]]), "none")
    assert "samples 501, and was 500" in refusal(check_data, more, before, tmp_path)
    moved = data_fingerprint(Samples(data[::-1]), "none")
    assert "(checksum " in refusal(check_data, moved, before, tmp_path)
    grouped = data_fingerprint(Samples(data), "window")
    assert "grouping window, and was none" in refusal(check_data, grouped, before, tmp_path)
