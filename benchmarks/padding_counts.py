"""Padding and tokens of fixed batches and of batches by tokens, counted from the lengths of real data alone.

    python benchmarks/padding_counts.py --data data        # seconds

The table "By tokens" of docs/measurements/padding.md is printed: means over 10 epochs, each with a seed of its own.
"""

import argparse
import itertools

import numpy as np
from padding import FULL_ROW, LAYOUTS, flags, task_options

from zerofit.data.causal import prepare_causal_data
from zerofit.data.order import LengthGroups, SampleOrder
from zerofit.data.pairs.prepare import prepare_pairs
from zerofit.data.token_updates import TokenUpdates
from zerofit.model.configuration import load_configuration
from zerofit.recipe import parse_recipe
from zerofit.recipe.tasks import TASKS
from zerofit.record.terminal import table

EPOCHS = 10


def widths_of(task: str, data: str) -> np.ndarray:
    """(samples, 1 or 2) tokens of the training rows."""
    kind, prepare = ("clm", prepare_causal_data) if task == "instructions" else ("seq2seq", prepare_pairs)
    recipe = parse_recipe(TASKS[kind], flags(task_options(task, data)))
    samples = prepare(recipe, load_configuration(recipe)).train
    return getattr(samples, "widths", samples.lengths[:, None])


def updates_of(way: str, widths: np.ndarray, row: int, size: int, seed: int) -> list[np.ndarray]:
    """The samples of each update of an epoch, the longest first."""
    if way == "tokens":
        by_tokens = TokenUpdates(widths, row, size, seed)
        ends = [by_tokens.consumed(number) for number in range(by_tokens.num_updates(len(widths)) + 1)]
        return [by_tokens.samples(*span) for span in itertools.pairwise(ends)]
    groups = LengthGroups(widths[:, 0], size) if way == "window" else None
    order = SampleOrder(len(widths), seed, groups).places(0, len(widths))
    key = widths[:, 0] * (1 + widths[:, -1].max()) + widths[:, -1]
    updates = [order[start : start + size] for start in range(0, len(widths), size)]
    return updates if way == "none" else [rows[np.argsort(-key[rows], kind="stable")] for rows in updates]


def figures(way: str, widths: np.ndarray, row: int, size: int, micro: int) -> tuple[str, ...]:
    epochs = [updates_of(way, widths, row, size, seed) for seed in range(EPOCHS)]
    updates = [rows for epoch in epochs for rows in epoch]
    batches = []
    for rows in updates:
        step = micro * -(-len(rows) // size)
        batches += [rows[start : start + step] for start in range(0, len(rows), step)]
    positions = sum(len(rows) * int(widths[rows].max(axis=0).sum()) for rows in batches)
    tokens = np.percentile([widths[rows].sum() for rows in updates], [5, 50, 95])
    padding = 1 - EPOCHS * widths.sum() / positions
    return f"{len(updates) / EPOCHS:.0f}", *(f"{count:,.0f}" for count in tokens), f"{padding:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="the folder of published data")
    data = parser.parse_args().data
    rows = [("global batch = micro-batch x number", "way", "updates", "tokens: 5 %", "median", "95 %", "padding")]
    for task in ("instructions", "Topical-Chat"):
        widths = widths_of(task, data)
        for layout, (size, micro) in LAYOUTS.items():
            for way in ("none", "window", "tokens"):
                rows.append((f"{task}, {layout}", way, *figures(way, widths, FULL_ROW[task], size, micro)))
    print(table(rows))


if __name__ == "__main__":
    main()
