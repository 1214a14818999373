"""Log lines about the labels: how many records have each, and which names may be mistakes."""

from collections.abc import Iterable, Sequence
from functools import partial
from textwrap import wrap

import numpy as np

from zerofit.data.labelled.labels import Labels

FEW = 5  # records of a class that are too few to learn it from
SHOWN = 20  # classes with their numbers of records
NAMED = 5  # classes, or pairs of them, of a note
wrapped = partial(wrap, width=80, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False)


def class_counts(labels: Labels, parts: Iterable[np.ndarray]) -> np.ndarray:
    """Return (classes,) the number of records (words) of each class, in the labels of all these samples."""
    counts = np.zeros(labels.num_outputs, dtype=np.int64)
    for own in parts:
        counts += own.sum(axis=0).astype(np.int64) if labels.of_sets else np.bincount(own, minlength=len(counts))
    return counts


def label_report(labels: Labels, trained: list[np.ndarray], held_out: list[np.ndarray]) -> list[str]:
    """Lines for the log: the records of each class, classes with few or none, names that differ in one letter.
    `trained, held_out`: the labels of samples; empty where there are no such samples."""
    names = labels.names
    if names is None or labels.choices or not (trained or held_out):
        return []
    what = "words" if labels.of_words else "records"
    counts, held = class_counts(labels, trained), class_counts(labels, held_out)
    both = " + ".join([*(["training"] if trained else []), *(["held out"] if held_out else [])])
    most = sorted(np.argsort(-(counts + held), kind="stable")[:SHOWN])
    columns = [*([counts] if trained else []), *([held] if held_out else [])]
    shown = [f"{names[place]} {' + '.join(f'{column[place]:,}' for column in columns)}" for place in most]
    more = f", and {len(names) - SHOWN:,} labels with fewer" if len(names) > SHOWN else ""
    text = f"{what} of each label ({both}): {', '.join(shown)}{more}"
    lines = ["\n".join(wrapped(text, initial_indent="labels    "))]
    if trained:
        few = [f"{names[place]} ({counts[place]})" for place in np.flatnonzero((counts > 0) & (counts < FEW))]
        lines += _note(f"fewer than {FEW} training {what}", few)
        lines += _note(f"no training {what}", [names[place] for place in np.flatnonzero(counts == 0)])
    if held_out:
        lines += _note(f"no held-out {what}", [names[place] for place in np.flatnonzero(held == 0)])
    totals = dict(zip(names, (counts + held).tolist()))
    pairs = [
        f"{first!r} ({totals[first]:,}) and {other!r} ({totals[other]:,})" for first, other in nearly_alike(totals)
    ]
    return lines + _note("is one a typing error of the other", pairs, "?")


def _note(what: str, found: Sequence[str], end: str = "") -> list[str]:
    if not found:
        return []
    more = f", and {len(found) - NAMED:,} more" if len(found) > NAMED else ""
    text = f"{what}: {', '.join(found[:NAMED])}{more}{end}"
    return ["\n".join(wrapped(text, initial_indent="note      "))]


def nearly_alike(counts: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs of names, the rarer first, that differ in case alone, or in one letter: another, one more, or two that are
    exchanged. Digits tell names apart; so does a letter of short names that many records have. `counts`: the number of
    records of each name."""
    with_gap: dict[tuple[int, str], str] = {}
    folded: dict[str, str] = {}
    found: list[tuple[str, str]] = []
    for name in counts:
        if (other := folded.setdefault(name.casefold(), name)) != name:
            found.append((name, other))
        for place, letter in enumerate(name):
            before, after = name[:place], name[place + 1 :]
            if letter.isdigit() or (place == 0 and after[:1] == "-"):  # B-PER and I-PER
                continue
            swapped = before + after[:1] + letter + after[1:]
            other = with_gap.setdefault((place, before + after), name)
            found += [(name, each) for each in (before + after, swapped, other) if each in counts and each != name]
    pairs: dict[frozenset[str], tuple[str, str]] = {}
    for first, second in found:
        shortest, fewest = min(len(first), len(second)), min(counts[first], counts[second])
        if first.casefold() == second.casefold() or shortest > 3 or (shortest == 3 and fewest < FEW):
            pairs[frozenset((first, second))] = first, second
    return [(a, b) if counts[a] <= counts[b] else (b, a) for a, b in pairs.values()]
