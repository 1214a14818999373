"""`zerofit convert megatron-args`: numbers are Megatron's, and no flag is lost."""

import json
import math
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from transformers import GPT2Config, LlamaConfig

from zerofit.cli import main as zerofit
from zerofit.recipe import ClmRecipe, parse_recipe
from zerofit.recipe.schedule import make_schedule
from zerofit.tools.convert.megatron_args.ledger import MegatronArgsOptions, call_of
from zerofit.tools.convert.megatron_args.pair import pair_of
from zerofit.tools.convert.megatron_args.pretrain import convert_pretraining
from zerofit.tools.convert.megatron_args.script_to_recipe import parameters_of

LLAMA = """torchrun --nproc_per_node 8 --nnodes 2 --node_rank 0 --master_addr alpha --master_port 6000 pretrain_gpt.py
  --tensor-model-parallel-size 2 --num-layers 3 --hidden-size 96 --ffn-hidden-size 160
  --num-attention-heads 4 --num-key-value-heads 2 --micro-batch-size 2 --global-batch-size 32
  --seq-length 64 --max-position-embeddings 128 --train-iters 1000 --save ./run --load ./run
  --data-path 0.3 ./data/one 0.7 ./data/two --data-impl mmap --tokenizer-type GPTSentencePieceTokenizer
  --tokenizer-model ./data/llama/tokenizer.model --split 949,50,1 --distributed-backend nccl
  --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1 --lr-warmup-iters 20
  --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval 100 --eval-interval 50
  --eval-iters 10 --bf16 --no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0
  --use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm
  --disable-bias-linear --frobnicate 3 --recompute-granularity full --recompute-method uniform
  --deepspeed_config=ds.json --deepspeed"""
BLOCK = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "curriculum_learning": {"enabled": False},
         "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}, "bf16": {"enabled": True}}  # fmt: skip
GPT = """deepspeed --num_gpus 2 ./Megatron/pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 4
  --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --global-batch-size 8 --lr 0.00015
  --train-samples 4001 --lr-decay-samples 3200 --lr-decay-style cosine --min-lr 1.0e-5 --lr-warmup-fraction .01
  --fp16 --no-bias-gelu-fusion --data-path data/mine_text_document --vocab-file v/vocab.json
  --merge-file v/merges.txt"""
STAGES = {"stages": 2, "use_reentrant": False, "pipe_partitioned": False, "grad_partitioned": False}
MINIMAL = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --train-iters 100 --lr 1e-3 --data-path A "
    "--vocab-file v.json --merge-file m.txt "
)
OF_LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 "


