"""How large the buckets are in which gradients go round."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerofit.strategy.deepspeed_config import fill_bucket_size


def gpt2(**sizes) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))


def settled(model, zero: dict):
    fill_bucket_size(zero, model)
    return zero.get("reduce_bucket_size")


def messages(model, bucket: int) -> int:
    """How many reductions DeepSpeed makes (stage_1_and_2.py: `reduce_independent_p_g_buckets_and_remove_grads`)."""
    count, elements = 0, 0
    for parameter in reversed(list(model.parameters())):
        if elements + parameter.numel() > bucket and elements:
            count, elements = count + 1, 0
        elements += parameter.numel()
    return count + 1


def test_a_small_model_sends_some_twenty_messages_and_not_hundreds():
    model = gpt2(n_embd=1024, n_layer=24, n_head=16)
    trained = sum(parameter.numel() for parameter in model.parameters())
    bucket = settled(model, {"stage": 2, "reduce_bucket_size": "auto"})
    assert messages(model, 1024**2) > 150, "accelerate's own choice"
    assert messages(model, bucket) < 25
    assert bucket < trained / 15, "two buffers of it are held"
    assert settled(model, {"stage": 2}) == bucket


@pytest.mark.parametrize("zero", [{"stage": 2, "reduce_bucket_size": 500}, {"stage": 3, "reduce_bucket_size": "auto"}])
def test_what_a_user_states_stays_and_zero_3_is_left_alone(zero):
    assert settled(gpt2(n_embd=32, n_layer=2, n_head=2), dict(zero)) == zero["reduce_bucket_size"]
