"""Shared by all tests: an own cache, no hub, and the data that tests read."""

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = {  # what takes the place of the material's parts; others have the same name
    "text/train.txt": "text/tinystories_a.txt",
    "text/valid.txt": "wikitext-2/valid.txt",
    "dialogue/keyed.json": "dialogue/valid_freq.json",
    "dialogue/talks.json": "dialogue/blended_skill_talk_val.json",
    "instruct/english.json": "instruct/alpaca_en_demo.json",
    "instruct/japanese.json": "instruct/ja_qa.json",
    "tokenizers/blenderbot": "tokenizers/blenderbot-400M-distill",
    "tokenizers/llama": "tokenizers/llama2",
    "models/llama/hf": "models/stories260K/hf",
    "models/llama/meta": "models/stories260K/meta",
    "megatron/first_document": "megatron/ag_news_prompt_inputs_document",
    "megatron/second_document": "megatron/ag_news_prompt_targets_document",
}

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"
os.environ["WANDB_MODE"] = "offline"
if "PYTEST_XDIST_WORKER" not in os.environ:  # the user's own cache stays as it is; workers have that of the session
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="zerofit-tests-")
    atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: their threads would wait for each other
    torch.set_num_threads(1)
sys.path.insert(0, str(ROOT / "tests"))  # helpers.py, material


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> str:
    """A folder for prepared data, one for the whole session."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def material(request, tmp_path_factory) -> Path:
    """Texts, records, tokenizers and a trained Llama, made here: material/__init__.py says what is where."""
    from material import make_material

    cache = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    return make_material(cache.mkdir("material") if cache else tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def launched_once(tmp_path_factory):
    """launched_once(name, flags, ...): the output folder of a launch that has to end well, made at the first call."""
    from helpers import completed

    folder, done = tmp_path_factory.mktemp("once"), set()

    def once(name: str, *arguments, **how) -> Path:
        if name not in done:
            completed(folder / name, *arguments, **how)
            done.add(name)
        return folder / name

    return once


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory) -> Path:
    """A folder with a byte-level tokenizer of 300 tokens, made without a network."""
    from folders import small_tokenizer

    folder = tmp_path_factory.mktemp("byte_tokenizer")
    small_tokenizer(folder / "cache").save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


@pytest.fixture(scope="session")
def pairs_tokenizer(tmp_path_factory) -> Path:
    """The same for texts and pairs of them."""
    from folders import small_tokenizer

    folder = tmp_path_factory.mktemp("pairs_tokenizer")
    small_tokenizer(folder / "cache", pairs=True).save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


@pytest.fixture(scope="session")
def llama(material) -> Path:
    """A small Llama that was trained for some seconds: 260,032 parameters, GQA 8/4, a bare tokenizer.model."""
    return material / "models" / "llama" / "hf"


@pytest.fixture(scope="session")
def real() -> Path:
    """Published data and weights, for the tests that are marked so: the folder that ZEROFIT_REAL_DATA names."""
    named = os.environ.get("ZEROFIT_REAL_DATA")
    if not (named and Path(named).is_dir()):
        pytest.fail("tests marked `real` read published data: set ZEROFIT_REAL_DATA to its folder (docs/real-data.md)")
    return Path(named).resolve()


def pytest_addoption(parser):
    parser.addoption("--family", help="the model type that tests/launch/test_family.py tries")
    parser.addoption("--seeds", default="0-99", help="what tests/launch/test_random_combinations.py tries: 7, or 0-99")


class Data:
    """data(NAME) is the path of what is called so in the material, or of what is published in its place."""

    def __init__(self, folder: Path, names: dict[str, str] | None = None):
        self._folder, self._names = folder, names
        self.real = names is not None

    def __call__(self, name: str) -> Path:
        return self._folder / (self._names.get(name, name) if self._names else name)


@pytest.fixture(scope="session", params=["made", pytest.param("real", marks=pytest.mark.real)])
def data(request) -> Data:
    """For tests that say the same of made and of published data; with the latter they are marked."""
    if request.param == "made":
        return Data(request.getfixturevalue("material"))
    return Data(request.getfixturevalue("real"), PUBLISHED)
