"""Published, measured speeds (measured_rows.csv), and how far predictions are from those of the same kind.

A row is one configuration of one source. `seconds` is one update; `predicted` is what benchmarks/published_times.py
has written.
"""

import contextlib
import csv
import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace

FILE = Path(__file__).with_name("measured_rows.csv")
LORA, OFFLOADED, DIVIDED, DENSE = "LoRA", "offload", "model parallelism", "data parallelism"
FEWEST = 5  # rows from which a range is drawn


class MeasuredRow(SimpleNamespace):
    """One row, whose attributes are the columns of the file: numbers, or texts that may be empty.

    trust is A where the source prints all that a prediction needs, B where one thing is missing or rounded, C where it
    serves for orientation; network: GB/s of one GPU to other machines; seconds: of one update; set_aside: "y" if the
    row was drawn by a seed and not fitted on; predicted: seconds.
    """

    @property
    def kind(self) -> str:
        return run_kind(self.strategy, self.tensor * self.pipeline > 1, bool(self.lora_r))

    @property
    def parameters(self) -> float:
        """About; to compare models with."""
        return self.layers * self.hidden * (4 * self.hidden + 3 * self.ffn) + self.vocab * self.hidden

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds: above 1 the prediction is too fast."""
        return self.seconds / self.predicted


def run_kind(strategy: str, is_divided: bool, is_lora: bool) -> str:
    """Return the kind of run, which decides how well seconds are predicted."""
    if is_lora:
        return LORA
    if "offload" in strategy:
        return OFFLOADED
    return DIVIDED if is_divided else DENSE


@cache
def measured_rows() -> tuple[MeasuredRow, ...]:
    """Return all rows of the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(MeasuredRow(**{name: _value(text) for name, text in row.items()}) for row in csv.DictReader(file))


def _value(text: str) -> str | int | float:
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def comparable(kind: str, gpu: str, parameters: float, length: int, tokens: int, *, gpus: int) -> list[MeasuredRow]:
    """The rows of this kind on this GPU, whatever its memory, the most similar one first; none: too few have been
    measured. `tokens`: of a micro-batch."""
    rows = [
        row
        for row in measured_rows()
        if row.kind == kind and model_of(row.gpu) == model_of(gpu) and row.trust != "C" and row.predicted
    ]
    if len(rows) < FEWEST:
        return []

    def distance(row: MeasuredRow) -> float:
        pairs = (
            (row.parameters, parameters),
            (row.length, length),
            (row.micro_batch * row.length, tokens),
            (row.gpus, gpus),
        )
        return sum(math.log(one / other) ** 2 for one, other in pairs)

    return sorted(rows, key=distance)


def model_of(gpu: str) -> str:
    """a100-80gb and a100-40gb are one."""
    return gpu.rpartition("-")[0] or gpu
