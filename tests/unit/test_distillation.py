"""A teacher's distribution in the loss, against its formula over the whole vocabulary in fp64."""

import copy
import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from folders import tools_in_this_process
from helpers import recipe_of, tiny_model, write_records
from transformers import AutoModelForCausalLM, AutoTokenizer

import zerofit.model.chunked_loss as chunked_module
from zerofit.cli import main as zerofit
from zerofit.data.causal import prepare_causal_data
from zerofit.data.collate import Batch
from zerofit.estimate.read_model import read_planned_model
from zerofit.model.chunked_loss import TokenLoss
from zerofit.model.configuration import load_configuration
from zerofit.model.distillation import Distillation
from zerofit.model.loss import install_loss
from zerofit.recipe.errors import UserError
from zerofit.tools.generate import logprobs
from zerofit.tools.generate.generate_options import GenerateOptions
from zerofit.training.configuration import check_teacher
from zerofit.training.teacher import Teacher

VOCABULARY = 97


def batch(top_k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(a batch with a random teacher's likeliest tokens, the teacher's log-probabilities (B, T, V) in fp64)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (3, 20), generator=generator)
    labels = ids.clone()
    labels[0, 3:9] = -100
    teacher = (2 * torch.randn(3, 20, VOCABULARY, generator=generator, dtype=torch.float64)).log_softmax(-1)
    found, places = teacher.topk(top_k)
    inputs = {"input_ids": ids, "labels": labels, "teacher_ids": places, "teacher_log_probabilities": found.float()}
    return inputs, teacher


def expected_loss(logits: torch.Tensor, inputs: dict, teacher: torch.Tensor, terms: TokenLoss) -> torch.Tensor:
    """Written down as the documentation has it: probabilities of all tokens, those beyond the K likeliest added up."""
    how, logits, teacher = terms.distillation, logits[:, :-1], teacher[:, :-1]
    targets, likeliest = inputs["labels"][:, 1:], inputs["teacher_ids"][:, :-1]
    hard = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=terms.label_smoothing
    )
    hard = hard + terms.z_loss * logits.logsumexp(-1)[targets != -100].square().sum()

    def classes(log_probabilities: torch.Tensor) -> torch.Tensor:
        probabilities = log_probabilities.exp()
        known = probabilities.gather(-1, likeliest)
        if known.shape[-1] < VOCABULARY:
            others = probabilities.scatter(-1, likeliest, 0.0).sum(-1, keepdim=True)
            known = torch.cat([known, others], dim=-1)
        tempered = known ** (1 / how.temperature)
        return tempered / tempered.sum(-1, keepdim=True)

    p, q = classes(teacher), classes(logits.log_softmax(-1))
    p, q = (q, p) if how.reverse else (p, q)
    divergence = (p * (p / q).log()).sum(-1)[targets != -100].sum()
    return (1 - how.weight) * hard + how.weight * how.temperature**2 * divergence


@pytest.mark.parametrize("kind", ["full", "chunked"])
@pytest.mark.parametrize("top_k", [5, VOCABULARY])
@pytest.mark.parametrize(
    "terms",
    [
        TokenLoss(distillation=Distillation(1.0)),
        TokenLoss(0.1, 1e-2, Distillation(0.3, 2.0)),
        TokenLoss(0.0, 1e-2, Distillation(0.5, 1.5, reverse=True)),
    ],
)
def test_loss_and_gradients(terms, top_k, kind, monkeypatch):
    monkeypatch.setattr(chunked_module, "chunk_rows", lambda vocab_size, on_gpu: 7)
    model, (inputs, teacher) = tiny_model("gpt_neox"), batch(top_k)
    exact = copy.deepcopy(model).double()
    expected = expected_loss(exact(input_ids=inputs["input_ids"]).logits, inputs, teacher, terms)
    (expected / 7).backward()
    install_loss(model, kind, terms)
    loss = model.train()(**inputs)
    (loss / 7).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=0)
    for (name, ours), right in zip(model.named_parameters(), exact.parameters()):
        limit = 1e-5 * float(right.grad.abs().max()) + 1e-8
        torch.testing.assert_close(ours.grad.double(), right.grad, rtol=1e-4, atol=limit, msg=name)
    plain, without = model.eval()(**inputs), {name: inputs[name] for name in ("input_ids", "labels")}
    torch.testing.assert_close(plain, model(**without), rtol=0, atol=0, msg="an evaluation has the plain loss")


