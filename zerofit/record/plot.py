"""The picture of a run, loss.png, which a person looks at first."""

from collections.abc import Iterable
from typing import IO, Any

FEW = 12  # updates that are shown as points, and not smoothed


def plot_run(
    metrics: list[dict[str, Any]],
    file: IO[bytes],
    unit: str,
    figure_of_merit: str,
    *,
    resumed: Iterable[int] = (),
) -> None:
    """Training loss (each update, and smoothed), held-out loss, and below them the learning rate and gradient norm.
    Updates that were skipped after an anomaly are marked, and those after which a run was resumed; their figures are
    in metrics.jsonl.

    Args:
        unit: what the loss is a mean over: token or example.
        figure_of_merit: the held-out figure of the best evaluation; it gets a panel of its own if it is not a loss.
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
    shown = [(line["update"], line[name]) for line in lines if name in line]
    if shown:
        axes.plot(*zip(*shown), linewidth=1, **style)


def _smooth(train: list[dict[str, Any]]) -> list[float]:
    """Mean over a window around each loss, a fortieth of the run wide; at the ends the window is what there is."""
    half, losses = max(2, len(train) // 80), [line["loss"] for line in train]
    windows = (losses[max(0, place - half) : place + half + 1] for place in range(len(losses)))
    return [sum(window) / len(window) for window in windows]
