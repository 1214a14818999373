"""What Muon's orthogonal updates take: bytes, matrix products, exchanges. Source: zerofit/strategy/muon.py."""

import math
from dataclasses import replace

from zerofit.estimate.exchanges import Exchange, Exchanges
from zerofit.estimate.operations import ALL_TO_ALL, MATRIX, Operation
from zerofit.estimate.weights import Weight, Weights
from zerofit.strategy.muon import ITERATIONS

# Bytes that a step moves for each element beside AdamW's: mean and gradient mixed, norm, scale, result written.
MOVED_BYTES = 44


def _sides(weight: Weight) -> tuple[int, int, int]:
    """(matrices, the shorter side, the longer one): experts are matrices of their own."""
    *experts, rows, columns = weight.shape
    return math.prod(experts), min(rows, columns), max(rows, columns)


def workspace(weights: Weights, half: bool, is_split: bool) -> int:
    """Bytes beside gradients, of the largest matrix: what an iteration begins and ends with, two products of its
    shorter side, and the matrix itself where it is not a view of the gradient.

    Args:
        is_split: parts of it come from all ranks, and each sends as much.
    """
    width, most = 2 if half else 4, 0
    for weight in weights.matrices:
        count, short, long = _sides(weight)
        copies = 2 + (2 if is_split else int(half))
        most = max(most, width * count * short * (copies * long + 2 * short))
    return most


def with_muon(exchanges: Exchanges, weights: Weights, half: bool, ranks: int, is_split: bool) -> Exchanges:
    """Those of an update, with what Muon adds.

    Args:
        ranks: that share the work.
    """
    size, products = sum(weight.size for weight in weights.matrices), []
    for weight in weights.matrices:
        count, short, long = _sides(weight)
        for shape in ((count, short, short, long), (count, short, short, short), (count, short, long, short)):
            moved = (2 if half else 4) * count * (shape[1] * shape[2] + shape[1] * shape[3] + shape[2] * shape[3])
            products.append(Operation(MATRIX, half, 2 * math.prod(shape), moved, shape))
    rounds = 2 * math.ceil(len(weights.matrices) / ranks)
    sent = Exchange(ALL_TO_ALL, 2 * (2 if half else 4) * size / ranks, rounds, half)
    return replace(
        exchanges,
        step=[*exchanges.step, *([sent] if is_split else [])],
        step_moved=exchanges.step_moved + MOVED_BYTES * size / ranks,
        products=products,
        product_rounds=ITERATIONS / ranks,
    )
