"""The losses: over the vocabulary, by default without holding all logits in memory; of classes; of pairs of answers.

After `install_loss(model, kind)` the model is called as before, and with `labels=` (or `next_tokens=`) it returns one
number: the summed cross entropy of each predicted token, without those with the label -100. The caller divides it by
the number of trained tokens in the global batch, which no single rank or micro-batch knows. With `of_rows` it returns
the same sum of each row, for losses that compare answers (below). A model that is being trained adds what the
recipe says (TokenLoss: label smoothing, z-loss); evaluation, and the sums of rows, are plain cross entropy.

The product with the vocabulary is computed inside the head module's own forward: ZeRO-3's hooks gather a module's
weight around its forward and backward, and outside the weight is an empty tensor.

Whoever changes the loss changes it in both kinds: full and chunked (chunked_loss.py). Before a
run preflight.check_loss compares the chosen kind with the full one. Evaluation uses the same function.

Losses of pairs of answers, of which one is preferred, differ in one formula. With c and r the summed log-probabilities
of the chosen and the rejected answer, c0 and r0 those of the reference (the model before training), and a bar for a
mean over the answer's tokens:

    dpo     -log sigmoid(beta ((c - c0) - (r - r0)))                     Rafailov et al. 2023, arXiv:2305.18290
    ipo     (mean((c - c0)) - mean((r - r0)) - 1 / (2 beta))^2           Azar et al. 2023, arXiv:2310.12036
    hinge   max(0, 1 - beta ((c - c0) - (r - r0)))                       SLiC, Zhao et al. 2023, arXiv:2305.10425
    simpo   -log sigmoid(beta (mean(c) - mean(r)) - gamma)               Meng et al. 2024, arXiv:2405.14734
    orpo    -mean(c) - beta log sigmoid(log odds(c) - log odds(r))       Hong et al. 2024, arXiv:2403.07691

A label that is wrong with probability e (`label_smoothing`): (1 - e) of dpo's loss and e of that of the pair turned
around (conservative DPO, equation 3 of Mitchell's note). The two last ones need no reference.
"""

import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from zerofit.model.attention import packed_rows
from zerofit.model.chunked_loss import CROSS_ENTROPY, IGNORE, TokenLoss, chunked_loss, chunked_token_losses
from zerofit.model.experts import Routing
from zerofit.model.families import family_of
from zerofit.recipe.causal_options import REFERENCE_LOSSES

if TYPE_CHECKING:
    from zerofit.data.collate import Batch

TEACHER_HIDDEN = "teacher_hidden"  # key in a batch


def install_loss(model: Any, kind: str, terms: TokenLoss = CROSS_ENTROPY) -> None:
    """Let `model(..., labels=...)` return the summed loss, computed by `kind` (full or chunked).

    Shapes: input_ids (B, T) -> scalar. Of a causal model labels are (B, T) and not shifted: position t is trained on
    label t + 1; or they are given as `next_tokens` (B, T), shifted: position t is trained on next token t. Of an
    encoder-decoder model labels are the target (B, U), and the decoder reads it shifted right. A model with experts
    takes `is_token` (B, T), too, 0 where packed rows are filled up; its `routing` counts in training (experts.py).
    With `of_rows` (B,) instead of a scalar, without the routers' auxiliary loss.
    `teacher_hidden` (B, T, H) is what a teacher's head makes logits of; read in training where `terms` distil.
    Without labels the model works as before. Can be called again to change the kind.
    """
    model.loss_kind = kind
    model.loss_terms = terms
    if "original_forward" not in model.__dict__:
        model.original_forward = model.forward
        model.routing = Routing(model) if family_of(model.config).has_experts else None
        model.forward = types.MethodType(_forward_with_loss, model)
        head = model.get_output_embeddings()
        head.original_forward = head.forward
        head.forward = types.MethodType(_head_forward, head)


def _forward_with_loss(
    self: Any,
    *args: Any,
    labels: torch.Tensor | None = None,
    next_tokens: torch.Tensor | None = None,
    of_rows: bool = False,
    **inputs: Any,
) -> Any:
    is_token = inputs.pop("is_token", None)
    mask = inputs.get("attention_mask")
    teacher = inputs.pop(TEACHER_HIDDEN).flatten(0, 1) if TEACHER_HIDDEN in inputs else None
    if next_tokens is not None:
        targets = next_tokens
    elif labels is None:
        return self.original_forward(*args, **inputs)
    elif self.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = shift_right(self, labels)
        targets = labels
    else:
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    if self.routing is not None:
        inputs["output_router_logits"] = False  # the model itself would add its auxiliary loss
    if of_rows:
        losses = _loss(self, targets.reshape(-1), *args, of_tokens=True, **inputs)
        return losses.view(len(targets), -1).sum(dim=1)
    targets = targets.reshape(-1)
    if self.routing is None or not self.training:
        return _loss(self, targets, *args, teacher=teacher, **inputs)
    with self.routing.watched() as router_logits:
        loss = _loss(self, targets, *args, teacher=teacher, **inputs)
    if is_token is None and mask is not None and mask.dim() == 2:
        is_token = mask
    return self.routing.observe(loss, router_logits, is_token)


