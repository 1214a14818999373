"""The options of `zerofit plan`, and the layouts that a pair may have: its degrees of tensor, pipeline and sequence
parallelism, and others instead.

The degrees stand in the pair's DeepSpeed JSON. A pair that has some is planned for each number of ranks that divides
the GPUs of a machine, so that ranks which share layers or rows are on one machine. What a model, its heads above all,
does not allow is refused as a run would refuse it (zerofit/training/run_configuration.py).
"""

import json
import os
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from zerofit.estimate.planned_model import PlannedModel
from zerofit.estimate.planned_strategy import PlannedStrategy, plan_strategy
from zerofit.model.lora import check_expert_targets, check_quantised_sharding, split_targets
from zerofit.recipe.base import Recipe, option
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import parse_bytes, parse_json, place, read_text, read_yaml
from zerofit.recipe.tasks import CAUSAL_TASKS
from zerofit.strategy.gpu_table import CPU, Gpu, find_gpu
from zerofit.strategy.launch import find_strategies
from zerofit.strategy.layout import PIPELINE, SEQUENCE, TENSOR, with_degrees
from zerofit.tools.machine import strategy_of_a_launch
from zerofit.tools.tool_recipe import NAMES, BatchSizesOptions, StrategiesOptions
from zerofit.training.run_configuration import check_layout, check_strategy_for_task, check_teacher

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

    strategies: list[str] = option(
        ["all"], "Names in accelerate_configs/, or .yaml files: zero2,zero3; all: every pair.", common=True, form=NAMES
    )
    num_gpus: int = option(
        1,
        "GPUs of all machines together, one process each; also --world_size.",
        positive=True,
        aliases=("num_processes", "world_size"),
        common=True,
    )
    lengths: list[str] | None = option(
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
        None, "Of --task cls: the records have tags of words, of this many kinds.", positive=True, needs="task=cls"
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
    def known_gpu(self) -> Gpu | None:
        """The GPU that is named, of the table; None: there is none, or it is the CPU."""
        return None if self.gpu in (None, CPU) else find_gpu(self.gpu)

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
        if self.lengths:
            given = " ".join(self.lengths)
            if "auto" in given.split() and given != "auto":
                found.append(f"lengths = {given}: say auto alone, or lengths")
            if not hasattr(self, "block_size"):
                found.append(f"lengths = {given}: only train/clm.py has rows of any length. Remove it")
            elif (self.source("block_size") or "").startswith("--"):
                found.append("--block_size and --lengths: keep one of the two")
            without_use = [name for name in ("batch_sizes", "max_batch_size", "mean_length") if self.source(name)]
            found += [f"{name} has no effect with lengths = {given}. Remove it" for name in without_use]
        packs = getattr(self, "packing", "none") != "none" or getattr(self, "data_path", None)
        if self.mean_length and self.task in CAUSAL_TASKS and packs:
            found.append(f"mean_length = {self.mean_length:g} has no effect: packed rows are full. Remove it")
        return found

    @property
    def named_lengths(self) -> list[int]:
        """The lengths that were named, ascending: 8k is 8192."""
        texts = [text.strip().lower() for given in self.lengths or () for text in given.split(",") if text]
        return sorted({int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1) for text in texts})


FILE = "deepspeed_config_file"  # of an accelerate YAML


@dataclass(frozen=True)
class Degrees:
    """How many ranks share each layer (tensor), how many stages there are (pipeline), and how many ranks split each
    row (sequence)."""

    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1


def labelled(strategy: str, degrees: Degrees) -> str:
    """The strategy with those of its degrees that are more than one: tp with 4 ranks a layer is tp x4."""
    own = "x".join(str(degree) for degree in (degrees.tensor, degrees.pipeline, degrees.sequence) if degree > 1)
    return f"{strategy} x{own}" if own else strategy


