"""Embeddings: the loss of groups against a formula in fp64, what depends on no micro-batch, what is refused."""

import types

import numpy as np
import pytest
import torch
from helpers import labelled_recipe, planned_bert, refusal, write_records
from transformers import BertConfig, BertModel, GPT2Config, T5Config

from zerofit.data.labelled.examples import prepare_examples
from zerofit.data.labelled.groups import GroupCollator, PairGroups
from zerofit.data.order import FILLER
from zerofit.model.configuration import load_configuration
from zerofit.model.embedding import NEGATIVE, POSITIVE, AutoBody, check_body, contrastive_loss, embed
from zerofit.model.loss import IGNORE
from zerofit.recipe import ClsRecipe, parse_recipe
from zerofit.tools.compare.trial import stretched
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.tool_recipe import read_with_recipe
from zerofit.training.retrieval import figures_of_ranks, of_records, ranked

TEMPERATURE = 0.05


class Records:
    """Token ids of records of two or three texts."""

    stats = None

    def __init__(self, count: int, texts: int):
        draw = np.random.default_rng(0)
        self.rows = [[draw.integers(4, 50, draw.integers(1, 9)) for _ in range(texts)] for _ in range(count)]
        self.lengths = self.sort_key = np.array([sum(map(len, row)) for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {
            "input_ids": np.concatenate(self.rows[index]),
            "sizes": np.array([len(text) for text in self.rows[index]]),
        }


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertModel(BertConfig(**sizes, intermediate_size=32), add_pooling_layer=False).eval()


def loss_of(model, groups: PairGroups, places: list[int], indices: list[int] | None = None):
    batch = GroupCollator({"input_ids": 0})(
        [(groups[place], index) for place, index in zip(places, indices or places)]
    )
    return contrastive_loss(embed(model, batch.inputs), batch.labels, TEMPERATURE), batch


def plain_loss(model, records: Records, groups: PairGroups) -> torch.Tensor:
    """One text at a time without padding, one anchor at a time, in fp64."""

    def vector(text: np.ndarray) -> torch.Tensor:
        mean = model(input_ids=torch.from_numpy(text)[None]).last_hidden_state[0].double().mean(dim=0)
        return mean / mean.norm()

    total = torch.zeros((), dtype=torch.float64)
    for group in groups.groups:
        vectors = [[vector(text) for text in records.rows[place]] for place in group]
        candidates = [(row[part], records.rows[place][part]) for place, row in zip(group, vectors)
                      for part in range(1, len(row))]  # fmt: skip
        for place, (anchor, positive, *_) in zip(group, vectors):
            own = records.rows[place][1]
            negatives = [anchor @ other for other, text in candidates if not np.array_equal(text, own)]
            scores = torch.stack([anchor @ positive, *negatives]) / TEMPERATURE
            total -= scores[0] - scores.exp().sum().log()
    return total


@pytest.mark.parametrize("texts", [2, 3])
def test_loss_and_gradients_are_those_of_the_formula(encoder, texts):
    records = Records(11, texts)
    groups = PairGroups(records, 4, seed=1)
    first, second = groups.groups[0][:2]
    records.rows[first][1] = records.rows[second][1]  # one positive of two anchors: never a negative of either
    assert [len(group) for group in groups.groups] == [4, 4, 3]
    found = []
    for loss in (loss_of(encoder, groups, [0, 1, 2])[0], plain_loss(encoder, records, groups)):
        encoder.zero_grad()
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])))
    (ours, gradient), (plain, expected) = found
    assert ours == pytest.approx(plain, rel=1e-5)
    assert (gradient - expected).norm() < 1e-5 * expected.norm()


