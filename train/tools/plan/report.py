"""What `zerofit plan` prints: the ranked table, what does not fit and by how much, and what is not possible."""

from typing import Any

from train.model.configuration import usable_positions
from train.record.terminal import rounded, size, table
from train.tools.plan.planner import Planner
from train.tools.plan.prediction import Outcome, Prediction

DAY_S = 86400
_COLUMNS = ("strategy", "degrees", "micro-batch", "accumulation", "recomputed", "peak", "device", "phase", "host")
_TIMES = ("s an update", "tokens/s", "MFU", "bound")
_SPANS = ("days", "GPU-hours")


def ranked(outcomes: list[Outcome]) -> list[Outcome]:
    """Those that fit, the fastest first. Where speed is not known: the least offloaded and least sharded first, since
    both take time, then the largest micro-batch."""
    fitting = [outcome for outcome in outcomes if outcome.best]
    if all(outcome.best.speed for outcome in fitting):
        return sorted(fitting, key=lambda one: one.best.rank)
    return sorted(fitting, key=lambda one: (*one.resolved.sharded_stages, -one.best.micro_batch))


def shown(outcomes: list[Outcome], lengths: list[int] | None) -> list[Prediction]:
    """The prediction to show of each strategy that fits: the best one, or where lengths were searched the longest
    rows, the longest of all first."""
    if lengths is None:
        return [outcome.best for outcome in ranked(outcomes)]
    longest = [outcome.largest for outcome in outcomes if outcome.largest]
    return sorted(longest, key=lambda one: (-one.length, one.rank))


def for_terminal(
    outcomes: list[Outcome], planner: Planner, top: int, width: int | None, tokens: float | None,
    lengths: list[int] | None = None,
) -> str:  # fmt: skip
    """The whole report. Sizes and times are predicted.

    Args:
        lengths: of rows, that were searched; None: micro-batches were.
    """
    lines, fitting = [], shown(outcomes, lengths)[:top]
    if fitting:
        timed = any(one.speed for one in fitting)
        spans = tokens if timed else None
        columns = _COLUMNS if lengths is None else (*_COLUMNS[:2], "longest rows", *_COLUMNS[2:])
        head = (*columns, *(_TIMES if timed else ()), *(_SPANS if spans else ()))
        rows = [
            (*_row(one, lengths), *(_times(one) if timed else ()), *(_span(one, spans) if spans else ()))
            for one in fitting
        ]
        lines += ["predicted, of the process that needs most:", "", table([head, *rows], width), ""]
        lines += _bound(fitting, planner, lengths) if lengths else []
        lines += [
            "the parts of the peak:",
            "",
            _parts({one.label: one.peak.components for one in fitting}, _size, width),
        ]
        if timed:
            spent = {one.label: one.speed.time.parts for one in fitting if one.speed}
            lines += ["", "the parts of an update, in seconds:", "", _parts(spent, _seconds, width)]
        lines.append("")
    misfits = [one.smallest_misfit for one in outcomes if one.smallest_misfit]
    if misfits:
        lines += ["does not fit:", *(f"  {_misfit(one, lengths)}" for one in misfits), ""]
    refused = [one for one in outcomes if one.refused]
    if refused:
        lines += ["not possible:", *(f"  {one.label}: {one.refused}" for one in refused), ""]
    offloaded = {one.label: one.largest.disk_bytes for one in outcomes if one.largest and one.largest.disk_bytes}
    lines += [f"{label} keeps {size(most)} on a disk of each machine." for label, most in offloaded.items()]
    lines.append(f"A checkpoint takes {size(planner.checkpoint_bytes)} of disk.")
    return "\n".join(lines)


def to_json(outcomes: list[Outcome], planner: Planner, lengths: list[int] | None = None) -> dict[str, Any]:
    """{predictions, best, largest, refused, checkpoint_bytes, parameters, trained_parameters}. Where lengths were
    searched, `best` and `largest` are the longest rows."""
    weights, best = planner.subject.weights, shown(outcomes, lengths)
    largest = best if lengths else [outcome.largest for outcome in ranked(outcomes)]
    return {
        "predictions": [one.to_dict() for outcome in outcomes for one in outcome.predictions],
        "best": [_place(one) for one in best],
        "largest": [_place(one) for one in largest],
        "refused": {one.label: one.refused for one in outcomes if one.refused},
        "checkpoint_bytes": planner.checkpoint_bytes,
        "parameters": weights.trained + weights.frozen,
        "trained_parameters": weights.trained,
    }


