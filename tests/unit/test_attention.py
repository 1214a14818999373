"""Packed documents and the kernels of attention: what each is told, and that all of them say the same:
documents do not see each other.

There is no flash kernel on a CPU. Here one stands in for torch's that computes document by document, and notes what it
was told.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from helpers import TINY, check_refusal, tiny_model

import zerofit.model.attention as attention
from zerofit.compat.transformers import attention_of
from zerofit.data.collate import CausalCollator
from zerofit.data.pack import Documents, PackedBlocks
from zerofit.model.attention import VARLEN, check_attention_installed, choose_attention, kernel_of, takes_lengths
from zerofit.model.loss import install_loss
from zerofit.model.preflight import check_packing
from zerofit.recipe import ClmRecipe

CPU = torch.device("cpu")
POSITIONS = np.array([[*range(5), *range(3)], [*range(1), *range(1), *range(6)]])


class Flash:
    """A kernel that computes document by document, and notes what it was told."""

    def __init__(self):
        self.told = []

    def of_documents(self, query, key, value, ends, longest, scale, window=-1):
        """(T, H, D) each -> (T, H, D)."""
        assert isinstance(longest, int), "a tensor would make each layer wait for the device"
        assert ends.dtype == torch.int32
        self.told.append(ends.tolist())
        lengths = ends.diff().tolist()
        assert longest == max(lengths)
        pieces = []
        for piece in zip(*(part.split(lengths) for part in (query, key, value))):
            parts = [part.transpose(0, 1)[None] for part in piece]
            far = torch.ones(len(piece[0]), len(piece[0])).tril().bool()
            if window >= 0:
                far &= torch.ones_like(far).triu(-window)
            found = F.scaled_dot_product_attention(*parts, attn_mask=far, scale=scale, enable_gqa=True)
            pieces.append(found[0].transpose(0, 1))
        return torch.cat(pieces)

    def varlen_attn(self, q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=None):
        assert enable_gqa == ((q.shape[1] != k.shape[1]) if attention.VARLEN_TAKES_GQA else None)
        assert q.shape[-1] % 8 == 0
        assert window_size[1] == 0
        return self.of_documents(q, k, v, cu_q, max_q, scale, window_size[0])


@pytest.fixture
def flash(monkeypatch):
    """The stand-in, as what torch's own flash kernel is."""
    kernel = Flash()
    monkeypatch.setattr(attention, "varlen_attn", kernel.varlen_attn)
    attention._register()
    return kernel


def samples() -> list:
    rows = np.random.default_rng(0).integers(0, 97, POSITIONS.shape)
    return [
        ({"input_ids": row, "labels": row.copy(), "position_ids": positions}, index)
        for index, (row, positions) in enumerate(zip(rows, POSITIONS))
    ]


