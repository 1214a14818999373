"""loss.png: the picture that a person looks at first."""

from pathlib import Path
from typing import Any


def plot_run(metrics: list[dict[str, Any]], file: Path, title: str, unit: str, figure_of_merit: str) -> None:
    """Training loss (each update, and smoothed), held-out loss, and below them the learning rate and gradient norm.
    Updates that were left out after a fault are marked; their figures are in metrics.jsonl.

    Args:
        unit: what the loss is a mean over: token or example.
        figure_of_merit: the held-out figure that the task is judged by; it gets a panel of its own if it is no loss.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [line for line in metrics if "loss" in line and "fault" not in line]
    faults = [line["update"] for line in metrics if "fault" in line]
    held = [line for line in metrics if "eval_loss" in line]
    figure = Figure(figsize=(8, 5.6 + 1.4 * (figure_of_merit != "loss")), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    judged = [line for line in metrics if f"eval_{figure_of_merit}" in line] if figure_of_merit != "loss" else []
    upper, *middle, lower = figure.subplots(
        2 + bool(judged), 1, sharex=True, height_ratios=[3, *[1.5] * bool(judged), 1]
    )
    updates = [line["update"] for line in train]
    upper.plot(updates, [line["loss"] for line in train], color="#9ecae1", linewidth=1, label="training, each update")
    upper.plot(
        updates, _smooth([line["loss"] for line in train]), color="#08519c", linewidth=1.8, label="training, smoothed"
    )
    if held:
        upper.plot([line["update"] for line in held], [line["eval_loss"] for line in held],
                   "o-", color="#d94801", markersize=4, linewidth=1, label="held out")  # fmt: skip
    if judged:
        middle[0].plot([line["update"] for line in judged], [line[f"eval_{figure_of_merit}"] for line in judged],
                       "o-", color="#d94801", markersize=4, linewidth=1)  # fmt: skip
        middle[0].set(ylabel=f"{figure_of_merit}\n(held out)")
        middle[0].grid(alpha=0.3)
    for number, update in enumerate(faults):
        upper.axvline(
            update, color="#cb181d", linestyle=":", linewidth=1, label=None if number else "left out (fault)"
        )
    upper.set(ylabel="squared error" if unit == "number" else f"loss, nats per {unit}", title=title)
    upper.grid(alpha=0.3)
    upper.legend(frameon=False)
    rate = lower.plot(updates, [line["learning_rate"] for line in train], color="#238b45", label="learning rate")
    lower.set(xlabel="update", ylabel="learning rate")
    right = lower.twinx()
    norm = right.plot(
        updates, [line["grad_norm"] for line in train], color="#969696", linewidth=0.8, label="gradient norm"
    )
    right.set_ylabel("gradient norm")
    right.set_yscale("log")
    lower.legend(handles=[*rate, *norm], frameon=False, fontsize="small")
    lower.grid(alpha=0.3)
    figure.savefig(file)


def _smooth(values: list[float]) -> list[float]:
    """Mean over a window around each value, a fortieth of the run wide; at the ends the window is what there is."""
    half = max(2, len(values) // 80)
    windows = (values[max(0, place - half) : place + half + 1] for place in range(len(values)))
    return [sum(window) / len(window) for window in windows]
