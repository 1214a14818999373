"""`zerofit plan --calibrate`: measures this machine in less than a minute, and keeps the result for later plans."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from zerofit.estimate.device_speeds import VERSION, Calibration, cpu_name, key_name
from zerofit.estimate.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ATTENTION,
    MATH,
    MATRIX,
    MEMORY,
    RANDOM,
    REDUCE_SCATTER,
)
from zerofit.launch.runs import LAUNCHER, RunningLaunch, launcher_options
from zerofit.recipe.errors import UserError
from zerofit.recipe.parsing import counted
from zerofit.recipe.places import configs
from zerofit.record.terminal import log_lines, rounded
from zerofit.strategy.devices import accelerator, device_name, synchronise, use_threads_of_share
from zerofit.strategy.gpu_table import SLICE, gpu_of
from zerofit.strategy.gpus import num_devices

SECONDS = 0.1  # of each measurement
LEAST = 3  # repetitions
LIMIT_S = 400  # it takes 20 to 40 on an idle machine
DTYPES = {False: torch.float32, True: torch.bfloat16}

ELEMENTWISE = {  # {kind: (work on a tensor and its result, tensors that it reads and writes)}
    MEMORY: (lambda one, other: torch.add(one, 1.0, out=other), 2),
    MATH: (lambda one, other: torch.ops.aten.gelu.out(one, approximate="tanh", out=other), 2),
    RANDOM: (lambda one, other: other.bernoulli_(0.9), 1),
}


# Of a GPU and of a CPU: (edges of matrices, elements of tensors: from what a cache holds to what it does not).
SIZES = {
    False: ((256, 512, 1024, 2048, 4096, 8192), (2**16, 2**20, 2**24, 2**27)),
    True: ((64, 192, 512, 1024), (2**12, 2**16, 2**20, 2**23)),
}


class Bench:
    """Times things on one device, at the same time as the other processes of this machine do."""

    def __init__(self, device: torch.device, rank: int, world_size: int):
        self.device, self.rank, self.world_size = device, rank, world_size
        self.is_cpu = device.type == "cpu"
        # A process of one thread has a clock that stands still while other programs run.
        is_alone = self.is_cpu and torch.get_num_threads() == 1
        self.clock = time.process_time if is_alone else time.perf_counter

    def seconds(self, work: Callable[[], object], repetitions: int | None = None) -> float:
        """The shortest of several times, in seconds: what else the machine does makes them longer.

        Args:
            repetitions: the same for all processes, where `work` is done by all of them together.
        """
        clock = time.perf_counter if repetitions else self.clock
        work()
        synchronise(self.device)
        if self.world_size > 1:
            dist.barrier()
        shortest, until, done = float("inf"), clock() + SECONDS, 0
        while done < (repetitions or LEAST) or (repetitions is None and clock() < until):
            began = clock()
            work()
            synchronise(self.device)
            shortest, done = min(shortest, clock() - began), done + 1
        return shortest

    def tensor(self, *shape: int, half: bool = False) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(DTYPES[half])

    def rates(self) -> dict[str, list[tuple[float, float]]]:
        """{kind and precision: [(size, rate)]}."""
        (edges, counts), found = SIZES[self.device.type == "cpu"], {}
        for half in (False, True):
            found[key_name(MATRIX, half)] = [self.products(size, half) for size in edges]
            found[key_name(ATTENTION, half)] = sorted(self.attention(rows, half) for rows in (1, 4))
            for kind, (work, tensors) in ELEMENTWISE.items():
                found[key_name(kind, half)] = [self.moved(work, count, tensors, half) for count in counts]
        return found

    def products(self, edge: int, half: bool) -> tuple[float, float]:
        """(FLOP, FLOP/s) of the three products of a linear layer: forward, and backward to input and weight."""
        inputs, weight = self.tensor(edge, edge, half=half), self.tensor(edge, edge, half=half)
        works = (lambda: inputs @ weight.t(), lambda: inputs @ weight, lambda: inputs.t() @ weight)
        flops = 2.0 * edge**3
        return flops, len(works) * flops / sum(map(self.seconds, works))

    def attention(self, rows: int, half: bool) -> tuple[float, float]:
        """(FLOP of the forward pass, FLOP/s of both passes) of causal attention."""
        heads, length, width = (4, 256, 64) if self.is_cpu else (32, 2048, 128)
        query, key, value = (self.tensor(rows, heads, length, width, half=half).requires_grad_() for _ in range(3))

        def both() -> None:
            scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

        flops = 2.0 * rows * heads * length * length * width  # half of them: the mask is causal
        return flops, 3.5 * flops / self.seconds(both)

    def moved(
        self, work: Callable[[torch.Tensor, torch.Tensor], object], count: int, tensors: int, half: bool
    ) -> tuple[float, float]:
        """(bytes, bytes/s)."""
        one = self.tensor(count, half=half)
        other = torch.empty_like(one)
        size = float(tensors * one.nbytes)
        return size, size / self.seconds(lambda: work(one, other))

    def operation(self) -> float:
        """Seconds that it takes to start an operation, its node in the graph of gradients included."""
        one = torch.ones(1, device=self.device, requires_grad=True)

        def chain() -> None:
            value = one
            for _ in range(200):
                value = value * 1.0
            value.backward()

        return self.seconds(chain) / 400

    def adam(self) -> float:
        """Elements a second of the host's Adam: torch's fused AdamW, in fp32, which does what DeepSpeed's does."""
        weight = torch.nn.Parameter(torch.randn(2**22))
        weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        return self.world_size * weight.numel() / self.seconds(optimizer.step)

    def host_link(self) -> float | None:
        """bytes/s between pinned host memory and the device, the slower direction; None on a CPU."""
        if self.is_cpu:
            return None
        there, here = torch.empty(2**28, dtype=torch.uint8, device=self.device), torch.empty(2**28, dtype=torch.uint8)
        here = here.pin_memory()
        ways = (lambda: there.copy_(here, non_blocking=True), lambda: here.copy_(there, non_blocking=True))
        return there.nbytes / max(map(self.seconds, ways))

    def links(self) -> dict[str, list[tuple[float, float]]]:
        """{kind and precision: [(bytes of the full buffer, bytes/s)]}; empty of one process."""
        if self.world_size < 2:
            return {}
        sizes = (2**12, 2**16, 2**20, 2**24) if self.is_cpu else (2**16, 2**20, 2**24, 2**28)
        return {
            key_name(kind, half): [self.exchange(kind, size, half) for size in sizes]
            for kind in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
            for half in (False, True)
        }

    def exchange(self, kind: str, size: int, half: bool) -> tuple[float, float]:
        whole = torch.zeros(
            size // DTYPES[half].itemsize // self.world_size * self.world_size, dtype=DTYPES[half], device=self.device
        )
        part = whole[: len(whole) // self.world_size].clone()
        work = {
            ALL_REDUCE: lambda: dist.all_reduce(whole),
            ALL_GATHER: lambda: dist.all_gather_into_tensor(whole, part),
            REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(part, whole),
        }[kind]
        return float(whole.nbytes), whole.nbytes / self.seconds(work, repetitions=10 if size < 2**22 else 4)


def measure_rank(folder: Path) -> None:
    """One process of the measurement, as a launcher starts it."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    use_threads_of_share()
    device = accelerator()
    on_cpu = device.type == "cpu"
    if not on_cpu:
        torch.accelerator.set_device_index(rank)
    if world_size > 1:
        backend = "gloo" if on_cpu else dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, timeout=timedelta(minutes=2))
    bench = Bench(device, rank, world_size)
    found = {
        "rates": bench.rates(),
        "operation_s": bench.operation(),
        "adam": bench.adam(),
        "host_link": bench.host_link(),
        "links": bench.links(),
    }
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def calibrate(processes: int) -> Calibration:
    """Measure with so many processes of this machine at the same time, and keep the result.

    Raises:
        UserError: more processes than devices, or a process fails.
    """
    devices = num_devices()
    if devices and processes > devices:
        raise UserError(f"num_gpus = {processes}: this machine has {devices}. Use --calibrate --num_gpus {devices}")
    device = _name_of_gpu() if devices else cpu_name()
    began = time.monotonic()
    found = _measure(processes)
    measured = f"torch {torch.__version__}, {counted(processes, 'process')}, {time.strftime('%F')}"
    calibration = Calibration(VERSION, device, processes, measured=measured, **found)
    path = calibration.write()
    best = max(rate for _, rate in calibration.rates[f"{MATRIX} single"])
    log_lines(f"measured  {device}: {rounded(best / 1e9)} GFLOP/s in fp32, each of {counted(processes, 'process')}")
    log_lines(f"kept in   {path} ({time.monotonic() - began:.0f} s)")
    return calibration


def _name_of_gpu() -> str:
    device = accelerator()
    name = device_name(device) or device.type
    gpu = gpu_of(name)
    return gpu.model if gpu and SLICE not in name else name


def _measure(processes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layout = launcher_options(configs() / ("ddp.yaml" if processes > 1 else "single.yaml"), processes)
        command = [*LAUNCHER, *layout, "-m", "zerofit.tools.plan.calibrate", name]
        with RunningLaunch(command, folder, folder / "log", environment={"OMP_WAIT_POLICY": "PASSIVE"}) as launch:
            if launch.wait(LIMIT_S) == "late" or launch.exit_code:
                last = (launch.text.strip().splitlines() or ["it said nothing"])[-1]
                raise UserError(f"calibrate: no result after {launch.seconds:.0f} s; the last line was: {last}")
        return json.loads((folder / "found.json").read_text())


if __name__ == "__main__":
    measure_rank(Path(sys.argv[1]))