@pytest.fixture
def llama(tmp_path, monkeypatch):
    """The words of a call, in a folder with the DeepSpeed JSON that it names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(BLOCK))
    return shlex.split(LLAMA)


def typed(words: str, **options):
    return convert_pretraining(call_of(shlex.split(words)), MegatronArgsOptions(**options))


def statuses(done) -> dict[str, str]:
    return {row.flag.split()[0]: row.status for row in done.flags.finish()}


# ------------------------------------------------------------------------------------------------------------- recipes


def test_a_llama_becomes_this_recipe(llama):
    done = convert_pretraining(call_of(llama), MegatronArgsOptions())
    assert not done.flags.problems
    assert done.recipe == {
        "config_name": "llama-2-7b",
        "config_overrides": "hidden_size=96,intermediate_size=160,num_hidden_layers=3,num_attention_heads=4,"
        "num_key_value_heads=2,head_dim=24,max_position_embeddings=128",
        "make_vocab_size_divisible_by": 256, "tokenizer_name": "./data/llama",
        "data_path": ["0.3", "./data/one", "0.7", "./data/two"], "split": "949,50,1", "block_size": 64, "seed": 1234,
        "per_device_train_batch_size": 2, "global_batch_size": 32, "per_device_eval_batch_size": 2,
        "max_train_steps": 1000, "eval_steps": 50, "max_eval_samples": 320, "learning_rate": 3e-4,
        "min_lr_ratio": pytest.approx(0.1), "lr_scheduler_type": "cosine", "num_warmup_steps": 20, "weight_decay": 0.1,
        "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "precision": "bf16",
        "gradient_checkpointing": True, "output_dir": "./run", "save_steps": 100, "logging_steps": 1,
    }  # fmt: skip
    assert (done.layout.strategy, done.layout.world, done.layout.machines) == ("tp", 16, 2)
    assert (done.layout.tensor, done.layout.stage, done.layout.replicas) == (2, 1, 8)


def test_no_flag_is_lost(llama):
    done = convert_pretraining(call_of(llama), MegatronArgsOptions())
    found = statuses(done)
    assert len(found) > 50
    assert set(re.findall(r"(--[a-z][\w-]+)", LLAMA[LLAMA.index("pretrain_gpt.py") :])) <= set(found)
    kinds = {"--num-layers": "carried over", "--swiglu": "satisfied",
             "--tensor-model-parallel-size": "carried over", "--frobnicate": "unknown",
             '"curriculum_learning":': "no counterpart", '"bf16":': "carried over"}  # fmt: skip
    assert {flag: found[flag] for flag in kinds} == kinds
    assert "(--seed" in found, "Megatron's defaults count where ours are others"


def test_a_gpt_counts_samples():
    recipe = typed(GPT).recipe
    assert recipe["config_name"] == "gpt2"
    assert recipe["config_overrides"] == (
        "hidden_size=32,n_inner=128,num_hidden_layers=2,num_attention_heads=4,max_position_embeddings=64,"
        "activation_function=gelu"
    )
    assert (recipe["max_train_steps"], recipe["lr_decay_steps"], recipe["num_warmup_steps"]) == (500, 400, 4)
    assert (recipe["weight_decay"], recipe["max_eval_samples"], recipe["eval_steps"]) == (0.01, 800, 1000)
    assert (recipe["precision"], recipe["vocab_file"], recipe["merge_file"]) == (
        "fp16",
        "v/vocab.json",
        "v/merges.txt",
    )
    assert recipe["data_path"] == "data/mine_text_document"


SHAPES = {
    "llama": OF_LLAMA + "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 80 --rotary-base 500000",
    "llama, tied, biases": OF_LLAMA.replace("--disable-bias-linear", "") + "--kv-channels 16",
    "llama, ffn by default": OF_LLAMA.replace("--hidden-dropout 0", "--hidden-dropout 0 --attention-dropout 0"),
    "gpt2": "--ffn-hidden-size 96 --init-method-std 0.006",
    "gpt2, untied": "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 64",
    "neox": "--use-rotary-position-embeddings --rotary-percent 0.5",
}


def test_rope_reaches_the_configuration():
    from zerofit.model.configuration import load_configuration

    recipe = typed(MINIMAL + SHAPES["llama"]).recipe
    config = load_configuration(ClmRecipe(config_name="llama-2-7b", config_overrides=recipe["config_overrides"]))
    assert (config.rope_parameters["rope_theta"], config.head_dim, config.num_key_value_heads) == (500000.0, 8, 2)
    half = load_configuration(ClmRecipe(config_name="llama-2-7b", config_overrides="hidden_size=64"))
    assert half.head_dim == 2, "a head's size follows from those that are overridden"


@pytest.mark.long
def test_megatron_core_counts_the_same():
    """As many parameters in its own GPTModel, made on the CPU in a process of its own, as in transformers' model."""
    pytest.importorskip("megatron.core")
    code = """
import os, torch, torch.nn.functional as F
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
parallel_state.initialize_model_parallel()
for norm, bias, gated, kv, rope, tied, ffn, channels in %r:
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=kv, ffn_hidden_size=ffn,
        kv_channels=channels,
        use_cpu_initialization=True, add_bias_linear=bias, gated_linear_unit=gated, normalization=norm,
        activation_func=F.silu if gated else F.gelu, perform_initialization=False, bias_dropout_fusion=False)
    model = GPTModel(config, get_gpt_layer_local_spec(normalization=norm), vocab_size=384, max_sequence_length=64,
                     position_embedding_type="rope" if rope else "learned_absolute",
                     share_embeddings_and_output_weights=tied)
    print("counted", sum(parameter.numel() for parameter in model.parameters()))
"""
    cases = {  # the flags of SHAPES as megatron-core's arguments
        "llama": ("RMSNorm", False, True, 2, True, False, 80, 8),
        "llama, tied, biases": ("RMSNorm", True, True, 4, True, True, 64, 16),
        "llama, ffn by default": ("RMSNorm", False, True, 4, True, True, 64, 8),
        "gpt2": ("LayerNorm", True, False, 4, False, True, 96, 8),
        "gpt2, untied": ("LayerNorm", True, False, 4, False, False, 128, 8),
        "neox": ("LayerNorm", True, False, 4, True, True, 128, 8),
    }
    assert cases.keys() == SHAPES.keys()
    done = subprocess.run([sys.executable, "-c", code % list(cases.values())], capture_output=True, text=True)
    counted = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("counted")]
    recipes = [typed(MINIMAL + SHAPES[name]).recipe for name in cases]
    assert counted == [parameters_of(recipe, 384) for recipe in recipes], done.stderr[-2000:]


