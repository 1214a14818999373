"""Small mixtures of experts from scratch under every strategy that trains them, against one process.

The auxiliary loss depends on the micro-batches and not on who computes them: all layouts have the same ones.
"""

import shutil

import pytest
import torch
from folders import tools_in_this_process
from helpers import ROOT, check_same_weights, cut_after, largest_differences, launch, launched, metrics, updates

from zerofit.cli import main as zerofit

pytestmark = pytest.mark.long

RTOL = 1e-5
SIZES = (
    "hidden_size=64,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,intermediate_size=96,"
    "max_position_embeddings=128,output_router_logits=true,router_aux_loss_coef=0.02,"
)
MIXTRAL = ("--model_type", "mixtral", "--config_overrides", f"{SIZES}num_local_experts=8,num_experts_per_tok=2")
QWEN = (
    "--model_type",
    "qwen3_moe",
    "--config_overrides",
    f"{SIZES}moe_intermediate_size=48,num_experts=8,num_experts_per_tok=3,mlp_only_layers=[1]",
)
TEXT = ("--train_file", ROOT / "docs" / "fine-tune.md", "--document_separator", "line", "--max_eval_samples", "17",
        "--block_size", "96")  # fmt: skip
TOKENIZER = ("--train_tokenizer_vocab_size", "301")
CASES = {
    "packed": (*MIXTRAL, *TOKENIZER, *TEXT, "--packing", "documents", "--gradient_checkpointing"),
    "padded": (*QWEN, *TOKENIZER, *TEXT, "--packing", "none", "--max_train_samples", "100"),
    "lora": ("--model_name_or_path", "{base}", *TEXT, "--packing", "none", "--lora", "--max_train_samples", "100",
             "--config_overrides", "output_router_logits=true,router_aux_loss_coef=0.02"),
}  # fmt: skip
CASES["lora on experts"] = (*CASES["lora"], "--lora_target_modules", "q_proj", "gate_up_proj", "down_proj")
LAYOUTS = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "fsdp2": 2, "ep": 2}  # processes
FIGURES = ("loss", "grad_norm", "aux_loss", "expert_load_max", "expert_load_min", "learning_rate", "tokens")
UPDATES = 12


@pytest.fixture(scope="module")
def start(cache, tmp_path_factory):
    """start(case, strategy, processes, output folder, flags) -> what came of it."""
    folder = tmp_path_factory.mktemp("experts")

    def started(case, strategy, processes, output, *flags):
        named = [str(flag).format(base=folder / "packed-single" / "model") for flag in CASES[case]]
        return launched(
            output, *named, "--per_device_train_batch_size", "2", "--global_batch_size", "8", "--max_train_steps",
            UPDATES, "--learning_rate", "1e-3", "--num_warmup_steps", "2", "--weight_decay", "0.1", "--save_steps",
            "4", "--precision", "fp32", "--cache_dir", cache, *flags, strategy=strategy, processes=processes,
        )  # fmt: skip

    started.folder = folder
    return started


@pytest.fixture(scope="module")
def run(start):
    """run(case, strategy) -> output folder; each is launched once."""

    def once(case: str, strategy: str):
        output = start.folder / f"{case.replace(' ', '_')}-{strategy}"
        if not output.exists():
            if case.startswith("lora"):
                once("packed", "single")
            done = start(case, strategy, LAYOUTS.get(strategy, 1), output)
            assert done.returncode == 0, done.stderr[-4000:]
            if strategy == "ep" and not torch.accelerator.is_available():
                assert len(done.group_timeouts) == 2 * (1 + 2)  # all ranks, and each alone: for all layers together
        return output

    return once


def differences(ours: list[dict], theirs: list[dict]) -> dict[str, float]:
    assert len(updates(ours)) == UPDATES
    return largest_differences(ours, theirs, FIGURES)


def pairs() -> list[tuple[str, str]]:
    every = [(case, strategy) for case in CASES for strategy in LAYOUTS]
    return [pair for pair in every if pair[0] != "lora on experts" or pair[1] in ("ddp", "zero2")]


@pytest.mark.parametrize(("case", "strategy"), pairs())
def test_strategies_agree(run, case, strategy):
    largest = differences(*(metrics(run(case, each)) for each in (strategy, "single")))
    print(case, strategy, {name: f"{value:.1e}" for name, value in largest.items()})
    assert all(value <= RTOL for value in largest.values()), largest


@pytest.mark.parametrize("strategy", ["zero3", "ep"])
def test_the_exported_model_is_that_of_transformers(run, strategy):
    """Experts are written one by one, as published weights have them, and read back alike under every strategy."""
    check_same_weights(*(run("packed", each) / "model" for each in (strategy, "single")))


def test_an_adapter_on_experts_is_merged(run, tmp_path, capfd):
    with tools_in_this_process():
        adapter = run("lora on experts", "zero2") / "model"
        assert zerofit(["merge", "--adapter", str(adapter), "--output", str(tmp_path / "merged")]) == 0
    assert "merged model" in capfd.readouterr().out


@pytest.mark.parametrize("legs", [[(4, "single", 1), (8, "zero2", 2)], [(4, "ddp", 2), (8, "ep", 2)]])
def test_a_run_goes_on_under_another_strategy(run, start, tmp_path, legs):
    whole, output = run("packed", "zero3"), tmp_path / "run"
    shutil.copytree(whole, output, symlinks=True)
    for after, strategy, processes in legs:
        cut_after(output, after)
        done = start("packed", strategy, processes, output)
        assert done.returncode == 0, done.stderr[-4000:]
        assert f"after update {after}, written under" in done.stdout
        largest = differences(metrics(output), metrics(whole))
        assert all(value <= RTOL for value in largest.values()), largest


def test_ranks_that_route_differently_do_not_wait_for_each_other(cache, tmp_path):
    """200 updates under ZeRO-3 without an auxiliary loss: some experts get all that they can, some nothing. DDP has
    the same curve, until rounding turns a choice around."""
    curves = []
    for strategy in ("zero3", "ddp"):
        flags = (*MIXTRAL[:-1], MIXTRAL[-1].replace("=true", "=false"), *TOKENIZER, *TEXT, "--packing", "documents")
        lines = launch(
            tmp_path / strategy, *flags, "--per_device_train_batch_size", "4", "--global_batch_size", "8",
            "--max_train_steps", "200", "--learning_rate", "3e-3", "--precision", "fp32", "--cache_dir", cache,
            strategy=strategy, processes=2,
        )  # fmt: skip
        curves.append(updates(lines))
    assert len(curves[0]) == 200
    for ours, theirs in zip(*(curve[:15] for curve in curves)):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=RTOL)
    assert curves[0][-1]["loss"] < curves[0][0]["loss"] - 1.0
    assert max(line["expert_load_max"] for line in curves[0]) > 3.5  # of at most 8 / 2
    assert min(line["expert_load_min"] for line in curves[0]) == 0
    assert "aux_loss" not in curves[0][0]
