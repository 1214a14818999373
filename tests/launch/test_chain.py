"""From Meta's weights and a text to a continued model: convert, prepare, train under ZeRO, go on elsewhere, export."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import ROOT, launch, launched, metrics, updates

from train.cli import main as zerofit
from train.recipe.parse import parse_recipe
from train.recipe.tasks import ClmRecipe

SHARED = ROOT.parent / "shared" / "data"
META, HF = SHARED / "models" / "stories260K" / "meta", SHARED / "models" / "stories260K" / "hf"
RECIPE = ROOT / "recipes" / "clm" / "stories-continual.yaml"

pytest.importorskip("megatron.core", reason="corpora take the extra [megatron]")
pytestmark = pytest.mark.skipif(not META.is_dir(), reason="no ../shared/data")


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> tuple[Path, str]:
    """(the converted model, a corpus made with its tokenizer), the weights cut for two processes on the way."""
    folder = tmp_path_factory.mktemp("chain")
    steps = [
        ["convert", "meta-to-hf", "--input", META, "--output", folder / "whole"],
        ["convert", "hf-to-meta", "--input", folder / "whole", "--output", folder / "cut", "--shards", "2"],
        ["convert", "meta-to-hf", "--input", folder / "cut", "--output", folder / "hf"],
        ["prepare", "--input", SHARED / "text" / "tinystories_a.txt", "--output_prefix", folder / "stories",
         "--tokenizer", folder / "hf", "--append_eod", "--workers", "2"],
    ]  # fmt: skip
    for step in steps:
        assert zerofit([str(word) for word in step]) == 0
    assert len(list((folder / "cut").glob("consolidated.*.pth"))) == 2
    return folder / "hf", f"{folder}/stories_text_document"


def test_the_converted_model_is_the_published_one(chain):
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(3, 300)[None]
    with torch.no_grad():
        ours, theirs = (AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (chain[0], HF))
    assert (ours - theirs).abs().max() < 1e-5


def test_it_goes_on_with_its_corpus_under_any_strategy(chain, tmp_path):
    """zero2 on 2 processes against zero3 on 2, which is left half way and goes on alone."""
    from transformers import AutoModelForCausalLM

    model, corpus = chain
    run = ["--config", RECIPE, "--model_name_or_path", model, "--data_path", corpus, "--max_train_steps", "8",
           "--eval_steps", "8", "--max_eval_samples", "40", "--save_steps", "4", "--record_samples", "true",
           "--sample_tokens", "0", "--sample_prompt", "null"]  # fmt: skip
    whole = launch(tmp_path / "zero2", *run, strategy="zero2", processes=2)
    parse_recipe(ClmRecipe, ["--config", str(tmp_path / "zero2" / "recipe.yaml")])
    losses = [line["loss"] for line in updates(whole)]
    assert 1.2 < losses[0] < 1.6, "its own loss on such stories, and not that of another model"
    assert whole[-1]["eval_loss"] < whole[0]["eval_loss"] - 0.005

    output = tmp_path / "zero3"
    first = updates(launch(output, *run, strategy="zero3", processes=2))
    shutil.rmtree(output / "checkpoints" / "update_00000008")
    shutil.rmtree(output / "model")  # as if it had been killed before
    done = launched(output, *run, strategy="single", processes=1)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "after update 4, written under zero3" in done.stdout
    for other in (first, updates(metrics(output))):
        assert [line["update"] for line in other] == list(range(1, 9))
        assert max(abs(a / b["loss"] - 1) for a, b in zip(losses, other)) < 1e-5
    ledgers = [[json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
               for folder in (tmp_path / "zero2", output)]  # fmt: skip
    assert ledgers[0] == ledgers[1]
    assert [line["samples"] for line in ledgers[0]] == [list(range(8 * k, 8 * k + 8)) for k in range(8)]

    for step in (
        ["hf-to-meta", output / "model", tmp_path / "meta"],
        ["meta-to-hf", tmp_path / "meta", tmp_path / "hf"],
    ):
        assert zerofit(["convert", step[0], "--input", str(step[1]), "--output", str(step[2])]) == 0
    weights = [(folder / "model.safetensors").read_bytes() for folder in (output / "model", tmp_path / "hf")]
    assert weights[0] == weights[1]

    exported = AutoModelForCausalLM.from_pretrained(output / "model")
    text = (SHARED / "text" / "tinystories_a.txt").read_text().split("<|endoftext|>")[1]
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(output / "model")(text, return_tensors="pt")["input_ids"][:, :512]
    assert exported(ids, labels=ids).loss.item() < 1.5


def test_a_padded_vocabulary_is_whole_again_in_the_exported_model(chain, tmp_path):
    """From scratch under ZeRO-3: 512 tokens in 600 rows, and 512 in model/ and in the checkpoint's model/."""
    from transformers import AutoModelForCausalLM

    model, corpus = chain
    output = tmp_path / "padded"
    launch(
        output, "--config_name", "gpt2", "--config_overrides", "n_layer=2,n_head=2,n_embd=32,n_positions=64",
        "--tokenizer_name", model, "--data_path", corpus, "--make_vocab_size_divisible_by", "200",
        "--block_size", "64", "--max_train_steps", "4", "--save_steps", "4", "--max_eval_batches", "2",
        "--per_device_train_batch_size", "2",
        strategy="zero3", processes=2,
    )  # fmt: skip
    for folder in (output / "model", output / "checkpoints" / "latest" / "model"):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert loaded.config.vocab_size == loaded.get_input_embeddings().weight.shape[0] == 512
