"""What a run leaves when a file beside the weights cannot be written: the weights, its state, a message, and 86."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from helpers import completed, launch, main_of, metrics, small_sizes, write_records
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationConfig

FULL = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
QUOTA = OSError(errno.EDQUOT, "Disk quota exceeded")
FORBIDDEN = PermissionError(errno.EACCES, "Permission denied")
# {what fails at the end: (owner and name of what is called, the error, what of it the message says)}
FAILURES = {
    "config.json": ((PreTrainedConfig, "save_pretrained"), ValueError("generation parameters"), "config.json"),
    "generation": ((GenerationConfig, "save_pretrained"), ValueError("it is invalid"), "generation_config.json"),
    "tokenizer": ((PreTrainedTokenizerBase, "save_pretrained"), TypeError("no JSON"), "the tokenizer"),
    "chat template": ((PreTrainedTokenizerBase, "save_chat_templates"), QUOTA, "the tokenizer"),
    "tokenizer.model": (("zerofit.model.export._copy_sentencepiece_model",), FORBIDDEN, "tokenizer.model"),
    "model card": (("zerofit.checkpoint.exporter.model_card",), KeyError("packages"), "README.md"),
    "card's file": (("zerofit.checkpoint.exporter.write_card",), FULL, "README.md"),
    "review": (("zerofit.checkpoint.exporter.review_export",), RuntimeError("odd"), "a look at the files"),
    "plot": (("zerofit.training.export.plot_run",), FULL, "loss.png"),
    "a bug of the plot": (("zerofit.training.export.plot_run",), IndexError("odd"), "loss.png"),
    "metrics": (("zerofit.record.metrics.JsonlFile.close",), READ_ONLY, "metrics.jsonl"),
}


CENTRAL = ("config.json", "plot")
LONG = pytest.mark.long


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


@pytest.mark.parametrize("name", [name if name in CENTRAL else pytest.param(name, marks=LONG) for name in FAILURES])
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


def test_predictions_that_cannot_be_written_end_no_run(cache, pairs_tokenizer, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    records = [{"sentence": f"number {index} is {'odd' if index % 2 else 'even'}", "label": index % 2}
               for index in range(40)]  # fmt: skip
    shape = "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64"
    words = [
        "--model_type", "bert", "--config_overrides", shape, "--tokenizer_name", pairs_tokenizer,
        "--train_file", write_records(tmp_path / "train.jsonl", records), "--validation_split_percentage", "20",
        "--per_device_train_batch_size", "4", "--max_train_steps", "2", "--cache_dir", cache, "--precision", "fp32",
        "--output_dir", run,
    ]  # fmt: skip
    monkeypatch.setattr("zerofit.record.run_folder.RunFolder.new_file", fails(FULL))
    assert main_of("cls")(list(map(str, words))) == 86
    assert "not written: predictions.jsonl (" in capsys.readouterr().out
    assert load_file(run / "model" / "model.safetensors")
    assert (run / "model" / "config.json").is_file()


# ------------------------------------------------------------------------------------------------------------- names

# {base: (task, family, changes to a small configuration, class of the stored model, other names in its file)}
BASES = {
    "bert": ("cls", "bert", {}, "AutoModelForSequenceClassification", {}),
    "old bert": ("cls", "bert", {}, "AutoModelForSequenceClassification",
                 {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}),
    "old bert's body": ("cls", "bert", {}, "AutoModelForMaskedLM", {"LayerNorm.weight": "LayerNorm.gamma"}),
    "deberta": ("cls", "deberta-v2", {"relative_attention": True, "pos_att_type": "p2c|c2p"}, "AutoModelForMaskedLM",
                {}),
    "gpt2's body": ("clm", "gpt2", {}, "AutoModel", {}),
    "gpt_neox": ("clm", "gpt_neox", {"tie_word_embeddings": False}, "AutoModelForCausalLM", {}),
    "tied llama": ("clm", "llama", {"tie_word_embeddings": True}, "AutoModelForCausalLM", {}),
    "mixtral": ("clm", "mixtral", {}, "AutoModelForCausalLM", {}),
    "untied t5": ("seq2seq", "t5", {"tie_word_embeddings": False, "decoder_start_token_id": 0},
                  "AutoModelForSeq2SeqLM", {}),
    "bart": ("seq2seq", "bart", {"forced_eos_token_id": 2}, "AutoModelForSeq2SeqLM", {}),
}  # fmt: skip
ALL = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
STRATEGIES = {"gpt_neox": (*ALL, "tp", "pp"), "tied llama": (*ALL, "tp", "pp")}
CASES = [(base, strategy) for base in BASES for strategy in STRATEGIES.get(base, ALL)]


def described(folder: Path) -> dict[str, tuple]:
    """{name: (shape, dtype)} of a folder's weights."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}


@pytest.fixture(scope="module")
def exported(byte_tokenizer, pairs_tokenizer, material, cache, launched_once, tmp_path_factory):
    """exported(base, strategy) -> (what model/ of the run has, what model/ of its checkpoint has)."""
    folder = tmp_path_factory.mktemp("names")
    text = {"clm": material / "text" / "train.txt"}
    for task, records in {
        "cls": [{"sentence": f"number {each}", "label": each % 2} for each in range(40)],
        "seq2seq": [{"source": f"number {each}", "target": f"{each}"} for each in range(40)],
    }.items():
        text[task] = write_records(folder / f"{task}.jsonl", records)

    def once(base: str, strategy: str):
        task, family, shape, auto_class, renamed = BASES[base]
        if not (folder / base).exists():
            torch.manual_seed(0)
            config = AutoConfig.for_model(family, **small_sizes(family, vocab_size=400), **shape)
            model = getattr(transformers, auto_class).from_config(config)
            model.save_pretrained(folder / base)
            tokenizer = AutoTokenizer.from_pretrained(pairs_tokenizer if task == "cls" else byte_tokenizer)
            tokenizer.save_pretrained(folder / base)
            stored = load_file(folder / base / "model.safetensors")
            for old, new in renamed.items():
                stored = {name.replace(old, new): weight for name, weight in stored.items()}
            save_file(stored, folder / base / "model.safetensors", metadata={"format": "pt"})
        more = ["--block_size", "32"] if task == "clm" else []
        run = launched_once(
            f"{base} {strategy}", "--model_name_or_path", folder / base, "--train_file", text[task], "--cache_dir",
            cache, *more, "--per_device_train_batch_size", "2", "--global_batch_size", "4", "--max_train_steps", "1",
            "--save_strategy", "steps", "--save_steps", "1", "--precision", "fp32", "--max_train_samples", "20",
            "--validation_split_percentage", "0", "--learning_rate", "1e-4",
            task=task, strategy=strategy, processes=1 if strategy == "single" else 2,
        )  # fmt: skip
        return described(run / "model"), described(run / "checkpoints" / "latest" / "model")

    return once


@pytest.mark.parametrize(
    ("base", "strategy"), [case if case == ("bert", "zero3") else pytest.param(*case, marks=LONG) for case in CASES]
)
def test_names_shapes_and_types_are_the_same_under_every_strategy(exported, base, strategy):
    expected, in_checkpoint = exported(base, "single")
    assert len(expected) > 10
    assert in_checkpoint == expected
    assert exported(base, strategy) == (expected, expected)
