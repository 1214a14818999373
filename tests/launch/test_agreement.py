"""Same weights, same data, same global batch: the same loss, gradient norm and learning rate in every update.

Every strategy pair, launched for real with 2 CPU processes in fp32 from the same pretrained weights, against one
process, for all three tasks; all pairs with text, and with the other cases those that differ most (`-m "long or not
long"` tries all with each). Each run is launched once and all tests here read its record. The table that comes out is
written to outputs/tests/agreement.md (a copy of the whole one lies in docs/agreement.md).
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import ROOT, SMALL_BLENDERBOT, launch, tiny_deberta, tiny_t5, updates
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from train.data.sources import hold_out

RTOL = 1e-5
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
    "zero3_offload_optimizer": ("zero3_offload_optimizer", 2, 2),
}
REFERENCE, *OTHERS, _ = LAYOUTS
FIGURES = ("loss", "grad_norm", "learning_rate")


@dataclass(frozen=True)
class Case:
    """What is trained: a task on some data, from weights that the fixture `weights` has."""

    task: str
    updates: int
    flags: tuple[str, ...]
    layouts: tuple[str, ...] = tuple(OTHERS)  # those that every test run tries
    learning_rate: float = 5e-4
    more: tuple[str, ...] = ()  # and those that -m long adds


FEW = ("ddp", "zero2", "zero3", "zero3_offload")
REST = tuple(layout for layout in OTHERS if layout not in FEW)
PAIRS = ("--train_file", "{shared}/dialogue/valid_freq.json", "--max_source_length", "48", "--max_target_length", "24",
         "--max_train_samples", "300", "--max_eval_samples", "11", "--num_beams", "2",
         "--per_device_eval_batch_size", "3", "--val_min_target_length", "4",
         "--val_max_target_length", "12")  # fmt: skip
CASES = {
    "packed": Case("clm", 22, (
        "--model_name_or_path", "{stories}", "--train_file", "{shared}/text/tinystories_a.txt",
        "--max_eval_samples", "17", "--block_size", "128", "--packing", "documents",
    )),
    "padded": Case("clm", 22, (  # the run spans two epochs
        "--model_name_or_path", "{stories}", "--train_file", "{shared}/text/tinystories_a.txt",
        "--max_eval_samples", "17", "--block_size", "192", "--packing", "none", "--max_train_samples", "100",
    ), FEW, more=REST),
    "deberta": Case("cls", 16, (
        "--model_name_or_path", "{deberta}", "--task_name", "mrpc", "--train_file", "{shared}/glue/MRPC/train.tsv",
        "--validation_file", "{shared}/glue/MRPC/dev.tsv", "--max_length", "64", "--max_train_samples", "100",
        "--max_eval_samples", "101",
    ), FEW, more=REST),
    "blenderbot": Case("seq2seq", 12, ("--model_name_or_path", "{blenderbot}", *PAIRS), FEW, more=REST),
    "t5": Case("seq2seq", 6, ("--model_name_or_path", "{t5}", *PAIRS), ("zero3", "zero2_offload", "zero3_offload")),
    "lora": Case("clm", 14, (
        "--model_name_or_path", "{stories}", "--train_file", "{shared}/instruct/alpaca_en_demo.json", "--lora",
        "--chat_template", "instruction", "--max_train_samples", "200", "--max_eval_samples", "17",
        "--block_size", "256", "--save_strategy", "epoch", "--save_total_limit", "2",
    ), ("ddp", "zero2", "zero3", "zero3_offload", "zero3_offload_optimizer"), 4e-3),
}  # fmt: skip


def runs(*tasks: str) -> list:
    """(case, layout) of these tasks, the rarer ones marked."""
    cases = {name: case for name, case in CASES.items() if case.task in tasks}
    often = [(name, layout) for name, case in cases.items() for layout in case.layouts]
    return often + [pytest.param(name, layout, marks=pytest.mark.long) for name, case in cases.items()
                    for layout in case.more]  # fmt: skip


RUNS, PREDICTING = runs("clm", "cls", "seq2seq"), runs("cls", "seq2seq")


@pytest.fixture(scope="module")
def weights(stories, shared, cache, tmp_path_factory) -> dict[str, Path]:
    """Pretrained weights by name. None of these models has dropout, whose noise depends on the layout."""
    folder = tmp_path_factory.mktemp("weights")
    tiny_deberta(folder / "deberta", num_labels=2)
    tiny_t5(folder / "t5", shared / "tokenizers" / "blenderbot-400M-distill")
    run = folder / "blenderbot"
    lines = launch(
        run, *SMALL_BLENDERBOT, "--tokenizer_name", shared / "tokenizers" / "blenderbot-400M-distill", "--train_file",
        shared / "dialogue" / "valid_freq.json", "--max_source_length", "48", "--max_target_length", "24",
        "--max_eval_samples", "11", "--cache_dir", cache, task="seq2seq",
    )  # fmt: skip
    return {"stories": stories, "shared": shared, "deberta": folder / "deberta", "t5": folder / "t5",
            "blenderbot": run / "model", "lines": lines}  # fmt: skip


@pytest.fixture(scope="module")
def run(weights, cache, tmp_path_factory):
    """run(case, layout) -> (metrics, output folder); each is launched once."""
    folder, done = tmp_path_factory.mktemp("agreement"), {}

    def once(name: str, layout: str) -> tuple[list[dict], Path]:
        if (name, layout) not in done:
            case, (strategy, processes, micro) = CASES[name], LAYOUTS[layout]
            output = folder / f"{name}-{layout.replace(' ', '_')}"
            flags = [flag.format(**weights) for flag in case.flags]
            lines = launch(
                output, *flags, "--per_device_train_batch_size", micro, "--global_batch_size", "8",
                "--max_train_steps", case.updates, "--learning_rate", case.learning_rate, "--num_warmup_steps", "5",
                "--weight_decay", "0.1", "--precision", "fp32", "--cache_dir", cache,
                strategy=strategy, processes=processes, task=case.task,
            )  # fmt: skip
            done[name, layout] = lines, output
        return done[name, layout]

    once.done = done
    return once


def differences(run, case: str, layout: str) -> dict[str, float]:
    """The largest relative difference from the reference over all updates, for each figure."""
    ours, reference = (updates(run(case, each)[0]) for each in (layout, REFERENCE))
    assert len(ours) == len(reference) == CASES[case].updates
    largest = {}
    for figure in FIGURES:
        pairs = [(line[figure], other[figure]) for line, other in zip(ours, reference)]
        largest[figure] = max(abs(value - expected) / max(abs(expected), 1e-12) for value, expected in pairs)
    return largest


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_strategies_agree(run, case, layout):
    largest = differences(run, case, layout)
    assert all(value <= RTOL for value in largest.values()), largest


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_samples_and_tokens_are_the_same(run, case, layout):
    for ours, expected in zip(updates(run(case, layout)[0]), updates(run(case, REFERENCE)[0])):
        for count in ("consumed_samples", "targets", "tokens"):
            assert ours[count] == expected[count]


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_held_out_figures_agree(run, case, layout):
    """The losses, and with the tasks that have them the metrics: each example counts once, 2 divides none of them."""
    ours, expected = (
        [{name: line[name] for name in line if name.startswith("eval_")} for line in run(case, each)[0]]
        for each in (layout, REFERENCE)
    )
    assert sum(map(bool, expected)) >= 2
    for line, other in zip(ours, expected):
        assert line == pytest.approx(other, rel=RTOL)


@pytest.mark.parametrize(("case", "layout"), PREDICTING)
def test_predictions_are_the_same(run, case, layout):
    ours, expected = (
        [json.loads(line) for line in (run(case, each)[1] / "predictions.jsonl").read_text().splitlines()]
        for each in (layout, REFERENCE)
    )
    assert len(expected) == (101 if case == "deberta" else 11)
    assert [row["prediction"] for row in ours] == [row["prediction"] for row in expected]


def test_the_reference_moves_and_warms_up(run):
    """That agreement is not agreement in standing still. (That runs learn is shown in test_runs.py.)"""
    for case, about in CASES.items():
        lines, _ = run(case, REFERENCE)
        held = [line["eval_loss"] for line in lines if "eval_loss" in line]
        assert abs(held[-1] - held[0]) > 1e-4 * held[0], case
        rates = [line["learning_rate"] for line in updates(lines)]
        end = about.updates
        expected = [about.learning_rate * (k / 5 if k < 5 else (end - k) / (end - 5)) for k in range(end)]
        assert rates == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_a_blenderbot_from_scratch_learns(weights, run):
    """And what it writes is text by now, so that equal BLEU and ROUGE are no equal zeros."""
    held = [line["eval_loss"] for line in weights["lines"] if "eval_loss" in line]
    assert held[-1] < held[0] - 2.5
    figures = run("blenderbot", REFERENCE)[0][-1]
    assert figures["eval_rouge1"] > 1
    assert figures["eval_bleu"] > 0


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


@pytest.mark.parametrize("layout", [REFERENCE, *CASES["lora"].layouts])
def test_the_adapter_is_the_same_and_has_learnt(run, layout):
    lines, output = run("lora", layout)
    held = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert held[-1] < held[0] - 0.5
    ours, reference = (
        load_file(run("lora", each)[1] / "model" / "adapter_model.safetensors") for each in (layout, REFERENCE)
    )
    assert ours.keys() == reference.keys()
    assert len(ours) == 70  # seven projections of five layers, A and B
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-3, atol=1e-4, msg=name)
    assert json.loads((output / "environment.json").read_text())["bytes_held_by_rank_0"]["optimizer"] > 0


@pytest.mark.parametrize("layout", ["zero2", "zero3_offload"])
def test_plain_peft_has_the_loss_that_the_run_reported(run, layout, stories, shared):
    """Recomputed without zerofit: the template written out by hand, the loss of the answers alone, one by one."""
    lines, output = run("lora", layout)
    base = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, output / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    from datasets import Dataset

    records = json.loads((shared / "instruct" / "alpaca_en_demo.json").read_text())
    _, held_out = hold_out(Dataset.from_dict({"number": range(len(records))}), 0.05)
    total = count = 0
    for record in (records[number] for number in held_out["number"][:17]):
        extra = f"### Input:\n{record['input'].strip()}\n\n" if record["input"] else ""
        prompt = f"<s>### Instruction:\n{record['instruction'].strip()}\n\n{extra}### Response:\n"
        text = f"{prompt}{record['output'].strip()}</s>"
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = torch.tensor([encoded["input_ids"][:256]])
        answer = torch.tensor([stop > len(prompt) for _, stop in encoded["offset_mapping"][:256]])
        with torch.no_grad():
            total += model(input_ids=ids, labels=ids.masked_fill(~answer[None], -100)).loss.item() * answer.sum()
        count += answer.sum()
    assert lines[-1]["eval_loss"] == pytest.approx(total.item() / count.item(), rel=1e-5)


def test_the_table(run):
    """Writes the agreement table; what it shows is asserted above."""
    rows = []
    for case, layout in run.done:
        if layout == REFERENCE:
            continue
        largest = differences(run, case, layout)
        rows.append(f"| {case} | {layout} | " + " | ".join(f"{largest[figure]:.1e}" for figure in FIGURES) + " |")
    assert len(rows) >= 28
    head = ["| data | layout | loss | gradient norm | learning rate |", "|---|---|---|---|---|"]
    target = ROOT / "outputs" / "tests"
    target.mkdir(parents=True, exist_ok=True)
    (target / "agreement.md").write_text("\n".join([*head, *rows]) + "\n")
