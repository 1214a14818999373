"""Sequence parallelism: rows that ranks split, against rows in full."""

import json
from pathlib import Path

import pytest
from helpers import forked

KINDS = ("padded", "packed", "mask", "recomputed")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    output = tmp_path_factory.mktemp("rows") / "found.json"
    forked(Path(__file__).with_name("split_rows.py"), output)
    models = json.loads(output.read_text())
    assert len(models) >= 7
    return models


@pytest.mark.parametrize("kind", KINDS)
def test_split_rows_are_rows_in_full(found, kind):
    """Loss, gradients and logits, of rows that two ranks do not divide."""
    largest = {name: max(figures[kind].values()) for name, figures in found.items() if kind in figures}
    assert all(value < 1e-5 for value in largest.values()), largest


def test_packed_documents_do_not_see_each_other(found):
    for name, figures in found.items():
        said = figures["checks"]
        if said is None:  # a ring, in which no documents can be packed
            continue
        assert "mixes them" in said["isolation"], name
        assert "sequence_parallel_size = 2:" in said["loss"], name
