"""Generated texts that reach the longest length before their end: counted, and how long texts may be."""

import pytest
from folders import save_blenderbot, save_writer, small_tokenizer
from transformers import GenerationConfig

from zerofit.recipe import Seq2SeqRecipe, parse_recipe
from zerofit.training.generation import generation_settings


def longest(stored, *flags):
    recipe = parse_recipe(Seq2SeqRecipe, ["--model_name_or_path", "a", *flags])
    return generation_settings(recipe, (128, recipe.max_target_length), GenerationConfig(**stored))["max_new_tokens"]


@pytest.mark.parametrize("flags", [("--predict_file", "a.jsonl"), ("--evaluate_only", "--validation_file", "a.jsonl")])
def test_a_launch_without_training_takes_the_stored_length(flags):
    assert longest({"max_new_tokens": 40}, *flags) == 40
    assert longest({}, *flags) == 128
    assert longest({"max_new_tokens": 40}, *flags, "--val_max_target_length", "50") == 50
    assert longest({"max_new_tokens": 40}, *flags, "--max_target_length", "60") == 60
    assert longest({"max_new_tokens": 40}, "--train_file", "a.jsonl") == 128


def test_generate_says_where_an_answer_is_cut(tools, tmp_path, capsys):
    from zerofit.tools.generate.generate import main

    save_blenderbot(tmp_path / "pairs", small_tokenizer(tmp_path))
    assert main(["--model", str(tmp_path / "pairs"), "--prompt", "hello", "--max_new_tokens", "2"]) == 0
    assert "note: the text is cut at max_new_tokens = 2" in capsys.readouterr().err
    save_writer(tmp_path / "text", small_tokenizer(tmp_path))
    assert main(["--model", str(tmp_path / "text"), "--prompt", "hello", "--max_new_tokens", "2"]) == 0
    assert "cut" not in capsys.readouterr().err, "a text that is continued has no end"
