"""Micro-batches of rows that differ in length: padding, masks, fillers, and what is counted."""

import numpy as np
import pytest
import torch
from transformers import BloomConfig, LlamaConfig

from zerofit.data.collate import (
    ExampleCollator,
    PairCollator,
    multiple_for,
    round_up,
)
from zerofit.data.order import FILLER
from zerofit.model.loss import IGNORE, loss_of_examples

PAD, TYPE = 90, 7


def example(length: int, label) -> dict[str, np.ndarray]:
    ids = np.arange(1, length + 1)
    return {"input_ids": ids, "token_type_ids": ids % 2, "label": label}


def pair(source: int, target: int) -> dict[str, np.ndarray]:
    return {"input_ids": np.arange(1, source + 1), "labels": np.arange(11, target + 11)}


def padded(values: np.ndarray, width: int, filler: int) -> list[int]:
    return [*values.tolist(), *[filler] * (width - len(values))]


def test_long_rows_share_widths_on_a_gpu_and_short_ones_are_not_padded_to_64():
    lengths = np.arange(1, 2049)
    widths = round_up(lengths, 64)
    assert round_up(np.array([5, 120, 129, 257, 513, 2000]), 64).tolist() == [8, 120, 144, 288, 576, 2048]
    assert [round_up(int(each), 64) for each in lengths[::97]] == widths[::97].tolist()
    assert len(set(widths.tolist())) == 16 + 8 + 8 + 24  # of each of 2,048 lengths; by 8 there are 256
    assert ((widths >= lengths) & (widths - lengths < np.maximum(8, lengths / 8 + 1))).all()
    assert (round_up(lengths, 1) == lengths).all()


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
    collate = ExampleCollator({"input_ids": PAD})
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


@pytest.mark.parametrize(
    ("widths", "multiple", "expected"), [(None, 1, (5, 4)), (None, 8, (8, 8)), ((16, 6), 8, (16, 6))]
)
def test_pairs(widths, multiple, expected):
    samples = [(pair(3, 4), 5), (pair(5, 1), 6), (pair(2, 3), FILLER)]
    batch = PairCollator(PAD, widths, multiple)(samples)
    assert batch.inputs.keys() == {"input_ids", "attention_mask", "labels"}
    assert (batch.inputs["labels"][2] == IGNORE).all(), "what fills a batch is not trained on"
    for row, (sample, _) in enumerate(samples[:2]):
        length = len(sample["input_ids"])
        assert batch.inputs["input_ids"][row].tolist() == padded(sample["input_ids"], expected[0], PAD)
        assert batch.inputs["attention_mask"][row].tolist() == [1] * length + [0] * (expected[0] - length)
        assert batch.inputs["labels"][row].tolist() == padded(sample["labels"], expected[1], IGNORE)
    assert (batch.num_targets, batch.num_tokens, batch.num_positions) == (5, 8 + 5, 3 * sum(expected))
    assert batch.indices == [5, 6, FILLER]
    assert batch.labels is None  # the loss is the model's own
