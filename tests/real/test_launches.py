"""Real launches on published data and weights: known losses, known files, a language that the model has never seen."""

import json
from pathlib import Path

import pytest
import torch
from folders import tools_in_this_process
from helpers import launch, updates
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from zerofit.cli import main as zerofit

pytestmark = pytest.mark.real

STORIES = "text/tinystories_a.txt"


@pytest.fixture(scope="module")
def stories(real) -> Path:
    """The published Llama of 260,032 parameters."""
    return real / "models" / "stories260K" / "hf"


@pytest.mark.parametrize(("reader", "loss"), [("AutoTokenizer", 1.302), ("the model's own", 1.273)])
def test_the_published_llama_has_its_known_loss(stories, real, cache, tmp_path, reader, loss):
    """About 1.30 nats a token on the first 40 stories, as AutoTokenizer reads them.

    Its folder has a bare tokenizer.model, and AutoTokenizer leaves out the space before the first word and the
    beginning-of-text token; read as Llama's tokenizer, which zerofit does, the same weights do a little better.
    """
    named = []
    if reader == "AutoTokenizer":
        AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "tokenizer")
        named = ["--tokenizer_name", tmp_path / "tokenizer"]
    lines = launch(
        tmp_path / "run", "--model_name_or_path", stories, "--train_file", real / STORIES, "--validation_file",
        real / STORIES, "--max_eval_samples", "40", "--max_train_samples", "8", "--packing", "none", "--append_eos",
        "false", "--block_size", "512", "--max_train_steps", "1", "--learning_rate", "0", "--cache_dir", cache, *named,
    )  # fmt: skip
    assert lines[0]["eval_loss"] == pytest.approx(loss, abs=0.002)
    assert lines[-1]["eval_loss"] == pytest.approx(lines[0]["eval_loss"], rel=1e-6), "at a learning rate of 0"


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_the_published_llama_continues_below_that(stories, real, cache, tmp_path, strategy):
    lines = launch(
        tmp_path / "run", "--model_name_or_path", stories, "--train_file", real / STORIES, "--max_eval_samples", "40",
        "--packing", "none", "--append_eos", "false", "--block_size", "256", "--max_train_steps", "80",
        "--per_device_train_batch_size", "8", "--learning_rate", "3e-4", "--lr_scheduler_type", "cosine",
        "--num_warmup_steps", "5", "--eval_steps", "40", "--cache_dir", cache, strategy=strategy, processes=2,
    )  # fmt: skip
    held = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(held) == 3
    assert held[-1] < held[0] - 0.005
    assert held[0] == pytest.approx(1.27, abs=0.05), "the first 256 tokens of other stories"


def test_metas_weights_go_on_with_their_corpus(stories, real, tmp_path):
    """Converted, and continued on samples that begin anywhere: 1.41 nats, and not the 1.30 of whole stories."""
    pytest.importorskip("megatron.core", reason="corpora take the extra [megatron]")
    steps = [
        ["convert", "meta-to-hf", "--input", stories.parent / "meta", "--output", tmp_path / "hf"],
        ["prepare", "--input", real / STORIES, "--output_prefix", tmp_path / "stories", "--tokenizer",
         tmp_path / "hf", "--append_eod", "--workers", "2"],
    ]  # fmt: skip
    with tools_in_this_process():
        for step in steps:
            assert zerofit([str(word) for word in step]) == 0
    lines = launch(
        tmp_path / "run", "--model_name_or_path", tmp_path / "hf", "--data_path", tmp_path / "stories_text_document",
        "--split", "90,10,0", "--block_size", "512", "--reset_position_ids", "true", "--reset_attention_mask", "true",
        "--eod_mask_loss", "true", "--per_device_train_batch_size", "4", "--max_train_steps", "8", "--eval_steps", "8",
        "--max_eval_samples", "40", "--learning_rate", "2e-4", strategy="zero3", processes=2,
    )  # fmt: skip
    assert 1.2 < updates(lines)[0]["loss"] < 1.6, "its own loss on such stories, and not that of another model"
    assert lines[-1]["eval_loss"] < lines[0]["eval_loss"] - 0.005


def test_wikitext_with_the_tokenizer_of_gpt2(real, cache, tmp_path):
    lines = launch(
        tmp_path / "run", "--config_name", "gpt2", "--config_overrides", "n_layer=1,n_head=2,n_embd=32",
        "--tokenizer_name", real / "tokenizers" / "gpt2", "--train_file", real / "wikitext-2" / "test.txt",
        "--validation_file", real / "wikitext-2" / "valid.txt", "--max_train_steps", "12", "--block_size", "128",
        "--max_eval_samples", "1", "--eval_steps", "100", "--eval_on_start", "false", "--packing", "concatenate",
        "--document_separator", "paragraph", "--learning_rate", "3e-3", "--per_device_train_batch_size", "4",
        "--max_train_samples", "300", "--cache_dir", cache,
    )  # fmt: skip
    losses = [line["loss"] for line in updates(lines)]
    assert losses[0] == pytest.approx(10.8, abs=0.2), "ln 50257 is 10.8"
    assert losses[-1] < losses[0] - 0.5


def test_the_files_of_mrpc(real, cache, tmp_path):
    """Every one of the 408 held-out pairs once, in the order of the file, whose quotation marks stand alone."""
    launch(
        tmp_path / "run", "--model_type", "bert", "--train_tokenizer_vocab_size", "2000", "--config_overrides",
        "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64", "--max_length", "160",
        "--task_name", "mrpc", "--train_file", real / "glue/MRPC/train.tsv", "--validation_file",
        real / "glue/MRPC/dev.tsv", "--max_train_steps", "4", "--cache_dir", cache, task="cls",
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 408
    assert rows[0]["#1 String"].startswith("He said the foodservice pie business")
    assert sum(row["label"] == "equivalent" for row in rows) == 279


def test_an_adapter_learns_japanese_and_is_merged(stories, real, cache, tmp_path):
    """Under ZeRO-3, in Llama-2's chat form; the base has never seen Japanese."""
    output, chats = tmp_path / "run", tmp_path / "chats.jsonl"
    with chats.open("w") as file:
        for record in json.loads((real / "instruct" / "ja_qa.json").read_text()):
            turns = [("user", record["instruction"]), ("assistant", record["output"])]  # the passages are too long
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    lines = launch(
        output, "--model_name_or_path", stories, "--train_file", chats, "--lora",
        "--chat_template", "llama-2-chat", "--system_prompt", "あなたは誠実で優秀な日本人のアシスタントです。",
        "--max_train_samples", "300", "--max_eval_samples", "20", "--block_size", "512", "--max_train_steps", "30",
        "--per_device_train_batch_size", "2", "--learning_rate", "1e-2", "--gradient_checkpointing",
        "--cache_dir", cache, strategy="zero3", processes=2,
    )  # fmt: skip
    held = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert held[-1] < held[0] - 5
    with tools_in_this_process():
        assert zerofit(["merge", "--adapter", str(output / "model"), "--output", str(tmp_path / "merged")]) == 0
    base, merged = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (stories, tmp_path / "merged")
    )
    ids = torch.arange(3, 67).reshape(2, 32)
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, output / "model").eval()(ids).logits
        torch.testing.assert_close(merged(ids).logits, adapted, rtol=0, atol=1e-5)
    assert "[INST]" in AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
