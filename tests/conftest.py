"""Shared by all tests: an own cache, no hub, and the real data beside the checkout."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"
os.environ["WANDB_MODE"] = "offline"
sys.path.insert(0, str(ROOT / "tests"))  # helpers.py


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> str:
    """A folder for prepared data, one for the whole session."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The real data of ../shared/data; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not there: this test reads real data")
    return SHARED


@pytest.fixture(scope="session")
def stories(shared) -> Path:
    """A real pretrained Llama of 260,032 parameters."""
    return shared / "models" / "stories260K" / "hf"
