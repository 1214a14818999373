"""What the tests' own data must be, so that what reads it proves something."""

import csv
import json
import math

import pytest
import torch
from material import make_material
from transformers import AutoModelForCausalLM, LlamaTokenizer

from zerofit.data.megatron.corpus import open_corpus


def test_there_is_enough_of_everything(material):
    for name, least in (("train", 2000), ("valid", 200)):
        assert len((material / "text" / f"{name}.txt").read_text().split("\n<|endoftext|>\n")) > least
    for name, least in (("keyed", 300), ("talks", 300)):
        assert len(json.loads((material / "dialogue" / f"{name}.json").read_text())) > least
    for name in ("english", "japanese"):
        records = json.loads((material / "instruct" / f"{name}.json").read_text())
        assert len(records) >= 500
        assert 0.4 < sum(not record["input"] for record in records) / len(records) < 0.6
        assert all(record["output"].isascii() == (name == "english") for record in records[:100])
    for name in ("first", "second"):
        assert open_corpus("data_path", str(material / "megatron" / f"{name}_document")).documents == 100


@pytest.mark.parametrize(("task", "columns"), [("MRPC", 5), ("SST-2", 2)])
def test_labelled_files_are_as_released(material, task, columns):
    for part, least in (("train", 500), ("dev", 100)):
        text = (material / "glue" / task / f"{part}.tsv").read_text(encoding="utf-8-sig")
        rows = list(csv.reader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
        assert len(rows) > least
        assert {len(row) for row in rows} == {columns}
        labels = [row[0 if task == "MRPC" else 1] for row in rows]
        assert 0.05 < labels.count("1") / len(labels) < 0.8
    assert text.count('"') > 10
    assert ((material / "glue" / task / "dev.tsv").read_bytes()[:3] == b"\xef\xbb\xbf") == (task == "MRPC")


def test_the_llama_has_learnt(material):
    """Held-out documents: far below the ln 512 of a model that knows nothing."""
    folder = material / "models" / "llama" / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 260_032
    text = (material / "text" / "valid.txt").read_text()[:40_000]
    ids = torch.tensor(LlamaTokenizer.from_pretrained(folder)(text)["input_ids"][:12_800]).view(100, 128)
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss < math.log(512) - 1.5


def test_what_is_there_is_not_made_again(material):
    before = sorted(material.parent.iterdir())
    assert make_material(material.parent) == material
    assert sorted(material.parent.iterdir()) == before
