"""What a comparison searches: the largest batch, or with --lengths the longest rows. And how reports speak of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchVariable:
    """A quantity that trials make larger and larger.

    Args:
        option: of the recipe; each launch sets it to the size that it begins with.
        column: of results.csv.
        size, short: one of them, in messages and as a column.
        largest, holds: what is found, as a column, and of a strategy that holds it.
        title, heading, label: of the report, of its first table, of the plots' axis.
        each: what the peak grows with.
        rate: the throughput that is plotted, as a trial has it.
    """

    option: str
    column: str
    size: str
    short: str
    largest: str
    holds: str
    title: str
    heading: str
    label: str
    each: str
    rate: str


BATCHES = SearchVariable(
    "per_device_train_batch_size",
    "batch_size",
    "batch size",
    "batch",
    "largest batch",
    "the largest batch, {:,} per process",
    "Batch sizes",
    "Largest batches",
    "batch size of one process",
    "each sample",
    "samples_per_s",
)
LENGTHS = SearchVariable(
    "block_size",
    "length",
    "length",
    "length",
    "longest rows",
    "the longest rows, {:,} tokens",
    "Lengths of rows",
    "Longest rows",
    "tokens of a row",
    "each token",
    "tokens_per_s",
)
