"""The parts of `zerofit verify` that launch nothing: what it compares, shortens and refuses, and when it kills."""

import math
import os
import sys
from contextlib import suppress

import pytest
from helpers import ROOT, check_refusal, refusal

from zerofit.recipe import ClmRecipe, parse_recipe
from zerofit.record.run_folder import check_folder_of
from zerofit.strategy.builds import drop_abandoned_locks, lock_files
from zerofit.tools.runs import RunningLaunch, failure, find_processes
from zerofit.tools.tool_recipe import read_with_recipe, recipe_text
from zerofit.tools.verify import ComparedRun, VerifyOptions, compare_records, shorten

LINES = [{"update": k, "loss": 5.0 / k, "grad_norm": 1.0 + k, "learning_rate": 0.1 * (k - 1)} for k in range(1, 6)]
LEDGER = [{"update": k, "samples": [4 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3]} for k in range(1, 6)]
RECIPE = ROOT / "recipes" / "clm" / "stdlib-gpt2.yaml"


def changed(lines: list[dict], update: int, **figures) -> list[dict]:
    return [{**line, **figures} if line["update"] == update else line for line in lines]


def without(lines: list[dict], update: int) -> list[dict]:
    return [line for line in lines if line["update"] != update]


def outcome(lines=LINES, ledger=LEDGER, **more) -> ComparedRun:
    difference = compare_records(lines, ledger, LINES, LEDGER, 5)
    return ComparedRun("zero2", [2], difference=difference, **more)


@pytest.mark.parametrize("figure", ["loss", "grad_norm", "learning_rate"])
def test_the_largest_difference_is_found(figure):
    off = outcome(changed(LINES, 4, **{figure: LINES[3][figure] * (1 + 1e-4)}))
    assert off.difference.largest[figure] == pytest.approx(1e-4, rel=1e-6)
    assert sum(off.difference.largest.values()) == off.difference.largest[figure]
    assert not off.problems(2e-4)
    assert "differs by more than 1e-05" in off.problems(1e-5)[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_what_is_no_number_agrees_with_nothing(value):
    ours = changed(LINES, 3, loss=value)
    for theirs in (ours, LINES):
        assert math.isnan(compare_records(ours, LEDGER, theirs, LEDGER, 5).largest["loss"])
    assert "loss is not a number" in outcome(ours).problems(1e9)[0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (outcome(without(LINES, 3)), "updates missing: 3"),
        (outcome([*LINES, LINES[1]]), "updates more than once: 2"),
        (outcome([*LINES, {**LINES[1], "update": 6}]), "updates beyond 5: 6"),
        (outcome([]), "updates missing: 1, 2, 3, 4, 5"),
        (outcome(ledger=without(LEDGER, 2)), "1 updates have other samples"),
        (outcome(kills=3), "no kill was followed by a resume"),
        (ComparedRun("zero2", [2], "left with exit code 1"), "exit code 1"),
    ],
)
def test_an_outcome_says_what_is_wrong(wrong, said):
    assert said in wrong.problems(1.0)[0]
    assert not outcome(kills=2, kills_resumed=1).problems(1e-5)


def test_samples_repeated_and_skipped():
    swapped = changed(changed(LEDGER, 1, samples=LEDGER[1]["samples"]), 2, samples=LEDGER[0]["samples"])
    for ledger, expected in (
        ([], (0, 20, 5)),
        (without(LEDGER, 3), (0, 4, 1)),
        ([*LEDGER, LEDGER[1]], (4, 0, 1)),
        (changed(LEDGER, 2, samples=[8, 9, 10, 12]), (1, 1, 1)),
        (swapped, (0, 0, 2)),
    ):
        found = outcome(ledger=ledger).difference
        assert (found.repeated, found.skipped) == expected[:2]
        assert found.problems == [f"{expected[2]} updates have other samples than they should have"]
    with pytest.raises(ValueError, match="no samples"):
        compare_records(LINES, LEDGER, LINES, [], 5)


def options_of(*flags: str):
    return read_with_recipe(VerifyOptions, ["--config", str(RECIPE), *flags], "zerofit verify")


def test_a_recipe_is_shortened():
    options, cls = options_of("--updates", "9", "--num_processes", "2", "--precision", "bf16", "--kills", "2")
    assert cls is ClmRecipe
    options.gradient_accumulation_steps = None
    values, notes = shorten(options, cls)
    assert values["max_train_steps"] == 9
    assert values["global_batch_size"] == 16
    assert values["num_warmup_steps"] == 3
    assert values["precision"] == "bf16"
    assert "num_warmup_steps 3 instead of 20" in notes
    assert not {"output_dir", "sample_prompt", "updates", "kills"} & values.keys()


