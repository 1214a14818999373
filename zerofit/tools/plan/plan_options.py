"""The options of `zerofit plan`, and the layouts of a pair (YAML and JSON): its degrees of tensor, pipeline and
sequence parallelism, and other degrees that are possible.

The degrees are set in the pair's DeepSpeed JSON. A pair with degrees is planned for each number of ranks that divides
the GPUs of a machine, so that ranks which share layers or rows are on one machine. Degrees that a model does not
allow, mostly because of its heads, are refused as in a run (zerofit/training/run_configuration.py).
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
from zerofit.strategy.layout import PIPELINE_KEY, SEQUENCE_KEY, TENSOR_KEY, with_degrees
from zerofit.tools.machine import strategy_of_a_launch
from zerofit.tools.tool_recipe import NAMES_FORM, BatchSizesOptions, StrategiesOptions
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


SIZE_FORM = (parse_bytes, "a size such as 80GiB, 800MiB or 24GB")
UNNEEDED_PROBLEMS = (
    "no data:",
    "no tokenizer:",
)  # problems of a training recipe that a plan ignores
MEMORY_VARIABLE = "DEVICE_MEMORY_GB"


@dataclass
class SpeedOptions(Recipe):
    """The device's figures, where its maker's are not known or not wanted"""

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
    """A prediction, without a GPU, of what fits and how fast it is; options of the training recipe change it"""

    strategies: list[str] = option(
        ["all"],
        "Names in accelerate_configs/, or .yaml files: zero2,zero3; all: every pair.",
        common=True,
        form=NAMES_FORM,
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
        None, "Of one GPU: 80GiB; else DEVICE_MEMORY_GB, or --gpu's.", common=True, form=SIZE_FORM
    )
    host_memory: str | None = option(
        None, "Of one machine: 1TiB; without it, it is not checked.", common=True, form=SIZE_FORM
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
        """The named GPU's row of the table; None if no GPU is named, or the CPU."""
        return None if self.gpu in (None, CPU) else find_gpu(self.gpu)

    @property
    def device_memory(self) -> tuple[str, str] | None:
        """(memory of one device, its source for messages); None: the memory of the named GPU counts."""
        variable = os.environ.get(MEMORY_VARIABLE)
        if self.gpu_memory:
            return self.gpu_memory, f"gpu_memory = {self.gpu_memory}"
        return (f"{variable}GB", f"{MEMORY_VARIABLE}={variable} of the environment") if variable else None

    def problems(self) -> list[str]:
        problems = [problem for problem in super().problems() if not problem.startswith(UNNEEDED_PROBLEMS)]
        variable = os.environ.get(MEMORY_VARIABLE)
        if variable and not self.gpu_memory and not (re.fullmatch(r"\d+(\.\d+)?", variable) and float(variable)):
            problems.append(f"{MEMORY_VARIABLE}={variable} of the environment: expected GB of a device, such as 80")
        if not self.gpu and not self.device_memory:
            problems.append("no device: set --machine dgx-h100, --gpu h100-80gb or --gpu_memory 80GiB, for example")
        if self.num_gpus > self.gpus_per_node and self.num_gpus % self.gpus_per_node:
            problems.append(f"num_gpus = {self.num_gpus} is not a multiple of gpus_per_node = {self.gpus_per_node}")
        for name in ("global_batch_size", "gradient_accumulation_steps"):
            if self.max_global_batch_size and (self.source(name) or "").startswith("--"):
                problems.append(f"--{name} and --max_global_batch_size: keep one of the two")
        if self.lengths:
            given = " ".join(self.lengths)
            if "auto" in given.split() and given != "auto":
                problems.append(f"lengths = {given}: say auto alone, or lengths")
            if not hasattr(self, "block_size"):
                problems.append(f"lengths = {given}: only train/clm.py has rows of any length. Remove it")
            elif (self.source("block_size") or "").startswith("--"):
                problems.append("--block_size and --lengths: keep one of the two")
            without_use = [name for name in ("batch_sizes", "max_batch_size", "mean_length") if self.source(name)]
            problems += [f"{name} has no effect with lengths = {given}. Remove it" for name in without_use]
        packs = getattr(self, "packing", "none") != "none" or getattr(self, "data_path", None)
        if self.mean_length and self.task in CAUSAL_TASKS and packs:
            problems.append(f"mean_length = {self.mean_length:g} has no effect: packed rows are full. Remove it")
        return problems

    @property
    def named_lengths(self) -> list[int]:
        """The named lengths in tokens, ascending: 8k is 8192."""
        texts = [text.strip().lower() for given in self.lengths or () for text in given.split(",") if text]
        return sorted({int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1) for text in texts})


CONFIG_FILE_KEY = "deepspeed_config_file"  # the key in an accelerate YAML


@dataclass(frozen=True)
class Degrees:
    """The degrees of parallelism: the number of ranks that share each layer (tensor), of stages (pipeline), and of
    ranks that split each row (sequence)."""

    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1