@torch.no_grad()
def test_a_group_does_not_see_its_micro_batch(encoder):
    groups = PairGroups(Records(11, 3), 4, seed=1)
    together, batch = loss_of(encoder, groups, [0, 1, 2])
    assert batch.num_targets == 11
    apart = [loss_of(encoder, groups, [place]) for place in range(3)]
    assert sum(alone.num_targets for _, alone in apart) == 11
    assert together.item() == pytest.approx(sum(loss.item() for loss, _ in apart), rel=1e-5)
    filled, with_filler = loss_of(encoder, groups, [0, 1], [0, FILLER])
    assert filled.item() == pytest.approx(apart[0][0].item(), rel=1e-5)
    assert with_filler.num_targets == 4
    assert with_filler.num_tokens == len(groups[0]["input_ids"])


def test_relations():
    records = Records(3, 3)
    records.rows[0][1] = records.rows[1][1]
    groups = types.SimpleNamespace(groups=[[0, 1, 2]], records=records)
    batch = GroupCollator({"input_ids": 0})([(PairGroups.__getitem__(groups, 0), 0)])
    expected = torch.full((1, 3, 6), NEGATIVE)
    expected[0, range(3), range(3)] = POSITIVE
    expected[0, 0, 1] = expected[0, 1, 0] = IGNORE
    assert torch.equal(batch.labels, expected)
    assert batch.tensor("input_ids").shape == batch.tensor("attention_mask").shape
    assert batch.tensor("input_ids").shape[:2] == (1, 9)


def test_groups_are_fixed_by_the_seed():
    records = Records(11, 2)
    groups, again, other = (PairGroups(records, 4, seed) for seed in (1, 1, 2))
    assert sorted(np.concatenate(groups.groups)) == list(range(11))
    assert all(map(np.array_equal, groups.groups, again.groups))
    assert not all(map(np.array_equal, groups.groups, other.groups))
    assert groups.lengths.sum() == records.lengths.sum()


# ------------------------------------------------------------------------------------------------------------- records

PAIR = {"anchor": "a license", "positive": "Apache"}


@pytest.fixture
def read(pairs_tokenizer, tmp_path):
    def of_records(records, *flags):
        recipe = labelled_recipe(tmp_path / "pairs.jsonl", records, pairs_tokenizer, *flags)
        return prepare_examples(recipe, load_configuration(recipe))

    return of_records


@pytest.mark.parametrize(("first", "more"), [("anchor", {}), ("query", {"negative": "here", "id": 3})])
def test_records_become_groups(read, first, more):
    records = [{first: f"license {'is ' * number}", "positive": "Apache", **more} for number in range(12)]
    data = read(records, "--contrastive_group", "5", "--max_length", "8")
    texts = 2 + ("negative" in more)
    assert [len(group) for group in data.train.groups] == [5, 4]
    assert [len(part.samples.records) for part in data.held_out] == [3]
    assert data.longest == {"input_ids": 8 * 5 * texts, "sizes": (5, texts)}
    full = [(stretched(data.train[place], data.longest), place) for place in (0, 1)]
    batch = GroupCollator({"input_ids": 0})(full)  # what a trial measures, of groups of five and of four
    assert batch.tensor("attention_mask").tolist() == [[[1] * 8] * 5 * texts] * 2
    place = data.train.groups[0][0]
    ids, sizes = data.train[0]["input_ids"], data.train[0]["sizes"]
    expected = [data.tokenizer(text, truncation=True, max_length=8)["input_ids"] for text in ("Apache", "here")]
    end = sizes[0, 0] + sizes[0, 1]
    assert ids[sizes[0, 0] : end].tolist() == expected[0]
    if more:
        assert ids[end : sizes[0].sum()].tolist() == expected[1]
    assert data.train.records.lengths[place] == sizes[0].max() * texts


