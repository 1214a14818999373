"""Private parts of DeepSpeed. Tried with DeepSpeed 0.19.8 and accelerate 1.15."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch

from zerofit.compat import replaced


def with_groups(groups: Any) -> contextlib.AbstractContextManager[None]:
    """Within this context a PipelineModule uses these process groups. Its constructor has no argument for them, and
    creates groups without tensor parallelism. Without it: no 3D parallelism."""
    module = import_module("deepspeed.runtime.pipe.module")
    return replaced(module, "PipelineParallelGrid", lambda **_: groups)


def initializing_with(groups: Any) -> contextlib.AbstractContextManager[None]:
    """Within this context `deepspeed.initialize` gets these process groups as its argument `mpu`, which accelerate
    does not pass (accelerator.py, _prepare_deepspeed). Without it: DeepSpeed takes every rank for a replica, and
    tensor and sequence parallelism sum gradients over the wrong ranks."""
    deepspeed = import_module("deepspeed")
    return replaced(deepspeed, "initialize", functools.partial(deepspeed.initialize, mpu=groups))


class SplitStep:
    """The step of a ZeRO optimizer in two parts: first the norm of the gradients, then the update, which can be
    skipped. DeepSpeed computes the norm within `step`, and engine.get_global_grad_norm returns it only afterwards, too
    late to refuse an update (`--on_anomaly skip`). ZeRO's optimizers skip an update, and drop the gradients, where
    `_update_scale` reports an overflow. ZeRO-1 with a data_types.grad_accum_dtype other than bf16 has BF16_Optimizer,
    which skips where `is_invalid_grad_norm`. These are replaced only while a step runs; the step reuses the norm.
    Without it: after a bad update a run could stop or rewind, but not skip it.

    Args:
        is_sharded: whether it is the optimizer of ZeRO-3.
        faster: called with the optimizer's `get_grad_norm_direct`, which returns the norm of (gradients, their
            parameters) over all ranks; returns a faster function, which `norm` uses in its place.
    """

    def __init__(self, optimizer: Any, is_sharded: bool, faster: Callable[[Any], Any]):
        self.optimizer = optimizer
        self.faster = faster
        self.taken = None
        self.is_bf16 = not hasattr(optimizer, "_update_scale")
        self.name = "_get_norm_groups" if is_sharded else "scaled_global_norm"

    @staticmethod
    def is_padding(gradient: torch.Tensor) -> bool:
        """Return whether ZeRO-1 or ZeRO-2 uses this gradient only to pad a partition; it belongs to no parameter."""
        return getattr(gradient, "_zero_padding", False)

    def norm(self) -> float:
        """Return the norm of the gradients, divided by the loss scale; nan where they are not finite."""
        utils = import_module("deepspeed.runtime.utils")
        optimizer = self.optimizer
        if self.is_bf16:
            tensors, _ = optimizer.get_grads_for_norm()
            norm = utils.get_global_norm_of_tensors(
                input_tensors=tensors, mpu=optimizer.mpu, norm_type=optimizer.norm_type
            )
            return float(norm) if norm >= 0 else math.nan  # DeepSpeed returns -1 for inf and nan
        with replaced(optimizer, "get_grad_norm_direct", self.faster(optimizer.get_grad_norm_direct)):
            self.taken = getattr(optimizer, self.name)()
        norms = self.taken if isinstance(self.taken, list) else [self.taken]
        return float(utils.combine_grad_norm_groups(norms)) / optimizer.loss_scale

    def run(self, step: Callable[[], None], discards: bool) -> None:
        """Call the engine's step. `discards`: skip the update, drop the gradients and keep the loss scale."""
        optimizer = self.optimizer
        with contextlib.ExitStack() as replacements:
            if self.is_bf16:
                module = import_module("deepspeed.runtime.bf16_optimizer")
                if discards:
                    replacements.enter_context(replaced(module, "is_invalid_grad_norm", lambda norm: True))
            else:
                replacements.enter_context(replaced(optimizer, self.name, lambda *args, **kwargs: self.taken))
                if discards:
                    overflow = functools.partial(setattr, optimizer, "overflow", True)
                    replacements.enter_context(replaced(optimizer, "_update_scale", lambda *args: overflow()))
            step()


