"""The rows that a recipe trains on, as long as it allows: the inputs of a traced pass, and the loss of them;
and published, measured speeds (measured_rows.csv), with how far predictions are from those of the same kind.
"""

import contextlib
import csv
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from zerofit.model.chunked_loss import PLAIN, TokenLoss
from zerofit.model.configuration import has_head
from zerofit.model.loss import HIDDEN
from zerofit.recipe.tasks import CAUSAL

AUTO_CLASSES = {
    **dict.fromkeys(CAUSAL, "AutoModelForCausalLM"),
    "cls": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
TOKEN_CLASSIFIER = "AutoModelForTokenClassification"
MAX_LENGTH = 1024  # of a recipe without block_size: the model's positions, at most this number


class PlannedHead(NamedTuple):
    """Stands in place of the head of a teacher that is held beside the student: logits of the right size."""

    width: int
    vocab_size: int

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_zeros((*hidden.shape[:-1], self.vocab_size))


@dataclass(frozen=True)
class PlannedRows:
    """Rows of one task."""

    task: str
    length: int  # tokens of a row; of seq2seq, of a source
    target_length: int = 0  # tokens of a target; 0 for other tasks
    masked: bool = False  # packed documents are told apart by a mask (B, 1, T, T), which sdpa needs
    loss_kind: str = "chunked"  # or full, of clm and seq2seq
    per_sample: int = 1  # rows of a sample: 2 of pairs of answers
    terms: TokenLoss = PLAIN  # what is added to the cross entropy of tokens

    def install(self, model: torch.nn.Module) -> None:
        """Give the model the loss that it is trained with."""
        from zerofit.model.loss import install_loss  # it imports torch's compiler, which takes two seconds

        if self.task != "cls":
            install_loss(model, self.loss_kind, self.terms)

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The summed loss of a batch, as the task computes it."""
        from zerofit.model.loss import loss_of_examples

        if self.task == "cls":
            labels = inputs["labels"]
            read = {name: one for name, one in inputs.items() if name != "labels"}
            return loss_of_examples(model(**read).logits, labels)
        if self.per_sample == 2:  # what the two answers are compared by takes no memory to speak of
            return model(**inputs, of_rows=True).sum()
        return model(**inputs)

    @property
    def tokens(self) -> int:
        """Tokens of a sample, padding included."""
        return self.per_sample * (self.length + self.target_length)

    def shortened(self, mean_length: float) -> "PlannedRows":
        """Rows of this length; of pairs, source and target keep their proportion."""
        part = min(1.0, mean_length / self.tokens)
        target = max(1, round(part * self.target_length)) if self.target_length else 0
        return replace(self, length=max(1, round(part * self.length)), target_length=target)


def make_inputs(config: Any, rows: PlannedRows, batch_size: int, makes_masks: bool = False) -> dict[str, torch.Tensor]:
    """Inputs of a pass; call it inside a fake tensor mode.

    Args:
        makes_masks: rows are split, and the mask of packed documents is made of their positions
            (zerofit/strategy/sequence.py).

    Shapes (B: rows): input_ids (B, T), labels (B, T), (B, U) of seq2seq or (B,) of cls without tags;
        attention_mask (B, T) or (B, 1, T, T), a teacher's hidden states (B, T, H).
    """
    shape: tuple[int, ...] = (batch_size * rows.per_sample, rows.length)
    inputs = {"input_ids": torch.zeros(shape, dtype=torch.int64)}
    if rows.task in CAUSAL:
        inputs["labels"] = torch.zeros(shape, dtype=torch.int64)
        if rows.terms.distillation is not None:
            inputs[HIDDEN] = torch.zeros((*shape, rows.terms.distillation.head.width))
        if rows.masked or not (makes_masks or rows.per_sample == 2):
            inputs["position_ids"] = torch.zeros(shape, dtype=torch.int64)
        if rows.masked and not makes_masks:
            inputs["attention_mask"] = torch.zeros((batch_size, 1, rows.length, rows.length), dtype=torch.bool)
        return inputs
    inputs["attention_mask"] = torch.ones(shape, dtype=torch.int64)
    if rows.task == "cls":
        kind = torch.float32 if getattr(config, "num_labels", 2) == 1 else torch.int64
        inputs["labels"] = torch.zeros(shape if has_head(config, "TokenClassification") else batch_size, dtype=kind)
    else:
        inputs["labels"] = torch.zeros((batch_size, rows.target_length), dtype=torch.int64)
    return inputs


MEASURED_ROWS_FILE = Path(__file__).with_name("measured_rows.csv")
LORA_RUN = "LoRA"
OFFLOADED_RUN = "offload"
MODEL_PARALLEL = "model parallelism"
DATA_PARALLEL = "data parallelism"
MIN_COMPARABLE = 5  # rows from which a range is drawn


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
        return LORA_RUN
    if "offload" in strategy:
        return OFFLOADED_RUN
    return MODEL_PARALLEL if is_divided else DATA_PARALLEL


@cache
def measured_rows() -> tuple[MeasuredRow, ...]:
    """Return all rows of the file."""
    with MEASURED_ROWS_FILE.open(encoding="utf-8", newline="") as file:
        return tuple(MeasuredRow(**{name: _value(text) for name, text in row.items()}) for row in csv.DictReader(file))


def _value(text: str) -> str | int | float:
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def comparable_rows(
    kind: str, gpu: str, parameters: float, length: int, tokens: int, *, gpus: int
) -> list[MeasuredRow]:
    """The rows of this kind on this GPU, whatever its memory, the most similar one first; none: too few have been
    measured. `tokens`: of a micro-batch."""
    rows = [
        row
        for row in measured_rows()
        if row.kind == kind and gpu_model(row.gpu) == gpu_model(gpu) and row.trust != "C" and row.predicted
    ]
    if len(rows) < MIN_COMPARABLE:
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


def gpu_model(gpu: str) -> str:
    """a100-80gb and a100-40gb are one."""
    return gpu.rpartition("-")[0] or gpu
