"""The speed of a GPU at each kind of operation."""

import bisect
import math
from dataclasses import dataclass

from zerofit.estimate.operations import BY_FLOPS, MATRIX, Operation

# What is marked "fitted" was fitted on published measurements (measured_rows.csv) by benchmarks/published_times.py;
# docs/measurements/plan-times.md says on how many.

# How a GPU divides a product among its multiprocessors: tiles of (rows, columns), and what small ones reach of the
# best. Source: cuBLAS and CUTLASS choose among these; NVIDIA, Matrix Multiplication Background (tile and wave
# quantization). The parts that small tiles reach are assumptions.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.6))

# A product reaches K / (K + FILL) of the best: a tile has to be filled and written, whatever its depth. Fitted.
FILL = 124

# What a product reaches whose widths are not multiples of 64 elements, or not of 8, which tensor cores ask for.
# Fitted.
UNEVEN, MISALIGNED = 0.64, 0.27

# Attention reaches S / (S + ROWS) of its best on rows of S tokens, and less with heads of at most 64. Fitted.
ATTENTION_ROWS, NARROW_HEADS = 296, 0.82

# What operations that move (size in bytes) reach of the memory's bandwidth. Source: Calculon, mem1, MB_efficiency.
OF_MEMORY_BY_BYTES = ((1e5, 0.3), (1e6, 0.6), (1e7, 0.75), (1e8, 0.9))

# What torch.compile leaves of the time of operations that move bytes. Fitted.
FUSED = 0.15


def product_efficiency(shape: tuple[int, ...], multiprocessors: int) -> float:
    """Return the part of a GPU's best that a matrix product reaches, by its tiles, waves, depth and alignment.

    Args:
        shape: (products, M, N, K).
    """
    count, rows, columns, depth = shape

    def filled(height: int, width: int) -> float:
        tiles = count * math.ceil(rows / height) * math.ceil(columns / width)
        waves = math.ceil(tiles / multiprocessors)
        return count * rows * columns / (waves * multiprocessors * height * width)

    best = max(quality * filled(height, width) for height, width, quality in TILES)
    aligned = 1.0
    for width in (columns, depth):
        aligned = min(aligned, MISALIGNED if width % 8 else UNEVEN if width % 64 else 1.0)
    return best * aligned * depth / (depth + FILL)


def attention_efficiency(shape: tuple[int, ...]) -> float:
    """Return the part of its best that attention reaches.

    Args:
        shape: (rows x heads, queries, keys, width of a head).
    """
    _, queries, _, width = shape
    return queries / (queries + ATTENTION_ROWS) * (NARROW_HEADS if width <= 64 else 1.0)


@dataclass(frozen=True)
class Speeds:
    """The speeds that one process of a GPU reaches.

    Attributes:
        rates: {(kind, half precision): FLOP/s} of matrix products and attention.
        memory_bandwidth: bytes/s; an operation that moves bytes reaches a part of it, by its size (`memory_seconds`).
        operation_s: what starting an operation takes, while others run.
        multiprocessors: of the GPU, by which products are divided.
        host_adam_rate: elements/s of the host's Adam, of all processes of a machine together.
        host_link: bytes/s between the host and this device, in one direction.
        peak_half: FLOP/s of half precision that a utilisation refers to.
        fused: the time of operations that move bytes under torch.compile, as a part of the time without it.
        tensor_s: seconds of Python for each tensor in DeepSpeed's step, while the device waits.
    """

    rates: dict[tuple[str, bool], float]
    memory_bandwidth: float
    operation_s: float
    host_adam_rate: float
    host_link: float
    peak_half: float
    multiprocessors: int
    fused: float = FUSED
    tensor_s: float = 0.0

    def seconds(self, operation: Operation) -> float:
        """Time of an operation's work alone, without starting it."""
        kind, half, flops, moved, shape = operation
        if kind not in BY_FLOPS:
            return self.memory_seconds(moved)
        rate = self.rates[kind, half]
        if kind == MATRIX and shape:
            rate *= product_efficiency(shape, self.multiprocessors)
        elif shape:
            rate *= attention_efficiency(shape)
        return max(self.memory_seconds(moved), flops / rate)

    def memory_seconds(self, moved: float) -> float:
        """The time in which this number of bytes is read and written. Between two sizes of the table the rate is
        interpolated on a logarithmic scale; beyond the first and the last one it stays."""
        if not moved:
            return 0.0
        rates = [self.memory_bandwidth * part for _, part in OF_MEMORY_BY_BYTES]
        place = bisect.bisect_left(OF_MEMORY_BY_BYTES, (moved, 0.0))
        if place in (0, len(rates)):
            return moved / rates[min(place, len(rates) - 1)]
        low, high = OF_MEMORY_BY_BYTES[place - 1][0], OF_MEMORY_BY_BYTES[place][0]
        first, second = rates[place - 1], rates[place]
        return moved / (first * (second / first) ** (math.log(moved / low) / math.log(high / low)))

    def computes(self, half: bool) -> bool:
        """Return whether the rate of matrix products in this precision is known."""
        return (MATRIX, half) in self.rates
