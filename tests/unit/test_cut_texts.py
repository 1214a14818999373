"""Generated texts that reach the longest length before their end: counted, and how long texts may be."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from folders import save_blenderbot, save_writer, small_tokenizer
from transformers import GenerationConfig

from zerofit.data.collate import PromptCollator
from zerofit.data.prompts import Prompts
from zerofit.model.tokenizer import padding_token
from zerofit.recipe import Seq2SeqRecipe, parse_recipe
from zerofit.training.generation import generation_settings, predict_texts


class Writes:
    """A model that writes these rows after each prompt (of an encoder-decoder: after its first token)."""

    def __init__(self, rows, is_encoder_decoder, **defaults):
        self.rows, self.config = rows, SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
        self.generation_config = GenerationConfig(**defaults)

    def __call__(self, ids, mask, **settings):
        rows, longest = torch.tensor(self.rows[: len(ids)]), settings["max_new_tokens"]
        begin = torch.full((len(ids), 1), 2) if self.config.is_encoder_decoder else ids
        return torch.cat([begin, rows[:, :longest]], dim=1)


def said(capsys, model, settings, tokenizer, count=3):
    batches = PromptCollator(padding_token(tokenizer), left=not model.config.is_encoder_decoder, multiple=1)
    prompts = Prompts([[5, 6, 7]] * count, [{}] * count, is_chat=True)
    batch = batches([(prompts[number], number) for number in range(count)])
    written = []
    device = torch.device("cpu")
    engine = SimpleNamespace(module=model, generate=model, gather_objects=lambda rows: [rows], device=device)
    folder = SimpleNamespace(write_predictions=lambda lines: written.extend(lines))
    data = SimpleNamespace(prompts=prompts, tokenizer=tokenizer)
    with patch("zerofit.training.generation.eval_batches", lambda *_, **__: iter([batch])):
        assert predict_texts(engine, data, count, folder, settings) == ["predictions.jsonl"]
    assert len(written) == count
    return capsys.readouterr().out


@pytest.mark.parametrize("encoder_decoder", [True, False])
def test_texts_that_do_not_end_are_counted(capsys, tmp_path, encoder_decoder):
    """The decoder's first token may be the end-of-text token itself, as that of BART and NLLB."""
    tokenizer = small_tokenizer(tmp_path)
    rows = [[9, 10, 11, 12], [9, 2, 1, 1], [9, 10, 11, 2]]
    option = "val_max_target_length" if encoder_decoder else "max_new_tokens"
    model = Writes(rows, encoder_decoder, eos_token_id=2)
    assert f"1 of 3 generated texts are cut at {option} = 4" in said(capsys, model, {"max_new_tokens": 4}, tokenizer)
    assert f"2 of 3 generated texts are cut at {option} = 3" in said(capsys, model, {"max_new_tokens": 3}, tokenizer)
    assert said(capsys, model, {"max_new_tokens": 4, "eos_token_id": [2, 12]}, tokenizer) == ""
    forced = Writes(rows, encoder_decoder, eos_token_id=2, forced_eos_token_id=2)
    assert "2 of 3 generated texts are cut" in said(capsys, forced, {"max_new_tokens": 4}, tokenizer)
    assert said(capsys, Writes(rows, encoder_decoder), {"max_new_tokens": 4}, tokenizer) == "", "there is no end"


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
