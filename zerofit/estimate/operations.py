"""The cost of one operation of a traced pass: its kind, its floating-point operations, and the bytes that it moves."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten

MATRIX, ATTENTION, MEMORY, MATH, RANDOM = "matrix products", "attention", "memory", "functions", "random numbers"
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
EXCHANGES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)  # between ranks; their bytes are of the full buffers
BY_FLOPS = (MATRIX, ATTENTION)  # what they take is counted in FLOPs, of the others in bytes
ROWS_EXCHANGED = "dim_zero_all_to_all"  # DeepSpeed's operator of Ulysses (deepspeed/sequence/layer.py)
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
FLASH_BACKWARD = f"{FLASH}_backward"
# Matrix products of experts, as the tracer lets them run (tracer.py): (S, K) rows with (E, K, N) weights.
EXPERTS, EXPERTS_BACKWARD = "grouped_mm_fallback", "grouped_mm_fallback_backward"
# They make no tensor, or one that nothing is written into.
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach", "lift_fresh",
    "alias", "_local_scalar_dense", "_reshape_alias", "sym_size", "sym_stride", "sym_numel",
}  # fmt: skip
# They do not read the tensor that they are given.
WRITING = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_", "zeros",
           "ones", "full", "arange", "bernoulli_", "uniform_", "normal_"}  # fmt: skip
LOOKUPS = {"embedding", "index_select", "gather", "index"}  # they read as much as they write, and not the whole table
# More than a few instructions an element: on a CPU they take longer than their bytes.
FUNCTIONS = {"exp", "tanh", "gelu", "gelu_backward", "silu", "silu_backward", "sigmoid", "erf", "pow", "_softmax",
             "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "log", "logsumexp", "cos",
             "sin"}  # fmt: skip
RANDOMS = {"bernoulli_", "native_dropout", "rand", "rand_like", "uniform_", "normal_"}


class Operation(NamedTuple):
    """One operation.

    Attributes:
        half: it computes in half precision.
        bytes: what it reads and writes, each tensor once.
        shape: of matrix products (products, M, N, K); of attention (rows x heads, queries, keys, width of a head).
    """

    kind: str
    half: bool
    flops: int
    bytes: int
    shape: tuple[int, ...] = ()


def operation_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operation | None:
    """Return the cost of a call of an aten operator; None where it costs nothing.

    FLOPs are those of torch.utils.flop_counter; a causal mask halves those of attention.
    """
    packet = getattr(function, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if name == ROWS_EXCHANGED:
        return Operation(ALL_TO_ALL, _is_half(args, result), 0, _bytes(result))
    if name in (EXPERTS, EXPERTS_BACKWARD):
        rows, weight = args[0], args[1]
        flops = 2 * rows.numel() * weight.shape[2] * (1 if name == EXPERTS else 2)
        shape = (weight.shape[0], -(-len(rows) // weight.shape[0]), weight.shape[2], weight.shape[1])
        return Operation(MATRIX, _is_half(args, result), flops, sum(map(_bytes, tensors_in((args, result)))), shape)
    if packet is None or function.namespace != "aten" or function.is_view or name in FREE:  # prim: a question
        return None
    flops, written = _flops(packet, args, kwargs, result), sum(map(_bytes, tensors_in((result,))))
    read = 0 if name in WRITING else sum(map(_bytes, tensors_in(args[1:] if name == "copy_" else args)))
    read = min(read, written) if name in LOOKUPS else read
    if not read + written:
        return None
    kind = RANDOM if name in RANDOMS else MATH if name.rstrip("_") in FUNCTIONS or name in FUNCTIONS else MEMORY
    if flops:
        kind = ATTENTION if "attention" in name else MATRIX
    factors = args[1:] if packet in (aten.addmm, aten.baddbmm) else args
    is_half, moved = _is_half(factors, result), read + written
    return Operation(kind, is_half, flops, moved, _shape(kind, name, factors) if flops else ())


def _shape(kind: str, name: str, factors: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape, as Operation has it; empty for a product that is neither of matrices nor of attention, such as
    a convolution."""
    if kind == ATTENTION:
        query, keys = (factors[1], factors[2]) if name.endswith("backward") else (factors[0], factors[1])
        return query.shape[0] * query.shape[1], query.shape[2], keys.shape[2], query.shape[3]
    if len(factors) < 2 or not all(isinstance(factor, torch.Tensor) for factor in factors[:2]):
        return ()
    left, right = factors[0], factors[1]
    if left.dim() == 2 == right.dim():
        return 1, left.shape[0], right.shape[1], left.shape[1]
    return (*left.shape[:2], right.shape[2], left.shape[2]) if left.dim() == 3 == right.dim() else ()


def _flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if packet.__name__ == FLASH:
        flops = sdpa_flop_count(*(_with_heads_of(args[0], tensor) for tensor in args[:3]))
        return flops // 2 if _is_causal(args, kwargs, 4) else flops
    if packet.__name__ == FLASH_BACKWARD:
        flops = sdpa_backward_flop_count(*(_with_heads_of(args[1], tensor) for tensor in args[:4]))
        return flops // 2 if _is_causal(args, kwargs, 7) else flops
    if packet is aten.addmm:  # its formula takes the `out_dtype` that may follow for the result
        args, kwargs = args[:3], {}
    formula = flop_registry.get(packet)
    return formula(*args, **kwargs, out_val=result) if formula is not None else 0


def _with_heads_of(query: torch.Tensor, tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape (B, heads, T, D) with the query's heads: torch 2.11 counts no groups of them."""
    return (tensor.shape[0], query.shape[1], *tensor.shape[2:])


def _is_causal(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> bool:
    return bool(kwargs.get("is_causal", args[place] if len(args) > place else False))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in values, and in lists and tuples of these."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _bytes(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes; for an expanded one, those that it has in memory."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _is_half(args: tuple[Any, ...], result: Any) -> bool:
    floating = (one for one in tensors_in((args, result)) if one.is_floating_point())
    first = next(floating, None)
    return first is not None and first.itemsize < 4
