"""All trackers of accelerate 1.15: how each begins a run, continues it after a resume, and takes a picture and a
table. Only the main process speaks to them."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.tracking_options import TRACKERS, TrackingOptions
from zerofit.record.run_folder import RunFolder

HEAD_ROWS = 20  # of predictions.jsonl in a table


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker begins or continues.

    Args:
        folder: the run's own.
        id: at this tracker, of the run that is resumed; None: it is new there.
        updates: that are done.
    """

    name: str
    folder: Path
    id: str | None
    updates: int

    def options(self, tracker: str) -> dict[str, Any]:
        """What accelerate hands to the tracker as it starts."""
        with_id: dict[str, Any] = {
            "wandb": {"resume": "allow", "id": self.id},
            "swanlab": {"resume": "allow", "id": self.id},
            "comet_ml": {"mode": "get", "experiment_key": self.id},
            "clearml": {"continue_last_task": 0, "reuse_last_task_id": self.id},
            "aim": {"run_hash": self.id},
            "mlflow": {"run_id": self.id},
        }
        always: dict[str, Any] = {
            "wandb": {"name": self.name, "dir": str(self.folder)},
            "swanlab": {"name": self.name, "log_dir": str(self.folder / "swanlog")},
            "clearml": {"task_name": self.name, "reuse_last_task_id": False},
            "aim": {"experiment": self.name},
            "mlflow": {"run_name": self.name},
            "dvclive": {"dir": str(self.folder / "dvclive"), "resume": self.updates > 0},
            "trackio": {"name": self.name, "resume": "allow" if self.updates else "never", "embed": False},
            "tensorboard": {"purge_step": self.updates + 1} if self.updates else {},
        }
        return always.get(tracker, {}) | (with_id.get(tracker, {}) if self.id else {})


IDS: dict[str, Callable[[Any], str]] = {  # the id of a tracker's own run
    "wandb": lambda run: run.id,
    "swanlab": lambda run: run.id,
    "comet_ml": lambda run: run.get_key(),
    "clearml": lambda run: run.id,
    "aim": lambda run: run.hash,
    "mlflow": lambda run: run.info.run_id,
}
IN_THE_FOLDER = {"wandb": "wandb/", "swanlab": "swanlog/", "aim": ".aim/", "dvclive": "dvclive/"}
# Trackers that keep a run on the disk without a login: variable of the mode, variable and file of the login, command.
OFFLINE = {
    "wandb": ("WANDB_MODE", "WANDB_API_KEY", "~/.netrc", "wandb sync"),
    "swanlab": ("SWANLAB_MODE", "SWANLAB_API_KEY", "~/.swanlab/.netrc", "swanlab sync"),
}


def wanted_trackers(recipe: TrackingOptions) -> list[str]:
    """The trackers that the run will use. Raises UserError if a named one is not installed."""
    if not recipe.with_tracking or recipe.report_to == "none":
        return []
    if recipe.report_to == "all":
        return [name for name in TRACKERS if is_installed(name)]
    if not is_installed(recipe.report_to):
        raise UserError(f"report_to = {recipe.report_to!r}: it is not installed. `pip install {recipe.report_to}`")
    return [recipe.report_to]


def is_installed(tracker: str) -> bool:
    """Whether there is a package of this name; a folder that the tracker has written is none."""
    found = importlib.util.find_spec(tracker)
    return found is not None and found.origin is not None


def start_trackers(
    accelerator, trackers: Sequence[str], recipe: TrackingOptions, folder: RunFolder, task: str, state
) -> list[str]:
    """Open the trackers, and continue the runs there. Returns sentences for the log: which one goes offline, as
    there is no login.

    Args:
        state: of the run; its `tracker_ids` are filled in.

    Raises:
        UserError: a tracker does not start.
    """
    if not trackers:
        return []
    project, name = recipe.report_name or f"zerofit-{task}", recipe.run_name or folder.path.name
    if accelerator.is_main_process:
        folder.written.add([f"{project}/", *(IN_THE_FOLDER[each] for each in trackers if each in IN_THE_FOLDER)])
    notes = [note for tracker in trackers if (note := _offline_without_login(tracker, folder.path))]
    options = {
        each: TrackedRun(name, folder.path, state.tracker_ids.get(each), state.updates).options(each)
        for each in trackers
    }
    config = {name: _plain(value) for name, value in recipe.to_publish().items()}
    try:
        accelerator.init_trackers(project, config=config, init_kwargs=options)
    except Exception as error:  # each has its own: no login, no server, another version
        raise UserError(
            f"report_to = {recipe.report_to!r}: {', '.join(trackers)} did not start: {first_line(error)}. Log in to "
            "it, choose another one, or leave out --with_tracking"
        ) from error
    if accelerator.is_main_process:
        for tracker in IDS.keys() & {*trackers}:
            state.tracker_ids[tracker] = IDS[tracker](accelerator.get_tracker(tracker, unwrap=True))
    return notes


def publish_results(accelerator, folder: RunFolder, update: int) -> list[str]:
    """Hand loss.png and the head of predictions.jsonl to the trackers that take them. Returns a sentence for the log
    about each that failed: the run is complete without."""
    notes = []
    for tracker in accelerator.trackers:
        try:
            _publish_picture(tracker, folder.path / "loss.png", update)
            if (folder.path / "predictions.jsonl").is_file() and hasattr(tracker, "log_table"):
                rows = folder.predictions()[:HEAD_ROWS]
                columns = list(rows[0])
                data = [[str(row.get(column, "")) for column in columns] for row in rows]
                tracker.log_table("predictions", columns=columns, data=data, step=update)
        except Exception as error:
            notes.append(f"warning   {tracker.name} did not take loss.png or predictions.jsonl: {first_line(error)}")
    return notes


def _publish_picture(tracker, file: Path, update: int) -> None:
    """Accelerate has `log_images` for five of them, each with another form; others have a function of their own."""
    run = tracker.tracker
    if tracker.name == "mlflow":
        tracker.log_artifact(str(file))
    elif tracker.name == "comet_ml":
        run.log_image(str(file), name=file.name, step=update)
    elif tracker.name == "dvclive":
        run.log_image(file.name, str(file))
    elif tracker.name == "trackio":
        import trackio

        run.log({"loss.png": trackio.Image(str(file))}, step=update)
    else:
        from PIL import Image

        picture = Image.open(file).convert("RGB")
        if tracker.name == "tensorboard":
            tracker.log_images({"loss.png": np.asarray(picture)[None]}, step=update, dataformats="NHWC")
        else:
            is_listed = tracker.name in ("wandb", "swanlab")
            tracker.log_images({"loss.png": [picture] if is_listed else picture}, step=update)


def _offline_without_login(tracker: str, folder: Path) -> str | None:
    """Set the tracker's mode to offline if there is no login, and say so."""
    if tracker not in OFFLINE:
        return None
    mode, key, file, command = OFFLINE[tracker]
    if os.environ.get(mode) or os.environ.get(key) or _has_login(Path(file).expanduser(), tracker):
        return None
    os.environ[mode] = "offline"
    where = folder / IN_THE_FOLDER[tracker]
    return f"{tracker}: no login found, so the run is kept in {where}; `{command}` sends it later"


def _has_login(file: Path, tracker: str) -> bool:
    import netrc

    try:
        return any(tracker in host for host in netrc.netrc(file).hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def _plain(value: Any) -> Any:
    """Trackers take texts, numbers and truth values."""
    return value if isinstance(value, (str, int, float, bool)) else str(value)
