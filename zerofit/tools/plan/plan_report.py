"""The output of `zerofit plan`: the ranked table, and the pairs and scripts that are written."""

import re
import shlex
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zerofit.estimate.fully_sharded import Fsdp2Settings
from zerofit.estimate.planned_rows import comparable_rows, gpu_model, run_kind
from zerofit.launch.command import program_of
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import TaskRecipe
from zerofit.record.terminal import rounded, size, table, wrapped
from zerofit.strategy.gpu_table import CPU
from zerofit.strategy.launch import RESHARD_KEY
from zerofit.tools.plan.joint_search import option_words
from zerofit.tools.plan.plan_options import PlanOptions, label_strategy, read_pair
from zerofit.tools.plan.planner import LayoutOutcome, Planner, Prediction
from zerofit.training.run_configuration import choose_compilation

MACHINE_COMMENT = (
    "On each of the {} machines, with MACHINE_RANK=0, 1, ... and MAIN_PROCESS_IP, the address of machine 0."
)
RENDEZVOUS = (
    '--machine_rank "$MACHINE_RANK" --main_process_ip "$MAIN_PROCESS_IP" '
    '--main_process_port "${MAIN_PROCESS_PORT:-29500}"'
)
BATCH_OPTIONS = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size")


def make_folder(folder: Path) -> Path:
    """Make the folder of --write, and return it. Raises UserError: it cannot be made, or is the folder of a run, whose
    recipe.yaml is not replaced."""
    if (folder / "strategy.yaml").is_file() or (folder / "metrics.jsonl").is_file():
        raise UserError(f"write = {str(folder)!r} is the folder of a run. Set --write to another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"write = {str(folder)!r}: {error.strerror}. Set --write to a folder") from None
    return folder


def write_pairs(
    predictions: list[Prediction],
    folder: Path,
    options: PlanOptions,
    recipe: type[TaskRecipe],
    *,
    recipe_file: Path | None = None,
    keeping: Mapping[str, Prediction] | None = None,
) -> list[Path]:
    """Write NAME.yaml, NAME.json (with ZeRO) and NAME.sh of each prediction; NAME includes the degrees: tp_x4.

    Args:
        options: options of the plan and the recipe, whose flags are written into the command.
        recipe: the type of the task's recipe.
        recipe_file: a recipe with all options; None: the command has the flags that were given.
        keeping: {strategy: prediction if its blocks stay gathered until their backward pass}, which replaces the
            strategy's first prediction.

    Returns: the scripts.
    """
    flags = ["--config", str(recipe_file)] if recipe_file else options.flags_given(recipe, without=BATCH_OPTIONS)
    scripts = []
    for prediction in predictions:
        pair = read_pair(prediction.strategy)
        world_size = prediction.layout.world_size
        file = folder / f"{label_strategy(pair.source.stem, prediction.degrees).replace(' ', '_')}.yaml"
        if file.resolve() == pair.source.resolve():
            raise UserError(f"write = {str(folder)!r}: {file} is the strategy itself. Set --write to another folder")
        machines = -(-world_size // options.gpus_per_node)
        changes: dict[str, Any] = {"num_machines": machines, "num_processes": world_size, "machine_rank": 0}
        kept = (keeping or {}).get(prediction.label)
        if kept is not None:
            changes["fsdp_config"] = {**pair.content["fsdp_config"], RESHARD_KEY: False}
        shown = kept or prediction
        speed = f", {rounded(shown.tokens_per_s)} tokens/s" if shown.timed else ""
        head = (
            f"# zerofit plan predicts for {world_size} processes, micro-batch {shown.micro_batch}, accumulation "
            f"{shown.accumulation}: {size(shown.peak.needed)} of each{speed}\n"
        )
        pair.with_degrees(prediction.degrees).write(file, head, changes)
        batches: list[object] = ["--per_device_train_batch_size", prediction.micro_batch]
        batches += ["--gradient_accumulation_steps", prediction.accumulation]
        batches += ["--block_size", prediction.length] if options.lengths else []
        batches += ["--global_batch_size", prediction.global_batch] if options.global_batch_size else []
        program = shlex.join([*program_of([options.task]), *flags, *map(str, batches)])
        comment, rendezvous = (
            (f"# {MACHINE_COMMENT.format(machines)}\n", f"{RENDEZVOUS} ") if machines > 1 else ("", "")
        )
        launch = f"{comment}accelerate launch --config_file {shlex.quote(str(file))} {rendezvous}{program}"
        script = file.with_suffix(".sh")
        script.write_text(f"#!/bin/sh\n{head}{launch}\n", encoding="utf-8")
        script.chmod(0o755)
        scripts.append(script)
    return scripts


MIN_GAIN = 1.01  # advice is given only if the speed grows by more than this factor
MAX_NEAREST_RUNS = 2  # number of published runs that are listed
_FILE_PREFIX = re.compile(r"^\S+\.(json|yaml): ")  # the file of a pair, which the label names already


@dataclass
class PlanReport:
    """The report of a plan, for the terminal and as JSON."""

    outcomes: list[LayoutOutcome]
    planner: Planner

    @property
    def best(self) -> list[Prediction]:
        """The prediction to show for each strategy that fits, the fastest first; if lengths were searched, that with
        the longest rows, the longest of all first."""
        if self.planner.lengths is None:
            return sorted((outcome.best for outcome in self.outcomes if outcome.best), key=lambda best: best.rank)
        longest = [outcome.largest for outcome in self.outcomes if outcome.largest]
        return sorted(longest, key=lambda prediction: (-prediction.length, prediction.rank))

    @cached_property
    def _groups(self) -> list[list[Prediction]]:
        """The predictions, grouped by equal memory and time; the first one of each group is shown."""
        groups: dict[tuple[object, ...], list[Prediction]] = {}
        for prediction in self.best:
            groups.setdefault(_needs(prediction), []).append(prediction)
        return list(groups.values())

    @property
    def rows(self) -> list[Prediction]:
        """The predictions in the table: the first one of each group of strategies that need the same."""
        return [group[0] for group in self._groups]

    def for_terminal(self, top: int, width: int | None, tokens: float | None) -> str:
        """Return the whole report as text.

        Args:
            top: maximum number of rows in the table.
            width: columns of the terminal; None: lines are not wrapped.
            tokens: number of tokens whose training time and cost are added; None: they are left out.
        """
        lines = []
        shown = self._groups[:top]
        if shown:
            lines += ["what fits, predicted, of the process that needs most:", ""]
            cells = [self._cells(group[0], tokens) for group in shown]
            names = [name for name in cells[0] if any(row[name] for row in cells)]
            rows = [tuple(names), *(tuple(row[name] or "-" for name in names) for row in cells)]
            legend = "  batch: micro-batch x accumulation; memory: of one device"
            legend += "; host: of one machine" if "host" in names else ""
            lines += [f"{table(rows, width)}\n\n{legend}", ""]
            lines += [
                f"  {', '.join(prediction.label for prediction in group[1:])}: the same as {group[0].label}"
                for group in shown
                if len(group) > 1
            ] + [""]
            lines += self._parts(shown[0][0])
            lines += self._advice()
        lines += self._misfit_lines()
        refused = list_refusals(self.outcomes)
        lines += ["not possible:", *(f"  {line}" for line in refused), ""] if refused else []
        for first in [group[0] for group in shown if group[0].disk_bytes]:
            lines.append(f"{first.label} keeps {size(first.disk_bytes)} on a disk of each machine.")
        lines.append(f"A checkpoint takes {size(self.planner.model.checkpoint_bytes)} of disk.")
        text = "\n".join(line if "\n" in line else wrapped(line, width, 4) for line in lines)
        return re.sub(r"\n{3,}", "\n\n", text)

    def _cells(self, row: Prediction, tokens: float | None) -> dict[str, str]:
        """Return {column: cell} of a row; a column whose cells are all empty is not shown."""
        cells = {
            "strategy": row.label,
            "longest rows": f"{row.length:,}" if self.planner.lengths else "",
            "batch": f"{row.micro_batch} x {row.accumulation}",
            "memory": _format_size(row.peak.needed),
            "host": _format_size(row.host_bytes) if row.host_bytes else "",
        }
        columns = ("s/update", "tokens/s", "MFU", "days", "GPU-hours", "cost")
        speed = row.timed
        if speed is None:
            return cells | dict.fromkeys(columns, "")
        hours = tokens / speed.tokens_per_s / 3600 * row.layout.world_size if tokens else 0.0
        price = self.planner.recipe.price
        mfu = speed.mfu
        times = (
            rounded(speed.time.seconds),
            rounded(speed.tokens_per_s),
            "-" if mfu is None else f"{mfu:.0%}",
            rounded(hours / 24 / row.layout.world_size) if tokens else "",
            rounded(hours) if tokens else "",
            rounded(price * hours) if tokens and price else "",
        )
        return cells | dict(zip(columns, times))

    def _parts(self, best: Prediction) -> list[str]:
        """Return lines with the parts of the first row's memory and time; --json has those of all rows."""
        parts = _join_parts(best.peak.parts, size)
        lines = [f"  memory of {best.label}: {size(best.peak.needed)} at its peak ({best.peak.phase}): {parts}"]
        if best.peak.device > best.peak.needed:
            lines[0] += f"; nvidia-smi shows up to {size(best.peak.device)}, as torch keeps what it has once had"
        limited = [row.label for row in self.rows if row.peak.phase in ("evaluation", "generation")]
        if limited:
            batch = f"--per_device_eval_batch_size than {self.planner.recipe.per_device_eval_batch_size}"
            lines.append(f"  {', '.join(limited)}: peak in the evaluation; a smaller {batch} lowers it")
        if best.timed:
            time = best.timed.time
            spent = {name: seconds for name, seconds in time.parts.items() if seconds >= 5e-4}
            lines += [
                f"  seconds of {best.label}: {_join_parts(spent, rounded)}",
                *self._compiled(best, time.seconds),
                *self.trust(best),
            ]
        return [*lines, ""]

    def _compiled(self, best: Prediction, before_s: float) -> list[str]:
        """Return lines on the choice of --torch_compile auto for the first row, its reason, and the speed with it: the
        table is without torch.compile."""
        recipe = self.planner.recipe
        model = self.planner.model
        budget = self.planner.budget
        if recipe.torch_compile != "auto" or not model.on_gpu or self.planner.lengths is not None:
            return []
        resolved = next(outcome.resolved for outcome in self.outcomes if best in outcome.predictions)
        choice = choose_compilation(recipe, resolved, model.config, recipe.max_train_steps)
        start = "  torch_compile = auto, "
        if not choice.value:
            return [f"{start}which compiles nothing under {best.label}: {choice.why}"]
        recipe = recipe.draft()
        recipe.torch_compile = choice.value
        model = model.with_options(recipe, model.rows)
        timing = self.planner.timing and self.planner.timing.of(model)
        compiled = Planner(recipe, model, budget, timing).predict(resolved, best.micro_batch)
        seconds = rounded(compiled.speed.time.seconds) if compiled.speed else "?"
        return [
            f"{start}{choice.value} under {best.label} ({choice.why}): {seconds} s/update in "
            f"{size(compiled.peak.needed)}; the table is without, {rounded(before_s)} s"
        ]

    @cached_property
    def keeping(self) -> dict[str, Prediction]:
        """{label of a strategy under FSDP2: its best prediction if blocks stay gathered until their backward pass},
        where that fits and is faster."""
        found: dict[str, Prediction] = {}
        if self.planner.lengths is not None or not self.planner.model.on_gpu:
            return found
        for outcome in self.outcomes:
            if not (outcome.best and outcome.best.timed):
                continue
            sharding = outcome.resolved.sharding
            if isinstance(sharding, Fsdp2Settings) and sharding.reshards is True:
                resolved = replace(outcome.resolved, sharding=replace(sharding, reshards=False))
                kept = self.planner.predict(resolved, outcome.best.micro_batch)
                if kept.fits and kept.speed and kept.tokens_per_s > MIN_GAIN * outcome.best.tokens_per_s:
                    found[outcome.label] = kept
        return found

    def _advice(self) -> list[str]:
        """Return advice on what is predicted to be faster: fsdp2 instead of zero3, and weights that stay gathered
        between the passes."""
        outcomes = self.outcomes
        found = {outcome.strategy: outcome.best for outcome in outcomes if outcome.best and outcome.best.timed}
        if "fsdp2" not in found or self.planner.lengths is not None or not self.planner.model.on_gpu:
            return []
        lines = []
        fast = found["fsdp2"].tokens_per_s
        zero3 = found.get("zero3")
        if zero3 is not None and fast > MIN_GAIN * zero3.tokens_per_s:
            gain = fast / zero3.tokens_per_s - 1
            lines.append(f"  fsdp2 shards as much as zero3, and is predicted to make {gain:.0%} more tokens/s")
        kept = self.keeping.get("fsdp2")
        if kept and kept.speed:
            lines.append(
                f"  {RESHARD_KEY}: false in the YAML of fsdp2 fits, too: {rounded(kept.speed.time.seconds)} s/update "
                f"in {size(kept.peak.needed)}. --write sets it"
            )
        return [*lines, ""]

    def trust(self, best: Prediction) -> list[str]:
        """Return a line on how much measured seconds of published runs differ from predictions of this kind."""
        recipe = self.planner.recipe
        layout = best.layout
        model = self.planner.model
        if not recipe.gpu or recipe.gpu == CPU or best.speed is None:
            return []
        gpu = recipe.gpu
        length = model.rows.length
        parameters = model.weights.trained + model.weights.frozen
        is_divided = layout.tensor * layout.pipeline * layout.sequence > 1
        kind = run_kind(best.strategy, is_divided, recipe.lora)
        measured = comparable_rows(kind, gpu, parameters, length, length * best.micro_batch, gpus=layout.world_size)
        if not measured:
            return [f"  nothing comparable has been measured: {kind} on {gpu}"]
        seconds = best.speed.time.seconds
        low, *_, high = statistics.quantiles([row.ratio for row in measured], n=10, method="inclusive")
        near = "; ".join(
            f"{row.model} on {row.gpus}, {row.micro_batch} x {row.length:,} tokens: {rounded(row.seconds)} measured, "
            f"{rounded(row.predicted)} predicted"
            for row in measured[:MAX_NEAREST_RUNS]
        )
        return [
            f"  s/update of {best.label}: {rounded(low * seconds)} to {rounded(high * seconds)}, as 8 of 10 of "
            f"{len(measured)} published runs ({kind}, {gpu_model(gpu)}); nearest: {near}"
        ]

    @property
    def misfits(self) -> list[tuple[LayoutOutcome, Prediction]]:
        """The layouts that do not fit, each with its smallest misfit: for a strategy without a layout that fits, the
        layout that lacks the least; if micro-batches are named, all layouts in which one of them does not fit."""
        misfits = [(outcome, outcome.smallest_misfit) for outcome in self.outcomes if outcome.smallest_misfit]
        if self.planner.recipe.micro_batches:
            return misfits
        fitting = {outcome.strategy for outcome in self.outcomes if outcome.largest}
        nearest: dict[str, LayoutOutcome] = {}
        for outcome, _ in sorted(misfits, key=lambda pair: pair[1].lacking):
            if outcome.strategy not in fitting:
                nearest.setdefault(outcome.strategy, outcome)
        return [pair for pair in misfits if nearest.get(pair[0].strategy) is pair[0]]

    def _misfit_lines(self) -> list[str]:
        """Return lines with the smallest misfits, the options that make them fit, and the batch or rows with these."""
        groups: dict[tuple[object, ...], tuple[Prediction, list[LayoutOutcome]]] = {}
        for outcome, smallest in self.misfits:
            predictions = (smallest, *(found for _, found in outcome.remedies))
            key = (*map(_needs, predictions), *(str(options) for options, _ in outcome.remedies))
            groups.setdefault(key, (smallest, []))[1].append(outcome)
        lines = []
        lengths = self.planner.lengths
        budget = self.planner.budget
        for misfit, group in groups.values():
            noun = f"rows of {misfit.length:,} tokens" if lengths else f"micro-batch {misfit.micro_batch}"
            needs = []
            if misfit.peak.needed > budget.device:
                over = size(misfit.peak.needed - budget.device)
                largest = dict(sorted(misfit.peak.parts.items(), key=lambda item: -item[1])[:3])
                parts = _join_parts(largest, size)
                needs.append(f"{size(misfit.peak.needed)}, exceeds the limit by {over} (mostly {parts})")
            if self.planner.model.on_gpu and budget.host is not None and misfit.host_bytes > budget.host:
                over = size(misfit.host_bytes - budget.host)
                needs.append(f"{size(misfit.host_bytes)} of host memory, exceeds --host_memory by {over}")
            lines += [f"  {', '.join(outcome.label for outcome in group)}, {noun}: {'; '.join(needs)}"]
            for options, found in group[0].remedies:
                batch = f"{found.length:,} tokens" if lengths else f"{found.micro_batch} x {found.accumulation}"
                fits = f"{batch} fits, {size(found.peak.needed)}"
                fits += f", {rounded(found.tokens_per_s)} tokens/s" if found.timed else ""
                lines += [f"    with {' '.join(option_words(options))}: {fits}"]
            if not group[0].remedies:
                lines += ["    with no option that saves memory, nor two of them. Take shorter rows, or more GPUs"]
        return ["does not fit:", *lines, ""] if lines else []

    def describe_model(self) -> str:
        """Return one line with the model's shape and rows."""
        weights = self.planner.model.weights
        rows = self.planner.model.rows
        total = weights.trained + weights.frozen
        config = self.planner.model.config
        trained = "" if not weights.frozen else f", {rounded(100 * weights.trained / total)} % trained"
        target = f" and {rows.target_length:,}" if rows.target_length else ""
        length = f"{rows.length:,}{target}"
        if lengths := self.planner.lengths:
            length = " to ".join(f"{limit:,}" for limit in dict.fromkeys((lengths[0], lengths[-1])))
        checkpointing = self.planner.recipe.gradient_checkpointing
        kind = f" ({checkpointing})" if isinstance(checkpointing, str) else ""
        recomputed = f", recomputed{kind}" if checkpointing else ""
        return f"{config.model_type}, {total:,} parameters{trained}, rows of {length} tokens{recomputed}"

    def to_json(self) -> dict[str, Any]:
        """Return {predictions, best, largest, refused, ...}. If lengths were searched, `best` and `largest` are those
        with the longest rows."""
        weights = self.planner.model.weights
        outcomes = self.outcomes
        best = self.best
        fitting = [(outcome.best.rank, outcome.largest) for outcome in outcomes if outcome.best and outcome.largest]
        largest = best if self.planner.lengths else [last for _, last in sorted(fitting, key=lambda pair: pair[0])]
        return {
            "predictions": [prediction.to_dict() for outcome in outcomes for prediction in outcome.predictions],
            "best": [_key_of(prediction) for prediction in best],
            "largest": [_key_of(prediction) for prediction in largest],
            "refused": {outcome.label: outcome.refused for outcome in outcomes if outcome.refused},
            "remedies": {
                outcome.label: [{**found.to_dict(), "options": options} for options, found in outcome.remedies]
                for outcome, _ in self.misfits
            },
            "checkpoint_bytes": self.planner.model.checkpoint_bytes,
            "parameters": weights.trained + weights.frozen,
            "trained_parameters": weights.trained,
        }


def list_refusals(outcomes: list[LayoutOutcome]) -> list[str]:
    """Return the reasons why layouts are not possible, each with its strategies. Reasons that differ only in numbers
    are listed once."""
    reasons: dict[str, tuple[str, list[str]]] = {}
    for outcome in outcomes:
        if outcome.refused:
            reason = _FILE_PREFIX.sub("", outcome.refused)
            reasons.setdefault(re.sub(r"\d+", "", reason), (reason, []))[1].append(outcome.label)
    return [f"{', '.join(labels)}: {reason}" for reason, labels in reasons.values()]


def _needs(p: Prediction) -> tuple[object, ...]:
    """Return the values by which predictions are grouped."""
    seconds = p.speed.time.seconds if p.speed else None
    return p.size, p.accumulation, p.peak.needed, p.host_bytes, p.disk_bytes, seconds, p.degrees


def _key_of(prediction: Prediction) -> dict[str, Any]:
    content = prediction.to_dict()
    return {name: content[name] for name in ("strategy", "layout", "length", "per_device_train_batch_size")}


def _format_size(count: float) -> str:
    """Format a size for the table, which has to fit into 80 columns."""
    return f"{count / 2**30:,.1f} GiB" if count >= 10 * 2**30 else size(count)


def _join_parts(parts: Mapping[str, float], text: Callable[[float], str]) -> str:
    """Join the names and values of parts, the largest first."""
    return ", ".join(f"{name} {text(part)}" for name, part in sorted(parts.items(), key=lambda item: -item[1]))
