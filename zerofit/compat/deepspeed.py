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
    """Within this context a PipelineModule takes these process groups, and makes none. Its constructor has no argument
    for them, and would make groups that know no tensor parallelism. Without it: no 3D parallelism."""
    module = import_module("deepspeed.runtime.pipe.module")
    return replaced(module, "PipelineParallelGrid", lambda **_: groups)


def initializing_with(groups: Any) -> contextlib.AbstractContextManager[None]:
    """Within this context `deepspeed.initialize` is given these process groups (its argument `mpu`). accelerate calls
    it, without that argument (accelerator.py, _prepare_deepspeed). Without it: DeepSpeed takes all ranks for replicas,
    and tensor and sequence parallelism sum gradients over the wrong ranks."""
    deepspeed = import_module("deepspeed")
    return replaced(deepspeed, "initialize", functools.partial(deepspeed.initialize, mpu=groups))


class SplitStep:
    """The step of a ZeRO optimizer in two parts: the norm of the gradients; then an update, or one that is left out.
    DeepSpeed takes the norm and decides within `step` (engine.get_global_grad_norm comes after it), so that an update
    could not be refused (`--on_anomaly skip`). ZeRO's optimizers decide by what `_update_scale` finds, and drop the
    gradients; BF16_Optimizer, which ZeRO-1 has where data_types.grad_accum_dtype differs from bf16, asks
    `is_invalid_grad_norm`. A norm that was taken is not taken again. All are replaced only while a step runs. Without
    it: after a bad update a run could stop or rewind, and not leave it out.

    Args:
        is_sharded: whether it is the optimizer of ZeRO-3.
        faster: makes of the optimizer's `get_grad_norm_direct`, (gradients, their parameters) -> their norm over all
            ranks, one that takes fewer operations; used while a norm is taken.
    """

    def __init__(self, optimizer: Any, is_sharded: bool, faster: Callable[[Any], Any]):
        self.optimizer = optimizer
        self.faster = faster
        self.taken = None
        self.is_bf16 = not hasattr(optimizer, "_update_scale")
        self.name = "_get_norm_groups" if is_sharded else "scaled_global_norm"

    @staticmethod
    def is_padding(gradient: torch.Tensor) -> bool:
        """Return whether a gradient that ZeRO-1 or ZeRO-2 counts only fills a partition up, and is of no parameter."""
        return getattr(gradient, "_zero_padding", False)

    def norm(self) -> float:
        """Return the norm of the gradients without the loss scale; nan if it is none."""
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
        """Call the engine's step. `discards`: leave out the update, and drop the gradients; the loss scale stays."""
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
    """Elements [start, start + numel) of a flattened parameter, which are those from `offset` on of the tensor of the
    optimizer's group `group`."""

    start: int
    numel: int
    group: int
    offset: int


def fragment_of(parameter: Any) -> Fragment | None:
    """Return what this rank has of a parameter under ZeRO-1 and ZeRO-2; None: nothing. The public way,
    deepspeed.utils.safe_get_full_fp32_param and safe_get_full_optimizer_state, gathers each parameter on every rank:
    to copy all of a GPT-2 with 148 parameters took 87 times as long under ZeRO-1 and 41 times under ZeRO-2 (medians of
    six alternating pairs; two ranks on a CPU that others used as well, gloo, torch 2.13). Without it: no checkpoints
    under ZeRO-1 and ZeRO-2."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    lp = mapping.lp_fragment_address
    hp = mapping.hp_fragment_address
    return Fragment(lp.start, lp.numel, mapping.param_group_index, hp.start)


def step_sub_group(optimizer: Any, number: int) -> None:
    """Let the optimizer of ZeRO-3 step one of its sub-groups, without a norm, a loss scale or new weights. It has no
    public step of its parts, and its whole step moves weights. Without it: moments could not be made before a
    checkpoint is read into them."""
    optimizer._optimizer_step(number)


@contextlib.contextmanager
def swapped_in(optimizer: Any, number: int, written: bool = False) -> Iterator[None]:
    """Within this context a sub-group of ZeRO-3's optimizer, whose state is on a disk, is in memory. The public way,
    deepspeed.utils.safe_get_local_optimizer_state, brings the whole sub-group once for each parameter and each moment.
    Small sub-groups are always in memory. Without it: no checkpoints with `device: nvme`. `written`: the state is
    changed, and goes back to the disk."""
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
    """Let a pipeline's engine carry out a schedule; None: its optimizer's step. Its public train_batch and eval_batch
    have schedules of their own: one steps before the norm is known, the other evaluates as many micro-batches as
    training accumulates; its `step` only raises. Without it: no pipeline."""
    if schedule is None:
        engine._exec_optimizer_step()
        return
    engine.total_loss = None
    engine._compute_loss = True
    engine._exec_schedule(schedule)


def visit_modules(visitor: Any, module: Any) -> None:
    """Put ZeRO-3's hooks on a module and those in it; they call methods of `visitor` in place of its coordinator.
    Publicly they are put on a model as its weights are sharded, and a model that is only planned has none. Without it:
    `zerofit plan` does not know in which order ZeRO-3 fetches weights."""
    offload = import_module("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload
    visitor._register_deepspeed_module = lambda child, count: offload._register_deepspeed_module(visitor, child, count)
    visitor._register_deepspeed_module(module, [0])


def without_shared_memory() -> contextlib.AbstractContextManager[None]:
    """Within this context DeepSpeed's first process group compiles no sum over shared memory. On a CPU it does
    (comm/torch.py, build_shm_op), for layers that its inference has; no option turns that off. Without it: the first
    run on a CPU compiles for some seconds, and needs a compiler."""
    return replaced(import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)


@contextlib.contextmanager
def exchanging_heads_with(stand_in: Any) -> Iterator[None]:
    """Within this context DeepSpeed's exchange of heads between ranks (Ulysses) calls another module of collectives.
    One process has no group of several ranks. Without it: `zerofit plan` cannot trace sequence parallelism."""
    heads, layer = map(import_module, ("deepspeed.runtime.sequence_parallel.ulysses_sp", "deepspeed.sequence.layer"))
    with replaced(heads, "dist", stand_in), replaced(layer, "dist", stand_in):
        yield
