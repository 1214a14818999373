"""`zerofit plan`: experts that ranks divide. They are not gathered; tokens travel to them, evenly routed."""

import json

import pytest
import torch
from helpers import tiny_model

from zerofit.estimate.operations import ALL_TO_ALL, MATRIX
from zerofit.estimate.planned_model import make_model
from zerofit.estimate.planned_rows import Rows
from zerofit.estimate.traced_shares import divide_experts
from zerofit.estimate.traced_steps import TracedStep
from zerofit.estimate.tracer import Tracer, TraceSettings
from zerofit.tools.plan.plan import main

LAYERS, CHOICES, HIDDEN = 4, 2 * 16 * 3, 32  # of the model, and of two rows of 16 tokens


def traced(config, experts: int = 0, dtype: torch.dtype = torch.float32, autocast=None) -> list[TracedStep]:
    """The steps of two rows of 16 tokens through a mixture of experts."""
    settings = TraceSettings(dtype=dtype, autocast=autocast, on_gpu=False, loss="full", experts=experts)
    rows = Rows("clm", 16, loss_kind="full")
    with torch.device("meta"):
        full = make_model(config, "clm", dtype, None, traced=False)

    def build(reduced):
        model = make_model(reduced, "clm", dtype, None, traced=True)
        divide_experts(model, experts, dtype)
        rows.install(model)
        return model

    return Tracer(config, full, build, rows, settings).steps(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_choice_travels_and_comes_back(dtype):
    """Of a mixture with four experts, three of them for each token."""
    shape = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = tiny_model("mixtral", **shape, num_hidden_layers=LAYERS, num_experts_per_tok=3, num_experts=4).config
    whole, divided = (traced(config, experts, dtype) for experts in (0, 2))

    def operations(passes: list[TracedStep], kind: str) -> list:
        return [one for step in passes for one in step.operations if one.kind == kind]

    assert not operations(whole, ALL_TO_ALL)
    sent = [one for one in operations(divided, ALL_TO_ALL) if one.bytes == CHOICES * HIDDEN * dtype.itemsize]
    counts = [one for one in operations(divided, ALL_TO_ALL) if one.bytes == 8 * 4]
    assert (len(sent), len(counts)) == (4 * LAYERS, LAYERS)
    assert len(operations(divided, ALL_TO_ALL)) == 5 * LAYERS
    assert all(one.half == (dtype != torch.float32) for one in sent)
    products = [sum(one.flops for one in operations(passes, MATRIX)) for passes in (whole, divided)]
    assert products[0] == products[1], "a rank gets as many choices as it sends"


PLAN = ["--task", "clm", "--model_type", "mixtral", "--block_size", "32", "--precision", "bf16", "--gpu",
             "a100-40gb", "--config_overrides", "hidden_size=32,num_hidden_layers=3,num_attention_heads=4,"
             "num_key_value_heads=2,intermediate_size=48,num_local_experts=4,vocab_size=64",
             "--batch_sizes", "2", "--strategies", "ep,fsdp2", "--json", "-"]  # fmt: skip


def test_a_plan_has_expert_parallelism(capfd):
    assert main([*PLAN, "--num_gpus", "2"]) == 0
    plan = json.loads(capfd.readouterr().out)
    ep, fsdp2 = (next(one for one in plan["predictions"] if one["strategy"] == name) for name in ("ep", "fsdp2"))
    assert ep["components"]["weights"] == fsdp2["components"]["weights"]
    assert ep["peak_allocated_bytes"] < fsdp2["peak_allocated_bytes"]
    assert ep["tokens_per_s"] > 0
