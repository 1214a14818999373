"""optim: what each optimizer keeps, where it is refused, and that a run with it resumes to the bit."""

from types import SimpleNamespace

import pytest
import torch
from helpers import refusal
from test_resuming import leave_a_run, recipe
from test_saving import Alone, save, saver_of

from zerofit.checkpoint.resume import EarlierRuns, differences_from
from zerofit.recipe.options import OPTIMIZERS
from zerofit.record.run_folder import identity_options
from zerofit.strategy.optimizers import KEPT, ReplicatedOptimizerState, check_kept, make_optimizer, state_bytes

CPU = torch.device("cpu")
SHAPES = ((128, 64), (40, 103), (3, 50, 60), (70,), (5000,), (7, 3))


@pytest.fixture(params=[name for name in OPTIMIZERS if name != "muon"])  # of Muon see test_muon.py
def optim(request):
    if request.param == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="no dependency of the tests: pip install bitsandbytes")
    return request.param


def optimizer_of(module: torch.nn.Module, *flags: str) -> torch.optim.Optimizer:
    return make_optimizer(module, recipe(*flags), CPU)


def test_the_state_is_as_large_as_predicted(optim):
    module = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES)
    optimizer = optimizer_of(module, "--optim", optim)
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
        self.torch_optimizer = optimizer_of(self.module, "--optim", optim, "--learning_rate", "1e-2")
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
    ("kind", "refused"), [("AdamW", ""), ("RAdam", ""), ("NAdam", "mu_product"), ("SGD", "nothing")]
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
