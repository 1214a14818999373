"""Adapters trained for real, one family under each strategy, and what can be done with them afterwards."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import BIN, environment, launch, launched, metrics, tiny_deberta, tiny_model
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, BlenderbotTokenizer

TEXT = ("--train_file", "{shared}/text/tinystories_a.txt", "--block_size", "64", "--max_eval_samples", "8")
PAIRS = ("--train_file", "{shared}/dialogue/valid_freq.json", "--max_source_length", "48", "--max_target_length", "24",
         "--max_train_samples", "100", "--max_eval_samples", "11", "--predict_with_generate", "false")  # fmt: skip
MRPC = ("--task_name", "mrpc", "--train_file", "{shared}/glue/MRPC/train.tsv", "--validation_file",
        "{shared}/glue/MRPC/dev.tsv", "--max_length", "64", "--max_train_samples", "100",
        "--max_eval_samples", "31")  # fmt: skip
FAMILIES = {  # task, strategy, data, what has an adapter
    "gpt_neox": ("clm", "ddp", TEXT, "query_key_value"),
    "gpt2": ("clm", "zero2", TEXT, "c_attn"),
    "deberta": ("cls", "zero3", MRPC, "query_proj, key_proj, value_proj"),
    "blenderbot": ("seq2seq", "zero3_offload", PAIRS, "q_proj, k_proj, v_proj, out_proj"),
}


@pytest.fixture(scope="module")
def bases(shared, tmp_path_factory) -> Path:
    """Random weights of each family, OpenCALM's and BlenderBot's shapes scaled down."""
    folder = tmp_path_factory.mktemp("bases")
    tiny_deberta(folder / "deberta", num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "deberta")
    for family in ("gpt_neox", "gpt2"):
        tiny_model(family, vocab_size=600).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    config = AutoConfig.for_model(
        "blenderbot", vocab_size=8008, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder / "blenderbot")
    vocabulary = shared / "tokenizers" / "blenderbot-400M-distill"
    BlenderbotTokenizer.from_pretrained(vocabulary).save_pretrained(folder / "blenderbot")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_trains_with_its_preset(bases, shared, cache, tmp_path, family):
    task, strategy, data, targets = FAMILIES[family]
    output = tmp_path / "run"
    done = launched(
        output, "--model_name_or_path", bases / family, "--lora", *(flag.format(shared=shared) for flag in data),
        "--per_device_train_batch_size", "2", "--max_train_steps", "30", "--learning_rate", "3e-2", "--save_steps",
        "10", "--save_total_limit", "1", "--cache_dir", cache, strategy=strategy, processes=2, task=task,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"modules: {targets} (the preset of this architecture)" in done.stderr + done.stdout
    held = [line["eval_loss"] for line in metrics(output) if "eval_loss" in line]
    assert held[-1] < held[0] - 0.01
    latest = (output / "checkpoints" / "latest").resolve()
    assert latest.name == "update_00000030"
    assert (latest / "model" / "adapter_model.safetensors").is_file()
    assert not (output / "checkpoints" / "update_00000010").exists()


def zerofit(*words: object) -> subprocess.CompletedProcess:
    command = [str(BIN / "zerofit"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())


@pytest.fixture(scope="module")
def answering(stories, shared, cache, tmp_path_factory) -> Path:
    """The folder of an adapter trained under ZeRO-3 on Japanese questions and answers, in Llama-2's chat form."""
    folder = tmp_path_factory.mktemp("answering")
    output, chats = folder / "run", folder / "chats.jsonl"
    with chats.open("w") as file:
        for record in json.loads((shared / "instruct" / "ja_qa.json").read_text()):
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
    assert held[-1] < held[0] - 5  # the base has never seen Japanese
    return output / "model"


def test_a_merged_adapter_answers_as_the_adapter_does(answering, stories, tmp_path):
    done = zerofit("merge", "--adapter", answering, "--output", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    base = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = torch.arange(3, 67).reshape(2, 32)
    with torch.no_grad():
        before = base(ids).logits
        adapter = PeftModel.from_pretrained(base, answering).eval()(ids).logits
        torch.testing.assert_close(merged(ids).logits, adapter, rtol=0, atol=1e-5)
    assert (adapter - before).abs().max() > 1
    assert "[INST]" in AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template


def test_an_adapter_of_another_base_is_refused(answering, stories, tmp_path):
    other = AutoModelForCausalLM.from_pretrained(stories)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    other.save_pretrained(tmp_path / "other")
    done = zerofit("merge", "--adapter", answering, "--output", tmp_path / "merged", "--base", tmp_path / "other")
    assert done.returncode == 2
    assert "another base" in done.stderr
    assert not (tmp_path / "merged").exists()


def test_generate_speaks_in_the_form_that_was_trained(answering):
    done = zerofit("generate", "--model", answering, "--prompt", "日本の首都は?", "--max_new_tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "template" in done.stderr
