"""Losses of pairs of answers, of which one is preferred: DPO and its kin, which differ in one formula.

With c and r the summed log-probabilities of the chosen and the rejected answer, c0 and r0 those of the reference (the
model before training), and a bar for a mean over the answer's tokens:

    dpo     -log sigmoid(beta ((c - c0) - (r - r0)))                     Rafailov et al. 2023, arXiv:2305.18290
    ipo     (mean((c - c0)) - mean((r - r0)) - 1 / (2 beta))^2           Azar et al. 2023, arXiv:2310.12036
    hinge   max(0, 1 - beta ((c - c0) - (r - r0)))                       SLiC, Zhao et al. 2023, arXiv:2305.10425
    simpo   -log sigmoid(beta (mean(c) - mean(r)) - gamma)               Meng et al. 2024, arXiv:2405.14734
    orpo    -mean(c) - beta log sigmoid(log odds(c) - log odds(r))       Hong et al. 2024, arXiv:2403.07691

A label that is wrong with probability e (`label_smoothing`): (1 - e) of dpo's loss and e of that of the pair turned
around (conservative DPO, equation 3 of Mitchell's note). The two last ones need no reference.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from zerofit.model.chunked_loss import IGNORE
from zerofit.recipe.causal_options import WITH_REFERENCE

OF_MEANS = ("ipo", "simpo", "orpo")  # which compare means over the tokens of an answer, not sums
ROUNDING = 1e-6  # of log-probabilities, relative: before training both rewards are 0, and neither is the larger
BETA = {"dpo": 0.1, "ipo": 0.1, "hinge": 0.1, "simpo": 2.0, "orpo": 0.1}  # the libraries' and papers' usual ones


def without_dropout(model: torch.nn.Module) -> None:
    """Switch dropout off, as in the reference's pass: its noise is as large as what the two answers differ by."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):  # given to the attention function
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


class PreferenceFigures(NamedTuple):
    """The figures of an update's pairs in metrics.jsonl. A reward is beta times what the answer's log-probability has
    gained on the reference (ipo, simpo, orpo: its mean over the tokens, and of the two last without a reference)."""

    preference_accuracy: float
    reward_margin: float
    reward_chosen: float
    reward_rejected: float


def log_probabilities(model: Any, batch: Any) -> torch.Tensor:
    """Return (P, 2) fp32: of the chosen and the rejected answer of each pair, whose rows follow each other in the
    batch."""
    losses: torch.Tensor = model(**batch.inputs, of_rows=True)
    return -losses.view(-1, 2)


@dataclass
class PreferenceLoss:
    """The loss of a batch of pairs, summed over them, and the sums of what metrics.jsonl says of them."""

    kind: str  # dpo, ipo, hinge, simpo or orpo
    beta: float
    gamma: float = 0.0  # of simpo, the margin that the rewards should keep
    label_smoothing: float = 0.0  # of dpo, the probability that a label is wrong
    _sums: torch.Tensor | None = None

    @property
    def needs_reference(self) -> bool:
        return self.kind in WITH_REFERENCE

    def begin(self, pairs: float = 0.0, tokens: float = 0.0) -> None:
        """Begin an update, or an evaluation."""
        self._sums = None

    @property
    def sums(self) -> list[float]:
        """The numbers that ranks add up: pairs that are ranked right (a tie is half a pair), and both rewards."""
        return [0.0] * 3 if self._sums is None else [float(each) for each in self._sums]

    def figures(self, sums: list[float], pairs: float, tokens: float = 0.0) -> PreferenceFigures:
        """Compute the figures of metrics.jsonl."""
        right, chosen, rejected = (each / max(pairs, 1.0) for each in sums)
        return PreferenceFigures(right, chosen - rejected, chosen, rejected)

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        """The summed loss of a batch; `batch.labels` (P, 2) are the reference's log-probabilities, NaN of what only
        fills the batch up."""
        found = log_probabilities(model, batch)
        tokens = (batch.tensor("labels")[:, 1:] != IGNORE).sum(dim=1).view(-1, 2).clamp(min=1).to(found.dtype)
        counts = ~batch.labels.isnan()[:, 0]
        reference = batch.labels.nan_to_num()
        gained = found - reference if self.needs_reference else found
        per = tokens if self.kind in OF_MEANS else torch.ones_like(tokens)
        rewards = self.beta * (gained / per).detach()
        rounding = ROUNDING * self.beta * (found / per).detach().abs().sum(dim=1)
        ahead = rewards[:, 0] - rewards[:, 1]
        right = (ahead > rounding).float() + (ahead.abs() <= rounding).float() / 2
        of_pair = torch.stack([right, rewards[:, 0], rewards[:, 1]])  # (3, P)
        sums = torch.where(counts, of_pair, 0.0).sum(dim=1)
        self._sums = sums if self._sums is None else self._sums + sums
        loss = self._losses(gained, gained / tokens)
        return torch.where(counts, loss, 0.0).sum()

    def _losses(self, gained: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return (P,) the loss of each pair. `gained`: (P, 2) on the reference, where there is one; `mean`: per
        token."""
        wrong, ahead, mean_ahead = self.label_smoothing, gained[:, 0] - gained[:, 1], mean[:, 0] - mean[:, 1]
        match self.kind:
            case "dpo":
                logits = self.beta * ahead
                return -(1 - wrong) * F.logsigmoid(logits) - wrong * F.logsigmoid(-logits)
            case "ipo":
                return (mean_ahead - 1 / (2 * self.beta)) ** 2
            case "hinge":
                return F.relu(1 - self.beta * ahead)
            case "simpo":
                return -F.logsigmoid(self.beta * mean_ahead - self.gamma)
        # orpo: log odds(p) = log p - log(1 - p); 1 - p without cancellation where p is small or near 1
        log_odds = mean - torch.log(-torch.expm1(mean.clamp(max=-1e-7)))
        return -mean[:, 0] - self.beta * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])
