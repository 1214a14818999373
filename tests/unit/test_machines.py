"""Several machines: caches that some share and some do not, and views that differ."""

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist
from helpers import at_once, refusal
from test_saving import Alone, fill

from zerofit.checkpoint import writer as saving
from zerofit.checkpoint.directory import ASKED, CheckpointDirectory
from zerofit.checkpoint.writer import AsyncCheckpointWriter
from zerofit.recipe.files import appears, is_shared, is_there
from zerofit.strategy import strategy
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.strategy import check_same


@pytest.fixture
def ranks(monkeypatch):
    """Runs a function of the rank on several ranks at once, as threads; returns what each has returned or said."""

    def run(function, count: int = 2) -> list:
        values, meeting, rank_of = [None] * count, threading.Barrier(count, timeout=60), threading.local()

        def gather(found: list, value) -> None:
            values[rank_of.number] = value
            meeting.wait()
            found[:] = values
            meeting.wait()

        for name, replacement in (
            ("is_initialized", lambda: True),
            ("get_world_size", lambda: count),
            ("all_gather_object", gather),
        ):
            monkeypatch.setattr(dist, name, replacement)
        monkeypatch.setattr(strategy.platform, "node", lambda: f"machine{rank_of.number}")

        def work(rank: int):
            rank_of.number = rank
            return function(rank)

        return at_once(*(partial(work, rank) for rank in range(count)))

    return run


def test_the_machine_that_differs_is_named_on_all_ranks(ranks):
    facts = [{"data": "10 files", "seed": 1}, {"data": "10 files", "seed": 1}, {"data": "9 files", "seed": 1}]
    said = ranks(lambda rank: refusal(check_same, facts[rank], "Copy it"), 3)
    assert set(said) == {
        "error: rank 2, on machine machine2, has another data than rank 0, on machine machine0: 9 files, and there "
        "10 files. Copy it"
    }
    assert ranks(lambda rank: check_same(facts[0], "Copy it"), 3) == [None] * 3


class OneOf(Alone):
    """An engine of one of two ranks that are threads."""

    def __init__(self, rank: int):
        super().__init__()
        self.layout, self.is_main = ParallelLayout(2, rank), rank == 0

    def from_main(self, value):
        return strategy.all_gather_objects(value)[0]


def test_a_checkpoint_is_read_by_all_ranks_together_and_chosen_by_all_alike(ranks, tmp_path, monkeypatch):
    alone = AsyncCheckpointWriter(CheckpointDirectory(tmp_path), Alone())
    for update in (5, 9):
        alone.save(update, ASKED, fill, alone.engine.weights, {"updates": update}, is_best=False)
        assert not alone.wait()
    read, whole = [], saving.find_damage

    def find_damage(folder: Path, rank: int, num_ranks: int):
        read.append((folder.name, rank, num_ranks))
        return whole(folder, rank, num_ranks)

    monkeypatch.setattr(saving, "find_damage", find_damage)

    def choose(rank: int):
        return AsyncCheckpointWriter(CheckpointDirectory(tmp_path), OneOf(rank)).choose("auto")

    newest = tmp_path / "update_00000009"
    assert ranks(choose) == [(newest, [])] * 2
    assert sorted(read) == [(newest.name, 0, 2), (newest.name, 1, 2)]
    assert len(list((newest / "state").iterdir())) + len(list((newest / "model").iterdir())) >= 3
    for file in [path for path in newest.rglob("*") if path.is_file() and path.name != "manifest.json"]:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # whoever reads it: all leave the checkpoint
        said = ranks(choose)
        assert said[0] == said[1], said
        assert said[0][0] == tmp_path / "update_00000005"
        assert file.name in said[0][1][0]
        file.write_bytes(content)


def test_a_machine_that_does_not_see_the_checkpoint_is_named(ranks, tmp_path, monkeypatch):
    saver = AsyncCheckpointWriter(CheckpointDirectory(tmp_path / "0"), Alone())
    saver.save(5, ASKED, fill, saver.engine.weights, {"updates": 5}, is_best=False)
    assert not saver.wait()
    this_rank = threading.local()

    def seen(path: Path) -> bool:
        return this_rank.number == 0 and is_there(path)

    monkeypatch.setattr(saving, "is_there", seen)
    monkeypatch.setattr(saving, "appears", lambda look: appears(look, 0.1))

    def choose(rank: int):
        this_rank.number = rank
        return refusal(AsyncCheckpointWriter(CheckpointDirectory(tmp_path / "0"), OneOf(rank)).choose, "auto")

    first, second = ranks(choose)
    assert first == second
    assert "rank 1, on machine machine1, has another view of" in first
    assert "output_dir must be on a file system that all machines share" in first


# ------------------------------------------------------------------------------------------------------------- caches


@pytest.mark.parametrize(("kind", "shared"), [("nfs4", True), ("lustre", True), ("ext4", False), ("overlay", False)])
def test_file_systems_that_machines_share(monkeypatch, tmp_path, kind, shared):
    disks = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(tmp_path), fstype=kind)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: disks)
    assert is_shared(tmp_path / "cache") is shared