def test_the_shortened_recipe_is_one(tmp_path):
    """Every one in the tree goes through the real parser again; dropout is off, and the rest as it was."""
    done = 0
    for path in sorted(ROOT.glob("recipes/*/*.yaml")):
        options, cls = read_with_recipe(VerifyOptions, ["--config", str(path)], "zerofit verify")
        if options.model_name_or_path:
            continue  # of the hub
        file = tmp_path / path.name
        file.write_text(recipe_text(shorten(options, cls)[0]))
        again = parse_recipe(cls, ["--config", str(file)])
        assert (again.max_train_steps, again.record_samples) == (12, True)
        assert again.learning_rate == options.learning_rate
        done += 1
    assert done >= 3


def test_the_noise_is_turned_off(tmp_path):
    options, cls = options_of("--config_overrides", "n_layer=2,attn_pdrop=0.3", "--lora", "--lora_dropout", "0.2")
    values, notes = shorten(options, cls)
    from zerofit.model.configuration import load_configuration

    (tmp_path / "short.yaml").write_text(recipe_text(values))
    again = parse_recipe(cls, ["--config", str(tmp_path / "short.yaml")])
    config = load_configuration(again)
    assert (config.attn_pdrop, config.resid_pdrop, config.embd_pdrop, config.n_layer) == (0, 0, 0, 2)
    assert again.lora_dropout == 0
    assert any("attn_pdrop" in change and "lora_dropout" in change for change in notes)


def test_what_is_not_a_proof_is_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("of years")
    assert "holds something else than an earlier proof" in refusal(check_folder_of, tmp_path, "recipe.yaml", "proof")
    assert "is a file" in refusal(check_folder_of, tmp_path / "thesis.txt", "recipe.yaml", "proof")
    (tmp_path / "recipe.yaml").write_text("")
    check_folder_of(tmp_path, "recipe.yaml", "proof")
    check_folder_of(tmp_path / "new", "recipe.yaml", "proof")


SLEEPER = (
    "import subprocess, sys, time; subprocess.Popen(['sleep', '600'], start_new_session=True); "
    "print('update  3/9', flush=True); time.sleep(600)"
)


def test_nothing_of_a_launch_is_left(tmp_path):
    """A grandchild in a session of its own too, and also where the block is left by an exception."""
    with suppress(KeyboardInterrupt):
        with RunningLaunch([sys.executable, "-c", SLEEPER], tmp_path, tmp_path / "logs" / "log") as launch:
            assert launch.wait(60, lambda launch: launch.newest_update == 3) == "until"
            both = launch.wait(60, lambda launch: len(find_processes(launch.mark)) == 2)
            raise KeyboardInterrupt
    assert both == "until"
    assert not find_processes(launch.mark)
    assert launch.process.returncode == -9


def test_how_a_launch_failed(tmp_path):
    def ended(code: str) -> str | None:
        with RunningLaunch([sys.executable, "-c", code], tmp_path, tmp_path / "log") as launch:
            return failure(launch, launch.wait(60))

    assert ended("print('well')") is None
    assert "ended with exit code 3" in ended("print('why'); raise SystemExit(3)")
    assert "  | why" in ended("print('why'); raise SystemExit(3)")
    assert "printed a traceback" in ended("print('Traceback (most recent call last):')")
    with RunningLaunch([sys.executable, "-c", SLEEPER], tmp_path, tmp_path / "log") as launch:
        assert "has not ended in" in failure(launch, launch.wait(0.0))


def test_locks_that_nobody_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("held", "left"):
        (tmp_path / name).mkdir()
    held = os.open(tmp_path / "held" / "lock", os.O_CREAT | os.O_EXCL)
    (tmp_path / "left" / "lock").touch()
    try:
        assert drop_abandoned_locks() == [str(tmp_path / "left" / "lock")]
        assert lock_files() == [str(tmp_path / "held" / "lock")]
    finally:
        os.close(held)
    assert drop_abandoned_locks() == [str(tmp_path / "held" / "lock")]


def test_a_checkpoint_that_comes_after_the_end_is_refused():
    check_refusal(["save_steps = 12 and updates = 12", "--save_steps 2"], options_of, "--save_steps", "12")
    options_of("--save_steps", "12", "--kills", "0")
    options_of("--save_steps", "11")


def test_a_number_of_processes_that_does_not_divide_the_batch_is_refused():
    said = refusal(shorten, *options_of("--resumed_processes", "3"))
    assert "These numbers of processes can: 1, 2, 4, 8, 16" in said
