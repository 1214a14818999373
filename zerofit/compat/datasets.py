"""Private parts of datasets. Tried with datasets 5.2."""

from datasets import Dataset


def fingerprint(table: Dataset) -> str:
    """A key of the rows of a table: of its files, and of all that was done to them; the same in every process and in
    every run on the same data. Without it: what is made of a table would be made again in every run."""
    return table._fingerprint
