"""The results of `zerofit compare --lengths` in words and in a table."""

from zerofit.record.terminal import rounded, size
from zerofit.tools.compare.results import StrategyRow, common_size, factor
from zerofit.tools.compare.trial_journal import peak_of


def lengths_table(rows: list[StrategyRow]) -> list[tuple[str, ...]]:
    """A row for each candidate; factors are against the first one."""
    common, first = common_size(rows), rows[0]
    at = f" at {common:,}" if common else " at the same length"
    timed = any(row.timed for row in rows)
    head = ("strategy", "longest rows", "factor", "its peak", f"peak{at}")
    head += ("tokens/s", f"tokens/s{at}") if timed else ()
    return [head, *(_row(row, first, common, timed) for row in rows)]


def _row(row: StrategyRow, first: StrategyRow, common: int | None, timed: bool) -> tuple[str, ...]:
    longest, same = row.at(row.largest), row.at(common)
    if not longest:
        return (row.name, row.limit_text, *["-"] * (5 if timed else 3))
    times = factor(row, first)
    peaks = (size(peak_of(longest)), size(peak_of(same)) if same else "-")
    rates = (rounded(longest["tokens_per_s"]), rounded(same["tokens_per_s"]) if same else "-") if timed else ()
    return (row.name, row.limit_text, f"{times:.2f}" if times else "-", *peaks, *rates)


def longest_rows(rows: list[StrategyRow]) -> str:
    """The results in one or two sentences."""
    failed = [row.name for row in rows if row.problem]
    about_failed = f" {', '.join(failed)}: failed, without a result." if failed else ""
    rows = [row for row in rows if not row.problem]
    fitting = [row for row in rows if row.largest]
    if not fitting:
        names = ", ".join(row.name for row in rows)
        return (f"None of these lengths fits within this limit under {names}." if rows else "") + about_failed
    most = max(row.largest for row in fitting)
    longest = [row for row in fitting if row.largest == most]
    times = factor(longest[0], rows[0])
    against = f", {rounded(times)} times the {rows[0].largest:,} of {rows[0].name}" if times and times != 1 else ""
    names = " and ".join(row.name for row in longest)
    text = f"{names} hold{'s' if len(longest) == 1 else ''} the longest rows, {most:,} tokens{against}."
    if all(row.timed for row in longest):
        fastest = max(longest, key=lambda row: row.at(most)["tokens_per_s"])
        text += f" {fastest.name} trains {rounded(fastest.at(most)['tokens_per_s'])} tokens/s there."
    return text + about_failed
