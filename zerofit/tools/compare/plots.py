"""The two pictures of a comparison: memory against batch size with the limit drawn, and throughput."""

import io
import math
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zerofit.record.terminal import shortened
from zerofit.tools.compare.results import StrategyRow
from zerofit.tools.compare.trial import peak_bytes

# Distinct also for colour-blind people: Okabe and Ito, jfly.uni-koeln.de/color
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255")
MARKERS = "os^Dv<>ph"


def memory_plot(rows: list[StrategyRow], limit: int | None) -> Figure:
    """Peak memory of the rank that needs most against the size: a line as predicted, points as measured, and a cross
    where memory ran out."""
    shown = [peak_bytes(line) for row in rows for line in row.fitting] + ([limit] if limit else [])
    top = max(shown, default=2**20)
    unit, name = (2**30, "GiB") if top >= 2 * 2**30 else (2**20, "MiB")
    figure, axes = _figure("batch size", f"peak memory of a process, {name}")
    predicted = [row for row in rows if row.predicted]
    for index, row in enumerate(rows):
        style, lines, fails = _style(index), row.fitting, row.smallest_misfit
        if row in predicted:
            line = [(size, peak / unit) for size, peak in sorted(row.predicted.items())]
            axes.plot(*zip(*line), color=style["color"], linewidth=1.2)
        sizes, peaks = [line["size"] for line in lines], [peak_bytes(line) / unit for line in lines]
        axes.plot(
            sizes, peaks, linestyle="none", label=shortened(row.name if lines else f"{row.name}: none", 40), **style
        )
        if fails:
            axes.plot(
                [fails["size"]], [(limit or top) / unit], "x", color=style["color"], markersize=9, markeredgewidth=2
            )
    if limit:
        axes.axhline(limit / unit, color="#555555", linestyle="--", linewidth=1, label="limit (x: does not fit)")
    if predicted:
        axes.plot([], [], color="#555555", linewidth=1.2, label="predicted (points: measured)")
    tried = [line["size"] for row in rows for line in row.trials]
    axes.set_xlim(0, 1.05 * max(tried, default=1))  # predictions may go further
    axes.set_ylim(0, 1.08 * top / unit)  # from 0, so that heights are in proportion
    return _with_legend(figure, axes)


def throughput_plot(rows: list[StrategyRow]) -> Figure:
    """Samples a second, over all processes, against the batch size of one."""
    figure, axes = _figure("batch size", "samples/s")
    for index, row in enumerate(rows):
        lines, best, style = row.timed, row.best, _style(index)
        if best:
            sizes, rates = [line["size"] for line in lines], [line["samples_per_s"] for line in lines]
            axes.plot(sizes, rates, linewidth=1.2, label=shortened(row.name, 40), **style)
            size, rate = best["size"], best["samples_per_s"]
            axes.plot([size], [rate], "o", color=style["color"], markersize=11, fillstyle="none")
    axes.set_xlim(0, 1.03 * axes.get_xlim()[1])
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    return _with_legend(figure, axes)


def svg(figure: Figure) -> bytes:
    """A picture as SVG, the same each time."""
    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "zerofit"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 6}


def _figure(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")  # its text can be read at the width of a phone
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.locator_params("x", integer=True)
    return figure, axes


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    """The legend is below the axes: on them it would lie on points."""
    if labels := axes.get_legend_handles_labels()[1]:
        columns = 2 if max(map(len, labels)) > 20 else 3
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
        figure.set_figheight(3.4 + 0.2 * math.ceil(len(labels) / columns))
    return figure
