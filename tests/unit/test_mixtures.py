"""Mixtures of experts: the auxiliary loss is the model's own, padding does not count, loads are what was chosen."""

import numpy as np
import pytest
import torch
from helpers import refusal, tiny_model

from zerofit.data.collate import CausalCollator
from zerofit.data.pack import Documents, PackedBlocks
from zerofit.model.loss import install_loss
from zerofit.strategy.expert_parallel import check_experts, find_experts

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 64, "output_router_logits": True, "router_aux_loss_coef": 0.3,
         "num_experts_per_tok": 2, "num_experts": 4}  # fmt: skip
FAMILIES = {
    "mixtral": {"intermediate_size": 48},
    "qwen2_moe": {"intermediate_size": 48, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"moe_intermediate_size": 24, "head_dim": 8, "mlp_only_layers": [1], "intermediate_size": 48},
    "olmoe": {"intermediate_size": 48},
}


def mixture(family: str = "mixtral", **changes):
    return tiny_model(family, **{**SHAPE, **FAMILIES[family], **changes}).train()


def padded(lengths: tuple[int, ...] = (12, 7), width: int = 12) -> dict[str, torch.Tensor]:
    """Rows of some lengths, whose first three tokens are not trained on."""
    ids = torch.randint(1, 97, (len(lengths), width), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def trained_alike(model, batches: list[dict[str, torch.Tensor]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(loss sums, gradients) of an update of these micro-batches, as a run computes them."""
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    model.zero_grad()
    model.routing.begin(targets, tokens)
    losses = []
    for batch in batches:
        loss = model(**batch)
        (loss / targets).backward()
        losses.append(loss.item())
    return losses, gradients(model)


@pytest.mark.parametrize("kind", ["chunked", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_micro_batch_has_the_gradient_of_transformers(family, kind):
    model, batch = mixture(family), padded()
    theirs = model(**batch)
    theirs.loss.backward()
    expected = gradients(model)
    install_loss(model, kind)
    (loss,), own = trained_alike(model, [batch])
    assert len(own) == len(expected) > 20
    for name, gradient in expected.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    targets = int((batch["labels"][:, 1:] != -100).sum())
    assert loss / targets == pytest.approx((theirs.loss - 0.3 * theirs.aux_loss).item(), rel=1e-5)
    figures = model.routing.figures(model.routing.sums, tokens=19)._asdict()
    assert figures["aux_loss"] == pytest.approx(theirs.aux_loss.item(), rel=1e-5)


def test_micro_batches_count_by_their_tokens():
    """The auxiliary losses of two of them, times their shares of all tokens; without it the loss is the same."""
    first, second = padded((12, 7)), padded((5, 3), width=5)
    model = mixture()
    auxiliary = [model(**batch).aux_loss.item() for batch in (first, second)]
    install_loss(model, "chunked")
    losses, with_it = trained_alike(model, [first, second])
    figures = model.routing.figures(model.routing.sums, tokens=27)._asdict()
    assert figures["aux_loss"] == pytest.approx((auxiliary[0] * 19 + auxiliary[1] * 8) / 27, rel=1e-5)
    plain = mixture(output_router_logits=False)
    install_loss(plain, "chunked")
    same, without = trained_alike(plain, [first, second])
    assert same == pytest.approx(losses)
    assert plain.routing.figures(plain.routing.sums, tokens=27).aux_loss is None
    (without_loss,), (line, slow) = plain.routing.describe(autocast=False), model.routing.describe(autocast=True)
    assert "no auxiliary loss" in without_loss
    assert "times 0.3" in line
    assert "computed in fp32" in slow
    router = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(with_it[router], without[router], rtol=1e-2)


@pytest.mark.parametrize("recomputed", [False, True])
def test_loads_are_what_was_chosen_without_padding(recomputed):
    model = mixture(num_hidden_layers=2)
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    install_loss(model, "chunked")
    trained_alike(model, [padded((12, 7))])
    choices = np.array(model.routing.sums[1:]).reshape(2, 4)
    assert choices.sum(axis=1).tolist() == [38, 38]  # two of each of 19 tokens, in each layer
    figures = model.routing.figures(model.routing.sums, tokens=19)._asdict()
    assert figures["expert_load_max"] == pytest.approx(choices.max() * 4 / 38)
    assert figures["expert_load_min"] == pytest.approx(choices.min() * 4 / 38)
    before = model.routing.sums
    trained_alike(model, [padded((12, 7), width=12)])
    assert model.routing.sums == before
    model.eval()
    model(**padded())
    assert model.routing.sums == before  # an evaluation counts nothing


def test_the_filling_of_packed_rows_is_not_counted():
    from datasets import Dataset

    documents = Documents(Dataset.from_dict({"input_ids": [list(range(1, 10)), list(range(20, 33))]}))
    blocks = PackedBlocks(documents, 16, boundaries=True, filler=0)
    batch = CausalCollator(0, marks_padding=True)([(blocks[0], 0), (blocks[1], 1)])
    assert (batch.num_tokens, batch.num_positions) == (22, 32)
    model = mixture()
    install_loss(model, "chunked")
    model(**batch.inputs)
    assert sum(model.routing.sums[1:]) == 22 * 2 * 3
    model.eval()(**batch.inputs)
    assert "is_token" not in CausalCollator(0)([(blocks[0], 0)]).inputs


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_are_divided(family):
    model = mixture(family)
    layers = 2 if family == "qwen3_moe" else 3
    assert len(find_experts(model)) == layers
    assert all(each.num_experts == 4 == len(each.down_proj) for each in find_experts(model))
    check_experts(model.config, 4, "ep.yaml")
    message = refusal(check_experts, model.config, 3, "ep.yaml")
    assert "ep.yaml: expert parallelism on 3 processes, and the model has 4 experts" in message
    assert "--num_processes 2, 4, or fsdp2.yaml" in message
