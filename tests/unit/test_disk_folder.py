"""Optimizers on a disk: folders of processes, and what is missing here."""

import errno
import fcntl

import pytest
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from helpers import refusal

from zerofit.strategy.disk import check_async_io, own_folder, remove, shared_disk_note


def test_without_libaio_a_run_ends_with_the_remedy(monkeypatch):
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose: False)
    assert "Install them (apt install libaio-dev), or use --strategy zero3_offload" in refusal(check_async_io)


def test_without_a_cuda_toolkit_a_run_with_gpus_ends_with_the_remedy(monkeypatch):
    """DeepSpeed 0.19.8, AsyncIOBuilder.include_paths: os.path.join(CUDA_HOME, "include")."""
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose: True)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    check_async_io()  # without GPUs it compiles without the toolkit
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    message = refusal(check_async_io)
    assert 'zero_optimization.offload_optimizer.device = "nvme"' in message
    assert "CUDA 12.8 and set CUDA_HOME, or use --strategy zero3_offload" in message
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/usr/local/cuda")
    check_async_io()


@pytest.mark.parametrize(
    ("device", "shared", "noted"), [("nvme", True, True), ("nvme", False, False), ("cpu", True, False)]
)
def test_a_disk_of_other_machines_is_noted(monkeypatch, device, shared, noted):
    monkeypatch.setattr("zerofit.strategy.disk.is_shared", lambda folder: shared)
    note = shared_disk_note({"offload_optimizer": {"device": device, "nvme_path": "outputs/nvme"}})
    assert ("offload_optimizer.nvme_path = 'outputs/nvme'" in (note or "")) is noted
    assert shared_disk_note({"stage": 3}) is None


def test_a_file_system_without_locks(monkeypatch, tmp_path):
    """Lustre mounted without flock: what a killed run has left stays, since nobody can tell."""

    def flock(handle, kind):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    one, other = own_folder(str(tmp_path)), own_folder(str(tmp_path))
    assert one != other
    assert one.is_dir()
    remove(one)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [other.name, f"{other.name}.lock"]


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
        remove(folder)
    assert {path.name for path in disk.iterdir()} == {alive.name, f"{alive.name}.lock", strangers.name}
