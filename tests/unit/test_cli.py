"""The `zerofit` command: its subcommands, and what it says."""

import os
import subprocess
import sys

import pytest
from helpers import BIN, ROOT

from zerofit.cli import COMMANDS, main

HEAVY = ("torch", "transformers", "peft", "datasets", "accelerate", "deepspeed")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_a_tools(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: zerofit {command} ")
    assert "accelerate launch" not in shown


@pytest.mark.parametrize("argv", [["--help"], ["generate"], ["show", "."]])
def test_nothing_heavy_is_imported_for_it(argv):
    code = f"import sys, zerofit.cli\ntry: zerofit.cli.main({argv})\nexcept SystemExit: pass\n"
    code += f"print('heavy', [name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy []"
    assert len(done.stdout.splitlines() + done.stderr.splitlines()) >= 2, "it said nothing"


def test_an_unknown_command():
    done = subprocess.run([str(BIN / "zerofit"), "generat"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: 'generat' is not a command of zerofit. Did you mean generate?\n"
    assert not done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train"], "zerofit launch RECIPE"),
        (["trian", "--config", "x.yaml"], "zerofit launch RECIPE"),
        (["lanch"], "Did you mean launch?"),
        (["merge", "--model", "outputs/x"], "say --adapter FOLDER"),
        (["merge", "--adaptor", "outputs/x"], "Did you mean adapter?"),
        (["merge", "--output_dir", "x"], "say --output FOLDER"),
        (["launch", "recipes/clm/stdlib-gtp2.yaml", "--dry_run"], "recipes/clm/stdlib-gpt2.yaml?"),
        (["launch", "--config", "stdlib-gpt", "--dry_run"], "recipes/clm/stdlib-gpt2.yaml?"),
        (["plan", "--task", "clm", "--config", "gpt2-wikitext.yaml"], "recipes/clm/gpt2-wikitext2.yaml?"),
        (["plan", "--task", "cls", "--num_labels", "3"], "follows from the labels"),
        (["doctor", "--strategy", "zero4"], "Did you mean zero3?"),
        (["launch", "recipes/clm/stdlib-gpt2.yaml", "--strategy", "fsdp", "--dry_run"], "Did you mean fsdp2?"),
    ],
)
def test_a_mistake_gets_a_hint(words, said, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(words) == 2 or "doctor" in words
    shown = capfd.readouterr()
    assert said in shown.err + shown.out


def test_mistakes_are_reported_together_and_speak_of_no_training(capsys):
    assert main(["merge", "--precison", "fp8"]) == 2
    assert capsys.readouterr().err.startswith("error: --precison is not an option. Did you mean precision?")
    assert main(["merge"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: 2 problems, nothing was done\n")
    assert "--adapter" in shown
    assert "--output" in shown


def test_a_reader_that_goes_away():
    """`zerofit ... | head`: no traceback."""
    read, write = os.pipe()
    os.close(read)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [BIN / "zerofit", "generate", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(write)
    assert done.returncode == 141
    assert not done.stderr
