"""Terms beside the cross entropy, a teacher's distribution among them, against formulas in fp64."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import recipe_of, tiny_model
from transformers import AutoTokenizer

import zerofit.model.chunked_loss as chunked_module
from zerofit.data.collate import Batch
from zerofit.estimate.planned_model import read_planned_model
from zerofit.model.chunked_loss import Distillation, TokenLoss
from zerofit.model.loss import TEACHER_HIDDEN, install_loss
from zerofit.recipe.errors import UserError
from zerofit.training.causal import Teacher
from zerofit.training.run_configuration import check_teacher

VOCABULARY = 97


def expected_loss(logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor, terms: TokenLoss) -> torch.Tensor:
    """Written down as the documentation has it."""
    how, logits, teacher, targets = terms.distillation, logits[:, :-1], teacher[:, :-1], labels[:, 1:]
    smoothing = terms.label_smoothing
    hard = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=smoothing)
    hard = hard + terms.z_loss * logits.logsumexp(-1)[targets != -100].square().sum()
    if how is None:
        return hard
    p, q = ((each / how.temperature).softmax(-1) for each in (teacher, logits))
    p, q = (q, p) if how.reverse else (p, q)
    divergence = (p * (p / q).log()).sum(-1)[targets != -100].sum()
    return (1 - how.weight) * hard + how.weight * how.temperature**2 * divergence


@pytest.mark.parametrize("kind", ["full", "chunked"])
@pytest.mark.parametrize(
    "terms",
    [
        TokenLoss(0.1, 0.0),
        TokenLoss(0.0, 1e-2),
        TokenLoss(distillation=Distillation(1.0)),
        TokenLoss(0.1, 1e-2, Distillation(0.3, 2.0)),
        TokenLoss(0.0, 1e-2, Distillation(0.5, 1.5, reverse=True)),
    ],
)
def test_loss_and_gradients(terms, kind, monkeypatch):
    monkeypatch.setattr(chunked_module, "chunk_rows", lambda vocab_size, on_gpu: 7)
    model, other = tiny_model("gpt_neox"), tiny_model("llama")
    ids = torch.randint(0, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3:9] = -100
    inputs = {"input_ids": ids, "labels": labels}
    exact, exact_teacher = copy.deepcopy(model).double(), copy.deepcopy(other).double()
    with torch.no_grad():
        of_teacher = exact_teacher(input_ids=ids).logits
    expected = expected_loss(exact(input_ids=ids).logits, labels, of_teacher, terms)
    (expected / 7).backward()
    if terms.distillation is None:
        install_loss(model, kind, terms)
        loss = model.train()(**inputs)
    else:
        head = other.get_output_embeddings()
        install_loss(model, kind, terms._replace(distillation=terms.distillation._replace(head=head)))
        hidden = Teacher(other).hidden(Batch(inputs, 0, 0, 0, []))
        loss = model.train()(**inputs, **{TEACHER_HIDDEN: hidden})
    (loss / 7).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=0)
    for (name, ours), right in zip(model.named_parameters(), exact.parameters()):
        limit = 1e-5 * float(right.grad.abs().max()) + 1e-8
        torch.testing.assert_close(ours.grad.double(), right.grad, rtol=1e-4, atol=limit, msg=name)
    evaluated, plain = model.eval()(**inputs), tiny_model("gpt_neox")
    install_loss(plain, kind)
    assert torch.equal(evaluated, plain(**inputs)), "an evaluation has the plain loss"


def test_a_plan_counts_the_teacher(byte_tokenizer, tmp_path):
    """Its weights and its logits; and refuses it where a process does not hold what it computes with."""
    AutoTokenizer.from_pretrained(byte_tokenizer).save_pretrained(tmp_path)
    teacher = tiny_model("gpt_neox", vocab_size=304)
    teacher.save_pretrained(tmp_path)
    recipe = recipe_of(
        config_name="gpt2",
        tokenizer_name=str(tmp_path),
        distill_divergence="forward",
        teacher=str(tmp_path),
        config_overrides="n_layer=2,n_head=2,n_embd=32,vocab_size=304",
    )
    model = read_planned_model(recipe, "clm", on_gpu=True)
    assert model.teacher_weights == sum(each.numel() for each in teacher.parameters())
    for strategy, refused in (({}, False), ({"tensor": 2}, True), ({"shards_parameters": True}, True)):
        defaults = {"tensor": 1, "pipeline": 1, "sequence": 1, "shards_parameters": False, "fully_shards": False}
        made = SimpleNamespace(**defaults | strategy, source="the pair")
        with pytest.raises(UserError, match="teacher") if refused else nullcontext():
            check_teacher(recipe, made)
