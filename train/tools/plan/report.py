"""What `zerofit plan` prints: the ranked table, what does not fit and by how much, and what is not possible."""

from typing import Any

from train.record.terminal import rounded, size, table
from train.tools.plan.planner import Outcome, Planner, Prediction


def ranked(outcomes: list[Outcome]) -> list[Outcome]:
    """Those that fit: the least offloaded and least sharded first, then the largest micro-batch.

    Sharding more takes more communication, and offloading takes the host's Adam; there is no model of time yet.
    """
    fitting = [outcome for outcome in outcomes if outcome.largest]
    return sorted(fitting, key=lambda one: (*one.resolved.sharded_stages, -one.largest.micro_batch))


def for_terminal(outcomes: list[Outcome], planner: Planner, top: int, width: int | None) -> str:
    """The whole report. Sizes are predicted."""
    lines, fitting = [], ranked(outcomes)
    if fitting:
        head = ("strategy", "micro-batch", "accumulation", "peak", "reserved", "device", "phase", "host")
        rows = [_row(outcome.largest) for outcome in fitting[:top]]
        lines += ["predicted, of the process that needs most:", "", table([head, *rows], width), ""]
        names = list(dict.fromkeys(name for one in fitting[:top] for name in one.largest.peak.components))
        parts = [(one.strategy, *(_size(one.largest.peak.components.get(name, 0)) for name in names))
                 for one in fitting[:top]]  # fmt: skip
        lines += ["the parts of the peak:", "", table([("strategy", *names), *parts], width), ""]
    misfits = [one.smallest_misfit for one in outcomes if one.smallest_misfit]
    if misfits:
        lines += ["does not fit:", *(f"  {_misfit(one)}" for one in misfits), ""]
    refused = [one for one in outcomes if one.refused]
    if refused:
        lines += ["not possible:", *(f"  {one.strategy}: {one.refused}" for one in refused), ""]
    lines.append(f"A checkpoint takes {size(planner.checkpoint_bytes)} of disk.")
    return "\n".join(lines)


def to_json(outcomes: list[Outcome], planner: Planner) -> dict[str, Any]:
    """{predictions, largest, refused, checkpoint_bytes, parameters, trained_parameters}."""
    weights = planner.subject.weights
    return {
        "predictions": [one.to_dict() for outcome in outcomes for one in outcome.predictions],
        "largest": [
            {name: one.largest.to_dict()[name] for name in ("strategy", "layout", "per_device_train_batch_size")}
            for one in ranked(outcomes)
        ],
        "refused": {one.strategy: one.refused for one in outcomes if one.refused},
        "checkpoint_bytes": planner.checkpoint_bytes,
        "parameters": weights.trained + weights.frozen,
        "trained_parameters": weights.trained,
    }


def _row(one: Prediction) -> tuple[str, ...]:
    peak = one.peak
    return (one.strategy, str(one.micro_batch), str(one.accumulation), size(peak.allocated), size(peak.reserved),
            size(peak.device), peak.phase, _size(one.host_bytes))  # fmt: skip


def _size(count: int) -> str:
    return size(count) if count else "-"


def _misfit(one: Prediction) -> str:
    parts = sorted(one.peak.components.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} {size(count)}" for name, count in parts)
    return (
        f"{one.strategy}, micro-batch {one.micro_batch}: {size(one.peak.device)} in {one.peak.phase}, "
        f"{size(one.lacking)} too many ({listed})"
    )


def describe_model(planner: Planner) -> str:
    """One line: the model's shape and rows."""
    weights, rows = planner.subject.weights, planner.subject.rows
    total, config = weights.trained + weights.frozen, planner.subject.config
    trained = "" if not weights.frozen else f", {rounded(100 * weights.trained / total)} % trained"
    target = f" and {rows.target_length:,}" if rows.target_length else ""
    return f"{config.model_type}, {total:,} parameters{trained}, rows of {rows.length:,}{target} tokens"
