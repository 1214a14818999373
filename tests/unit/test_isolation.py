"""Packed documents do not see each other: change document A and watch the logits of document B."""

import pytest
import torch
from datasets import Dataset
from helpers import TINY, tiny_model

from zerofit.data.collate import CausalCollator
from zerofit.data.pack import Documents, PackedBlocks

A, OTHER, B = [5, 6, 7, 8, 9], [15, 16, 17, 18, 19], [25, 26, 27]
SDPA_AND_EAGER = [(family, attention) for family in TINY for attention in ("sdpa", "eager")]


def logits_of_b(model, first: list[int], batch_size: int, boundaries: bool) -> torch.Tensor:
    documents = Documents(Dataset.from_dict({"input_ids": [first, B] * batch_size}))
    blocks = PackedBlocks(documents, 8, boundaries, filler=0)
    batch = CausalCollator(pad_id=0)([(blocks[index], index) for index in range(batch_size)])
    inputs = {name: tensor for name, tensor in batch.inputs.items() if name != "labels"}
    with torch.no_grad():
        logits = model(**inputs).logits
    return logits.reshape(batch_size, 8, -1)[:, len(first) :]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize(("family", "attention"), SDPA_AND_EAGER)
def test_documents_stay_apart(family, attention, batch_size):
    model = tiny_model(family, attention)
    with_a, with_other = (logits_of_b(model, first, batch_size, boundaries=True) for first in (A, OTHER))
    torch.testing.assert_close(with_a, with_other, rtol=0, atol=1e-6)
    with torch.no_grad():
        alone = model(input_ids=torch.tensor([B])).logits
    torch.testing.assert_close(with_a[:1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "attention"), SDPA_AND_EAGER)
def test_plain_concatenation_does_let_them_see_each_other(family, attention):
    model = tiny_model(family, attention)
    with_a, with_other = (logits_of_b(model, first, 2, boundaries=False) for first in (A, OTHER))
    assert (with_a - with_other).abs().max() > 1e-3
