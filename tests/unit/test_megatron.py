"""`zerofit convert megatron-args`: numbers are Megatron's, and no flag is lost."""

import json
import math
import re
import shlex

import pytest
import yaml
from transformers import LlamaConfig

from zerofit.cli import main as zerofit
from zerofit.recipe import ClmRecipe, parse_recipe
from zerofit.recipe.options import make_schedule
from zerofit.tools.convert.megatron_args.pretrain import convert_pretraining, make_pair
from zerofit.tools.convert.megatron_args.shape import MegatronArgsOptions, read_call
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.tool_recipe import read_with_recipe

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
BLOCK = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "curriculum_learning": {"enabled": False},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
    "bf16": {"enabled": True},
}
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


@pytest.fixture
def llama(tmp_path, monkeypatch):
    """The words of a call, in a folder with the DeepSpeed JSON that it names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(BLOCK))
    return shlex.split(LLAMA)


def typed(words: str, **options):
    return convert_pretraining(read_call(shlex.split(words)), MegatronArgsOptions(**options))


def statuses(done) -> dict[str, str]:
    return {row.flag.split()[0]: row.status for row in done.finish()}


# ------------------------------------------------------------------------------------------------------------- recipes


def test_a_llama_becomes_this_recipe(llama):
    done = convert_pretraining(read_call(llama), MegatronArgsOptions())
    assert not done.problems
    assert done.recipe == {
        "config_name": "llama-2-7b",
        "config_overrides": "hidden_size=96,intermediate_size=160,num_hidden_layers=3,num_attention_heads=4,"
        "num_key_value_heads=2,head_dim=24,max_position_embeddings=128",
        "make_vocab_size_divisible_by": 256, "tokenizer_name": "./data/llama",
        "data_path": ["0.3", "./data/one", "0.7", "./data/two"], "split": "949,50,1", "block_size": 64, "seed": 1234,
        "per_device_train_batch_size": 2, "global_batch_size": 32, "per_device_eval_batch_size": 2,
        "max_train_steps": 1000, "eval_steps": 50, "max_eval_samples": 320, "learning_rate": 3e-4,
        "min_lr_ratio": pytest.approx(0.1), "lr_scheduler_type": "cosine", "num_warmup_steps": 20, "weight_decay": 0.1,
        "adam_beta1": 0.9, "adam_beta2": 0.95, "max_grad_norm": 1.0, "precision": "bf16",
        "gradient_checkpointing": True, "output_dir": "./run", "save_steps": 100, "logging_steps": 1,
    }  # fmt: skip
    assert (done.layout.strategy, done.layout.world, done.layout.machines) == ("tp", 16, 2)
    assert (done.layout.tensor, done.layout.stage, done.layout.replicas) == (2, 1, 8)


def test_no_flag_is_lost(llama):
    done = convert_pretraining(read_call(llama), MegatronArgsOptions())
    found = statuses(done)
    assert len(found) > 50
    typed_in = re.findall(r"(--[a-z][\w-]+)", LLAMA[LLAMA.index("pretrain_gpt.py") :])
    assert {flag.replace("_", "-") for flag in typed_in} <= set(found)
    kinds = {
        "--num-layers": "carried over",
        "--swiglu": "satisfied",
        "--tensor-model-parallel-size": "carried over",
        "--frobnicate": "unknown",
        '"curriculum_learning"': "no counterpart",
        '"bf16"': "no counterpart",
    }
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
    assert recipe["precision"] == "fp16"
    assert (recipe["vocab_file"], recipe["merge_file"]) == ("v/vocab.json", "v/merges.txt")
    assert recipe["data_path"] == "data/mine_text_document"


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
    assert not done.problems
    names = ("learning_rate", "min_lr_ratio", "lr_scheduler_type", "num_warmup_steps", "lr_decay_steps",
             "wsd_decay_ratio")  # fmt: skip
    schedule = make_schedule(ClmRecipe(**{name: done.recipe[name] for name in names if name in done.recipe}), 100)
    assert [schedule(update) for update in range(100)] == pytest.approx(expected, rel=1e-9, abs=1e-15)


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
    assert not done.problems
    assert done.layout.strategy == strategy
    sizes = [next(iter(one.values())) if isinstance(one, dict) else one for one in degrees.values()]
    assert (done.layout.replicas, done.recipe["per_device_train_batch_size"]) == (8 // math.prod(sizes), 2)
    config = json.loads(make_pair(done.layout, tmp_path)["deepspeed.json"])
    assert {name: config[name] for name in degrees} == degrees
    assert config["zero_optimization"]["stage"] == (3 if strategy == "sp" else 2 if "zero2" in strategy else 1)
    found = statuses(done)
    assert {found[name] for name in found if "parallel-size" in name or "optimizer" in name} == {"carried over"}
    assert found.get("--sequence-parallel", "satisfied") == "satisfied"


@pytest.mark.parametrize(("flags", "recipe", "status"), [
    ("--recompute-activations", {"gradient_checkpointing": "selective"}, "carried over"),
    ("--recompute-granularity full --recompute-activations", {"gradient_checkpointing": "selective"}, "carried over"),
    ("--recompute-method block --recompute-granularity full", {"gradient_checkpointing": True}, "no counterpart"),
    ("--checkpoint-in-cpu --checkpoint-activations", {"activation_offload": True}, "carried over"),
    ("--checkpoint-in-cpu", {}, "satisfied"),
    ("--eval-iters 0", {"eval_steps": 1000, "max_eval_samples": 16}, "carried over"),
    ("--tensorboard-dir tb --wandb-project p", {"report_to": "all", "report_name": "p"}, "carried over"),
    ("--exit-duration-in-mins 90", {"max_hours": 1.5}, "carried over"),
])  # fmt: skip
def test_single_flags(flags, recipe, status):
    """Each is a line of the recipe, and the status of the first flag is this one."""
    done = typed(MINIMAL + flags)
    assert done.recipe.items() >= recipe.items()
    assert statuses(done)[flags.split()[0]] == status


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--swiglu", "no family has swiglu, layernorm"),
        ("--disable-bias-linear", "no biases"),
        ("--position-embedding-type alibi", "neither family has it"),
        ("--rotary-interleaved-magic", "it changes the model"),
        ("--fp16 --bf16", "keep one of the two"),
        ("--load elsewhere", "set --model_name_or_path"),
        ("--optimizer sgd", "AdamW is the only optimizer"),
        ("--num-layers two", "an integer was expected"),
        ("torchrun pretrain_x.py", "pretrain_x.py is not read"),
        ("--nnodes --node_rank 0 --nproc_per_node 8 pretrain_gpt.py", "the number of machines"),
        ("torchrun --nproc_per_node --nnodes 2 pretrain_gpt.py", "the number of processes"),
        (
            "torchrun --nproc_per_node gpu pretrain_gpt.py",
            "the number of processes: a number was expected, and the launcher has 'gpu'",
        ),
        ("torchrun --nproc_per_node 8 --nnodes 2 --master_port $PORT pretrain_gpt.py", "the port of machine 0"),
    ],
)
def test_what_stops_a_conversion(words, said):
    """Flags that contradict each other, and what the user's shell did not know."""
    done = typed(MINIMAL.replace("pretrain_gpt.py", words) if "pretrain" in words else MINIMAL + words)
    assert any(said in problem for problem in done.problems), done.problems


