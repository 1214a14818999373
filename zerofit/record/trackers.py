"""The trackers of accelerate: a run begins there, and goes on after a resume. Only the main process speaks to them."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate.tracking import get_available_trackers
from requests.utils import get_netrc_auth

from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.options import TrackingOptions

if TYPE_CHECKING:
    from zerofit.training.run import Run

# {tracker: (what reads the id of its run, the options that continue a run)}
RESUMED: dict[str, tuple[Callable[[Any], str], Callable[[str], dict[str, Any]]]] = {
    "wandb": (lambda run: run.id, lambda id: {"resume": "allow", "id": id}),
    "swanlab": (lambda run: run.id, lambda id: {"resume": "allow", "id": id}),
    "comet_ml": (lambda run: run.get_key(), lambda id: {"mode": "get", "experiment_key": id}),
    "clearml": (lambda run: run.id, lambda id: {"continue_last_task": 0, "reuse_last_task_id": id}),
    "aim": (lambda run: run.hash, lambda id: {"run_hash": id}),
    "mlflow": (lambda run: run.info.run_id, lambda id: {"run_id": id}),
}
WANDB = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
IN_THE_FOLDER = {"wandb": "wandb/", "swanlab": "swanlog/", "aim": ".aim/", "dvclive": "dvclive/"}


def wanted_trackers(recipe: TrackingOptions) -> list[str]:
    """The trackers that the run will use. Raises UserError if a named one is not installed."""
    if not recipe.with_tracking or recipe.report_to == "none":
        return []
    installed = [str(each.value) for each in get_available_trackers()]
    if recipe.report_to == "all":
        return installed
    if recipe.report_to not in installed:
        raise UserError(f"report_to = {recipe.report_to!r}: it is not installed. `pip install {recipe.report_to}`")
    return [recipe.report_to]


def start_trackers(run: "Run") -> list[str]:
    """Open the trackers, and continue the runs there. Returns notes. Raises UserError: one does not start."""
    recipe, folder, state, trackers = run.recipe, run.folder, run.state, run.config.trackers
    accelerator = run.engine.accelerator
    project, name, notes = recipe.report_name or f"zerofit-{run.task}", folder.path.name, []
    if trackers and accelerator.is_main_process:
        folder.written.add([f"{project}/", *(IN_THE_FOLDER[each] for each in trackers if each in IN_THE_FOLDER)])
    login = os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY") or get_netrc_auth(WANDB)
    if "wandb" in trackers and not login:
        os.environ["WANDB_MODE"] = "offline"
        notes.append(f"wandb: no login found, so the run is kept in {folder.path}/wandb; `wandb sync` sends it later")
    goes_on, path = state.updates > 0, folder.path
    options: dict[str, dict[str, Any]] = {
        "wandb": {"name": name, "dir": str(path)},
        "swanlab": {"name": name, "log_dir": str(path / "swanlog")},
        "clearml": {"task_name": name, "reuse_last_task_id": False},
        "aim": {"experiment": name},
        "mlflow": {"run_name": name},
        "dvclive": {"dir": str(path / "dvclive"), "resume": goes_on},
        "trackio": {"name": name, "resume": "allow" if goes_on else "never", "embed": False},
        "tensorboard": {"purge_step": state.updates + 1} if goes_on else {},
    }
    for tracker in RESUMED.keys() & state.tracker_ids:
        options[tracker] = options.get(tracker, {}) | RESUMED[tracker][1](state.tracker_ids[tracker])
    config = {
        option: value if isinstance(value, (str, int, float, bool)) else str(value)
        for option, value in recipe.to_publish().items()
    }
    try:
        accelerator.init_trackers(
            project, config=config, init_kwargs={each: options.get(each, {}) for each in trackers}
        )
    except Exception as error:  # each has its own: no login, no server, another version
        raise UserError(
            f"report_to = {recipe.report_to!r}: {', '.join(trackers)} did not start: {first_line(error)}. Log in to "
            "it, choose another one, or leave out --with_tracking"
        ) from error
    for tracker in RESUMED.keys() & {*trackers} if accelerator.is_main_process else ():
        state.tracker_ids[tracker] = RESUMED[tracker][0](accelerator.get_tracker(tracker, unwrap=True))
    return notes
