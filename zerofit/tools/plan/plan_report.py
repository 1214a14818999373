"""The output of `zerofit plan`: the ranked table, and the pair that is written."""

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
from zerofit.strategy.launch import RESHARDS
from zerofit.tools.plan.joint_search import words_of
from zerofit.tools.plan.plan_options import PlanOptions, labelled, read_pair
from zerofit.tools.plan.planner import LayoutOutcome, Planner, Prediction
from zerofit.training.run_configuration import choose_compilation

EACH_MACHINE = "On each of the {} machines, with MACHINE_RANK=0, 1, ... and MAIN_PROCESS_IP, the address of machine 0."
RENDEZVOUS = (
    '--machine_rank "$MACHINE_RANK" --main_process_ip "$MAIN_PROCESS_IP" '
    '--main_process_port "${MAIN_PROCESS_PORT:-29500}"'
)
SET_HERE = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size")


def make_folder(folder: Path) -> Path:
    """Raises UserError: the folder cannot be made, or is a run's, whose recipe.yaml is not replaced."""
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
    """NAME.yaml, NAME.json (of ZeRO) and NAME.sh of each prediction; NAME has the degrees of parallelism: tp_x4.

    Args:
        options: of the plan and the recipe, whose flags go into the command.
        recipe: the type of the task's recipe.
        recipe_file: has all options; None: the command has those that were given.
        keeping: {strategy: the prediction where its blocks stay gathered until their backward pass}, which is written
            in place of the first.

    Returns: the scripts.
    """
    flags = ["--config", str(recipe_file)] if recipe_file else options.flags_given(recipe, without=SET_HERE)
    scripts = []
    for prediction in predictions:
        pair = read_pair(prediction.strategy)
        world_size = prediction.layout.world_size
        file = folder / f"{labelled(pair.source.stem, prediction.degrees).replace(' ', '_')}.yaml"
        if file.resolve() == pair.source.resolve():
            raise UserError(f"write = {str(folder)!r}: {file} is the strategy itself. Set --write to another folder")
        machines = -(-world_size // options.gpus_per_node)
        changes: dict[str, Any] = {"num_machines": machines, "num_processes": world_size, "machine_rank": 0}
        kept = (keeping or {}).get(prediction.label)
        if kept is not None:
            changes["fsdp_config"] = {**pair.content["fsdp_config"], RESHARDS: False}
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
        each, rendezvous = (f"# {EACH_MACHINE.format(machines)}\n", f"{RENDEZVOUS} ") if machines > 1 else ("", "")
        launch = f"{each}accelerate launch --config_file {shlex.quote(str(file))} {rendezvous}{program}"
        script = file.with_suffix(".sh")
        script.write_text(f"#!/bin/sh\n{head}{launch}\n", encoding="utf-8")
        script.chmod(0o755)
        scripts.append(script)
    return scripts


WORTH = 1.01  # times the speed: what is advised gains more
NEAREST = 2  # published runs that are named
_FILE = re.compile(r"^\S+\.(json|yaml): ")  # of a pair, which the label names


@dataclass
class PlanReport:
    """Everything that was found."""

    outcomes: list[LayoutOutcome]
    planner: Planner

    @property
    def best(self) -> list[Prediction]:
        """The prediction to show of each strategy that fits, the fastest first; where lengths were searched the
        longest rows, the longest of all first."""
        if self.planner.lengths is None:
            return sorted((one.best for one in self.outcomes if one.best), key=lambda one: one.rank)
        longest = [one.largest for one in self.outcomes if one.largest]
        return sorted(longest, key=lambda one: (-one.length, one.rank))

    @cached_property
    def _groups(self) -> list[list[Prediction]]:
        """Those that need the same in the same time are together; the first one of each stands for them."""
        groups: dict[tuple[object, ...], list[Prediction]] = {}
        for one in self.best:
            groups.setdefault(_needs(one), []).append(one)
        return list(groups.values())

    @property
    def rows(self) -> list[Prediction]:
        """Those of the table: of strategies that do the same, the first one."""
        return [group[0] for group in self._groups]

    def for_terminal(self, top: int, width: int | None, tokens: float | None) -> str:
        """The whole report. Sizes and times are predicted."""
        lines = []
        shown = self._groups[:top]
        if shown:
            lines += ["what fits, predicted, of the process that needs most:", ""]
            cells = [self._cells(group[0], tokens) for group in shown]
            names = [name for name in cells[0] if any(each[name] for each in cells)]
            rows = [tuple(names), *(tuple(each[name] or "-" for name in names) for each in cells)]
            legend = "  batch: micro-batch x accumulation; memory: of one device"
            legend += "; host: of one machine" if "host" in names else ""
            lines += [f"{table(rows, width)}\n\n{legend}", ""]
            lines += [
                f"  {', '.join(one.label for one in group[1:])}: the same as {group[0].label}"
                for group in shown
                if len(group) > 1
            ] + [""]
            lines += self._parts(shown[0][0])
            lines += self._advice()
        lines += self._misfit_lines()
        refused = refusals(self.outcomes)
        lines += ["not possible:", *(f"  {line}" for line in refused), ""] if refused else []
        offloaded = [one for one, *_ in shown if one.disk_bytes]
        lines += [f"{one.label} keeps {size(one.disk_bytes)} on a disk of each machine." for one in offloaded]
        lines.append(f"A checkpoint takes {size(self.planner.model.checkpoint_bytes)} of disk.")
        text = "\n".join(line if "\n" in line else wrapped(line, width, 4) for line in lines)
        return re.sub(r"\n{3,}", "\n\n", text)

    def _cells(self, one: Prediction, tokens: float | None) -> dict[str, str]:
        """{column: cell} of a row; a column whose cells are all empty is left out."""
        cells = {
            "strategy": one.label,
            "longest rows": f"{one.length:,}" if self.planner.lengths else "",
            "batch": f"{one.micro_batch} x {one.accumulation}",
            "memory": _size(one.peak.needed),
            "host": _size(one.host_bytes) if one.host_bytes else "",
        }
        columns = ("s/update", "tokens/s", "MFU", "days", "GPU-hours", "cost")
        speed = one.timed
        if speed is None:
            return cells | dict.fromkeys(columns, "")
        hours = tokens / speed.tokens_per_s / 3600 * one.layout.world_size if tokens else 0.0
        price = self.planner.recipe.price
        mfu = speed.mfu
        times = (
            rounded(speed.time.seconds),
            rounded(speed.tokens_per_s),
            "-" if mfu is None else f"{mfu:.0%}",
            rounded(hours / 24 / one.layout.world_size) if tokens else "",
            rounded(hours) if tokens else "",
            rounded(price * hours) if tokens and price else "",
        )
        return cells | dict(zip(columns, times))

    def _parts(self, best: Prediction) -> list[str]:
        """Return lines with the parts of the first row's memory and time; --json has those of all rows."""
        parts = _listed(best.peak.parts, size)
        lines = [f"  memory of {best.label}: {size(best.peak.needed)} at its peak ({best.peak.phase}): {parts}"]
        if best.peak.device > best.peak.needed:
            lines[0] += f"; nvidia-smi shows up to {size(best.peak.device)}, as torch keeps what it has once had"
        limited = [one.label for one in self.rows if one.peak.phase in ("evaluation", "generation")]
        if limited:
            batch = f"--per_device_eval_batch_size than {self.planner.recipe.per_device_eval_batch_size}"
            lines.append(f"  {', '.join(limited)}: peak in the evaluation; a smaller {batch} lowers it")
        if best.timed:
            time = best.timed.time
            spent = {name: seconds for name, seconds in time.parts.items() if seconds >= 5e-4}
            lines += [
                f"  seconds of {best.label}: {_listed(spent, rounded)}",
                *self._compiled(best, time.seconds),
                *self.trust(best),
            ]
        return [*lines, ""]

    def _compiled(self, best: Prediction, before_s: float) -> list[str]:
        """Return lines on what --torch_compile auto chooses for the first row, and why; its speed with that, since the
        table is without."""
        recipe = self.planner.recipe
        model = self.planner.model
        budget = self.planner.budget
        if recipe.torch_compile != "auto" or not model.on_gpu or self.planner.lengths is not None:
            return []
        resolved = next(one.resolved for one in self.outcomes if best in one.predictions)
        taken = choose_compilation(recipe, resolved, model.config, recipe.max_train_steps)
        what = "  torch_compile = auto, "
        if not taken.value:
            return [f"{what}which compiles nothing under {best.label}: {taken.why}"]
        recipe = recipe.draft()
        recipe.torch_compile = taken.value
        model = model.with_options(recipe, model.rows)
        timing = self.planner.timing and self.planner.timing.of(model)
        found = Planner(recipe, model, budget, timing).predict(resolved, best.micro_batch)
        seconds = rounded(found.speed.time.seconds) if found.speed else "?"
        return [
            f"{what}{taken.value} under {best.label} ({taken.why}): {seconds} s/update in {size(found.peak.needed)}; "
            f"the table is without, {rounded(before_s)} s"
        ]

    @cached_property
    def keeping(self) -> dict[str, Prediction]:
        """{strategy that shards weights fully: its best prediction where blocks stay gathered until their backward
        pass}, of those where that fits and is faster."""
        found: dict[str, Prediction] = {}
        if self.planner.lengths is not None or not self.planner.model.on_gpu:
            return found
        for one in self.outcomes:
            if not (one.best and one.best.timed):
                continue
            sharding = one.resolved.sharding
            if isinstance(sharding, Fsdp2Settings) and sharding.reshards is True:
                resolved = replace(one.resolved, sharding=replace(sharding, reshards=False))
                kept = self.planner.predict(resolved, one.best.micro_batch)
                if kept.fits and kept.speed and kept.tokens_per_s > WORTH * one.best.tokens_per_s:
                    found[one.label] = kept
        return found

    def _advice(self) -> list[str]:
        """Advise what is predicted to be faster on several GPUs than what was asked for: fsdp2 in place of zero3, and
        weights that stay in full between the passes."""
        found = {one.strategy: one.best for one in self.outcomes if one.best and one.best.timed}
        if "fsdp2" not in found or self.planner.lengths is not None or not self.planner.model.on_gpu:
            return []
        lines = []
        fast = found["fsdp2"].tokens_per_s
        zero3 = found.get("zero3")
        if zero3 is not None and fast > WORTH * zero3.tokens_per_s:
            gain = fast / zero3.tokens_per_s - 1
            lines.append(f"  fsdp2 shards as much as zero3, and is predicted to make {gain:.0%} more tokens/s")
        kept = self.keeping.get("fsdp2")
        if kept and kept.speed:
            lines.append(
                f"  {RESHARDS}: false in the YAML of fsdp2 fits, too: {rounded(kept.speed.time.seconds)} s/update in "
                f"{size(kept.peak.needed)}. --write sets it"
            )
        return [*lines, ""]

    def trust(self, best: Prediction) -> list[str]:
        """Return a line on how far published seconds were from predictions of this kind."""
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
        found = comparable_rows(kind, gpu, parameters, length, length * best.micro_batch, gpus=layout.world_size)
        if not found:
            return [f"  nothing comparable has been measured: {kind} on {gpu}"]
        seconds = best.speed.time.seconds
        low, *_, high = statistics.quantiles([row.ratio for row in found], n=10, method="inclusive")
        near = "; ".join(
            f"{row.model} on {row.gpus}, {row.micro_batch} x {row.length:,} tokens: {rounded(row.seconds)} measured, "
            f"{rounded(row.predicted)} predicted"
            for row in found[:NEAREST]
        )
        return [
            f"  s/update of {best.label}: {rounded(low * seconds)} to {rounded(high * seconds)}, as 8 of 10 of "
            f"{len(found)} published runs ({kind}, {gpu_model(gpu)}); nearest: {near}"
        ]

    @property
    def misfits(self) -> list[tuple[LayoutOutcome, Prediction]]:
        """Return, of each strategy that nothing fits of, the layout that lacks least; of named micro-batches, each
        layout that one does not fit in. Each has the smallest that does not fit."""
        misfits = [(one, one.smallest_misfit) for one in self.outcomes if one.smallest_misfit]
        if self.planner.recipe.micro_batches:
            return misfits
        fitting = {one.strategy for one in self.outcomes if one.largest}
        nearest: dict[str, LayoutOutcome] = {}
        for one, _ in sorted(misfits, key=lambda pair: pair[1].lacking):
            if one.strategy not in fitting:
                nearest.setdefault(one.strategy, one)
        return [pair for pair in misfits if nearest.get(pair[0].strategy) is pair[0]]

    def _misfit_lines(self) -> list[str]:
        """The smallest that does not fit, with the options that make it fit and the batch (or rows) it then has."""
        groups: dict[tuple[object, ...], tuple[Prediction, list[LayoutOutcome]]] = {}
        for one, smallest in self.misfits:
            predictions = (smallest, *(found for _, found in one.remedies))
            key = (*map(_needs, predictions), *(str(options) for options, _ in one.remedies))
            groups.setdefault(key, (smallest, []))[1].append(one)
        lines = []
        lengths = self.planner.lengths
        budget = self.planner.budget
        for misfit, group in groups.values():
            what = f"rows of {misfit.length:,} tokens" if lengths else f"micro-batch {misfit.micro_batch}"
            needs = []
            if misfit.peak.needed > budget.device:
                over = size(misfit.peak.needed - budget.device)
                largest = dict(sorted(misfit.peak.parts.items(), key=lambda item: -item[1])[:3])
                parts = _listed(largest, size)
                needs.append(f"{size(misfit.peak.needed)}, exceeds the limit by {over} (mostly {parts})")
            if self.planner.model.on_gpu and budget.host is not None and misfit.host_bytes > budget.host:
                over = size(misfit.host_bytes - budget.host)
                needs.append(f"{size(misfit.host_bytes)} of host memory, exceeds --host_memory by {over}")
            lines += [f"  {', '.join(one.label for one in group)}, {what}: {'; '.join(needs)}"]
            for options, found in group[0].remedies:
                batch = f"{found.length:,} tokens" if lengths else f"{found.micro_batch} x {found.accumulation}"
                fits = f"{batch} fits, {size(found.peak.needed)}"
                fits += f", {rounded(found.tokens_per_s)} tokens/s" if found.timed else ""
                lines += [f"    with {' '.join(words_of(options))}: {fits}"]
            if not group[0].remedies:
                lines += ["    with no option that saves memory, nor two of them. Take shorter rows, or more GPUs"]
        return ["does not fit:", *lines, ""] if lines else []

    def describe_model(self) -> str:
        """One line: the model's shape and rows."""
        weights = self.planner.model.weights
        rows = self.planner.model.rows
        total = weights.trained + weights.frozen
        config = self.planner.model.config
        trained = "" if not weights.frozen else f", {rounded(100 * weights.trained / total)} % trained"
        target = f" and {rows.target_length:,}" if rows.target_length else ""
        length = f"{rows.length:,}{target}"
        if lengths := self.planner.lengths:
            length = " to ".join(f"{one:,}" for one in dict.fromkeys((lengths[0], lengths[-1])))
        which = self.planner.recipe.gradient_checkpointing
        how = f" ({which})" if isinstance(which, str) else ""
        recomputed = f", recomputed{how}" if which else ""
        return f"{config.model_type}, {total:,} parameters{trained}, rows of {length} tokens{recomputed}"

    def to_json(self) -> dict[str, Any]:
        """{predictions, best, largest, refused, ...}. Where lengths were searched, `best` and `largest` are
        the longest rows."""
        weights = self.planner.model.weights
        best = self.best
        fitting = [(one.best.rank, one.largest) for one in self.outcomes if one.best and one.largest]
        largest = best if self.planner.lengths else [one for _, one in sorted(fitting, key=lambda pair: pair[0])]
        return {
            "predictions": [one.to_dict() for outcome in self.outcomes for one in outcome.predictions],
            "best": [_place(one) for one in best],
            "largest": [_place(one) for one in largest],
            "refused": {one.label: one.refused for one in self.outcomes if one.refused},
            "remedies": {
                one.label: [{**found.to_dict(), "options": options} for options, found in one.remedies]
                for one, _ in self.misfits
            },
            "checkpoint_bytes": self.planner.model.checkpoint_bytes,
            "parameters": weights.trained + weights.frozen,
            "trained_parameters": weights.trained,
        }


def refusals(outcomes: list[LayoutOutcome]) -> list[str]:
    """Each reason why a layout is not possible once, whatever its numbers are, with the strategies that have it."""
    reasons: dict[str, tuple[str, list[str]]] = {}
    for one in outcomes:
        if one.refused:
            reason = _FILE.sub("", one.refused)
            reasons.setdefault(re.sub(r"\d+", "", reason), (reason, []))[1].append(one.label)
    return [f"{', '.join(labels)}: {reason}" for reason, labels in reasons.values()]


def _needs(one: Prediction) -> tuple[object, ...]:
    seconds = one.speed.time.seconds if one.speed else None
    return one.size, one.accumulation, one.peak.needed, one.host_bytes, one.disk_bytes, seconds, one.degrees


def _place(one: Prediction) -> dict[str, Any]:
    found = one.to_dict()
    return {name: found[name] for name in ("strategy", "layout", "length", "per_device_train_batch_size")}


def _size(count: float) -> str:
    """Write a size as the table has it, which 80 columns hold."""
    return f"{count / 2**30:,.1f} GiB" if count >= 10 * 2**30 else size(count)


def _listed(parts: Mapping[str, float], text: Callable[[float], str]) -> str:
    """Parts in words, the largest first."""
    return ", ".join(f"{name} {text(part)}" for name, part in sorted(parts.items(), key=lambda item: -item[1]))
