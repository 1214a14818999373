"""From Meta's weights and a text to a continued model: convert, prepare, train under ZeRO, go on elsewhere, export."""

import json
import shutil
from pathlib import Path

import pytest
from folders import tools_in_this_process
from helpers import check_same_weights, completed, cut_after, launch, metrics, updates

from zerofit.cli import main as zerofit

pytest.importorskip("megatron.core", reason="corpora take the extra [megatron]")
pytestmark = pytest.mark.long  # in parts: unit/test_convert.py and unit/test_prepare.py

CONTINUAL = [
    "--split", "90,10,0", "--block_size", "128", "--reset_position_ids", "true", "--reset_attention_mask", "true",
    "--eod_mask_loss", "true", "--per_device_train_batch_size", "4", "--global_batch_size", "8",
    "--max_train_steps", "8", "--save_steps", "4", "--eval_steps", "8", "--max_eval_samples", "40",
    "--learning_rate", "1e-3", "--min_lr_ratio", "0.1", "--lr_scheduler_type", "cosine", "--num_warmup_steps", "2",
    "--weight_decay", "0.1", "--adam_beta2", "0.95", "--record_samples", "true", "--sample_tokens", "0",
]  # fmt: skip


def do(*words: object) -> None:
    with tools_in_this_process():
        assert zerofit([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def chain(material, tmp_path_factory) -> tuple[Path, str]:
    """(the converted model, a corpus made with its tokenizer)."""
    folder = tmp_path_factory.mktemp("chain")
    do("convert", "meta-to-hf", "--input", material / "models" / "llama" / "meta", "--output", folder / "hf")
    do("prepare", "--input", material / "text" / "train.txt", "--output_prefix", folder / "texts",
       "--tokenizer", folder / "hf", "--append_eod", "--workers", "2")  # fmt: skip
    return folder / "hf", f"{folder}/texts_text_document"


@pytest.mark.parametrize(("strategy", "processes", "then"), [("ddp", 2, "single"), ("zero2", 1, "zero3")])
def test_it_goes_on_with_its_corpus_under_any_strategy(chain, tmp_path, strategy, processes, then):
    """Continued, left half way, continued by another number of processes: as if nobody had left it."""
    model, corpus = chain
    output, run = tmp_path / "run", ["--model_name_or_path", model, "--data_path", corpus, *CONTINUAL]
    whole = launch(output, *run, strategy=strategy, processes=processes)
    ledger = [json.loads(line)["samples"] for line in (output / "samples.jsonl").read_text().splitlines()]
    assert ledger == [list(range(8 * k, 8 * k + 8)) for k in range(8)]
    assert updates(whole)[0]["loss"] < 4.5, "its own loss on such texts, and not that of another model (ln 512 is 6.2)"
    assert whole[-1]["eval_loss"] < whole[0]["eval_loss"]
    shutil.copytree(output / "model", tmp_path / "exported")

    cut_after(output, 4)
    done = completed(output, *run, strategy=then, processes=3 - processes)
    assert f"after update 4, written under {strategy}" in done.stdout
    again = metrics(output)
    assert [line["update"] for line in again] == list(range(9))
    for name in ("loss", "learning_rate"):
        ours, theirs = ([line[name] for line in updates(lines)] for lines in (again, whole))
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert [json.loads(line)["samples"] for line in (output / "samples.jsonl").read_text().splitlines()] == ledger
    check_same_weights(output / "model", tmp_path / "exported")
