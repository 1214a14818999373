"""What is an anomaly, and above all what is none."""

import math

import numpy as np
import pytest
import torch

from zerofit.health.anomaly import MAX_OVERFLOWS, AnomalyDetector


def judged(detector: AnomalyDetector, figures: dict[str, float]) -> str | None:
    """Why an update with these figures is refused."""
    loss, norm = torch.tensor([2.0 * figures["loss"], figures["grad_norm"]], dtype=torch.float64)
    accepted = bool(detector.bounds(targets=2.0).accept(loss, norm))
    return detector.record(figures, refused=not accepted)


def trained(losses, norms=None, threshold: float = 10.0, clipped: bool = False) -> tuple[AnomalyDetector, list]:
    detector = AnomalyDetector(threshold, clipped, scaled=False)
    norms = np.ones(len(losses)) if norms is None else norms
    return detector, [judged(detector, {"loss": loss, "grad_norm": norm}) for loss, norm in zip(losses, norms)]


def curve(updates: int, noise: float, seed: int = 0) -> np.ndarray:
    """A loss that falls from 10 to 2.5 with noise relative to its size."""
    rng = np.random.default_rng(seed)
    return (2.5 + 7.5 * np.exp(-np.arange(updates) / 60)) * np.exp(noise * rng.standard_normal(updates))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_what_is_no_finite_number_is_a_fault_from_the_first_update_on(name, value):
    figures = {"loss": 1.0, "grad_norm": 1.0, name: value}
    assert name in judged(AnomalyDetector(0.0, True, False), figures)


def ordinary(noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    norms = 3 * np.exp(0.5 * np.random.default_rng(seed + 100).standard_normal(2000)) / (1 + np.arange(2000) / 200)
    return curve(2000, noise, seed), norms


def known_by_heart() -> tuple[np.ndarray, np.ndarray]:
    """With a hard example now and then."""
    rng = np.random.default_rng(0)
    losses = 1e-3 * np.exp(0.3 * rng.standard_normal(1500))
    losses[::40] = rng.uniform(0.1, 0.5, len(losses[::40]))
    return losses, losses * 10


RUNS = {f"noise {noise}, seed {seed}": ordinary(noise, seed) for noise in (0.005, 0.05, 0.2) for seed in range(2)}
RUNS["warm-up, in which gradients grow"] = curve(300, 0.05), np.linspace(0.1, 8, 300)
RUNS["falls to nothing"] = np.append(curve(400, 0.03), 1e-6), np.append(np.ones(400), 1e-6)
RUNS["known by heart"] = known_by_heart()


@pytest.mark.parametrize("run", RUNS)
def test_an_ordinary_run_has_no_fault(run):
    assert set(trained(*RUNS[run])[1]) == {None}


@pytest.mark.parametrize("factor", [3.0, 100.0])
def test_a_spike_of_the_loss_is_a_fault_and_is_not_learned_from(factor):
    detector, anomalies = trained(curve(400, 0.03))
    assert set(anomalies) == {None}
    before = {name: list(past) for name, past in detector.history.items()}
    for _ in range(3):
        assert "robust z-score" in judged(detector, {"loss": 2.5 * factor, "grad_norm": 1.0})
    assert detector.history == before
    assert judged(detector, {"loss": 2.5, "grad_norm": 1.0}) is None


def test_where_gradients_are_clipped_a_large_norm_alone_is_no_spike():
    """A BlenderBot from scratch, at a high learning rate, had a norm of 400 times its median, and learned on."""
    detector, _ = trained(curve(400, 0.03), clipped=True)
    assert judged(detector, {"loss": 2.5, "grad_norm": 1000.0}) is None
    assert "grad_norm is inf" in judged(detector, {"loss": 2.5, "grad_norm": math.inf})
    assert "robust z-score" in judged(detector, {"loss": 25.0, "grad_norm": 1000.0})


def test_an_overflow_of_the_loss_scaler_is_no_fault_until_it_never_ends():
    detector = AnomalyDetector(10.0, clipped=False, scaled=True)
    for _ in range(MAX_OVERFLOWS - 1):
        assert judged(detector, {"loss": 2.0, "grad_norm": math.inf}) is None
    assert "whatever the loss scale" in judged(detector, {"loss": 2.0, "grad_norm": math.inf})
    detector = AnomalyDetector(10.0, clipped=False, scaled=True)
    for _ in range(3 * MAX_OVERFLOWS):
        assert judged(detector, {"loss": 2.0, "grad_norm": math.nan}) is None
        assert judged(detector, {"loss": 2.0, "grad_norm": 1.0}) is None
    assert "loss" in judged(detector, {"loss": math.nan, "grad_norm": math.nan})


def test_a_resumed_detector_judges_as_one_that_was_not():
    losses = curve(300, 0.03)
    whole, _ = trained(losses)
    first, _ = trained(losses[:200])
    second = AnomalyDetector(10.0, False, False, {name: list(past) for name, past in first.history.items()})
    for loss in losses[200:]:
        judged(second, {"loss": loss, "grad_norm": 1.0})
    assert second.history == whole.history
