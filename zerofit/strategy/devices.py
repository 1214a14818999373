"""What this machine's devices can do, found out through torch and not from a list of names; and the CPU's threads."""

import functools
import os
import time
import timeit

import torch

from zerofit.strategy.host_memory import usable_cores

MIN_BF16_SLOWDOWN = 2.0  # times fp32


@functools.cache
def pins_memory(device: torch.device) -> bool:
    """Return whether there is page-locked host memory, from which this device copies by itself."""
    if device.type in ("cpu", "mps"):  # of MPS, DataLoader says that it cannot (torch 2.13)
        return False
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except (RuntimeError, AssertionError):  # NotImplementedError is a RuntimeError; a build without the device asserts
        return False


@functools.cache
def has_fused_adamw(device: torch.device) -> bool:
    """Return whether torch's fused AdamW runs on this device; torch's own list has devices that may lack the
    kernel."""
    weight = torch.zeros(1, device=device, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    try:
        torch.optim.AdamW([weight], fused=True).step()
    except RuntimeError:
        return False
    return True


def accelerator() -> torch.device:
    """Return the current accelerator; the CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work, before a time is taken."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def device_name(device: torch.device) -> str | None:
    """Return the name that a device reports; None for the CPU."""
    if device.type == "cpu":
        return None
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return name_of(device) if name_of else device.type


def has_bf16(device: torch.device) -> bool | None:
    """Return whether the device computes in bf16 without emulation; None where torch does not say."""
    ask = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if ask is None:
        return None
    return ask(including_emulation=False) if device.type == "cuda" else ask()


def faster_precisions(device: torch.device) -> list[str]:
    """Return the precisions in which a device that is asked for fp32 would be faster: `bf16`, `tf32`."""
    if device.type == "cpu":
        return []
    nvidia = device.type == "cuda" and torch.version.hip is None
    has_tf32 = nvidia and torch.cuda.get_device_capability(device) >= (8, 0)
    return [name for name, has in (("bf16", has_bf16(device)), ("tf32", has_tf32)) if has]


@functools.cache
def bf16_slowdown() -> float | None:
    """Measure how much longer a matrix product and its backward pass take in bf16 than in fp32 on this CPU: how many
    times as long, where that matters, else None. It takes some 50 ms. Without AVX-512 or AMX oneDNN has no bf16
    kernels, and torch's own take 20 times as long as fp32, mostly for the weight's gradient."""

    def seconds(dtype: torch.dtype) -> float:
        factors = [torch.ones(128, 384, dtype=dtype, requires_grad=True), torch.ones(384, 384, dtype=dtype)]
        factors[1].requires_grad_()

        def run() -> None:
            torch.nn.functional.linear(*factors).sum().backward()

        # thread_time leaves out the time that other programs take
        return min(timeit.repeat(run, timer=time.thread_time, repeat=3, number=1))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would oversubscribe the cores where the machine is busy
    fp32 = seconds(torch.float32)
    bf16 = seconds(torch.bfloat16)
    torch.set_num_threads(threads)
    return bf16 / fp32 if bf16 > MIN_BF16_SLOWDOWN * fp32 else None


def use_threads_of_share() -> None:
    """Let this rank use its share of the host's cores: with several processes torchrun sets one thread for each.
    DeepSpeed's CPU Adam uses OpenMP, as torch does: either torch's runtime, if both have the same name (libgomp.so.1),
    or one that is loaded later and reads the environment then."""
    threads = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