@dataclass(frozen=True)
class StrategyPair:
    """An accelerate YAML and its DeepSpeed JSON, as they stand in their files.

    Attributes:
        source: the YAML's file.
        config: the JSON; None: the YAML names none.
    """

    source: Path
    content: dict[str, Any]
    config: dict[str, Any] | None
    json_file: Path | None

    @property
    def degrees(self) -> Degrees:
        config = self.config or {}
        sections = {name: config[name] if isinstance(config.get(name), dict) else {} for name in (TENSOR, PIPELINE)}
        found = {
            "tensor": sections[TENSOR].get("autotp_size"),
            "sequence": config.get(SEQUENCE),
            "pipeline": sections[PIPELINE].get("stages"),
        }
        return Degrees(**{kind: degree for kind, degree in found.items() if isinstance(degree, int) and degree > 1})

    def with_degrees(self, degrees: Degrees) -> "StrategyPair":
        """The same with these degrees, in place of those that it has."""
        if degrees == self.degrees or self.config is None:
            return self
        return replace(self, config=with_degrees(self.config, **vars(degrees)))

    def write(self, yaml_file: Path, head: str = "", changes: dict[str, Any] | None = None) -> None:
        """Write NAME.yaml, with `changes` of its keys, and NAME.json beside it where there is one."""
        content = {**self.content, **(changes or {})}
        if self.config is not None:
            json_file = yaml_file.with_suffix(".json")
            json_file.write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
            content["deepspeed_config"] = {**content["deepspeed_config"], FILE: str(json_file)}
        yaml_file.write_text(head + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def read_pair(name: str) -> StrategyPair:
    """A pair by its name in accelerate_configs/, or by its .yaml file. Raises UserError: there is no such file."""
    source = find_strategies([name])[name]
    content = read_yaml(source) or {}
    named = (content.get("deepspeed_config") or {}).get(FILE)
    if not named:
        return StrategyPair(source, content, None, None)
    # as a run finds it: from here, or beside the pair's folder
    files = (Path(named), source.resolve().parents[1] / named, place(named))
    json_file = next((file for file in files if file.is_file()), None)
    if json_file is None:
        raise UserError(f"{source}: {FILE} = {named!r}: there is no such file")
    try:
        config = parse_json(read_text(json_file))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{json_file}: expected an object with DeepSpeed's settings, as JSON")
    return StrategyPair(source, content, config, json_file)


def possible_degrees(
    name: str, pair: StrategyPair, num_ranks: int, local_ranks: int, num_layers: int
) -> list[Degrees]:
    """The degrees to plan a pair with. A .yaml file is planned as it is.

    Args:
        num_ranks, local_ranks: processes of all machines, and of one.
        num_layers: of the model: no pipeline has more stages.
    """
    own = pair.degrees
    if own == Degrees() or name.endswith((".yaml", ".yml")):
        return [own]
    found = [own]
    for kind in ("tensor", "sequence"):
        if getattr(own, kind) > 1:
            found = [replace(one, **{kind: count}) for one in found for count in _divisors(local_ranks, local_ranks)]
    if own.pipeline > 1:
        found = [
            replace(one, pipeline=count) for one in found for count in _divisors(num_ranks // one.tensor, num_layers)
        ]
    return found or [own]


def _divisors(number: int, most: int) -> list[int]:
    return [count for count in range(2, min(number, most) + 1) if number % count == 0]


def resolve_layout(
    name: str, recipe: PlanOptions, model: PlannedModel, world_size: int, gpus_per_node: int
) -> PlannedStrategy:
    """The strategy as read_strategy has it in a process of such a launch. Raises UserError: as `strategy_of_a_launch`;
    degrees of parallelism that the model or the task does not have."""
    recipe = recipe.draft()
    recipe.reset_option("gradient_accumulation_steps" if recipe.global_batch_size else "global_batch_size")
    recipe.reset_option("global_batch_warmup")
    recipe.per_device_train_batch_size = 1
    strategy = strategy_of_a_launch(recipe, name, "--strategies", world_size, min(world_size, gpus_per_node))
    check_strategy_for_task(model.task, strategy)
    check_teacher(recipe, strategy)
    check_layout(model.config, strategy, recipe)
    if recipe.lora:
        check_quantised_sharding(recipe, strategy)
        targets = [name for text in recipe.lora_target_modules or () for name in text.split(",") if name]
        check_expert_targets(split_targets(model.full, targets)[1], strategy, recipe)
    return plan_strategy(name, strategy, model)


def resolve_with(
    name: str,
    pair: StrategyPair,
    degrees: Degrees,
    recipe: PlanOptions,
    model: PlannedModel,
    *,
    world_size: int,
    gpus_per_node: int,
) -> PlannedStrategy:
    """The same for a pair with other degrees than its own: it is written with them, as `--write` does, and read."""
    if degrees == pair.degrees:
        return resolve_layout(name, recipe, model, world_size, gpus_per_node)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{pair.source.stem}.yaml"
        pair.with_degrees(degrees).write(file)
        try:
            found = resolve_layout(str(file), recipe, model, world_size, gpus_per_node)
        except UserError as error:
            own = str(pair.source)
            json_file = str(file.with_suffix(".json"))
            raise UserError(
                problem.replace(str(file), own).replace(json_file, str(pair.json_file)) for problem in error.problems
            ) from None
    return PlannedStrategy(name, found.layout, found.precision, found.sharding)
