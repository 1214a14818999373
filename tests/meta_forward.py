"""A Llama as Meta's code computes it, from Meta's files: the reference for a converted model.

Source: model.py of github.com/meta-llama/llama3 (attention, feed-forward, norms, RoPE as complex numbers) and of
llama-models (RoPE stretched for Llama 3.1). Independent of transformers, so that errors show.
"""

import math

import torch
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from zerofit.tools.convert.meta.conversion import SCALED, theta_of
from zerofit.tools.convert.meta.folder import MetaFolder


def meta_logits(meta: MetaFolder, ids, factor: float | None = None):
    """Logits [rows, length, vocabulary] in fp32.

    Args:
        factor: of the stretched RoPE; None: it is not.
    """
    with torch.no_grad():
        named = {weight.meta: weight for weight in meta.weights}

        def read(name: str):
            return meta.read(named[name]).float()

        hidden = embedding(ids, read("tok_embeddings.weight"))
        turns = _turns(meta, ids.shape[1], factor)
        for number in range(meta.sizes.layers):
            hidden = _layer(meta, hidden, turns, lambda name: read(f"layers.{number}.{name}.weight"))  # noqa: B023
        hidden = _norm(meta, hidden, read("norm.weight"))
        return linear(hidden, read("tok_embeddings.weight" if meta.tied else "output.weight"))


def _layer(meta: MetaFolder, hidden, turns, read):
    hidden = hidden + _attention(meta, _norm(meta, hidden, read("attention_norm")), turns, read)
    normed = _norm(meta, hidden, read("ffn_norm"))
    gated = silu(linear(normed, read("feed_forward.w1"))) * linear(normed, read("feed_forward.w3"))
    return hidden + linear(gated, read("feed_forward.w2"))


def _attention(meta: MetaFolder, hidden, turns, read):
    rows, length, _ = hidden.shape
    heads, kv_heads = meta.sizes.heads, meta.sizes.kv_heads
    queries, keys, values = (
        linear(hidden, read(f"attention.{name}")).view(rows, length, number, meta.sizes.head_dim)
        for name, number in (("wq", heads), ("wk", kv_heads), ("wv", kv_heads))
    )
    queries, keys = _turn(queries, turns), _turn(keys, turns)
    keys, values = (tensor.repeat_interleave(heads // kv_heads, dim=2) for tensor in (keys, values))
    mixed = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (queries, keys, values)), is_causal=True)
    return linear(mixed.transpose(1, 2).reshape(rows, length, -1), read("attention.wo"))


def _norm(meta: MetaFolder, hidden, weight):
    return hidden * (hidden.pow(2).mean(-1, keepdim=True) + meta.params.get("norm_eps", 1e-5)).rsqrt() * weight


def _turn(tensor, turns):
    """RoPE on [rows, length, heads, head_dim]: neighbours are one complex number."""
    pairs = torch.view_as_complex(tensor.reshape(*tensor.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3)


def _turns(meta: MetaFolder, length: int, factor: float | None):
    head_dim = meta.sizes.head_dim
    frequencies = [theta_of(meta.params) ** (-i / head_dim) for i in range(0, head_dim, 2)]
    if factor:
        frequencies = [_stretched(frequency, factor) for frequency in frequencies]
    angles = torch.outer(torch.arange(length).float(), torch.tensor(frequencies))
    return torch.polar(torch.ones_like(angles), angles)


def _stretched(frequency: float, factor: float) -> float:
    wavelength, trained = 2 * math.pi / frequency, SCALED["original_max_position_embeddings"]
    low, high = SCALED["low_freq_factor"], SCALED["high_freq_factor"]
    if wavelength < trained / high:
        return frequency
    if wavelength > trained / low:
        return frequency / factor
    smooth = (trained / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency
