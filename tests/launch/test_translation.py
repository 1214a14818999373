"""Translation models from training to answers: the languages are said once, and every later launch knows them."""

import json
import string

import pytest
from helpers import completed, write_records
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    MBartTokenizer,
    NllbTokenizer,
)

from zerofit.cli import main as zerofit

PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", *string.ascii_letters]
LANGUAGES = {"nllb": ("eng_Latn", "deu_Latn"), "mbart": ("en_XX", "de_DE")}


def save_model(folder, kind):
    """A small model of random weights; of mBART the decoder's start depends on the language."""
    if kind == "nllb":
        tokenizer = NllbTokenizer(vocab={piece: number for number, piece in enumerate(PIECES)}, merges=[])
    else:
        tokenizer = MBartTokenizer(vocab=[(piece, -2.0 * (number > 3)) for number, piece in enumerate(PIECES)])
    config = AutoConfig.for_model(
        "m2m_100" if kind == "nllb" else "mbart", vocab_size=len(tokenizer), d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=2, forced_eos_token_id=None,
        decoder_start_token_id=2 if kind == "nllb" else None, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.long
@pytest.mark.parametrize("kind", LANGUAGES)
def test_the_language_of_training_is_that_of_every_answer(cache, tmp_path, capsys, kind):
    save_model(tmp_path / "base", kind)
    source, target = LANGUAGES[kind]
    rows = [{"translation": {"en": f"the cat {letter}", "de": f"die katze {letter}"}} for letter in PIECES[5:45]]
    common = ["--cache_dir", cache, "--precision", "fp32"]
    done = completed(
        tmp_path / "run", "--model_name_or_path", tmp_path / "base", "--train_file",
        write_records(tmp_path / "a.jsonl", rows), "--source_lang", source, "--target_lang", target,
        "--max_train_steps", "2", "--per_device_train_batch_size", "4", "--val_max_target_length", "5", *common,
        strategy="single", processes=1, task="seq2seq",
    )  # fmt: skip
    assert f"languages: {source} -> {target}" in done.stdout
    assert "generated texts are cut at val_max_target_length = 5" in done.stdout
    model, tokenizer = tmp_path / "run" / "model", AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == (source, target)
    code, settings = tokenizer.convert_tokens_to_ids(target), GenerationConfig.from_pretrained(model)
    key = "forced_bos_token_id" if kind == "nllb" else "decoder_start_token_id"
    assert (getattr(settings, key), settings.max_new_tokens) == (code, 5)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(model)
    ids = loaded.generate(**tokenizer("the cat", return_tensors="pt"))[0].tolist()
    assert ids.index(code) == (1 if kind == "nllb" else 0)
    if kind == "mbart":
        assert loaded.config.decoder_start_token_id == code
    asked = write_records(tmp_path / "asked.jsonl", [{"source": "the cat"}])
    completed(
        tmp_path / "answers", "--model_name_or_path", model, "--predict_file", asked, *common, strategy="single",
        processes=1, task="seq2seq",
    )  # fmt: skip
    (row,) = map(json.loads, (tmp_path / "answers" / "predictions.jsonl").read_text().splitlines())
    assert zerofit(["generate", "--model", str(model), "--prompt", "the cat"]) == 0
    written = tokenizer.decode(ids, skip_special_tokens=True).strip()
    assert written == row["prediction"]
    assert capsys.readouterr().out.rstrip().endswith(written)
