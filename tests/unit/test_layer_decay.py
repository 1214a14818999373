"""layer_decay: each layer's own learning rate, against torch's AdamW with groups made by hand."""

import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from zerofit.recipe import ClsRecipe, parse_recipe
from zerofit.strategy.engine import Engine
from zerofit.strategy.optimizers import make_optimizer

BASIC = ("--model_name_or_path", "x", "--train_file", "x.csv", "--per_device_train_batch_size", "4")
SIZES = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
# {model_type: (how its layers are called, what of the rest is an embedding)}
NAMES = {
    "bert": (r"encoder\.layer\.(\d)\.", r"embeddings"),
    "deberta-v2": (r"encoder\.layer\.(\d)\.", r"embeddings"),  # those of relative positions too
    "gpt2": (r"\.h\.(\d)\.", r"wte|wpe"),
    "llama": (r"layers\.(\d)\.", r"embed_tokens"),
}


def recipe(*flags: str) -> ClsRecipe:
    return parse_recipe(ClsRecipe, [*BASIC, "--weight_decay", "0.1", *flags], prog="cls.py")


def classifier(model_type: str) -> torch.nn.Module:
    more = {"relative_attention": True, "pos_att_type": "p2c|c2p", "norm_rel_ebd": "layer_norm", "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, vocab_size=40, num_labels=3, **SIZES, **more)
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).eval()


def scale_by_hand(name: str, model_type: str) -> float:
    layer, embedding = NAMES[model_type]
    if found := re.search(layer, name):
        return 0.5 ** (3 - int(found[1]))
    return 0.5**4 if re.search(embedding, name) else 1.0


@pytest.mark.parametrize("model_type", NAMES)
def test_updates_are_those_of_groups_made_by_hand(model_type):
    ours, theirs = classifier(model_type), classifier(model_type)
    engine = SimpleNamespace(torch_optimizer=make_optimizer(ours, recipe("--layer_decay", "0.5"), torch.device("cpu")))
    by_hand = torch.optim.AdamW(
        [
            {"params": [each], "weight_decay": 0.1 * (each.ndim > 1), "name": name}
            for name, each in theirs.named_parameters()
        ]
    )
    for index in range(3):
        Engine.set_learning_rate(engine, 1e-3 / (1 + index))
        for group in by_hand.param_groups:
            group["lr"] = 1e-3 / (1 + index) * scale_by_hand(group["name"], model_type)
        for one, other in zip(ours.parameters(), theirs.parameters()):
            one.grad = other.grad = torch.randn_like(one)
        engine.torch_optimizer.step()
        by_hand.step()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9, msg=name)