def _loss(
    self: Any,
    targets: torch.Tensor,
    *args: Any,
    of_tokens: bool = False,
    teacher: torch.Tensor | None = None,
    **inputs: Any,
) -> torch.Tensor:
    """Return the summed loss; with `of_tokens` the plain one of each token, (N,) fp32, 0 where a target is ignored."""
    terms = self.loss_terms if self.training else CROSS_ENTROPY
    if self.loss_kind != "full":
        hidden = self.base_model(*args, **inputs).last_hidden_state.flatten(0, 1)
        return self.get_output_embeddings()(hidden, targets, of_tokens=of_tokens, terms=terms, teacher=teacher)
    logits = self.original_forward(*args, **inputs).logits.flatten(0, 1).float()
    if of_tokens:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    loss = F.cross_entropy(
        logits, targets, ignore_index=IGNORE, reduction="sum", label_smoothing=terms.label_smoothing
    )
    if terms.z_loss:
        loss = loss + terms.z_loss * logits.logsumexp(-1).masked_fill(targets == IGNORE, 0).square().sum()
    if (distillation := terms.distillation) is not None:
        assert teacher is not None, "terms that distil need a teacher's states"
        losses = distillation.losses(logits.log_softmax(-1), distillation.of_teacher(teacher))
        divergence = losses.masked_fill(targets == IGNORE, 0).sum()
        loss = terms.hard_weight * loss + distillation.weight * divergence
    return loss


def model_loss(model: Any, batch: "Batch") -> torch.Tensor:
    """Return the loss of a batch, summed over its targets, for a model with a loss installed."""
    with packed_rows(batch.packed):
        return model(**batch.inputs)


