"""Find the GPUs of a machine, and refuse a run where torch does not see them.

With a CPU build of torch (chosen on a login node, say) or a driver that is too old, a run would silently use the CPU.

scripts/setup.sh runs this file before anything is installed: its top imports the standard library only.
"""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path("/")  # tests replace it
VISIBLE = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "AMD": "HIP_VISIBLE_DEVICES"}
ALSO_VISIBLE = {"NVIDIA": ("NVIDIA_VISIBLE_DEVICES",), "AMD": ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}
TORCH_BUILD_HINT = "TORCH='torch --index-url URL' make setup, with the URL from pytorch.org/get-started"
NO_DEVICE = ("", "-1", "none", "void", "NoDevFiles")  # values of users, containers and SLURM that hide all GPUs
# The variables of torch's allocator, the one for all devices first.
ALLOCATOR_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE_SEGMENTS = "expandable_segments:True"
VIRTUAL_MEMORY_MANAGEMENT = 102  # cuda.h: CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
SMALLEST_AMD_BYTES = 6 * 2**30  # integrated graphics, which ROCm does not support, have less


def gpus_of_the_machine() -> dict[str, int]:
    """Count the GPUs of each maker that the operating system has, whether or not a library for them is installed.
    NVIDIA's driver lists its own under /dev and /proc (in WSL: /dev/dxg, with NVIDIA's library beside it). AMD's have
    their memory in sysfs (Linux, amdgpu: mem_info_vram_total), and /dev/kfd where they compute."""
    nvidia = max(
        sum(file.name.removeprefix("nvidia").isdigit() for file in ROOT.glob("dev/nvidia*")),
        len(list(ROOT.glob("proc/driver/nvidia/gpus/*"))),
        int((ROOT / "dev/dxg").exists() and (ROOT / "usr/lib/wsl/lib/libcuda.so.1").exists()),
    )
    memories = ROOT.glob("sys/class/drm/card*/device/mem_info_vram_total") if (ROOT / "dev/kfd").exists() else ()
    amd = sum(int(file.read_text()) >= SMALLEST_AMD_BYTES for file in memories)
    return {maker: count for maker, count in (("NVIDIA", nvidia), ("AMD", amd)) if count}


def check_devices() -> None:
    """Raises UserError where the machine has a GPU that torch does not find, unless the CPU is asked for: by
    accelerate's `--cpu` or `use_cpu: true`, or an empty CUDA_VISIBLE_DEVICES."""
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1"):
        return
    for maker, count in gpus_of_the_machine().items():
        hidden = any(os.environ.get(name) in NO_DEVICE for name in (VISIBLE[maker], *ALSO_VISIBLE[maker]))
        if hidden or num_devices():
            continue
        import torch

        from zerofit.recipe.errors import UserError

        toolkit, version = ("CUDA", torch.version.cuda) if maker == "NVIDIA" else ("ROCm", torch.version.hip)
        why = (
            f"torch {torch.__version__} is built for {toolkit} {version}. Either the driver is too old for that "
            f"(update it, or install a build for the {toolkit} that it serves: {TORCH_BUILD_HINT}), or this user or "
            "container may not use the GPU"
        )
        if version is None:
            remedy = "TORCH=cuda make setup" if maker == "NVIDIA" else TORCH_BUILD_HINT
            why = f"torch {torch.__version__} is built without {toolkit}. Install a build with it: {remedy}"
        raise UserError(
            f"this machine has {count} {maker} GPU{'s' if count > 1 else ''}, and torch sees none: {why}. To train on "
            f"the CPU all the same, set {VISIBLE[maker]} to nothing: {VISIBLE[maker]}= accelerate launch ..."
        )


def use_expandable_segments() -> None:
    """Let torch's CUDA allocator grow its segments page by page, against fragmentation; called before the first
    allocation. Only with NVIDIA's driver on Linux, where it maps pages (some virtual GPUs and WSL do not), and if the
    user has not configured the allocator. Sharing CUDA tensors between processes would need ptrace rights then
    (pytorch/pytorch#165685); here no process does."""
    if any(name in os.environ for name in ALLOCATOR_CONF) or sys.platform != "linux" or (ROOT / "dev/dxg").exists():
        return
    if "NVIDIA" in gpus_of_the_machine() and _maps_memory():
        os.environ[ALLOCATOR_CONF[0]] = EXPANDABLE_SEGMENTS


def has_expandable_segments() -> bool:
    """Return whether torch's CUDA allocator uses expandable segments."""
    return any(EXPANDABLE_SEGMENTS in os.environ.get(name, "") for name in ALLOCATOR_CONF)


def _maps_memory() -> bool:
    """Return whether CUDA's driver maps a GPU's memory page by page."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device = ctypes.c_int()
    is_supported = ctypes.c_int()
    failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
    failed = failed or cuda.cuDeviceGetAttribute(ctypes.byref(is_supported), VIRTUAL_MEMORY_MANAGEMENT, device)
    return not failed and bool(is_supported.value)


def num_devices() -> int:
    """Count the accelerators that this process sees."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def describe_device(device: Any) -> str:
    """Describe what the processes of this machine train on, for the log."""
    import torch

    from zerofit.strategy.devices import device_name

    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' if threads > 1 else ''} per process"
    total = torch.accelerator.device_count()
    used = min(total, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    line = f"{used} x {device_name(device)}" + (f" of the {total} that this machine has" if used < total else "")
    segments = "expandable segments" if device.type == "cuda" and has_expandable_segments() else None
    return ", ".join(filter(None, [line, cudnn(), segments]))


def cudnn() -> str | None:
    """Return the version of cuDNN, 91500 for 9.15.0; None without CUDA. Attention is slower with an older version."""
    import torch

    number = torch.backends.cudnn.version() if torch.version.cuda and torch.backends.cudnn.is_available() else None
    return f"cuDNN {number}" if number else None


if __name__ == "__main__":
    print(*gpus_of_the_machine())
