"""A strategy that the program's own command line names, as under torchrun."""

import os

import pytest
import yaml
from helpers import ROOT, check_refusal, launcher_variables, refusal

from zerofit.recipe import ClmRecipe, parse_recipe
from zerofit.strategy import launch as launch_module
from zerofit.strategy.launch import (
    check_launch,
    find_launch,
    find_strategies,
    fsdp_problems,
    launch_variables,
    read_fsdp,
)
from zerofit.strategy.read import read_strategy

YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml")) + sorted((ROOT / "tests/published").glob("zero*.yaml"))
GPT2 = ["--config_name", "gpt2", "--train_tokenizer_vocab_size", "400", "--train_file", "x.txt"]


@pytest.fixture
def torchrun(monkeypatch):
    """The environment of the first of two processes of torchrun."""
    monkeypatch.chdir(ROOT)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    monkeypatch.setattr(os, "environ", {**os.environ, **names})
    monkeypatch.setattr("zerofit.strategy.read.check_devices", lambda: None)
    return os.environ


def accelerate_launch(monkeypatch, *words: str) -> None:
    command = ["accelerate", "launch", *words, "train/clm.py"]
    monkeypatch.setattr(launch_module, "find_launcher", lambda: launch_module.Launcher(command, 0.0, False))


def recipe(*flags: str) -> ClmRecipe:
    return parse_recipe(ClmRecipe, [*GPT2, *flags])


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_the_variables_are_those_of_accelerate(path, monkeypatch):
    """What accelerate's own launcher would put into the environment, but for what has no effect here."""
    kind = yaml.safe_load(path.read_text())["distributed_type"]
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    theirs = launcher_variables(path)
    ours = launch_variables(yaml.safe_load(path.read_text()), str(path))
    without_effect = {"ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_CPU_AFFINITY"}
    theirs = {
        name: value
        for name, value in theirs.items()
        if name not in without_effect and not name.startswith("ACCELERATE_DYNAMO")
    }
    if kind == "DEEPSPEED":
        assert "ACCELERATE_USE_DEEPSPEED" in ours
        assert theirs == ours
    elif kind == "FSDP":
        content = yaml.safe_load(path.read_text())
        assert read_fsdp(ours, content) == read_fsdp(theirs, content)
        assert fsdp_problems(read_fsdp(ours, content), content, "") == []
        assert ours["ACCELERATE_MIXED_PRECISION"] == theirs["ACCELERATE_MIXED_PRECISION"] == "no"
    else:
        assert theirs["ACCELERATE_MIXED_PRECISION"] == ours["ACCELERATE_MIXED_PRECISION"] == "no"


@pytest.mark.parametrize(("strategy", "more", "why"), [
    ("tp", [], "tensor parallelism"), ("pp", [], "a pipeline"), ("ep", [], "experts that are divided"),
    ("zero2_offload", [], "offload"), ("zero3_offload", [], "offload"), ("zero2", ["--lora"], "lora"),
    ("ddp", ["--lora"], "lora"),
    *((strategy, ["--optim", "adafactor"], ":") for strategy in ("zero1", "zero3", "fsdp2", "tp", "pp", "sp")),
])  # fmt: skip
def test_where_it_would_be_another_optimizer_it_is_refused(torchrun, strategy, more, why):
    options = recipe("--optim", "muon", "--strategy", strategy, *more)
    check_refusal([f"optim = {options.optim}", why], read_strategy, options)


def test_a_mean_of_the_weights_is_refused_on_a_disk(torchrun):
    options = recipe("--ema_decay", "0.9", "--strategy", "zero3_offload_nvme")
    assert "does not go together with ema_decay" in refusal(read_strategy, options)


def test_one_process_without_a_launcher(torchrun):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del torchrun[name]
    assert read_strategy(recipe("--strategy", "zero3")).launch.world_size == 1
    assert torchrun["MASTER_PORT"].isdigit()


