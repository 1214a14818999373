"""The two pictures of a comparison, as SVG: memory against batch size with the limit drawn, and throughput."""

import io

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from zerofit.tools.compare.results import StrategyRow
from zerofit.tools.compare.search import BATCHES, SearchVariable
from zerofit.tools.compare.trial_files import peak_of

# Distinct also for colour-blind people: Okabe and Ito, jfly.uni-koeln.de/color
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255")
MARKERS = "os^Dv<>ph"


def memory_plot(rows: list[StrategyRow], limit: int | None, variable: SearchVariable = BATCHES) -> str:
    """Peak memory of the rank that needs most against the size, and a cross where memory ran out."""
    shown = [peak_of(line) for row in rows for line in row.fitting] + ([limit] if limit else [])
    unit, name = (2**30, "GiB") if max(shown, default=0) >= 2 * 2**30 else (2**20, "MiB")
    figure, axes = _figure(variable.size, f"peak memory of a process, {name}")
    for index, row in enumerate(rows):
        style = _style(index, row.name)
        lines, fails = row.in_fresh_processes, row.fails
        if lines:
            axes.plot([line["size"] for line in lines], [peak_of(line) / unit for line in lines], **style)
        if fails:
            top = (limit or max(shown, default=unit)) / unit
            axes.plot(
                [fails["size"]],
                [top],
                "x",
                color=style["color"],
                markersize=9,
                markeredgewidth=2,
                label=None if lines else f"{row.name}: none",
            )
    if limit:
        axes.axhline(limit / unit, color="#555555", linestyle="--", linewidth=1, label="limit (x: does not fit)")
    axes.set_ylim(0, 1.08 * max(shown, default=unit) / unit)  # from 0, so that heights are in proportion
    return _svg(figure, axes)


def throughput_plot(rows: list[StrategyRow], variable: SearchVariable = BATCHES) -> str:
    """Samples a second, over all processes, against the batch size of one; or tokens a second against the length."""
    figure, axes = _figure(variable.size, variable.rate.replace("_per_", "/"))
    for index, row in enumerate(rows):
        lines, style = row.timed, _style(index, row.name)
        if lines:
            axes.plot([line["size"] for line in lines], [line[variable.rate] for line in lines], **style)
            best = max(lines, key=lambda line: line[variable.rate])
            axes.plot(
                [best["size"]], [best[variable.rate]], "o", color=style["color"], markersize=11, fillstyle="none"
            )
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    return _svg(figure, axes)


def _style(index: int, label: str) -> dict:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5,
        "linewidth": 1.5,
        "label": label,
    }


def _figure(x: str, y: str):
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure, axes


def _svg(figure, axes) -> str:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small")
    axes.set_xlim(left=0)
    text = io.StringIO()
    with rc_context({"svg.hashsalt": "zerofit"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