@pytest.mark.parametrize(
    ("flags", "stored", "said"),
    [
        ("", {"num_hidden_layers": 3, "tie_word_embeddings": True}, "--num-layers 2: FOLDER has num_hidden_layers: 3"),
        ("--untie-embeddings-and-output-weights", {"tie_word_embeddings": True}, "tie_word_embeddings: true"),
        ("", {"tie_word_embeddings": False}, "there is no --untie-embeddings-and-output-weights"),
        ("--num-key-value-heads 2", {"tie_word_embeddings": True}, "--num-key-value-heads 2: "),
        ("--num-key-value-heads 2", {"num_key_value_heads": 2, "tie_word_embeddings": True}, None),
    ],
)
def test_sizes_are_those_of_the_weights(flags, stored, said, tmp_path):
    """Four heads; a folder that does not say otherwise has as many of keys and values."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    LlamaConfig(**{**sizes, **stored}).save_pretrained(tmp_path)
    llama = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 "
    done = typed(MINIMAL + llama + flags, model_name_or_path=str(tmp_path))
    assert [said.replace("FOLDER", str(tmp_path)) in problem for problem in done.problems] == [True] * bool(said)
    assert "config_name" not in done.recipe


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


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"zero_optimization": {"stage": 1, "bucket": 5}}, "zero_optimization.bucket"),
        ({"zero_optimization": True}, "its zero_optimization must be JSON objects"),
        ({"gradient_clipping": 0.5}, "the DeepSpeed JSON says gradient_clipping = 0.5: make them agree"),
        ({"bf16": {"enabled": True}}, "the DeepSpeed JSON has bf16 on, and there is no --bf16"),
    ],
)
def test_what_a_run_refuses_is_not_written(tmp_path, block, said, capsys):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, **block}))
    words = f"torchrun --nproc_per_node 2 {MINIMAL} --deepspeed --deepspeed_config {tmp_path}/ds.json".split()
    assert zerofit(["convert", "megatron-args", "--output", str(tmp_path / "out"), "--", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


JOB = (
    "torchrun --nnodes 2 --node_rank 1 --nproc_per_node 8 --master_addr alpha --master_port 6000 -m llmacc.pretrain "
    "--task-type llmacc.megatron.GPT --num-layers 48 --num-attention-heads 64 --hidden-size 6144 --seq-length 2048 "
    "--max-position-embeddings 2048 --train-iters 100 --lr 2.0e-4 --min-lr 2.0e-4 --vocab-file v.json "
    "--merge-file m.txt --data-path data/wiki --max-global-batch-size 32"
)


def test_a_job_that_searches_its_strategy_becomes_a_recipe_and_a_line_of_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DEVICE_MEMORY_GB", "40")
    out = tmp_path / "out"
    assert zerofit(["convert", "megatron-args", "--output", str(out), "--", *JOB.split()]) == 0
    printed = capsys.readouterr().out
    plan, launch = printed.splitlines()[-2:]
    assert "22,068,768,768 parameters" in printed
    assert plan == (
        f"zerofit plan --task clm --config {out}/recipe.yaml --num_gpus 16 --gpus_per_node 8 --gpu_memory 40GB "
        f"--max_global_batch_size 32 --top 1 --write {out}/pairs"
    )
    assert launch == f"MACHINE_RANK=1 MAIN_PROCESS_IP=alpha MAIN_PROCESS_PORT=6000 sh {out}/pairs/*.sh"
    options, _ = read_with_recipe(PlanOptions, shlex.split(plan)[2:], "zerofit plan")
    assert (options.max_global_batch_size, options.global_batch_size, options.min_lr_ratio) == (32, None, 1.0)
    assert [file.name for file in out.iterdir()] == ["recipe.yaml"], "plan writes the strategy"


@pytest.mark.parametrize(
    ("launcher", "world"),
    [("deepspeed", 8), ("deepspeed --num_gpus=2", 2), ("", 8), ("python", 1), ("torchrun --nproc-per-node 4", 4),
     ("--nproc_per_node 4 --nnodes 2", 8), ("srun --nodes 3 --ntasks-per-node 2 python", 6)],
)  # fmt: skip
def test_processes_are_those_of_the_launcher(launcher, world):
    done = typed(f"{launcher} x/{MINIMAL} --global-batch-size 48")
    assert not done.problems
    assert done.layout.world == world


def test_a_script_is_not_run(tmp_path, capsys):
    script = tmp_path / "train.sh"
    script.write_text(f"touch {tmp_path}/ran\n{JOB}")
    assert zerofit(["convert", "megatron-args", str(script)]) == 2
    assert 'torchrun() { zerofit convert megatron-args -- "$@"; }' in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_control_characters_do_not_reach_the_terminal(capsys):
    words = ["preprocess_data.py", "--input", "a\x1b]0;b", *"--output-prefix p --vocab-file v --merge-file m".split()]
    assert zerofit(["convert", "megatron-args", "--", *words]) == 0
    shown_text = capsys.readouterr().out
    assert "\\x1b]0;b" in shown_text
    assert "\x1b" not in shown_text