@pytest.mark.parametrize(
    "flags",
    [
        "--lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 10",
        "--lr-decay-style linear --min-lr 2e-4 --lr-decay-iters 60 --lr-warmup-fraction 0.1",
        "--lr-decay-style constant --lr-warmup-iters 7 --min-lr 1e-5",
        "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 25 --lr-warmup-iters 5 --min-lr 1e-5",
        "",
    ],
)
def test_the_schedule_is_megatrons(flags):
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    import torch

    given = {word.lstrip("-"): value for word, value in zip(flags.split()[::2], flags.split()[1::2])}
    decay, batch = int(given.get("lr-decay-iters", 100)), 2
    warmup = int(given.get("lr-warmup-iters", 0)) or float(given.get("lr-warmup-fraction", 0)) * decay
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = scheduler(
        optimizer, init_lr=0.0, max_lr=1e-3, min_lr=float(given.get("min-lr", 0)), lr_warmup_steps=warmup * batch,
        lr_decay_steps=decay * batch, lr_decay_style=given.get("lr-decay-style", "linear"), start_wd=0.0, end_wd=0.0,
        wd_incr_steps=1, wd_incr_style="constant", wsd_decay_steps=int(given.get("lr-wsd-decay-iters", 0)) * batch,
        lr_wsd_decay_style="linear",
    )  # fmt: skip
    expected = []
    for _ in range(100):
        expected.append(optimizer.param_groups[0]["lr"])
        theirs.step(batch)
    done = typed(MINIMAL + flags)
    assert not done.flags.problems
    names = ("learning_rate", "min_lr_ratio", "lr_scheduler_type", "num_warmup_steps", "lr_decay_steps",
             "wsd_decay_ratio")  # fmt: skip
    schedule = make_schedule(ClmRecipe(**{name: done.recipe[name] for name in names if name in done.recipe}), 100)
    assert [schedule(update) for update in range(100)] == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--swiglu", "no family has swiglu, layernorm"),
        ("--disable-bias-linear", "no biases"),
        ("--position-embedding-type alibi", "neither family has it"),
        ("--fp16 --bf16", "keep one of the two"),
        ("--load elsewhere", "set --model_name_or_path"),
        ("--optimizer sgd", "AdamW is the only optimizer"),
        ("--num-layers two", "an integer was expected"),
    ],
)
def test_what_contradicts_is_an_error(flags, said):
    done = typed(MINIMAL + flags)
    assert any(said in problem for problem in done.flags.problems), done.flags.problems


def test_replicas_share_the_global_batch():
    done = typed(f"torchrun --nproc_per_node 8 {MINIMAL} --micro-batch-size 4 --global-batch-size 16 "
                 "--pipeline-model-parallel-size 3")  # fmt: skip
    assert (done.recipe["per_device_train_batch_size"], done.layout.world, done.layout.strategy) == (2, 8, "zero3")
    few = typed(f"torchrun --nproc_per_node 8 {MINIMAL} --global-batch-size 4 --pipeline-model-parallel-size 3")
    assert (few.layout.world, few.recipe["per_device_train_batch_size"]) == (4, 1)
    assert "4 processes, not 8" in few.notes[0]
    halved = typed(f"torchrun --nproc_per_node 8 {MINIMAL} --global-batch-size 2 --tensor-model-parallel-size 2")
    assert (halved.layout.world, halved.recipe["per_device_train_batch_size"]) == (4, 1)
    assert "2 replicas of 2 processes, not 4" in halved.notes[0]


