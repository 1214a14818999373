"""`--lengths` of `zerofit plan` and `zerofit compare`: the longest rows that a strategy holds."""

import json

import numpy as np
import pytest
import yaml
from unit.test_limits import MIB, worst

from zerofit.cli import main
from zerofit.data.collate import CausalCollator
from zerofit.tools.compare import guess

SHAPE = "n_layer=8,n_head=2,n_embd=32,n_positions=3000,vocab_size=512,attn_pdrop=0"
SMALL = ["--task", "clm", "--config_name", "gpt2", "--precision", "fp32", "--config_overrides", SHAPE,
         "--packing", "concatenate", "--per_device_eval_batch_size", "1"]  # fmt: skip
PLAN = ["plan", *SMALL, "--gpu", "cpu", "--num_gpus", "2", "--strategies", "zero3,sp"]


def planned(capsys, *flags: str) -> dict:
    assert main([*PLAN, *flags, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_longest_rows_fit_and_the_next_do_not(capsys, tmp_path, monkeypatch):
    """The prediction of a length is that of the plan for rows of this length, and the first guess of a comparison."""
    found = planned(capsys, "--gpu_memory", "100MiB", "--lengths", "1000,2000,3000")
    longest = {one["strategy"]: one["length"] for one in found["largest"]}
    assert 1000 <= longest["zero3"] < longest["sp"]
    for strategy, length in longest.items():
        fits = {one["length"]: one["fits"] for one in found["predictions"] if one["strategy"] == strategy}
        assert fits[length]
        assert not any(fits[other] for other in fits if other > length)
        assert length == 3000 or length + 1000 in fits
    alone = planned(capsys, "--gpu_memory", "100MiB", "--block_size", str(longest["sp"]), "--batch_sizes", "1")
    (same,) = (one for one in alone["predictions"] if one["strategy"] == "sp")
    assert same in found["predictions"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({
        "config_name": "gpt2", "config_overrides": SHAPE, "precision": "fp32", "packing": "concatenate",
        "per_device_eval_batch_size": 1, "per_device_train_batch_size": 1,
    }))  # fmt: skip
    monkeypatch.setattr(guess, "_programs", lambda request: {False: 0, True: 0})
    guesses = guess._predictions({
        "task": "clm", "recipe": str(recipe), "num_processes": 2, "kind": "cpu", "limit": 100 * MIB, "by_length": True,
        "sizes": [1000, 2000, 3000], "has_gpu_kernels": False,
        "candidates": {"zero3": ["zero3", []], "sp": ["sp", []]},
    })  # fmt: skip
    assert {name: one.size for name, one in guesses.items()} == longest


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lengths", "8x"], "lengths = '8x': expected auto, or lengths of rows in tokens, such as 8k,16k,32k"),
        (["--lengths", "1k", "--block_size", "64"], "--block_size and --lengths: keep one of the two"),
        (
            ["--lengths", "1k", "--global_batch_size", "3"],
            "global_batch_size = 3 (--global_batch_size) is not a multiple",
        ),
    ],
)
def test_a_mistake_ends_a_plan_with_code_2(capsys, flags, words):
    strategies = ["--strategies", "zero3"]
    assert main([*PLAN, "--gpu_memory", "80MiB", *flags, *strategies]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_rows_have_the_length_that_is_tried():
    """One document stays one, packed documents stay several."""
    for positions, expected in ((np.arange(5), list(range(8))), (np.array([0, 1, 2, 0, 1]), [0, 1, 2, 0, 1, 0, 1, 2])):
        row = {"input_ids": np.arange(5), "labels": np.arange(5), "position_ids": positions}
        batch = worst({"input_ids": 8}, CausalCollator(0), 2, 0, row)
        assert batch.inputs["input_ids"].shape == (2, 8)
        assert batch.inputs["position_ids"][0].tolist() == expected
        assert batch.num_tokens == 16
    assert worst({"input_ids": 3}, CausalCollator(0), 1, 0, row).inputs["input_ids"].tolist() == [[0, 1, 2]]
