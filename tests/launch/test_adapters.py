"""Adapters trained for real, one family under each strategy.

(What is done with them afterwards: test_agreement.py.)
"""

from pathlib import Path

import pytest
import torch
from helpers import completed, launch, metrics, tiny_deberta, tiny_model
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, BlenderbotTokenizer

TEXT = ("--train_file", "{material}/text/train.txt", "--block_size", "64", "--max_eval_samples", "8")
PAIRS = ("--train_file", "{material}/dialogue/keyed.json", "--max_source_length", "48", "--max_target_length", "24",
         "--max_train_samples", "100", "--max_eval_samples", "11", "--predict_with_generate", "false")  # fmt: skip
MRPC = ("--task_name", "mrpc", "--train_file", "{material}/glue/MRPC/train.tsv", "--validation_file",
        "{material}/glue/MRPC/dev.tsv", "--max_length", "64", "--max_train_samples", "100",
        "--max_eval_samples", "31", "--precision", "bf16")  # fmt: skip
FAMILIES = {  # task, strategy, data, what has an adapter
    "gpt_neox": ("clm", "ddp", TEXT, "query_key_value"),
    "gpt2": ("clm", "zero2", TEXT, "c_attn"),
    "deberta": ("cls", "zero3", MRPC, "query_proj, key_proj, value_proj"),
    "blenderbot": ("seq2seq", "zero3_offload", PAIRS, "q_proj, k_proj, v_proj, out_proj"),
}


@pytest.fixture(scope="module")
def bases(material, tmp_path_factory) -> Path:
    """Random weights of each family, OpenCALM's and BlenderBot's shapes scaled down."""
    folder = tmp_path_factory.mktemp("bases")
    tiny_deberta(folder / "deberta", num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "deberta")
    for family in ("gpt_neox", "gpt2"):
        tiny_model(family, vocab_size=600).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    pairs = BlenderbotTokenizer.from_pretrained(material / "tokenizers" / "blenderbot")
    pairs.save_pretrained(folder / "blenderbot")
    config = AutoConfig.for_model(
        "blenderbot", vocab_size=len(pairs), d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder / "blenderbot")
    return folder


@pytest.mark.long  # a Llama's under ZeRO-3, to the last digit: test_agreement.py
@pytest.mark.parametrize(
    ("family", "processes"), [("blenderbot", 1), ("deberta", 1), *((family, 2) for family in FAMILIES)]
)
def test_each_family_trains_with_its_preset(bases, material, cache, tmp_path, family, processes):
    task, strategy, data, targets = FAMILIES[family]
    output = tmp_path / "run"
    done = completed(
        output, "--model_name_or_path", bases / family, "--lora", *(flag.format(material=material) for flag in data),
        "--per_device_train_batch_size", "2", "--global_batch_size", "4", "--max_train_steps", "30",
        "--learning_rate", "3e-2", "--save_steps", "10", "--save_total_limit", "1", "--cache_dir", cache,
        strategy=strategy, processes=processes, task=task,
    )  # fmt: skip
    assert f"modules: {targets} (the preset of this architecture)" in done.stderr + done.stdout
    held = [line["eval_loss"] for line in metrics(output) if "eval_loss" in line]
    assert held[-1] < held[0] - 0.01
    latest = (output / "checkpoints" / "latest").resolve()
    assert latest.name == "update_00000030"
    assert (latest / "model" / "adapter_model.safetensors").is_file()
    assert not (output / "checkpoints" / "update_00000010").exists()
    if processes == 2:
        flags = ("--config", output / "recipe.yaml", "--model_name_or_path", output, "--evaluate_only")
        (line,) = launch(tmp_path / "again", *flags, strategy=strategy, processes=2, task=task)
        assert line["eval_loss"] == pytest.approx(held[-1], rel=1e-6)
