"""optim: what each optimizer keeps, where it is refused, and that a run with it resumes to the bit."""

from types import SimpleNamespace

import pytest
import torch
from helpers import refusal
from test_resuming import leave_a_run, recipe
from test_saving import Alone, save, saver_of
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from zerofit.checkpoint.manager import EarlierRuns, differences_from
from zerofit.recipe.errors import UserError
from zerofit.recipe.options import OPTIMIZERS, make_schedule
from zerofit.record.run_folder import identity_options
from zerofit.strategy.optimizers import (
    KEPT,
    ReplicatedOptimizerState,
    check_kept,
    keep_group_rates,
    make_optimizer,
    rates_of,
    state_bytes,
)

SHAPES = ((128, 64), (40, 103), (3, 50, 60), (70,), (5000,), (7, 3))


@pytest.fixture(params=[name for name in OPTIMIZERS if name != "muon"])  # of Muon see test_muon.py
def optim(request):
    if request.param == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="no dependency of the tests: pip install bitsandbytes")
    return request.param


def test_the_state_is_as_large_as_predicted(optim):
    module = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES)
    optimizer = make_optimizer(module, recipe("--optim", optim), torch.device("cpu"))
    for parameter in module:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for parameter in module:
        own = sum(each.nbytes for name, each in optimizer.state[parameter].items() if name in KEPT[optim])
        assert own == state_bytes(optim, parameter.shape), parameter.shape


class Other(Alone):
    """An engine of one process with another optimizer than AdamW."""

    def __init__(self, optim: str, seed: int = 0, width: int = 640):
        super().__init__(seed, width)
        self.torch_optimizer = make_optimizer(
            self.module, recipe("--optim", optim, "--learning_rate", "1e-2"), torch.device("cpu")
        )
        self.state = ReplicatedOptimizerState(self, optim)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_run_resumes_to_the_bit(tmp_path, optim, asynchronous):
    engine = Other(optim)
    engine.train(range(3))
    saver = saver_of(engine, tmp_path, asynchronous=asynchronous == "true")
    save(saver, engine, 3)
    assert not saver.wait()
    after = engine.train(range(3, 6))
    again = Other(optim, seed=5)
    folder, _ = saver.choose("auto")
    saver_of(again, tmp_path).load(folder)
    assert again.state.steps == 3
    assert again.train(range(3, 6)) == after
    for name, tensor in engine.state.whole_tensors().items():
        assert again.state.whole_tensors()[name].equal(tensor), name
    assert len(engine.state.whole_tensors()) >= 6
    tensors = sum(file.stat().st_size for file in (folder / "state").glob("*.safetensors"))
    assert engine.state.bytes_of_all() < tensors < engine.state.bytes_of_all() + 3000


def test_a_run_does_not_resume_with_another_optimizer(tmp_path):
    now, folder = recipe("--optim", "adafactor"), leave_a_run(tmp_path, recipe(), 8, 1)
    earlier = EarlierRuns.read(now, folder)
    assert "optim was 'adamw', now 'adafactor'" in refusal(earlier.plan, now, 8, folder)
    named = SimpleNamespace(**{**vars(now), "resume": "RUN"})
    named.to_dict, named.names_with = now.to_dict, now.names_with
    assert "one optimizer cannot read what another has kept" in refusal(
        differences_from, named, 8, identity_options(recipe(), 8)
    )


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("AdamW", ""),
        ("RAdam", ""),
        ("NAdam", "mu_product"),
        ("SGD", "nothing"),
        ("Rprop", "prev"),
        ("Adafactor", "variance"),
    ],
)
def test_what_checkpoints_cannot_keep_is_refused(kind, refused):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    if refused:
        assert refused in refusal(check_kept, optimizer)
    else:
        check_kept(optimizer)


@pytest.mark.parametrize(
    ("rates", "common", "scales"),
    [
        ((1e-3, 1e-3), 1e-3, (None, None)),
        ((1e-3, 1e-4), 1e-3, (None, 0.1)),
        ((0.0, 1e-3), 1e-3, (0.0, None)),
        ((0.5, 0.5), 0.5, (None, None)),  # the schedule's rates hold
        ((2e-3, 1e-4), 0.5, (2.0, 0.1)),  # no group has the optimizer's: in proportion to the recipe's
    ],
)
def test_groups_keep_their_rates_in_proportion(rates, common, scales):
    now = recipe("--learning_rate", "1e-3")
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "lr": rate} for rate in rates]
    optimizer = torch.optim.AdamW(groups, lr=common)
    warning = keep_group_rates(optimizer, now, make_schedule(now, 4))
    assert tuple(group.get("lr_scale") for group in optimizer.param_groups) == pytest.approx(scales)
    assert (warning is not None) == (rates == (0.5, 0.5))
    assert keep_group_rates(optimizer, now, lambda update: 1.0) is None


def test_a_scheduler_of_transformers_is_a_function_of_the_update():
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(3))]},
        {"params": [torch.nn.Parameter(torch.ones(3))], "lr": 1e-4},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=4)
    assert [rates_of(scheduler)(update) for update in range(5)] == pytest.approx([0, 5e-4, 1e-3, 5e-4, 0])
    keep_group_rates(optimizer, recipe("--learning_rate", "1e-3"), rates_of(scheduler))
    assert [group.get("lr_scale") for group in optimizer.param_groups] == [None, pytest.approx(0.1)]
    with pytest.raises(UserError, match="a factor for each group"):
        rates_of(LambdaLR(optimizer, [lambda update: 1.0, lambda update: 0.5]))
