"""Bad input: exit code 2, one message that names option, value and remedy, and no traceback."""

import subprocess
import sys

import pytest
from helpers import ROOT, environment

from train.clm import main

SCRATCH = ["--config_name", "gpt2", "--config_overrides", "n_layer=1,n_head=2,n_embd=32,n_positions=64",
           "--train_tokenizer_vocab_size", "270"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    (folder / "good.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 80)
    (folder / "empty.txt").write_text("")
    (folder / "blank.txt").write_text("   \n\n")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "typo.yaml").write_text("learnin_rate: 1e-3\n")
    (folder / "text.yaml").write_text('learning_rate: "1e-3"\n')
    return folder


CASES = {
    "unknown key": (["--learnin_rate", "1"], ["--learnin_rate", "Did you mean learning_rate?"]),
    "unknown key in a file": (
        ["--config", "{folder}/typo.yaml"], ["typo.yaml, line 1", "learnin_rate", "learning_rate?"],
    ),
    "wrong type": (["--block_size", "big"], ["--block_size big", "an integer"]),
    "wrong type in a file": (["--config", "{folder}/text.yaml"], ["learning_rate", "'1e-3'", "without the quotes"]),
    "missing file": (["--train_file", "{folder}/absent.txt"], ["train_file", "absent.txt", "no such file"]),
    "empty file": (["--train_file", "{folder}/empty.txt"], ["train_file", "empty.txt", "is empty"]),
    "a file without text": (["--train_file", "{folder}/blank.txt", "--document_separator", "line"], ["no text"]),
    "not UTF-8": (["--train_file", "{folder}/latin.txt"], ["latin.txt is not UTF-8", "0xe9 at offset 3", "iconv"]),
    "block size": (["--block_size", "65"], ["block_size = 65 (--block_size)", "64 positions", "64 or less"]),
    "a split without samples": (
        ["--validation_split_percentage", "100"], ["validation_split_percentage = 100", "no sample"],
    ),
    "a split that holds out nothing": (
        ["--validation_split_percentage", "0.0001", "--document_separator", "file"],
        ["validation_split_percentage = 0.0001", "no sample"],
    ),
    "vocabularies": (["--config_overrides", "vocab_size=100"], ["270 tokens", "vocab_size has 100 rows"]),
    "a hub dataset without a network": (
        ["--dataset_name", "no_such_org/no_such_set"], ["dataset_name = 'no_such_org/no_such_set'", "train_file"],
    ),
    "a hub model without a network": (
        ["--config_name", "no_such_org/no_such_model"], ["config_name = 'no_such_org/no_such_model'", "gpt2-xl"],
    ),
    "a model folder that is not there": (
        ["--config_name", "./no/such"], ["config_name = './no/such'", "no such folder"],
    ),
    "overrides that make no model": (
        ["--config_overrides", "n_layer=1,n_head=3,n_embd=32"], ["config_overrides", "num_heads"],
    ),
    "an option of another program": (
        ["--checkpointing_steps", "5"], ["--checkpointing_steps is not an option", "not there yet"],
    ),
    "a launcher's option": (["--num_processes", "2"], ["--num_processes", "belongs to accelerate launch"]),
    "a recipe without a name": (["--config"], ["--config takes one recipe file"]),
    "fewer samples than one global batch": (
        ["--global_batch_size", "4096"], ["fewer than one global batch of 4096", "per_device_train_batch_size"],
    ),
    "an attention that does not exist": (["--attn_implementation", "flash"], ["attn_implementation = 'flash'"]),
    "fp16 without a GPU": (["--precision", "fp16"], ["precision = fp16", "bf16"]),
    "a tracker that is not installed": (["--report_to", "mlflow"], ["report_to", "wandb, tensorboard"]),
    "an output folder that is a file": (["--output_dir", "{folder}/good.txt"], ["output_dir", "is a file"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_message_and_exit_code_2(case, folder, tmp_path, cache, capfd):
    flags, words = CASES[case]
    flags = [flag.replace("{folder}", str(folder)) for flag in flags]
    arguments = ["--output_dir", str(tmp_path / "run"), "--cache_dir", cache, "--block_size", "32", *SCRATCH]
    if "--dataset_name" not in flags:
        arguments += ["--train_file", str(folder / "good.txt")]
    assert main([*arguments, *flags]) == 2
    shown = capfd.readouterr().err
    assert shown.count("error: ") == 1, shown
    assert "Traceback" not in shown
    for word in words:
        assert word in shown, shown
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def test_the_program_itself_leaves_with_2():
    command = [sys.executable, str(ROOT / "train" / "clm.py"), "--learnin_rate", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Did you mean learning_rate?" in done.stderr
