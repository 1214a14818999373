"""Records a traced pass: its operations, the modules that it visits, and the bytes of live tensors.

The bytes of live tensors are counted while a model runs on fake tensors, segment by segment.

The order in which ZeRO-3 visits the modules of a pass comes from DeepSpeed's own hooks on the traced model: here they
call a list instead of DeepSpeed's coordinator (DeepSpeed 0.19, runtime/zero/parameter_offload.py).

A fake tensor has a shape, a dtype and a storage of the right size that holds no memory, so the count takes
milliseconds and no GPU. Fake tensors must be on "cpu": those on "cuda" have no backward pass in a CPU build of torch.
"""

import bisect
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zerofit.compat import replaced
from zerofit.compat.deepspeed import visit_modules
from zerofit.compat.torch import DispatchMode, number_of_tensors

aten = torch.ops.aten

MATRIX = "matrix products"
ATTENTION = "attention"
MEMORY = "memory"
MATH = "functions"
RANDOM = "random numbers"
ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_TO_ALL = "all_to_all"
COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)  # their bytes are those of the full buffers
FLOP_KINDS = (MATRIX, ATTENTION)  # kinds whose cost is counted in FLOPs; that of the others in bytes
ULYSSES_OPERATOR = "dim_zero_all_to_all"  # DeepSpeed's operator of Ulysses (deepspeed/sequence/layer.py)
FLASH_OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
FLASH_BACKWARD_OPERATOR = f"{FLASH_OPERATOR}_backward"
# Matrix products of experts, as the tracer runs them (tracer.py): (S, K) rows with (E, K, N) weights.
GROUPED_MM = "grouped_mm_fallback"
GROUPED_MM_BACKWARD = "grouped_mm_fallback_backward"
# Operators without cost: they make no tensor, or one that nothing is written into.
COSTLESS_OPERATORS = set(
    (
        "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view detach lift_fresh alias "
        "_local_scalar_dense _reshape_alias sym_size sym_stride sym_numel"
    ).split()
)
# Operators that only write: they do not read the tensor that they are given.
WRITE_OPERATORS = set(
    (
        "zeros_like ones_like full_like new_zeros new_ones new_full zero_ fill_ zeros ones full arange bernoulli_ "
        "uniform_ normal_"
    ).split()
)
LOOKUP_OPERATORS = {"embedding", "index_select", "gather", "index"}  # they do not read the whole table
# These take more than a few instructions per element: on a CPU they take longer than moving their bytes.
MATH_OPERATORS = set(
    (
        "exp tanh gelu gelu_backward silu silu_backward sigmoid erf pow _softmax _log_softmax _softmax_backward_data "
        "_log_softmax_backward_data log logsumexp cos sin"
    ).split()
)
RANDOM_OPERATORS = {"bernoulli_", "native_dropout", "rand", "rand_like", "uniform_", "normal_"}


class Operation(NamedTuple):
    """One traced operation, with its cost."""

    kind: str
    half: bool  # True if it computes in half precision
    flops: int
    bytes: int  # bytes that it reads and writes, each tensor counted once
    # matrix products: (products, M, N, K); attention: (rows x heads, queries, keys, width of a head)
    shape: tuple[int, ...] = ()


