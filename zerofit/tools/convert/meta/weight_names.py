"""The names of each weight of a Llama in Meta's files and in transformers', and how it is cut for tensor parallelism.

Sources: names and splits of Meta's model.py (github.com/meta-llama/llama and llama3); the permutation of
transformers' convert_llama_weights_to_hf.py, up to 4.x. Meta rotates the neighbours (2i, 2i + 1) of a head,
transformers i and i + head_dim / 2: the rows of wq and wk have another order.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine all shapes of a Llama."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


@dataclass(frozen=True)
class MetaWeight:
    """One weight: its names and its full shape.

    Args:
        heads: of a matrix that is rotated; 0: it is not, and is the same in both formats.
        copied: several processes may have the same shard (where there are few heads of keys and values).
    """

    meta: str
    hf: str
    shape: tuple[int, ...]
    heads: int = 0
    copied: bool = False


@dataclass(frozen=True)
class ShardCut:
    """The cut of a weight into shards: shard i is part i // copies of num_shards / copies equal parts along the axis;
    None: the weight is replicated."""

    axis: int | None
    copies: int = 1


def weights(sizes: Sizes) -> list[MetaWeight]:
    """All weights in transformers' order, the embeddings first and the head last."""
    s = sizes
    listed = [MetaWeight("tok_embeddings.weight", "model.embed_tokens.weight", (s.vocab, s.dim), copied=True)]
    for number in range(s.layers):
        listed += _layer(s, f"layers.{number}.", f"model.layers.{number}.")
    listed.append(MetaWeight("norm.weight", "model.norm.weight", (s.dim,)))
    listed.append(MetaWeight("output.weight", "lm_head.weight", (s.vocab, s.dim), copied=True))
    return listed


def _layer(s: Sizes, meta: str, hf: str) -> list[MetaWeight]:
    queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
    attention, mlp = f"{hf}self_attn.", f"{hf}mlp."
    return [
        MetaWeight(f"{meta}attention.wq.weight", f"{attention}q_proj.weight", (queries, s.dim), s.heads),
        MetaWeight(f"{meta}attention.wk.weight", f"{attention}k_proj.weight", (keys, s.dim), s.kv_heads, True),
        MetaWeight(f"{meta}attention.wv.weight", f"{attention}v_proj.weight", (keys, s.dim), copied=True),
        MetaWeight(f"{meta}attention.wo.weight", f"{attention}o_proj.weight", (s.dim, queries)),
        MetaWeight(f"{meta}feed_forward.w1.weight", f"{mlp}gate_proj.weight", (s.ffn, s.dim)),
        MetaWeight(f"{meta}feed_forward.w2.weight", f"{mlp}down_proj.weight", (s.dim, s.ffn)),
        MetaWeight(f"{meta}feed_forward.w3.weight", f"{mlp}up_proj.weight", (s.ffn, s.dim)),
        MetaWeight(f"{meta}attention_norm.weight", f"{hf}input_layernorm.weight", (s.dim,)),
        MetaWeight(f"{meta}ffn_norm.weight", f"{hf}post_attention_layernorm.weight", (s.dim,)),
    ]


def to_hf(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Meta's weight as transformers has it: of each head first the even rows, then the odd ones."""
    if not heads:
        return tensor
    rows, columns = tensor.shape
    return tensor.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def find_cut(weight: MetaWeight, shard: tuple[int, ...], num_shards: int) -> ShardCut | None:
    """Find out how a weight with shards of this shape was cut: their shape tells the axis (Llama 1 and 2 cut the
    embeddings along the hidden dimension, Llama 3 along the vocabulary). None: in no known way."""
    if shard == weight.shape and (num_shards == 1 or weight.copied or len(shard) == 1):
        return ShardCut(None)
    if len(shard) != 2 or len(weight.shape) != 2:
        return None
    for axis in (0, 1):
        parts, rest = divmod(weight.shape[axis], shard[axis])
        fits = parts and not rest and shard[1 - axis] == weight.shape[1 - axis]
        if fits and num_shards % parts == 0 and (parts == num_shards or weight.copied):
            return ShardCut(axis, num_shards // parts)
    return None


def same_bits(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare two tensors bit for bit, NaN included."""
    same = tensor.shape == expected.shape and tensor.dtype == expected.dtype
    return same and torch.equal(tensor.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
