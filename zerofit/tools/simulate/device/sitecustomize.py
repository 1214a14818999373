"""With this folder on PYTHONPATH and SIMGPU_LIBRARY set, every Python that imports torch has the simulated device.

accelerate and DeepSpeed are changed as they are imported. accelerate takes a device type that it does not know from
ACCELERATE_TORCH_DEVICE; several processes have to be a MULTI_GPU job for it, over gloo.
"""

import importlib.machinery
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


class AfterImport:
    """A finder that calls `changes[name](module)` as soon as a module of that name has been imported."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]):
        self.changes = changes

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module
        change = self.changes[fullname]

        def exec_module(module: ModuleType) -> None:
            run(module)
            change(module)

        loader.exec_module = exec_module
        return spec


def register(torch: ModuleType) -> None:
    import simgpu

    rank = int(os.environ.get("LOCAL_RANK", "0")) % simgpu.device_count()  # processes may share devices
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{simgpu.NAME}:{rank}"
    simgpu.set_device(rank)


def tell_accelerate(state: Any) -> None:
    def prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, Any]:
        if int(os.environ.get("LOCAL_RANK", -1)) != -1 and not cpu:
            return backend or "gloo", state.DistributedType.MULTI_GPU
        return backend, state.DistributedType.NO

    state.PartialState._prepare_backend = prepare_backend


def give_accelerate_a_scaler(modeling: Any) -> None:
    """accelerate asks for torch.cuda's scaler of fp16 gradients, whatever the device."""
    import simgpu
    import torch

    modeling.get_grad_scaler = lambda distributed_type=None, **kwargs: torch.amp.GradScaler(simgpu.NAME, **kwargs)


def tell_deepspeed(real_accelerator: Any) -> None:
    from simgpu_deepspeed import SimulatedAccelerator

    real_accelerator.ds_accelerator = SimulatedAccelerator()


def leave_out_adam_on_the_host(builder: Any) -> None:
    """DeepSpeed's Adam of the host would read and write all offloaded states; its state is made as ever."""
    import simgpu

    def nothing(*args: object) -> None:
        """Stand in place of create_adam, adam_update and the others."""

    names = ("create_adam", "destroy_adam", "adam_update", "adam_rollback")
    if simgpu.WITHOUT_DATA:
        builder.CPUAdamBuilder.load = lambda self, verbose=True: SimpleNamespace(**dict.fromkeys(names, nothing))


if os.environ.get("SIMGPU_LIBRARY"):
    sys.meta_path.insert(
        0,
        AfterImport(
            {
                "torch": register,
                "accelerate.state": tell_accelerate,
                "accelerate.utils.modeling": give_accelerate_a_scaler,
                "deepspeed.accelerator.real_accelerator": tell_deepspeed,
                "deepspeed.ops.op_builder.cpu.cpu_adam": leave_out_adam_on_the_host,
            }
        ),
    )
