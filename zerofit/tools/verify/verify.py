r"""`zerofit verify`: shows on a shortened recipe that the strategies agree and that a killed run loses nothing.

    zerofit verify --config recipes/clm/stdlib-gpt2.yaml
    zerofit verify --config recipes/cls/sst2-small.yaml --strategies zero2,zero3 --num_processes 4 --kills 8

The reference is a run with one process. Each strategy then runs with several processes and must have the same losses,
gradient norms, learning rates and samples in every update. Then a run of each strategy is killed with SIGKILL and
resumed several times, also with another number of processes, and must end like the undisturbed run. All runs are real
launches.
"""

from pathlib import Path

from zerofit.launch.runs import ending_in_order
from zerofit.recipe.paths import check_paths, name_of_recipe
from zerofit.record.run_folder import check_folder_of
from zerofit.record.terminal import log_lines, screen_width
from zerofit.strategy.named import find_strategies
from zerofit.tools.tool_recipe import read_with_recipe
from zerofit.tools.verify.proof import ONE_PROCESS, Proof
from zerofit.tools.verify.shorten import VerifyOptions, precision_of, shorten

RECIPE, REPORT = "recipe.yaml", "report.txt"


def main(argv: list[str] | None = None) -> int:
    options, cls = read_with_recipe(VerifyOptions, argv, prog="zerofit verify")
    configs = find_strategies([ONE_PROCESS, *options.names])
    name = name_of_recipe(options.source("config"), options.task)
    output = Path(options.output or Path("outputs") / f"verify-{name}")
    check_folder_of(output, RECIPE, "proof")
    check_paths(options, output, "output")
    short = shorten(options, cls)
    log_lines(
        f"recipe    {options.source('config') or 'of flags'}",
        *(f"changed   {change}" for change in short.notes),
        f"compared  to {options.largest_difference:g}, in {precision_of(options)}",
        f"folder    {output}",
    )
    output.mkdir(parents=True, exist_ok=True)
    (output / RECIPE).write_text(short.to_yaml(), encoding="utf-8")
    proof = Proof(options, configs, output, output / RECIPE)
    with ending_in_order():
        proof.run()
    (output / REPORT).write_text(proof.report() + "\n", encoding="utf-8")
    log_lines("", proof.report(screen_width()))
    if proof.passed and not options.keep:
        proof.clear()
    return 0 if proof.passed else 1
