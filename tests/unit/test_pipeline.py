"""Pipeline parallelism without launches: stages that are called one after another find what the full model finds, each
holds its own weights only, and what cannot be done is refused."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from folders import write_ported_model
from helpers import refusal, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from zerofit.model.export import export_model
from zerofit.model.families import FAMILY_BY_MODEL_TYPE
from zerofit.model.loss import install_loss
from zerofit.model.stages import check_stages, keep_stage
from zerofit.recipe import ClmRecipe
from zerofit.strategy.launch import Launch
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.read import check_combinations
from zerofit.strategy.strategy import Strategy

LLAMA = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
MODELS = {  # of three layers, which two stages cannot share evenly
    "llama, tied": ("llama", {"num_hidden_layers": 3}),
    "llama, untied": ("llama", {"num_hidden_layers": 3, "tie_word_embeddings": False, "attention_bias": True}),
    "mistral": ("mistral", {**LLAMA, "num_hidden_layers": 3, "sliding_window": 8, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {**LLAMA, "num_hidden_layers": 3, "tie_word_embeddings": True, "use_sliding_window": True,
                        "sliding_window": 4, "max_window_layers": 1}),  # only the later layers have a window
    "olmo2": ("olmo2", {**LLAMA, "num_hidden_layers": 3, "tie_word_embeddings": False}),
    "gpt2": ("gpt2", {"n_layer": 3}),
    "gpt_neox": ("gpt_neox", {"num_hidden_layers": 3}),
}  # fmt: skip


def batch_of(packed: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :9] = labels[2, 5:] = -100
    if packed:
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(20).remainder(9).repeat(3, 1)}
    return {"input_ids": ids, "labels": labels, "attention_mask": (torch.arange(20) < 15).long().repeat(3, 1)}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_stages_one_after_another_find_what_the_full_model_finds(name, stages):
    family, changes = MODELS[name]
    for kind, packed in (("full", False), ("chunked", True)):
        whole, *models = (tiny_model(family, **changes).train() for _ in range(1 + stages))
        for stage, model in enumerate(models):
            keep_stage(model, stage, stages, torch.float32)
            install_loss(model, kind)
            model.gradient_checkpointing_enable()
        install_loss(whole, kind)
        inputs = batch_of(packed)
        expected = whole(**inputs)
        expected.backward()
        ids, labels = inputs.pop("input_ids"), inputs.pop("labels")
        hidden = models[0].base_model(input_ids=ids, **inputs).last_hidden_state
        for model in models[1:-1]:
            hidden = model.base_model(inputs_embeds=hidden, **inputs).last_hidden_state
        loss = models[-1](inputs_embeds=hidden, labels=labels, **inputs)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        found: dict[str, torch.Tensor] = {}
        for parameter, weight in (pair for model in models for pair in model.named_parameters()):
            found[parameter] = found.get(parameter, 0) + weight.grad  # of a tied weight both ends have a part
        assert found.keys() == dict(whole.named_parameters()).keys()
        for parameter, weight in whole.named_parameters():
            torch.testing.assert_close(found[parameter], weight.grad, rtol=1e-5, atol=1e-7, msg=parameter)


@pytest.mark.parametrize(("family", "bytes_at_once"), [("gpt_neox", 20_000), ("llama", 1), ("gpt2", 10**9)])
def test_an_export_in_parts_is_the_model(tmp_path, monkeypatch, family, bytes_at_once):
    """Weights one after another, of which few are in memory; GPT-NeoX's head has another name on the disk."""
    monkeypatch.setattr("zerofit.model.export.MAX_FILE_BYTES", bytes_at_once)
    model = tiny_model(family, unpadded_vocab_size=89)
    tokenizer = SimpleNamespace(model_max_length=10, name_or_path="", save_pretrained=lambda folder: None)
    export_model(model, ((name, weight.detach()) for name, weight in model.named_parameters()), tokenizer, tmp_path)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (bytes_at_once > 10**6)
    assert not list(tmp_path.glob("part*"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == 89
    assert not hasattr(loaded.config, "unpadded_vocab_size")
    assert model.config.vocab_size == 97, "it may be training on"
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, expected[name][:89] if len(expected[name]) == 97 else expected[name]), name
    with pytest.raises(RuntimeError, match="incomplete: missing"):
        export_model(model, iter(()), tokenizer, tmp_path / "none")


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"num_hidden_layers": 3}, "and num_hidden_layers = 3"),
        ("opt", {}, "a opt has no pipeline"),
    ],
)
def test_models_that_stages_cannot_share(family, changes, said):
    config = AutoConfig.for_model(family, **changes)
    message = refusal(check_stages, config, 4, "my.json")
    assert message.startswith("error: my.json: pipeline.stages = 4")
    assert said in message


