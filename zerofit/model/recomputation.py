"""Which activations the backward pass computes again: of each layer, or all but those that take long to compute.

transformers runs its layers through torch.utils.checkpoint (modeling_layers.py, GradientCheckpointingLayer), which
draws random numbers again as they were drawn, so the gradients are the same to the last bit. Not those of T5 and mT5:
all layers use one table of relative positions, and its gradient is summed in another order.

torch's own contexts of selective recomputation are dispatch modes: each operator of a layer passes through Python, in
the forward pass and in the recomputation. Here only those operators do whose results are kept: a kernel below autograd
(BackendSelect, which every call passes, and where these operators have no kernel) notes their results in the forward
pass of a layer and gives them back, in the same order, in its recomputation. Autograd records both passes as ever.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zerofit.model.stages import whole_model
from zerofit.recipe.errors import UserError
from zerofit.recipe.fields import Recomputation

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)  # of linear layers


def enable_recomputation(
    model: torch.nn.Module,
    which: Recomputation | bool | str,
    is_traced: bool = False,
    keeps_attention: bool = True,
) -> None:
    """Recompute activations of the model's layers; in a frozen model gradients enter the first layer, too.

    Args:
        which: the value of gradient_checkpointing. True: each layer; "selective": of each layer all but linear
            layers' products and fused attention.
        is_traced: by fake tensors or torch.compile, which see torch's own contexts of "selective" alone.
        keeps_attention: of "selective", traced; if not, attention is recomputed too.

    Raises:
        UserError: the model's code cannot do this.
    """
    check_recomputation(whole_model(model), which)
    if which is True:
        model.activation_checkpointing_enable()
    else:
        for operator in () if is_traced else (*PRODUCTS, *attention_operators()):
            keep_results(operator, _keeps)
        contexts = functools.partial(selective_contexts, keeps_attention) if is_traced else keeping_contexts
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


def check_recomputation(model: torch.nn.Module, which: bool | str) -> None:
    """Raises UserError where a model (not a stage of it) cannot recompute what gradient_checkpointing says."""
    name, option = f"a {model.config.model_type} ({type(model).__name__})", "gradient_checkpointing"
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{option}: {name} cannot compute blocks again. Remove it, or use a smaller batch")
    if which is not True and not has_layers(model):
        raise UserError(f"{option} = {which}: {name} computes all blocks again, or none. Use --{option} full")


def has_layers(model: torch.nn.Module) -> bool:
    """Whether there are layers that transformers recomputes one at a time."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())


def selective_contexts(keeps_attention: bool = True) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """(context of the forward pass, of the recomputation) for torch.utils.checkpoint: dispatch modes."""
    noting, replaying = create_selective_checkpoint_contexts(functools.partial(_policy, keeps_attention))
    return noting, Replayed(replaying)


class Replayed(TorchDispatchMode):
    """torch's context of the recomputation, asked about matrix products and attention only: it refuses a pass that has
    other operators than the forward pass, and ZeRO-3 fetches weights otherwise each time."""

    def __init__(self, replaying: TorchDispatchMode):
        super().__init__()
        self.replaying = replaying

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in PRODUCTS or _is_attention(operator):
            return self.replaying.__torch_dispatch__(operator, types, args, kwargs)
        return operator(*args, **(kwargs or {}))


