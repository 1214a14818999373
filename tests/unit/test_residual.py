"""The residual stream in bf16 where weights are in fp32."""

import pytest
import torch
from helpers import tiny_model

from zerofit.model.compilation import blocks_of, round_embeddings


def entering(model, dtype):
    """The dtypes in which hidden states enter the blocks, under autocast in a dtype."""
    seen = []
    for block in blocks_of(model):
        block.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((args or [*kwargs.values()])[0].dtype), with_kwargs=True
        )
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        model(input_ids=torch.arange(48).reshape(2, 24)).logits.float().sum().backward()
    return set(seen)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_it_is_in_bf16_under_autocast_alone(family):
    assert entering(tiny_model(family), torch.bfloat16) == {torch.float32}
    for dtype, expected in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (None, torch.float32)):
        model = tiny_model(family)
        round_embeddings(model)
        assert entering(model, dtype) == {expected}
        gradients = {each.grad.dtype for each in model.parameters() if each.grad is not None}
        assert gradients == {torch.float32}
