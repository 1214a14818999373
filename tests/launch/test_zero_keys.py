"""DeepSpeed's keys that the shipped JSONs do not have: they train as one process does, or are refused before training.

Each is tried in one go: what one process has left goes on under the key with two processes, which save, and what these
have saved goes on in one process again.
"""

import copy
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, check_alike, completed, cut_after, metrics, pair_with, recipe_of, refusal

from zerofit.strategy.read import read_strategy

RUN = ["--model_type", "llama", "--config_overrides",
       "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=160",
       "--train_file", ROOT / "docs" / "fine-tune.md", "--document_separator", "line",
       "--train_tokenizer_vocab_size", "301", "--block_size", "64", "--packing", "documents",
       "--global_batch_size", "8", "--per_device_train_batch_size", "2", "--max_train_steps", "6", "--save_steps", "2",
       "--learning_rate", "1e-3", "--precision", "fp32", "--sample_tokens", "0"]  # fmt: skip


@dataclass(frozen=True)
class Tried:
    """A value of a key, and the stages that train with it.

    Attributes:
        said: the words of a note about it, or of its refusal, where no stage trains with it.
        beside: other keys of the JSON, which it needs.
        flags: of the recipe.
    """

    value: Any
    stages: tuple[int, ...] = ()
    said: str = ""
    beside: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


ON_CPU = {"zero_optimization.offload_optimizer": {"device": "cpu"}}
TRAINED = {  # one of each kind: sizes of buckets and of partitions, ways to exchange, orders of gradients, old names
    "zero_optimization.reduce_bucket_size": Tried(1000, (1, 2, 3)),
    "zero_optimization.contiguous_gradients": Tried(False, (1, 2, 3)),
    "zero_optimization.reduce_scatter": Tried(False, (1, 2, 3)),
    "zero_optimization.use_multi_rank_bucket_allreduce": Tried(False, (1, 2)),
    "zero_optimization.allgather_partitions": Tried(False, (2,)),
    "zero_optimization.overlap_comm": Tried(False, (1, 2, 3)),
    "zero_optimization.load_from_fp32_weights": Tried(False, (2, 3)),
    "zero_optimization.elastic_checkpoint": Tried(True, (1, 2, 3)),
    "zero_optimization.ignore_unused_parameters": Tried(False, (2,)),
    "zero_optimization.round_robin_gradients": Tried(True, (1, 2), "round_robin_gradients is left out"),
    "zero_optimization.parameter_alignment": Tried(True, (1, 2)),
    "zero_optimization.cpu_offload": Tried(True, (2, 3), "read as offload_optimizer"),
    "zero_optimization.cpu_offload_param": Tried(True, (3,), "read as offload_param"),
    "zero_optimization.sub_group_size": Tried(20000, (3,)),
    "zero_optimization.param_persistence_threshold": Tried(0, (3,)),
    "zero_optimization.max_live_parameters": Tried(0, (3,)),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Tried(True, (3,), "is deprecated"),
    "zero_optimization.module_granularity_threshold": Tried(1000, (3,)),
    "zero_optimization.use_all_reduce_for_fetch_params": Tried(True, (3,)),
    "zero_optimization.zero_hpz_partition_size": Tried(2, (3,)),
    "zero_optimization.memory_efficient_linear": Tried(False, (3,)),
    "zero_optimization.leaf_module": Tried({"names": ["self_attn"]}, (3,)),
    "zero_optimization.offload_param.max_in_cpu": Tried(
        1000, (3,), beside={"zero_optimization.offload_param": {"device": "cpu"}}
    ),
    "fp32_allreduce": Tried(True, (2,)),
    "load_universal_checkpoint": Tried(True, (2,)),
}
REFUSED = {
    "zero_optimization.compute_grad_norm": Tried(False, said="without the gradient's norm"),
    "zero_optimization.legacy_stage1": Tried(True, said="DeepSpeed has removed it"),
    "zero_optimization.zero_quantized_weights": Tried(True, said="rounds to 8 bits"),
    "zero_optimization.offload_optimizer.ratio": Tried(0.5, said="ratio = 0.5", beside=ON_CPU),
    "zero_optimization.offload_optimizer.super_offload": Tried(True, said="super_offload = true", beside=ON_CPU),
    "bf16.bf16_master_weights_and_grads": Tried(True, said="would not keep fp32"),
    "communication_data_type": Tried("bf16", said="it rounds gradients"),
    "compile": Tried({"deepcompile": True}, said="--torch_compile"),
    "gradient_predivide_factor": Tried(2.0, said="scales gradients"),
    "optimizer.params.adam_w_mode": Tried(False, said="the optimizer is AdamW"),
    "torch_autocast": Tried({"enabled": True, "dtype": "bfloat16"}, said="--precision bf16"),
    "zenflow": Tried({"topk_ratio": 0.1}, said="zenflow = "),
}


def pair(folder: Path, key: str, stage: int, each: Tried) -> str:
    """A pair of which the JSON is the shipped one of a stage, with this key; its YAML."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text())
    for name, value in {**each.beside, key: each.value}.items():
        *parents, last = name.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        if parents == ["zero_optimization"]:
            last = DeepSpeedZeroConfig.model_fields[last].alias or last
        node[last] = copy.deepcopy(value)
    return pair_with(folder, f"zero{stage}", config)


def check_key(launched_once, cache: str, folder: Path, key: str, stage: int, each: Tried) -> None:
    flags, output = [*RUN, *each.flags, "--cache_dir", cache], folder / "run"
    whole = launched_once("alone" + "".join(each.flags), *flags, strategy="single")
    shutil.copytree(whole, output, symlinks=True)
    for start, strategy, processes in ((2, pair(folder / "pair", key, stage, each), 2), (4, "single", 1)):
        cut_after(output, start)
        done = completed(output, *flags, strategy=strategy, processes=processes)
        assert f"after update {start}, written under" in done.stdout
        assert processes == 1 or each.said in done.stdout
        check_alike(metrics(output), metrics(whole))


@pytest.mark.long
@pytest.mark.parametrize(("key", "stage"), [(key, stage) for key, each in TRAINED.items() for stage in each.stages])
def test_a_run_goes_on_under_it_and_after_it(launched_once, cache, tmp_path, key, stage):
    check_key(launched_once, cache, tmp_path, key, stage, TRAINED[key])


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 1])
@pytest.mark.parametrize("key", ["round_robin_gradients", "parameter_alignment"])
def test_muon_finds_its_matrices_in_another_order(launched_once, cache, tmp_path, key, stage):
    each = Tried(True, flags=("--optim", "muon"))
    check_key(launched_once, cache, tmp_path, f"zero_optimization.{key}", stage, each)


@pytest.mark.parametrize(("key", "each"), REFUSED.items(), ids=REFUSED)
def test_it_is_refused_before_training(monkeypatch, tmp_path, key, each):
    stage = 3 if key.endswith("offload_optimizer.ratio") else 2
    pair(tmp_path, key, stage, each)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "mine.json"))
    message = refusal(read_strategy, recipe_of())
    assert each.said in message
    assert key.split(".")[-1] in message
    assert message.count("\n") < 2, message
