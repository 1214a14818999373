"""float8: which layers have it, what the strategies and the YAML say of it, and what it costs, emulated on the CPU."""

import os
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers import ROOT, recipe_of, refusal, tiny_model

from zerofit.data.collate import CausalCollator
from zerofit.model import float8
from zerofit.model.compilation import blocks_of, uncompiled
from zerofit.model.float8 import EMULATED, check_float8, check_float8_device, convert_to_float8
from zerofit.model.preflight import documents_leak
from zerofit.recipe import ClmRecipe, parse_recipe
from zerofit.strategy import launch as launch_module
from zerofit.strategy.read import read_strategy

OPTIONAL = Path(sys.prefix, "optional")  # scripts/setup.sh: what only tests load


@pytest.fixture
def torchao(monkeypatch):
    if not OPTIONAL.is_dir():
        pytest.skip("torchao is not there: make setup")
    monkeypatch.syspath_prepend(str(OPTIONAL))
    monkeypatch.setenv(EMULATED, "1")


def converted(**changes):
    model = tiny_model("llama", **changes)
    return model, convert_to_float8(model, blocks_of(model))


def test_linear_layers_of_blocks_have_it_and_parameters_stay(torchao):
    plain = tiny_model("llama")
    before = {name: (id(each), each.shape, each.dtype) for name, each in plain.named_parameters()}
    said = convert_to_float8(plain, blocks_of(plain))
    assert said.startswith("float8 in 14 linear layers, which have 85% of the weights, emulated")
    assert {name: (id(each), each.shape, each.dtype) for name, each in plain.named_parameters()} == before
    assert type(plain.lm_head) is torch.nn.Linear
    assert type(plain.model.layers[0].mlp.up_proj) is not torch.nn.Linear


def test_routers_and_odd_widths_stay(torchao):
    model = tiny_model("llama", intermediate_size=72)
    model.model.layers[0].gate = torch.nn.Linear(32, 16)
    assert convert_to_float8(model, blocks_of(model)).startswith("float8 in 8 linear layers")
    assert type(model.model.layers[0].gate) is torch.nn.Linear


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gpt2", {}, "a gpt2 has nothing to compute in float8: its blocks have no torch.nn.Linear"),
        ("llama", {"hidden_size": 24, "head_dim": 6, "intermediate_size": 40}, "widths that divide by 16. Remove it"),
    ],
)
def test_a_model_without_such_layers_is_refused(torchao, family, changes, said):
    model = tiny_model(family, **changes)
    assert said in refusal(convert_to_float8, model, blocks_of(model))


def test_checks_are_in_bf16_since_rows_of_a_batch_share_a_scale(torchao):
    model, _ = converted()
    plain = tiny_model("llama")
    ids = torch.arange(33)[None]
    with torch.no_grad():
        rounded = model(input_ids=ids).logits
        with uncompiled():
            assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
        assert torch.equal(model(input_ids=ids).logits, rounded)
        assert not torch.equal(rounded, plain(input_ids=ids).logits)
        assert documents_leak(model, CausalCollator(0), 97, torch.device("cpu"))
        with uncompiled():
            assert not documents_leak(model, CausalCollator(0), 97, torch.device("cpu"))


def test_what_the_machine_lacks(monkeypatch):
    recipe = recipe_of(float8=True)
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: None)
    assert "needs torchao: pip install '.[float8]'" in refusal(check_float8, recipe)
    assert "compute capability 8.9 or more (L40S, H100), and there is none" in refusal(check_float8_device, recipe)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (8, 0))
    assert "and a NVIDIA A100 has 8.0. Remove it" in refusal(check_float8_device, recipe)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (8, 9))
    check_float8_device(recipe)


# --------------------------------------------------------------------------------------------------------- strategies


