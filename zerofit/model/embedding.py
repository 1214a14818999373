"""Embeddings of texts (the mean over a text's tokens, of length 1), and their contrastive loss within groups of pairs.

A group is one sample: its anchors are compared with its own candidates alone. So the loss does not depend on
micro-batches or on the number of processes, and no ranks exchange embeddings.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModel

from zerofit.model.chunked_loss import IGNORE
from zerofit.recipe.errors import UserError

POSITIVE, NEGATIVE = 1, 0  # what a candidate is to an anchor; IGNORE: neither


def embed(model, inputs: dict[str, Any]) -> torch.Tensor:
    """(..., H) fp32 of length 1, of a model without a head: the mean of its last hidden states over the attention
    mask. Inputs are (..., T)."""
    shape = inputs["attention_mask"].shape
    hidden = model(**{name: tensor.flatten(0, -2) for name, tensor in inputs.items()}).last_hidden_state.float()
    seen = inputs["attention_mask"].flatten(0, -2)[:, :, None]
    mean = (hidden * seen).sum(dim=1) / seen.sum(dim=1)
    return F.normalize(mean, dim=-1).view(*shape[:-1], -1)


def contrastive_loss(embeddings: torch.Tensor, relations: torch.Tensor, temperature: float) -> torch.Tensor:
    """The cross entropy of each anchor's positive among its candidates, by cosine / temperature, summed over anchors
    (InfoNCE, van den Oord et al. 2018; MultipleNegativesRankingLoss of sentence-transformers, scale 1 / temperature).

    Shapes: embeddings (B, N + C, H), a group's N anchors and then its C candidates; relations (B, N, C), POSITIVE once
    for each anchor that counts.
    """
    num_anchors = relations.shape[1]
    anchors, candidates = embeddings[:, :num_anchors], embeddings[:, num_anchors:]
    logits = anchors @ candidates.transpose(1, 2) / temperature  # (B, N, C)
    logits = logits.masked_fill(relations == IGNORE, torch.finfo(logits.dtype).min)
    return -logits.log_softmax(dim=-1).masked_fill(relations != POSITIVE, 0).sum()


class AutoBody(AutoModel):
    """A model without a head and, where its family allows that, without the pooling layer that classifiers use."""

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        return super().from_config(config, **_without_pooling(config), **kwargs)

    @classmethod
    def from_pretrained(cls, name: str, *, config: Any, **kwargs: Any) -> Any:
        return super().from_pretrained(name, config=config, **_without_pooling(config), **kwargs)


def check_body(config: Any) -> None:
    """Raises UserError for a model that reads two texts at a time."""
    if config.is_encoder_decoder:
        raise UserError(
            f"the records are pairs of texts, for embeddings: a {config.model_type} is an encoder-decoder. Name an "
            "encoder or a decoder"
        )


def _without_pooling(config: Any) -> dict[str, bool]:
    model_class = AutoModel._model_mapping.get(type(config), None)
    takes = model_class is not None and "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    return {"add_pooling_layer": False} if takes else {}
