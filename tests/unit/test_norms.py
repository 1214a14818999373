"""RMSNorm as one function: for which modules, how near to the exact values, and in how many operations."""

from collections import Counter

import pytest
import torch
from helpers import small_sizes
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from zerofit.model import compilation
from zerofit.model.compilation import fuse_norms

LEFT = {  # what is special about norms that are left as they are
    "gemma": "GemmaRMSNorm",  # 1 + weight
    "gemma3": "Gemma3RMSNorm",
    "olmo2": "Olmo2RMSNorm",  # multiplies in fp32
    "gpt_oss": "GptOssRMSNorm",
    "t5": "T5LayerNorm",  # keeps fp32 where its weight is
    "gpt2": "LayerNorm",
    "nanochat": "NanoChatRMSNorm",  # without a weight
}
FUSED = {"llama": 2 * 3 + 1, "qwen3": 4 * 3 + 1, "mistral": 7, "deepseek_v3": 4 * 3 + 1, "mixtral": 7, "granite": 7}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """A CPU does what CUDA does."""
    monkeypatch.setattr(compilation, "NORM_DEVICES", {"cpu"})


def of_family(name: str) -> torch.nn.Module:
    """A small model without memory."""
    auto_class = AutoModelForCausalLM if name != "t5" else AutoModelForSeq2SeqLM
    with torch.device("meta"):
        return auto_class.from_config(AutoConfig.for_model(name, **small_sizes(name), vocab_size=97))


def classes(model: torch.nn.Module, fused: bool) -> Counter:
    """The classes of norms that are computed by one function, or (not `fused`) by their own forward pass."""
    modules = (module for module in model.modules() if "norm" in type(module).__name__.lower())
    return Counter(type(each) for each in modules if ("forward" in vars(each)) == fused)


@pytest.mark.parametrize("family", FUSED)
def test_norms_that_are_written_as_llama_s_are_fused(family):
    model = of_family(family)
    names = list(model.state_dict())
    assert fuse_norms(model) == FUSED[family]
    assert sum(classes(model, fused=True).values()) == FUSED[family]
    assert not classes(model, fused=False)
    assert list(model.state_dict()) == names
    assert fuse_norms(model) == 0  # they are already
    assert not classes(of_family(family), fused=True)  # other models of the process are as they were


@pytest.mark.parametrize("family", LEFT)
def test_others_are_left_as_they_are(family):
    model = of_family(family)
    assert fuse_norms(model) == 0
    assert LEFT[family] in {each.__name__ for each in classes(model, fused=False)}


def draw(norm_class: type, dtype: torch.dtype, width: int = 96) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    norm = norm_class(width)
    norm.weight.data = torch.randn(width).mul(0.3).add(1).to(dtype)
    return norm, torch.randn(5, 17, width).mul(3).to(dtype).requires_grad_()


def results(norm: torch.nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of hidden states and weight."""
    norm.weight.grad = hidden.grad = None
    output = norm(hidden)
    output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype))
    return [output.detach(), hidden.grad, norm.weight.grad]


def exact(norm: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    wide = hidden.detach().double()
    return norm.weight.detach().double() * wide / (wide.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def ulps(output: torch.Tensor, expected: torch.Tensor) -> float:
    """How far it is from the expected values at most, in units of the last place of bf16."""
    place = torch.exp2(expected.abs().log2().floor() - 7)
    return float(((output.detach().double() - expected).abs() / place).max())


def test_it_computes_what_llama_s_does():
    norm, hidden = draw(LlamaRMSNorm, torch.float32)
    before = results(norm, hidden)
    assert fuse_norms(norm) == 1
    for ours, theirs in zip(results(norm, hidden), before, strict=True):
        assert torch.equal(ours, theirs)  # in fp32, on a CPU
    norm, hidden = draw(LlamaRMSNorm, torch.bfloat16)
    before = results(norm, hidden)
    fuse_norms(norm)
    ours = results(norm, hidden)
    assert [each.dtype for each in ours] == [each.dtype for each in before]
    assert ulps(ours[0], exact(norm, hidden)) <= min(0.51, ulps(before[0], exact(norm, hidden)))


@pytest.mark.parametrize(("half", "most"), [(False, 0.51), (True, 1.51)])
def test_under_autocast_it_has_the_dtype_of_the_products(half, most):
    """Of the weight of a product autocast makes a copy in half precision, too: that is one rounding more."""
    norm, hidden = draw(LlamaRMSNorm, torch.float32)
    fuse_norms(norm)
    hidden = hidden.detach().to(torch.bfloat16 if half else torch.float32).requires_grad_()
    expected = exact(norm, hidden)
    with torch.autocast("cpu", torch.bfloat16):
        output, *gradients = results(norm, hidden)
    assert output.dtype == torch.bfloat16
    assert ulps(output, expected) <= most
    assert [each.dtype for each in gradients] == [hidden.dtype, torch.float32]
