"""The changes of docs/own-loop.md, applied to train/clm.py and run."""

import functools
import re
from itertools import product

import pytest
from helpers import ROOT, check_alike, forked, metrics

PAGE = (ROOT / "docs" / "own-loop.md").read_text()
CHANGES = dict(re.findall(r"^## (.+?)\n.*?^```diff\n(.*?)^```", PAGE, re.M | re.S))


def test_the_page_has_five():
    assert len(CHANGES) == 5


def patched(text: str, diff: str) -> str:
    """A file with the hunks of a diff applied, each of which has to fit in one place."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = [line for line in hunk.splitlines() if not line.startswith(("--- ", "+++ "))]
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in f" {sign}") for sign in "-+")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


OPTIMIZER, FREEZING = "Another optimizer", "Freeze layers until update N"  # the script's own optimizer
OWN = [(OPTIMIZER, "zero3"), (FREEZING, "fsdp2")]
LONG = product((OPTIMIZER, FREEZING), ("zero1", "zero2", "zero2_offload", "zero3", "fsdp2", "tp", "pp", "ddp"))


@pytest.fixture(scope="module")
def lines_of(llama, material, cache, tmp_path_factory):
    """(change, strategy, number of processes) -> metrics.jsonl of train/clm.py with that change."""

    @functools.cache
    def run(change: str, strategy: str, processes: int) -> list[dict]:
        folder = tmp_path_factory.mktemp("own")
        script, output = folder / "clm.py", folder / "run"
        text = patched((ROOT / "train" / "clm.py").read_text(), CHANGES[change])
        text = text.replace("number <= 100", "number <= 2")
        text = text.replace("if run.should_save(update):", "if run.should_save(update) or update.number == 3:")
        script.write_text(text.replace("other.txt", str(material / "text" / "valid.txt")))
        forked(
            script, "--output_dir", output, "--model_name_or_path", llama, "--train_file",
            material / "text" / "train.txt", "--block_size", "64", "--max_train_steps", "4", "--eval_steps", "2",
            "--per_device_train_batch_size", "1", "--global_batch_size", "4", "--max_eval_samples", "8",
            "--save_steps", "2", "--save_strategy", "steps", "--cache_dir", cache, "--strategy", strategy,
            processes=processes,
        )  # fmt: skip
        assert (output / "model" / "model.safetensors").is_file()
        assert [*(output / "checkpoints" / "update_00000003" / "state").glob("*.safetensors")], "one to resume from"
        return metrics(output)

    return run


def test_a_schedule_and_an_end_of_the_script(llama, material, cache, tmp_path):
    """Each rank leaves the loop after update 2 of 4."""
    text = (ROOT / "train" / "clm.py").read_text()
    text = text.replace("make_schedule(recipe, run.num_updates)", "lambda update: 1e-3 / (1 + update)")
    script, output, logged = tmp_path / "clm.py", tmp_path / "run", "        run.log(update, outcome)"
    script.write_text(text.replace(logged, f"{logged}\n        if update.number == 2:\n            break"))
    forked(
        script, "--output_dir", output, "--model_name_or_path", llama, "--train_file", material / "text" / "train.txt",
        "--block_size", "64", "--max_train_steps", "4", "--per_device_train_batch_size", "1", "--cache_dir", cache,
        "--strategy", "zero2",
    )  # fmt: skip
    made = [line for line in metrics(output) if line["update"]]
    assert [(line["update"], line["learning_rate"]) for line in made] == [(1, 1e-3), (2, 5e-4)]
    assert (output / "model" / "model.safetensors").is_file()


STEP = "outcome = engine.step(losses, run.bounds())"
TWICE = "losses += engine.forward_backward(update.micro_batches, model_loss, update.scale)"
MADE, OTHER = "make_optimizer(model, recipe, run.device, run.strategy)", "torch.optim.Adafactor(model.parameters())"


@pytest.mark.parametrize(
    ("line", "instead", "strategy", "told"),
    [
        (STEP, f"{TWICE}\n        {STEP}", "zero2", "twice before step"),
        ("engine.step(losses", "engine.step([]", "single", "step got no losses"),
        ("run.log(update, outcome)", "run.log(update, outcome, {'kind': 'big'})", "single", "which is no number"),
        ("run.log(update, outcome)", "pass", "single", "has not called run.log("),
        ("run.bounds()", "type(run.bounds())()", "single", "give it run.bounds()"),
        ("(update, evaluate())", "(update, {'eval_x': 1})", "single", "needs eval_loss"),
        (MADE, OTHER, "fsdp2", "needs each matrix in full"),
    ],
)
def test_a_change_that_a_run_cannot_keep_is_told(line, instead, strategy, told, llama, material, cache, tmp_path):
    text = (ROOT / "train" / "clm.py").read_text()
    assert text.count(line) == 1
    text = text.replace(line, instead).replace("from transformers", "import torch\nfrom transformers", 1)
    script = tmp_path / "clm.py"
    script.write_text(text)
    stderr = forked(
        script, "--output_dir", tmp_path / "run", "--model_name_or_path", llama, "--train_file",
        material / "text" / "train.txt", "--block_size", "64", "--max_train_steps", "2",
        "--per_device_train_batch_size", "1", "--cache_dir", cache, "--strategy", strategy, "--max_eval_samples", "2",
        processes=1 if strategy == "single" else 2, refused=True,
    )  # fmt: skip
    assert told in stderr


def test_a_model_called_before_the_step_and_a_changing_clip_are_the_same_under_every_strategy(
    llama, material, cache, tmp_path
):
    """FSDP2 has old weights in full after a forward pass without a backward one; DeepSpeed clips by itself."""
    text = (ROOT / "train" / "clm.py").read_text().replace("from transformers", "import torch\nfrom transformers", 1)
    step = "outcome = engine.step("
    called = "with torch.no_grad():\n            engine.model(**update.micro_batches[0].to(engine.device).inputs)"
    script = tmp_path / "clm.py"
    clip = "engine.max_grad_norm = 0.1 * update.number"
    script.write_text(text.replace(step, f"{called}\n        {clip}\n        {step}"))

    def lines(strategy: str, processes: int) -> list[dict]:
        forked(
            script, "--output_dir", tmp_path / strategy, "--model_name_or_path", llama, "--train_file",
            material / "text" / "train.txt", "--block_size", "64", "--max_train_steps", "3", "--cache_dir", cache,
            "--per_device_train_batch_size", "1", "--global_batch_size", "4", "--strategy", strategy,
            "--validation_split_percentage", "0", "--learning_rate", "1e-2", processes=processes,
        )  # fmt: skip
        return metrics(tmp_path / strategy)

    alone = lines("single", 1)
    check_alike(lines("fsdp2", 2), alone)
    check_alike(lines("zero2", 2), alone)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_loop(change, lines_of):
    lines = lines_of(change, "single", 1)
    assert [line["update"] for line in lines] == [0, 1, 2, 3, 4]
    if change == "A figure of one's own":
        assert all(line["longest_batch"] == 64 for line in lines[1:])
    if change == "Evaluate on a second data set":
        assert lines[-1]["eval_loss_other"] != lines[-1]["eval_loss"]


@pytest.mark.parametrize(
    ("change", "strategy"), OWN + [pytest.param(*case, marks=pytest.mark.long) for case in LONG if case not in OWN]
)
def test_an_optimizer_of_the_script_is_the_same_under_every_strategy(change, strategy, lines_of):
    check_alike(lines_of(change, strategy, 2), lines_of(change, "single", 1))
