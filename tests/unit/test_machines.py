"""Several machines: facts in which they differ, and file systems that they share."""

from types import SimpleNamespace

import psutil
import pytest
from helpers import refusal

from zerofit.recipe.files import is_shared
from zerofit.strategy import strategy
from zerofit.strategy.strategy import check_same


def test_the_machine_that_differs_is_named(monkeypatch):
    """A checkpoint that one rank finds damaged is left by all: launch/test_resume.py."""
    alike, other = {"data": "10 files", "seed": 1}, {"data": "9 files", "seed": 1}
    for facts, said in (([alike, alike, other], True), ([alike] * 3, False)):
        gathered = [(f"machine{rank}", each) for rank, each in enumerate(facts)]
        monkeypatch.setattr(strategy, "all_gather_objects", lambda mine, gathered=gathered: gathered)
        if said:
            assert refusal(check_same, alike, "Copy it") == (
                "error: rank 2, on machine machine2, has another data than rank 0, on machine machine0: 9 files, and "
                "there 10 files. Copy it"
            )
        else:
            check_same(alike, "Copy it")


@pytest.mark.parametrize(("kind", "shared"), [("nfs4", True), ("lustre", True), ("ext4", False), ("overlay", False)])
def test_file_systems_that_machines_share(monkeypatch, tmp_path, kind, shared):
    disks = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(tmp_path), fstype=kind)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: disks)
    assert is_shared(tmp_path / "cache") is shared
