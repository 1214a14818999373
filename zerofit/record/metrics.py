"""The files of JSON lines of a run (metrics.jsonl and others), written and read, and its plot, loss.png."""

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, NamedTuple

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import atomic_file, open_without_links, parse_object

Parse = Callable[[bytes], dict[str, Any] | None]


class JsonlFile:
    """A .jsonl file with one line for each update. Each line is written to the system before the next one.

    Lines wait in memory while the disk is full. `parse`: the bytes of a line -> its object; None: the line is damaged,
    and ignored.
    """

    def __init__(self, path: Path, parse: Parse | None = None):
        self.path = path
        self._parse = parse or line_of_update
        self._file: io.FileIO | None = None
        self._waiting = b""

    def start(self, updates: int = 0) -> None:
        """Rewrite the file with the lines up to this update."""
        lines = [line for line in self.read() if line["update"] <= updates] if updates else []
        self.close()
        self._waiting = b""
        with atomic_file(self.path) as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    def add(self, line: dict[str, Any]) -> None:
        """Append a line. NaN and infinity are written as such: they are never hidden."""
        self._waiting += (json.dumps(line, ensure_ascii=False) + "\n").encode()
        try:
            self._write()
        except OSError:  # a full disk is not a reason to end a run, nor to lose the line
            return

    def _write(self) -> None:
        if self._file is None:
            opened = open_without_links(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._file = os.fdopen(opened, "ab", buffering=0)
            self._file.truncate(self.path.read_bytes().rfind(b"\n") + 1)  # a last line that a kill has cut
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def sync(self) -> None:
        """Flush the lines so far to the disk, as far as it takes them."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a quota of a network file system, for instance
                os.fsync(self._file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Return the complete lines so far. A kill may have left a part of a line after the last line break."""
        content = self.path.read_bytes() if self.path.is_file() else b""
        return [line for text in content.split(b"\n")[:-1] if (line := self._parse(text)) is not None]

    def close(self) -> None:
        """Write the waiting lines, and close the file. Raises OSError: some could not be written."""
        try:
            if self._waiting:
                self._write()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None


def add_line(file: Path, line: dict[str, Any]) -> None:
    """Append a line with a single write: several ranks may append at the same time."""
    with open(open_without_links(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0) as opened:
        opened.write((json.dumps(line, ensure_ascii=False) + "\n").encode())


class LineReader:
    """A reader of a file to which other processes append lines. It returns each complete line once."""

    def __init__(self, file: Path, parse: Parse = json.loads):
        self.file = file
        self._parse = parse
        self.position = 0  # bytes that were read

    def poll(self) -> list[dict[str, Any]]:
        """Return the lines that were added since the last call."""
        try:
            with self.file.open("rb") as lines:
                lines.seek(self.position)
                whole_lines, line_break, _ = lines.read().rpartition(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            return []
        self.position += len(whole_lines) + len(line_break)
        return [line for text in whole_lines.split(b"\n") if text and (line := self._parse(text)) is not None]

    def drop_rest(self) -> None:
        """Cut the file after the lines that were read: a killed writer has left the rest."""
        if self.file.is_file():
            with open(open_without_links(self.file, os.O_RDWR), "r+b") as opened:
                opened.truncate(self.position)


def line_of_update(text: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None if it is not an object with an `update`."""
    line = parse_object(text)
    return line if line is not None and type(line.get("update")) is int else None


def described(text: str) -> Any:
    """Return an optional field of UpdateMetrics with its meaning, for the documentation."""
    return field(default=None, metadata={"meaning": text})


def required(text: str) -> Any:
    """Return a field of UpdateMetrics that every line has, with its meaning."""
    return field(metadata={"meaning": text})


class EvaluationTime(NamedTuple):
    """The seconds of an evaluation on the slowest rank, and its samples per second over all ranks."""

    seconds: float
    samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class UpdateMetrics:
    """The line of metrics.jsonl for one update, over all ranks; update 0 is the evaluation before training. A field
    that is None is not in the line."""

    update: int = required("number of the update; 0: held-out figures before training")
    epoch: float = required("passes over the training data so far")
    consumed_samples: int = required("samples so far")
    loss: float | None = described(
        "the loss that is trained: mean over the trained tokens (examples, pairs) of the global batch, in nats"
    )
    grad_norm: float | None = described("2-norm of all gradients, before clipping")
    learning_rate: float | None = described("of this update")
    targets: float | None = described(
        "trained tokens (examples, pairs) of the global batch; with `class_weights` the sum of their weights"
    )
    tokens: int | None = described("its tokens without padding")
    padding: float | None = described("share of its positions that is padding")
    aux_loss: float | None = described("mixture of experts: the routers' auxiliary loss")
    expert_load_max: float | None = described("mixture of experts: the largest load of an expert; 1 is even")
    expert_load_min: float | None = described("mixture of experts: the smallest load of an expert; 1 is even")
    preference_accuracy: float | None = described(
        "pairs of answers: share in which the chosen one has the larger reward; ties are one half"
    )
    reward_margin: float | None = described(
        "pairs of answers: mean reward of the chosen ones, less that of the rejected"
    )
    reward_chosen: float | None = described("pairs of answers: mean reward of the chosen ones")
    reward_rejected: float | None = described("pairs of answers: mean reward of the rejected ones")
    seconds: float | None = described("time of the update, of rank 0")
    samples_per_s: float | None = described("samples a second, all ranks together")
    tokens_per_s: float | None = described("tokens a second without padding, all ranks together")
    flops_per_s: float | None = described("model FLOP/s, all ranks together")
    mfu: float | None = described("share of the devices' peak FLOP/s, where a table of GPUs has it")
    peak_memory_bytes: int | None = described(
        "the largest of all ranks: of the device's allocator, or resident memory on a CPU"
    )
    rank_seconds: Mapping[str, float] | None = described(
        "every 10 updates, or `--logging_steps`, of several processes: mean seconds an update of the slowest rank and "
        "of others, in parts ([trouble.md](trouble.md#a-slow-rank))"
    )
    anomaly: str | None = described("why the update was not applied to the weights")
    skipped: bool | None = described("true: not computed, after a rewind from an anomaly in it")
    held_out: Mapping[str, float] | None = described("figures of the evaluation after it, as `eval_<figure>`")
    own: Mapping[str, float] | None = described("figures that a script gives to `run.log` on rank 0, by their names")
    evaluation_seconds: float | None = described("time of that evaluation, of the slowest rank")
    evaluation_samples_per_s: float | None = described("held-out samples a second, all ranks together")

    def __post_init__(self) -> None:
        if self.own and (taken_names := sorted({metric.name for metric in fields(self)} & self.own.keys())):
            raise UserError(
                f"run.log: each line of metrics.jsonl has {', '.join(taken_names)}: name your figure otherwise"
            )

    @classmethod
    def of_evaluation(cls, figures: Mapping[str, float], time: EvaluationTime) -> "UpdateMetrics":
        """Return the line of an evaluation before training, or of a launch without training."""
        return cls(
            update=0,
            epoch=0.0,
            consumed_samples=0,
            held_out=figures,
            evaluation_seconds=time.seconds,
            evaluation_samples_per_s=time.samples_per_s,
        )

    def to_line(self) -> dict[str, Any]:
        """Return the JSON object of the line."""
        line = {metric.name: getattr(self, metric.name) for metric in fields(self)}
        line |= (line.pop("held_out") or {}) | (line.pop("own") or {})
        return {name: value for name, value in line.items() if value is not None}


METRIC_TYPES = {"anomaly": str, "skipped": bool, "rank_seconds": dict}  # the fields that are not numbers


def line_of_metrics(text: bytes) -> dict[str, Any] | None:
    """Return a line of metrics.jsonl without values of a wrong type; None if it has no `update`."""
    line = line_of_update(text)
    return line and {
        name: value
        for name, value in line.items()
        if (isinstance(value, METRIC_TYPES[name]) if name in METRIC_TYPES else type(value) in (int, float))
    }


FEW = 12  # a plot of fewer updates shows points, without smoothing


def plot_run(
    metrics: list[dict[str, Any]],
    file: IO[bytes],
    unit: str,
    figure_of_merit: str,
    *,
    resumed: Iterable[int] = (),
) -> None:
    """Plot the training loss (each update, and smoothed), the held-out loss, the learning rate and the gradient norm.
    Updates that were skipped after an anomaly are marked, and those after which a run was resumed; their figures are
    in metrics.jsonl.

    Args:
        unit: name of one target (token or example), for the label of the loss axis.
        figure_of_merit: the held-out figure that decides the best evaluation; it gets a panel if it is not a loss.
        resumed: updates after which a launch resumed the run.
    """
    from matplotlib.figure import Figure

    train = [line for line in metrics if "loss" in line and "anomaly" not in line]
    merit = f"eval_{figure_of_merit}" if figure_of_merit != "loss" else ""
    has_panel = any(merit in line for line in metrics)
    figure = Figure(figsize=(8, 5.6 + 1.4 * has_panel), dpi=110, layout="constrained")
    upper, *middle, lower = figure.subplots(2 + has_panel, 1, sharex=True, height_ratios=[3, *[1.5] * has_panel, 1])
    points = {"marker": "o", "markersize": 3} if len(train) <= FEW else {}
    _draw(upper, train, "loss", color="#9ecae1", label="training, each update", **points)
    if not points:
        smoothed = [{"update": line["update"], "loss": mean} for line, mean in zip(train, _smooth(train))]
        _draw(upper, smoothed, "loss", color="#08519c", label="training, smoothed")
    held_out: dict[str, Any] = {"color": "#d94801", "marker": "o", "markersize": 4}
    _draw(upper, metrics, "eval_loss", label="held out", **held_out)
    for line in metrics:
        if "anomaly" in line or "skipped" in line:
            upper.axvline(line["update"], color="#cb181d", linestyle=":", linewidth=1)
    upper.set(ylabel="squared error" if unit == "number" else f"loss, nats per {unit}")
    for axes in middle:
        _draw(axes, metrics, merit, **held_out)
        axes.set(ylabel=f"{figure_of_merit}\n(held out)")
    for number, update in enumerate(resumed):
        for axes in (upper, *middle, lower):
            label = {"label": "resumed"} if axes is upper and not number else {}
            axes.axvline(update, color="#6a51a3", linestyle="--", linewidth=1, **label)
    upper.legend(frameon=False)
    right = lower.twinx()
    for axes, name, colour in ((lower, "learning_rate", "#238b45"), (right, "grad_norm", "#737373")):
        _draw(axes, train, name, color=colour, alpha=0.8, **points)
        axes.set_ylabel(name.replace("_", " "), color=colour)  # in place of a legend, which would lie on the curves
        axes.tick_params(axis="y", colors=colour)
    norms = [norm for line in train if 0 < (norm := line.get("grad_norm", 0.0)) < float("inf")]
    if norms and max(norms) > 100 * min(norms):
        right.set_yscale("log")
    lower.set(xlabel="update")
    lower.xaxis.get_major_locator().set_params(integer=True)
    for axes in (upper, *middle, lower):
        axes.grid(alpha=0.3)
    figure.savefig(file)


def _draw(axes: Any, lines: list[dict[str, Any]], name: str, **style: Any) -> None:
    points = [(line["update"], line[name]) for line in lines if name in line]
    if points:
        axes.plot(*zip(*points), linewidth=1, **style)


def _smooth(train: list[dict[str, Any]]) -> list[float]:
    """Return the mean over a window around each loss, a fortieth of the run wide; at both ends it is cut."""
    half = max(2, len(train) // 80)
    losses = [line["loss"] for line in train]
    windows = (losses[max(0, place - half) : place + half + 1] for place in range(len(losses)))
    return [sum(window) / len(window) for window in windows]