def shift_right(model: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the ids that the decoder reads to predict `labels` (B, U): the start token, then all labels but the
    last."""
    start = model.config.decoder_start_token_id
    padding = model.config.pad_token_id
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):  # some families begin differently
        empty = (labels == IGNORE).all(dim=1, keepdim=True)  # a row that fills a batch up: mBART wants a last token
        return model.prepare_decoder_input_ids_from_labels(labels.masked_fill(empty, int(padding == 0)))
    return F.pad(labels[:, :-1], (1, 0), value=start).masked_fill(F.pad(labels[:, :-1], (1, 0)) == IGNORE, padding)


def _head_forward(
    self: Any,
    hidden: torch.Tensor,
    targets: torch.Tensor | None = None,
    *,
    of_tokens: bool = False,
    terms: TokenLoss = CROSS_ENTROPY,
    teacher: torch.Tensor | None = None,
) -> Any:
    if targets is None:
        return self.original_forward(hidden)
    weight = self.weight
    bias = self.bias
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))  # and the weight with it, in its loss
    share = getattr(self, "share", None)
    with torch.autocast(hidden.device.type, enabled=False):
        if of_tokens:
            return chunked_token_losses(hidden, weight, bias, targets, share)
        return chunked_loss(hidden, weight, bias, targets, share, terms=terms, teacher=teacher)


def loss_of_examples(
    logits: torch.Tensor,
    labels: torch.Tensor,
    class_weights: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    focal_gamma: float = 0.0,
) -> torch.Tensor:
    """Return the summed loss of classified examples: cross entropy of classes, squared error of numbers; for sets of
    classes the binary cross entropy, a mean over the classes.

    With `focal_gamma` the loss of each example, with its weight and smoothing, is multiplied by (1 - p)^gamma, p being
    the probability of its class (Lin et al. 2017).

    Shapes: logits (B, classes) or (B, 1); labels (B,), int64 classes or float32 numbers, IGNORE or nan for padding;
    of words (B, T, classes) and (B, T); of sets labels are (B, classes), float32 0 or 1; class_weights (classes,).
    """
    if labels.is_floating_point() and labels.dim() == 2:
        present = ~labels[:, 0].isnan()
        losses = F.binary_cross_entropy_with_logits(logits[present].float(), labels[present], reduction="none")
        return losses.mean(dim=-1).sum()
    logits = logits.flatten(0, -2).float()
    labels = labels.flatten()
    if labels.dtype == torch.int64:
        losses = F.cross_entropy(
            logits, labels, class_weights, ignore_index=IGNORE, reduction="none", label_smoothing=label_smoothing
        )
        if focal_gamma:
            p = logits.softmax(dim=-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
            losses = losses * (1 - p).clamp(min=torch.finfo(p.dtype).eps) ** focal_gamma  # 0 has no slope
        return losses.sum()
    present = ~labels.isnan()
    return F.mse_loss(logits[present, 0], labels[present], reduction="sum")


def logits_of_examples(model: Any, batch: "Batch") -> torch.Tensor:
    """Return (B, classes) of a batch of examples; of words (B, T, classes); of multiple choice (B, choices). A choice
    that an example does not have is a row of one token, and is never chosen."""
    logits = model(**batch.inputs).logits
    mask = batch.tensor("attention_mask")
    return logits if mask.dim() == 2 else logits.masked_fill(mask.sum(-1) == 1, torch.finfo(logits.dtype).min)


MEAN_LOSSES = ("ipo", "simpo", "orpo")  # which compare means over the tokens of an answer, not sums
TIE_TOLERANCE = 1e-6  # relative, for log-probabilities: before training both rewards are 0, and neither is the larger
DEFAULT_BETA = {"dpo": 0.1, "ipo": 0.1, "hinge": 0.1, "simpo": 2.0, "orpo": 0.1}  # the values of libraries and papers


def disable_dropout(model: torch.nn.Module) -> None:
    """Switch dropout off, as in the reference's pass: its noise is as large as the two answers' difference."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):  # given to the attention function
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


class PreferenceFigures(NamedTuple):
    """The figures of an update's pairs in metrics.jsonl. A reward is beta times the gain of the answer's
    log-probability over the reference (for ipo, simpo and orpo of its mean per token; simpo and orpo have no
    reference)."""

    preference_accuracy: float
    reward_margin: float
    reward_chosen: float
    reward_rejected: float


def log_probabilities(model: Any, batch: Any) -> torch.Tensor:
    """Return (P, 2) fp32 log-probabilities of the chosen and the rejected answer of each pair, which are consecutive
    rows of the batch."""
    losses: torch.Tensor = model(**batch.inputs, of_rows=True)
    return -losses.view(-1, 2)


@dataclass
class PreferenceLoss:
    """The loss of a batch of pairs, summed over them, and the sums for their figures in metrics.jsonl."""

    kind: str  # dpo, ipo, hinge, simpo or orpo
    beta: float
    gamma: float = 0.0  # simpo: the margin that the rewards should keep
    label_smoothing: float = 0.0  # dpo: the probability that a label is wrong
    _sums: torch.Tensor | None = None

    @property
    def needs_reference(self) -> bool:
        return self.kind in REFERENCE_LOSSES

    def begin(self, pairs: float = 0.0, tokens: float = 0.0) -> None:
        """Begin an update, or an evaluation."""
        self._sums = None

    @property
    def sums(self) -> list[float]:
        """The numbers that ranks sum up: pairs that are ranked right (a tie is half a pair), and both rewards."""
        return [0.0] * 3 if self._sums is None else [float(each) for each in self._sums]

    def figures(self, sums: list[float], pairs: float, tokens: float = 0.0) -> PreferenceFigures:
        """Compute the figures of metrics.jsonl."""
        right, chosen, rejected = (each / max(pairs, 1.0) for each in sums)
        return PreferenceFigures(right, chosen - rejected, chosen, rejected)

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the summed loss of a batch; `batch.labels` (P, 2) are the reference's log-probabilities, NaN in
        padding."""
        log_probs = log_probabilities(model, batch)
        tokens = (batch.tensor("labels")[:, 1:] != IGNORE).sum(dim=1).view(-1, 2).clamp(min=1).to(log_probs.dtype)
        counts = ~batch.labels.isnan()[:, 0]
        reference = batch.labels.nan_to_num()
        gained = log_probs - reference if self.needs_reference else log_probs
        num_tokens = tokens if self.kind in MEAN_LOSSES else torch.ones_like(tokens)
        rewards = self.beta * (gained / num_tokens).detach()
        rounding = TIE_TOLERANCE * self.beta * (log_probs / num_tokens).detach().abs().sum(dim=1)
        ahead = rewards[:, 0] - rewards[:, 1]
        right = (ahead > rounding).float() + (ahead.abs() <= rounding).float() / 2
        of_pair = torch.stack([right, rewards[:, 0], rewards[:, 1]])  # (3, P)
        sums = torch.where(counts, of_pair, 0.0).sum(dim=1)
        self._sums = sums if self._sums is None else self._sums + sums
        loss = self._losses(gained, gained / tokens)
        return torch.where(counts, loss, 0.0).sum()

    def _losses(self, gained: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return (P,) the loss of each pair. `gained`: (P, 2) log-probabilities, less the reference's where there is
        one; `mean`: the same per token."""
        smoothing = self.label_smoothing
        ahead = gained[:, 0] - gained[:, 1]
        mean_ahead = mean[:, 0] - mean[:, 1]
        match self.kind:
            case "dpo":
                logits = self.beta * ahead
                return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)
            case "ipo":
                return (mean_ahead - 1 / (2 * self.beta)) ** 2
            case "hinge":
                return F.relu(1 - self.beta * ahead)
            case "simpo":
                return -F.logsigmoid(self.beta * mean_ahead - self.gamma)
        # orpo: log odds(p) = log p - log(1 - p); 1 - p without cancellation where p is small or near 1
        log_odds = mean - torch.log(-torch.expm1(mean.clamp(max=-1e-7)))
        return -mean[:, 0] - self.beta * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])
