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
from pathlib import Path

from zerofit.recipe.paths import check_paths
from zerofit.record.run_folder import RunFolder, check_folder_of
from zerofit.record.terminal import say
from zerofit.tools.compare.candidates import (
    TrialRecipe,
    check_overrides,
    make_recipe,
    read_candidates,
    with_one_batch_evaluations,
)
from zerofit.tools.compare.compare_options import CompareOptions
from zerofit.tools.compare.comparison import Comparison
from zerofit.tools.compare.comparison_report import ComparisonReport
from zerofit.tools.compare.finish import RECIPE as RECIPE_TO_FINISH
from zerofit.tools.compare.finish import Finish, values_to_finish
from zerofit.tools.compare.simulated import NOT_COUNTED, Timer, simulated_machine, without_weights
from zerofit.tools.compare.trial_machine import Limits, TrialMachine, choose_limits, inspect_trial_machine
from zerofit.tools.launches import ending_in_order
from zerofit.tools.tool_recipe import parse_bytes, read_with_recipe

RECIPE, JOURNAL = "recipe.yaml", "journal.jsonl"


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    options, cls = read_with_recipe(CompareOptions, argv, prog="zerofit compare")
    candidates = read_candidates(options.names)
    source = options.source("config")
    output = Path(options.output or Path("outputs") / f"compare-{Path(source).stem if source else options.task}")
    check_folder_of(output, JOURNAL, "comparison")
    check_paths(options, output, "output")
    trial_recipe = make_recipe(options, cls)
    if options.simulate:
        trial_recipe = TrialRecipe(without_weights(trial_recipe.values), [*trial_recipe.notes, NOT_COUNTED])
    check_overrides(candidates, trial_recipe, cls, options.lengths)
    to_finish = TrialRecipe(values_to_finish(options, cls), []) if options.finish else None
    if to_finish:
        check_overrides(candidates, to_finish, cls)
    candidates = with_one_batch_evaluations(candidates, options)
    machine = (
        simulated_machine(options.simulate, options.num_processes) if options.simulate else inspect_trial_machine()
    )
    timer = Timer(inspect_trial_machine()) if options.times_simulated else None
    limits = limits_of(options, machine)
    output.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(output, "output")
    folder.lock()
    (output / RECIPE).write_text(trial_recipe.to_yaml(), encoding="utf-8")
    (output / JOURNAL).touch()
    say(
        f"recipe    {source or 'from flags'}",
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


def limits_of(options, machine: TrialMachine) -> Limits:
    """The limits from the options.

    Raises:
        UserError: the machine has less memory than that.
    """
    device, host = (text and parse_bytes(text) for text in (options.memory_limit, options.host_memory_limit))
    if machine.simulated:
        device = device or machine.devices[0].total
    return choose_limits(machine, options.num_processes, device, host)
