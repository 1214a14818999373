"""Checkpoints of each format and earlier version are read, and the run goes on with the losses that it had then.

tests/material/checkpoints/FORMAT-VERSION/ holds a tokenizer, a text, and for each case its run, killed after update 3,
and `losses.json` of the updates that were made after it. For a new number or version, from the root of the repository:

    PYTHONPATH=tests python tests/launch/test_old_checkpoints.py

The weights are random, and a folder stays below 500 kB.
"""

import json
import shutil
from pathlib import Path

import pytest
from helpers import ROOT, launched, metrics

from zerofit import __version__
from zerofit.checkpoint.directory import CHECKPOINT_FORMAT, MANIFEST, SaveReason, _manifest, write_manifest
from zerofit.recipe.files import remove

STORED = ROOT / "tests" / "material" / "checkpoints"
KILLED, UPDATES = 3, 6
MODELS = ("gpt2-single", "llama-ddp")  # whose weights test_launchers.py trains
LLAMA = (
    "--model_type llama --config_overrides hidden_size=8,intermediate_size=16,num_hidden_layers=1,"
    "num_attention_heads=2,num_key_value_heads=2,vocab_size=40,max_position_embeddings=32,tie_word_embeddings=false"
)
GPT2 = (
    "--model_type gpt2 --config_overrides n_embd=8,n_layer=1,n_head=2,vocab_size=40,n_positions=32,resid_pdrop=0,"
    "embd_pdrop=0,attn_pdrop=0"
)
EVERY = (
    "--tokenizer_name tokenizer --train_file text.txt --block_size 16 --global_batch_size 4 --learning_rate 1e-2 "
    f"--per_device_train_batch_size 2 --max_train_steps {UPDATES} --num_warmup_steps 2 --lr_scheduler_type linear "
    f"--save_steps {KILLED} --seed 3 --precision fp32"
)
CASES = {  # strategy, processes, options
    "gpt2-single": ("single", 1, GPT2),
    "gpt2-zero1": ("zero1", 2, GPT2),
    "gpt2-adafactor": ("single", 1, f"{GPT2} --optim adafactor"),
    "llama-ddp": ("ddp", 2, f"{LLAMA} --ema_decay 0.5"),
    "llama-zero2": ("zero2", 2, LLAMA),
    "llama-zero3": ("zero3", 2, LLAMA),
    "llama-fsdp2": ("fsdp2", 2, LLAMA),
    "llama-tp": ("tp", 2, LLAMA),
}


def stored() -> list[Path]:
    return sorted(path.parent for path in STORED.glob("*/*/losses.json"))


def run_stored(run: Path, strategy: str = "single", processes: int = 1):
    """Run the command of a stored run, in the folder around it: its paths are among the options that make it."""
    words = f"{EVERY} {CASES[run.name][2]} --cache_dir cache".split()
    return launched(Path(run.name), *words, strategy=strategy, processes=processes, cwd=run.parent)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if line["update"] > KILLED]


def test_there_are_checkpoints_of_this_format_and_they_are_small():
    assert {run.name for run in stored() if run.parent.name.startswith(f"{CHECKPOINT_FORMAT}-")} == CASES.keys()
    assert sum(path.stat().st_size for path in STORED.rglob("*")) < 1_000_000


@pytest.mark.parametrize("run", stored(), ids=lambda run: f"{run.parent.name}-{run.name}")
def test_a_run_goes_on_from_a_checkpoint_of_an_earlier_version(run, tmp_path):
    mine = Path(shutil.copytree(run.parent, tmp_path / "stored")) / run.name
    done = run_stored(mine)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"after update {KILLED}, written under {CASES[run.name][0]}" in done.stdout
    expected = json.loads((run / "losses.json").read_text())
    assert len(expected) == UPDATES - KILLED
    assert losses(mine) == pytest.approx(expected, rel=1e-5)


def test_a_later_format_is_refused_in_one_sentence_and_nothing_is_deleted(tmp_path):
    """Also where there is an earlier checkpoint: to go on from that one would delete the later one."""
    run = Path(shutil.copytree(stored()[0].parent, tmp_path / "stored")) / "gpt2-single"
    earlier = run / "checkpoints" / f"update_{KILLED:08}"
    later = Path(shutil.copytree(earlier, earlier.with_name(f"update_{KILLED + 1:08}")))
    content = json.loads((later / MANIFEST).read_text())
    del content["checksum"]
    (later / MANIFEST).write_text(_manifest({**content, "format": CHECKPOINT_FORMAT + 1, "new": {}}))
    done = run_stored(run)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert f"has checkpoint format {CHECKPOINT_FORMAT + 1}, and zerofit {__version__} reads" in said
    assert f"reads formats up to {CHECKPOINT_FORMAT}. Install" in said
    assert earlier.is_dir()
    assert later.is_dir()


def main() -> None:
    folder = STORED / f"{CHECKPOINT_FORMAT}-{__version__}"
    if not folder.is_dir():  # with the text and the tokenizer of an earlier one
        shutil.copytree(stored()[0].parent, folder, ignore=shutil.ignore_patterns(*CASES))
    for name, (strategy, processes, _) in CASES.items():
        run = folder / name
        shutil.rmtree(run, ignore_errors=True)
        done = run_stored(run, strategy, processes)
        assert done.returncode == 0, done.stdout + done.stderr
        (run / "losses.json").write_text(json.dumps(losses(run)) + "\n")
        shrink(run)
    remove(folder / "cache")


def shrink(run: Path) -> None:
    """Keep what the tests read of a run, sealed anew: its state after KILLED, and the weights of two models."""
    checkpoint = run / "checkpoints" / f"update_{KILLED:08}"
    kept = {checkpoint.parent, run / "losses.json", checkpoint}
    unread = [path for path in (*run.iterdir(), *checkpoint.parent.iterdir()) if path not in kept]
    unread += [checkpoint / "model" / "README.md"] if run.name in MODELS else [checkpoint / "model"]
    for path in (*unread, checkpoint / MANIFEST):
        remove(path)
    write_manifest(checkpoint, SaveReason.REQUESTED, {})


if __name__ == "__main__":
    main()
