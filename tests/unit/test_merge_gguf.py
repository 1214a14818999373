"""`zerofit merge --gguf`, with a stand-in for llama.cpp's converter."""

from pathlib import Path

import pytest

from zerofit.recipe import UserError
from zerofit.tools.merge import CONVERTERS, find_converter, to_gguf

STAND_IN = """import sys
model, _, outfile, *rest = sys.argv[1:]
assert rest == ["--outtype", "auto"]
if model.endswith("broken"):
    sys.exit("ERROR:hf-to-gguf:Model BrokenForCausalLM is not supported")
open(outfile, "w").write("GGUF")
"""


@pytest.fixture
def converter(tmp_path, monkeypatch):
    (tmp_path / CONVERTERS[0]).write_text(STAND_IN)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    return find_converter(tmp_path / "model.gguf")


def test_it_is_converted(converter, tmp_path):
    gguf = tmp_path / "model.gguf"
    assert str(gguf) in to_gguf(converter, Path("merged"), gguf)
    assert gguf.read_text() == "GGUF"
    with pytest.raises(UserError, match="exists, and is not replaced"):
        find_converter(gguf)


def test_the_converters_own_words(converter, tmp_path):
    with pytest.raises(UserError, match="BrokenForCausalLM is not supported"):
        to_gguf(converter, tmp_path / "broken", tmp_path / "model.gguf")


def test_without_it_the_way_to_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    with pytest.raises(UserError, match=r"git clone .*llama\.cpp"):
        find_converter(tmp_path / "model.gguf")
    (tmp_path / CONVERTERS[1]).touch()
    assert find_converter(tmp_path / "model.gguf") == [str(tmp_path / CONVERTERS[1])]
