"""LoRA: what gets an adapter, what is trained, and that plain peft finds in the file what was trained."""

import json
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
import torch
from folders import answer
from helpers import NOT_SHARDED, TINY, check_refusal, refusal, small_sizes
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from zerofit.model.adapter_folder import open_adapter
from zerofit.model.compilation import fuse_gelu
from zerofit.model.export import write_model_card
from zerofit.model.load import load_model
from zerofit.model.lora import add_adapter, check_quantisation, inject_adapter
from zerofit.model.parameters import count_parameters
from zerofit.recipe import ClmRecipe, ClsRecipe, parse_recipe
from zerofit.recipe.tasks import TASKS
from zerofit.strategy.strategy import Strategy

CAUSAL, CLASSES, PAIRS = AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForSeq2SeqLM
MORE = {  # what a small configuration of the family needs besides
    "deberta-v2": {
        "relative_attention": True,
        "position_buckets": 16,
        "pos_att_type": "p2c|c2p",
        "num_labels": 3,
        "pooler_hidden_size": 64,
    },
    "gptj": {"rotary_dim": 8, "tie_word_embeddings": False},
    "blenderbot": {"decoder_start_token_id": 1},
    "t5": {"decoder_start_token_id": 0},
}
FAMILIES = {  # task, class, what has an adapter, how many times
    "llama": ("clm", CAUSAL, "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj", 14),
    "gpt_neox": ("clm", CAUSAL, "query_key_value", 2),
    "gpt2": ("clm", CAUSAL, "c_attn", 2),
    "mixtral": ("clm", CAUSAL, "q_proj k_proj v_proj o_proj", 12),
    "gptj": ("clm", CAUSAL, "q_proj k_proj v_proj out_proj fc_in fc_out", 18),  # no preset: all-linear
    "deberta-v2": ("cls", CLASSES, "query_proj key_proj value_proj", 9),
    "blenderbot": ("seq2seq", PAIRS, "q_proj k_proj v_proj out_proj", 4 * (2 + 2 * 2)),
    "t5": ("seq2seq", PAIRS, "q k v o", 4 * (2 + 2 * 2)),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, str]:
    """Folders of random weights, by family."""
    folders = {}
    for family, (_, auto_class, _, _) in FAMILIES.items():
        folders[family] = str(tmp_path_factory.mktemp(family))
        torch.manual_seed(0)
        sizes = TINY.get(family) or {**small_sizes(family), **MORE.get(family, {})}
        model = auto_class.from_config(AutoConfig.for_model(family, vocab_size=97, **sizes))
        model.save_pretrained(folders[family])
    return folders


def adapted(base: str, family: str, *flags: str, strategy: Strategy = NOT_SHARDED):
    """(model with an adapter, the adapter), as the tasks make them."""
    task, auto_class = FAMILIES[family][:2]
    data = ["--train_file", "a.jsonl", "--lora", "--model_name_or_path", base]
    recipe = parse_recipe(TASKS[task], [*data, *flags])
    model = load_model(auto_class, AutoConfig.from_pretrained(base), recipe, strategy)
    return model, add_adapter(model, recipe, task, strategy)


