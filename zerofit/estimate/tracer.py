"""Traces the memory of one forward and backward pass on the real module with fake tensors, and scales it by layers.

The traced model has two layers in each of its stacks; the second one stands for all that follow. The trace is cut into
segments at the borders of the layers, in the forward and in the backward pass, so the passes of a model of any depth
are composed from the same segments.
"""

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from zerofit.compat import replaced
from zerofit.compat.torch import fake_tensors, run_backward
from zerofit.compat.transformers import multiplying_without_groups
from zerofit.estimate.allocations import AllocationTracker, FusedLayers, ModuleVisits, TraceSegment
from zerofit.estimate.planned_rows import PlannedRows, make_inputs
from zerofit.estimate.traced_steps import (
    CudaCasts,
    FakeCollectives,
    FakeHostStore,
    LinearOfZero3,
    TracedStep,
    extrapolate_steps,
    fused_norm,
    loss_of_chunk,
    repeat_layers,
    rows_split,
    tokens_exchanged,
)
from zerofit.model.recomputation import enable_recomputation, offload_inputs

DEPTH_NAMES = (
    "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers"
).split()
TRACED_LAYERS = 2  # layers of each stack that are traced
MAX_TRACED_CHUNKS = 8
MAX_TRACED_BATCH = 2**20
TRACED_ATTENTION = "plan_sdpa"  # sdpa whose mask does not depend on values, which fake tensors do not have
ATTENTION_DROPOUTS = ("attn_pdrop", "attention_dropout")  # fields of models whose attention runs in a fused kernel


@dataclass(frozen=True)
class TraceSettings:
    """The settings of a trace, except the model's configuration and the batch size."""

    dtype: torch.dtype  # dtype of the weights
    autocast: torch.dtype | None  # if weights stay in fp32 (DDP, one process); None: computed in `dtype`
    on_gpu: bool  # True: with the blocks of a GPU's allocator, and the casts of its autocast
    recomputed: bool | str = False  # or "selective" (zerofit/model/recomputation.py)
    loss: str = "chunked"
    evaluated: bool = False
    cpu_kernels: bool = False  # True: kernels of a CPU on another device, as a simulated accelerator has
    # RMSNorm and the loss of a chunk of logits are one kernel each on a GPU; False: as transformers computes them, for
    # runs of other programs
    own_kernels: bool = True
    tensor: int = 1  # ranks that share each layer; the traced rank has the largest share
    sequence: int = 1  # ranks that split each row
    keeps_inputs: bool = (
        False  # True under ZeRO-3, whose linear layers also keep their input if their weight is frozen
    )
    watched: bool = False  # True: visits to modules are recorded, for ZeRO-3
    offloaded: bool = False  # True: the inputs of recomputed layers are offloaded to host memory
    experts: int = 0  # ranks that divide the experts of a mixture; 0: they are not divided
    compiled: bool = False  # True: layers are compiled
    float8: bool = False  # True: products of layers are in float8

    @property
    def gpu_kernels(self) -> bool:
        return self.on_gpu and not self.cpu_kernels


def reduced_configuration(config: Any) -> Any:
    """Return the configuration of the same model with two layers in each stack."""
    reduced = copy.deepcopy(config)
    for name in DEPTH_NAMES:
        if isinstance(getattr(reduced, name, None), int):
            setattr(reduced, name, min(TRACED_LAYERS, getattr(reduced, name)))
    if isinstance(getattr(reduced, "layer_types", None), list):
        reduced.layer_types = reduced.layer_types[:TRACED_LAYERS]
    return reduced


def outer_lists(model: torch.nn.Module) -> dict[str, int]:
    """Return {name: length} of the lists of modules that are in no other list."""
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}
    return {name: size for name, size in lists.items() if not any(name.startswith(f"{outer}.") for outer in lists)}


