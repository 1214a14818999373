"""What strangers hand over runs nothing: an index beside a corpus, caches, a configuration, a manifest, a recipe.
What would take all time or memory ends in one sentence, and on the terminal no control character is raw."""

import json
import os
import pickle
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.helpers import Harmful, refusal, tiny_model
from zerofit.checkpoint import directory
from zerofit.checkpoint.directory import SaveReason, find_damage, write_manifest
from zerofit.data.megatron import INDEX_FOLDER
from zerofit.data.text import tokenize_texts
from zerofit.model.adapter_folder import open_adapter
from zerofit.model.configuration import load_configuration, read_config, read_json
from zerofit.model.pretrained_io import read_model
from zerofit.recipe import paths
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import cache_root
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.tasks import ClmRecipe
from zerofit.record.model_card import model_card
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import Bar, log_lines, table
from zerofit.strategy.builds import check_compiled_code
from zerofit.tools.compare.compare import render_html
from zerofit.tools.doctor.doctor import read_doctor_options
from zerofit.tools.generate.respond import read_prompts
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.tool_recipe import read_with_recipe

# -------------------------------------------------------------------------------------------- an index beside a corpus


@pytest.fixture
def corpora():
    """test_corpora.py, which makes corpora and their samples; without the extra [megatron] it is skipped."""
    return pytest.importorskip("test_corpora")


@pytest.fixture
def corpus(tmp_path, corpora) -> str:
    return corpora.write_corpus(tmp_path / "x", corpora.random_documents(0, 60))


def test_an_index_beside_a_corpus_is_not_read(corpora, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache of the user"))
    expected = corpora.samples_of(corpus, 20, cache_root(None) / INDEX_FOLDER)[3]["input_ids"].tolist()
    assert not Path(f"{corpus}/cache").exists()
    theirs = Path(f"{corpus}/cache/GPTDataset_indices")
    theirs.parent.mkdir(parents=True)
    (tmp_path / "cache of the user" / "zerofit" / "GPTDataset_indices").rename(theirs)  # one that fits, poisoned
    for file in theirs.rglob("*.npy"):
        file.write_bytes(pickle.dumps(Harmful(tmp_path / "executed")))
    assert corpora.samples_of(corpus, 20, cache_root(None) / INDEX_FOLDER)[3]["input_ids"].tolist() == expected
    assert not (tmp_path / "executed").exists()


def test_a_file_of_an_index_that_is_no_array_is_refused(corpora, corpus, tmp_path):
    corpora.samples_of(corpus, 20, tmp_path / "cache")
    (file,) = (tmp_path / "cache").rglob("*shuffle_index.npy")
    file.write_bytes(pickle.dumps(Harmful(tmp_path / "executed")))
    assert str(file.parent) in refusal(corpora.samples_of, corpus, 20, tmp_path / "cache")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("variable", ["TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_compiled_code_is_not_run_from_a_folder_of_others(tmp_path, monkeypatch, variable):
    folder = tmp_path / "compiled"
    monkeypatch.setenv(variable, str(folder))
    check_compiled_code()
    folder.mkdir()
    for mode in (0o700, 0o755, 0o775):  # the group is the user's own
        folder.chmod(mode)
        check_compiled_code()
    folder.chmod(0o777)
    assert {variable, str(folder)} <= set(refusal(check_compiled_code).split())
    folder.chmod(0o755)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    monkeypatch.setattr(paths, "ROOT_USER", -1)
    assert variable in refusal(check_compiled_code)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_configuration_cannot_name_a_kernel_of_the_hub(tmp_path, key):
    tiny_model("gpt2").config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, key: "somebody/kernel"}))
    recipe = parse_recipe(ClmRecipe, ["--config_name", str(tmp_path), "--tokenizer_name", "any", "--train_file", "x"])
    for read in (lambda: load_configuration(recipe), lambda: read_config("model", str(tmp_path))):
        assert "somebody/kernel" in refusal(read)
    (tmp_path / "config.json").write_text(json.dumps({**content, key: "sdpa"}))
    assert read_config("model", str(tmp_path))._attn_implementation == "sdpa"


def test_what_only_predicts_asks_on_the_command_line_before_it_runs_code_of_others(tmp_path):
    (tmp_path / "clm").mkdir()
    recipe = tmp_path / "clm" / "x.yaml"
    recipe.write_text("config_name: docs/own-model\ntokenizer_name: any\ntrain_file: x\ntrust_remote_code: true\n")
    plan = ["--config", str(recipe), "--gpu", "h100-80gb"]
    assert "--trust_remote_code" in refusal(read_with_recipe, PlanOptions, plan, "zerofit plan")
    assert read_with_recipe(PlanOptions, [*plan, "--trust_remote_code"], "zerofit plan")[0].trust_remote_code
    assert "--trust_remote_code" in " ".join(read_doctor_options(plan[:2])[-1])
    assert not read_doctor_options([*plan[:2], "--trust_remote_code"])[-1]
    assert parse_recipe(ClmRecipe, plan[:2]).trust_remote_code  # a run asks for what its recipe says