@pytest.mark.parametrize(
    ("records", "flags", "said"),
    [
        ([PAIR] * 5 + [{**PAIR, "positive": " "}], (), "positive"),
        ([PAIR, {**PAIR, "negative": "one"}] * 3, (), "negative"),
        ([PAIR] * 6, ("--label_smoothing", "0.1"), "label_smoothing"),
        ([PAIR] * 6, ("--class_weights", "balanced"), "class_weights"),
        ([PAIR] * 6, ("--lora",), "lora"),
        ([PAIR] * 6, ("--contrastive_group", "4", "--focal_gamma", "2"), "focal_gamma"),
        ([{"text": "a", "label": "b"}] * 6, ("--contrastive_temperature", "0.1"), "contrastive_temperature"),
    ],
)
def test_what_is_refused(read, records, flags, said):
    message = refusal(read, records, *flags)
    assert said in message
    assert "\n" not in message.strip()


def test_a_model_without_a_head_predicts_no_labels(tmp_path):
    path = write_records(tmp_path / "asked.jsonl", [{"text": "a"}])
    recipe = parse_recipe(ClsRecipe, ["--model_name_or_path", "a", "--predict_file", str(path)])
    assert "predict_file" in refusal(prepare_examples, recipe, BertConfig(architectures=["BertModel"]))


# ---------------------------------------------------------------------------------------------------------- evaluation


def test_ranks_are_those_of_a_plain_loop():
    draw = torch.Generator().manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(3, 40, 4, generator=draw), dim=-1)
    texts = [f"text {number % 50}" for number in range(80)]  # the last 30 read as the first
    vectors[1:].flatten(0, 1)[50:] = vectors[1:].flatten(0, 1)[:30]
    ranks, nearest = ranked(vectors, texts)
    others = vectors[1:].flatten(0, 1)
    for number, anchor in enumerate(vectors[0]):
        order = sorted(range(80), key=lambda place: -float(anchor @ others[place]))
        distinct = list(dict.fromkeys(texts[place] for place in order))
        better = [place for place in order if anchor @ others[place] > anchor @ others[number]]
        assert ranks[number] == 1 + len([place for place in better if texts[place] != texts[number]])
        assert texts[nearest[number]] == distinct[0]
    assert figures_of_ranks(torch.tensor([1, 2, 20])) == pytest.approx(
        {"mrr": (1 + 1 / 2 + 1 / 20) / 3, "recall_at_1": 1 / 3, "recall_at_10": 2 / 3}
    )
    assert ranked(torch.ones(2, 3, 1), ["a", "b", "a"])[0].tolist() == [2, 3, 2], "equal vectors find nothing"


def test_embeddings_of_groups_go_to_their_records():
    groups = [torch.arange(8.0)[:, None], torch.arange(10.0, 18)[:, None]]  # the second was filled up to four
    vectors = of_records(groups, [np.array([3, 0, 6, 2]), np.array([5, 1, 4])])
    assert vectors[0, :, 0].tolist() == [1, 11, 3, 0, 12, 10, 2]
    assert vectors[1, :, 0].tolist() == [5, 15, 7, 4, 16, 14, 6]


def test_a_body_has_no_pooling_layer():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    body = AutoBody.from_config(BertConfig(**sizes, vocab_size=30, intermediate_size=16))
    assert body.pooler is None
    assert type(AutoBody.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2))).__name__ == "GPT2Model"
    assert "t5" in refusal(check_body, T5Config())


# ---------------------------------------------------------------------------------------------------------------- plan


def test_a_plan_counts_the_rows_of_a_group():
    kind, least = planned_bert("--contrastive_group", "8")
    assert (kind, planned_bert("--contrastive_group", "8", "--num_texts", "2")) == ("BertModel", (kind, least))
    for more, factor in (("16", "2"), 2), (("8", "3"), 1.5):
        assert planned_bert("--contrastive_group", more[0], "--num_texts", more[1])[1] == pytest.approx(
            factor * least, rel=0.02
        )
    for flags in ("--task", "clm"), ("--task", "cls", "--num_tags", "3"):
        assert "num_texts" in refusal(read_with_recipe, PlanOptions, [*flags, "--num_texts", "3"], "test")
