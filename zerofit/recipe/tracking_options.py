"""The options of trackers, and those that there are: all of accelerate 1.15."""

from dataclasses import dataclass

from zerofit.recipe.base import Recipe
from zerofit.recipe.fields import option

TRACKERS = ("tensorboard", "wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio")


@dataclass
class TrackingOptions(Recipe):
    """Trackers"""

    with_tracking: bool = option(False, "Send the metrics to a tracker (report_to).", common=True)
    report_to: str = option(
        "all", "Tracker: one of accelerate's, all (those installed) or none.", choices=("all", *TRACKERS, "none")
    )
    report_name: str | None = option(None, "Project name at the tracker; by default zerofit and the name of the task.")
    run_name: str | None = option(None, "Name of the run at the tracker; by default that of the output folder.")