def test_a_student_that_is_its_teacher_has_no_divergence():
    student = torch.randn(4, VOCABULARY).log_softmax(-1)
    for how in (Distillation(1.0, 2.0), Distillation(1.0, 2.0, reverse=True)):
        losses, gradient = how.with_gradient(student, student)
        assert losses.abs().max() < 1e-6
        assert gradient.abs().max() < 1e-6
        assert (how.losses(student, student.roll(1, dims=0)) > 0.1).all()


@pytest.mark.parametrize("kind", ["full", "chunked"])
def test_a_teacher_beside_the_student_is_one_of_whom_all_is_stored(kind, monkeypatch):
    monkeypatch.setattr(chunked_module, "chunk_rows", lambda vocab_size, on_gpu: 7)
    model, other = tiny_model("gpt_neox"), tiny_model("llama")
    inputs = {name: batch(1)[0][name] for name in ("input_ids", "labels")}
    install_loss(model, kind, TokenLoss(distillation=Distillation(0.7, 2.0, head=other.get_output_embeddings())))
    with torch.no_grad():
        found, ids = other(input_ids=inputs["input_ids"]).logits.log_softmax(-1).sort(dim=-1)
    stored = model.train()(**inputs, teacher_ids=ids, teacher_log_probabilities=found)
    expected = torch.autograd.grad(stored, list(model.parameters()))
    whole = Batch(inputs, 0, 0, 0, [])
    loss = Teacher(other)(model, whole)
    torch.testing.assert_close(loss, stored, rtol=1e-6, atol=0)
    for ours, right in zip(torch.autograd.grad(loss, list(model.parameters())), expected):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


def test_a_plan_counts_the_teacher(byte_tokenizer, teacher):
    """Its weights and its logits; and refuses it where a process does not hold what it computes with."""
    recipe = recipe_of(
        config_name="gpt2", tokenizer_name=str(teacher), distill_divergence="forward", teacher=str(teacher),
        config_overrides="n_layer=2,n_head=2,n_embd=32,vocab_size=304",
    )  # fmt: skip
    model = read_planned_model(recipe, "clm", on_gpu=True)
    assert model.teacher_weights == sum(
        each.numel() for each in AutoModelForCausalLM.from_pretrained(teacher).parameters()
    )
    for strategy, refused in (({}, False), ({"tensor": 2}, True), ({"shards_parameters": True}, True)):
        defaults = {"tensor": 1, "pipeline": 1, "sequence": 1, "shards_parameters": False, "fully_shards": False}
        made = SimpleNamespace(**defaults | strategy, source="the pair")
        with pytest.raises(UserError, match="teacher") if refused else nullcontext():
            check_teacher(recipe, made)


# ------------------------------------------------------------------------------------------------ from file to file


