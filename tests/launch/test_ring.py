"""Rows that more ranks split than can share the heads: of 8 heads, 3 and 6 ranks pass keys and values on.
That parts of a ring are rows in full: test_sequence.py, with 2 ranks."""

import json

import pytest
from helpers import ROOT, check_alike, completed, cut_after, launch, metrics

pytestmark = pytest.mark.long
FLAGS = ("--block_size", "192", "--packing", "none", "--max_train_samples", "100", "--max_eval_samples", "17",
         "--global_batch_size", "8", "--per_device_train_batch_size", "2", "--max_train_steps", "22",
         "--learning_rate", "5e-4", "--weight_decay", "0.1", "--save_steps", "6",
         "--record_samples", "true")  # fmt: skip


@pytest.fixture(scope="module")
def ring(tmp_path_factory) -> str:
    """A pair in which 3 ranks split each row."""
    folder = tmp_path_factory.mktemp("pair")
    pair, config = (folder / name for name in ("ring.yaml", "ring.json"))
    of_sp = json.loads((ROOT / "ds_configs" / "sp.json").read_text())
    config.write_text(json.dumps(of_sp | {"sequence_parallel_size": 3}))
    text = (ROOT / "accelerate_configs" / "sp.yaml").read_text()
    pair.write_text(text.replace("ds_configs/sp.json", str(config)).replace("num_processes: 2", "num_processes: 3"))
    return str(pair)


@pytest.fixture(scope="module")
def flags(llama, material) -> tuple[str, ...]:
    return ("--model_name_or_path", str(llama), "--train_file", str(material / "text" / "train.txt"), *FLAGS)


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory) -> list[dict]:
    return launch(tmp_path_factory.mktemp("alone") / "run", *flags, "--precision", "fp32", strategy="single")


@pytest.mark.parametrize(("processes", "more"), [(3, ()), (6, ()), (3, ("--gradient_checkpointing", "true"))])
def test_a_ring_computes_what_one_process_does(flags, alone, ring, tmp_path, processes, more):
    lines = launch(tmp_path / "run", *flags, *more, "--precision", "fp32", strategy=ring, processes=processes)
    assert len(alone) == 23
    check_alike(lines, alone)


def test_in_bf16(flags, alone, ring, tmp_path):
    check_alike(launch(tmp_path / "run", *flags, "--precision", "bf16", strategy=ring), alone, 0.05)


def test_a_ring_goes_on_under_zero_3_and_back(flags, alone, ring, tmp_path):
    output = tmp_path / "run"
    launch(output, *flags, "--precision", "fp32", strategy=ring)
    for start, strategy, processes in ((12, "zero3", 2), (18, ring, 3)):
        cut_after(output, start)
        completed(output, *flags, "--precision", "fp32", strategy=strategy, processes=processes)
        check_alike(metrics(output), alone)
