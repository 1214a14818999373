"""A mixture of sources: each has a weight, which is the share of the samples that come from it.

Tijdeman's solution of the chairman assignment problem (R. Tijdeman, Discrete Mathematics 32, 1980) chooses the source
of each place: at every place, the number of samples of a source so far differs by less than one from its weight times
the number of places. The samples of a source come in the order of (seed, source), as in a run on that source alone.
So the order depends neither on the processes nor on the batch, and the position is one number, as without a mixture.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from zerofit.data.options import DataOptions
from zerofit.data.order import SampleOrder
from zerofit.data.pack import DatasetStats, LabelledSamples, Sample, SampleSet, TaskData
from zerofit.recipe.tasks import TaskRecipe

PLACES_PER_BLOCK = 1 << 14  # places whose sources are computed at a time
Data = TypeVar("Data", bound=TaskData)
SourceSamples = TypeVar("SourceSamples", bound=SampleSet)


class MixtureOrder:
    """The order of a training run on a mixture. `weights`: of each source; they add up to 1. `sizes`: samples of each
    source; they are numbered one source after another."""

    def __init__(self, weights: Sequence[float], sizes: Sequence[int], seed: int):
        self.weights = np.asarray(weights, dtype=np.float64)
        self.offsets = np.concatenate([[0], np.cumsum(sizes)])
        seeds = [int(np.random.SeedSequence([seed, source]).generate_state(1)[0]) for source in range(len(sizes))]
        self.orders = [SampleOrder(size, source_seed) for size, source_seed in zip(sizes, seeds)]
        self._min_deficit = 1 / (2 * len(sizes) - 2) if len(sizes) > 1 else 0.0
        self._blocks: list[np.ndarray] = []
        self._counts = [np.zeros(len(sizes), dtype=np.int64)]  # before each block

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return the sample indices at places [start, stop) of the run."""
        indices = np.empty(stop - start, dtype=np.int64)
        for number in range(start // PLACES_PER_BLOCK, -(-stop // PLACES_PER_BLOCK)):
            sources, before = self.block(number)
            first = max(start - number * PLACES_PER_BLOCK, 0)
            last = min(stop - number * PLACES_PER_BLOCK, PLACES_PER_BLOCK)
            place = number * PLACES_PER_BLOCK + first - start
            part = sources[first:last]
            for source, order in enumerate(self.orders):
                positions = np.flatnonzero(part == source)
                begin = int(before[source] + (sources[:first] == source).sum())
                drawn = order.indices(begin, begin + len(positions))
                indices[place + positions] = self.offsets[source] + drawn
        return indices

    def block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (the sources of the places of a block, how many samples of each source come before it)."""
        weights = self.weights.tolist()
        min_deficit = self._min_deficit
        sources = range(len(self.weights))
        while len(self._blocks) <= number:
            deficits = (self.weights * (len(self._blocks) * PLACES_PER_BLOCK) - self._counts[-1]).tolist()
            chosen = np.empty(PLACES_PER_BLOCK, dtype=np.int16)
            for place in range(PLACES_PER_BLOCK):
                # Among the sources with a deficit of at least 1 / (2 k - 2) samples: the one that must come first.
                first = 0
                earliest = np.inf
                for source in sources:
                    deficit = deficits[source] = deficits[source] + weights[source]
                    if deficit >= min_deficit - 1e-9:
                        until = (1 - min_deficit - deficit) / weights[source]  # places until its deficit is too large
                        if until < earliest:
                            first = source
                            earliest = until
                deficits[first] -= 1
                chosen[place] = first
            self._blocks.append(chosen)
            self._counts.append(self._counts[-1] + np.bincount(chosen, minlength=len(weights)))
        return self._blocks[number], self._counts[number]


class MixedSamples(Generic[SourceSamples]):
    """The samples of all sources, one source after another."""

    def __init__(self, sets: Sequence[SourceSamples]):
        self.sets = list(sets)
        self.offsets = np.concatenate([[0], np.cumsum([len(each) for each in sets])])
        lengths = [each.lengths for each in sets if each.lengths is not None]
        self.lengths = np.concatenate(lengths) if len(lengths) == len(sets) else None
        self.sort_key = self.lengths
        stats = [each.stats for each in sets]
        trained = [each.trained for each in stats if each.trained is not None]
        self.stats = DatasetStats(
            documents=sum(each.documents for each in stats),
            tokens=sum(each.tokens for each in stats),
            samples=sum(each.samples for each in stats),
            truncated=sum(each.truncated for each in stats),
            trained=sum(trained) if len(trained) == len(stats) else None,
        )

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __getitem__(self, index: int) -> Sample:
        source = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return self.sets[source][int(index - self.offsets[source])]

    @property
    def labels(self: "MixedSamples[LabelledSamples]") -> np.ndarray:
        """Return the labels of all samples, for sources that have labels."""
        return np.concatenate([each.labels for each in self.sets])


def options_of_sources(options: DataOptions, recipe: TaskRecipe) -> dict[str, DataOptions]:
    """Return the data options of each source, by the source's name: it is prepared as if it were the only one.

    Without weights there is one source, whose name is empty. A validation_file goes to the first source; nothing is
    held out of the others then.
    """
    if not recipe.mixture:
        return {"": options}
    sources: dict[str, DataOptions] = {}
    for _, files in recipe.mixture:
        # A file's name without its ending and wildcards, or that of its folder: web of web/*.txt.
        parts = (part.partition(".")[0] for part in reversed(Path(files[0]).parts))
        stems = (re.sub(r"\[[^]]*\]|[*?{}]", "", part).strip("-_") for part in parts)
        name = next(filter(None, stems), "source")
        while name in sources:
            name += "_"
        source_options = replace(options, patterns={"train": files})
        if not sources:
            source_options = replace(options, patterns={**options.patterns, "train": files})
        elif "validation" in options.patterns:
            source_options = replace(source_options, held_out_fraction=0.0)
        sources[name] = source_options
    return sources


def mix_sources(sources: Mapping[str, Data], recipe: TaskRecipe, first: Data | None = None, **changes: Any) -> Data:
    """Join the data of all sources into one. `sources`: their data by name. `first`: the data whose tokenizer and
    other attributes are kept; by default the first source. `changes`: values of other attributes."""
    held_out = {name: data.validation for name, data in sources.items() if data.validation}
    changes["notes"] = merge_notes({name: data.notes for name, data in sources.items()})
    if held_out:
        changes["validation"] = MixedSamples(list(held_out.values()))
        changes["sources"] = held_out if len(held_out) > 1 else {}
    if recipe.trains:
        sizes = [len(data.trained) for data in sources.values()]
        weights_given = np.asarray([weight for weight, _ in recipe.mixture], dtype=np.float64)
        weights = (weights_given / weights_given.sum()).tolist()
        total = max(1, int(min(size / weight for size, weight in zip(sizes, weights))))  # one source is read once
        passes = [weight * total / size for weight, size in zip(weights, sizes)]
        changes["notes"] += [
            f"source    {name}: {weight:.1%} of the samples; an epoch of {total:,} samples reads its {size:,} "
            f"{times:.2f} times"
            for name, size, weight, times in zip(sources, sizes, weights, passes)
        ]
        order = MixtureOrder(weights, sizes, recipe.seed)
        train = MixedSamples([data.trained for data in sources.values()])
        changes |= {"train": train, "order": order, "samples_per_epoch": total, "passes": passes}
    return replace(first or next(iter(sources.values())), **changes)


def merge_notes(lines: dict[str, list[str]]) -> list[str]:
    """Join the log lines of all sources, by the source's name. A line that not all sources have gets the name of its
    source after the 10 characters of its label (`note      `)."""
    all_lines = list(dict.fromkeys(line for source_lines in lines.values() for line in source_lines))
    shared = [line for line in all_lines if all(line in source_lines for source_lines in lines.values())]
    return shared + [
        f"{line[:10]}{name}: {line[10:]}" if line[:1].strip() else line
        for name, source_lines in lines.items()
        for line in source_lines
        if line not in shared
    ]
