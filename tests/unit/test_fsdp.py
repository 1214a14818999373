"""FSDP2: the settings that a run honours, and the rows that a rank keeps. That it trains: tests/launch."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from helpers import check_refusal, forked, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from zerofit.model.load import load_model
from zerofit.model.lora import add_adapter
from zerofit.recipe import ClmRecipe
from zerofit.strategy import launch as launch_module
from zerofit.strategy.batches import BatchSizes
from zerofit.strategy.strategy import Strategy

OWN = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}


@pytest.fixture
def read(under_torchrun):
    return lambda *words, **how: under_torchrun(*words, **how)[1]


def test_what_it_is(read):
    strategy = read(OWN)
    assert (strategy.fully_shards, strategy.zero_stage, strategy.reshards) == (True, 3, True)
    assert strategy.name == "fsdp2"
    keeping = read({**OWN, "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}})
    assert not keeping.reshards
    dividing = read({**OWN, "fsdp_config": {"fsdp_version": 2, "fsdp_ignored_modules": "experts"}})
    assert (dividing.name, dividing.divides_experts, strategy.divides_experts) == ("ep", True, False)
    twice = read({**OWN, "parallelism_config": {"parallelism_config_dp_replicate_size": 2}}, processes=4)
    assert (twice.name, twice.layout.dp_replicate, twice.layout.shard_size) == ("hsdp", 2, 2)
    once = read({**OWN, "fsdp_config": {"fsdp_version": 2, "fsdp_sync_each_batch": False}})
    assert (strategy.syncs_each_batch, once.syncs_each_batch) == (True, False)
    near = {"fsdp_version": 2, "fsdp_reshard_after_forward": 2, "fsdp_reduce_dtype": "bf16"}
    half = read({**OWN, "fsdp_config": near}, processes=4)
    assert (half.reshards, half.reduces_in_half, strategy.reduces_in_half) == (2, True, False)
    assert half.reshards is not True
    written = {"fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    assert "the blocks of the model are wrapped" in read({**OWN, "fsdp_config": near | written}, processes=4).notes[0]
    alone = read(OWN, processes=1)
    assert not alone.fully_shards
    assert "nothing is sharded" in alone.notes[0]


@pytest.mark.parametrize(("content", "flags", "said"), [
    ({"fsdp_config": {}}, [], "fsdp_version = 1 is not supported. Write 2"),
    ({"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}, [], "Write false, or use another strategy"),
    ({"fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}}, [],
     "fsdp_auto_wrap_policy = size_based_wrap is not supported. Write transformer_based_wrap"),
    ({"fsdp_config": {"fsdp_version": 2, "fsdp_reduce_dtype": "fp16"}}, [], "Write fp32 or bf16"),
    ({"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}, [], "accelerate to-fsdp2 --config_file FILE"),
    ({"fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}, [], "--gradient_checkpointing"),
    ({"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "x"}}, [], "true or false or a number"),
    ({"parallelism_config": {"dp_replicate_size": 2}}, [], "Did you mean parallelism_config_dp_replicate_size?"),
    ({"parallelism_config": {"parallelism_config_dp_shard_size": 4}}, [], "dp_shard_size = 4, and 2 processes"),
    ({"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": 3}}, [],
     "fsdp_reshard_after_forward = 3 is not a part of the 2 processes that share weights. Write true, false"),
    ({"parallelism_config": {"parallelism_config_tp_size": 2}}, [], "parallelism_config_tp_size = 2 is not"),
    ({"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}, [], "Use --num_processes 4"),
    ({}, ["--precision", "fp16"], "FSDP does not go together with precision = fp16. Use --precision bf16"),
    ({}, ["--torch_compile", "model"], "torch_compile = model (--torch_compile). Use --torch_compile blocks"),
])  # fmt: skip
def test_what_it_refuses(read, content, flags, said):
    check_refusal([said, "own.yaml"], read, {**OWN, **content}, *flags)


def adapted(base: str, world_size: int, rank: int = 0) -> dict:
    """What a rank holds of a stored model and its adapter before it is trained."""
    recipe = ClmRecipe(model_name_or_path=base, lora=True)
    launch = launch_module.Launch(world_size, rank, deepspeed=False, precision=None, json_path=None, config_file=None)
    settings = {"fsdp_version": "2"} if world_size > 1 else None
    strategy = Strategy(launch, BatchSizes(2, 1, world_size), "fp32", None, "a test", fsdp=settings)
    model = load_model(AutoModelForCausalLM, AutoConfig.from_pretrained(base), recipe, strategy)
    add_adapter(model, recipe, "clm", strategy)
    parameters = dict(model.named_parameters())
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for p in parameters.values()
        if not p.requires_grad
    }
    trained = {name: p.tolist() for name, p in parameters.items() if p.requires_grad}
    return {"frozen": sum(storages.values()), "trained": trained}


def test_under_an_adapter_a_rank_holds_its_rows_only(tmp_path):
    base = tmp_path / "base"
    tiny_model("gpt2").save_pretrained(base)
    forked(__file__, base)
    one, *ranks = adapted(str(base), 1), *(json.loads((base / f"{rank}.rank").read_text()) for rank in range(2))
    assert one["frozen"] > 10_000
    assert sum(rank["frozen"] for rank in ranks) == one["frozen"]
    for rank in ranks:
        assert rank["frozen"] < 0.52 * one["frozen"]
        assert rank["trained"] == one["trained"], "drawn as by one process"


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    own = torch.distributed.get_rank()
    Path(sys.argv[1], f"{own}.rank").write_text(json.dumps(adapted(sys.argv[1], 2, own)))
    torch.distributed.barrier()
    os._exit(0)
