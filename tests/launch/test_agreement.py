"""Same weights, same data, same global batch: the same loss, gradient norm and learning rate in every update.

Every strategy pair, launched for real with 2 CPU processes in fp32 from the same pretrained weights, against one
process, with packed blocks and with padded rows of different lengths. Each run is launched once and all tests here
read its record. The table that comes out is written to outputs/tests/agreement.md (a copy lies in docs/agreement.md).
"""

from pathlib import Path

import pytest
import torch
from helpers import ROOT, launch, updates
from transformers import AutoModelForCausalLM, AutoTokenizer

UPDATES, GLOBAL_BATCH, RTOL = 22, 8, 1e-5
LAYOUTS = {  # strategy, processes, micro-batch; the accumulation follows from the global batch of 8
    "1 process, accumulation 4": ("single", 1, 2),
    "1 process, accumulation 2": ("single", 1, 4),
    "ddp": ("ddp", 2, 2),
    "zero1": ("zero1", 2, 2),
    "zero2": ("zero2", 2, 2),
    "zero3": ("zero3", 2, 2),
    "zero2_offload": ("zero2_offload", 2, 2),
    "zero3_offload": ("zero3_offload", 2, 2),
    "zero2_plain": ("zero2_plain", 2, 2),
}
REFERENCE, *OTHERS = LAYOUTS
DATA = {
    "packed": ["--block_size", "128", "--packing", "documents"],
    "padded": ["--block_size", "192", "--packing", "none", "--max_train_samples", "100"],  # the run spans two epochs
}
FIGURES = ("loss", "grad_norm", "learning_rate")


@pytest.fixture(scope="module")
def run(stories, shared, cache, tmp_path_factory):
    """run(data, layout) -> (metrics, output folder); each is launched once."""
    folder, done = tmp_path_factory.mktemp("agreement"), {}

    def once(data: str, layout: str) -> tuple[list[dict], Path]:
        if (data, layout) not in done:
            strategy, processes, micro = LAYOUTS[layout]
            output = folder / f"{data}-{layout.replace(' ', '_')}"
            lines = launch(
                output, "--model_name_or_path", stories, "--train_file", shared / "text" / "tinystories_a.txt",
                *DATA[data], "--per_device_train_batch_size", micro, "--global_batch_size", GLOBAL_BATCH,
                "--max_train_steps", UPDATES, "--learning_rate", "5e-4", "--num_warmup_steps", "5",
                "--weight_decay", "0.1", "--max_eval_samples", "17", "--precision", "fp32", "--cache_dir", cache,
                strategy=strategy, processes=processes,
            )  # fmt: skip
            done[data, layout] = lines, output
        return done[data, layout]

    return once


def differences(run, data: str, layout: str) -> dict[str, float]:
    """The largest relative difference from the reference over all updates, for each figure."""
    ours, reference = (updates(run(data, each)[0]) for each in (layout, REFERENCE))
    assert len(ours) == len(reference) == UPDATES
    largest = {}
    for figure in FIGURES:
        pairs = [(line[figure], other[figure]) for line, other in zip(ours, reference)]
        largest[figure] = max(abs(value - expected) / max(abs(expected), 1e-12) for value, expected in pairs)
    return largest


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("layout", OTHERS)
def test_strategies_agree(run, data, layout):
    largest = differences(run, data, layout)
    assert all(value <= RTOL for value in largest.values()), largest


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("layout", OTHERS)
def test_samples_and_tokens_are_the_same(run, data, layout):
    for ours, expected in zip(updates(run(data, layout)[0]), updates(run(data, REFERENCE)[0])):
        for count in ("consumed_samples", "targets", "tokens"):
            assert ours[count] == expected[count]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("layout", OTHERS)
def test_held_out_losses_agree(run, data, layout):
    ours, expected = (
        [line["eval_loss"] for line in run(data, each)[0] if "eval_loss" in line] for each in (layout, REFERENCE)
    )
    assert len(expected) >= 2
    assert ours == pytest.approx(expected, rel=RTOL)


def test_the_reference_moves_and_warms_up(run):
    """That agreement is not agreement in standing still. (That runs learn is shown in test_runs.py.)"""
    lines, _ = run("packed", REFERENCE)
    held = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert abs(held[-1] - held[0]) > 1e-3
    rates = [line["learning_rate"] for line in updates(lines)]
    expected = [5e-4 * (k / 5 if k < 5 else (UPDATES - k) / (UPDATES - 5)) for k in range(UPDATES)]
    assert rates == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("layout", OTHERS)
def test_the_exported_weights_are_whole_and_the_same(run, layout):
    reference = AutoModelForCausalLM.from_pretrained(
        run("packed", REFERENCE)[1] / "model", dtype=torch.float32
    ).state_dict()
    exported = AutoModelForCausalLM.from_pretrained(
        run("packed", layout)[1] / "model", dtype=torch.float32
    ).state_dict()
    assert exported.keys() == reference.keys()
    assert len(exported) > 40
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize("layout", ["ddp", "zero3", "zero3_offload"])
def test_the_exported_model_has_the_loss_that_the_run_reported(run, layout, shared):
    """Recomputed without zerofit: transformers' own loss over the same held-out stories, one by one."""
    lines, output = run("padded", layout)
    model = AutoModelForCausalLM.from_pretrained(output / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    from train.data.texts import load_texts
    from train.recipe import ClmRecipe

    recipe = ClmRecipe(train_file=[str(shared / "text" / "tinystories_a.txt")], packing="none", max_eval_samples=17)
    total = count = 0
    for text in load_texts(recipe).validation["text"]:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id][:192]])
        with torch.no_grad():
            total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert lines[-1]["eval_loss"] == pytest.approx(total / count, rel=1e-5)


def test_the_table(run):
    """Writes the agreement table; what it shows is asserted above."""
    rows = []
    for data in DATA:
        for layout in OTHERS:
            largest = differences(run, data, layout)
            rows.append(f"| {data} | {layout} | " + " | ".join(f"{largest[figure]:.1e}" for figure in FIGURES) + " |")
    assert len(rows) == 16
    head = ["| data | layout | loss | gradient norm | learning rate |", "|---|---|---|---|---|"]
    target = ROOT / "outputs" / "tests"
    target.mkdir(parents=True, exist_ok=True)
    (target / "agreement.md").write_text("\n".join([*head, *rows]) + "\n")
