"""Pairs of answers: their losses against plain formulas and TRL, their records, and the reference that is kept."""

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_model, write_records

from zerofit.data.chat.samples import find_preferences
from zerofit.data.collate import PreferenceCollator
from zerofit.data.order import FILLER
from zerofit.data.records import BadRecord
from zerofit.model import chunked_loss
from zerofit.model.loss import DEFAULT_BETA, PreferenceLoss, disable_dropout, install_loss
from zerofit.recipe import ClmRecipe
from zerofit.recipe.causal_options import PREFERENCE_LOSSES

IGNORE, VOCAB = -100, 97


def sample(seed: int, prompt: int, chosen: int, rejected: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    start = draw.integers(0, VOCAB, prompt)
    pair = {"reference": draw.normal(-30, 3, 2).astype(np.float32)}
    for ids, labels, length in (("input_ids", "labels", chosen), ("rejected_ids", "rejected_labels", rejected)):
        answer = draw.integers(0, VOCAB, length)
        pair[ids] = np.concatenate([start, answer])
        pair[labels] = np.concatenate([np.full(prompt, IGNORE), answer])
    return pair


PAIRS = [sample(0, 3, 5, 9), sample(1, 6, 2, 2), sample(2, 2, 11, 1)]


def batch(filler: bool = True):
    return PreferenceCollator(0)([(pair, index) for index, pair in enumerate(PAIRS)] + [(PAIRS[0], FILLER)] * filler)


def plain_log_probabilities(model, ids: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, int]:
    """(the sum over an answer's tokens, their number) by transformers' own logits of one row without padding."""
    logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1].double()
    targets = torch.from_numpy(labels)[1:]
    trained = targets != IGNORE
    found = F.log_softmax(logits, -1)[torch.arange(len(targets)), targets.clamp(min=0)]
    return found[trained].sum(), int(trained.sum())


def plain_loss(kind: str, model, beta: float, gamma: float, smoothing: float) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for pair in PAIRS:
        c, num_c = plain_log_probabilities(model, pair["input_ids"], pair["labels"])
        r, num_r = plain_log_probabilities(model, pair["rejected_ids"], pair["rejected_labels"])
        c0, r0 = pair["reference"].astype(np.float64)
        margin = beta * ((c - c0) - (r - r0))
        if kind == "dpo":
            total -= (1 - smoothing) * torch.log(torch.sigmoid(margin))
            total -= smoothing * torch.log(torch.sigmoid(-margin))
        elif kind == "hinge":
            total += max(1 - margin, torch.zeros(()))
        elif kind == "ipo":
            total += ((c - c0) / num_c - (r - r0) / num_r - 1 / (2 * beta)) ** 2
        elif kind == "simpo":
            total -= torch.log(torch.sigmoid(beta * (c / num_c - r / num_r) - gamma))
        else:
            odds_c, odds_r = (torch.exp(each) / (1 - torch.exp(each)) for each in (c / num_c, r / num_r))
            total += -c / num_c - beta * torch.log(torch.sigmoid(torch.log(odds_c / odds_r)))
    return total


@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_the_loss_and_its_gradients_are_those_of_the_formula(kind, loss, monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 4 * VOCAB * 7)
    monkeypatch.setattr(chunked_loss, "MIN_CHUNK_ROWS", 1)  # several chunks
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    settings = DEFAULT_BETA[kind], 0.5, 0.2 if kind == "dpo" else 0.0
    expected = plain_loss(kind, plain, *settings)
    expected.backward()
    install_loss(model, loss)
    found = PreferenceLoss(kind, *settings)(model, batch())
    found.backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        limit = 2e-6 * float(theirs.grad.abs().max())
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=limit, msg=name)


@pytest.mark.parametrize(
    ("moved", "accuracy"),
    [((0.0, 0.0, 0.0), 1 / 2), ((1.0, -1.0, 0.0), 1 / 2), ((1.0, 0.0, 0.0), 2 / 3), ((-1.0, 0.0, 0.0), 1 / 3)],
)
def test_a_tie_is_half_a_pair(moved, accuracy):
    """Before training both rewards are 0: the accuracy is one half, not 0; what fills a batch up is not a pair."""
    model, found = tiny_model("gpt2"), batch(filler=True)
    install_loss(model, "chunked")
    with torch.no_grad():
        now = -model(**found.inputs, of_rows=True).view(-1, 2)
    assert found.labels.isnan()[:, 0].tolist() == [False, False, False, True]
    found.labels[:3] = now[:3]
    found.labels[:3, 0] -= torch.tensor(moved)
    loss = PreferenceLoss("dpo", 0.1)
    loss(model, found)
    assert loss.figures(loss.sums, 3).preference_accuracy == pytest.approx(accuracy)


