"""The rows of a planned model, at the maximum length of the recipe: the inputs of a traced pass, and their loss; and
published, measured speeds (measured_rows.csv), to compare predictions with runs of the same kind.
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

from zerofit.model.chunked_loss import CROSS_ENTROPY, TokenLoss
from zerofit.model.configuration import has_head
from zerofit.model.loss import TEACHER_HIDDEN
from zerofit.recipe.tasks import CAUSAL_TASKS

PLANNED_CLASSES = {
    **dict.fromkeys(CAUSAL_TASKS, "AutoModelForCausalLM"),
    "cls": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
TOKEN_CLASSIFIER = "AutoModelForTokenClassification"
MAX_LENGTH = 1024  # tokens; without block_size rows are as long as the model's positions, up to this number


class PlannedHead(NamedTuple):
    """Stands for the head of a teacher that a process holds in addition to the student: it makes logits of the right
    size."""

    width: int
    vocab_size: int

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_zeros((*hidden.shape[:-1], self.vocab_size))


@dataclass(frozen=True)
class PlannedRows:
    """The shape and the loss of the rows of one task."""

    task: str
    length: int  # tokens of a row; for seq2seq, of a source
    target_length: int = 0  # tokens of a target; 0 for other tasks
    masked: bool = False  # True if a mask (B, 1, T, T) separates packed documents, as sdpa needs it
    loss_kind: str = "chunked"  # or "full", for clm and seq2seq
    per_sample: int = 1  # rows of a sample: 2 for pairs of answers
    terms: TokenLoss = CROSS_ENTROPY  # terms that are added to the cross entropy of tokens

    def install(self, model: torch.nn.Module) -> None:
        """Give the model the loss that it is trained with."""
        from zerofit.model.loss import install_loss  # it imports torch's compiler, which takes two seconds

        if self.task != "cls":
            install_loss(model, self.loss_kind, self.terms)

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the summed loss of a batch, as the task computes it."""
        from zerofit.model.loss import loss_of_examples

        if self.task == "cls":
            labels = inputs["labels"]
            model_inputs = {name: tensor for name, tensor in inputs.items() if name != "labels"}
            return loss_of_examples(model(**model_inputs).logits, labels)
        if self.per_sample == 2:  # comparing the two answers takes almost no memory
            return model(**inputs, of_rows=True).sum()
        return model(**inputs)

    @property
    def tokens(self) -> int:
        """The number of tokens of a sample, including padding."""
        return self.per_sample * (self.length + self.target_length)

    def shortened(self, mean_length: float) -> "PlannedRows":
        """Return rows with this mean length in tokens; source and target of pairs keep their proportion."""
        share = min(1.0, mean_length / self.tokens)
        target = max(1, round(share * self.target_length)) if self.target_length else 0
        return replace(self, length=max(1, round(share * self.length)), target_length=target)


def make_inputs(config: Any, rows: PlannedRows, batch_size: int, makes_masks: bool = False) -> dict[str, torch.Tensor]:
    """Return the inputs of a pass; call it inside a fake tensor mode.

    Args:
        makes_masks: True if rows are split, and the mask of packed documents is computed from their positions
            (zerofit/strategy/sequence.py).

    Shapes (B: rows): input_ids (B, T), labels (B, T), (B, U) for seq2seq or (B,) for cls without tags;
        attention_mask (B, T) or (B, 1, T, T), a teacher's hidden states (B, T, H).
    """
    shape: tuple[int, ...] = (batch_size * rows.per_sample, rows.length)
    inputs = {"input_ids": torch.zeros(shape, dtype=torch.int64)}
    if rows.task in CAUSAL_TASKS:
        inputs["labels"] = torch.zeros(shape, dtype=torch.int64)
        if rows.terms.distillation is not None:
            inputs[TEACHER_HIDDEN] = torch.zeros((*shape, rows.terms.distillation.head.width))
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
    """One measured run. Its attributes are the columns of the file: numbers, or texts that may be empty.

    trust: A if the source prints everything that a prediction needs, B if one thing is missing or rounded, C if the
    row is only a rough guide; network: GB/s of one GPU to other machines; seconds: time of one update; set_aside: "y"
    if the row was drawn at random for testing, and not fitted on; predicted: predicted seconds of one update.
    """

    @property
    def kind(self) -> str:
        return run_kind(self.strategy, self.tensor * self.pipeline > 1, bool(self.lora_r))

    @property
    def parameters(self) -> float:
        """The approximate number of parameters, to compare models."""
        return self.layers * self.hidden * (4 * self.hidden + 3 * self.ffn) + self.vocab * self.hidden

    @property
    def ratio(self) -> float:
        """The measured seconds divided by the predicted ones: above 1 the prediction is too fast."""
        return self.seconds / self.predicted


def run_kind(strategy: str, is_divided: bool, is_lora: bool) -> str:
    """Return the kind of run, on which the accuracy of predicted seconds depends."""
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
    """Return the measured rows of this kind on this GPU, with any memory size, the most similar one first; an empty
    list if too few have been measured. `tokens`: tokens of a micro-batch."""
    rows = [
        row
        for row in measured_rows()
        if row.kind == kind and gpu_model(row.gpu) == gpu_model(gpu) and row.trust != "C" and row.predicted
    ]
    if len(rows) < MIN_COMPARABLE:
        return []

    def distance(row: MeasuredRow) -> float:
        pairs = [(row.parameters, parameters), (row.length, length), (row.gpus, gpus)]
        pairs.append((row.micro_batch * row.length, tokens))
        return sum(math.log(measured / planned) ** 2 for measured, planned in pairs)

    return sorted(rows, key=distance)


def gpu_model(gpu: str) -> str:
    """Return the name of a GPU without its memory size: a100 for a100-80gb and a100-40gb."""
    return gpu.rpartition("-")[0] or gpu