def _policy(keeps_attention: bool, context: Any, operator: Any, *args, **kwargs) -> CheckpointPolicy:
    is_kept = operator in PRODUCTS or (keeps_attention and _is_attention(operator))
    is_kept = is_kept and _keeps(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps(operator: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the result of a product or of attention is kept. Attention that drops weights is not: what is not
    computed again draws no random numbers, and those that follow would be others."""
    return operator in PRODUCTS or not _drops(operator, args, kwargs)


def attention_operators() -> list[Any]:
    """The fused kernels of attention that are loaded, and some operators that no forward pass has."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        is_composed = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if ("attention" in name or "attn" in name) and not is_composed:
            space, _, operator = name.partition("::")
            operator, _, overload = operator.partition(".")
            found.append(getattr(getattr(getattr(torch.ops, space), operator), overload or "default"))
    return found


@functools.cache
def _is_attention(operator: Any) -> bool:
    """Whether it is a fused kernel of attention: torch's, or one of a package (flash_attn, a hub's kernel)."""
    return "attention" in operator.name() or "attn" in operator.name()


def _drops(operator: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operator has a probability of dropout above 0."""
    for place, argument in enumerate(operator._schema.arguments):
        value = kwargs.get(argument.name, args[place] if place < len(args) else argument.default_value)
        if "dropout" in argument.name and isinstance(value, (int, float)) and value > 0:
            return True
    return False


BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


class _Thread(threading.local):
    """The context that this thread is in: autograd recomputes in threads of its own."""

    context: "_Context | None" = None


THREAD, LIBRARIES = _Thread(), {}


class _Context:
    """The context of a layer's forward pass, or of its recomputation.

    Args:
        results: of both contexts, in the order of the calls: (operator, its result, or None where it is recomputed).
    """

    def __init__(self, results: deque):
        self.results = results

    def __enter__(self) -> None:
        self.before, THREAD.context = THREAD.context, self

    def __exit__(self, *error) -> None:
        THREAD.context = self.before


class Noting(_Context):
    def result(self, operator: OpOverload, compute: Callable[[], Any]) -> Any:
        THREAD.context = None  # one kernel of attention may call another
        try:
            result = compute()
        finally:
            THREAD.context = self
        self.results.append((operator, _held(result)))
        return result

    def changed(self, tensor: torch.Tensor) -> None:
        """Do not keep the result that this tensor lies in: torch adds biases and masks in place, through views that
        have a version of their own."""
        place = tensor.untyped_storage().data_ptr()
        for index, (operator, held) in enumerate(self.results):
            if isinstance(held, _Held) and held.tensor.untyped_storage().data_ptr() == place:
                self.results[index] = operator, None


class Replaying(_Context):
    def result(self, operator: OpOverload, compute: Callable[[], Any]) -> Any:
        noted, held = self.results.popleft() if self.results else (None, None)
        if noted is not operator:
            raise RuntimeError(f"the recomputation of a layer has {operator} where its forward pass had {noted}")
        return compute() if held is None else _given(held)

    def changed(self, tensor: torch.Tensor) -> None:
        """It was recomputed."""


class _Held:
    """A result, which has to be the same when it is given back."""

    def __init__(self, result: torch.Tensor):
        # With this key detach shares the counter of changes in place, as it does above autograd.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self.tensor = result.detach()
        self.version = self.tensor._version

    def given(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("a result that selective recomputation keeps was changed in place")
        return self.tensor


def _held(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_held, result))
    return _Held(result) if isinstance(result, torch.Tensor) else result


def _given(held: Any) -> Any:
    if isinstance(held, tuple):
        return tuple(map(_given, held))
    return held.given() if isinstance(held, _Held) else held


def keeping_contexts() -> tuple[Noting, Replaying]:
    """(context of the forward pass, of the recomputation) of a layer, for torch.utils.checkpoint."""
    results = deque()
    return Noting(results), Replaying(results)


@functools.cache
def keep_results(operator: OpOverload, is_kept: Callable[..., bool]) -> None:
    """Let the contexts keep the results of this operator, from now on in this process.

    Args:
        is_kept: (operator, args, kwargs) -> whether the result of this call is.
    """

    def kernel(keyset, *args, **kwargs):
        context = THREAD.context
        if context is None or not is_kept(operator, args, kwargs):
            return operator.redispatch(keyset & BELOW, *args, **kwargs)
        return context.result(operator, lambda: operator.redispatch(keyset & BELOW, *args, **kwargs))

    _register(operator, kernel)
    _watch_additions()


@functools.cache
def _watch_additions() -> None:
    operator = aten.add_.Tensor

    def kernel(keyset, tensor, other, **kwargs):
        if THREAD.context is not None:
            THREAD.context.changed(tensor)
        other = other if isinstance(other, torch.Tensor) else torch.tensor(other)  # a number comes as one of Python's
        return operator.redispatch(keyset & BELOW, tensor, other, **kwargs)

    _register(operator, kernel)


def _register(operator: OpOverload, kernel: Callable) -> None:
    space = operator.namespace
    library = LIBRARIES.setdefault(space, torch.library.Library(space, "IMPL"))
    library.impl(operator, kernel, "BackendSelect", with_keyset=True)
