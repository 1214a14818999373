"""The README.md of a trained model: the snippet in it loads what lies beside it."""

import pytest

from zerofit.recipe import ClmRecipe, ClsRecipe
from zerofit.record.model_card import model_card

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