def test_the_same_under_accelerate_launch(torchrun, monkeypatch):
    """Named twice it is still one strategy; named by the program alone it is the program's."""
    accelerate_launch(monkeypatch, "--num_processes", "2")
    assert read_strategy(recipe("--strategy", "zero1")).name == "zero1"
    accelerate_launch(monkeypatch, "--config_file", "accelerate_configs/zero1.yaml")
    assert read_strategy(recipe("--strategy", "zero1")).name == "zero1"


def test_two_strategies_are_refused(torchrun, monkeypatch):
    accelerate_launch(monkeypatch, "--config_file", "accelerate_configs/zero2.yaml")
    said = refusal(read_strategy, recipe("--strategy", "zero1"))
    told = "accelerate launch was told accelerate_configs/zero2.yaml"
    assert f"--strategy accelerate_configs/zero1.yaml, and {told}" in said
    assert "accelerate launch --config_file accelerate_configs/zero1.yaml" in said
    accelerate_launch(monkeypatch, "--use_deepspeed")
    torchrun["ACCELERATE_USE_DEEPSPEED"] = "true"
    assert "was told to use DeepSpeed" in refusal(read_strategy, recipe("--strategy", "ds_configs/zero1.json"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"distributed_type": "MULTI_XPU"}, ["distributed_type", "MULTI_XPU", "--strategy ddp"]),
        ({"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_tp_degree": 2}}, ["tp, pp or 3d"]),
        ({"distributed_type": "TP", "tp_config": {"tp_size": 2}}, ["TP is not supported here", "fsdp2, tp"]),
        ({"distributed_type": "multi_gpu"}, ["or write MULTI_GPU"]),
        ({"distributed_type": False}, ["distributed_type = false", '"NO" in quotes']),
        ({"mixed_precision": False}, ["mixed_precision = false", '"no" in quotes']),
        ({"mixed_precision": True}, ["mixed_precision = true", "one of no, fp16, bf16"]),
        ({"mixed_precision": "float16"}, ["mixed_precision = float16", "fp16"]),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, ["dynamo_config", "--torch_compile"]),
        ({"fp8_config": {"backend": "TE"}}, ["fp8_config.backend = TE", "torchao"]),
        ({"fp8_config": {"fp8_format": "HYBRID"}}, ["fp8_config.fp8_format is of another backend than torchao"]),
        ({"parallelism_config": {"parallelism_config_tp_size": 2}}, ["parallelism_config", "--strategy tp"]),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, ["LOCAL_MACHINE"]),
        ({"deepspeed_config": "zero2.json"}, ["deepspeed_config = 'zero2.json'", "key: value"]),
        ({"use_cpu": "false"}, ["use_cpu", "counts as true"]),
        ({"mixed_precison": "bf16"}, ["accelerate has no setting mixed_precison. Did you mean mixed_precision?"]),
        ({"dynamo_backend": "INDUCTOR"}, ["dynamo_config", "--torch_compile"]),
        ({"deepspeed_config": {"zero_stage": 3}}, ["deepspeed_config (zero_stage) has no effect", "Write DEEPSPEED"]),
        ({"fsdp_config": {"fsdp_version": 2}}, ["fsdp_config (fsdp_version) has no effect", "Write FSDP"]),
    ],
)
def test_a_yaml_that_is_no_strategy_here_is_one_sentence(tmp_path, monkeypatch, content, words):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"distributed_type": "MULTI_GPU", "num_processes": 2, **content}))
    check_refusal([str(file), *words], find_strategies, [str(file)])  # zerofit launch, plan, compare
    accelerate_launch(monkeypatch, "--config_file", str(file))
    said = refusal(lambda: check_launch(find_launch()))
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        ("MULTI_GPU", "--zero_stage 3", "with --zero_stage: deepspeed_config (zero_stage) has no effect"),
        ("MULTI_GPU", "--gradient-accumulation-steps=8", "(gradient_accumulation_steps) has no effect"),
        ("MULTI_GPU", "--dynamo_backend inductor", "with --dynamo_backend: dynamo_config is not supported"),
        ("MULTI_GPU", "--use_megatron_lm", "MEGATRON_LM is not supported here"),
        ("DEEPSPEED", "--deepspeed_config_file a.json --zero_stage 3", "zero_stage = '3' stands beside"),
        ("FSDP", "--fsdp_version 2 --fsdp_sharding_strategy SHARD_GRAD_OP", "= 'SHARD_GRAD_OP' is of FSDP1"),
        ("MULTI_GPU", "--cpu --num_processes 3", "num_processes = 3, and accelerate launch has started one process"),
        ("MULTI_CPU", "", "num_processes = 2, and accelerate launch has started one process"),
        ("DEEPSPEED", "--cpu --num_processes 1", "= DEEPSPEED and num_processes = 1, and accelerate launch"),
    ],
)
def test_what_accelerate_launch_would_leave_out_is_refused(tmp_path, torchrun, monkeypatch, kind, flags, words):
    file = tmp_path / "mine.yaml"
    file.write_text(f"distributed_type: {kind}\nnum_processes: 2\n")
    started = "2" if kind != "MULTI_CPU" and "--cpu" not in flags else "1"
    torchrun.update(WORLD_SIZE=started, ACCELERATE_USE_FSDP=str(kind == "FSDP"))
    accelerate_launch(monkeypatch, "--config_file", str(file), *flags.split())
    assert words in refusal(lambda: check_launch(find_launch()))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf17", "unset ACCELERATE_MIXED_PRECISION, and say --precision"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "--torch_compile"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "--gradient_accumulation_steps"),
        ("ACCELERATE_GRADIENT_CLIPPING", "0.5", "--max_grad_norm"),
    ],
)
def test_a_variable_of_accelerate_that_has_no_effect_is_refused(torchrun, name, value, words):
    torchrun[name] = value
    check_refusal([f"{name} = {value} is set in this shell", words], lambda: check_launch(find_launch()))


