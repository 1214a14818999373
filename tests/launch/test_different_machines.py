"""Machines that do not see the same: two processes, the second of which is started in another folder."""

import subprocess

import pytest
from helpers import BIN, ROOT, environment

ELSEWHERE = f"""
import os, runpy, sys
os.chdir("machine" + os.environ["RANK"])
sys.argv[0] = "{ROOT}/train/clm.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long  # tests/unit/test_machines.py compares what two machines say
@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((400, 500), ["rank 1, on machine", "another train_file (files and their bytes)", "Copy the data"]),
        ((400, 400), ["rank 1, on machine", "another view of output_dir", "that all machines share"]),
    ],
    ids=["data", "output_dir"],
)
def test_ranks_that_see_different_files_stop_with_one_message(tmp_path, lines, words):
    """Each writes into a relative output_dir of its own, and reads a relative train_file."""
    for rank, count in enumerate(lines):
        (tmp_path / f"machine{rank}").mkdir()
        (tmp_path / f"machine{rank}" / "a.txt").write_text("some words to train on, line by line\n" * count)
    # Not the launcher's time, but that which a network file system has for a file to appear:
    program = "import zerofit.recipe.files as files\nfiles.appears.__defaults__ = (0.5,)" + ELSEWHERE
    (tmp_path / "program.py").write_text(program)
    command = [
        BIN / "accelerate", "launch", "--config_file", ROOT / "accelerate_configs/ddp.yaml", "--num_processes", 2,
        "--main_process_port", 0, tmp_path / "program.py", "--config_name", "gpt2",
        "--config_overrides", "n_layer=1,n_head=2,n_embd=16,n_positions=32", "--block_size", 32,
        "--train_tokenizer_vocab_size", 270, "--train_file", "a.txt", "--cache_dir", tmp_path / "cache",
        "--output_dir", "out", "--max_train_steps", 1, "--per_device_train_batch_size", 1, "--max_eval_samples", 2,
    ]  # fmt: skip
    done = subprocess.run([str(word) for word in command], cwd=tmp_path, capture_output=True, text=True, timeout=300,
                          env=environment(PYTHONPATH=str(ROOT)))  # fmt: skip
    assert done.returncode != 0
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    for word in words:
        assert word in said, done.stderr
    assert not list(tmp_path.glob("machine*/out/model"))
