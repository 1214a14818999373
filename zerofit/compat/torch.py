"""Private parts of torch. Tried with torch 2.13 (2.11 has what Ring calls in another module), torchao 0.18, and
accelerate 1.15 (torchrun's agent)."""

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as statics
from torch.distributed.launcher import api
from torch.utils._python_dispatch import TorchDispatchMode

from zerofit.compat import replaced


class DispatchMode(TorchDispatchMode):
    """A context in which `__torch_dispatch__` intercepts each operation on tensors. torch documents the protocol
    (`__torch_dispatch__`) and not the class. Without it: no trace of a step's memory, and no recomputed products."""


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a context in which tensors have shapes, dtypes and storages, but no memory; it can be entered repeatedly.
    The public `torch.device("meta")` needs no memory either, but does not distinguish CPU and GPU. Without it:
    `zerofit plan` cannot trace a step."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def number_of_tensors(storage: torch.UntypedStorage) -> int:
    """Return how many tensors share this storage. torch.multiprocessing.reductions.StorageWeakRef tells only whether
    any does. Without it: a trace could not tell what a module keeps from what it passes on."""
    handle: Any = storage
    return torch._C._storage_Use_Count(handle._cdata)


def run_backward(loss: torch.Tensor) -> None:
    """Run loss.backward() with torch function modes active, also in layers that are recomputed.
    torch.autograd.backward is such a function itself, and torch disables a mode within the functions that it
    intercepts. Without it: `zerofit plan` cannot trace recomputed layers under ZeRO-3 or autocast."""
    engine: Any = import_module("torch.autograd.graph")
    engine._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@contextlib.contextmanager
def computed_as_linear(layers: Iterable[torch.nn.Linear]) -> Iterator[None]:
    """Within this context subclasses of torch.nn.Linear compute as it does. torchao's float8 layers have no switch for
    that, and FSDP2 keeps references to the modules that it has sharded, so these cannot be replaced. Without it: one
    scale for all rows of a batch makes the check of packed documents find a leak where there is none."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced(layer, "forward", functools.partial(torch.nn.Linear.forward, layer)))
        yield


def leave_scaling_to_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's GradScaler divide fp16 gradients by the loss scale, and skip steps. A fused optimizer declares that
    its own step does both, and its subclasses inherit that. Without it: in fp16 Muon's matrices would be updated with
    gradients that are multiplied by the loss scale."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def norms_of(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the 2-norm of each tensor in this dtype, with one kernel for many tensors. torch.nn.utils.get_total_norm
    has no dtype, and rounds norms of bf16 to bf16. Without it: one kernel for each gradient, or rounded norms."""
    return list(torch._foreach_norm(tensors, 2, dtype))


def argument_names(operator: Any) -> list[tuple[str, Any]]:
    """Return (name, default value) of each argument of an operator that `__torch_dispatch__` gets. No public function
    returns its signature. Without it: recomputation cannot tell attention that draws random numbers from
    attention that does not."""
    return [(argument.name, argument.default_value) for argument in operator._schema.arguments]


def flight_record() -> dict[str, Any]:
    """Return the record of torch's flight recorder for this rank: its collectives (`entries`) and its groups. torch's
    watchdog writes it (TORCH_FR_DUMP_TEMP_FILE) for NCCL only, and only after a collective has timed out. gloo's
    record has no groups, so they are added here. Without it: a hanging run ends without a message which collective
    waits for which rank."""
    c10d: Any = import_module("torch._C._distributed_c10d")
    of_nccl = distributed_c10d.is_initialized() and distributed_c10d.get_backend() == "nccl"
    dump = c10d._dump_nccl_trace if of_nccl else c10d._dump_fr_trace
    record = pickle.loads(dump(includeStackTraces=False))  # stacks would import torch._inductor first: seconds
    world = distributed_c10d._world
    for group, ranks in world.pg_group_ranks.items():
        name = world.pg_names[group]
        members = sorted(ranks)
        record["pg_config"].setdefault(name, {"name": name, "desc": group.group_desc, "ranks": str(members)})
    record["pg_config"].pop("", None)
    return record


