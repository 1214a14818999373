"""What strangers hand over runs nothing: an index beside a corpus, caches, a configuration, a manifest, a recipe."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import Harmful, refusal, tiny_model
from zerofit.checkpoint.directory import ASKED, find_damage, seal
from zerofit.data.megatron import INDICES
from zerofit.model.configuration import load_configuration, read_config
from zerofit.model.pretrained_io import read_model
from zerofit.recipe import paths
from zerofit.recipe.files import cache_root
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.tasks import ClmRecipe
from zerofit.strategy.builds import check_compiled_code
from zerofit.tools.doctor.doctor import read_options
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.tool_recipe import read_with_recipe

# ------------------------------------------------------------------------------------------- an index beside a corpus


@pytest.fixture
def corpora():
    """test_corpora.py, which makes corpora and their samples; without the extra [megatron] it is skipped."""
    return pytest.importorskip("test_corpora")


@pytest.fixture
def corpus(tmp_path, corpora) -> str:
    return corpora.write_corpus(tmp_path / "x", corpora.random_documents(0, 60))


def test_an_index_lies_in_the_users_cache_and_nothing_beside_the_corpus_is_read(
    corpora, corpus, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache of the user"))
    expected = corpora.samples_of(corpus, 20, cache_root(None) / INDICES)[3]["input_ids"].tolist()
    assert not Path(f"{corpus}/cache").exists()
    theirs = Path(f"{corpus}/cache/GPTDataset_indices")
    theirs.parent.mkdir(parents=True)
    (tmp_path / "cache of the user" / "zerofit" / "GPTDataset_indices").rename(theirs)  # one that fits, poisoned
    for file in theirs.rglob("*.npy"):
        file.write_bytes(pickle.dumps(Harmful(tmp_path / "executed")))
    assert corpora.samples_of(corpus, 20, cache_root(None) / INDICES)[3]["input_ids"].tolist() == expected
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
    monkeypatch.setattr(paths, "ADMINISTRATOR", -1)
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
    assert "--trust_remote_code" in " ".join(read_options(plan[:2])[-1])
    assert not read_options([*plan[:2], "--trust_remote_code"])[-1]
    assert parse_recipe(ClmRecipe, plan[:2]).trust_remote_code  # a run asks for what its recipe says


@pytest.mark.parametrize("name", ["../outside", "{}/outside", "model/../../outside"])
def test_a_manifest_names_files_of_its_own_folder(tmp_path, name):
    (tmp_path / "outside").write_text("of the user")
    folder = tmp_path / "update_00000001"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "x").write_text("whole")
    name = name.format(tmp_path)
    seal(folder, ASKED, {})
    assert find_damage(folder) is None
    import zerofit.checkpoint.directory as directory

    files = {name: directory.manifest_entry(tmp_path / "outside")}
    (folder / "manifest.json").write_text(directory._manifest({"why": ASKED, "files": files}))
    assert "manifest.json" in (find_damage(folder) or "")


def test_a_refused_pickle_is_refused_in_our_own_words(tmp_path):
    model = tiny_model("gpt2")
    model.config.save_pretrained(tmp_path)
    torch.save({**model.state_dict(), "more": Harmful(tmp_path / "executed")}, tmp_path / "pytorch_model.bin")
    message = refusal(read_model, AutoModelForCausalLM, "model", str(tmp_path), model.config, precision=None)
    assert str(tmp_path) in message
    assert "weights_only" not in message
    assert not (tmp_path / "executed").exists()
