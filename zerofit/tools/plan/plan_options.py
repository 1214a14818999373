"""The options of `zerofit plan`, beside those of the recipe."""

import os
import re
from dataclasses import dataclass
from typing import Any

from zerofit.recipe.base import Recipe
from zerofit.recipe.fields import option
from zerofit.recipe.parsing import parse_bytes
from zerofit.recipe.tasks import CAUSAL
from zerofit.tools.tool_recipe import NAMES, BatchSizesOptions, StrategiesOptions

# Host memory as the cloud or maker states it; bandwidths in GB/s of one GPU, in one direction. Sources: NVIDIA's user
# guides of DGX A100, H100, H200 and B200; AWS, "Accelerated computing instances" (p4d and p4de: 400 Gbit/s of EFA, p5:
# 3,200, g5.12xlarge: 40); Google Cloud, "GPU machine types" (a3-highgpu-8g 1,000, a3-megagpu-8g 1,800 Gbit/s); Azure,
# ND-H100-v5 and ND A100 v4 series (400 and 200 Gbit/s of InfiniBand a GPU).
_DGX = {"gpus_per_node": 8, "host_memory": "2TB"}
MACHINES: dict[str, dict[str, Any]] = {
    "dgx-h100": {**_DGX, "gpu": "h100-80gb", "network_bandwidth": 50},
    "dgx-h200": {**_DGX, "gpu": "h200-141gb", "network_bandwidth": 50},
    "dgx-b200": {**_DGX, "gpu": "b200-180gb", "network_bandwidth": 50},
    "dgx-a100": {**_DGX, "gpu": "a100-80gb", "network_bandwidth": 25},
    "p5.48xlarge": {"gpu": "h100-80gb", "gpus_per_node": 8, "host_memory": "2TiB", "network_bandwidth": 50},
    "p4d.24xlarge": {"gpu": "a100-40gb", "gpus_per_node": 8, "host_memory": "1152GiB", "network_bandwidth": 6.25},
    "p4de.24xlarge": {"gpu": "a100-80gb", "gpus_per_node": 8, "host_memory": "1152GiB", "network_bandwidth": 6.25},
    "g5.12xlarge": {"gpu": "a10g-24gb", "gpus_per_node": 4, "host_memory": "192GiB", "network_bandwidth": 1.25},
    "a3-highgpu-8g": {"gpu": "h100-80gb", "gpus_per_node": 8, "host_memory": "1872GiB", "network_bandwidth": 15.6},
    "a3-megagpu-8g": {"gpu": "h100-80gb", "gpus_per_node": 8, "host_memory": "1872GiB", "network_bandwidth": 25},
    "nd-h100-v5": {"gpu": "h100-80gb", "gpus_per_node": 8, "host_memory": "1900GiB", "network_bandwidth": 50},
    "nd-a100-v4": {"gpu": "a100-40gb", "gpus_per_node": 8, "host_memory": "900GiB", "network_bandwidth": 25},
    "1x-rtx4090": {"gpu": "rtx4090-24gb", "gpus_per_node": 1, "host_memory": "64GiB", "network_bandwidth": 1.25},
    "2x-rtx4090": {"gpu": "rtx4090-24gb", "gpus_per_node": 2, "host_memory": "128GiB", "network_bandwidth": 1.25},
}


SIZE = (parse_bytes, "a size such as 80GiB, 800MiB or 24GB")
NOT_NEEDED = ("no data:", "no tokenizer:")  # problems of a recipe that is trained, and not of one that is planned
MEMORY_VARIABLE = "DEVICE_MEMORY_GB"


@dataclass
class SpeedOptions(Recipe):
    """What the device reaches, where its maker's figures are not known or not wanted"""

    peak_tflops: float | None = option(
        None, "Peak of one device's matrix products, TFLOP/s (dense, in bf16 or fp16).", positive=True
    )
    memory_bandwidth: float | None = option(None, "Bandwidth of the GPU's memory, GB/s.", positive=True)
    link_bandwidth: float | None = option(None, "Of one GPU to others of its machine, one way, GB/s.", positive=True)
    network_bandwidth: float | None = option(
        None, "Of one GPU to other machines, one way, GB/s; by default its maker's, else 12.5.", positive=True
    )