def test_a_yaml_for_one_process_may_name_more(tmp_path, torchrun, monkeypatch):
    """That of TRL for one GPU does."""
    (tmp_path / "single_gpu.yaml").write_text("distributed_type: 'NO'\nnum_processes: 8\n")
    torchrun["WORLD_SIZE"] = "1"
    accelerate_launch(monkeypatch, "--config_file", str(tmp_path / "single_gpu.yaml"))
    check_launch(find_launch())


def test_a_variable_of_a_precision_in_upper_case(torchrun):
    torchrun["ACCELERATE_MIXED_PRECISION"] = "BF16"
    assert find_launch().precision == "bf16"


def test_the_first_yamls_of_accelerate_are_read_as_it_reads_them():
    assert launch_variables({"fp16": True}, "")["ACCELERATE_MIXED_PRECISION"] == "fp16"


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: NO\ndistributed_type: MULTI_GPU\n",
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  zero_stage: 2\n",
        "distributed_type: MULTI_GPU\nnum_processes: 2\n'num_processes': 4\n",
    ],
)
def test_a_key_that_stands_twice_in_a_yaml_is_refused(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    said = refusal(find_strategies, [str(tmp_path / "mine.yaml")])
    assert "is set twice: keep one" in said
    assert f"line {text.count(chr(10))}" in said


def test_what_accelerates_own_questions_write_is_accepted(tmp_path):
    usual = {"compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "MULTI_GPU",
             "downcast_bf16": "no", "enable_cpu_affinity": False, "gpu_ids": "all", "machine_rank": 0,
             "main_training_function": "main", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2,
             "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False,
             "tpu_use_sudo": False, "use_cpu": False, "dynamo_config": {"dynamo_backend": "NO"}}  # fmt: skip
    file = tmp_path / "default_config.yaml"
    file.write_text(yaml.safe_dump(usual))
    assert find_strategies([str(file)])
    check_refusal(["zero2.json'", "a JSON alone is for torchrun"], find_strategies, ["ds_configs/zero2.json"])
