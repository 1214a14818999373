"""loss.png: the picture that a person looks at first."""

import math
from collections.abc import Sequence
from typing import IO, Any

from zerofit.record.fonts import font_for
from zerofit.record.terminal import shortened

NAME = 24  # characters of a class in a picture
FEW = 12  # updates that are shown as points, and not smoothed


def plot_run(metrics: list[dict[str, Any]], file: IO[bytes], title: str, unit: str, figure_of_merit: str) -> None:
    """Training loss (each update, and smoothed), held-out loss, and below them the learning rate and gradient norm.
    Updates that were skipped after an anomaly are marked; their figures are in metrics.jsonl.

    Args:
        unit: what the loss is a mean over: token or example.
        figure_of_merit: the held-out figure of the best evaluation; it gets a panel of its own if it is no loss.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    skipped = [line["update"] for line in metrics if "anomaly" in line or "skipped" in line]
    train = [line for line in metrics if "loss" in line and "anomaly" not in line]
    held = [line for line in metrics if "eval_loss" in line]
    figure = Figure(figsize=(8, 5.6 + 1.4 * (figure_of_merit != "loss")), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    evaluated = [line for line in metrics if f"eval_{figure_of_merit}" in line] if figure_of_merit != "loss" else []
    upper, *middle, lower = figure.subplots(
        2 + bool(evaluated), 1, sharex=True, height_ratios=[3, *[1.5] * bool(evaluated), 1]
    )
    updates, losses = ([line[name] for line in train] for name in ("update", "loss"))
    points = {"marker": "o", "markersize": 3} if len(train) <= FEW else {}
    upper.plot(updates, losses, color="#9ecae1", linewidth=1, label="training, each update", **points)
    if not points:
        upper.plot(updates, _smooth(losses), color="#08519c", linewidth=1.8, label="training, smoothed")
    if held:
        upper.plot(
            [line["update"] for line in held],
            [line["eval_loss"] for line in held],
            "o-",
            color="#d94801",
            markersize=4,
            linewidth=1,
            label="held out",
        )
    if evaluated:
        middle[0].plot(
            [line["update"] for line in evaluated],
            [line[f"eval_{figure_of_merit}"] for line in evaluated],
            "o-",
            color="#d94801",
            markersize=4,
            linewidth=1,
        )
        middle[0].set(ylabel=f"{figure_of_merit}\n(held out)")
        middle[0].grid(alpha=0.3)
    for number, update in enumerate(skipped):
        upper.axvline(
            update, color="#cb181d", linestyle=":", linewidth=1, label=None if number else "skipped (anomaly)"
        )
    upper.set(ylabel="squared error" if unit == "number" else f"loss, nats per {unit}")
    if font := font_for([title]):
        upper.set_title(title, family=font, parse_math=False)
    upper.grid(alpha=0.3)
    upper.legend(frameon=False)
    right = lower.twinx()
    norms = [line["grad_norm"] for line in train]
    rates = [line["learning_rate"] for line in train]
    for axes, values, name, colour in (
        (lower, rates, "learning rate", "#238b45"),
        (right, norms, "gradient norm", "#737373"),
    ):
        axes.plot(updates, values, color=colour, linewidth=1, alpha=0.8, **points)
        axes.set_ylabel(name, color=colour)  # in place of a legend, which would lie on the curves
        axes.tick_params(axis="y", colors=colour)
    lower.set(xlabel="update", ylim=(0, 1.08 * max([rate for rate in rates if rate > 0], default=1.0)))
    lower.grid(alpha=0.3)
    _label(right, 3, _decades(norms))
    for axes, most in ((upper, 8), *((axes, 4) for axes in (*middle, lower))):
        _label(axes, most)
    last = max((line["update"] for line in metrics), default=1)
    lower.set_xlim(-0.03 * last, 1.03 * last)
    lower.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(file)


def _label(axes, most: int, decades: float = 0.0) -> None:
    """Label the y axis with a few numbers, each written out; an axis of more than one decade is logarithmic."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

    if decades > 1:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2 else (1.0, 3.0), numticks=most + 1))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
    written_out = ScalarFormatter(useOffset=False)
    written_out.set_scientific(False)
    axes.yaxis.set_major_formatter(written_out)


def _decades(values: list[float]) -> float:
    """How many powers of ten lie between the smallest and the largest of the positive values."""
    positive = [value for value in values if 0 < value < math.inf]
    return math.log10(max(positive) / min(positive)) if positive else 0.0


def _smooth(values: list[float]) -> list[float]:
    """Mean over a window around each value, a fortieth of the run wide; at the ends the window is what there is."""
    half = max(2, len(values) // 80)
    windows = (values[max(0, place - half) : place + half + 1] for place in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def plot_confusion(matrix, names: Sequence[str], file: IO[bytes]) -> None:
    """Which class was predicted as which: the number of examples in each cell, its colour the share of the row.

    Args:
        matrix: (classes, classes), a row for each class, a column for each prediction.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(names)
    font = font_for(names)
    shown = [shortened(name, NAME) for name in names] if font else [str(number) for number in range(count)]
    side = 2.5 + 0.45 * count
    figure = Figure(figsize=(side, side), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shares = matrix / matrix.sum(axis=1, keepdims=True).clip(1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, column in zip(*matrix.nonzero()):
        axes.text(
            column,
            row,
            f"{matrix[row, column]:,}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if shares[row, column] > 0.5 else "black",
        )
    style = {"parse_math": False, **({"family": font} if font else {})}
    axes.set_xticks(range(count), shown, rotation=90, **style)
    axes.set_yticks(range(count), shown, **style)
    numbered = "" if font else ", by its number in model/config.json"
    axes.set(xlabel=f"predicted{numbered}", ylabel=f"label{numbered}")
    figure.savefig(file)
