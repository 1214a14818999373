"""Optimizers on a disk: folders of processes, and what is missing here."""

import fcntl

from deepspeed.ops.op_builder import AsyncIOBuilder
from helpers import refusal

from zerofit.strategy.state import check_async_io, own_folder, remove_disk_folder


def test_without_libaio_a_run_ends_with_the_remedy(monkeypatch):
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose: False)
    assert "Install them (apt install libaio-dev), or use --strategy zero3_offload" in refusal(check_async_io)


def test_a_process_has_a_folder_of_its_own_and_clears_up_after_the_dead(tmp_path):
    disk = tmp_path / "disk"
    one = own_folder(str(disk))
    other = own_folder(str(disk))
    assert one != other
    assert one.is_dir()
    (one / "state.swp").write_text("kept")

    killed, alive = disk / "zerofit-killed", disk / "zerofit-alive"
    for folder in (killed, alive):
        folder.mkdir()
        (folder / "state.swp").write_text("")
        folder.with_suffix(".lock").touch()
    strangers = disk / "mine"
    strangers.mkdir()
    with alive.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        third = own_folder(str(disk))
    assert {path.name for path in disk.iterdir() if path.is_dir()} == {
        one.name, other.name, third.name, alive.name, strangers.name
    }  # fmt: skip
    assert (one / "state.swp").read_text() == "kept"
    assert not killed.with_suffix(".lock").exists()

    for folder in (one, other, third):
        remove_disk_folder(folder)
    assert {path.name for path in disk.iterdir()} == {alive.name, f"{alive.name}.lock", strangers.name}