class Tracer:
    """Traces passes of one configuration, and keeps the traces.

    Args:
        build: (configuration) -> the model on "meta", with its adapter if it has one, in the dtype of its weights.
        full: the full model, on "meta".
    """

    def __init__(
        self, config: Any, full: Any, build: Callable[[Any], Any], rows: PlannedRows, settings: TraceSettings
    ) -> None:
        self.host_store: FakeHostStore | None = None
        self.config = config
        self.full = full
        self.build = build
        self.settings = settings
        self.rows = rows
        self._segments: dict[int, list[TraceSegment]] = {}
        self._steps: dict[tuple[int, int | None], list[TracedStep]] = {}

    @functools.cached_property
    def mode(self) -> AbstractContextManager[Any]:
        return fake_tensors()

    @functools.cached_property
    def model(self) -> Any:
        """The model with few layers, made of fake tensors. Its attention is registered as TRACED_ATTENTION."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        AttentionInterface.register(TRACED_ATTENTION, sdpa_attention_forward)
        AttentionMaskInterface.register(TRACED_ATTENTION, lambda *args, **kwargs: None)
        config = reduced_configuration(self.config)
        for name in ATTENTION_DROPOUTS if self.settings.gpu_kernels else ():
            if getattr(config, name, 0):  # a GPU's fused kernels keep no mask of dropped weights
                setattr(config, name, 0.0)
        with torch.device("meta"):  # peft moves the layers that it adds, and fake tensors cannot be moved
            model = self.build(config)
        with self.mode:
            _make_fake(model)
        model.train(not self.settings.evaluated)
        if self.settings.recomputed and not self.settings.evaluated:
            drops = self.settings.gpu_kernels and any(getattr(self.config, name, 0) for name in ATTENTION_DROPOUTS)
            enable_recomputation(model, self.settings.recomputed, keeps_attention=not drops)
            if self.settings.offloaded:
                self.host_store = FakeHostStore()
                offload_inputs(model, self.host_store.saved)
        return model

    @functools.cached_property
    def visits(self) -> ModuleVisits:
        return ModuleVisits(self.model)

    @functools.cached_property
    def stacks(self) -> dict[str, int]:
        """{name of a stack of layers: number of its layers in the full model}."""
        full = outer_lists(self.full)
        traced = {name: size for name, size in outer_lists(self.model).items() if 0 < size <= TRACED_LAYERS}
        return {name: full[name] for name, size in traced.items() if full.get(name, 0) >= size}

    def steps(self, batch_size: int, layers: int | None = None) -> list[TracedStep]:
        """Return the steps of the full model's passes on `batch_size` rows. `layers`: number of layers in each stack;
        None: those of the full model."""
        key = batch_size, layers
        if key not in self._steps:
            largest = self.largest_traced
            if batch_size > largest:
                half = largest // 2
                self._steps[key] = extrapolate_steps(
                    self.steps(half, layers), half, self.steps(largest, layers), largest, batch_size
                )
            else:
                stacks = self.stacks if layers is None else dict.fromkeys(self.stacks, layers)
                if batch_size not in self._segments:
                    self._segments[batch_size] = self.trace(batch_size)
                self._steps[key] = repeat_layers(self._segments[batch_size], stacks)
        return self._steps[key]

    @property
    def traced_sizes(self) -> list[int]:
        """The batch sizes that have been traced."""
        return sorted({size for size, _ in self._steps if size <= self.largest_traced})

    @functools.cached_property
    def largest_traced(self) -> int:
        """The largest batch that is traced. A loss in chunks is a loop: beyond a few chunks, memory and time grow in
        proportion to the batch."""
        from zerofit.model.chunked_loss import chunk_rows, compiled_rows

        head = self.model.get_output_embeddings() if self.rows.task != "cls" else None
        if head is None or self.settings.loss != "chunked":
            return MAX_TRACED_BATCH
        rows = chunk_rows(head.weight.shape[0], self.settings.gpu_kernels)
        if self.settings.gpu_kernels:
            rows = max(rows, compiled_rows(head.weight.shape[0]))
        predicted = self.rows.per_sample * (self.rows.target_length or self.rows.length)
        return max(4, MAX_TRACED_CHUNKS * rows * self.settings.sequence // predicted)

    def trace(self, batch_size: int) -> list[TraceSegment]:
        """Return the segments of a pass of the model with two layers."""
        on_gpu = self.settings.on_gpu
        uses = Counter(parameter for _, parameter in self.model.named_parameters(remove_duplicate=False))
        tracker = AllocationTracker(
            512 if on_gpu else 1,
            thin_masks=on_gpu,
            tied=frozenset(parameter.shape for parameter, count in uses.items() if count > 1),
            is_float8=self.settings.float8,
        )
        with self._run_conditions(tracker), contextlib.ExitStack() as hooks:
            inputs = make_inputs(self.model.config, self.rows, batch_size, self.settings.sequence > 1)
            tracker.exclude([*self.model.parameters(), *self.model.buffers()])
            tracker.include(tensor for tensor in inputs.values() if isinstance(tensor, torch.Tensor))
            if self.settings.watched:
                self.visits.begin(tracker.visit)
            borders = LayerBorders(tracker)
            fused = FusedLayers(tracker)
            fuses = self.settings.compiled and not self.settings.recomputed  # which decides by itself what is kept
            for name in self.stacks:
                for index, layer in enumerate(self.model.get_submodule(name)):
                    # Tensors that a layer drops at its end belong to its segment: that hook is registered first.
                    for handle in [*(fused.watch(layer) if fuses else ()), *borders.watch(name, index, layer)]:
                        hooks.callback(handle.remove)
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    completed = functools.partial(tracker.gradient_completed, name)
                    hooks.callback(parameter.register_post_accumulate_grad_hook(completed).remove)
            if self.host_store:
                self.host_store.offloaded = tracker.offloaded
            with tracker, torch.set_grad_enabled(not self.settings.evaluated):
                tracker.mark(("before",))
                dtype = self.settings.autocast
                with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
                    loss = self.rows.loss(self.model, inputs)
                inputs.clear()
                if not self.settings.evaluated:
                    borders.backward = True
                    tracker.mark(("backward of after",))
                    run_backward(loss * 1.0)
                del loss
        return tracker.close()

    @contextlib.contextmanager
    def _run_conditions(self, tracker: AllocationTracker) -> Iterator[None]:
        """Return the context of a trace: fake tensors, and collectives that exchange nothing; for a GPU also its
        RMSNorm kernel, its products in the loss, and the casts of its autocast. Experts are multiplied by an operator
        of transformers that supports fake tensors of every dtype: only the total number of tokens matters."""
        from zerofit.model import chunked_loss, compilation

        settings = self.settings
        can_add = traces_half_sums()  # called before the trace, which must not contain its operations
        contexts: list[AbstractContextManager[Any]] = [
            replaced(chunked_loss, "chunk_starts", tracker.some_chunks),
            replaced(chunked_loss, "has_half_matmul", lambda device: settings.gpu_kernels),
            replaced(chunked_loss, "adds_half_products", lambda device: can_add),
            FakeCollectives(tracker.note, settings.tensor * settings.sequence).in_place(),
            rows_split(self.model, settings.sequence),
            tokens_exchanged(settings.experts, tracker.note),
            multiplying_without_groups(),
        ]
        if settings.keeps_inputs:
            contexts.append(LinearOfZero3())
        if settings.gpu_kernels and settings.own_kernels:
            contexts.append(replaced(chunked_loss, "compiled_chunk", lambda device: loss_of_chunk))
            contexts += [replaced(compilation, "rms_norm", fused_norm), replaced(compilation, "NORM_DEVICES", {"cpu"})]
        contexts.append(self.mode)
        if settings.on_gpu and settings.autocast:
            contexts.append(CudaCasts())
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            yield


class LayerBorders:
    """Marks the borders of layers in a tracker, in the forward and in the backward pass."""

    def __init__(self, tracker: AllocationTracker):
        self.tracker = tracker
        self.backward = False

    def watch(self, stack: str, index: int, layer: torch.nn.Module) -> list[Any]:
        """Register the hooks on a layer. Returns their handles, which the caller removes."""

        def entered(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if self.backward:  # the layer is recomputed
                return
            first = _first_tensor((*args, *kwargs.values()))
            if index == 0 and first is not None and first.requires_grad:
                first.register_hook(lambda gradient: self.tracker.mark(("backward of before", stack)))
            self.tracker.mark(("layer", stack, index))

        def left(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if self.backward:
                return
            first = _first_tensor(output if isinstance(output, tuple) else (output,))
            if first is not None and first.requires_grad:
                first.register_hook(lambda gradient: self.tracker.mark(("backward of layer", stack, index)))
            self.tracker.mark(("after", stack))

        return [
            layer.register_forward_pre_hook(entered, with_kwargs=True, prepend=True),
            layer.register_forward_hook(left, with_kwargs=True),
        ]


@functools.cache
def traces_half_sums() -> bool:
    """Return True if torch can trace half-precision products that are added to an fp32 matrix: 2.11 cannot."""
    with fake_tensors():
        total = torch.ones(8, 8)
        half = torch.ones(8, 8, dtype=torch.bfloat16)
        try:
            torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
        except TypeError:
            return False
    return True


def _make_fake(model: torch.nn.Module) -> None:
    """Turn parameters and buffers on "meta" into fake tensors on the CPU; call it inside a fake tensor mode. Tied
    parameters stay tied."""
    fakes: dict[int, Any] = {}
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]:
            if id(tensor) not in fakes:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                fakes[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                if hasattr(tensor, "gradient_hook"):
                    fakes[id(tensor)].register_hook(tensor.gradient_hook)
            setattr(module, name, fakes[id(tensor)])


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    return next((value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()), None)
