"""Attention inside packed documents: which kernel runs, and how it learns where documents end.

For sdpa transformers builds an attention mask from the positions, (B, 1, T, T). Flash kernels take no mask. The mask
is boolean, so torch converts it again in each layer and keeps the results for the backward pass, L x B x T^2 x 2 bytes
in all. Flash kernels take the lengths of the documents. So a flash kernel runs if one is available, on rows laid out
end to end (zerofit/data/collate.py); otherwise the mask is converted once.

How the boundary of a document reaches the kernel: data/pack.py restarts positions where a document begins (chats:
data/chat/samples.py); collate.py hands positions on, or the documents' lengths; `choose_attention` here picks the
kernel; preflight.py tries it, and no run trains whose documents see each other.
"""

import contextlib
import functools
import importlib.util
import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from zerofit.compat.transformers import attention_of, attentions_of, documents_found_by
from zerofit.recipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Whether varlen_attn has to be told of fewer heads of key and value; torch 2.11 computes with them unasked.
VARLEN_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
# The arguments for the lengths of packed documents, as transformers names them.
LENGTH_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
VARLEN = "torch_varlen"  # torch's own flash kernel, as transformers calls it here
MASKED_SDPA = "zerofit_sdpa"  # sdpa, whose mask is converted once
FLASH_PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn",
}
FLASH_PRECISIONS = ("bf16", "fp16")
MIN_FLASH_CAPABILITY = (8, 0)  # the compute capability that flash kernels need
# {major compute capability: versions of flash-attn, the fastest first}. 3 is written for Hopper (9) and refuses newer
# GPUs; 4 is for Blackwell (10). Its kernels for consumer GPUs (12) have no complete backward pass yet.
FLASH_VERSIONS = {9: "324", 10: "42", 12: "24"}
FLASH_4_MAX_HEAD_DIM = 128  # elements; 2 takes heads of 256


def choose_attention(
    model: "PreTrainedModel", requested: str | None, precision: str, device: torch.device | None = None
) -> str:
    """Choose the attention kernel for packed documents, before the model is prepared. Returns a line for the log.

    Args:
        requested: attn_implementation of the recipe, which is not changed; None: choose.
        precision: fp32, bf16 or fp16, of the computation.
        device: that the model will run on; None: the accelerator, where there is one.
    """
    device = device or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    reason = "as the recipe says"
    if not requested:
        reason = _use_flash(model, precision, device)
    if attention_of(model.config) == "sdpa" and attentions_of(model)[0]:
        set_attention(model, MASKED_SDPA)
    if takes_lengths(model):
        return f"attention {kernel_of(model)}: packed documents by their lengths, without a mask ({reason})"
    return f"attention {kernel_of(model)}: packed documents by a mask ({reason})"


def set_attention(model: Any, name: str) -> None:
    """Let a model use an attention of transformers' AttentionInterface, such as MASKED_SDPA or VARLEN."""
    _register()
    split = getattr(model, "split_rows", None)  # strategy/sequence.py: it stands between the model and its attention
    if split is not None:
        split.attend_with(name)
    else:
        model.set_attn_implementation(name)


def kernel_of(model: Any) -> str | None:
    """Return the name of a model's attention kernel, as attn_implementation of the recipe would name it."""
    split = getattr(model, "split_rows", None)
    name = attention_of(model.config) if split is None else split.kernel
    return "sdpa" if name == MASKED_SDPA else name


def check_attention_installed(requested: str | None) -> None:
    """Raises UserError where attn_implementation names a flash kernel whose package is not installed: flash-attn, or
    else the kernels package, with which transformers takes one of the hub."""
    from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION, is_kernels_available

    package = FLASH_PACKAGES.get(requested or "")
    if package and not (is_kernels_available() or importlib.util.find_spec(package)):
        raise UserError(
            f"attn_implementation = {requested!r} needs flash-attn, or the kernels package: pip install "
            f"'kernels>={KERNELS_MIN_VERSION},<{KERNELS_MAX_VERSION}'. Without it torch's own is used on a GPU"
        )


def takes_lengths(model: Any) -> bool:
    """Return whether a model's attention takes the lengths of packed documents and no mask."""
    from transformers.utils.generic import is_flash_attention_requested

    kernel = kernel_of(model)
    return kernel == VARLEN or is_flash_attention_requested(requested_attention_implementation=kernel)


def _use_flash(model: "PreTrainedModel", precision: str, device: torch.device) -> str:
    """Set the first flash kernel that works here. Returns its name in words, or why none works."""
    from transformers import utils

    config = model.config.get_text_config()
    problems = []
    if device.type != "cuda":
        return f"flash kernels are for GPUs, this is a {device.type} device"
    if precision not in FLASH_PRECISIONS:
        return "flash kernels compute in bf16 and fp16 only"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < MIN_FLASH_CAPABILITY:
        return "flash kernels need compute capability 8.0"
    is_looked_up, kernels = attentions_of(model)
    if kernels is None or not is_looked_up:
        return f"a {config.model_type} has no flash attention in transformers"
    if getattr(config, "attention_chunk_size", None):
        return f"a {config.model_type} attends in chunks, which flash kernels do not support"
    if kernels:
        return f"a {config.model_type} needs its own flash kernel: name it, --attn_implementation {kernels[0]}"
    dropout = has_attention_dropout(config)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for version in FLASH_VERSIONS.get(torch.cuda.get_device_capability(device)[0], "234"):
        name = f"flash_attention_{version}"
        is_supported = version == "2" or not (dropout or (version == "4" and width > FLASH_4_MAX_HEAD_DIM))
        if is_supported and getattr(utils, f"is_flash_attn_{version}_available")():
            try:
                model.set_attn_implementation(name)
                return f"the flash-attn package, version {version}, is installed"
            except (ImportError, ValueError, RuntimeError, OSError) as error:
                problems.append(f"{name}: {' '.join(str(error).split())}")
    problem = ""
    if torch.version.hip is not None:
        problem = "torch has no flash kernel for packed documents here, and flash-attn is not installed"
    elif dropout:
        problem = "the model has dropout on attention weights, which only flash-attn 2 supports: it is not installed"
    elif getattr(config, "attn_logit_softcapping", None):
        problem = f"a {config.model_type} caps its attention scores, which only flash-attn 2 supports"
    elif why := _trial(device, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]):
        problem = f"torch's flash kernel does not work here: {why}"
    if not problem:
        set_attention(model, VARLEN)
        return "torch's own flash kernel"
    return "; ".join([*problems, problem])


