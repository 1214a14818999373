"""The loss of encoder-decoder models, and models that classify: on the real architectures, tiny and random."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import check_chunked_loss, loss_and_gradients
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import zerofit.model.chunked_loss as chunked_module
from zerofit.data.collate import ExampleCollator
from zerofit.data.order import FILLER
from zerofit.model.loss import IGNORE, install_loss, loss_of_examples, shift_right
from zerofit.model.parameters import flops_per_pair_token

VOCAB = 97
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
        "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2,
      "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}  # fmt: skip
PAIRS = {
    "blenderbot": ("blenderbot", {**BART, "decoder_start_token_id": 1}),
    "bart": ("bart", {**BART, "decoder_start_token_id": 2}),
    "t5": ("t5", T5),  # its head is tied and its hidden states are scaled
    "t5-v1.1": ("t5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}


def pair_model(name: str, **settings):
    torch.manual_seed(0)
    family, sizes = PAIRS[name]
    config = AutoConfig.for_model(family, vocab_size=VOCAB, use_cache=False, **sizes)
    model = AutoModelForSeq2SeqLM.from_config(config, **settings).eval()
    bias = getattr(model, "final_logits_bias", None)
    assert bias is None or bias.abs().max() == 0  # as in every published model
    return model


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sources = torch.randint(3, VOCAB, (3, 11), generator=generator)
    labels = torch.randint(3, VOCAB, (3, 9), generator=generator)
    mask = torch.ones_like(sources)
    sources[1, 6:], mask[1, 6:], labels[0, 4:], labels[2] = 0, 0, IGNORE, IGNORE  # the last row is a filler
    return {"input_ids": sources, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("name", PAIRS)
def test_the_plain_loss_is_transformers_own(name):
    """Value and gradients, of a mean over the trained tokens."""
    model = pair_model(name)
    mean = model(**batch()).loss
    mean.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    trained = int((batch()["labels"] != IGNORE).sum())
    assert trained == 4 + 9
    loss, gradients = loss_and_gradients(model, "full", batch())
    torch.testing.assert_close(loss / trained, mean.detach())
    assert len(gradients) > 40
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        limit = 1e-5 * float(expected[parameter].abs().max()) + 1e-8
        torch.testing.assert_close(gradient * 7 / trained, expected[parameter], rtol=1e-4, atol=limit)


@pytest.mark.parametrize("name", [name for name in PAIRS if not name.startswith("t5")])
@pytest.mark.parametrize("chunk_bytes", [128 * 2**20, 4 * VOCAB * 5])
def test_the_memory_saving_loss_is_the_plain_one(name, chunk_bytes, monkeypatch):
    monkeypatch.setattr(chunked_module, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(chunked_module, "MIN_CHUNK_ROWS", 1)  # so that the small one means several chunks
    check_chunked_loss(pair_model(name), batch())


def test_rows_that_fill_a_batch_up_do_not_disturb_mbart():
    """Its decoder begins with the last token of the target, the language, of which a filler has none."""
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("mbart", vocab_size=VOCAB, **BART)).eval()
    labels = torch.tensor([[5, 6, 2, 9], [7, 2, 9, IGNORE], [IGNORE] * 4])
    assert shift_right(model, labels)[:2].tolist() == [[9, 5, 6, 2], [9, 7, 2, 9]]
    inputs = {"input_ids": torch.tensor([[5, 6], [7, 8], [9, 1]]), "labels": labels}
    expected = 7 * model(**{name: rows[:2] for name, rows in inputs.items()}).loss
    install_loss(model, "full")
    torch.testing.assert_close(model(**inputs), expected)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("source", "target"), [(16, 16), (48, 8), (8, 48)])
def test_flops_are_those_that_torch_counts(name, source, target):
    """A third of a trained token's are the forward pass's."""
    model = pair_model(name, attn_implementation="eager")  # the fused kernels of a CPU are not counted
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.full((1, source), 5), labels=torch.full((1, target), 5))
    expected = 3 * counter.get_total_flops() / (source + target)
    assert flops_per_pair_token(model, source, target) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("weights", "smoothing"), [(None, 0.1), ([0.5, 3.0, 1.0], 0.0), ([0.5, 3.0, 1.0], 0.2)])
def test_weighted_and_smoothed_sums_are_torchs_mean_over_several_batches(weights, smoothing):
    """The collator counts what torch divides by; torch has the whole batch at once."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 3, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, 3, (12,), generator=generator)
    given = None if weights is None else torch.tensor(weights)
    collate = ExampleCollator({"input_ids": 0}, class_weights=weights)
    rows = [({"input_ids": np.array([1]), "label": label}, index) for index, label in enumerate(labels.numpy())]
    summed, targets = 0.0, 0.0
    for start, end in ((0, 5), (5, 12)):
        made = collate([*rows[start:end], (rows[0][0], FILLER)])
        padded = torch.cat([logits[start:end], logits[:1]])
        summed += loss_of_examples(padded, made.labels, given, smoothing)
        targets += made.num_targets
    double = None if given is None else given.double()
    exact = F.cross_entropy(logits, labels, double, label_smoothing=smoothing)
    torch.testing.assert_close(summed.double() / targets, exact, rtol=1e-6, atol=0)
    (gradient,), (right,) = (torch.autograd.grad(loss, logits) for loss in (summed / targets, exact))
    torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_the_focal_loss(gamma):
    logits = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[0, 0] = 200.0  # p is 1
    logits, labels, weights = logits.requires_grad_(), torch.arange(9) % 3, torch.tensor([0.5, 3.0, 1.0])
    labels[-1] = IGNORE
    loss = loss_of_examples(logits, labels, weights, focal_gamma=gamma)
    probability = logits.softmax(-1)[torch.arange(1, 8), labels[1:8]]
    exact = (-weights[labels[1:8]] * (1 - probability) ** gamma * probability.log()).sum()
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    (gradient,), (right,) = (torch.autograd.grad(each, logits) for each in (loss, exact))
    torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-6)