def moved(model) -> dict[str, torch.Tensor]:
    """Give all trained weights other values; returns them by name, as the engine does."""
    generator = torch.Generator().manual_seed(7)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return {name: parameter.detach().clone() for name, parameter in trained.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_preset_of_each_family(bases, family):
    _, auto_class, targets, count = FAMILIES[family]
    model, adapter = adapted(bases[family], family)
    layers = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    assert (len(layers), {name.rpartition(".")[2] for name in layers}) == (count, set(targets.split()))
    base = auto_class.from_pretrained(bases[family])
    head = sum(p.numel() for p in base.classifier.parameters()) if family == "deberta-v2" else 0
    expected = sum(8 * sum(base.get_submodule(name).weight.shape) for name in layers) + head
    assert count_parameters(model)[1] == expected > 0
    assert ("all-linear" if family == "gptj" else targets.replace(" ", ", ")) in adapter.note


VARIANTS = [
    *((family, ()) for family in FAMILIES),
    ("gpt2", ("--use_dora", "--use_rslora", "--lora_r", "4")),
    ("gpt2", ("--lora_bias", "all")),
    ("mixtral", ("--lora_target_modules", "q_proj", "gate_up_proj", "experts.down_proj")),  # weights, not modules
    ("llama", ("--lora_modules_to_save", "embed_tokens")),  # tied to the head
    ("gpt_neox", ("--lora_modules_to_save", "embed_in", "lm_head", "--lora_target_modules", "all-linear")),
]


@pytest.mark.parametrize(("family", "flags"), VARIANTS)
def test_what_was_trained_is_read_by_plain_peft_and_put_on_its_base_again(bases, tmp_path, family, flags):
    model, adapter = adapted(bases[family], family, *flags)
    adapter.save(model, moved(model), MagicMock(), tmp_path)
    base, again = (fuse_gelu(FAMILIES[family][1].from_pretrained(bases[family])) for _ in range(2))
    before, trained = answer(base), answer(model)
    assert (trained - before).abs().max() > 1e-3
    torch.testing.assert_close(answer(PeftModel.from_pretrained(base, tmp_path)), trained, rtol=1e-6, atol=1e-6)
    inject_adapter(open_adapter(str(tmp_path)), again, bases[family], NOT_SHARDED)
    torch.testing.assert_close(answer(again), trained, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["llama", "deberta-v2", "blenderbot"])
def test_nothing_of_the_frozen_model_is_written(bases, tmp_path, family):
    model, adapter = adapted(bases[family], family)
    assert not adapter.save(model, moved(model), MagicMock(), tmp_path)
    write_model_card(tmp_path, "a card")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == count_parameters(model)[1]
    assert all("lora_" in name or ".classifier." in name for name in tensors)
    files = {"adapter_model.safetensors", "adapter_config.json", "config.json", "README.md"}
    files |= {"generation_config.json"} if model.config.is_encoder_decoder else set()
    assert {file.name for file in tmp_path.iterdir()} == files
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1  # whoever reads the one reads the others
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == f"./{Path(bases[family]).name}", "no path of this machine"
    assert (config["r"], config["lora_alpha"], config["bias"]) == (8, 16, "none")


@pytest.mark.parametrize("name", ["adapter_config.json", "config.json", "generation_config.json", "the tokenizer"])
def test_a_file_that_cannot_be_written_does_not_cost_the_adapter(bases, tmp_path, name):
    model, adapter = adapted(bases["blenderbot"], "blenderbot")
    tokenizer, fail = MagicMock(), MagicMock(side_effect=ValueError("odd"))
    owners = {
        "adapter_config.json": adapter.config,
        "config.json": type(model.config),
        "generation_config.json": type(model.generation_config),
        "the tokenizer": tokenizer,
    }
    with patch.object(owners[name], "save_pretrained", fail):
        assert list(adapter.save(model, moved(model), tokenizer, tmp_path)) == [name]
    assert load_file(tmp_path / "adapter_model.safetensors")
    files = {"adapter_model.safetensors", "adapter_config.json", "config.json", "generation_config.json"}
    assert {file.name for file in tmp_path.iterdir()} == files - {name}


def test_random_weights_beside_the_head_are_saved_too(bases, tmp_path):
    """A pretrained body has neither pooler nor classifier: both are random, and no base will bring them back."""
    body = tmp_path / "body"
    CLASSES.from_pretrained(bases["deberta-v2"]).deberta.save_pretrained(body)
    config = AutoConfig.from_pretrained(bases["deberta-v2"])
    recipe = ClsRecipe(model_name_or_path=str(body), lora=True)
    model = load_model(CLASSES, config, recipe, NOT_SHARDED)
    adapter = add_adapter(model, recipe, "cls", NOT_SHARDED)
    assert adapter.saved == ["classifier", "pooler.dense"]
    adapter.save(model, moved(model), MagicMock(), tmp_path / "adapter")
    torch.manual_seed(99)
    base = CLASSES.from_pretrained(body, num_labels=3)
    torch.testing.assert_close(answer(PeftModel.from_pretrained(base, tmp_path / "adapter")), answer(model))


def test_half_an_adapter_is_never_written(bases, tmp_path):
    model, adapter = adapted(bases["gpt2"], "gpt2")
    state = moved(model)
    name = next(iter(state))
    state[name] = torch.empty(0)
    with pytest.raises(RuntimeError, match="incomplete"):
        adapter.save(model, state, MagicMock(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "flags", "words"),
    [
        ("llama", ("--lora_target_modules", "q_prj"), ["'q_prj' matches no module", "q_proj?", "up_proj"]),
        ("gpt2", ("--lora_target_modules", "ln_f"), ["modules = ln_f: Target module LayerNorm", "c_attn"]),
        ("llama", ("--lora_target_modules", "all-linear", "q_proj"), ["name all-linear alone"]),
    ],
)
def test_modules_that_are_not_there(bases, family, flags, words):
    check_refusal(words, adapted, bases[family], family, *flags)


def test_quantised_weights_need_bitsandbytes_and_a_gpu(monkeypatch):
    recipe = ClmRecipe(lora=True, load_in_4bit=True)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert "needs a GPU" in refusal(check_quantisation, recipe, NOT_SHARDED)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("zerofit.model.lora.find_spec", lambda name: None)
    assert "load_in_4bit = true needs bitsandbytes" in refusal(check_quantisation, recipe, NOT_SHARDED)
    monkeypatch.setattr("zerofit.model.lora.find_spec", lambda name: name)
    sharded = Strategy(None, None, "bf16", {"zero_optimization": {"stage": 3}}, "")
    assert "ZeRO-3" in refusal(check_quantisation, recipe, sharded)
    check_quantisation(recipe, NOT_SHARDED)
    assert ClmRecipe(load_in_4bit=True).quantised is None, "without --lora nothing is"