def measure_operation(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operation | None:
    """Return the cost of a call of an aten operator; None if it costs nothing.

    FLOPs are those of torch.utils.flop_counter; a causal mask halves those of attention.
    """
    packet = getattr(function, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if name == ULYSSES_OPERATOR:
        return Operation(ALL_TO_ALL, _is_half(args, result), 0, _bytes(result))
    if name in (GROUPED_MM, GROUPED_MM_BACKWARD):
        rows = args[0]
        weight = args[1]
        flops = 2 * rows.numel() * weight.shape[2] * (1 if name == GROUPED_MM else 2)
        shape = (weight.shape[0], -(-len(rows) // weight.shape[0]), weight.shape[2], weight.shape[1])
        return Operation(MATRIX, _is_half(args, result), flops, sum(map(_bytes, tensors_in((args, result)))), shape)
    is_aten = packet is not None and function.namespace == "aten"  # operators of prim are only queries
    if not is_aten or function.is_view or name in COSTLESS_OPERATORS:
        return None
    flops = _flops(packet, args, kwargs, result)
    written = sum(map(_bytes, tensors_in((result,))))
    read = 0 if name in WRITE_OPERATORS else sum(map(_bytes, tensors_in(args[1:] if name == "copy_" else args)))
    read = min(read, written) if name in LOOKUP_OPERATORS else read
    if not read + written:
        return None
    is_math = name.rstrip("_") in MATH_OPERATORS or name in MATH_OPERATORS
    kind = RANDOM if name in RANDOM_OPERATORS else MATH if is_math else MEMORY
    if flops:
        kind = ATTENTION if "attention" in name else MATRIX
    factors = args[1:] if packet in (aten.addmm, aten.baddbmm) else args
    is_half = _is_half(factors, result)
    moved = read + written
    return Operation(kind, is_half, flops, moved, _shape(kind, name, factors) if flops else ())


def _shape(kind: str, name: str, factors: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the value of Operation.shape. It is empty for a product that is neither a matrix product nor attention,
    such as a convolution."""
    if kind == ATTENTION:
        query, keys = (factors[1], factors[2]) if name.endswith("backward") else (factors[0], factors[1])
        return query.shape[0] * query.shape[1], query.shape[2], keys.shape[2], query.shape[3]
    if len(factors) < 2 or not all(isinstance(factor, torch.Tensor) for factor in factors[:2]):
        return ()
    left = factors[0]
    right = factors[1]
    if left.dim() == 2 == right.dim():
        return 1, left.shape[0], right.shape[1], left.shape[1]
    return (*left.shape[:2], right.shape[2], left.shape[2]) if left.dim() == 3 == right.dim() else ()


def _flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if packet.__name__ == FLASH_OPERATOR:
        flops = sdpa_flop_count(*(_with_heads_of(args[0], tensor) for tensor in args[:3]))
        return flops // 2 if _is_causal(args, kwargs, 4) else flops
    if packet.__name__ == FLASH_BACKWARD_OPERATOR:
        flops = sdpa_backward_flop_count(*(_with_heads_of(args[1], tensor) for tensor in args[:4]))
        return flops // 2 if _is_causal(args, kwargs, 7) else flops
    if packet is aten.addmm:  # its formula takes an `out_dtype` that may follow as the result
        args = args[:3]
        kwargs = {}
    formula = flop_registry.get(packet)
    return formula(*args, **kwargs, out_val=result) if formula is not None else 0


def _with_heads_of(query: torch.Tensor, tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape (B, heads, T, D) with the query's number of heads: torch 2.11 does not count grouped heads."""
    return (tensor.shape[0], query.shape[1], *tensor.shape[2:])


def _is_causal(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> bool:
    return bool(kwargs.get("is_causal", args[position] if len(args) > position else False))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in values, and in lists and tuples of these."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _bytes(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes; for an expanded tensor, the bytes of its storage."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _is_half(args: tuple[Any, ...], result: Any) -> bool:
    floating = (tensor for tensor in tensors_in((args, result)) if tensor.is_floating_point())
    first = next(floating, None)
    return first is not None and first.itemsize < 4


class ModuleVisit(NamedTuple):
    """One visit of ZeRO-3 to a module: its weights are fetched, or they may be released."""

    module: str
    enters: bool  # True: the weights are fetched; False: they may be released
    forward: bool  # for its forward pass, which may be recomputed in the backward pass
    # Names of the module's direct weights, and those of its submodules only if DeepSpeed treats the module as a leaf
    # and does not visit its submodules, as in blocks of some mixtures of experts (leaf_module_config.py).
    weights: tuple[str, ...]
    # Those of `weights` whose memory stays when they are released, because the backward pass needs a view of it:
    # DeepSpeed frees a weight by giving it other memory (free_param), and a saved view keeps the earlier memory.
    kept: tuple[str, ...] = ()


class ModuleVisits:
    """Installs DeepSpeed's hooks on a model. It replaces the DeepSpeedZeRoOffload whose methods the hooks call."""

    def __init__(self, model: torch.nn.Module):
        from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
        from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config, z3_leaf_module

        apply_zero_leaf_module_config(model, DeepSpeedZeroLeafModuleConfig())
        self.module = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.parameters = dict(model.named_parameters())
        name_of = {id(parameter): name for name, parameter in self.parameters.items()}
        self.weights = {
            id(module): tuple(name_of[id(weight)] for weight in module.parameters(recurse=z3_leaf_module(module)))
            for module in model.modules()
        }
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        visit_modules(self, model)

    def begin(self, note: Callable[[ModuleVisit], None]) -> None:
        """Start a pass. `note` is called with each of its visits."""
        from deepspeed.runtime.zero import parameter_offload

        self.note = note
        self.entered = parameter_offload.FWD_MODULE_STACK
        self.entered.clear()  # recomputation may leave modules before their end
        self.holders = {name: _holders(parameter) for name, parameter in self.parameters.items()}
        for module in self.module.modules():
            module.applied_pre_backward_ref_cnt = 0  # type: ignore[assignment]

    def get_param_coordinator(self) -> None:
        """Return None: nothing is fetched here. DeepSpeed's hooks call this method."""

    def pre_sub_module_forward_function(self, module: torch.nn.Module) -> None:
        self.entered.append(module)
        self._visit(module, True, True)

    def post_sub_module_forward_function(self, module: torch.nn.Module) -> None:
        weights = self.weights[id(module)]
        kept_weights = tuple(name for name in weights if _holders(self.parameters[name]) > self.holders[name])
        self._visit(module, False, True, kept_weights)

    def pre_sub_module_backward_function(self, module: torch.nn.Module) -> None:
        self._visit(module, True, False)

    def post_sub_module_backward_function(self, module: torch.nn.Module) -> None:
        self._visit(module, False, False)

    def _visit(self, module: torch.nn.Module, enters: bool, forward: bool, kept: tuple[str, ...] = ()) -> None:
        self.note(ModuleVisit(self.names[id(module)], enters, forward, self.weights[id(module)], kept))


def _holders(tensor: torch.Tensor) -> int:
    """Return the number of tensors that hold a tensor's memory: the tensor, its views, and those that autograd has
    saved. A tensor that is saved itself counts once."""
    return number_of_tensors(tensor.untyped_storage())


@dataclass
class TraceSegment:
    """One part of a pass. All sizes are in bytes; `start` and `end` are the live bytes at its start and end."""

    name: tuple[Any, ...]  # kind; for a layer also the layer's stack and number
    start: int
    peak: int = 0  # the maximum of the live bytes
    end: int = 0
    completed: str = ""  # the parameter whose gradient is completed at its end, and released; empty: there is none
    gradient: int = 0  # bytes of that gradient
    operations: list[Operation] = field(default_factory=list)  # in order
    visit: ModuleVisit | None = None  # the visit to a module at its start
    offloaded: int = 0  # bytes that are offloaded to the host
    blocks: list[int] = field(default_factory=list)  # storages that are allocated, and (negative) freed, in order

    @property
    def delta(self) -> int:
        """The bytes that stay alive after it, or (negative) that it has released."""
        return self.end - self.start

    @property
    def rise(self) -> int:
        """The bytes by which the peak is above the start."""
        return self.peak - self.start


class AllocationTracker(DispatchMode):
    """Follows every storage that an operation makes, from its first tensor to the release of its last one.

    Args:
        rounding: an allocation takes a multiple of this many bytes (512 for CUDA's caching allocator).
        thin_masks: dropout keeps one byte per element, as torch's fused kernel does on devices other than a CPU. On a
            CPU it keeps a mask in the dtype of its input (aten/src/ATen/native/Dropout.cpp).
        tied: shapes of weights that several modules share. Autograd adds the gradients of such a weight into the
            memory of the first (torch/csrc/autograd/input_buffer.cpp).

    Attributes:
        multiplied: the storages that are inputs or outputs of matrix products and attention. In float8 a product's
            inputs are rounded copies, which the backward pass makes again from what is kept.
        counts: True if new storages are counted.
    """

    def __init__(
        self,
        rounding: int = 1,
        thin_masks: bool = False,
        tied: frozenset[torch.Size] = frozenset(),
        is_float8: bool = False,
    ):
        super().__init__()
        self.is_float8 = is_float8
        self.rounding = rounding
        self.thin_masks = thin_masks
        self.live = 0
        self.peak = 0
        self.tied = tied
        self.segments: list[TraceSegment] = []
        self.multiplied: set[int] = set()
        self.counts = True
        self._known: dict[int, int] = {}

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Exclude tensors from the count: weights, which are accounted for elsewhere."""
        for tensor in tensors:
            self._follow(tensor.untyped_storage(), 0)

    def include(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that exist already: the inputs."""
        for tensor in tensors:
            self._follow(tensor.untyped_storage(), self._rounded(tensor.untyped_storage().nbytes()))

    def storages(self) -> set[int]:
        """Return the keys of all storages that are alive."""
        return set(self._known)

    def mark(self, name: tuple[Any, ...]) -> None:
        """Begin a segment of this name."""
        self._close()
        self.segments.append(TraceSegment(name, self.live, self.live))

    def visit(self, visit: ModuleVisit) -> None:
        """Begin another segment of the same name, which starts with this visit to a module."""
        self.mark(self.segments[-1].name)
        self.segments[-1].visit = visit

    def gradient_completed(self, name: str, parameter: torch.Tensor) -> None:
        """Release a gradient that is complete, and begin another segment of the same name."""
        segment = self.segments[-1]
        before = self.live
        parameter.grad = None
        segment.completed = name
        segment.gradient = before - self.live
        self.mark(segment.name)

    def offloaded(self, size: int) -> None:
        """Record that `size` bytes are offloaded to the host."""
        self.segments[-1].offloaded += size

    def close(self) -> list[TraceSegment]:
        self._close()
        return self.segments

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "prim":  # two of three calls are queries, such as on which device a tensor is
            return result
        if function is torch.ops.aten.add.Tensor and result.shape in self.tied:
            self._resize(args[0].untyped_storage(), 0)  # under this mode autograd does not add in place
        for tensor in tensors_in((result,)):
            storage = tensor.untyped_storage()
            if id(storage) not in self._known:
                self._follow(storage, self._rounded(storage.nbytes()) if self.counts else 0)
        if self.thin_masks and function is torch.ops.aten.bernoulli_.float:
            self._resize(result.untyped_storage(), self._rounded(result.numel()))
        operation = measure_operation(function, args, kwargs or {}, result)
        if operation and operation.kind in FLOP_KINDS:
            multiplied = result if self.is_float8 and operation.kind == MATRIX else (args, result)
            self.multiplied.update(id(tensor.untyped_storage()) for tensor in tensors_in(multiplied))
        self.note(operation)
        return result

    def note(self, operation: Operation | None) -> None:
        """Record an operation that was just computed. None stands for one that costs nothing."""
        if operation and self.segments:
            self.segments[-1].operations.append(operation)

    def some_chunks(self, num_rows: int, rows: int) -> Iterator[int]:
        """Yield the first row of the first, the second and the last chunk: those in between repeat the second one."""
        starts = range(0, num_rows, rows)
        yield from starts[:1]
        operations = self.segments[-1].operations
        before = len(operations)
        yield from starts[1:2]
        operations += operations[before:] * max(0, len(starts) - 3)
        yield from starts[2:][-1:]

    def _rounded(self, size: int) -> int:
        return -(-size // self.rounding) * self.rounding

    def _follow(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)
        if key in self._known:
            return
        self._known[key] = size
        weakref.finalize(storage, self._release, key)
        self._change(size)

    def _resize(self, storage: torch.UntypedStorage, size: int) -> None:
        self._change(-self._known[id(storage)])
        self._known[id(storage)] = size
        self._change(size)

    def _release(self, key: int) -> None:
        self.multiplied.discard(key)
        self._change(-self._known.pop(key, 0))

    def _change(self, size: int) -> None:
        """Allocate bytes, or (negative) free them."""
        self.live += size
        self.peak = max(self.peak, self.live)
        if self.segments and size:
            segment = self.segments[-1]
            segment.peak = max(segment.peak, self.live)
            segment.blocks.append(size)

    def _close(self) -> None:
        if self.segments:
            self.segments[-1].end = self.live


@dataclass
class _Saved:
    """A tensor that is saved for the backward pass, or, after it was dropped, the layout to make one like it."""

    tensor: torch.Tensor | None
    layout: tuple[torch.Size, tuple[int, ...], torch.dtype]


class FusedLayers:
    """Hooks for a layer's forward pass, which keep only what a compiled layer keeps for its backward pass.

    torch.compile fuses elementwise operations, and recomputes them in the backward pass
    (torch/_functorch/partitioners.py, min_cut_rematerialization_partition). It keeps what has to be in memory in any
    case: the inputs and outputs of matrix products and attention. So in the trace of a layer everything else that
    autograd would keep is dropped at the layer's end, and is restored, at no cost, when the backward pass needs it.
    """

    def __init__(self, tracker: AllocationTracker):
        self.tracker = tracker
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self.saved: list[_Saved] = []
        self.before: set[int] = set()

    def watch(self, layer: torch.nn.Module) -> list[Any]:
        """Register the hooks on a layer. Returns their handles, which the caller removes."""
        return [layer.register_forward_pre_hook(self._enter), layer.register_forward_hook(self._leave)]

    def _enter(self, *_: Any) -> None:
        self.saved = []
        self.before = self.tracker.storages()
        self.hooks.__enter__()

    def _leave(self, *_: Any) -> None:
        self.hooks.__exit__(None, None, None)
        kept = self.before | self.tracker.multiplied
        for saved in self.saved:
            assert saved.tensor is not None  # no backward pass has begun
            if id(saved.tensor.untyped_storage()) not in kept:
                saved.tensor = None
        self.saved = []

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor, (tensor.shape, tensor.stride(), tensor.dtype))
        self.saved.append(saved)
        return saved

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.tensor is not None:
            return saved.tensor
        shape, stride, dtype = saved.layout
        with replaced(self.tracker, "counts", False):
            return torch.empty_strided(shape, stride, dtype=dtype)


MIB = 2**20
SMALL_BLOCK_BYTES = MIB  # blocks up to this size are not modelled
# Blocks below MIDDLE_BLOCK_BYTES are cut from segments of MIDDLE_SEGMENT_BYTES.
MIDDLE_BLOCK_BYTES = 10 * MIB
MIDDLE_SEGMENT_BYTES = 20 * MIB
SEGMENT_MULTIPLE = 2 * MIB  # the size of larger segments is a multiple of this


class MemoryBlock:
    """A block of memory in an allocator's segment, between two neighbours."""

    __slots__ = ("following", "is_free", "number", "previous", "size")

    def __init__(self, size: int, previous: "MemoryBlock | None" = None, following: "MemoryBlock | None" = None):
        self.size = size
        self.previous = previous
        self.following = following
        self.is_free = False
        self.number = 0

    @property
    def is_segment(self) -> bool:
        return self.previous is None and self.following is None


class CachingAllocator:
    """A model of torch's caching allocator: the blocks above 1 MiB of one stream. Sizes are in bytes.

    It allocates segments from the driver and does not free them: a block is cut from the smallest free block that is
    large enough, and a free block is merged with its free neighbours of the same segment. Source: torch 2.13,
    c10/cuda/CUDACachingAllocator.cpp (get_free_block, should_split, get_allocation_size), whose blocks of at most
    1 MiB lie in separate segments.

    Attributes:
        held: bytes that are allocated from the driver.
        alive: bytes of the tensors.
        idle: bytes in segments without a taken block: they are returned to the driver before memory runs out.
        max_alive, max_needed: the maximum of `alive`, and of `held - idle`.
    """

    def __init__(self) -> None:
        self.held = self.alive = self.idle = self.max_alive = self.max_needed = 0
        self._free: list[tuple[int, int, MemoryBlock]] = []  # sorted by size
        self._numbers = itertools.count()
        self._taken: dict[int, list[MemoryBlock]] = {}

    def take(self, size: int) -> None:
        """Allocate a block of `size` bytes."""
        index = bisect.bisect_left(self._free, (size,))
        if index < len(self._free):
            block = self._free.pop(index)[2]
            block.is_free = False
            self.idle -= block.size if block.is_segment else 0
        else:
            rounded = -(-size // SEGMENT_MULTIPLE) * SEGMENT_MULTIPLE
            block = MemoryBlock(MIDDLE_SEGMENT_BYTES if size < MIDDLE_BLOCK_BYTES else rounded)
            self.held += block.size
        if block.size - size > SMALL_BLOCK_BYTES:
            remaining = MemoryBlock(block.size - size, block, block.following)
            if block.following:
                block.following.previous = remaining
            block.following = remaining
            block.size = size
            self._put(remaining)
        self.alive += size
        self.max_alive = max(self.max_alive, self.alive)
        self.max_needed = max(self.max_needed, self.held - self.idle)
        self._taken.setdefault(size, []).append(block)

    def release(self, size: int) -> None:
        """Free the block of that size that was taken last: a backward pass frees first what was saved last."""
        blocks = self._taken.get(size)
        if not blocks:
            return
        block = blocks.pop()
        self.alive -= size
        if block.previous and block.previous.is_free:
            self._join(block, block.previous)
            block.previous = block.previous.previous
            if block.previous:
                block.previous.following = block
        if block.following and block.following.is_free:
            self._join(block, block.following)
            block.following = block.following.following
            if block.following:
                block.following.previous = block
        self.idle += block.size if block.is_segment else 0
        self._put(block)

    def _join(self, block: MemoryBlock, neighbour: MemoryBlock) -> None:
        del self._free[bisect.bisect_left(self._free, (neighbour.size, neighbour.number))]
        block.size += neighbour.size

    def _put(self, block: MemoryBlock) -> None:
        block.is_free = True
        block.number = next(self._numbers)
        bisect.insort(self._free, (block.size, block.number, block))


class UnusedBytes(NamedTuple):
    """Bytes that the allocator holds beyond the peak of the live bytes: all, and those it cannot return (needed)."""

    held: int
    needed: int


@functools.lru_cache(maxsize=256)
def unused_bytes(blocks: tuple[int, ...], before: tuple[int, ...] = (), between: tuple[int, ...] = ()) -> UnusedBytes:
    """Return the bytes that the allocator holds beyond the peak after two equal passes.

    Args:
        blocks: bytes that a pass allocates, and (negative) frees, in order.
        before: blocks that are allocated before the first pass, and stay.
        between: blocks that are allocated after the first pass, and stay.
    """
    allocator = CachingAllocator()
    for size in (*before, *blocks, *between, *blocks):
        if size > SMALL_BLOCK_BYTES:
            allocator.take(size)
        elif size < -SMALL_BLOCK_BYTES:
            allocator.release(-size)
    return UnusedBytes(allocator.held - allocator.max_alive, allocator.max_needed - allocator.max_alive)