def label_strategy(strategy: str, degrees: Degrees) -> str:
    """Return the strategy's name with its degrees above one: tp with 4 ranks per layer is tp x4."""
    suffix = "x".join(str(degree) for degree in (degrees.tensor, degrees.pipeline, degrees.sequence) if degree > 1)
    return f"{strategy} x{suffix}" if suffix else strategy


@dataclass(frozen=True)
class StrategyPair:
    """An accelerate YAML and its DeepSpeed JSON, with the contents of their files.

    Attributes:
        source: the YAML's file.
        config: the JSON; None if the YAML names none.
    """

    source: Path
    content: dict[str, Any]
    config: dict[str, Any] | None
    json_file: Path | None

    @property
    def degrees(self) -> Degrees:
        config = self.config or {}
        sections = {
            name: config[name] if isinstance(config.get(name), dict) else {} for name in (TENSOR_KEY, PIPELINE_KEY)
        }
        found = {
            "tensor": sections[TENSOR_KEY].get("autotp_size"),
            "sequence": config.get(SEQUENCE_KEY),
            "pipeline": sections[PIPELINE_KEY].get("stages"),
        }
        return Degrees(**{kind: degree for kind, degree in found.items() if isinstance(degree, int) and degree > 1})

    def with_degrees(self, degrees: Degrees) -> "StrategyPair":
        """Return the pair with other degrees."""
        if degrees == self.degrees or self.config is None:
            return self
        return replace(self, config=with_degrees(self.config, **vars(degrees)))

    def write(self, yaml_file: Path, head: str = "", changes: dict[str, Any] | None = None) -> None:
        """Write NAME.yaml, with some keys changed, and NAME.json in the same folder if the pair has a JSON."""
        content = {**self.content, **(changes or {})}
        if self.config is not None:
            json_file = yaml_file.with_suffix(".json")
            json_file.write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
            content["deepspeed_config"] = {**content["deepspeed_config"], CONFIG_FILE_KEY: str(json_file)}
        yaml_file.write_text(head + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def read_pair(name: str) -> StrategyPair:
    """Read a pair, by its name in accelerate_configs/ or by its .yaml file. Raises UserError: the file is missing."""
    source = find_strategies([name])[name]
    content = read_yaml(source) or {}
    named = (content.get("deepspeed_config") or {}).get(CONFIG_FILE_KEY)
    if not named:
        return StrategyPair(source, content, None, None)
    # searched as in a run: from the working directory, or from the parent of the pair's folder
    files = (Path(named), source.resolve().parents[1] / named, place(named))
    json_file = next((file for file in files if file.is_file()), None)
    if json_file is None:
        raise UserError(f"{source}: {CONFIG_FILE_KEY} = {named!r}: there is no such file")
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
    """Return the degrees to plan a pair with. A .yaml file is planned with its own degrees only.

    Args:
        num_ranks, local_ranks: number of processes of all machines, and of one machine.
        num_layers: number of the model's layers: no pipeline has more stages.
    """
    configured = pair.degrees
    if configured == Degrees() or name.endswith((".yaml", ".yml")):
        return [configured]
    found = [configured]
    for kind in ("tensor", "sequence"):
        if getattr(configured, kind) > 1:
            counts = _divisors(local_ranks, local_ranks)
            found = [replace(degrees, **{kind: count}) for degrees in found for count in counts]
    if configured.pipeline > 1:
        found = [
            replace(degrees, pipeline=count)
            for degrees in found
            for count in _divisors(num_ranks // degrees.tensor, num_layers)
        ]
    return found or [configured]


def _divisors(number: int, limit: int) -> list[int]:
    return [count for count in range(2, min(number, limit) + 1) if number % count == 0]


def resolve_layout(
    name: str, recipe: PlanOptions, model: PlannedModel, world_size: int, gpus_per_node: int
) -> PlannedStrategy:
    """Return the strategy as a process of such a launch reads it. Raises UserError: as `strategy_of_a_launch`; or the
    model or the task does not support the degrees of parallelism."""
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


def resolve_degrees(
    name: str,
    pair: StrategyPair,
    degrees: Degrees,
    recipe: PlanOptions,
    model: PlannedModel,
    *,
    world_size: int,
    gpus_per_node: int,
) -> PlannedStrategy:
    """Return the strategy of a pair with these degrees. If they are not the pair's, it is written with them to a
    temporary folder, as `--write` does, and read from there."""
    if degrees == pair.degrees:
        return resolve_layout(name, recipe, model, world_size, gpus_per_node)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{pair.source.stem}.yaml"
        pair.with_degrees(degrees).write(file)
        try:
            planned = resolve_layout(str(file), recipe, model, world_size, gpus_per_node)
        except UserError as error:
            source = str(pair.source)
            json_file = str(file.with_suffix(".json"))
            raise UserError(
                problem.replace(str(file), source).replace(json_file, str(pair.json_file))
                for problem in error.problems
            ) from None
    return PlannedStrategy(name, planned.layout, planned.precision, planned.sharding)