@pytest.mark.parametrize("name", ["../outside", "{}/outside", "model/../../outside"])
def test_a_manifest_names_files_of_its_own_folder(tmp_path, name):
    (tmp_path / "outside").write_text("of the user")
    folder = tmp_path / "update_00000001"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "x").write_text("whole")
    name = name.format(tmp_path)
    write_manifest(folder, SaveReason.REQUESTED, {})
    assert find_damage(folder) is None
    files = {name: directory.manifest_entry(tmp_path / "outside")}
    (folder / "manifest.json").write_text(directory._manifest({"why": SaveReason.REQUESTED, "files": files}))
    assert "manifest.json" in (find_damage(folder) or "")


def test_a_refused_pickle_is_refused_in_our_own_words(tmp_path):
    model = tiny_model("gpt2")
    model.config.save_pretrained(tmp_path)
    torch.save({**model.state_dict(), "more": Harmful(tmp_path / "executed")}, tmp_path / "pytorch_model.bin")
    message = refusal(read_model, AutoModelForCausalLM, "model", str(tmp_path), model.config, precision=None)
    assert str(tmp_path) in message
    assert "weights_only" not in message
    assert not (tmp_path / "executed").exists()


# ----------------------------------------------------------------------------------------------------- time and memory


DEEP = "[" * 100_000
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize("bomb", [
    f"{ALIASES}train_file: *i\n", f"train_file: {DEEP}\n", f"train_file: {'{a: ' * 5000}\n",
    f"max_train_steps: {'9' * 9999}\n", "seed: 2026-99-99\n", "train_file: &x [*x]\n",
])  # fmt: skip
def test_yaml(tmp_path, bomb):
    (tmp_path / "recipe.yaml").write_text(bomb)
    began = time.process_time()
    message = refusal(parse_recipe, ClmRecipe, ["--config", str(tmp_path / "recipe.yaml")])
    assert "recipe.yaml" in message
    assert len(message) < 2000
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "loss": 1.0}\n')
    assert RunFolder(tmp_path).recorded() is None
    assert time.process_time() - began < 20


def test_json_that_is_nested_too_deeply(tmp_path):
    for name in ("adapter_config.json", "config.json", "deepspeed.json", "prompts.jsonl"):
        (tmp_path / name).write_text(f'{{"a": {DEEP}')
    assert "adapter_config.json" in refusal(open_adapter, str(tmp_path))
    assert str(tmp_path) in refusal(read_config, "model", str(tmp_path))
    assert "deepspeed.json" in refusal(read_json, tmp_path / "deepspeed.json")
    assert "prompts.jsonl" in refusal(read_prompts, SimpleNamespace(prompt_file=str(tmp_path / "prompts.jsonl")))


def test_a_text_that_takes_more_memory_than_there_is(tmp_path, monkeypatch):
    backend = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    table = Dataset.from_dict({"text": ["a " * 10**5, "a a"]})
    assert [len(row) for row in tokenize_texts(table, tokenizer, True, tmp_path)["input_ids"]] == [10**5 + 1, 3]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=30 << 20))
    assert "200,000 characters" in refusal(tokenize_texts, table, tokenizer, False, tmp_path)


# ----------------------------------------------------------------------------------------------------- texts and names


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31mname\r\x08\u202egnp.exe\x7f"
RAW = set("\x1b\x07\x9b\r\x08\u202e\x7f")


def test_what_is_printed(capsys):
    log_lines("data", HOSTILE)
    log_lines(table([("name", "rows"), (HOSTILE, f"1\n{HOSTILE}")]))
    Bar(10, 1, main=True).log_lines(HOSTILE)
    log_lines(UserError([f"column {HOSTILE}", "another"]).report(), UserError(HOSTILE).report())
    shown = "".join(capsys.readouterr())
    assert shown.count("name") > 5
    assert not RAW & set(shown)
    assert "\n\\x1b" not in table([("name", "rows"), ("x", f"1\n{HOSTILE}")])


@pytest.mark.parametrize("name", [
    'a\nlicense: mit\nextra: [x', "a: b # c", '"\n---\n# Other', f"x{HOSTILE}", "a'); import os; os.system('id') #",
    'x", trust_remote_code=True) #',
])  # fmt: skip
def test_a_name_stays_a_name_in_a_model_card(name):
    recipe = ClmRecipe(model_name_or_path=name, train_file=[f"{name}.txt"], report_name=name)
    recipe.remember_sources({option: f"--{option}" for option in ("model_name_or_path", "train_file")})
    environment = {"packages": {"torch": "2.0"}, "zerofit_commit": None}
    for is_adapter in (False, True):
        card = model_card("clm", recipe, {"eval_loss": 1.5}, environment, is_adapter)
        assert not RAW & set(card)
        front = yaml.safe_load(card.split("---\n")[1])
        assert set(front) == {"library_name", "base_model", "tags"}
        assert front["base_model"] == name
        assert [line for line in card.splitlines() if line.startswith("# ")] == [card.splitlines()[6]]
        assert json.loads(card.split("```json\n")[1].split("\n```")[0])["model_name_or_path"] == name
    code = compile(card.split("```python\n")[1].split("```")[0], "card", "exec")
    assert name in code.co_consts
    assert "os" not in code.co_names


def test_a_report_in_html():
    page = render_html([f"# {HOSTILE}", "<script>", [("strategy", "a"), (HOSTILE, "<b>")], [HOSTILE]], {})
    assert not RAW & set(page)
    assert "<script>" not in page