def test_dropout_is_off():
    model = tiny_model("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5).train()
    install_loss(model, "chunked")
    disable_dropout(model)
    inputs = batch().inputs
    torch.testing.assert_close(model(**inputs), model.eval()(**inputs))


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


FORMS = {
    "prompt": {"prompt": "x", "chosen": "good", "rejected": "bad"},
    "question": {"question": "x", "chosen": "good", "rejected": "bad"},
    "instruction": {"instruction": "x", "input": "", "chosen": "good", "rejected": "bad"},
    "input": {"input": "x", "chosen": "good", "rejected": "bad"},
    "prompt beside conversations": {"prompt": "x", "chosen": [user("x"), answer("good")],
                                    "rejected": [user("x"), answer("bad")]},
    "conversations": {"chosen": [user("x"), answer("good")], "rejected": [user("x"), answer("bad")]},
    "turns": {"prompt": [user("x")], "chosen": [answer("good")], "rejected": [answer("bad")]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "x"}], "chosen": {"from": "gpt", "value": "good"},
                 "rejected": {"from": "gpt", "value": "bad"}},
    "texts of lists": {"prompt": "x", "chosen": repr([user("x"), answer("good")]),
                       "rejected": json.dumps([user("x"), answer("bad")])},
    "spoken prompt": {"prompt": "\n\nHuman: x\n\nAssistant: ", "chosen": " good", "rejected": " bad"},
    "spoken, whole": {"prompt": "\n\nHuman: x\n\nAssistant:", "chosen": "\n\nHuman: x\n\nAssistant: good",
                      "rejected": "\n\nHuman: x\n\nAssistant: bad"},
    "spoken": {"chosen": "\n\nHuman: x\n\nAssistant: good", "rejected": "\n\nHuman: x\n\nAssistant: bad"},
    "spoken, from Windows": {"chosen": "\r\n\r\nHuman: x\r\n\r\nAssistant: good",
                             "rejected": "Human: x\r\n\r\nAssistant: bad"},
}  # fmt: skip


def read(record: dict, **options):
    from datasets import Dataset

    table = Dataset.from_list([record])
    return find_preferences(ClmRecipe(**options), table).read(table[0])


@pytest.mark.parametrize("name", FORMS)
def test_pairs_as_people_have_them(name):
    def said(conversation):
        return [(turn["role"], turn["content"]) for turn in conversation]

    chosen, rejected = read(FORMS[name])
    assert said(chosen) == [("user", "x"), ("assistant", "good")]
    assert said(rejected) == [("user", "x"), ("assistant", "bad")]
    with_system = [said(each) for each in read(FORMS[name], system_prompt="s")]
    assert with_system == [[("system", "s"), *said(each)] for each in (chosen, rejected)]
    if {"prompt", "question", "instruction", "conversations"} & {*FORMS[name]}:
        of_record = [said(each) for each in read({**FORMS[name], "system": "s"}, system_prompt="t")]
        assert of_record == with_system


def test_earlier_answers_are_part_of_the_prompt():
    begins, other = [user("a"), answer("b"), user("c")], [{**user("a"), "id": 1}, answer("b"), user("c")]
    chosen, rejected = read({"chosen": [*begins, answer("good")], "rejected": [*other, answer("bad")]})
    for conversation in (chosen, rejected):
        assert [turn.get("trained", True) for turn in conversation if turn["role"] == "assistant"] == [False, True]


@pytest.mark.parametrize(("record", "words"), [
    ({"prompt": "x", "chosen": "same", "rejected": "same"}, "the same"),
    ({"prompt": "x", "chosen": " ", "rejected": "bad"}, "chosen is empty"),
    ({"chosen": "good", "rejected": "bad"}, "without a prompt"),
    ({"chosen": [user("x")], "rejected": [user("x"), answer("bad")]}, "no answer"),
    ({"chosen": [user("x"), answer("good")], "rejected": [user("y"), answer("bad")]}, "turn 1, the user's, differs"),
    ({"chosen": [user("x"), answer("a")], "rejected": [user("x"), answer("a"), user("y"), answer("b")]},
     "one conversation is the beginning of the other"),
])  # fmt: skip
def test_records_that_cannot_be_used(record, words):
    with pytest.raises(BadRecord, match=words):
        read(record)


def test_a_pair_of_which_one_answer_is_beyond_the_block_is_skipped(tmp_path, llama, prepare_causal):
    records = [{"prompt": f"say {n}", "chosen": f"it is {n}", "rejected": "no"} for n in range(30)]
    records[3]["rejected"], records[3]["prompt"] = "no", "x " * 200
    path = write_records(tmp_path / "a.jsonl", records)
    flags = ("--preference_loss", "dpo", "--block_size", "64", "--chat_template", "none")
    data = prepare_causal(llama, path, *flags, validation_split_percentage=0)
    assert len(data.train) == 29
    first = data.train[0]
    assert set(first) == {"input_ids", "labels", "rejected_ids", "rejected_labels", "reference"}
    assert "it is 0" in data.tokenizer.decode(first["input_ids"])
    assert "no" in data.tokenizer.decode(first["rejected_ids"])
    assert (first["labels"] == IGNORE).any()
    assert json.dumps(data.describe()).count("29")
