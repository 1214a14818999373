"""What a plan is compared with, and the machines that it knows."""

import pytest
from test_plan import RECIPE

from zerofit.cli import main
from zerofit.estimate.measured_rows import measured_rows
from zerofit.estimate.read_model import read_planned_model
from zerofit.strategy.gpu_table import find_gpu
from zerofit.tools.plan.plan import make_budget, make_timing
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.plan.planner import Planner
from zerofit.tools.tool_recipe import read_with_recipe


def planner_of(*flags) -> Planner:
    options, _ = read_with_recipe(
        PlanOptions, ["--task", "clm", "--config_name", "gpt2", *map(str, flags)], prog="plan"
    )
    gpu = find_gpu(options.gpu)
    budget, model = make_budget(options, gpu, True), read_planned_model(options, "clm", True)
    return Planner(options, model, budget, make_timing(options, model, budget, gpu, {True})[0])


def test_the_rows_were_predicted_by_this_tree():
    """One row again: else `python benchmarks/published_times.py --write` is due."""
    row = next(row for row in measured_rows() if row.id == "llm-foundry-135")
    planner = planner_of(
        "--config_overrides", f"n_embd={row.hidden},n_layer={row.layers},n_head={row.heads},n_inner={row.ffn},"
        f"n_positions={row.length},resid_pdrop=0,embd_pdrop=0,attn_pdrop=0,vocab_size={row.vocab}", "--block_size",
        row.length, "--precision", row.precision, "--gpu", row.gpu, "--num_gpus", row.gpus, "--strategies",
        row.strategy, "--gradient_accumulation_steps", row.accumulation,
    )  # fmt: skip
    (outcome,) = planner.layouts(row.strategy, lambda resolved: "")
    assert planner.speed(outcome.resolved, row.micro_batch).time.seconds == pytest.approx(row.predicted, rel=1e-3)


def test_a_machine_states_what_no_option_does():
    def stated(*flags) -> PlanOptions:
        return read_with_recipe(PlanOptions, [*RECIPE, *map(str, flags)], prog="plan")[0]

    named = stated("--machine", "p4d.24xlarge", "--num_gpus", 16, "--network_bandwidth", 3)
    assert (named.gpu, named.gpus_per_node, named.num_gpus) == ("a100-40gb", 8, 16)
    assert (named.network_bandwidth, named.host_memory) == (3, "1152GiB")


def test_a_machine_that_is_not_known_is_named(capsys):
    assert main(["plan", *RECIPE, "--machine", "dgx-h10"]) == 2
    assert "dgx-h100" in capsys.readouterr().err
