"""What the devices of this machine can do, asked of torch and not of a list of names; and the host's threads."""

import functools
import os
import time

import torch
from torch.numa import binding

from zerofit.strategy.host_memory import usable_cores

SLOW_BF16 = 2.0  # times fp32


@functools.cache
def pins_memory(device: torch.device) -> bool:
    """Whether there is page-locked host memory, from which this device copies by itself."""
    if device.type in ("cpu", "mps"):  # of MPS, DataLoader says that it cannot (torch 2.13)
        return False
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except (RuntimeError, AssertionError):  # NotImplementedError is a RuntimeError; a build without the device asserts
        return False


@functools.cache
def has_fused_adamw(device: torch.device) -> bool:
    """Whether torch's fused AdamW runs on this device; torch's own list has devices that may lack the kernel."""
    weight = torch.zeros(1, device=device, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    try:
        torch.optim.AdamW([weight], fused=True).step()
    except RuntimeError:
        return False
    return True


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was asked for, so that a clock tells of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def device_name(device: torch.device) -> str | None:
    """What the device calls itself; None for the CPU."""
    if device.type == "cpu":
        return None
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return name_of(device) if name_of else device.type


def device_names(device: torch.device) -> list[str]:
    """The names of all devices of this kind that this process sees; none of a CPU."""
    if device.type == "cpu":
        return []
    names = (device_name(torch.device(device.type, index)) for index in range(torch.accelerator.device_count()))
    return [name for name in names if name]


def has_bf16(device: torch.device) -> bool | None:
    """Whether the device computes in bf16 and does not only emulate it; None where torch does not say."""
    ask = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if ask is None:
        return None
    return ask(including_emulation=False) if device.type == "cuda" else ask()


def faster_precisions(device: torch.device) -> list[str]:
    """What a device that is asked for fp32 could do faster: `bf16`, `tf32`."""
    if device.type == "cpu":
        return []
    nvidia = device.type == "cuda" and torch.version.hip is None
    has_tf32 = nvidia and torch.cuda.get_device_capability(device) >= (8, 0)
    return ["bf16"] * bool(has_bf16(device)) + ["tf32"] * has_tf32


@functools.cache
def bf16_slowdown() -> float | None:
    """How many times as long as in fp32 a matrix product with its backward pass takes in bf16 on this CPU, where that
    matters; measured, in some 50 ms.

    Without AVX-512 or AMX oneDNN has no bf16 kernels, and torch's own take 20 times as long as fp32, mostly for the
    weight's gradient.
    """

    def seconds(dtype: torch.dtype) -> float:
        factors = [torch.ones(128, 384, dtype=dtype, requires_grad=True), torch.ones(384, 384, dtype=dtype)]
        factors[1].requires_grad_()

        def once() -> float:
            began = time.thread_time()  # the time that other programs take does not count
            torch.nn.functional.linear(*factors).sum().backward()
            return time.thread_time() - began

        return min(once() for _ in range(3))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would oversubscribe the cores where the machine is busy
    fp32, bf16 = seconds(torch.float32), seconds(torch.bfloat16)
    torch.set_num_threads(threads)
    return bf16 / fp32 if bf16 > SLOW_BF16 * fp32 else None


def bind_to_numa_node() -> tuple[int, str | None]:
    """Let this rank run, and take memory, on the NUMA node of its GPU: the optimizer on the host moves all weights.

    As torchrun's `--numa-binding=node` does it (torch/numa/binding.py), which needs numactl and ends the run where
    binding is not possible. No cores are given up: nothing is bound where some of them are beside no rank's GPU.

    Returns: how many ranks share the cores that this one has by now, and a note for the log (None: there is one node).
    """
    from accelerate.utils import parse_flag_from_env

    local_rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_CPU_AFFINITY"):  # then accelerate does it
        return ranks, None
    try:
        nodes = [binding._get_numa_node_index_for_gpu_index(gpu_index=gpu) for gpu in range(ranks)]
        cores = {
            node: binding._get_allowed_logical_cpu_indices_for_numa_node(numa_node_index=node)
            for node in sorted(set(nodes))
        }
        if set().union(*cores.values()) != os.sched_getaffinity(0):
            return ranks, "processes are not bound to NUMA nodes: some of the cores are beside no GPU of theirs"
        if len(cores) == 1:
            return ranks, None
        binding._bind_all_threads_in_current_process_to_logical_cpus(logical_cpu_indices=cores[nodes[local_rank]])
    except Exception as error:  # a container without /sys, or that forbids it; another torch
        return ranks, f"processes are not bound to the NUMA nodes of their GPUs: {type(error).__name__}: {error}"
    bound = (f"{nodes.count(node)} on the {len(found)} cores of node {node}" for node, found in cores.items())
    return nodes.count(nodes[local_rank]), f"processes are bound to the NUMA nodes of their GPUs: {', '.join(bound)}"


def use_threads_of_share(ranks: int | None = None) -> None:
    """Let this rank compute on its share of the host's cores: to each of several processes torchrun leaves one thread.

    DeepSpeed's CPU Adam is parallel through OpenMP, as torch is: it has torch's runtime where both have the same name
    (libgomp.so.1), and else one that is loaded later and reads the environment then.
    """
    threads = max(1, usable_cores() // (ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
