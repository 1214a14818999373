r"""`zerofit compare`: the largest batch that each strategy holds, its memory and its speed, by running it.

    zerofit compare --config recipes/cls/deberta-xl-mrpc.yaml --strategies ddp,zero2 --num_processes 2 \
        --memory_limit 24GiB
    zerofit compare --config recipes/clm/compare-small.yaml --strategies zero2,zero2:lora=true --memory_limit 1GiB
    zerofit compare --config recipes/clm/compare-small.yaml --strategies ddp,zero2 --memory_limit 1GiB --finish
    zerofit compare --config recipes/clm/compare-small.yaml --strategies ddp,zero2 --simulate 512MiB --steps 2

Every trial is a real launch of the task with the recipe at one batch size; its rows have the greatest length that the
recipe allows. The journal in the output folder keeps all results: the same command resumes where it was interrupted,
and repeats nothing. Without a GPU the memory limit is that of simulated devices, and updates are timed on the CPU.
"""

import shlex
from pathlib import Path

from zerofit.launch.runs import ending_in_order
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import parse_bytes
from zerofit.recipe.paths import check_paths, name_of_recipe
from zerofit.record.run_folder import RunFolder, check_folder_of
from zerofit.record.terminal import log_lines
from zerofit.tools.compare.candidates import CompareOptions, check_overrides, make_recipe, read_candidates
from zerofit.tools.compare.comparison import Comparison
from zerofit.tools.compare.finish import RECIPE as RECIPE_TO_FINISH
from zerofit.tools.compare.finish import finish, values_to_finish
from zerofit.tools.compare.report import ComparisonReport
from zerofit.tools.compare.trial import (
    NOT_COUNTED,
    choose_limit,
    inspect_trial_machine,
    recipe_without_weights,
    simulated_machine,
)
from zerofit.tools.tool_recipe import read_with_recipe, recipe_text

RECIPE, JOURNAL = "recipe.yaml", "journal.jsonl"


def main(argv: list[str]) -> int:
    options, cls = read_with_recipe(CompareOptions, argv, prog="zerofit compare")
    candidates = read_candidates(options.names)
    name = name_of_recipe(options.source("config"), options.task)
    output = Path(options.output or Path("outputs") / f"compare-{name}")
    check_folder_of(output, JOURNAL, "comparison")
    check_paths(options, output, "output")
    values, notes = make_recipe(options, cls)
    check_overrides(candidates, values, cls)
    to_finish = values_to_finish(options, cls) if options.finish else None
    if to_finish:
        check_overrides(candidates, to_finish, cls)
    real, device = None, options.simulate or options.memory_limit
    if not options.simulate or options.source("steps") or options.finish:  # updates are timed on this machine
        real = inspect_trial_machine()
    if real is not None and real.devices and not options.simulate:
        machine, timer = real, None
    elif device:
        machine, timer = simulated_machine(device, options.num_processes), real
        values, notes = recipe_without_weights(values), [*notes, NOT_COUNTED]
    else:
        raise UserError("there is no GPU here: set --memory_limit, e.g. 1GiB, for simulated devices of this size")
    stated = parse_bytes(options.memory_limit) if options.memory_limit else None
    limit, about_limit = choose_limit(machine, options.num_processes, stated)
    notes += about_limit
    output.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(output, "output")
    folder.lock()
    (output / RECIPE).write_text(recipe_text(values), encoding="utf-8")
    (output / JOURNAL).touch()
    log_lines(
        f"recipe    {options.source('config') or 'from flags'}",
        f"compared  {', '.join(candidate.name for candidate in candidates)}",
        f"machine   {machine.describe()}",
        f"folder    {output}",
        *(f"note      {note}" for note in notes),
    )
    comparison = Comparison(
        options, candidates, machine=machine, limit=limit, recipe=output / RECIPE, output=output, timer=timer
    )
    with ending_in_order():
        try:
            comparison.run()
            report = ComparisonReport(comparison, f"zerofit compare {shlex.join(argv)}", notes)
            report.write(output)
            log_lines("", report.for_terminal())
            if to_finish:
                (output / RECIPE_TO_FINISH).write_text(recipe_text(to_finish), encoding="utf-8")
                rows = zip(candidates, comparison.rows())
                best = [(candidate, row.best["size"]) for candidate, row in rows if row.best]
                report.finished = [finish(comparison, output / RECIPE_TO_FINISH, *each) for each in best]
                report.write(output)
                log_lines("", report.for_terminal())
        except KeyboardInterrupt:
            log_lines(
                "", f"interrupted. The results so far are in {output / JOURNAL}: the same command resumes from there"
            )
            raise
    log_lines("", f"report    {output / 'report.html'}, report.md, results.csv")
    return 1 if comparison.problems or any(run.problem for run in report.finished) else 0
