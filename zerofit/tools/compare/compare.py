r"""`zerofit compare`: the largest batch that each strategy holds, its memory and its speed, by running it.

    zerofit compare --config recipes/cls/deberta-xl-mrpc.yaml --strategies ddp,zero2 --num_processes 2 \
        --memory_limit 24GiB
    zerofit compare --config recipes/clm/compare-small.yaml --strategies zero2,zero2:lora=true --memory_limit 1GiB
    zerofit compare --config recipes/clm/compare-small.yaml --strategies ddp,zero2 --memory_limit 1GiB --finish
    zerofit compare --config recipes/clm/compare-small.yaml --strategies ddp,zero2 --simulate 512MiB --steps 2
    zerofit compare --config recipes/clm/llama-long-context.yaml --strategies zero3,sp --lengths 8k,16k,32k

Every trial is a real launch of the task with the recipe; its rows have the greatest length that the recipe allows. The
journal in the output folder keeps all results: the same command resumes where it was interrupted, and repeats nothing.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from zerofit.launch.runs import ending_in_order
from zerofit.recipe.fields import option
from zerofit.recipe.parsing import parse_bytes
from zerofit.recipe.paths import check_paths, name_of_recipe
from zerofit.record.run_folder import RunFolder, check_folder_of
from zerofit.record.terminal import say
from zerofit.tools.compare.candidates import check_overrides, make_recipe, read_candidates
from zerofit.tools.compare.comparison import Comparison
from zerofit.tools.compare.comparison_report import ComparisonReport
from zerofit.tools.compare.finish import RECIPE as RECIPE_TO_FINISH
from zerofit.tools.compare.finish import Finish, values_to_finish
from zerofit.tools.compare.search import BATCHES, LENGTHS, SearchVariable
from zerofit.tools.compare.trial_machine import (
    NOT_COUNTED,
    Timer,
    choose_limits,
    inspect_trial_machine,
    simulated_machine,
    without_weights,
)
from zerofit.tools.lengths_option import SizesOptions, length_problems, read_lengths
from zerofit.tools.tool_recipe import LaunchedStrategiesOptions, ToolRecipe, read_with_recipe

RECIPE, JOURNAL = "recipe.yaml", "journal.jsonl"


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    options, cls = read_with_recipe(CompareOptions, argv, prog="zerofit compare")
    candidates = read_candidates(options.names)
    name = name_of_recipe(options.source("config"), options.task)
    output = Path(options.output or Path("outputs") / f"compare-{name}")
    check_folder_of(output, JOURNAL, "comparison")
    check_paths(options, output, "output")
    trial_recipe = make_recipe(options, cls)
    if options.simulate:
        trial_recipe = ToolRecipe(without_weights(trial_recipe.values), [*trial_recipe.notes, NOT_COUNTED])
    check_overrides(candidates, trial_recipe, cls, options.lengths)
    to_finish = ToolRecipe(values_to_finish(options, cls), []) if options.finish else None
    if to_finish:
        check_overrides(candidates, to_finish, cls)
    machine = (
        simulated_machine(options.simulate, options.num_processes) if options.simulate else inspect_trial_machine()
    )
    timer = Timer(inspect_trial_machine()) if options.times_simulated else None
    memory_limit = options.memory_limit and parse_bytes(options.memory_limit)
    if options.simulate:
        memory_limit = memory_limit or machine.devices[0].total
    limits = choose_limits(machine, options.num_processes, memory_limit)
    output.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(output, "output")
    folder.lock()
    (output / RECIPE).write_text(trial_recipe.to_yaml(), encoding="utf-8")
    (output / JOURNAL).touch()
    say(
        f"recipe    {options.source('config') or 'from flags'}",
        f"compared  {', '.join(candidate.name for candidate in candidates)}",
        f"machine   {machine.describe()}",
        f"folder    {output}",
        *(f"note      {note}" for note in (*trial_recipe.notes, *limits.notes)),
    )
    comparison = Comparison(options, candidates, machine, limits, output / RECIPE, output, timer)
    report = ComparisonReport(comparison, f"zerofit compare {shlex.join(argv)}", trial_recipe.notes)
    with ending_in_order():
        try:
            comparison.run()
            report.write(output)
            if to_finish:
                (output / RECIPE_TO_FINISH).write_text(to_finish.to_yaml(), encoding="utf-8")
                say("", report.for_terminal(), "")
                report.finished = Finish(comparison, output / RECIPE_TO_FINISH).run()
        except KeyboardInterrupt:
            say("", f"interrupted. The results so far are in {output / JOURNAL}: the same command resumes from there")
            raise
    report.write(output)
    say("", report.for_terminal(), "", f"report    {output / 'report.html'}, report.md, results.csv")
    return 1 if comparison.problems or any(run.problem for run in report.finished) else 0


@dataclass
class CompareOptions(SizesOptions, LaunchedStrategiesOptions):
    """The largest batch of each strategy; zero2:lora=true, say, is zero2 with an option of the recipe of its own"""

    memory_limit: str | None = option(None, "Memory of one process' device: 24GiB; else all it has.", common=True)
    simulate: str | None = option(
        None,
        "Without a GPU: on simulated ones of this size: 24GiB, a100-80gb. --steps times the CPU.",
        common=True,
    )

    granularity: int = option(1, "The largest batch is found as a multiple of this, up to 4096.", positive=True)
    steps: int = option(5, "Timed updates of each batch size, after one or two that warm up.", minimum=2)
    trial_minutes: float = option(20.0, "A launch that shows nothing new for this long has timed out.", positive=True)
    finish: bool = option(False, "Then train each strategy at its best batch, and compare.", common=True)
    output: str | None = option(None, "Folder of the comparison; by default outputs/compare-RECIPE.")

    @property
    def times_simulated(self) -> bool:
        """Whether updates are timed on this machine, and sizes found on simulated devices."""
        return bool(self.simulate and self.source("steps"))

    @property
    def variable(self) -> SearchVariable:
        return LENGTHS if self.lengths else BATCHES

    @property
    def sizes(self) -> list[int] | None:
        """The batch sizes or lengths that were named, in order; None: auto."""
        return read_lengths(self.lengths) if self.lengths else self.micro_batches

    def problems(self) -> list[str]:
        problems = super().problems()
        try:
            parse_bytes(self.memory_limit or "1GiB")
        except ValueError:
            problems.append(f"memory_limit = {self.memory_limit!r}: expected a size such as 24GiB, 800MiB or 24GB")
        if self.simulate:
            without_use = [name for name in ("finish", *["steps"] * bool(self.lengths)) if self.source(name)]
            problems += [f"{name}: no effect with simulate = {self.simulate}. Remove it" for name in without_use]
        if self.lengths:
            without_use = ("batch_sizes", "granularity", "finish")
            return problems + length_problems(self, automatic=False, without_use=without_use)
        if self.batch_sizes != ["auto"] and self.source("granularity"):
            problems.append(f"granularity = {self.granularity} has no effect with batch_sizes. Remove it")
        return problems
