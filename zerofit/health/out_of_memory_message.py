"""What is said where memory ran out: where, how much, what held it, what would help."""

from zerofit.health.remedies import Situation, remedies
from zerofit.health.watchdog_process import RESUME
from zerofit.record.terminal import size, table

MOST_REMEDIES = 11  # so that the whole message has some 20 lines


def report(s: Situation) -> str:
    """The message: where, how much, what held it, what would help."""
    memory = "the device's memory" if s.where == "device" else "host memory"
    at = f" of update {s.update:,}" if s.update else ""
    lines = [f"out of memory: rank {s.rank} of {s.world_size}, {s.phase}{at}, {memory} ({s.strategy}, {s.precision})"]
    if not s.is_sure:
        lines.append("  cuBLAS could not be started: mostly for want of memory, but not always")
    lines += [f"  {line}" for line in (*_amounts(s), *about_the_model(s))]
    if s.held.total:
        lines += [f"  held by this rank{_of_batch(s)}:", *("  " + line for line in table(_rows(s)).splitlines())]
    helpful = remedies(s)[:MOST_REMEDIES]
    if helpful:
        lines.append("  what would help, by what it saves:")
        shown = [f"about {size(remedy.saves)}" if remedy.saves else "unknown" for remedy in helpful]
        width = max(map(len, shown))
        lines += [f"    {saved:>{width}}  {remedy.option}  ({remedy.what})" for saved, remedy in zip(shown, helpful)]
        lines.append(f"  with a remedy added, {RESUME}")
    else:
        lines.append("  no option saves memory here: take a smaller model, more memory, or more machines under zero3")
    return "\n".join(lines)


def _amounts(s: Situation) -> list[str]:
    parts = [f"asked for {size(s.asked)}"] if s.asked else []
    if s.free is not None and s.total:
        parts.append(f"{size(s.free)} of {size(s.total)} free")
    if s.others and s.total and s.others > 0.01 * s.total:
        parts.append(f"other processes hold {size(s.others)}")
    if s.process_limit:
        parts.append(f"a process may have {size(s.process_limit)} here (ulimit)")
    return ["; ".join(parts)] if parts else []


def about_the_model(s: Situation) -> list[str]:
    """The model's size against the limit."""
    if not s.parameters:
        return []
    text = (
        f"the model has {s.parameters:,} parameters: of each rank {size(s.weights)} of weights, {size(s.whole)} with "
        "gradients and optimizer state"
    )
    if s.limit:
        fits = f"{size(s.whole - s.limit)} too much" if s.whole > s.limit else "activations come on top"
        text += f", of the {size(s.limit)} that it may have ({fits})"
    return [text]


def _of_batch(s: Situation) -> str:
    if s.phase not in ("forward", "loss", "backward"):
        return ""
    return f" ({s.micro_batch} rows" + (f" of up to {s.row_tokens:,} tokens)" if s.row_tokens else ")")


def _rows(s: Situation) -> list[tuple[str, str]]:
    later = {"gradients": s.due.gradients, "optimizer": s.due.optimizer}
    rows = []
    if s.phase == "load":
        return [(f"weights, so far (about {size(s.weights)} once loaded)", size(s.held.weights)),
                ("the rest of the process", size(s.held.rest))]  # fmt: skip
    for name, label in (("weights", "weights"), ("gradients", "gradients"), ("optimizer", "optimizer state")):
        held = getattr(s.held, name)
        if not held and later.get(name):
            label += f" (none now; about {size(later[name])} to come)"
        rows.append((label, size(held)))
    rest = "activations, logits and workspace" if s.where == "device" else "the rest of the process"
    return [*rows, (rest if not s.on_cpu else "activations, logits, workspace, program", size(s.held.rest))]
