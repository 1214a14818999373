"""wandb and tensorboard, through accelerate's trackers. Only the main process speaks to them."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from zerofit.recipe.errors import UserError
from zerofit.recipe.options import TrackingOptions
from zerofit.record.run_folder import RunFolder

MODULES = {"wandb": "wandb", "tensorboard": "tensorboard"}


def wanted_trackers(recipe: TrackingOptions) -> list[str]:
    """The trackers that the run will use. Raises UserError if a named one is not installed."""
    if not recipe.with_tracking or recipe.report_to == "none":
        return []
    installed = [name for name, module in MODULES.items() if importlib.util.find_spec(module)]
    if recipe.report_to == "all":
        return installed
    if recipe.report_to not in installed:
        raise UserError(
            f"report_to = {recipe.report_to!r}: it is not installed. `pip install {MODULES[recipe.report_to]}`"
        )
    return [recipe.report_to]


def start_trackers(
    accelerator, trackers: Sequence[str], recipe: TrackingOptions, folder: RunFolder, task: str, state
) -> str | None:
    """Open the trackers, and resume the runs there. Returns a sentence for the log, where wandb goes offline for
    want of a login.

    Args:
        state: of the run; its `tracker_ids` are filled in.
    """
    if not trackers:
        return None
    note, project = None, recipe.report_name or f"zerofit-{task}"
    if accelerator.is_main_process:
        folder.written.add(["wandb/", f"{project}/"])
    if "wandb" in trackers and not os.environ.get("WANDB_MODE") and not _wandb_login():
        os.environ["WANDB_MODE"] = "offline"
        note = f"wandb: no login found, so the run is kept in {folder.path / 'wandb'}; `wandb sync` sends it later"
    config = {name: _plain(value) for name, value in recipe.to_publish().items()}
    wandb = {"name": recipe.run_name or folder.path.name, "dir": str(folder.path)}
    if "wandb" in state.tracker_ids:
        wandb |= {"id": state.tracker_ids["wandb"], "resume": "allow"}
    kwargs = {"wandb": wandb, "tensorboard": {"purge_step": state.updates + 1} if state.updates else {}}
    accelerator.init_trackers(project, config=config, init_kwargs={name: kwargs[name] for name in trackers})
    if "wandb" in trackers and accelerator.is_main_process:
        state.tracker_ids["wandb"] = accelerator.get_tracker("wandb", unwrap=True).id
    return note


def _wandb_login() -> bool:
    import netrc

    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _plain(value: Any) -> Any:
    """Trackers take texts, numbers and truth values."""
    return value if isinstance(value, (str, int, float, bool)) else str(value)
