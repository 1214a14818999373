"""An export that is loaded back, and files beside its weights that cannot be written."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import NOT_SHARDED, recipe_of, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2LMHeadModel

from zerofit.model.export import export_model, review_export
from zerofit.model.load import load_model
from zerofit.recipe import ClmRecipe, ClsRecipe
from zerofit.record.model_card import model_card


@pytest.fixture
def export(tmp_path):
    """A tiny GPT-2, whose head is tied to its embeddings, as transformers writes it."""
    tiny_model("gpt2").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, None),
        ("another weight", "weights that its model does not have: score.weight"),
        ("the head", "lm_head.weight is stored, and config.json ties it"),
        ("no tokenizer", "there is no tokenizer"),
    ],
)
def test_an_export_is_loaded_back_and_each_oddity_is_one_line(export, change, said):
    weights = load_file(export / "model.safetensors")
    added = {
        "another weight": {"score.weight": torch.zeros(2, 3)},
        "the head": {"lm_head.weight": weights["transformer.wte.weight"].clone()},
    }
    save_file({**weights, **added.get(change, {})}, export / "model.safetensors", {"format": "pt"})
    if change == "no tokenizer":
        (export / "tokenizer.json").unlink()
    first, *lines = review_export(export, GPT2LMHeadModel)
    assert first == f"{len(weights) + len(added.get(change, {}))} weights, F32, read back"
    assert len(lines) == (said is not None)
    assert not lines or said in lines[0]


@pytest.mark.parametrize("change", ["missing", "of another shape", "no file"])
def test_an_export_without_its_weights_is_an_error(export, change):
    weights, name = load_file(export / "model.safetensors"), "transformer.h.0.ln_2.bias"
    del weights[name]
    weights |= {name: torch.zeros(3)} if change == "of another shape" else {}
    save_file(weights, export / "model.safetensors", {"format": "pt"})
    if change == "no file":
        (export / "model.safetensors").unlink()
    with pytest.raises(RuntimeError, match="holds no weights" if change == "no file" else re.escape(name)):
        review_export(export, GPT2LMHeadModel)


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        ({"r": 64}, {}, None),
        ({"target_parameters": ["experts.down_proj"]}, {}, "vllm#41384"),
        ({}, {"base_model.model.score.weight": torch.zeros(2, 32)}, "not base_model.model.score.weight"),
    ],
)
def test_what_of_an_adapter_other_programs_do_not_take(tmp_path, settings, more, said):
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB"]
    save_file({name: torch.zeros(4, 32) for name in names} | more, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, **settings}))
    (tmp_path / "tokenizer.json").write_text("{}")
    lines = review_export(tmp_path, GPT2LMHeadModel)[1:]
    assert len(lines) == (said is not None)
    assert not lines or said in lines[0]


VALID = {"max_new_tokens": 20, "eos_token_id": 5}
REFUSED = [  # (settings beside the valid ones, the names that are dropped)
    ({"pad_token_id": -1}, {"pad_token_id"}),
    (
        {"output_scores": True, "output_attentions": True, "output_hidden_states": True, "output_logits": True},
        {"output_scores", "output_attentions", "output_hidden_states", "output_logits"},
    ),
    ({"output_scores": True, "return_dict_in_generate": True}, set()),
    ({"temperature": 0.6, "top_p": 0.9}, {"temperature", "top_p"}),
    ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, set()),
    ({"num_return_sequences": 3}, {"num_return_sequences"}),
    ({"early_stopping": "soon"}, {"early_stopping"}),
    ({"watermarking_config": {"seeding_scheme": "x"}}, {"watermarking_config"}),
    ({"pad_token_id": "<pad>"}, {"pad_token_id"}),
    ({"max_new_tokens": 0}, {"max_new_tokens"}),
    ({"suppress_tokens": [3], "forced_eos_token_id": 3}, {"forced_eos_token_id"}),
    ({"a_setting_of_ours": 1}, set()),
]


@pytest.mark.parametrize(("settings", "dropped"), REFUSED)
def test_generation_settings_that_cannot_be_saved_are_dropped_at_load(tmp_path, settings, dropped):
    model = tiny_model("gpt2", bos_token_id=1, eos_token_id=5)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({**VALID, **settings}))
    recipe, strategy = recipe_of(model_name_or_path=str(tmp_path / "base")), NOT_SHARDED
    loaded = load_model(AutoModelForCausalLM, model.config, recipe, strategy)
    assert set(loaded.dropped_settings) == dropped
    tokenizer = SimpleNamespace(model_max_length=10, name_or_path="", save_pretrained=lambda folder: None)
    assert export_model(loaded, loaded.named_parameters(), tokenizer, tmp_path / "export") == {}
    written = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    expected = {name: value for name, value in {**VALID, **settings}.items() if name not in dropped}
    assert {name: value for name, value in written.items() if name in {**VALID, **settings}} == expected
    GenerationConfig.from_pretrained(tmp_path / "export")


@pytest.mark.parametrize("text", ["[1, 2]", "3", "{", ""])
def test_a_file_of_generation_settings_that_is_none_is_not_used(tmp_path, text):
    model = tiny_model("gpt2", bos_token_id=1, eos_token_id=5)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(text)
    recipe = recipe_of(model_name_or_path=str(tmp_path / "base"))
    assert load_model(AutoModelForCausalLM, model.config, recipe, NOT_SHARDED).generation_config is not None


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "the model's code", "the tokenizer", "tokenizer.model"]
)
def test_a_file_that_cannot_be_written_costs_neither_the_weights_nor_the_other_files(tmp_path, monkeypatch, name):
    def fail(*args, **kwargs):
        raise KeyError("odd")

    model = tiny_model("gpt2", bos_token_id=1, eos_token_id=5)
    tokenizer = SimpleNamespace(model_max_length=10, name_or_path="")
    tokenizer.save_pretrained = lambda folder: (folder / "tokenizer.json").touch()
    if name == "the tokenizer":
        tokenizer.save_pretrained = fail
    model.is_remote_code = lambda: name == "the model's code"
    owners = {
        "config.json": (type(model.config), "save_pretrained"),
        "generation_config.json": (GenerationConfig, "save_pretrained"),
        "the model's code": ("zerofit.model.export.custom_object_save",),
        "tokenizer.model": ("zerofit.model.export._copy_sentencepiece_model",),
    }
    if name in owners:
        monkeypatch.setattr(*owners[name], fail)
    failed = export_model(model, model.named_parameters(), tokenizer, tmp_path / "export")
    assert list(failed) == [name]
    files = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    lost = {"the tokenizer": "tokenizer.json"}.get(name, name)
    assert {file.name for file in (tmp_path / "export").iterdir()} == files - {lost}


# ----------------------------------------------------------------------------------------------------------- README.md


ENVIRONMENT = {"packages": {"torch": "2.0"}, "zerofit_commit": "0123456789abcdef"}


def card_of(recipe, is_adapter: bool, task: str = "clm", model_class: str = "") -> str:
    return model_card(task, recipe, {"eval_loss": 1.5}, ENVIRONMENT, is_adapter, model_class=model_class)


def test_a_models_snippet_loads_it(llama, monkeypatch):
    monkeypatch.chdir(llama)
    card, made = card_of(ClmRecipe(config_name="gpt2", train_file=["a.txt"]), is_adapter=False), {}
    exec(card.split("```python\n")[1].split("```")[0], made)
    assert type(made["model"]).__name__ == "LlamaForCausalLM"
    assert made["tokenizer"]("a text")["input_ids"]


@pytest.mark.parametrize(
    ("model_class", "auto_class"),
    [
        ("BertForSequenceClassification", "AutoModelForSequenceClassification"),
        ("BertForMultipleChoice", "AutoModelForMultipleChoice"),
    ],
)
def test_a_card_names_no_folder_of_this_machine(model_class, auto_class):
    recipe = ClsRecipe(model_name_or_path="/home/me/bert", train_file=["/home/me/data/a.csv"], output_dir="/home/me/x")
    recipe.remember_sources({name: f"--{name}" for name in recipe.to_dict()})
    card = card_of(recipe, True, "cls", model_class)
    assert "/home" not in card
    assert f'{auto_class}.from_pretrained("bert", config=' in card
    assert "continued from bert on a.csv" in card
    assert "| loss | 1.5000 |" in card