@pytest.mark.parametrize(
    ("flags", "strategy", "degrees"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", "tp", {"tensor_parallel": {"autotp_size": 2}}),
        ("--tensor-model-parallel-size 2 --zero-stage 2", "tp_zero2", {"tensor_parallel": {"autotp_size": 2}}),
        ("--context-parallel-size 2", "sp", {"sequence_parallel_size": 2}),
        ("--pipeline-model-parallel-size 4 --zero-stage 1", "pp", {"pipeline": STAGES | {"stages": 4}}),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            "3d",
            {"pipeline": STAGES, "tensor_parallel": {"autotp_size": 2}},
        ),
    ],
)
def test_degrees_go_into_the_pair(flags, strategy, degrees, tmp_path):
    done = typed(f"torchrun --nproc_per_node 8 {MINIMAL} --global-batch-size 8 {flags}")
    assert not done.flags.problems
    assert done.layout.strategy == strategy
    sizes = [next(iter(one.values())) if isinstance(one, dict) else one for one in degrees.values()]
    assert (done.layout.replicas, done.recipe["per_device_train_batch_size"]) == (8 // math.prod(sizes), 2)
    config = json.loads(pair_of(done.layout, tmp_path)["deepspeed.json"])
    assert {name: config[name] for name in degrees} == degrees
    assert config["zero_optimization"]["stage"] == (3 if strategy == "sp" else 2 if "zero2" in strategy else 1)
    found = statuses(done)
    assert {found[name] for name in found if "parallel-size" in name or "optimizer" in name} == {"carried over"}
    assert found.get("--sequence-parallel", "satisfied") == "satisfied"


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ("--recompute-activations", "selective"),
        ("--recompute-granularity full --recompute-activations", "selective"),  # as in Megatron
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", True),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", True),
    ],
)
def test_recomputation_is_answered_with_the_nearest_one(flags, value):
    """uniform recomputes N layers together, and block the first N of each stage."""
    done = typed(MINIMAL + flags)
    assert done.recipe.get("gradient_checkpointing") == value
    found = {flag: status for flag, status in statuses(done).items() if "compute" in flag or "checkpoint" in flag}
    assert set(found.values()) <= {"carried over", "satisfied", "no counterpart"}
    assert (found.get("--recompute-method") == "no counterpart") == ("block" in flags)


@pytest.mark.parametrize("recomputed", [True, False])
def test_inputs_on_the_host_are_carried_over_where_layers_are_recomputed(recomputed):
    done = typed(MINIMAL + "--checkpoint-in-cpu" + " --checkpoint-activations" * recomputed)
    assert done.recipe.get("activation_offload", False) == recomputed
    assert statuses(done)["--checkpoint-in-cpu"] == ("carried over" if recomputed else "satisfied")


def test_weights_to_begin_with_must_fit(tmp_path):
    GPT2Config(n_layer=3, n_embd=32, n_head=4).save_pretrained(tmp_path)
    done = typed(MINIMAL + "--load elsewhere", model_name_or_path=str(tmp_path))
    assert done.flags.problems == [f"--num-layers 2: {tmp_path} has num_hidden_layers: 3: make them agree"]
    assert "config_name" not in done.recipe


@pytest.mark.parametrize(
    ("flags", "stored", "said"),
    [
        ("--untie-embeddings-and-output-weights", {"tie_word_embeddings": True}, "tie_word_embeddings: true"),
        ("", {"tie_word_embeddings": False}, "there is no --untie-embeddings-and-output-weights"),
        ("--num-key-value-heads 2", {"tie_word_embeddings": True}, "--num-key-value-heads 2: "),
        ("--num-key-value-heads 2", {"num_key_value_heads": 2, "tie_word_embeddings": True}, None),
    ],
)
def test_heads_and_tied_embeddings_are_those_of_the_weights(flags, stored, said, tmp_path):
    """Four heads; a folder that does not say otherwise has as many of keys and values."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    LlamaConfig(**sizes, **stored).save_pretrained(tmp_path)
    problems = typed(MINIMAL + OF_LLAMA + flags, model_name_or_path=str(tmp_path)).flags.problems
    assert [said in problem for problem in problems] == [True] * bool(said)


# --------------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_what_can_be_launched(llama, tmp_path, capsys):
    output, words = tmp_path / "out", llama
    of_stage_2 = {**BLOCK, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}
    (tmp_path / "ds.json").write_text(json.dumps(of_stage_2))
    line = ["convert", "megatron-args", "--output", str(output)]
    assert zerofit([*line, "--", *words]) == 0
    shown_text = capsys.readouterr().out
    assert "1 unknown" in shown_text
    assert shown_text.splitlines()[-1] == (
        f"accelerate launch --config_file {output}/accelerate.yaml --machine_rank 0 train/clm.py --config "
        f"{output}/recipe.yaml"
    )
    assert parse_recipe(ClmRecipe, ["--config", str(output / "recipe.yaml")]).global_batch_size == 32
    settings = yaml.safe_load((output / "accelerate.yaml").read_text())
    assert (settings["main_process_ip"], settings["main_process_port"]) == ("alpha", 6000)
    config = json.loads((output / "deepspeed.json").read_text())
    assert (config["zero_optimization"]["stage"], config["tensor_parallel"]) == (2, {"autotp_size": 2})
    assert config["zero_optimization"]["reduce_bucket_size"] == 1000
    assert (config["train_batch_size"], config["bf16"]) == ("auto", {"enabled": "auto"})
    assert "curriculum_learning" not in config
    assert zerofit([*line, "--", *words]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert zerofit([*line, "--overwrite", "--", *words]) == 0
