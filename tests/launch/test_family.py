"""A model family under every strategy that its entry in zerofit/model/families.py says it can: one command a family.

    pytest tests/launch/test_family.py --family olmo2

The model is small and has random weights; the same text, packed, is trained on by one process and by each strategy.
"""

import pytest
from helpers import (
    ROOT,
    check_alike,
    check_same_weights,
    launch,
    load_texts,
    loss_of_transformers,
    metrics,
    small_sizes,
    updates,
)
from transformers import AutoConfig, AutoModelForCausalLM

from zerofit.model.families import ALL_LINEAR, FAMILY_BY_MODEL_TYPE
from zerofit.recipe import ClmRecipe, parse_recipe

UPDATES, RTOL = 8, 1e-5
LAYOUTS = {"zero3": 2, "tp": 2, "tp_zero3": 4, "pp": 2, "3d": 4, "sp": 2}  # processes
TEXT = ROOT / "docs" / "fine-tune.md"
RUN = ["--train_file", TEXT, "--document_separator", "line", "--train_tokenizer_vocab_size", "301",
       "--max_train_samples", "100", "--max_eval_samples", "17", "--block_size", "96", "--packing", "documents",
       "--per_device_train_batch_size", "2", "--global_batch_size", "8", "--max_train_steps", UPDATES,
       "--learning_rate", "1e-3", "--num_warmup_steps", "2", "--weight_decay", "0.1", "--precision", "fp32",
       "--sample_tokens", "0"]  # fmt: skip


def pytest_generate_tests(metafunc):
    asked = metafunc.config.getoption("--family")
    families = [asked] if asked else [pytest.param("olmo2", marks=pytest.mark.long)]
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", families, scope="module")
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", LAYOUTS)


def is_possible(family: str, layout: str) -> bool:
    about = FAMILY_BY_MODEL_TYPE[family]
    return {
        "tp": about.tensor_plan,
        "tp_zero3": about.tensor_plan,
        "pp": about.stage_plan,
        "3d": about.tensor_plan and about.stage_plan,
        "sp": about.splits_rows,
    }.get(layout, True)


@pytest.fixture(scope="module")
def model_flags(family) -> list[str]:
    """A small model without dropout."""
    sizes = small_sizes(family, num_hidden_layers=4, n_layer=4)
    return ["--model_type", family, "--config_overrides", ",".join(f"{name}={value}" for name, value in sizes.items())]


@pytest.fixture(scope="module")
def run(model_flags, cache, launched_once):
    """run(layout) -> output folder."""

    def once(layout: str):
        flags = (*model_flags, *RUN, "--cache_dir", cache)
        return launched_once(layout, *flags, strategy=layout, processes=LAYOUTS.get(layout, 1))

    return once


def test_the_loss_is_that_of_transformers(run, tmp_path):
    """Of the exported model over the held-out texts."""
    output = run("single")
    flags = "--config", output / "recipe.yaml", "--model_name_or_path", output, "--packing", "none"
    (line,) = launch(tmp_path / "again", *flags, "--evaluate_only", strategy="single", processes=1)
    recipe = parse_recipe(ClmRecipe, ["--config", str(output / "recipe.yaml")])
    texts = filter(None, load_texts(recipe).validation["text"])
    assert line["eval_loss"] == pytest.approx(loss_of_transformers(output / "model", texts, 96), rel=RTOL)


def test_it_learns_alike_under_every_strategy(family, run, layout):
    """Loss, gradient norm, learning rate and held-out loss of every update."""
    if not is_possible(family, layout):
        pytest.skip(f"{family} has no plan for {layout}")
    lines, reference = metrics(run(layout)), metrics(run("single"))
    assert len(updates(reference)) == UPDATES
    assert updates(reference)[-1]["loss"] < updates(reference)[0]["loss"] - 0.1
    check_alike(lines, reference, RTOL)


def test_the_exported_weights_are_whole_and_the_same(family, run, layout):
    if not is_possible(family, layout):
        pytest.skip(f"{family} has no plan for {layout}")
    check_same_weights(*(run(each) / "model" for each in (layout, "single")))


def test_an_adapter_finds_its_layers(family, run):
    """The layers that get an adapter by default are linear layers of the model, in each of its blocks."""
    config = AutoConfig.from_pretrained(run("single") / "model")
    model = AutoModelForCausalLM.from_config(config)
    linear = {
        path
        for path, layer in model.named_modules()
        if getattr(layer, "weight", None) is not None and layer.weight.dim() == 2 and "embed" not in path
    }
    for target in FAMILY_BY_MODEL_TYPE[family].lora_targets:
        found = [path for path in linear if path.endswith(f".{target}")]
        assert target == ALL_LINEAR or len(found) >= config.num_hidden_layers, target
