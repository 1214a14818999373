"""ema_decay: the mean of the weights, beside each optimizer's state. Strategies: test_agreement.py."""

import pytest
import torch
from helpers import refusal
from test_muon import Alternating
from test_optimizers import Other
from test_resuming import recipe
from test_saving import Alone, save, saver_of

ENGINES = {"adamw": Alone, "muon": Alternating, "adafactor": lambda seed=0: Other("adafactor", seed)}


def average(engine: Alone, updates: range) -> list[list[torch.Tensor]]:
    """Train, and move the mean after each update; returns the weights of each."""
    seen = []
    for update in updates:
        engine.train(range(update, update + 1))
        engine.state.update_ema(0.7)
        seen.append([each.detach().clone() for each in engine.module.parameters()])
    return seen


@pytest.mark.parametrize("optim", ENGINES)
def test_it_is_the_mean_of_what_there_was_and_resumes_to_the_bit(tmp_path, optim):
    engine, undisturbed = ENGINES[optim](), ENGINES[optim]()
    by_hand = [each.detach().clone() for each in engine.module.parameters()]
    engine.state.start_ema()
    weights = average(engine, range(3))
    saver = saver_of(engine, tmp_path, asynchronous=False)
    save(saver, engine, 3)
    assert not saver.wait()
    weights += average(engine, range(3, 6))
    undisturbed.train(range(6))
    assert all(map(torch.equal, weights[-1], undisturbed.module.parameters())), "training is as it was"
    again = ENGINES[optim](seed=5)
    again.state.start_ema()
    folder, _ = saver.choose("auto")
    saver_of(again, tmp_path).load(folder)
    average(again, range(3, 6))
    for of_update in weights:
        by_hand = [0.7 * mean + 0.3 * weight for mean, weight in zip(by_hand, of_update)]
    with engine.state.averaged(), again.state.averaged():
        for mean, ours, resumed in zip(by_hand, engine.module.parameters(), again.module.parameters()):
            torch.testing.assert_close(ours, mean, rtol=1e-6, atol=1e-7)
            assert torch.equal(ours, resumed)
    assert all(map(torch.equal, weights[-1], engine.module.parameters())), "the weights are back"


def test_a_mean_that_never_moves_is_refused():
    assert "ema_decay" in refusal(recipe, "--ema_decay", "1")
