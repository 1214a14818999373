"""Runs that are ended and go on: by signals, by a rank's death, by the clock, for want of memory, and around faults.

(That a run which goes on under another strategy is the run that was left alone: test_agreement.py.)
"""

import json
import platform
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import completed, largest_differences, launch, launched, metrics, updates

DISTURBED = Path(__file__).with_name("disturbed.py")


def samples(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


@dataclass
class Leg:
    """How a launch has ended, what it has said, and the updates and samples that were on record then."""

    exit_code: int
    said: str
    made: list[dict]
    samples: list[dict]


@pytest.fixture(scope="module")
def endless(llama, material, cache, tmp_path_factory) -> list:
    """The options of a run that somebody has to end, of a model with dropout."""
    model = tmp_path_factory.mktemp("wet") / "llama"
    shutil.copytree(llama, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.2}))
    return [
        "--model_name_or_path", model, "--train_file", material / "text" / "train.txt", "--block_size", "64",
        "--per_device_train_batch_size", "4", "--learning_rate", "1e-3", "--record_samples", "true",
        "--max_eval_samples", "16", "--max_train_steps", "3000", "--save_steps", "3", "--cache_dir", cache,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def legs(endless, tmp_path_factory) -> SimpleNamespace:
    """One run in three launches, ended by SIGTERM (ddp), by the death of a rank (zero2, from update 3 on, since newer
    checkpoints are damaged), and by the clock (one process)."""
    output = tmp_path_factory.mktemp("legs") / "run"

    def leg(*more, **how) -> Leg:
        done = launched(output, *endless, *more, **how)
        return Leg(done.returncode, done.stdout + done.stderr, updates(metrics(output)), samples(output))

    by_signal = leg(strategy="ddp", processes=2, through=(DISTURBED, 0, "SIGTERM forward 6"))
    saved = [path.name for path in (*output.iterdir(), *(output / "checkpoints").iterdir())]
    for folder in (output / "checkpoints").glob("update_*"):
        if folder.name > "update_00000003":
            file = max(folder.glob("state/*.safetensors"))
            content = file.read_bytes()
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    by_death = leg(strategy="zero2", processes=2, through=(DISTURBED, 1, "kill 10"))
    return SimpleNamespace(signal=by_signal, saved=saved, death=by_death, clock=leg("--max_hours", "1e-6"))


def test_a_signal_ends_a_run_in_order(legs):
    assert "stopped     by SIGTERM after update" in legs.signal.said
    assert 4 <= len(legs.signal.made) < 3000
    assert legs.signal.exit_code == 85
    assert f"update_{len(legs.signal.made):08}" in legs.saved
    assert "model" not in legs.saved


def test_who_dies_is_spoken_for_and_nobody_waits_for_it(legs):
    said = legs.death.said
    here = rf"\(pid \d+\) on machine 0 \({re.escape(platform.node())}\)"
    assert re.search(rf"rank 1 {here} ended without a message in phase", said), said
    assert "SIGKILL" in said
    assert "rank 0 leaves in phase" in said
    assert "another process is gone" in said
    assert re.search(r"waiting  gloo:\w+ of ", said), said[said.find("leaves in") - 200 :][:900]
    assert "[rank0]: Traceback" not in said


def test_the_clock_ends_a_run_in_order(legs):
    assert legs.clock.exit_code == 85
    assert f"stopped     by max_hours after update {len(legs.clock.made)} of 3,000" in legs.clock.said


def test_each_goes_on_where_the_run_was_saved(legs):
    """What was made before stays as it is, and each update is made once."""
    assert re.search(r"update_\d+ is not used: .*rank_\d+", legs.death.said), "all ranks leave what one finds damaged"
    for before, leg, strategy in ((legs.signal, legs.death, "ddp"), (legs.death, legs.clock, "zero2")):
        saved = int(re.search(rf"after update (\d+), written under {strategy}", leg.said)[1])
        assert saved == 3 or leg is legs.clock
        assert [line["update"] for line in leg.made] == list(range(1, len(leg.made) + 1))
        assert len(leg.made) > saved
        assert leg.made[:saved] == before.made[:saved]
        assert leg.samples[:saved] == before.samples[:saved]


def test_dropout_goes_on_as_it_was(legs):
    """Update 4 of the run that nobody had ended yet, and of the one that goes on after update 3."""
    ours, theirs = legs.death.made[3:4], legs.signal.made[3:4]
    differences = largest_differences(ours, theirs, ("loss", "grad_norm"))
    assert differences["loss"] < 1e-6
    assert differences["grad_norm"] < 1e-5
    assert legs.death.samples[3:4] == legs.signal.samples[3:4]


@pytest.fixture(scope="module")
def poisoned(llama, tmp_path_factory) -> list:
    """A model in which one word is too large for a sum, texts of which one has it, and the options to train on it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("poisoned")
    tokenizer = AutoTokenizer.from_pretrained(llama)
    config = AutoConfig.for_model(
        "gpt2", vocab_size=512, n_embd=32, n_layer=2, n_head=4, n_positions=64, tie_word_embeddings=False,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.transformer.wte.weight[tokenizer("Z")["input_ids"][-1]] = 3e38  # a layer norm of it is NaN
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    random.seed(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "big", "red", "dog", "run", "fast", "to", "him"]
    texts = [" ".join(random.choice(words) for _ in range(40)) for _ in range(96)]
    texts[37] = "Z Z Z " + texts[37]
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [
        "--model_name_or_path", folder, "--train_file", file, "--validation_split_percentage", "0", "--block_size",
        "64", "--packing", "none", "--per_device_train_batch_size", "4", "--num_train_epochs", "1", "--save_steps",
        "2", "--learning_rate", "1e-3", "--record_samples", "true", "--global_batch_size", "8",
    ]  # fmt: skip


def check_anomaly(output: Path, action: str) -> int:
    """The last anomaly's record: the sample is named with its text, on the rank that had it. Returns the update."""
    anomaly = [json.loads(line) for line in (output / "anomalies.jsonl").read_text().splitlines()][-1]
    assert anomaly["action"] == action
    assert anomaly["reason"] == "loss is nan"
    broken = [part for part in anomaly["micro_batches"] if part["loss"] != part["loss"]]
    assert len(anomaly["micro_batches"]) == 2
    assert len(broken) == 1, "one micro-batch only"
    (index,) = [index for index in broken[0]["samples"] if anomaly["heads"][str(index)].startswith("Z Z Z")]
    assert index == 37
    assert len(anomaly["heads"]) == 8
    return anomaly["update"]


@pytest.mark.parametrize(
    ("stops", "skips", "rewinds"),
    [
        (("zero2", 2), ("single", 1), ("ddp", 2)),
        pytest.param(("ddp", 2), ("zero3", 2), ("zero3", 2), marks=pytest.mark.long),
        pytest.param(("pp", 2), ("3d", 4), ("pp", 4), marks=pytest.mark.long),
    ],
)
def test_a_poisoned_sample_never_reaches_the_weights(poisoned, tmp_path, stops, skips, rewinds):
    """`stop`, gone on with by `skip`, against `rewind`: the same run without that update."""
    stopped, rewound = tmp_path / "stop", tmp_path / "rewind"
    done = launched(stopped, *poisoned, strategy=stops[0], processes=stops[1])
    assert done.returncode == 86
    at = check_anomaly(stopped, "stop")
    assert f"stopped     by an anomaly after update {at - 1} of 12: update {at}: loss is nan" in done.stdout
    assert "--on_anomaly skip" in done.stdout
    assert (stopped / "checkpoints" / "latest").resolve().name == f"update_{at - 1:08}"

    skip = launch(stopped, *poisoned, "--on_anomaly", "skip", strategy=skips[0], processes=skips[1])
    assert check_anomaly(stopped, "skip") == at
    assert [line["update"] for line in skip] == list(range(1, 13))
    assert skip[at - 1]["anomaly"] == "loss is nan"
    good = [line for line in skip if line["update"] != at]
    assert all(line["loss"] < 7 and line["grad_norm"] < 100 for line in good)
    assert good[-1]["loss"] < good[0]["loss"]

    done = completed(rewound, *poisoned, "--on_anomaly", "rewind", strategy=rewinds[0], processes=rewinds[1])
    assert check_anomaly(rewound, "rewind") == at
    assert f"skipped: update {at}" in done.stdout
    again = metrics(rewound)
    assert [line["update"] for line in again] == list(range(1, 13)), "each update once"
    assert largest_differences([line for line in again if line["update"] != at], good, ["loss"])["loss"] < 1e-5
    assert samples(rewound) == [line for line in samples(stopped) if line["update"] != at]


STRATEGIES = [
    "zero3",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("zero1", "zero2", "zero2_offload", "zero3_offload")),
]


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.long)])
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_are_not_finite_are_refused(llama, material, cache, tmp_path, strategy, processes, precision):
    """Those of the last rank alone, whose loss is as it should be; an update behind them trains."""
    options = ["--model_name_or_path", llama, "--train_file", material / "text" / "train.txt", "--block_size", "64",
               "--per_device_train_batch_size", "4", "--cache_dir", cache, "--max_train_steps", "5", "--precision",
               precision, "--validation_split_percentage", "0", "--save_strategy", "no", "--on_anomaly", "skip",
               "--report_to", "none"]  # fmt: skip
    completed(
        tmp_path / "run",
        *options,
        strategy=strategy,
        processes=processes,
        through=(DISTURBED, processes - 1, "gradient 1 nan 1 inf 1"),
    )
    found = [json.loads(line) for line in (tmp_path / "run" / "anomalies.jsonl").read_text().splitlines()]
    assert [line["update"] for line in found] == [2, 4]
    assert all(line["reason"].startswith("grad_norm is ") for line in found)
    lines = updates(metrics(tmp_path / "run"))
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["loss"] < 7 and (line["update"] in (2, 4) or 0 < line["grad_norm"] < 100) for line in lines)
    assert lines[2]["loss"] != lines[0]["loss"], "update 1 has trained"
