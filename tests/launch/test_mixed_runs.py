"""A run on a mixture resumes with another number of processes, and its held-out loss is the mean of the sources'."""

import json

import pytest
from helpers import launch, updates

from zerofit.data.causal import prepare_causal_data
from zerofit.model.configuration import load_configuration
from zerofit.recipe import ClmRecipe, parse_recipe


def samples(output) -> dict[int, list[int]]:
    lines = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    return {line["update"]: line["samples"] for line in lines}


@pytest.mark.long
def test_a_mixture_resumes_with_another_number_of_processes(llama, material, cache, tmp_path):
    flags = list(map(str, [
        "--model_name_or_path", llama, "--train_file", "3", material / "text" / "train.txt", "1",
        material / "instruct" / "english.json", "--chat_template", "instruction", "--block_size", "160",
        "--max_train_samples", "90", "--max_eval_samples", "9", "--cache_dir", cache,
    ]))  # fmt: skip
    common = [
        *flags, "--global_batch_size", "8", "--per_device_train_batch_size", "2", "--max_train_steps", "8",
        "--save_steps", "4", "--record_samples", "--learning_rate", "1e-3",
    ]  # fmt: skip
    whole = launch(tmp_path / "whole", *common, strategy="ddp", processes=2)
    resumed = launch(
        tmp_path / "resumed", *common, "--resume", tmp_path / "whole" / "checkpoints" / "update_00000004",
        strategy="single", processes=1,
    )  # fmt: skip
    expected, ours = samples(tmp_path / "whole"), samples(tmp_path / "resumed")
    for line, other in zip(updates(resumed)[-4:], updates(whole)[-4:], strict=True):
        assert sorted(ours[line["update"]]) == sorted(expected[line["update"]])
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)

    recipe = parse_recipe(ClmRecipe, flags)
    data = prepare_causal_data(recipe, load_configuration(recipe))
    targets = {name: part.stats.trained for name, part in data.held_out.items()}
    for line in whole:
        if "eval_loss" in line:
            mean = sum(line[f"eval_loss_{name}"] * count for name, count in targets.items()) / sum(targets.values())
            assert line["eval_loss"] == pytest.approx(mean, rel=1e-7)