@pytest.fixture
def read(monkeypatch, tmp_path):
    """read(strategy or content of a YAML, flags): (recipe, strategy) of the first of two processes."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(launch_module, "find_launcher", lambda: None)
    monkeypatch.setattr("zerofit.strategy.read.check_devices", lambda: None)

    def made(strategy: str | dict, *flags: str, processes: int = 2):
        world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
        monkeypatch.setattr(os, "environ", {**kept, **world})
        if isinstance(strategy, dict):
            (tmp_path / "own.yaml").write_text(yaml.safe_dump(strategy))
            strategy = str(tmp_path / "own.yaml")
        words = ["--model_type", "llama", "--train_tokenizer_vocab_size", "400", "--train_file", "x.txt", *flags]
        recipe = parse_recipe(ClmRecipe, [*words, "--strategy", strategy])
        return recipe, read_strategy(recipe)

    return made


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero2"])
def test_it_means_bf16_and_compiled_blocks(read, strategy):
    recipe, resolved = read(strategy, "--float8")
    assert (resolved.precision, recipe.torch_compile, recipe.float8) == ("bf16", "blocks", True)
    assert read(strategy, "--float8", "--torch_compile", "blocks")[0].torch_compile == "blocks"


@pytest.mark.parametrize(
    ("strategy", "flags", "said"),
    [
        ("zero3", [], "torch_compile (--float8)"),
        ("tp", [], "does not go together with tensor parallelism"),
        ("pp", [], "does not go together with pipeline parallelism"),
        ("sp", [], "sequence_parallel_size = 2 does not go together with torch_compile (--float8)"),
        ("ep", [], "which divides experts among the ranks"),
        ("ddp", ["--precision", "fp32"], "needs precision = bf16, and it is fp32. Use --precision bf16"),
        ("ddp", ["--torch_compile", "false"], "torch_compile = false (--torch_compile): float8 (--float8) is slower"),
        ("ddp", ["--lora"], "float8 (--float8) does not go together with lora. Remove one of them"),
        ("ddp", ["--gradient_checkpointing", "--activation_offload"], "does not go together with activation_offload"),
    ],
)
def test_what_it_does_not_go_together_with(read, strategy, flags, said):
    assert said in refusal(read, strategy, "--float8", *flags)


DDP = {"distributed_type": "MULTI_GPU", "mixed_precision": "fp8"}


def test_a_yaml_with_fp8_means_the_same(read, tmp_path):
    own = str(tmp_path / "own.yaml")
    for more in ({}, {"fp8_config": {"backend": "AO", "pad_inner_dim": True, "enable_fsdp_float8_all_gather": True}}):
        recipe, resolved = read({**DDP, **more})
        assert (resolved.precision, recipe.float8, recipe.source("float8")) == ("bf16", True, own)
        assert recipe.torch_compile == "blocks"
    recipe, resolved = read(DDP, "--float8", "false")
    assert (resolved.precision, recipe.float8, recipe.compiles) == ("bf16", False, False)
    assert "--float8 says otherwise" in recipe.left_out[0]
    (tmp_path / "recipe.yaml").write_text("float8: false\n")
    assert "float8 is false" in refusal(read, DDP, "--config", str(tmp_path / "recipe.yaml"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"fp8_config": {"backend": "TE"}}, "fp8_config.backend = TE is not supported. Write AO, which is torchao"),
        ({"fp8_config": {"backend": "MSAMP", "opt_level": "O2"}}, "fp8_config.backend = MSAMP is not supported"),
        ({"fp8_config": {"fp8_format": "HYBRID"}}, "fp8_config.fp8_format is of another backend than torchao"),
        ({"fp8_config": {"backend": "AO"}, "mixed_precision": "bf16"}, "has no effect without mixed_precision: fp8"),
        ({"fp8_config": "AO"}, "expected indented `key: value` lines"),
    ],
)
def test_fp8_of_another_kind_is_refused(read, more, said):
    assert said in refusal(read, {**DDP, **more})


# --------------------------------------------------------------------------------------------------------------- time