class Fragment(NamedTuple):
    """The part of a parameter that a rank's optimizer has: elements [start, start + numel) of the flattened parameter.
    It begins at element `offset` of the flat tensor of the optimizer's parameter group number `group`."""

    start: int
    numel: int
    group: int
    offset: int


def fragment_of(parameter: Any) -> Fragment | None:
    """Return this rank's part of a parameter under ZeRO-1 and ZeRO-2; None: it has none. The public functions,
    deepspeed.utils.safe_get_full_fp32_param and safe_get_full_optimizer_state, gather each parameter on every rank: a
    copy of all 148 parameters of a GPT-2 took 87 times as long under ZeRO-1 and 41 times under ZeRO-2 (medians of six
    alternating pairs; two ranks on a shared CPU, gloo, torch 2.13). Without it: no checkpoints under ZeRO-1 and
    ZeRO-2."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    lp = mapping.lp_fragment_address
    hp = mapping.hp_fragment_address
    return Fragment(lp.start, lp.numel, mapping.param_group_index, hp.start)


def step_sub_group(optimizer: Any, number: int) -> None:
    """Step one sub-group of ZeRO-3's optimizer, without gradient norm and loss scale, and without an update of the
    model's weights. Its only public step is that of all sub-groups, which updates the weights. Without it: moments
    could not be initialized before a checkpoint is loaded into them."""
    optimizer._optimizer_step(number)


@contextlib.contextmanager
def swapped_in(optimizer: Any, number: int, written: bool = False) -> Iterator[None]:
    """Within this context a sub-group of ZeRO-3's optimizer, whose state is on a disk, is in memory. The public
    function, deepspeed.utils.safe_get_local_optimizer_state, reads the whole sub-group once for each parameter and
    each moment. Small sub-groups are always in memory. Without it: no checkpoints with `device: nvme`. `written`: the
    caller changes the state, which is then written to the disk."""
    if not optimizer._swappable_optimizer_subgroup(number):
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(number)
    yield
    if written:
        optimizer._optimizer_states_and_gradient_swap_out(number)
    else:
        optimizer._release_swap_buffers(number)


def run_schedule(engine: Any, schedule: Any | None) -> None:
    """Run a schedule on a pipeline's engine; None: only the optimizer's step. The public methods have fixed schedules:
    train_batch steps before the norm is known, eval_batch evaluates as many micro-batches as training accumulates, and
    `step` only raises an error. Without it: no pipeline parallelism."""
    if schedule is None:
        engine._exec_optimizer_step()
        return
    engine.total_loss = None
    engine._compute_loss = True
    engine._exec_schedule(schedule)


def visit_modules(visitor: Any, module: Any) -> None:
    """Register ZeRO-3's hooks on a module and its submodules; they call methods of `visitor` instead of ZeRO-3's
    coordinator. DeepSpeed registers them only when it shards weights, and a planned model has no weights. Without it:
    `zerofit plan` does not know in which order ZeRO-3 fetches weights."""
    offload = import_module("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload
    visitor._register_deepspeed_module = lambda child, count: offload._register_deepspeed_module(visitor, child, count)
    visitor._register_deepspeed_module(module, [0])


def without_shared_memory() -> contextlib.AbstractContextManager[None]:
    """Within this context DeepSpeed's first process group does not compile an all-reduce over shared memory. On a CPU
    it does (comm/torch.py, build_shm_op), for layers of its inference; no option turns that off. Without it: the first
    run on a CPU compiles for some seconds, and needs a compiler."""
    return replaced(import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)


@contextlib.contextmanager
def exchanging_heads_with(stand_in: Any) -> Iterator[None]:
    """Within this context DeepSpeed's exchange of heads between ranks (Ulysses) takes its collectives from `stand_in`.
    A single process has no group of several ranks. Without it: `zerofit plan` cannot trace sequence parallelism."""
    heads, layer = map(import_module, ("deepspeed.runtime.sequence_parallel.ulysses_sp", "deepspeed.sequence.layer"))
    with replaced(heads, "dist", stand_in), replaced(layer, "dist", stand_in):
        yield
