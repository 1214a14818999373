"""A run on a mixture, and one by tokens, resume with other processes; a mixture's loss is the mean of its sources'."""

import json

import pytest
from helpers import launch, updates, write_records

from zerofit.data.causal import prepare_causal_data
from zerofit.model.configuration import load_configuration
from zerofit.recipe import ClmRecipe, parse_recipe


def samples(output) -> dict[int, list[int]]:
    lines = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    return {line["update"]: line["samples"] for line in lines}


def resumes(folder, flags: list, strategy: str, another: tuple[str, int]) -> list[dict]:
    """Check a run of 2 processes against one that continues it in mid-epoch under another strategy; its metrics."""
    common = [
        *flags, "--per_device_train_batch_size", "2", "--max_train_steps", "8", "--save_steps", "4",
        "--record_samples", "--learning_rate", "1e-3",
    ]  # fmt: skip
    whole = launch(folder / "whole", *common, strategy=strategy, processes=2)
    checkpoint = folder / "whole" / "checkpoints" / "update_00000004"
    resumed = launch(folder / "resumed", *common, "--resume", checkpoint, strategy=another[0], processes=another[1])
    expected, ours = samples(folder / "whole"), samples(folder / "resumed")
    for line, other in zip(updates(resumed)[-4:], updates(whole)[-4:], strict=True):
        assert sorted(ours[line["update"]]) == sorted(expected[line["update"]])
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
    return whole


def write_shards(folder, material) -> list[str]:
    """Instructions in three files."""
    records = json.loads((material / "instruct" / "english.json").read_text())
    return [str(write_records(folder / f"{number}.jsonl", records[number::3])) for number in range(3)]


@pytest.mark.long
def test_a_run_by_tokens_resumes_in_mid_epoch_under_another_strategy(llama, material, cache, tmp_path):
    flags = [
        "--model_name_or_path", llama, "--train_file", material / "instruct" / "english.json", "--chat_template",
        "instruction", "--block_size", "192", "--packing", "none", "--max_eval_samples", "9", "--cache_dir", cache,
        "--tokens_per_batch", "1536",
    ]  # fmt: skip
    whole = resumes(tmp_path, flags, "zero3", ("fsdp2", 4))
    sizes = {len(batch) for batch in samples(tmp_path / "whole").values()}
    assert whole[-1]["epoch"] < 1
    assert len(sizes) > 1


@pytest.mark.long
def test_a_stream_resumes_with_another_number_of_processes(llama, material, cache, tmp_path):
    """In another folder, without the file of windows: they are read again up to the one in which the run stopped."""
    flags = [
        "--model_name_or_path", llama, "--train_file", *write_shards(tmp_path, material), "--validation_file",
        material / "instruct" / "english.json", "--chat_template", "instruction", "--block_size", "160", "--streaming",
        "1KiB", "--max_eval_samples", "9", "--cache_dir", cache, "--global_batch_size", "24",
    ]  # fmt: skip
    resumes(tmp_path, flags, "ddp", ("single", 1))
    windows = (tmp_path / "whole" / "stream.jsonl").read_text().splitlines()
    assert len(windows) > 3


@pytest.mark.long
def test_a_stream_resumes_under_another_strategy(llama, material, cache, tmp_path):
    flags = [
        "--model_name_or_path", llama, "--train_file", *write_shards(tmp_path, material), "--chat_template",
        "instruction", "--block_size", "160", "--streaming", "1KiB", "--cache_dir", cache, "--global_batch_size", "24",
    ]  # fmt: skip
    resumes(tmp_path, flags, "zero3", ("fsdp2", 4))


@pytest.mark.long
def test_a_mixture_resumes_with_another_number_of_processes(llama, material, cache, tmp_path):
    flags = list(map(str, [
        "--model_name_or_path", llama, "--train_file", "3", material / "text" / "train.txt", "1",
        material / "instruct" / "english.json", "--chat_template", "instruction", "--block_size", "160",
        "--max_train_samples", "90", "--max_eval_samples", "9", "--cache_dir", cache,
    ]))  # fmt: skip
    whole = resumes(tmp_path, [*flags, "--global_batch_size", "8"], "ddp", ("single", 1))
    recipe = parse_recipe(ClmRecipe, flags)
    data = prepare_causal_data(recipe, load_configuration(recipe))
    targets = {name: part.stats.trained for name, part in data.sources.items()}
    for line in whole:
        if "eval_loss" in line:
            mean = sum(line[f"eval_loss_{name}"] * count for name, count in targets.items()) / sum(targets.values())
            assert line["eval_loss"] == pytest.approx(mean, rel=1e-7)
