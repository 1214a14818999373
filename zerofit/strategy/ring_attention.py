"""Ring attention: ranks that split rows pass keys and values on to each other, and keep all heads (Liu et al. 2023,
arXiv:2310.01889).

The ring and the merging of its parts are torch's (distributed/tensor/experimental/_context_parallel, 2.13). Its public
`context_parallel` knows no kernel of the CPU, and replaces F.scaled_dot_product_attention for the whole process;
so the functions below it are called. With a causal mask the first ranks would wait for the last: torch's ring expects
that a rank has two pieces of a row, one from its beginning and one from its end.
"""

from importlib import import_module
from typing import Any

import torch

RING = "torch.distributed.tensor.experimental._context_parallel._attention"  # where a torch has it
aten = torch.ops.aten
SEQUENCE = 2  # the dimension of (B, H, T, D)
CPU, GPU = aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention
CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
GPU_BACKWARD = aten._scaled_dot_product_flash_attention_backward
OF_GPU = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")  # what it hands to its backward


def pieces_of(row: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's two pieces (B, T / size, ...) of rows (B, T, ...)."""
    pieces = row.chunk(2 * size, dim=1)
    return torch.cat([pieces[rank], pieces[-1 - rank]], dim=1)


def rows_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """Rows (B, T, ...) of all ranks' pieces."""
    first, last = zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
    return torch.cat([*first, *reversed(last)], dim=1)


class RingAttention(torch.autograd.Function):
    """Causal attention to rows in full, without dropout, of queries, keys and values of a part of them.

    Shapes: query (B, H, T / ranks, D), key and value (B, heads of keys, T / ranks, D) -> (B, H, T / ranks, D).
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, scale: float | None
    ) -> torch.Tensor:
        ring = import_module(RING)
        ring.set_rotate_method("alltoall")  # not all keys and values at once
        groups = query.shape[1] // key.shape[1]

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
            kernel = GPU if query.device.type == "cuda" else CPU
            return kernel(query, *(each.repeat_interleave(groups, dim=1) for each in (key, value)), **options)

        output, sums, *rest = ring._templated_ring_attention(
            group, SEQUENCE, attend, query, key, value, is_causal=True, scale=scale
        )
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.groups, ctx.group, ctx.scale, ctx.rest = groups, group, scale, dict(zip(OF_GPU, rest, strict=False))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ring, (query, key, value, output, sums) = import_module(RING), ctx.saved_tensors

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
            kernel = GPU_BACKWARD if query.device.type == "cuda" else CPU_BACKWARD
            key, value = (each.repeat_interleave(ctx.groups, dim=1) for each in (key, value))
            of_query, *of_wide = kernel(query=query, key=key, value=value, dropout_p=0.0, **options)
            return of_query, *(each.unflatten(1, (-1, ctx.groups)).sum(2) for each in of_wide)

        of_query, of_key, of_value = ring._templated_ring_attention_backward(
            ctx.group, SEQUENCE, attend, gradient.contiguous(), "grad_out", query, key, value, output, sums,
            is_causal=True, scale=ctx.scale, **ctx.rest,
        )  # fmt: skip
        return of_query, of_key, of_value, None, None
