"""`zerofit submit --plan`: the number of nodes, the strategy and the batch are those that `zerofit plan` predicts."""

import sys
from functools import partial
from pathlib import Path

from zerofit.launch.command import read_options
from zerofit.recipe.errors import UserError
from zerofit.record.terminal import size
from zerofit.tools.plan.layouts import read_pair
from zerofit.tools.plan.parallel import find_all
from zerofit.tools.plan.plan import prepare
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.plan.prediction import Prediction
from zerofit.tools.plan.write import batch_flags
from zerofit.tools.submit.submit_options import SubmitOptions
from zerofit.tools.tool_recipe import read_with_recipe

MAX_NODES = 16  # where --nodes does not say it


def planned_words(options: SubmitOptions, words: list[str]) -> tuple[int, list[str]]:
    """(the smallest number of nodes on which the run fits, its words with the fastest strategy there and its batch).

    Raises:
        UserError: it fits on no number of nodes.
    """
    launch, (script, *flags) = read_options(words)
    max_nodes = options.nodes or MAX_NODES
    counts = [2**power for power in range(max_nodes.bit_length()) if 2**power <= max_nodes]
    for nodes in dict.fromkeys([*counts, max_nodes]):
        given = [
            "--task",
            Path(script).stem,
            *flags,
            "--gpu",
            options.gpu,
            "--num_gpus",
            nodes * options.gpus_per_node,
            "--gpus_per_node",
            options.gpus_per_node,
            "--strategies",
            launch.strategy or "all",
            *(["--architecture", options.architecture] if options.architecture else []),
        ]
        plan, _ = read_with_recipe(PlanOptions, [str(word) for word in given], prog="zerofit submit --plan")
        if found := _fastest(plan):
            memory = size(found.peak.needed)
            print(f"plan      {plan.num_gpus} GPUs, {found.strategy}: {memory} of each", file=sys.stderr)
            strategy = [] if launch.strategy else ["--strategy", found.strategy]
            return nodes, [*words, *strategy, *batch_flags(found, plan)]
    raise UserError(
        f"plan: it fits on no number of nodes up to {max_nodes} ({options.gpus_per_node} x {options.gpu}). Set a "
        "larger --nodes, or say --lora or --gradient_checkpointing"
    )


def _fastest(plan: PlanOptions) -> Prediction | None:
    """Of the strategies as they stand in their files; None: none fits."""
    planner, _, _, outcomes, _ = prepare(plan)
    possible = [one for one in outcomes if one.degrees == read_pair(one.strategy).degrees]
    find = partial(planner.find, sizes=plan.micro_batches, max_batch_size=plan.max_batch_size)
    find_all(planner.model, possible, find, lambda done, count: None)
    return min((one.best for one in possible if one.best), key=lambda one: one.rank, default=None)