@contextlib.contextmanager
def group_timeout(timeout: timedelta) -> Iterator[None]:
    """Within this context new process groups have this timeout by default. DeepSpeed and device meshes create groups
    without a timeout, which is 10 minutes then for NCCL. Without it: a rank that waits longer for another one, such as
    for data that it prepares, ends the run."""
    with (
        replaced(distributed_c10d, "default_pg_timeout", timeout),
        replaced(distributed_c10d, "default_pg_nccl_timeout", timeout),
    ):
        yield


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process. torch.compiler does not report the number.
    Without it: a run's last lines do not show whether blocks were recompiled many times."""
    return int(import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"])


def compute_uncompiled_after_errors(is_on: bool) -> None:
    """If `is_on`, run code uncompiled, with torch's warning, where torch.compile fails; else its error ends the run.
    torch.compiler has no setting for it. Without it: with `--torch_compile auto` an error of the compiler, which the
    user has not asked for, ends the run."""
    import_module("torch._dynamo").config.suppress_errors = is_on


class Ring:
    """Ring attention, without dropout: each rank has two pieces of every row, and ranks pass keys and values on.
    torch's public `context_parallel` does not support the CPU's kernel, and replaces F.scaled_dot_product_attention in
    the whole process; so its inner functions are called here, with the kernels of a CPU and of a GPU. Without it: no
    sequence parallelism over more ranks than can share the heads.

    Shapes: query, key and value (B, H, T / ranks, D), with shared key/value heads repeated.
    """

    MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
    SEQUENCE = 2  # the dimension of (B, H, T, D)

    def __init__(self) -> None:
        self.module = import_module(self.MODULE)
        self.module.set_rotate_method("alltoall")  # the other method gathers all keys and values at once

    def forward(self, group: Any, attend: Callable[..., Any], *tensors: torch.Tensor, scale: float | None) -> Any:
        """Return (output, log-sum-exp of the scores, and on a GPU further inputs of the kernel's backward pass)."""
        return self.module._templated_ring_attention(
            group, self.SEQUENCE, attend, *tensors, is_causal=True, scale=scale
        )

    def backward(self, group: Any, attend: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> Any:
        """Return the gradients of query, key and value; tensors: the output's gradient, query, key, value, output,
        sums."""
        gradient, *saved = tensors
        return self.module._templated_ring_attention_backward(
            group, self.SEQUENCE, attend, gradient, "grad_out", *saved, is_causal=True, **options
        )

    @classmethod
    @contextlib.contextmanager
    def communicating_with(cls, stand_in: Any) -> Iterator[None]:
        """Within this context the ring takes its collectives from `stand_in`: `zerofit plan` has one process."""
        module = import_module(cls.MODULE)
        with replaced(module, "dist", stand_in), replaced(module, "ft_c", stand_in):
            yield

    @staticmethod
    def kernels(device: torch.device) -> tuple[Any, Any]:
        """Return the forward and backward operators of fused attention on a device."""
        aten = torch.ops.aten
        if device.type == "cuda":
            return aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward
        return (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
        )


class AskingAgent(LocalElasticAgent):
    """torchrun's agent with decisions of our own about restarts. torchrun counts restarts separately on each machine,
    ends other machines' agents only by a timeout, and has no option for another agent. Without it: `zerofit launch`
    restarts after every failure, and a finished machine waits for one that is gone."""

    waits_for_others = True  # once its processes have finished, the agent waits for those of other machines

    @classmethod
    @contextmanager
    def launching(cls, rendezvous: type) -> Iterator[None]:
        """Within this context torchrun, and so `accelerate launch`, uses this agent and this static rendezvous."""
        with replaced(api, "LocalElasticAgent", cls), replaced(statics, "StaticTCPRendezvous", rendezvous):
            yield

    def restarts_left(self, allowed: int) -> int:
        """Return how many restarts are left when processes start. allowed: --max_restarts."""
        raise NotImplementedError

    def starts_again(self, failures: dict[int, Any], allowed: int) -> bool:
        """Return whether to restart the processes. failures: {rank: torch's ProcessFailure}."""
        raise NotImplementedError

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._remaining_restarts = int(self.starts_again(result.failures, worker_group.spec.max_restarts))
        return result

    def _start_workers(self, worker_group: Any) -> Any:
        self._remaining_restarts = self.restarts_left(worker_group.spec.max_restarts)  # the processes read it
        return super()._start_workers(worker_group)

    def _exit_barrier(self) -> None:
        if self.waits_for_others:
            super()._exit_barrier()
