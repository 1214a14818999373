"""float8: which layers have it, what the strategies and the YAML say of it, and what it costs, emulated on the CPU."""

import sys
from pathlib import Path

import pytest
import torch
from helpers import recipe_of, refusal, tiny_model

from zerofit.data.collate import CausalCollator
from zerofit.model import compilation
from zerofit.model.compilation import FLOAT8_EMULATION, blocks_of, convert_to_float8, uncompiled
from zerofit.model.preflight import documents_leak

OPTIONAL = Path(sys.prefix, "optional")  # scripts/setup.sh: what only tests load


@pytest.fixture
def torchao(monkeypatch):
    if not OPTIONAL.is_dir():
        pytest.skip("torchao is not there: make setup")
    monkeypatch.syspath_prepend(str(OPTIONAL))
    monkeypatch.setenv(FLOAT8_EMULATION, "1")


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
    model = tiny_model("llama")
    convert_to_float8(model, blocks_of(model))
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
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: None)
    assert "needs torchao: pip install '.[float8]'" in refusal(compilation.check_float8, recipe)
    said = refusal(compilation.check_float8_device, recipe)
    assert "compute capability 8.9 or more (L40S, H100), and there is none" in said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (8, 0))
    assert "and a NVIDIA A100 has 8.0. Remove it" in refusal(compilation.check_float8_device, recipe)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (8, 9))
    compilation.check_float8_device(recipe)


# --------------------------------------------------------------------------------------------------------- strategies


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero2"])
def test_it_means_bf16_and_compiled_blocks(under_torchrun, strategy):
    recipe, resolved = under_torchrun(strategy, "--float8")
    assert (resolved.precision, recipe.torch_compile, recipe.float8) == ("bf16", "blocks", True)
    assert under_torchrun(strategy, "--float8", "--torch_compile", "blocks")[0].torch_compile == "blocks"


@pytest.mark.parametrize(
    ("strategy", "flags", "said"),
    [
        ("zero3", [], "torch_compile (--float8)"),
        ("tp", [], "does not go together with tensor parallelism"),
        ("pp", [], "does not go together with pipeline parallelism"),
        ("sp", [], "sequence_parallel_size = 2 does not go together with torch_compile (--float8)"),
        ("ep", [], "which divides experts among the ranks"),
        ("ddp", ["--precision", "fp32"], "does not go together with precision = fp32. Use --precision bf16"),
        ("ddp", ["--torch_compile", "false"], "torch_compile = false (--torch_compile): float8 (--float8) is slower"),
        ("ddp", ["--lora"], "float8 (--float8) does not go together with lora. Remove one of them"),
        ("ddp", ["--gradient_checkpointing", "--activation_offload"], "does not go together with activation_offload"),
    ],
)
def test_what_it_does_not_go_together_with(under_torchrun, strategy, flags, said):
    assert said in refusal(under_torchrun, strategy, "--float8", *flags)


DDP = {"distributed_type": "MULTI_GPU", "mixed_precision": "fp8"}


def test_a_yaml_with_fp8_means_the_same(under_torchrun, tmp_path):
    own = str(tmp_path / "own.yaml")
    for more in ({}, {"fp8_config": {"backend": "AO", "pad_inner_dim": True, "enable_fsdp_float8_all_gather": True}}):
        recipe, resolved = under_torchrun({**DDP, **more})
        assert (resolved.precision, recipe.float8, recipe.source("float8")) == ("bf16", True, own)
        assert recipe.torch_compile == "blocks"
    recipe, resolved = under_torchrun(DDP, "--float8", "false")
    assert (resolved.precision, recipe.float8, recipe.compiles) == ("bf16", False, False)
    assert "--float8 says otherwise" in recipe.left_out[0]
    (tmp_path / "recipe.yaml").write_text("float8: false\n")
    assert "float8 is false" in refusal(under_torchrun, DDP, "--config", str(tmp_path / "recipe.yaml"))
