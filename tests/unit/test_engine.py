"""Parts of the engine that need no launch: the gradient norm, and an update that the device refuses."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers import NOT_SHARDED

from zerofit.strategy.engine import Bounds, Engine, Outcome
from zerofit.strategy.engines import TorchEngine, gradient_norm


def test_the_gradient_norm_is_exact_on_a_cpu():
    """torch's own fp32 norm adds up squares one after another on a CPU, and is off by 4e-3 at this size."""
    torch.manual_seed(0)
    gradients = [torch.randn(20_000_000) * 1e-3, torch.randn(7)]
    exact = sum(gradient.double().square().sum() for gradient in gradients).sqrt().item()
    assert float(gradient_norm(gradients)) == pytest.approx(exact, rel=1e-9)


def deciding_engine(max_grad_norm: float) -> TorchEngine:
    """One process whose AdamW steps, or does not, as the device has found."""
    torch.manual_seed(0)
    engine = TorchEngine.__new__(TorchEngine)
    engine.module = torch.nn.Linear(8, 4)
    inner = torch.optim.AdamW(engine.module.parameters(), lr=0.1, fused=True)
    engine.optimizer = engine.torch_optimizer = inner
    engine.accelerator = Accelerator(cpu=True)
    engine.strategy = NOT_SHARDED
    engine.parameters = [*engine.module.parameters()]
    engine.ema_decay, engine.max_grad_norm = 0.0, max_grad_norm
    return engine


def backward(engine: TorchEngine, factor: float = 1.0) -> list[torch.Tensor]:
    loss = factor * engine.module(torch.ones(2, 8)).pow(2).sum()
    loss.backward()
    return [loss.detach()]


def held(engine: TorchEngine) -> list[torch.Tensor]:
    state = engine.torch_optimizer.state
    return [each.clone() for p in engine.parameters for each in (p, *state[p].values())]


def test_a_refused_update_leaves_the_mean_of_the_weights():
    engine, moved = deciding_engine(1.0), []
    engine.ema_decay, engine.state = 0.5, SimpleNamespace(update_ema=moved.append)
    assert engine.step(backward(engine, float("nan")), Bounds()).refused
    assert moved == []
    assert not engine.step(backward(engine), Bounds()).refused
    assert moved == [0.5]


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e6])
def test_the_device_steps_as_the_host_does(max_grad_norm):
    """Clipping within the step: each gradient is divided where torch's clip_grad_norm_ multiplies it."""
    ours, theirs = deciding_engine(max_grad_norm), deciding_engine(max_grad_norm)
    assert ours.decides_on_device
    for _ in range(3):
        outcome = ours.step(backward(ours), Bounds())
        losses = backward(theirs)
        norm = gradient_norm([p.grad for p in theirs.parameters])
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(theirs.parameters, max_grad_norm)
        theirs.torch_optimizer.step()
        theirs.torch_optimizer.zero_grad()
        assert (outcome.loss_sum, outcome.grad_norm) == pytest.approx((float(losses[0]), float(norm)), rel=1e-6)
        for one, other in zip(held(ours), held(theirs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=3e-8)


def test_the_rate_is_told_where_a_group_stands_still():
    """`lr_scale` of 0, with which a script freezes a group, in the first group too."""
    layer = torch.nn.Linear(2, 2)
    groups = [{"params": [layer.weight], "lr_scale": 0.0}, {"params": [layer.bias], "lr_scale": 0.5}]
    engine = SimpleNamespace(torch_optimizer=torch.optim.SGD(groups, lr=1.0))
    Engine.set_learning_rate(engine, 0.2)
    assert [group["lr"] for group in engine.torch_optimizer.param_groups] == [0.0, 0.1]
    assert Engine.learning_rate.fget(engine) == 0.2


def test_an_update_that_is_left_out_has_no_figures():
    outcome = Outcome([], lambda: (False, []), ())
    assert outcome.skipped
    assert (outcome.loss_sum, outcome.grad_norm, outcome.refused) == (0, 0, False)
