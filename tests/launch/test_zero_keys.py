"""DeepSpeed's keys that the shipped JSONs do not have: each trains as one process does, or is refused before training.

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
import yaml
from helpers import ROOT, check_alike, completed, cut_after, launched, metrics, recipe_of, refusal

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
ELSEWHERE = Tried(None)  # where it is tried; of what does not compute, nowhere
ZERO_KEYS = {  # of DeepSpeed's model of zero_optimization
    "stage": ELSEWHERE,  # test_agreement.py
    "reduce_bucket_size": Tried(1000, (1, 2, 3)),
    "contiguous_gradients": Tried(False, (1, 2, 3)),
    "reduce_scatter": Tried(False, (1, 2, 3)),
    "use_multi_rank_bucket_allreduce": Tried(False, (1, 2)),
    "allgather_partitions": Tried(False, (1, 2)),
    "allgather_bucket_size": Tried(1000, (1, 2)),
    "overlap_comm": Tried(False, (1, 2, 3)),
    "compute_grad_norm": Tried(False, said="without the gradient's norm"),
    "load_from_fp32_weights": Tried(False, (2, 3)),
    "elastic_checkpoint": Tried(True, (1, 2, 3)),
    "ignore_unused_parameters": Tried(False, (1, 2)),
    "legacy_stage1": Tried(True, said="DeepSpeed has removed it"),
    "round_robin_gradients": Tried(True, (1, 2), "round_robin_gradients is left out"),
    "parameter_alignment": Tried(True, (1, 2)),
    "cpu_offload": Tried(True, (2, 3), "read as offload_optimizer"),
    "cpu_offload_param": Tried(True, (3,), "read as offload_param"),
    "cpu_offload_use_pin_memory": Tried(False, (2,), beside=ON_CPU),
    "zenflow": Tried({"topk_ratio": 0.1, "overlap_step": False}, said="zenflow = ", beside=ON_CPU),
    "sub_group_size": Tried(20000, (3,)),
    "prefetch_bucket_size": Tried(100, (3,)),
    "param_persistence_threshold": Tried(0, (3,)),
    "model_persistence_threshold": Tried(0, (3,)),
    "max_live_parameters": Tried(0, (3,)),
    "max_reuse_distance": Tried(0, (3,)),
    "gather_16bit_weights_on_model_save": Tried(False, (3,)),
    "stage3_gather_fp16_weights_on_model_save": Tried(True, (3,), "is deprecated"),
    "module_granularity_threshold": Tried(1000, (3,)),
    "use_all_reduce_for_fetch_params": Tried(True, (3,)),
    "allgather_sequential": Tried(True, (3,)),
    "zero_hpz_partition_size": Tried(2, (3,)),
    "zero_quantized_weights": Tried(True, said="rounds to 8 bits"),
    "zero_quantized_nontrainable_weights": Tried(True, said="rounds to 8 bits"),
    "zero_quantized_gradients": Tried(True, said="rounds to 8 bits"),
    "memory_efficient_linear": Tried(False, (3,)),
    "pipeline_loading_checkpoint": Tried(True, (3,)),
    "override_module_apply": Tried(False, (3,)),
    "log_trace_cache_warnings": Tried(True, (3,)),
    "enable_sanity_checks": Tried(True, (3,)),
    "save_muon_momentum_buffer_in_memory": Tried(True, (3,)),
    "leaf_module": Tried({"names": ["self_attn"]}, (3,)),
    "offload_optimizer": Tried({"device": "cpu"}, (1, 2, 3)),
    "offload_optimizer.ratio": Tried(0.5, said="ratio = 0.5", beside=ON_CPU),
    "offload_optimizer.super_offload": Tried(True, said="super_offload = true", beside=ON_CPU),
    "offload_optimizer.cpuadam_cores_perc": Tried(0.5, (3,), beside=ON_CPU),
    "offload_optimizer.pin_memory": Tried(False, (2,), beside=ON_CPU),
    **{f"offload_optimizer.{key}": ELSEWHERE  # test_disk.py
       for key in ("device", "nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init")},
    "offload_param": Tried({"device": "cpu"}, (3,)),
    "offload_param.max_in_cpu": Tried(1000, (3,), beside={"zero_optimization.offload_param": {"device": "cpu"}}),
    **{f"offload_param.{key}": ELSEWHERE  # of the disk, where weights may not be
       for key in ("device", "nvme_path", "buffer_count", "buffer_size", "pin_memory")},
}  # fmt: skip
TOP_KEYS = {  # of the JSON itself
    "bf16.bf16_master_weights_and_grads": Tried(True, said="would not keep fp32"),
    "bf16.bf16_optimizer_states": Tried(True, said="would not keep fp32"),
    "communication_data_type": Tried("bf16", said="it rounds gradients"),
    "compile": Tried({"deepcompile": True}, said="--torch_compile"),
    "data_types": Tried({"grad_accum_dtype": "bf16"}, said="it rounds gradients"),
    "fp16.fp16_master_weights_and_grads": Tried(True, said="would not keep fp32"),
    "fp32_allreduce": Tried(True, (2,)),
    "gradient_predivide_factor": Tried(2.0, said="scales gradients"),
    "load_universal_checkpoint": Tried(True, (2,)),
    "optimizer.params.adam_w_mode": Tried(False, said="the optimizer is AdamW"),
    "optimizer.params.fp32_optimizer_states": Tried(False, said="would not keep fp32"),
    "prescale_gradients": Tried(True, said="scales gradients"),
    "seq_parallel_communication_data_type": Tried("bf16", said="it rounds gradients"),
    "torch_autocast": Tried({"enabled": True, "dtype": "bfloat16"}, said="--precision bf16"),
    "weight_quantization": Tried({"quantized_initialization": {"num_bits": 8}}, said="rounds to 8 bits"),
    "zenflow": Tried({"topk_ratio": 0.1}, said="zenflow = "),
}


def tried(keys: dict[str, Tried], prefix: str = "") -> list:
    """(key, stage, what is tried) of those that train."""
    return [
        pytest.param(prefix + key, stage, each, id=f"{key}-{stage}")
        for key, each in keys.items()
        for stage in each.stages
    ]


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
    folder.mkdir(exist_ok=True)
    (folder / "mine.json").write_text(json.dumps(config))
    settings = yaml.safe_load((ROOT / "accelerate_configs" / f"zero{stage}.yaml").read_text())
    settings["deepspeed_config"]["deepspeed_config_file"] = str(folder / "mine.json")
    (folder / "mine.yaml").write_text(yaml.safe_dump(settings))
    return str(folder / "mine.yaml")


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
@pytest.mark.parametrize(("key", "stage", "each"), [*tried(ZERO_KEYS, "zero_optimization."), *tried(TOP_KEYS)])
def test_a_run_goes_on_under_it_and_after_it(launched_once, cache, tmp_path, key, stage, each):
    check_key(launched_once, cache, tmp_path, key, stage, each)


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 1])
@pytest.mark.parametrize("key", ["round_robin_gradients", "parameter_alignment"])
def test_muon_finds_its_matrices_in_another_order(launched_once, cache, tmp_path, key, stage):
    each = Tried(True, flags=("--optim", "muon"))
    check_key(launched_once, cache, tmp_path, f"zero_optimization.{key}", stage, each)


UNMENDED = """
import runpy, sys
from zerofit.strategy import deepspeed_json
deepspeed_json.ROUND_ROBIN = "another"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--optim", "muon")])
def test_another_order_than_the_optimizer_says_ends_the_run_before_it_trains(cache, tmp_path, flags):
    """As if round_robin_gradients were not left out: at the start, and where a run goes on."""
    (tmp_path / "unmended.py").write_text(UNMENDED)
    strategy = pair(tmp_path, "zero_optimization.round_robin_gradients", 2, Tried(True))
    done = launched(tmp_path / "run", *RUN, *flags, "--cache_dir", cache, strategy=strategy, processes=2,
                    through=(tmp_path / "unmended.py",))  # fmt: skip
    assert done.returncode == 2, done.stderr[-2000:]
    assert "mine.json: what the optimizer keeps for model." in done.stderr
    recorded = tmp_path / "run" / "metrics.jsonl"
    assert not recorded.exists() or not recorded.read_text(), "nothing was trained"


REFUSED = [
    *((f"zero_optimization.{key}", each) for key, each in ZERO_KEYS.items() if each.said and not each.stages),
    *((key, each) for key, each in TOP_KEYS.items() if each.said and not each.stages),
]


@pytest.mark.parametrize(("key", "each"), REFUSED, ids=[key for key, _ in REFUSED])
def test_it_is_refused_before_training(monkeypatch, tmp_path, key, each):
    stage = 3 if key.endswith("offload_optimizer.ratio") else 2
    pair(tmp_path, key, stage, each)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "mine.json"))
    message = refusal(read_strategy, recipe_of())
    assert each.said in message
    assert key.split(".")[-1] in message
    assert message.count("\n") < 2, message


def test_the_tables_know_every_key():
    """A new version of DeepSpeed may have new ones: try them here."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    sections = {"offload_optimizer.": DeepSpeedZeroOffloadOptimizerConfig,
                "offload_param.": DeepSpeedZeroOffloadParamConfig, "": DeepSpeedZeroConfig}  # fmt: skip
    known = {f"{prefix}{name}" for prefix, model in sections.items() for name in model.model_fields}
    assert known == set(ZERO_KEYS)
    assert len(tried(ZERO_KEYS)) > 50
    assert len(REFUSED) > 8
