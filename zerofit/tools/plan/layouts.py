"""The layouts that a pair may have: its degrees of tensor, pipeline and sequence parallelism, and others instead.

The degrees stand in the pair's DeepSpeed JSON. A pair that has some is planned for each number of ranks that divides
the GPUs of a machine, so that ranks which share layers or rows are on one machine. What a model, its heads above all,
does not allow is refused as a run would refuse it (zerofit/training/run_configuration.py).
"""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from zerofit.estimate.planned_model import PlannedModel
from zerofit.estimate.planned_strategy import PlannedStrategy, plan_strategy
from zerofit.model.lora import check_expert_targets, check_quantised_sharding, split_targets
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import read_text
from zerofit.recipe.parsing import parse_json, read_yaml
from zerofit.recipe.places import place
from zerofit.strategy.layout import PIPELINE, SEQUENCE, TENSOR, with_degrees
from zerofit.strategy.named import find_strategies
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.rank_environment import strategy_of_a_launch
from zerofit.training.run_configuration import check_layout, check_strategy_for_task, check_teacher

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
        """Write NAME.yaml, and NAME.json beside it where there is one.

        Args:
            changes: of the YAML's keys.
        """
        content = {**self.content, **(changes or {})}
        if self.config is not None:
            json_file = yaml_file.with_suffix(".json")
            json_file.write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
            content["deepspeed_config"] = {**content["deepspeed_config"], FILE: str(json_file)}
        yaml_file.write_text(head + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def read_pair(name: str) -> StrategyPair:
    """A pair by its name in accelerate_configs/, or by its .yaml file.

    Raises:
        UserError: there is no such file.
    """
    source = find_strategies([name])[name]
    content = read_yaml(source) or {}
    named = (content.get("deepspeed_config") or {}).get(FILE)
    if not named:
        return StrategyPair(source, content, None, None)
    json_file = _find_json(named, source)
    try:
        config = parse_json(read_text(json_file))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{json_file}: expected an object with DeepSpeed's settings, as JSON")
    return StrategyPair(source, content, config, json_file)


def _find_json(name: str, source: Path) -> Path:
    """The DeepSpeed JSON that a pair names: from here, or beside the pair's folder as a run finds it."""
    files = (Path(name), source.resolve().parents[1] / name, place(name))
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise UserError(f"{source}: {FILE} = {name!r}: there is no such file")
    return found


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
    """The strategy as read_strategy has it in a process of such a launch.

    Raises:
        UserError: no such strategy, a contradiction between recipe, YAML and JSON, no such batch; degrees of
            parallelism that the model or the task does not have.
    """
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
            own, json_file = str(pair.source), str(file.with_suffix(".json"))
            raise UserError(
                problem.replace(str(file), own).replace(json_file, str(pair.json_file)) for problem in error.problems
            ) from None
    return PlannedStrategy(name, found.layout, found.precision, found.sharding)
