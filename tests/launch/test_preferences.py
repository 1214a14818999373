"""Pairs of answers, launched: the reference is the model before training, and is measured once, also after a kill."""

import pytest
from helpers import main_of, metrics, updates
from test_agreement import pairs_of_answers

from zerofit.training import causal


@pytest.mark.long
def test_what_was_measured_before_a_kill_is_not_measured_again(llama, material, tmp_path, monkeypatch):
    pairs, measured = pairs_of_answers(tmp_path, material), []
    plain = causal.log_probabilities

    def counted(model, batch):
        if len(measured) == kill_after:
            raise KeyboardInterrupt
        measured.extend([batch])
        return plain(model, batch)

    monkeypatch.setattr(causal, "log_probabilities", counted)
    monkeypatch.setattr(causal, "STORED_EVERY", 16)
    common = [*map(str, (
        "--model_name_or_path", llama, "--train_file", pairs, "--preference_loss", "dpo", "--block_size", "128",
        "--chat_template", "none", "--global_batch_size", "8", "--per_device_train_batch_size", "2",
        "--learning_rate", "1e-3", "--max_train_steps", "2", "--validation_split_percentage", "0",
        "--cache_dir", tmp_path / "cache",
    ))]  # fmt: skip
    kill_after = 5  # batches of 8 pairs: two parts are stored, and half of a third is lost
    assert main_of("dpo")([*common, "--output_dir", str(tmp_path / "run")]) != 0
    measured.clear()
    kill_after = -1
    assert main_of("dpo")([*common, "--output_dir", str(tmp_path / "run")]) == 0
    num_pairs = sum(len(batch.samples) for batch in measured)
    total = len(pairs.read_text().splitlines())
    assert num_pairs == total - 32
    measured.clear()
    assert main_of("dpo")([*common, "--output_dir", str(tmp_path / "again")]) == 0
    assert not measured
    undisturbed = [*common, "--output_dir", str(tmp_path / "other"), "--cache_dir", str(tmp_path / "other_cache")]
    assert main_of("dpo")(undisturbed) == 0
    assert sum(len(batch.samples) for batch in measured) == total
    losses = [[line["loss"] for line in updates(metrics(tmp_path / name))] for name in ("run", "again", "other")]
    assert losses[0] == losses[1] == losses[2]
