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
    """Return a context in which tensors have shapes, dtypes and storages, and no memory; it can be entered again.
    torch's public `torch.device("meta")` computes without memory too, but tells no CPU from a GPU. Without it:
    `zerofit plan` cannot trace a step."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def number_of_tensors(storage: torch.UntypedStorage) -> int:
    """Return how many tensors hold this storage. torch.multiprocessing.reductions.StorageWeakRef tells only whether
    any does. Without it: a trace could not tell what a module keeps from what it hands on."""
    handle: Any = storage
    return torch._C._storage_Use_Count(handle._cdata)


def run_backward(loss: torch.Tensor) -> None:
    """loss.backward(), with modes of functions of torch in force: layers are recomputed in it. torch.autograd.backward
    is such a function itself, and a mode is not in force within what it meets. Without it: `zerofit plan` cannot trace
    recomputed layers under ZeRO-3 or autocast."""
    engine: Any = import_module("torch.autograd.graph")
    engine._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@contextlib.contextmanager
def computed_as_linear(layers: Iterable[torch.nn.Linear]) -> Iterator[None]:
    """Within this context subclasses of torch.nn.Linear compute as it does. torchao's layers in float8 cannot be told
    to, and FSDP2 holds on to the modules that it has sharded, so others cannot take their places. Without it: one
    scale for all rows of a batch makes the check of packed documents find a leak where there is none."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced(layer, "forward", functools.partial(torch.nn.Linear.forward, layer)))
        yield


def leave_scaling_to_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's GradScaler itself divide the gradients of fp16 by the loss scale, and leave a step out. A fused
    optimizer says that its step does both, and so does what is made from it. Without it: in fp16 the matrices of Muon
    would step by gradients that are too large by the loss scale."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def norms_of(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the 2-norm of each tensor in this dtype, by one kernel for many of them. torch.nn.utils.get_total_norm
    takes no dtype: of bf16 it rounds to bf16. Without it: a kernel for each gradient, or norms that are rounded."""
    return list(torch._foreach_norm(tensors, 2, dtype))


def argument_names(operator: Any) -> list[tuple[str, Any]]:
    """Return (name, default value) of each argument of an operator, as `__torch_dispatch__` meets it. Nothing public
    tells an operator's signature. Without it: recomputation cannot tell attention that draws random numbers from
    attention that does not."""
    return [(argument.name, argument.default_value) for argument in operator._schema.arguments]


def flight_record() -> dict[str, Any]:
    """Return what torch's flight recorder has of this rank: its collectives, in `entries`, and its groups. torch's own
    watchdog writes it (TORCH_FR_DUMP_TEMP_FILE) for NCCL alone, and only when a collective has waited for the timeout.
    gloo's record names no groups. Without it: a run that hangs is ended, and not told which collective waits for which
    rank."""
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
    """Within this context a process group that is made without a timeout has this one. DeepSpeed's groups and those of
    a device mesh are made without, and NCCL's is 10 minutes then. Without it: a rank that waits longer for another, as
    for data that it prepares, ends the run."""
    with (
        replaced(distributed_c10d, "default_pg_timeout", timeout),
        replaced(distributed_c10d, "default_pg_nccl_timeout", timeout),
    ):
        yield


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process. torch.compiler does not report it afterwards.
    Without it: a run's last lines do not say whether blocks were compiled again and again."""
    return int(import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"])


def compute_uncompiled_after_errors(is_on: bool) -> None:
    """Let code that torch.compile fails at run as it is, with torch's warning; off: the error ends the run.
    torch.compiler has no setting for it. Without it: a compiler that fails under `--torch_compile auto`, which nobody
    has asked for, ends the run."""
    import_module("torch._dynamo").config.suppress_errors = is_on


class Ring:
    """Attention over rows of which each rank has two pieces, without dropout: ranks pass keys and values on. torch's
    public `context_parallel` knows no kernel of the CPU, and replaces F.scaled_dot_product_attention for the whole
    process; so the functions below it are called, with the kernels of a CPU and of a GPU. Without it: no sequence
    parallelism over more ranks than can share the heads.

    Shapes: query (B, H, T / ranks, D), key and value alike (repeated where heads share one).
    """

    MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
    SEQUENCE = 2  # the dimension of (B, H, T, D)

    def __init__(self) -> None:
        self.module = import_module(self.MODULE)
        self.module.set_rotate_method("alltoall")  # not all keys and values at once

    def forward(self, group: Any, attend: Callable[..., Any], *tensors: torch.Tensor, scale: float | None) -> Any:
        """Return (output, log of the sums of a row's weights, what a GPU's kernel hands to its backward pass)."""
        return self.module._templated_ring_attention(
            group, self.SEQUENCE, attend, *tensors, is_causal=True, scale=scale
        )

    def backward(self, group: Any, attend: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> Any:
        """Return the gradients of query, key and value; tensors: the output's gradient, query, key, value, output,
        sums."""
        gradient, *others = tensors
        return self.module._templated_ring_attention_backward(
            group, self.SEQUENCE, attend, gradient, "grad_out", *others, is_causal=True, **options
        )

    @classmethod
    @contextlib.contextmanager
    def communicating_with(cls, stand_in: Any) -> Iterator[None]:
        """Within this context ranks exchange through another module of collectives: `zerofit plan` has one process."""
        module = import_module(cls.MODULE)
        with replaced(module, "dist", stand_in), replaced(module, "ft_c", stand_in):
            yield

    @staticmethod
    def kernels(device: torch.device) -> tuple[Any, Any]:
        """Return (forward, backward) of fused attention on a device."""
        aten = torch.ops.aten
        if device.type == "cuda":
            return aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward
        return (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
        )


class AskingAgent(LocalElasticAgent):
    """torchrun's agent, which asks whether it starts the processes again. torchrun counts each machine's own restarts,
    lets an agent end others only by a timeout, and has no option for another agent. Without it: `zerofit launch`
    restarts whatever has failed, and a finished machine waits for one that is gone."""

    waits_for_others = True  # this agent, whose processes have finished, waits for those of other machines

    @classmethod
    @contextmanager
    def launching(cls, rendezvous: type) -> Iterator[None]:
        """Within this context torchrun, and so `accelerate launch`, makes this agent, and such a static rendezvous."""
        with replaced(api, "LocalElasticAgent", cls), replaced(statics, "StaticTCPRendezvous", rendezvous):
            yield

    def restarts_left(self, allowed: int) -> int:
        """Return how many restarts are left, as processes start. allowed: --max_restarts."""
        raise NotImplementedError

    def starts_again(self, failures: dict[int, Any], allowed: int) -> bool:
        """Return whether the processes are started again. failures: {rank: torch's ProcessFailure}."""
        raise NotImplementedError

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._remaining_restarts = int(self.starts_again(result.failures, worker_group.spec.max_restarts))
        return result

    def _start_workers(self, worker_group: Any) -> Any:
        self._remaining_restarts = self.restarts_left(worker_group.spec.max_restarts)  # which the processes read
        return super()._start_workers(worker_group)

    def _exit_barrier(self) -> None:
        if self.waits_for_others:
            super()._exit_barrier()