def test_what_does_not_go_together_is_refused_in_one_message():
    recipe = ClmRecipe(config_name="gpt2", lora=True, torch_compile="model", predict_file="asked.jsonl")
    recipe.remember_sources({"lora": "--lora", "torch_compile": "--torch_compile"})
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True}
    launch = Launch(8, 0, deepspeed=True, precision=None, json_path=None, config_file=None)
    strategy = Strategy(launch, None, "fp32", {"zero_optimization": zero}, "my.json", pipeline=2, tensor=2, sequence=2)
    message = refusal(check_combinations, strategy, recipe)
    for words in ("lora (--lora)", "torch_compile", "zero_optimization.stage = 3", "Write 1", "predict_file",
                  "zero_optimization.offload_optimizer", "pipeline.stages = 2 does not go together with "
                  "zero_optimization.overlap_comm", "sequence_parallel_size = 2 does not go together with "
                  "tensor_parallel.autotp_size and pipeline.stages"):  # fmt: skip
        assert words in message
    assert "8 problems" in message, "each is named once; torch_compile of ZeRO-3 too"
    message = refusal(check_combinations, replace(strategy, pipeline=1, tensor=1, sequence=1), recipe)
    assert message.count("does not go together") == 1, "compiled layers under ZeRO-3"


def model_of(folder: Path) -> torch.nn.Module:
    """The model with weights that are not zero or one; its family is known from then on."""
    spec = importlib.util.spec_from_file_location("family_of_the_page", folder / "family.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    FAMILY_BY_MODEL_TYPE.update({name: family for family in module.FAMILIES for name in family.model_types})
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.use_cache, config.resid_pdrop, config.embd_pdrop, config.attn_pdrop = False, 0.0, 0.0, 0.0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.train()


@pytest.fixture
def folder(tmp_path):
    write_ported_model(tmp_path)
    yield tmp_path
    FAMILY_BY_MODEL_TYPE.pop("rms_gpt2", None)


def test_stages_of_a_ported_model_find_what_it_finds(folder):
    whole, stages = model_of(folder), [model_of(folder) for _ in range(2)]
    for stage, model in enumerate(stages):
        keep_stage(model, stage, 2, torch.float32)
    for model in (whole, *stages):
        install_loss(model, "full")
    ids = torch.randint(0, 512, (2, 20), generator=torch.Generator().manual_seed(3))
    hidden = stages[0].base_model(input_ids=ids).last_hidden_state
    loss = stages[1](inputs_embeds=hidden, labels=ids)
    torch.testing.assert_close(loss, whole(input_ids=ids, labels=ids), rtol=1e-6, atol=0)


def test_places_are_deepspeeds():
    """DeepSpeed's PipeModelDataParallelTopology numbers its axes pipe, data, model, the last one fastest."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    for rank in range(8):
        layout, place = ParallelLayout(8, rank, tensor=2, pipeline=2), topology.get_coord(rank)
        assert (layout.data_rank, layout.pipeline_stage) == (place.data, place.pipe)


def test_each_rank_draws_numbers_of_its_own():
    """Heads of a layer and parts of a row differ too."""
    for degrees in ({}, {"tensor": 2}, {"pipeline": 4}, {"sequence": 2}):
        keys = [ParallelLayout(4, rank, **degrees).dropout_seed_key for rank in range(4)]
        assert len(set(keys)) == 4
        assert degrees or keys == [(0,), (1,), (2,), (3,)]