def loss_and_gradients(model, flatten: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    install_loss(model, "chunked")
    model.train()
    loss = model(**CausalCollator(0, flatten)(samples()).inputs)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


WINDOW = {**TINY["llama"], "sliding_window": 3}


@pytest.mark.parametrize(("family", "changes"), [*((family, {}) for family in TINY), ("mistral", WINDOW)])
def test_two_packed_rows_through_a_flash_kernel(flash, family, changes):
    """In every layer, and once only, it is told of all documents in both rows; loss and gradients are sdpa's."""
    model = tiny_model(family, VARLEN, **changes)
    assert takes_lengths(model)
    loss, gradients = loss_and_gradients(model, flatten=True)
    assert flash.told == 2 * [[0, 5, 8, 9, 10, 16]]
    expected, right = loss_and_gradients(tiny_model(family, "sdpa", **changes), flatten=False)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for ours, other in zip(gradients, right):
        assert (ours - other).norm() <= 1e-5 * other.norm().clamp(min=1e-3)


def test_a_model_with_torch_s_kernel_still_writes(flash):
    """Nothing is packed then: it is sdpa, with a mask where rows are padded."""
    written = []
    for name in (VARLEN, "sdpa"):
        model = tiny_model("llama", name)
        ids, mask = torch.tensor([[1, 2, 3, 4], [0, 0, 5, 6]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
        written.append(model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, use_cache=True))
    assert torch.equal(*written)
    assert flash.told == []


def test_a_kernel_that_nobody_asked_for_is_given_up_where_the_model_does_not_tell_it(flash):
    model = tiny_model("llama", VARLEN)
    original = model.forward
    model.forward = lambda input_ids, position_ids, **lost: original(input_ids=input_ids, position_ids=position_ids)
    collate = CausalCollator(0)
    note = check_packing(SimpleNamespace(model=model, module=model, device=CPU), ClmRecipe(), collate)
    assert note == "attention sdpa: a llama does not tell its attention how long documents are"
    assert not collate.flatten
    assert kernel_of(model) == "sdpa"


@pytest.fixture
def gpu(flash, monkeypatch):
    """A GPU that can; flash-attn is not installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    trial = attention._trial
    monkeypatch.setattr(attention, "_trial", lambda device, dtype: trial(CPU, dtype))
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "installed", "changes", "taken"),
    [
        (8, "234", {}, "flash_attention_2"),
        (9, "234", {}, "flash_attention_3"),
        (9, "23", {"attention_dropout": 0.1}, "flash_attention_2"),  # the newer ones have none
        (10, "234", {}, "flash_attention_4"),
        (10, "24", {"head_dim": 256}, "flash_attention_2"),
        (10, "3", {}, VARLEN),  # 3 refuses a Blackwell
    ],
)
def test_the_fastest_flash_kernel_of_the_installed_ones(gpu, monkeypatch, capability, installed, changes, taken):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    for version in "234":
        found = version in installed
        monkeypatch.setattr(transformers.utils, f"is_flash_attn_{version}_available", lambda found=found: found)
    model, chosen = tiny_model("llama", None, **changes), []
    take = model.set_attn_implementation
    monkeypatch.setattr(
        model, "set_attn_implementation", lambda name: chosen.append(name) or (take(name) if name == VARLEN else None)
    )
    choose_attention(model, None, "bf16", gpu)
    assert chosen[0] == taken


@pytest.mark.parametrize(
    ("precision", "changes", "said"),
    [
        ("fp32", {}, "bf16 and fp16 only"),
        ("bf16", {"attention_dropout": 0.1}, "dropout on attention weights"),
        ("bf16", {"attn_logit_softcapping": 50.0}, "caps its attention scores"),
        ("bf16", {"attention_chunk_size": 64}, "attends in chunks"),
    ],
)
def test_why_it_is_sdpa_on_a_gpu(gpu, precision, changes, said):
    model = tiny_model("llama", None, **changes)
    line = choose_attention(model, None, precision, gpu)
    assert line.startswith("attention sdpa: ")
    assert said in line


def kept(model) -> tuple[int, torch.Tensor]:
    """(masks that are kept for the backward pass, the loss)."""
    storages = {}
    batch = CausalCollator(0)(samples())

    def pack(tensor):
        if tensor.shape == (2, 1, 8, 8):
            storages[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other comes to lie there
        return tensor

    install_loss(model, "full")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch.inputs)
    loss.backward()
    return len(storages), loss.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", TINY)
def test_a_mask_is_converted_once_and_not_in_each_layer(family, dtype):
    changes = {"gpt2": {"n_layer": 5}, "llama": {"hidden_size": 64}}.get(family, {}) | {"num_hidden_layers": 5}
    plain, chosen = (tiny_model(family, "sdpa", **changes).to(dtype) for _ in range(2))
    choose_attention(chosen, None, "fp32", CPU)
    found = [kept(model) for model in (plain, chosen)]
    assert [number for number, _ in found] == [5, 1]
    assert torch.equal(found[0][1], found[1][1])  # bit for bit


def test_our_names_stay_in_this_process_and_transformers_own_mean_what_they_meant(gpu, tmp_path):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    for name, precision in ((attention.MASKED_SDPA, "fp32"), (VARLEN, "bf16")):
        model = tiny_model("llama", "sdpa")
        choose_attention(model, None, precision, gpu)
        assert attention_of(model.config) == name
        model.save_pretrained(tmp_path / name)
        written = (tmp_path / name / "config.json").read_text()
        assert not [each for each in (attention.MASKED_SDPA, VARLEN) if each in written]
        assert kernel_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)) == "sdpa"
    assert transformers.AttentionInterface()["sdpa"] is sdpa_attention_forward
    assert transformers.AttentionMaskInterface()["sdpa"] is sdpa_mask


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
def test_a_kernel_that_is_not_installed_is_refused_with_what_to_install(monkeypatch, name):
    monkeypatch.setattr(transformers.utils.import_utils, "is_kernels_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    check_refusal([f"attn_implementation = {name!r}", "pip install 'kernels>="], check_attention_installed, name)


# ----------------------------------------------------------------------------------------------------------- documents


A, OTHER, B = [5, 6, 7, 8, 9], [15, 16, 17, 18, 19], [25, 26, 27]


def logits_of_b(model, first: list[int], batch_size: int, boundaries: bool) -> torch.Tensor:
    documents = Documents(Dataset.from_dict({"input_ids": [first, B] * batch_size}))
    blocks = PackedBlocks(documents, 8, boundaries, filler=0)
    batch = CausalCollator(pad_id=0)([(blocks[index], index) for index in range(batch_size)])
    inputs = {name: tensor for name, tensor in batch.inputs.items() if name != "labels"}
    with torch.no_grad():
        logits = model(**inputs).logits
    return logits.reshape(batch_size, 8, -1)[:, len(first) :]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", TINY)
def test_documents_stay_apart(family, attention, batch_size):
    model = tiny_model(family, attention)
    with_a, with_other = (logits_of_b(model, first, batch_size, boundaries=True) for first in (A, OTHER))
    torch.testing.assert_close(with_a, with_other, rtol=0, atol=1e-6)
    with torch.no_grad():
        alone = model(input_ids=torch.tensor([B])).logits
    torch.testing.assert_close(with_a[:1], alone, rtol=1e-5, atol=1e-6)
    with_a, with_other = (logits_of_b(model, first, batch_size, boundaries=False) for first in (A, OTHER))
    assert (with_a - with_other).abs().max() > 1e-3, "plain concatenation lets them see each other"
