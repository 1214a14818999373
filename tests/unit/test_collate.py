"""Micro-batches of rows that differ in length: padding, masks, fillers, and what is counted."""

import numpy as np
import pytest
import torch
from transformers import BloomConfig, LlamaConfig

from zerofit.data.collate import (
    ExampleCollator,
    multiple_for,
    round_up,
)
from zerofit.data.order import FILLER
from zerofit.model.loss import loss_of_examples


def example(length: int, label) -> dict[str, np.ndarray]:
    ids = np.arange(1, length + 1)
    return {"input_ids": ids, "token_type_ids": ids % 2, "label": label}


@pytest.mark.parametrize(("positions", "multiple"), [(None, 64), (1024, 64), (1000, 8), (50, 2), (33, 1)])
def test_no_row_is_padded_beyond_the_model_s_positions(positions, multiple):
    config = LlamaConfig(max_position_embeddings=positions) if positions else BloomConfig()
    assert multiple_for(torch.device("cuda"), config) == multiple
    assert multiple_for(torch.device("cpu"), config) == 1
    lengths = np.arange(1, (positions or 4096) + 1)
    assert round_up(lengths, multiple).max() == (positions or 4096)


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_the_loss_of_filled_up_examples_is_the_loss_of_the_others(kind):
    """Value and gradient; a micro-batch of fillers alone gives zeros and no nan."""
    logits = torch.randn(3, 2 if kind is np.int64 else 1, generator=torch.Generator().manual_seed(0))
    rows = [(example(3, kind(1)), 0), (example(4, kind(0)), 1), (example(4, kind(0)), FILLER)]
    collate = ExampleCollator({"input_ids": 90})
    whole, part = logits.clone().requires_grad_(), logits[:2].clone().requires_grad_()
    loss, expected = loss_of_examples(whole, collate(rows).labels), loss_of_examples(part, collate(rows[:2]).labels)
    torch.testing.assert_close(loss, expected)
    own = torch.nn.functional.cross_entropy if kind is np.int64 else torch.nn.functional.mse_loss
    labels = collate(rows[:2]).labels
    mean = own(logits[:2] if kind is np.int64 else logits[:2, 0], labels)
    torch.testing.assert_close(expected / 2, mean)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(whole.grad[:2], part.grad)
    assert whole.grad[2].abs().max() == 0
    nothing = logits.clone().requires_grad_()
    loss = loss_of_examples(nothing, collate([(sample, FILLER) for sample, _ in rows]).labels)
    loss.backward()
    assert loss.item() == 0.0
    assert nothing.grad.abs().max() == 0
