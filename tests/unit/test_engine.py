"""Parts of the engine and of loading that need no launch: the gradient norm, and weights that were not loaded."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_deberta
from transformers import AutoConfig, AutoModelForSequenceClassification

from train.model.load import build_model, weights_of_head
from train.recipe import ClsRecipe
from train.strategy.engine import gradient_norm


def test_the_gradient_norm_is_exact_on_a_cpu():
    """torch's own fp32 norm adds up squares one after another on a CPU, and is off by 4e-3 at this size."""
    torch.manual_seed(0)
    gradients = [torch.randn(20_000_000) * 1e-3, torch.randn(7)]
    exact = sum(gradient.double().square().sum() for gradient in gradients).sqrt().item()
    assert float(gradient_norm(gradients)) == pytest.approx(exact, rel=1e-9)


STRATEGY = SimpleNamespace(
    shards_parameters=False, model_dtype=torch.float32, gathered=lambda parameter: contextlib.nullcontext()
)


@pytest.fixture
def three_labels(tmp_path):
    tiny_deberta(tmp_path / "deberta", num_labels=3)
    return str(tmp_path / "deberta")


def two_labels(folder: str):
    config = AutoConfig.from_pretrained(folder)
    config.num_labels = 2
    return config


def test_the_weights_of_a_head_are_found(three_labels):
    names = weights_of_head(AutoModelForSequenceClassification, two_labels(three_labels), 3)
    assert names == ["classifier.weight", "classifier.bias"]
    assert weights_of_head(AutoModelForSequenceClassification, two_labels(three_labels), 2) == []


def test_a_new_head_follows_from_the_seed_alone(three_labels):
    recipe, head = ClsRecipe(model_name_or_path=three_labels), ["classifier.weight", "classifier.bias"]
    models = []
    for seed, noise in ((1, 5), (1, 6), (2, 5)):
        torch.manual_seed(noise)
        config = two_labels(three_labels)
        models.append(build_model(AutoModelForSequenceClassification, config, recipe, STRATEGY, seed, left_out=head))
    first, second, other = (model.state_dict() for model in models)
    before = AutoModelForSequenceClassification.from_pretrained(three_labels).state_dict()
    assert first["classifier.weight"].shape == (2, 32)
    assert torch.equal(first["classifier.weight"], second["classifier.weight"])
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])
    assert 0.01 < first["classifier.weight"].std() < 0.04, "drawn with the configuration's initializer_range"
    assert torch.equal(first["classifier.bias"], torch.zeros(2))
    loaded = [name for name in first if name not in head]
    assert len(loaded) > 40
    assert all(torch.equal(first[name], before[name]) for name in loaded)
