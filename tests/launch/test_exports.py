"""What a run leaves when a file beside the weights cannot be written: the weights, its state, a message, and 86."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import completed, launch, main_of, metrics, small_sizes, write_records
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.configuration_utils import PreTrainedConfig

FULL = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
QUOTA = OSError(errno.EDQUOT, "Disk quota exceeded")
FORBIDDEN = PermissionError(errno.EACCES, "Permission denied")
LONG = pytest.mark.long
# {what fails at the end: (owner and name of what is called, the error, what of it the message says)}
# Of the other files of model/: unit/test_exported.py.
FAILURES = {
    "config.json": ((PreTrainedConfig, "save_pretrained"), ValueError("generation parameters"), "config.json"),
    "review": (("zerofit.checkpoint.exporter.review_export",), RuntimeError("odd"), "a look at the files"),
    "plot": (("zerofit.training.export.plot_run",), FULL, "loss.png"),
    "metrics": (("zerofit.record.metrics.JsonlFile.close",), READ_ONLY, "metrics.jsonl"),
}


def fails(error: Exception):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.fixture
def options(llama, material, cache) -> list[str]:
    words = [
        "--model_name_or_path", llama, "--train_file", material / "text" / "train.txt", "--block_size", "32",
        "--per_device_train_batch_size", "2", "--max_train_steps", "2", "--cache_dir", cache, "--precision", "fp32",
        "--validation_split_percentage", "0", "--max_train_samples", "40", "--sample_tokens", "0",
    ]  # fmt: skip
    return list(map(str, words))


def copied(run: Path) -> Path:
    """A copy of a run, which no process has locked."""
    return Path(shutil.copytree(run, run.with_name("copy"), symlinks=True))


def recorded(run: Path) -> dict:
    return json.loads((run / "environment.json").read_text())


def at_the_end(monkeypatch, patch) -> None:
    """Apply a patch when training has ended."""
    from zerofit.training import export

    true = export._export_model

    def patched(*args):
        patch()
        return true(*args)

    monkeypatch.setattr(export, "_export_model", patched)


@pytest.mark.parametrize(
    "name", [name if name in ("config.json", "plot") else pytest.param(name, marks=LONG) for name in FAILURES]
)
def test_no_file_beside_the_weights_costs_them(options, tmp_path, monkeypatch, capsys, name):
    target, error, said = FAILURES[name]
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        at_the_end(patched, lambda: patched.setattr(*target, fails(error)))
        assert main_of("clm")([*options, "--output_dir", str(run)]) == 86
    shown = capsys.readouterr().out
    of_model = not said.endswith((".png", ".jsonl"))
    assert f"not written: {'model/: ' * of_model}{said} (" in shown, shown[-2000:]
    assert recorded(run)["exit_code"] == 86
    assert recorded(run)["finished"] is not of_model
    weights = load_file(run / "model" / "model.safetensors")
    assert len(weights) > 20
    assert (run / "checkpoints" / "latest" / "state").is_dir() == of_model, "it is kept where model/ is not whole"
    assert len(metrics(run)) == 2
    if name == "config.json":
        run = copied(run)
        shown = completed(run, *options).stdout
        assert "there was nothing left to train" in shown
        assert recorded(run)["finished"] is True
        again = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32).state_dict()
        assert all(torch.equal(weight, again[key]) for key, weight in weights.items())


SAVE = "zerofit.model.export._save_weights_alone"


def test_weights_that_cannot_be_exported_are_in_a_checkpoint(options, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    error = RuntimeError("a conversion has no way back")
    at_the_end(monkeypatch, lambda: monkeypatch.setattr(SAVE, fails(error)))
    assert main_of("clm")([*options, "--output_dir", str(run)]) == 86
    shown = capsys.readouterr().out
    assert f"not written: model ({error})" in shown
    assert f"model/ is not there; the same command exports again, from {run}/checkpoints/update_00000002" in shown
    monkeypatch.undo()
    run = copied(run)
    assert "there was nothing left to train" in completed(run, *options).stdout
    assert load_file(run / "model" / "model.safetensors")


@pytest.mark.parametrize("error", [FULL, *(pytest.param(each, marks=LONG) for each in (READ_ONLY, QUOTA, FORBIDDEN))])
def test_on_a_disk_that_takes_nothing_the_last_good_state_stays(options, tmp_path, monkeypatch, capsys, error):
    run, always = tmp_path / "run", ["--save_steps", "1", "--save_strategy", "steps", "--max_train_steps", "3"]

    def patch() -> None:
        for target in (SAVE, "zerofit.checkpoint.writer.write_shard", "zerofit.record.run_folder.atomic_file"):
            monkeypatch.setattr(target, fails(error))

    from zerofit.checkpoint.manager import CheckpointManager

    save = CheckpointManager.save

    def last_fails(self, *args):
        if self.state.updates == 3:
            assert not self.writer.wait()  # update 2 is written by a thread
            patch()
        save(self, *args)

    monkeypatch.setattr(CheckpointManager, "save", last_fails)
    assert main_of("clm")([*options, *always, "--output_dir", str(run)]) == 86
    shown = capsys.readouterr().out
    for what in ("model", "loss.png", "environment.json"):
        assert f"not written: {what} (" in shown, shown[-2000:]
    assert f"from {run}/checkpoints/update_00000002" in shown, shown[-2000:]
    assert (run / "checkpoints" / "update_00000002" / "state").is_dir()
    monkeypatch.undo()
    run = copied(run)
    lines = launch(run, *options, *always)
    assert [line["update"] for line in lines] == [1, 2, 3]
    assert recorded(run)["finished"] is True


@pytest.fixture
def labelled(cache, tmp_path) -> list:
    """Options of two updates on sentences with labels."""
    records = [
        {"sentence": f"number {index} is {'odd' if index % 2 else 'even'}", "label": index % 2} for index in range(40)
    ]
    return ["--train_file", write_records(tmp_path / "train.jsonl", records), "--validation_split_percentage", "20",
            "--per_device_train_batch_size", "4", "--max_train_steps", "2", "--cache_dir", cache, "--precision",
            "fp32"]  # fmt: skip


def test_predictions_that_cannot_be_written_end_no_run(labelled, pairs_tokenizer, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shape = "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64"
    words = ["--model_type", "bert", "--config_overrides", shape, "--tokenizer_name", pairs_tokenizer, *labelled]
    monkeypatch.setattr("zerofit.record.run_folder.RunFolder.new_file", fails(FULL))
    assert main_of("cls")(list(map(str, [*words, "--output_dir", run]))) == 86
    assert "not written: predictions.jsonl (" in capsys.readouterr().out
    assert load_file(run / "model" / "model.safetensors")
    assert (run / "model" / "config.json").is_file()


def test_weights_keep_the_names_that_they_were_loaded_with(labelled, pairs_tokenizer, tmp_path):
    """Under ZeRO-3 transformers would write LayerNorm.gamma, a name of old."""
    base = tmp_path / "bert"
    config = AutoConfig.for_model("bert", **small_sizes("bert", vocab_size=400))
    AutoModelForSequenceClassification.from_config(config).save_pretrained(base)
    AutoTokenizer.from_pretrained(pairs_tokenizer).save_pretrained(base)
    completed(tmp_path / "run", "--model_name_or_path", base, *labelled, strategy="zero3", processes=2, task="cls")
    stored = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "run" / "model"))
    before, after = ({name: weight.shape for name, weight in weights.items()} for weights in stored)
    assert before == after
