"""Adds the simulated device to torch, if this folder is on PYTHONPATH and SIMGPU_LIBRARY is set.

accelerate and DeepSpeed are patched when they are imported. accelerate takes an unknown device type from
ACCELERATE_TORCH_DEVICE; several processes must be a MULTI_GPU job over gloo.
"""

import importlib.machinery
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


class AfterImport:
    """An import finder that calls `patches[name](module)` as soon as the module of that name has been imported."""

    def __init__(self, patches: dict[str, Callable[[Any], None]]):
        self.patches = patches

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.patches:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module
        patch = self.patches[fullname]

        def exec_module(module: ModuleType) -> None:
            run(module)
            patch(module)

        loader.exec_module = exec_module
        return spec


def register(torch: ModuleType) -> None:
    """Register the device and make that of this rank the current one."""
    import simgpu

    rank = int(os.environ.get("LOCAL_RANK", "0")) % simgpu.device_count()  # processes may share a device
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{simgpu.NAME}:{rank}"
    simgpu.set_device(rank)


def patch_accelerate(state: Any) -> None:
    def prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, Any]:
        if int(os.environ.get("LOCAL_RANK", -1)) != -1 and not cpu:
            return backend or "gloo", state.DistributedType.MULTI_GPU
        return backend, state.DistributedType.NO

    state.PartialState._prepare_backend = prepare_backend


def patch_grad_scaler(modeling: Any) -> None:
    """Give accelerate the device's scaler of fp16 gradients: it would take torch.cuda's for any device."""
    import simgpu
    import torch

    modeling.get_grad_scaler = lambda distributed_type=None, **kwargs: torch.amp.GradScaler(simgpu.NAME, **kwargs)


def patch_deepspeed(real_accelerator: Any) -> None:
    from simgpu_deepspeed import SimulatedAccelerator

    real_accelerator.ds_accelerator = SimulatedAccelerator()


def patch_cpu_adam(builder: Any) -> None:
    """Replace DeepSpeed's CPUAdam kernels, which would touch all offloaded states. The states are made as usual."""
    import simgpu

    def nothing(*args: object) -> None:
        """Replace create_adam, adam_update and the others."""

    names = ("create_adam", "destroy_adam", "adam_update", "adam_rollback")
    if simgpu.WITHOUT_DATA:
        builder.CPUAdamBuilder.load = lambda self, verbose=True: SimpleNamespace(**dict.fromkeys(names, nothing))


if os.environ.get("SIMGPU_LIBRARY"):
    sys.meta_path.insert(
        0,
        AfterImport(
            {
                "torch": register,
                "accelerate.state": patch_accelerate,
                "accelerate.utils.modeling": patch_grad_scaler,
                "deepspeed.accelerator.real_accelerator": patch_deepspeed,
                "deepspeed.ops.op_builder.cpu.cpu_adam": patch_cpu_adam,
            }
        ),
    )
