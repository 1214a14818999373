"""What `zerofit convert megatron-args` makes of a call: the model of its names, the pair as a run resolves it."""

import json
import shlex

import pytest
from test_megatron import typed

from zerofit.cli import main as zerofit
from zerofit.tools.convert.megatron_args.script_to_recipe import parameters_of
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.tool_recipe import read_with_recipe

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --train-iters 100 "
    "--lr 1e-3 --data-path A --vocab-file v.json --merge-file m.txt --hidden-dropout 0 "
)
PORTED = "--layernorm-type rmsnorm --activation-func-type swiglu --no-bias --position-embedding-type rotary "


@pytest.mark.parametrize(
    ("command", "family", "parameters"),
    [
        # two layers: 4 * 64^2 of attention, 3 * 64 * 170 of the MLP (8/3 * 64), two norms; embeddings and a last norm
        (f"pretrain_llama.py {FLAGS}", "llama-2-7b", 2 * (4 * 64**2 + 3 * 64 * 170 + 2 * 64) + 2 * 384 * 64 + 64),
        (f"pretrain_llama.py {FLAGS}{PORTED}--ffn-hidden-coeff 4", "llama-2-7b",
         2 * (4 * 64**2 + 3 * 64 * 256 + 2 * 64) + 2 * 384 * 64 + 64),
        (f"pretrain_gpt.py {FLAGS}{PORTED}--ffn-hidden-size 160", "llama-2-7b",
         2 * (4 * 64**2 + 3 * 64 * 160 + 2 * 64) + 384 * 64 + 64),
    ],
)  # fmt: skip
def test_the_names_of_a_port_of_llama(command, family, parameters):
    done = typed(command)
    assert not done.flags.problems
    assert done.recipe["config_name"] == family
    assert parameters_of(done.recipe, 384) == parameters
    assert {row.status for row in done.flags.finish()} <= {"carried over", "satisfied"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--layernorm-type rmsnorm", "no family has gelu, rmsnorm"),
        ("--position-embedding-type rotary --no-bias", "no biases"),
        ("--rotary-interleaved-magic", "it changes the model"),
    ],
)
def test_what_shapes_the_model_is_never_passed_over(flags, said):
    assert said in " ".join(typed(f"pretrain_gpt.py {FLAGS}{flags}").flags.problems)


def test_a_program_of_ones_own_is_not_taken_for_a_gpt():
    assert "pretrain_x.py is not read" in typed(f"torchrun pretrain_x.py {FLAGS}").flags.problems[0]


def with_json(tmp_path, **block) -> list[str]:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, **block}))
    words = shlex.split(f"torchrun --nproc_per_node 2 pretrain_gpt.py {FLAGS} --deepspeed --deepspeed_config")
    return ["convert", "megatron-args", "--output", str(tmp_path / "out"), "--", *words, str(tmp_path / "ds.json")]


def test_what_is_not_carried_over_of_a_json_is_said(tmp_path, capsys):
    block = {"wandb": {"enabled": True, "project": "arxiv"}, "csv_monitor": {"enabled": True}, "pipeline": {"a": 1}}
    assert zerofit(with_json(tmp_path, **block)) == 0
    rows = {line.split(":")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert all("no counterpart" in rows[f'"{key}"'] for key in block)
    assert not block.keys() & json.loads((tmp_path / "out" / "deepspeed.json").read_text()).keys()


@pytest.mark.parametrize(
    ("launcher", "flags", "strategy"),
    [
        ("python", "", "single"),
        ("torchrun --nproc_per_node 4", "", "ddp"),
        ("torchrun --nproc_per_node 4", "--zero-stage 2", "zero2"),
        ("torchrun --nproc_per_node 4", "--zero-stage 3", "zero3"),
    ],
)
def test_what_is_written_is_what_a_run_resolves(tmp_path, launcher, flags, strategy, capsys):
    words = shlex.split(f"{launcher} pretrain_gpt.py {FLAGS} --global-batch-size 8 {flags}")
    assert zerofit(["convert", "megatron-args", "--output", str(tmp_path / "out"), "--", *words]) == 0
    assert f"{strategy} on " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}, "optimizer.params.lr = 0.5"),
        ({"zero_optimization": {"stage": 1, "bucket": 5}}, "zero_optimization.bucket"),
        ({"gradient_clipping": 0.5}, "the DeepSpeed JSON says gradient_clipping = 0.5: make them agree"),
        ({"bf16": {"enabled": True}}, "the DeepSpeed JSON has bf16 on, and there is no --bf16"),
    ],
)
def test_what_a_run_refuses_is_not_written(tmp_path, block, said, capsys):
    assert zerofit(with_json(tmp_path, **block)) == 2
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
    ("words", "said"),
    [
        ("--nnodes --node_rank 0 --nproc_per_node 8 pretrain_gpt.py", "the number of machines"),
        ("torchrun --nproc_per_node --nnodes 2 pretrain_gpt.py", "the number of processes"),
        ("torchrun --nproc_per_node gpu pretrain_gpt.py", "as many GPUs as a machine has"),
        ("torchrun --nproc_per_node 8 --nnodes 2 --master_port $PORT pretrain_gpt.py", "the port of machine 0"),
    ],
)
def test_what_the_shell_did_not_know_is_named(words, said):
    assert said in " ".join(typed(f"{words} {FLAGS}").flags.problems)


@pytest.mark.parametrize(
    ("launcher", "world"),
    [("deepspeed", 8), ("deepspeed --num_gpus=2", 2), ("", 8), ("python", 1), ("torchrun --nproc-per-node 4", 4),
     ("--nproc_per_node 4 --nnodes 2", 8), ("srun --nodes 3 --ntasks-per-node 2 python", 6)],
)  # fmt: skip
def test_processes_are_those_of_the_launcher(launcher, world):
    done = typed(f"{launcher} x/pretrain_gpt.py {FLAGS} --global-batch-size 48")
    assert not done.flags.problems
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