@pytest.fixture(scope="module")
def teacher(byte_tokenizer, tmp_path_factory) -> Path:
    """A small GPT-NeoX with its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("teacher"), AutoTokenizer.from_pretrained(byte_tokenizer)
    tiny_model("gpt_neox", vocab_size=len(tokenizer) + 4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write(teacher: Path, file: Path, output: Path, top_k: int = 5, **variables: str) -> None:
    words = ["generate", "--model", str(teacher), "--logprobs", str(top_k), "--prompt_file", str(file)]
    with pytest.MonkeyPatch.context() as patch, tools_in_this_process():
        for name, value in variables.items():
            patch.setenv(name, value)
        assert zerofit([*words, "--block_size", "32", "--output", str(output)]) == 0


@pytest.fixture
def records(tmp_path) -> Path:
    return write_records(
        tmp_path / "asked.jsonl", [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(40)]
    )


def read(teacher: Path, files: Path, **options):
    given = {"train_file": [f"{files}/*.parquet"], "distill_divergence": "forward", **options}
    recipe = recipe_of(config_name=None, model_name_or_path=str(teacher), **given)
    return prepare_causal_data(recipe, load_configuration(recipe))


def test_a_teacher_s_file_is_what_it_says_of_the_samples(teacher, records, tmp_path, monkeypatch):
    """Written by two launches; each sample is as training would have it, and each document was read alone."""
    monkeypatch.setattr(logprobs, "SHARD", 3)
    write(teacher, records, tmp_path / "files", RANK="1", WORLD_SIZE="2")
    first = {file: file.stat().st_mtime_ns for file in (tmp_path / "files").iterdir()}
    write(teacher, records, tmp_path / "files")
    assert 0 < len(first) < len([*(tmp_path / "files").iterdir()])
    with pytest.raises(UserError, match="train_file: 1 of the"):
        read(teacher, tmp_path / "files", train_file=[str(next(iter(first)))])
    assert all(file.stat().st_mtime_ns == then for file, then in first.items())
    data = read(teacher, tmp_path / "files", validation_split_percentage=0.0)
    plain = recipe_of(
        config_name=None, model_name_or_path=str(teacher), train_file=[str(records)], block_size=32,
        validation_split_percentage=0.0,
    )  # fmt: skip
    expected = prepare_causal_data(plain, load_configuration(plain)).train
    assert len(data.train) == len(expected) > 6
    assert data.train.stats.trained == expected.stats.trained
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    for index in (0, len(expected) - 1):
        sample, right = data.train[index], expected[index]
        for name, values in right.items():
            np.testing.assert_array_equal(sample[name], values, err_msg=name)
        starts = [*np.flatnonzero(right["position_ids"] == 0), len(right["labels"])]
        checked = 0
        for start, stop in itertools.pairwise(starts):  # each document alone
            with torch.no_grad():
                logits = model(torch.from_numpy(right["input_ids"][None, start:stop])).logits[0, :, :-4]
            found, ids = logits.log_softmax(-1).topk(5)
            rows = start + np.flatnonzero(right["labels"][start + 1 : stop] != -100)
            np.testing.assert_array_equal(sample["teacher_ids"][rows], ids[rows - start])
            np.testing.assert_allclose(sample["teacher_log_probabilities"][rows], found[rows - start], atol=1e-5)
            checked += len(rows)
        assert checked == int((right["labels"] != -100).sum()) > 2
        assert not sample["teacher_log_probabilities"][-1].any()


def test_files_that_do_not_belong_together_are_refused(teacher, records, tmp_path):
    write(teacher, records, tmp_path / "files")
    with pytest.raises(UserError, match="output"):
        logprobs.write_logprobs(
            GenerateOptions(
                model=str(teacher), logprobs=6, prompt_file=str(records), block_size=32, output=str(tmp_path / "files")
            )
        )
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match="vocabulary"):
        read(teacher, tmp_path / "files", tokenizer_name=str(tmp_path / "tokenizer"))
    with pytest.raises(UserError, match="block_size"):
        read(teacher, tmp_path / "files", block_size=64)
    write(teacher, records, tmp_path / "others", top_k=6)
    with pytest.raises(UserError, match="--logprobs"):
        read(teacher, tmp_path / "*", train_file=[f"{tmp_path}/*/*.parquet"])
    with pytest.raises(UserError, match="--logprobs"):
        read(teacher, tmp_path / "files", train_file=[str(records)])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"distill_weight": 0.3}, "distill_weight"),
        ({"distill_temperature": 2.0}, "distill_temperature"),
        ({"teacher": "gpt2-xl"}, "teacher"),
        ({"distill_divergence": "forward", "distill_weight": 1.5}, "distill_weight"),
        ({"distill_divergence": "forward", "preference_loss": "dpo"}, "preference_loss"),
        ({"distill_divergence": "forward", "streaming": "1MiB", "max_train_steps": 3}, "streaming"),
        ({"distill_divergence": "forward", "packing": "none"}, "packing"),
    ],
)
def test_what_has_no_effect_is_refused(options, name):
    problems = recipe_of(tokenizer_name="teacher", train_file=["files/*.parquet"], **options).problems()
    assert any(name in problem for problem in problems), problems
    assert not recipe_of(
        tokenizer_name="teacher", train_file=["files/*.parquet"], distill_divergence="reverse"
    ).problems()