def describe_model(planner: Planner, lengths: list[int] | None = None) -> str:
    """One line: the model's shape and rows."""
    weights, rows = planner.subject.weights, planner.subject.rows
    total, config = weights.trained + weights.frozen, planner.subject.config
    trained = "" if not weights.frozen else f", {rounded(100 * weights.trained / total)} % trained"
    target = f" and {rows.target_length:,}" if rows.target_length else ""
    length = f"{rows.length:,}{target}"
    if lengths:
        length = " to ".join(f"{one:,}" for one in dict.fromkeys((lengths[0], lengths[-1])))
    return f"{config.model_type}, {total:,} parameters{trained}, rows of {length} tokens"


def _bound(longest: list[Prediction], planner: Planner, lengths: list[int]) -> list[str]:
    """A line on those that hold the longest rows of all that were searched."""
    names = [one.label for one in longest if one.length == lengths[-1]]
    if not names:
        return []
    by_positions = usable_positions(planner.subject.config) == lengths[-1]
    why = (
        "the model has no more positions (max_position_embeddings)"
        if by_positions
        else "no longer ones were asked for"
    )
    return [f"{lengths[-1]:,} tokens, and not memory, are the limit of {', '.join(names)}: {why}.", ""]


def _place(one: Prediction) -> dict[str, Any]:
    found = one.to_dict()
    return {name: found[name] for name in ("strategy", "layout", "length", "per_device_train_batch_size")}


def _row(one: Prediction, lengths: list[int] | None) -> tuple[str, ...]:
    layout, peak = one.layout, one.peak
    degrees = f"{layout.data_size} x {layout.tensor} x {layout.pipeline} x {layout.sequence}"
    length = [f"{one.length:,}"] if lengths else []
    return (one.strategy, degrees, *length, str(one.micro_batch), str(one.accumulation), _recomputed(one.recomputed),
            size(peak.allocated), size(peak.device), peak.phase,
            _size(one.host_bytes))  # fmt: skip


def _recomputed(which: bool | str | int) -> str:
    return {False: "no", True: "yes"}.get(which, str(which))


def _times(one: Prediction) -> tuple[str, ...]:
    if one.speed is None:
        return ("-",) * len(_TIMES)
    speed = one.speed
    mfu = "-" if speed.mfu is None else f"{speed.mfu:.1%}"
    return (_seconds(speed.time.seconds), rounded(speed.tokens_per_s), mfu, speed.time.bound)


def _span(one: Prediction, tokens: float) -> tuple[str, str]:
    """(days, GPU-hours) until so many tokens."""
    if one.speed is None:
        return "-", "-"
    seconds = tokens / one.speed.tokens_per_s
    return rounded(seconds / DAY_S), rounded(seconds / 3600 * one.layout.world_size)


def _parts(found: dict[str, dict[str, float]], text, width: int | None) -> str:
    names = list(dict.fromkeys(name for parts in found.values() for name in parts))
    rows = [(strategy, *(text(parts.get(name, 0)) for name in names)) for strategy, parts in found.items()]
    return table([("strategy", *names), *rows], width)


def _size(count: float) -> str:
    return size(count) if count else "-"


def _seconds(seconds: float) -> str:
    return rounded(seconds) if seconds >= 5e-4 else "-"


def _misfit(one: Prediction, lengths: list[int] | None) -> str:
    parts = sorted(one.peak.components.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} {size(count)}" for name, count in parts)
    what = f"rows of {one.length:,} tokens" if lengths else f"micro-batch {one.micro_batch}"
    return f"{one.label}, {what}: {size(one.peak.device)} in {one.peak.phase}, {size(one.lacking)} too many ({listed})"
