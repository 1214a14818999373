"""Packing: what lies in a block, what is trained on, and the counts in the table; micro-batches of rows that
differ in length."""

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value
from transformers import BloomConfig, LlamaConfig

from zerofit.data.collate import CausalCollator, ExampleCollator, multiple_for, round_up
from zerofit.data.order import FILLER
from zerofit.data.pack import Documents, PackedBlocks, SeparateDocuments
from zerofit.model.loss import IGNORE, loss_of_examples

TEXTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11, 12, 13, 14, 15], [16, 17, 18]]  # 18 tokens
FLAT = np.concatenate([np.array(text) for text in TEXTS])


@pytest.fixture(params=[1, 2, 5])
def documents(request, tmp_path) -> Documents:
    """The same documents in Arrow files with different chunks."""
    features = Features({"input_ids": List(Value("int32"))})
    dataset = Dataset.from_dict({"input_ids": TEXTS}, features=features)
    return Documents(dataset.map(lambda row: row, batched=True, batch_size=request.param, features=features))


@pytest.mark.parametrize("size", [2, 4, 5, 7, 18, 32])
def test_blocks_with_boundaries(documents, size):
    blocks = PackedBlocks(documents, size, boundaries=True, filler=99)
    tokens = np.concatenate([block["input_ids"] for block in blocks_of(blocks)])
    assert tokens[:18].tolist() == FLAT.tolist()
    assert set(tokens[18:]) <= {99}
    starts = {0, 3, 5, 6, 15}
    for place in range(len(tokens)):
        block, offset = divmod(place, size)
        sample = blocks[block]
        begin = max(start for start in {*starts, block * size, 18} if start <= place)
        assert sample["position_ids"][offset] == place - max(begin, block * size), place
        trained = place < 18 and place not in starts
        assert sample["labels"][offset] == (tokens[place] if trained else IGNORE), place
    counted = sum(int((block["labels"][1:] != IGNORE).sum()) for block in blocks_of(blocks))
    assert blocks.stats.trained == counted
    assert blocks.stats.padding == pytest.approx((len(tokens) - 18) / len(tokens))
    assert blocks.stats.truncated == 0


def test_separate_documents_are_cut_and_padded(documents):
    samples = SeparateDocuments(documents, block_size=4)
    assert [len(sample["input_ids"]) for sample in blocks_of(samples)] == [3, 2, 1, 4, 3]
    assert samples.stats.truncated == 5
    assert samples.stats.trained == 2 + 1 + 0 + 3 + 2
    places = [(samples[index], FILLER if index == 1 else index) for index in range(5)]
    assert CausalCollator(pad_id=0)(places).inputs["input_ids"].shape == (5, 4)
    batch = CausalCollator(pad_id=0, multiple=8)(places)
    assert batch.inputs["input_ids"].shape == (5, 8)
    assert batch.inputs["attention_mask"].sum(1).tolist() == [3, 2, 1, 4, 3]
    assert (batch.inputs["labels"][1] == IGNORE).all(), "a sample that does not count is not trained on"
    assert batch.num_targets == 2 + 0 + 3 + 2
    assert batch.num_tokens == 3 + 1 + 4 + 3
    assert batch.num_positions == 5 * 8
    assert batch.indices == [0, FILLER, 2, 3, 4]


def blocks_of(samples) -> list[dict]:
    assert len(samples) > 0
    return [samples[index] for index in range(len(samples))]


@pytest.mark.parametrize("size", [2, 4, 5, 7, 18])
def test_concatenation_is_group_texts(documents, size):
    def group_texts(ids: list[int]) -> list[list[int]]:  # transformers, examples/pytorch/language-modeling/run_clm.py
        total = (len(ids) // size) * size
        return [ids[i : i + size] for i in range(0, total, size)]

    blocks = PackedBlocks(documents, size, boundaries=False, filler=99)
    assert [block["input_ids"].tolist() for block in blocks_of(blocks)] == group_texts(FLAT.tolist())
    for block in blocks_of(blocks):
        assert block["labels"].tolist() == block["input_ids"].tolist()
        assert "position_ids" not in block
    assert blocks.stats.trained == len(blocks) * (size - 1)
    assert blocks.stats.truncated == 18 % size


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
