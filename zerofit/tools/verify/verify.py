r"""`zerofit verify`: shows on a shortened recipe that the strategies agree and that a killed run loses nothing.

    zerofit verify --config recipes/clm/stdlib-gpt2.yaml
    zerofit verify --config recipes/cls/sst2-small.yaml --strategies zero2,zero3 --num_processes 4 --kills 8

The reference is a run with one process. Each strategy then runs with several processes and must have the same losses,
gradient norms, learning rates and samples in every update. Then a run of each strategy is killed with SIGKILL and
resumed several times, also with another number of processes, and must end like the undisturbed run. All runs are real
launches.
"""

from dataclasses import dataclass
from pathlib import Path

from zerofit.launch.runs import ending_in_order
from zerofit.recipe.fields import option
from zerofit.recipe.paths import check_paths, name_of_recipe
from zerofit.record.run_folder import check_folder_of
from zerofit.record.terminal import say, screen_width
from zerofit.strategy.named import find_strategies
from zerofit.tools.tool_recipe import LaunchedStrategiesOptions, read_with_recipe
from zerofit.tools.verify.proof import ONE_PROCESS, Proof
from zerofit.tools.verify.shorten import precision_of, shorten

RECIPE, REPORT = "recipe.yaml", "report.txt"
TOLERANCES = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 5e-2}


def main(argv: list[str] | None = None) -> int:
    options, cls = read_with_recipe(VerifyOptions, argv, prog="zerofit verify")
    configs = find_strategies([ONE_PROCESS, *options.names])
    name = name_of_recipe(options.source("config"), options.task)
    output = Path(options.output or Path("outputs") / f"verify-{name}")
    check_folder_of(output, RECIPE, "proof")
    check_paths(options, output, "output")
    short = shorten(options, cls)
    precision = precision_of(options)
    options.tolerance = options.tolerance or TOLERANCES[precision]
    say(
        f"recipe    {options.source('config') or 'of flags'}",
        *(f"changed   {change}" for change in short.notes),
        f"compared  to {options.tolerance:g}, in {precision}",
        f"folder    {output}",
    )
    output.mkdir(parents=True, exist_ok=True)
    (output / RECIPE).write_text(short.to_yaml(), encoding="utf-8")
    # A recipe's own save_steps may be more than all updates of the proof.
    save_steps = options.save_steps if options.source("save_steps") == "--save_steps" else max(1, options.updates // 6)
    proof = Proof(options, configs, output, output / RECIPE, save_steps)
    with ending_in_order():
        proof.run()
    (output / REPORT).write_text(proof.report() + "\n", encoding="utf-8")
    say("", proof.report(screen_width()))
    if proof.is_well and not options.keep:
        proof.clear()
    return 0 if proof.is_well else 1


@dataclass
class VerifyOptions(LaunchedStrategiesOptions):
    """Strategies agree, and a killed run loses nothing; options of the training recipe change that"""

    updates: int = option(12, "Length of the runs.", minimum=2, common=True)
    kills: int = option(
        3, "How often a run is killed, once it has saved, and resumed; 0: not at all.", minimum=0, common=True
    )
    resumed_processes: int = option(1, "Processes of every third launch of a killed run.", positive=True)
    tolerance: float | None = option(None, "Largest relative difference; else 1e-5, or 5e-2 in half.", positive=True)
    launch_minutes: float = option(60.0, "A launch that has not ended by then has failed.", positive=True)
    output: str | None = option(None, "Folder of the runs; by default outputs/verify-RECIPE.")
    keep: bool = option(False, "Keep the runs also where all is well; those that are not well are kept anyway.")

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.kills >= self.updates:
            problems.append(f"kills = {self.kills} and updates = {self.updates}: use more updates")
        if self.kills and self.source("save_steps") == "--save_steps" and self.save_steps >= self.updates:
            problems.append(
                f"save_steps = {self.save_steps} and updates = {self.updates}: there would be no checkpoint to resume "
                f"from. Use --save_steps {max(1, self.updates // 6)}, or --kills 0"
            )
        return problems
