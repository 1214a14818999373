"""Layouts predicted by several processes: the same plan, and the same errors."""

import json

from zerofit.tools.plan import parallel
from zerofit.tools.plan.parallel import in_processes
from zerofit.tools.plan.plan import main

PLAN = ["--task", "clm", "--config_name", "gpt2", "--block_size", "32", "--precision", "bf16", "--num_gpus", "2",
        "--config_overrides", "n_layer=2,n_head=2,n_embd=32,n_positions=32,vocab_size=512", "--gpu", "a100-40gb",
        "--strategies", "ddp,zero2,zero3", "--json", "-"]  # fmt: skip


def test_a_plan_is_the_same_in_one_process_and_in_two(monkeypatch, capfd):
    used = []

    def noted(function, items, workers, progress):
        used.append(workers)
        return in_processes(function, items, workers)

    monkeypatch.setattr(parallel, "in_processes", noted)
    monkeypatch.setattr(parallel, "usable_cores", lambda: 2)
    plans = []
    for can_fork in (False, True):
        monkeypatch.setattr(parallel, "_can_fork", lambda can_fork=can_fork: can_fork)
        assert main(PLAN) == 0
        plans.append(json.loads(capfd.readouterr().out))
    assert used == [1, 2]
    assert len(plans[0]["predictions"]) >= 4
    assert plans[0] == plans[1]
