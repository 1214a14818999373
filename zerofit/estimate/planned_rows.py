"""The rows that a recipe trains on, as long as it allows: the inputs of a traced pass, and the loss of them."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from zerofit.model.chunked_loss import PLAIN, TokenLoss
from zerofit.model.configuration import has_head
from zerofit.model.loss import HIDDEN
from zerofit.recipe.tasks import CAUSAL

TASKS = {
    **dict.fromkeys(CAUSAL, "AutoModelForCausalLM"),
    "cls": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
OF_WORDS = "AutoModelForTokenClassification"
LONGEST_BLOCK = 1024  # of a recipe without block_size: the model's positions, at most this number


class PlannedHead(NamedTuple):
    """Stands in place of the head of a teacher that is held beside the student: logits of the right size."""

    width: int
    vocab_size: int

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_zeros((*hidden.shape[:-1], self.vocab_size))


@dataclass(frozen=True)
class Rows:
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

    def shortened(self, mean_length: float) -> "Rows":
        """Rows of this length; of pairs, source and target keep their proportion."""
        part = min(1.0, mean_length / self.tokens)
        target = max(1, round(part * self.target_length)) if self.target_length else 0
        return replace(self, length=max(1, round(part * self.length)), target_length=target)


def make_inputs(config: Any, rows: Rows, batch_size: int, makes_masks: bool = False) -> dict[str, torch.Tensor]:
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
