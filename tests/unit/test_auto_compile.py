"""What --torch_compile auto takes, on machines that are made up: this one has no GPU."""

from types import SimpleNamespace

import pytest
import torch
from helpers import recipe_of, refusal

from zerofit.checkpoint.manager import EarlierRuns
from zerofit.training import run_configuration
from zerofit.training.run_configuration import choose, decide

CUDA = torch.device("cuda")


def a_strategy(**changes):
    about = {"name": "ddp", "precision": "bf16", "shards_parameters": False, "divides_experts": False, "sequence": 1}
    found = SimpleNamespace(**{**about, **changes})
    found.layout = SimpleNamespace(sequence=found.sequence)
    return found


@pytest.mark.parametrize(
    ("options", "strategy", "how", "words"),
    [
        ({}, {}, {"num_updates": 300}, None),
        ({}, {}, {}, None),
        ({}, {}, {"num_updates": 299}, "299 updates, fewer than 300"),
        ({}, {"precision": "fp16"}, {"num_updates": 300}, None),
        ({}, {"precision": "fp32"}, {}, "precision is fp32"),
        ({}, {"shards_parameters": True, "name": "zero3"}, {}, "zero3 gathers"),
        ({}, {"sequence": 2, "name": "sp"}, {}, "sp splits rows"),
        ({}, {"divides_experts": True}, {}, "experts"),
        ({}, {}, {"config": SimpleNamespace(num_local_experts=8)}, "experts"),
        ({}, {}, {"config": SimpleNamespace(num_local_experts=None)}, None),
        ({"lora": True, "load_in_4bit": True}, {}, {}, "load_in_4bit is on"),
        ({"gradient_checkpointing": True, "activation_offload": True}, {}, {}, "activation_offload is on"),
        ({"gradient_checkpointing": True}, {}, {}, None),
        ({"packing": "none", "block_size": 4096}, {}, {}, "widths"),
        ({"packing": "none", "block_size": 64}, {}, {}, None),
        ({"preference_loss": "dpo", "block_size": 4096}, {}, {}, "widths"),
        ({"block_size_warmup": "32@6"}, {}, {}, "lets rows grow"),
        ({}, {}, {"missing": "Triton is not installed"}, "Triton"),
        ({}, {}, {"compiled_before": False}, "the run that it resumes was not"),
        ({}, {}, {"compiled_before": "blocks", "num_updates": 3}, None),
        ({}, {"shards_parameters": True}, {"compiled_before": "blocks"}, "gathers"),
    ],
)
def test_each_condition(options, strategy, how, words):
    found = choose(recipe_of(**options), a_strategy(**strategy), **how)
    assert found.value == (False if words else "blocks")
    assert (words or "") in found.why


def decided(recipe, device=CUDA, before=None, updates=4000, **strategy):
    return decide(recipe, a_strategy(**strategy), None, updates, before, device=device)


@pytest.fixture
def compiler(monkeypatch):
    """compiler(why it fails, or None)."""

    def works(fault: str | None) -> None:
        monkeypatch.setattr(run_configuration, "failing_compiler", lambda device: fault)

    works(None)
    return works


def test_a_decline_is_said_with_its_reason(compiler):
    recipe = recipe_of()
    assert decided(recipe, updates=40) == (
        "auto: false, 40 updates, fewer than 300", ["layers are not compiled: 40 updates, fewer than 300"]
    )  # fmt: skip
    assert recipe.torch_compile is False
    assert decided(recipe_of(), torch.device("cpu")) == ("auto: false, without a GPU to train on", [])
    assert decided(recipe_of(torch_compile="blocks"), torch.device("cpu")) == (None, [])


def test_a_compiler_that_fails_is_a_note_under_auto_and_else_an_error(compiler):
    compiler("there is no C compiler (gcc)")
    recipe = recipe_of()
    _, (note,) = decided(recipe)
    assert recipe.torch_compile is False
    assert note == "layers are not compiled: there is no C compiler (gcc)"
    assert "torch_compile = blocks (--torch_compile): there is no C compiler" in refusal(
        decided, recipe_of(torch_compile="blocks")
    )
    assert decided(recipe_of(torch_compile=False)) == (None, [])


def test_one_rank_without_a_compiler_leaves_it_out_on_all(compiler, monkeypatch):
    monkeypatch.setattr(run_configuration, "all_gather_objects", lambda mine: [mine, "Triton is not installed"])
    recipe = recipe_of()
    _, (note,) = decided(recipe)
    assert recipe.torch_compile is False
    assert "Triton" in note


def test_a_resumed_run_goes_on_as_it_was():
    recorded, plan = {"torch_compile": "blocks"}, SimpleNamespace(sources=("auto",))
    assert EarlierRuns(own=recorded).compiled(plan) == "blocks"
    assert EarlierRuns(own={"torch_compile": False}).compiled(plan) is False
    assert EarlierRuns(own={}).compiled(plan) is False
    named = SimpleNamespace(sources=("run/checkpoints/update_2",))
    assert EarlierRuns(own={"torch_compile": False}, named=recorded).compiled(named) == "blocks"
    assert EarlierRuns(own=recorded).compiled(SimpleNamespace(sources=())) is None
