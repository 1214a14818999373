"""The recorder of a run: it writes each update to metrics.jsonl, the terminal and the trackers; and its meters."""

import contextlib
import os
import resource
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.tracking import get_available_trackers
from requests.utils import get_netrc_auth

from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.options import TrackingOptions
from zerofit.record.metrics import EvaluationTime, UpdateMetrics
from zerofit.record.terminal import Bar, rounded
from zerofit.strategy.devices import device_name
from zerofit.strategy.gpu_table import NO_PEAK, peak_flops_of
from zerofit.strategy.host_memory import proc_field as field_of
from zerofit.strategy.host_memory import read_or_empty

if TYPE_CHECKING:
    from zerofit.health.anomaly import Anomaly
    from zerofit.training.run import Run


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the device's peak FLOP/s at this precision, from the table of GPUs; None if it is unknown (a CPU, fp32, a
    GPU that is not listed)."""
    name = device_name(device)
    if not name or precision == "fp32":
        return None
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    return peak_flops_of(name, getattr(ask(device), "multi_processor_count", None) if ask else None)


def without_mfu(device: torch.device, precision: str) -> str | None:
    """Return a note that no MFU is reported for this GPU, with the reason; None if it is, or on a CPU or in fp32."""
    name = device_name(device)
    if not name or precision == "fp32" or peak_flops(device, precision):
        return None
    return f"MFU is not reported, since {NO_PEAK.format(name)}"


class MemoryMeter:
    """The peak memory of this process since the last reset: of the device's allocator, or resident memory on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device

    def reset(self) -> None:
        if self.device.type == "cpu":
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the high-water mark to the resident memory
        else:
            torch.accelerator.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        if self.device.type != "cpu":
            return torch.accelerator.max_memory_allocated()
        if peak := field_of(read_or_empty("/proc/self/status"), "VmHWM:", 1024):
            return peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass
class ThroughputMeter:
    """The samples/s, tokens/s (without padding) and FLOP/s of the updates, over all ranks."""

    flops_per_token: float  # of the model at this run's sequence length
    peak: float | None  # peak FLOP/s of all devices together; None if unknown
    rates: list[float] = field(default_factory=list)
    evaluations: list[EvaluationTime] = field(default_factory=list)

    def rates_of(self, tokens: int, samples: int, seconds: float) -> dict[str, float | None]:
        """Return the rates of an update as fields of UpdateMetrics. `tokens`: without padding; all counts are over all
        ranks."""
        rate = tokens / seconds
        self.rates.append(rate)
        flops_per_s = rate * self.flops_per_token
        mfu = flops_per_s / self.peak if self.peak else None
        return {"samples_per_s": samples / seconds, "tokens_per_s": rate, "flops_per_s": flops_per_s, "mfu": mfu}

    def typical(self) -> float:
        """Return the median tokens/s, without the first updates (caches, compilation) if there are enough others."""
        steady = self.rates[3:] if len(self.rates) >= 10 else self.rates
        return statistics.median(steady) if steady else 0.0


# {tracker: (function that reads the id of a run, function from an id to the options that continue the run)}
RESUMED: dict[str, tuple[Callable[[Any], str], Callable[[str], dict[str, Any]]]] = {
    "wandb": (lambda run: run.id, lambda id: {"resume": "allow", "id": id}),
    "swanlab": (lambda run: run.id, lambda id: {"resume": "allow", "id": id}),
    "comet_ml": (lambda run: run.get_key(), lambda id: {"mode": "get", "experiment_key": id}),
    "clearml": (lambda run: run.id, lambda id: {"continue_last_task": 0, "reuse_last_task_id": id}),
    "aim": (lambda run: run.hash, lambda id: {"run_hash": id}),
    "mlflow": (lambda run: run.info.run_id, lambda id: {"run_id": id}),
}
WANDB = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
ANOMALY_PREVIEW_CHARACTERS = 160  # of a sample of an anomaly
IN_THE_FOLDER = {"wandb": "wandb/", "swanlab": "swanlog/", "aim": ".aim/", "dvclive": "dvclive/"}


def wanted_trackers(recipe: TrackingOptions) -> list[str]:
    """Return the names of the trackers that the run uses. Raises UserError: a named one is not installed."""
    if not recipe.with_tracking or recipe.report_to == "none":
        return []
    installed = [str(tracker.value) for tracker in get_available_trackers()]
    if recipe.report_to == "all":
        return installed
    if recipe.report_to not in installed:
        raise UserError(f"report_to = {recipe.report_to!r}: it is not installed. `pip install {recipe.report_to}`")
    return [recipe.report_to]


