"""The options of `zerofit verify`."""

from dataclasses import dataclass

from zerofit.recipe.fields import option
from zerofit.tools.tool_recipe import LaunchedStrategiesOptions


@dataclass
class VerifyOptions(LaunchedStrategiesOptions):
    """Strategies agree, and a killed run loses nothing; options of the training recipe change that"""

    updates: int = option(12, "Length of the runs.", minimum=2, common=True)
    kills: int = option(
        3, "How often a run of each strategy is killed and resumed; 0: not at all.", minimum=0, common=True
    )
    resumed_processes: int = option(
        1, "Processes of every third launch of a run that is killed; the others have num_processes.", positive=True
    )
    tolerance: float | None = option(
        None, "Largest relative difference; by default 1e-5 in fp32, and 5e-2 in half precision.", positive=True
    )
    launch_minutes: float = option(60.0, "A launch that has not ended by then has failed.", positive=True)
    output: str | None = option(None, "Folder of the runs; by default outputs/verify-RECIPE.")
    keep: bool = option(False, "Keep the runs also where all is well; those that are not well are kept anyway.")

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.kills >= self.updates:
            problems.append(
                f"kills = {self.kills} and updates = {self.updates}: there must be more updates than kills"
            )
        return problems
