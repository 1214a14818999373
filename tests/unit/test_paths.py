"""What is missing on the disk is told at once: all of it, by every task and tool, before torch is imported."""

import subprocess
import sys

import pytest
from helpers import ROOT, check_refusal, environment, refusal

from zerofit.recipe import ClmRecipe, parse_recipe
from zerofit.recipe.paths import check_paths
from zerofit.tools import verify as verify
from zerofit.tools.compare import compare as compare

GOOD = {"config_name": "gpt2", "tokenizer_name": "gpt2"}


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("some words")
    return str(tmp_path / "a.txt")


@pytest.mark.parametrize(("options", "words"), [
    ({"train_file": ["no.txt"], "validation_file": ["no/*.txt"]},
     ["train_file = 'no.txt': there is no such file", "validation_file = 'no/*.txt': no file matches"]),
    ({"model_name_or_path": "./no/model"}, ["model_name_or_path = './no/model': there is no such folder"]),
    ({"tokenizer_name": "/no/tokenizer", "config_name": "models/of/mine"},
     ["tokenizer_name = '/no/tokenizer'", "config_name = 'models/of/mine'"]),
    ({"dataset_name": "~/no/data"}, ["dataset_name = '~/no/data': there is no such folder"]),
    ({"data_path": ["0.3", "no/all"]}, ["data_path = 'no/all': there is no no/all.idx and no no/all.bin"]),
    ({"train_file": ["s3://bucket/a.txt"]}, ["train_file = 's3://bucket/a.txt': copy it to this machine first"]),
    ({"cache_dir": "{text}/cache"}, ["cache_dir = ", "a.txt is a file. Choose another folder"]),
])  # fmt: skip
def test_what_is_missing_is_told_all_at_once(text, tmp_path, options, words):
    if "cache_dir" in options:
        options = {"cache_dir": options["cache_dir"].format(text=text)}
    check_refusal(words, check_paths, ClmRecipe(**options), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_there_or_may_be_on_the_hub_is_let_through(text, tmp_path):
    check_paths(ClmRecipe(**GOOD, train_file=[text, str(tmp_path / "*.txt")]), tmp_path / "a" / "run")
    check_paths(ClmRecipe(model_name_or_path="elyza/some-model", dataset_name="wikitext"), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("task", ["clm", "cls"])
def test_it_comes_before_torch(tmp_path, task):
    """A run of two processes that is refused took 16 seconds of two cores."""
    argv = ["--model_name_or_path", "./no/model", "--train_file", "no.txt", "--output_dir", str(tmp_path / "run")]
    heavy = "[name for name in ('torch', 'transformers', 'datasets', 'deepspeed') if name in sys.modules]"
    script = ROOT / "train" / f"{task}.py"
    code = "import os, runpy, sys, zerofit.training.entry as entry\n"
    code += f"entry.leave = lambda code: (print(code, {heavy}, flush=True), os._exit(0))\n"
    code += f"sys.argv = {[str(script), *argv]}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.stdout == "2 []\n"
    assert done.stderr.splitlines() == [
        "error: 2 problems, nothing was trained",
        "  1. train_file = 'no.txt': there is no such file",
        "  2. model_name_or_path = './no/model': there is no such folder",
    ]
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["environment.json"]  # with the exit code


@pytest.mark.parametrize("flags", [(), ("--evaluate_only",)])
def test_of_a_runs_folder_the_model_is_taken(tmp_path, flags):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    named = ["--model_name_or_path", str(tmp_path / "run"), "--train_file", __file__, *flags]
    recipe = parse_recipe(ClmRecipe, named, prog="clm.py")
    assert recipe.model_name_or_path == str(tmp_path / "run" / "model")
    assert recipe.source("model_name_or_path") == "--model_name_or_path"
    check_paths(recipe, tmp_path / "new")


def test_checkpoints_that_cannot_be_written_are_found_before_the_run(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    assert f"output_dir = {str(tmp_path / 'checkpoints')!r} is a file" in refusal(check_paths, ClmRecipe(), tmp_path)


def test_metas_folder_is_answered_with_the_way_to_convert_it(tmp_path):
    folder = tmp_path / "llama-2-7b"
    folder.mkdir()
    (folder / "consolidated.00.pth").touch()
    for name in (folder, folder / "consolidated.00.pth"):
        said = refusal(check_paths, ClmRecipe(model_name_or_path=str(name)), tmp_path / "run")
        assert f"zerofit convert meta-to-hf --input {folder} --output llama-2-7b-hf" in said
    (folder / "config.json").write_text("{}")  # the hub's folders of Llama have both
    check_paths(ClmRecipe(model_name_or_path=str(folder)), tmp_path / "run")