def has_attention_dropout(config: "PretrainedConfig") -> bool:
    """Return whether there is dropout on attention weights, by the names that configurations have for it."""
    return any(
        getattr(config, name, 0) for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    )


@functools.cache
def _register() -> None:
    """Register MASKED_SDPA and VARLEN in transformers, whose own names stay as they are."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(MASKED_SDPA, sdpa_attention_forward)
    AttentionMaskInterface.register(MASKED_SDPA, make_additive_mask)
    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionMaskInterface.register(VARLEN, _mask_beside_lengths)


# ------------------------------------------------------------------------------------------------ torch's flash kernel


def varlen_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention within documents for transformers' AttentionInterface; without their lengths (LENGTH_NAMES),
    as sdpa does. Raises ValueError: the model needs something that the kernel does not support.

    Shapes: query (1, H, T, D), key and value (1, H or fewer, T, D) -> ((1, T, H, D), None).
    """
    lengths = [kwargs.get(name) for name in LENGTH_NAMES]
    sliding_window = kwargs.get("sliding_window")
    if lengths[0] is None:  # in generation nothing is packed
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError(f"{VARLEN} has no dropout, no softcap and no sinks. Use --attn_implementation sdpa")
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    padded_width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    width = value.shape[-1]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    paddings = [(part, padded_width - part.shape[-1]) for part in (query, key, value)]
    parts = [F.pad(part, (0, columns)) if columns else part for part, columns in paddings]  # a padding by 0 is a copy
    parts = [part.to(dtype).transpose(1, 2).flatten(0, 1) for part in parts]
    window = (sliding_window - 1 if sliding_window else -1, 0)
    groups = {"enable_gqa": query.shape[1] != key.shape[1]} if VARLEN_TAKES_GQA else {}
    attend: Any = varlen_attn  # other versions of torch have other arguments
    output = attend(*parts, *lengths, scale=scaling, window_size=window, **groups)
    return output[None, ..., :width], None


def _mask_beside_lengths(*, q_length: int = 0, kv_length: int = 0, **kwargs: Any) -> torch.Tensor | None:
    """Return no mask for packed rows (transformers sets allow_is_causal_skip to False), else that of sdpa."""
    from transformers.masking_utils import sdpa_mask

    may_be_packed = kwargs.get("attention_mask") is None and not kwargs.get("allow_is_causal_skip", True)
    if may_be_packed and q_length == kv_length > 1:
        return None
    return sdpa_mask(q_length=q_length, kv_length=kv_length, **kwargs)


def _trial(device: torch.device, dtype: torch.dtype) -> str:
    """Return why the kernel is wrong on this device; empty if it agrees with sdpa, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = parts = tuple(
        torch.randn(1, heads, 16, 16, generator=generator).to(device, dtype).requires_grad_() for heads in (4, 2, 2)
    )
    ends = torch.tensor([0, 5, 16], dtype=torch.int32, device=device)  # cumulative lengths of two documents
    is_second = torch.arange(16, device=device) >= 5
    mask = (is_second[:, None] == is_second).tril()
    try:
        lengths: dict[str, Any] = dict(zip(LENGTH_NAMES, (ends, ends, 11, 11)))
        output, _ = varlen_attention(None, query, key, value, None, **lengths)
        gradients = torch.autograd.grad(output.float().square().sum(), parts)
        wide = query.float(), key.float(), value.float()
        expected = F.scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=True).transpose(1, 2)
        expected_gradients = torch.autograd.grad(expected.square().sum(), parts)
        pairs = zip((output, *gradients), (expected, *expected_gradients))
        error = max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)
    except Exception as problem:  # whatever it is, sdpa works
        return " ".join(str(problem).split()) or type(problem).__name__
    return "" if error < 0.05 else f"its error is {error:.1%}"


# ------------------------------------------------------------------------------------------------------- sdpa's mask


def make_additive_mask(*, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor | None:
    """Return sdpa's mask (B, 1, T, T) as torch adds it to scores: 0 where a position sees another, else minus
    infinity. From a boolean mask torch makes the same tensor, in each layer (convert_boolean_attn_mask in its
    attention.cpp)."""
    from transformers.masking_utils import sdpa_mask

    mask = sdpa_mask(**kwargs)
    return None if mask is None else as_additive(mask, dtype)


def as_additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a boolean mask to one that is added to attention scores in `dtype`, or in autocast's."""
    kind = mask.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


# --------------------------------------------------------------------------------------------------- are rows packed?


def packed_rows(packed: bool | None) -> contextlib.AbstractContextManager[None]:
    """Tell the forward passes within whether a row has several documents. To find out, transformers compares positions
    on the device in every pass (masking_utils.py, 5.23), and the host waits for the result; None: let it do so."""
    if packed is None:
        return contextlib.nullcontext()

    def numbers(position_ids: torch.Tensor) -> torch.Tensor | None:
        return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1) if packed else None

    return documents_found_by(numbers)