def start_trackers(run: "Run") -> list[str]:
    """Open the trackers, and continue the runs there. Returns notes. Raises UserError: one does not start."""
    recipe = run.recipe
    folder = run.folder
    state = run.state
    trackers = run.config.trackers
    accelerator = run.engine.accelerator
    project = recipe.report_name or f"zerofit-{run.task}"
    name = folder.path.name
    notes = []
    if trackers and accelerator.is_main_process:
        folder.written.add(
            [f"{project}/", *(IN_THE_FOLDER[tracker] for tracker in trackers if tracker in IN_THE_FOLDER)]
        )
    login = os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY") or get_netrc_auth(WANDB)
    if "wandb" in trackers and not login:
        os.environ["WANDB_MODE"] = "offline"
        notes.append(f"wandb: no login found, so the run is kept in {folder.path}/wandb; `wandb sync` sends it later")
    is_resumed = state.updates > 0
    path = folder.path
    options: dict[str, dict[str, Any]] = {
        "wandb": {"name": name, "dir": str(path)},
        "swanlab": {"name": name, "log_dir": str(path / "swanlog")},
        "clearml": {"task_name": name, "reuse_last_task_id": False},
        "aim": {"experiment": name},
        "mlflow": {"run_name": name},
        "dvclive": {"dir": str(path / "dvclive"), "resume": is_resumed},
        "trackio": {"name": name, "resume": "allow" if is_resumed else "never", "embed": False},
        "tensorboard": {"purge_step": state.updates + 1} if is_resumed else {},
    }
    for tracker in RESUMED.keys() & state.tracker_ids:
        options[tracker] = options.get(tracker, {}) | RESUMED[tracker][1](state.tracker_ids[tracker])
    config = {
        option: value if isinstance(value, (str, int, float, bool)) else str(value)
        for option, value in recipe.to_publish().items()
    }
    try:
        accelerator.init_trackers(
            project, config=config, init_kwargs={tracker: options.get(tracker, {}) for tracker in trackers}
        )
    except Exception as error:  # each tracker raises its own errors: no login, no server, another version
        raise UserError(
            f"report_to = {recipe.report_to!r}: {', '.join(trackers)} did not start: {first_line(error)}. Log in to "
            "it, choose another one, or leave out --with_tracking"
        ) from error
    for tracker in RESUMED.keys() & {*trackers} if accelerator.is_main_process else ():
        state.tracker_ids[tracker] = RESUMED[tracker][0](accelerator.get_tracker(tracker, unwrap=True))
    return notes


class RunRecorder:
    """The recorder of one run. All ranks call its methods together; only the main process writes."""

    def __init__(self, run: "Run", bar: Bar) -> None:
        self.folder = run.folder
        self.environment = run.environment
        self._engine = run.engine
        self._timeline = run.timeline
        self.bar = bar
        self._data = run.data
        self._is_first = True

    def write(self, metrics: UpdateMetrics) -> None:
        """Write a line to metrics.jsonl and the trackers."""
        accelerator = self._engine.accelerator
        line = metrics.to_line()
        if accelerator.trackers:
            ranks = {f"rank_seconds/{name}": value for name, value in line.get("rank_seconds", {}).items()}
            figures = {name: value for name, value in line.items() if name not in ("update", "rank_seconds")}
            figures |= {"anomaly": 1} if "anomaly" in line else {}  # the reason is a text: not every tracker takes one
            accelerator.log(figures | ranks, step=line["update"])
        if self._engine.is_main:
            self.folder.metrics.add(line)

    def write_samples(self, update: int, samples: list[int]) -> None:
        """Write the samples of this update to samples.jsonl. Ranks of one replica have the same samples."""
        ranks = self._engine.gather_objects(samples)
        if ranks is not None:
            replicas = [ranks[rank] for rank in self._engine.layout.loss_ranks]
            self.folder.samples.add(
                {"update": update, "samples": sorted(index for indices in replicas for index in indices)}
            )

    def write_anomaly(self, anomaly: "Anomaly", action: str) -> None:
        """Write a refused update to anomalies.jsonl, with the action taken, and the start of its samples' texts."""
        layout = self._engine.layout
        samples = self._data.train
        tokenizer = self._data.tokenizer
        losses = zip(anomaly.batches, anomaly.losses)
        micro_batches = [{"rank": layout.rank, "loss": loss, "samples": batch.samples} for batch, loss in losses]
        ranks = self._engine.gather_objects(micro_batches)
        if ranks is not None:
            parts = [part for rank in layout.loss_ranks for part in ranks[rank]]
            indices = dict.fromkeys(index for part in parts for index in part["samples"])
            previews = {
                index: tokenizer.decode(samples[index]["input_ids"])[:ANOMALY_PREVIEW_CHARACTERS] for index in indices
            }
            line = {"update": anomaly.update, "reason": anomaly.reason, "action": action, **anomaly.figures}
            self.folder.anomalies.add({**line, "micro_batches": parts, "heads": previews})

    def show(self, metrics: UpdateMetrics) -> None:
        """Show an update at the terminal. After the first one, write the time of the start to environment.json."""
        self.bar.update(metrics)
        if self._is_first:
            self._is_first = False
            self._timeline.mark("first update")
            if self._engine.is_main:
                self.environment["seconds_to_first_update"] = self._timeline.seconds
                self.environment["bytes_held_by_rank_0"] = self._engine.held_bytes()
                with contextlib.suppress(OSError):  # a full disk: it is written again at the end
                    self.folder.write_environment(self.environment)

    def show_held_out(self, update: int, figures: dict[str, float]) -> None:
        rounded_figures = (f"{name.removeprefix('eval_')} {rounded(value, 4)}" for name, value in figures.items())
        self.bar.log_lines(f"update {update}: held-out " + ", ".join(rounded_figures))
