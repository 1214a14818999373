"""A run whose optimizer keeps means of rows and columns: under ddp as in one process, cut off and resumed."""

import shutil

import pytest
from helpers import ROOT, launch, launched, updates

RUN = ["--config_name", "gpt2", "--config_overrides", "n_layer=2,n_head=2,n_embd=64,n_positions=64",
       "--train_file", ROOT / "docs" / "fine-tune.md", "--document_separator", "line",
       "--train_tokenizer_vocab_size", "301", "--per_device_train_batch_size", "2", "--global_batch_size", "4",
       "--max_train_steps", "6", "--save_steps", "3", "--learning_rate", "1e-3",
       "--weight_decay", "0.1", "--precision", "fp32", "--sample_tokens", "0", "--optim", "adafactor"]  # fmt: skip


def figures(lines: list[dict]) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in updates(lines)]


@pytest.mark.long
def test_runs_agree_and_resume(cache, tmp_path):
    """With dropout to the bit; without it, on one process what two have begun, within 1e-5."""
    run = [*RUN, "--cache_dir", cache]
    smooth = [*run, "--config_overrides", f"{RUN[3]},resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"]
    whole = launch(tmp_path / "whole", *run, strategy="single", processes=1)
    alone, both = (launch(tmp_path / name, *smooth, strategy=name, processes=number)
                   for name, number in (("single", 1), ("ddp", 2)))  # fmt: skip
    assert len(figures(whole)) == 6
    for ours, theirs in zip(figures(both), figures(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)

    for name in ("whole", "ddp"):
        shutil.rmtree(tmp_path / name / "checkpoints" / "update_00000006")
        shutil.rmtree(tmp_path / name / "model")
    again = launch(tmp_path / "whole", *run, strategy="single", processes=1)
    assert figures(again) == figures(whole)
    other = launched(tmp_path / "ddp", *smooth, "--optim", "adamw", strategy="single", processes=1)
    assert other.returncode == 2
    assert "optim was 'adafactor', now 'adamw'" in other.stderr
    moved = launch(tmp_path / "ddp", *smooth, strategy="single", processes=1)
    assert len(figures(moved)) == 6
    for ours, theirs in zip(figures(moved), figures(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