@dataclass
class PlanOptions(BatchSizesOptions, SpeedOptions, StrategiesOptions):
    """What fits and how fast, predicted without a GPU; options of the training recipe change that"""

    strategies: list[str] = option(  # noqa: RUF009
        ["all"], "Names in accelerate_configs/, or .yaml files: zero2,zero3; all: every pair.", common=True, form=NAMES
    )
    num_gpus: int = option(
        1,
        "GPUs of all machines together, one process each; also --world_size.",
        positive=True,
        aliases=("num_processes", "world_size"),
        common=True,
    )
    lengths: list[str] | None = option(  # noqa: RUF009
        None,
        "Find the longest of these rows, 8k,16k,32k, that fit with the recipe's per_device_train_batch_size, or 1. "
        "auto: multiples of 1024 up to the model's positions.",
        common=True,
        form=(
            "auto|( *(1[kK]|[2-9][kK]?|[1-9][0-9]+[kK]?) *,?)+",
            "auto, or lengths in tokens, such as 8k,16k,32k (8k is 8192)",
        ),
    )
    gpus_per_node: int = option(
        8, "GPUs of one machine; also --local_world_size.", positive=True, aliases=("local_world_size",), common=True
    )
    machine: str | None = option(None, "A known machine.", choices=tuple(MACHINES), common=True)
    gpu: str | None = option(None, "A known GPU, such as h100-80gb, or cpu.", common=True)
    gpu_memory: str | None = option(
        None, "Of one GPU: 80GiB; else DEVICE_MEMORY_GB, or --gpu's.", common=True, form=SIZE
    )
    host_memory: str | None = option(
        None, "Of one machine: 1TiB; without it, it is not checked.", common=True, form=SIZE
    )
    max_batch_size: int = option(4096, "The largest micro-batch to try.", positive=True)
    max_global_batch_size: int | None = option(
        None, "Find the fastest global batch of at most this many samples.", positive=True, common=True
    )
    tokens: float | None = option(
        None, "Add days and GPU-hours of this many tokens: 100e9.", positive=True, common=True
    )
    price: float | None = option(
        None, "Of a GPU-hour: --tokens adds what training costs.", positive=True, common=True, needs="tokens"
    )
    mean_length: float | None = option(None, "Mean length of rows that are padded, for the time.", positive=True)
    architecture: str | None = option(None, "The model's shape, without its weights: a known name, or a folder.")
    num_tags: int | None = option(
        None, "Of --task cls: the records have tags of words, of this many kinds.", positive=True
    )
    search: bool = option(
        False, "Find the fastest of all layouts, batches and options that save memory; --write has it.", common=True
    )
    top: int = option(10, "Rows of the table.", positive=True)
    write: str | None = option(None, "Write pairs and commands of the table's rows into this folder.", common=True)
    json: str | None = option(None, "Write the predictions to this file; - for standard output.")

    def settle(self) -> None:
        """Fill options that are not set from the machine."""
        super().settle()
        for name, value in MACHINES.get(self.machine or "", {}).items():
            if not self.source(name):
                self.adopt(name, value, f"--machine {self.machine}")
        if self.machine and self.num_gpus == 1 and not self.source("num_gpus"):
            self.adopt("num_gpus", self.gpus_per_node, f"--machine {self.machine}")

    @property
    def device_memory(self) -> tuple[str, str] | None:
        """Return (size of one device, what states it); None: it is that of the named GPU."""
        told = os.environ.get(MEMORY_VARIABLE)
        if self.gpu_memory:
            return self.gpu_memory, f"gpu_memory = {self.gpu_memory}"
        return (f"{told}GB", f"{MEMORY_VARIABLE}={told} of the environment") if told else None

    def problems(self) -> list[str]:
        found = [problem for problem in super().problems() if not problem.startswith(NOT_NEEDED)]
        told = os.environ.get(MEMORY_VARIABLE)
        if told and not self.gpu_memory and not (re.fullmatch(r"\d+(\.\d+)?", told) and float(told)):
            found.append(f"{MEMORY_VARIABLE}={told} of the environment: expected GB of a device, such as 80")
        if not self.gpu and not self.device_memory:
            found.append("no device: set --machine dgx-h100, --gpu h100-80gb or --gpu_memory 80GiB, for example")
        if self.num_gpus > self.gpus_per_node and self.num_gpus % self.gpus_per_node:
            found.append(f"num_gpus = {self.num_gpus} is not a multiple of gpus_per_node = {self.gpus_per_node}")
        for name in ("global_batch_size", "gradient_accumulation_steps"):
            if self.max_global_batch_size and (self.source(name) or "").startswith("--"):
                found.append(f"--{name} and --max_global_batch_size: keep one of the two")
        found += self._problems_of_lengths() if self.lengths else []
        if self.num_tags and self.task != "cls":
            found.append(f"num_tags = {self.num_tags} has no effect with --task {self.task}. Remove it")
        if self.mean_length and not self._pads:
            found.append(f"mean_length = {self.mean_length:g} has no effect: packed rows are full. Remove it")
        return found

    @property
    def named_lengths(self) -> list[int]:
        """The lengths that were named, ascending: 8k is 8192."""
        texts = [text.strip().lower() for given in self.lengths or () for text in given.split(",") if text]
        return sorted({int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1) for text in texts})

    def _problems_of_lengths(self) -> list[str]:
        given, problems = " ".join(self.lengths or ()), []
        if "auto" in given.split() and given != "auto":
            problems.append(f"lengths = {given}: say auto alone, or lengths")
        if not hasattr(self, "block_size"):
            problems.append(f"lengths = {given}: only train/clm.py has rows of any length. Remove it")
        elif (self.source("block_size") or "").startswith("--"):
            problems.append("--block_size and --lengths: keep one of the two")
        without_use = [name for name in ("batch_sizes", "max_batch_size", "mean_length") if self.source(name)]
        return problems + [f"{name} has no effect with lengths = {given}. Remove it" for name in without_use]

    @property
    def _pads(self) -> bool:
        return self.task not in CAUSAL or (
            getattr(self, "packing", "none") == "none" and not getattr(self, "data_path", None)
        )
