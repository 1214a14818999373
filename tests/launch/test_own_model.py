"""The model of one's own in docs/own-model, trained for real: the code travels with the weights, and loads again."""

import pytest
import torch
from folders import write_ported_model
from helpers import ROOT, launch, launched, updates
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.long
FOLDER = ROOT / "docs" / "own-model"
MODEL = ["--config_name", FOLDER, "--config_overrides", "vocab_size=300", "--tokenizer_name"]
DATA = ["--train_file", f"{ROOT}/zerofit/model/*.py", "--block_size", "32", "--per_device_train_batch_size", "2",
        "--global_batch_size", "4", "--max_eval_samples", "8", "--validation_split_percentage", "20",
        "--learning_rate", "1e-2", "--trust_remote_code", "--seed", "3"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(byte_tokenizer, tmp_path_factory):
    """(run folder, metrics) under ZeRO-3, with recomputed activations and packed documents."""
    output = tmp_path_factory.mktemp("own") / "run"
    flags = (*MODEL, byte_tokenizer, *DATA, "--max_train_steps", "12", "--gradient_checkpointing")
    return output, launch(output, *flags, strategy="zero3", processes=2)


def test_it_learns_and_what_is_written_loads_again(trained):
    output, lines = trained
    assert lines[-1]["eval_loss"] < lines[0]["eval_loss"] - 0.5
    assert (output / "model" / "modeling_small.py").read_text() == (FOLDER / "modeling_small.py").read_text()
    model = AutoModelForCausalLM.from_pretrained(output / "model", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    assert type(model).__name__ == "SmallForCausalLM"
    prompt = tokenizer("def forward(self, ", return_tensors="pt")
    with torch.no_grad():
        written = model.generate(**prompt, max_new_tokens=6, do_sample=False)
        plain = model.generate(**prompt, max_new_tokens=6, do_sample=False, use_cache=False)
    assert written.tolist() == plain.tolist(), "its cache is right"


def test_its_figures_are_those_of_one_process(trained, byte_tokenizer, tmp_path):
    flags = (*MODEL, byte_tokenizer, *DATA, "--max_train_steps", "12")
    lines = launch(tmp_path / "run", *flags, strategy="single", processes=1)
    for ours, theirs in zip(updates(lines), updates(trained[1]), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_its_code_does_not_run_unasked(byte_tokenizer, tmp_path):
    flags = [flag for flag in DATA if flag != "--trust_remote_code"]
    done = launched(tmp_path / "run", *MODEL, byte_tokenizer, *flags)
    assert done.returncode != 0
    assert f"error: config_name = {str(FOLDER)!r} has its own code" in done.stderr
    assert "add --trust_remote_code" in done.stderr


def test_a_new_layer_of_the_documents_trains(byte_tokenizer, tmp_path):
    """The code of docs/porting-a-model.md."""
    (tmp_path / "my-model").mkdir()
    write_ported_model(tmp_path / "my-model")
    model = ["--config_name", tmp_path / "my-model", "--tokenizer_name", byte_tokenizer]
    lines = launch(tmp_path / "run", *model, *DATA, "--max_train_steps", "8", strategy="zero3", processes=2)
    assert lines[-1]["eval_loss"] < lines[0]["eval_loss"] - 0.3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", trust_remote_code=True)
    assert type(model.transformer.ln_f).__name__ == "RMSNorm"
