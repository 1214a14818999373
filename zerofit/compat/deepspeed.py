"""Private parts of DeepSpeed."""

import functools
import importlib
from contextlib import AbstractContextManager
from typing import Any

from zerofit.compat import replaced


def with_groups(groups: Any) -> AbstractContextManager[None]:
    """Within this context a PipelineModule takes these process groups, and makes none.

    Its constructor has no argument for them, and would make groups that know no tensor parallelism. Tried with
    DeepSpeed 0.19.8. Without it: no 3D parallelism.
    """
    module = importlib.import_module("deepspeed.runtime.pipe.module")
    return replaced(module, "PipelineParallelGrid", lambda **_: groups)


def initializing_with(groups: Any) -> AbstractContextManager[None]:
    """Within this context `deepspeed.initialize` is given these process groups (its argument `mpu`).

    accelerate calls it, without that argument (accelerator.py, _prepare_deepspeed). Tried with DeepSpeed 0.19.8 and
    accelerate 1.15. Without it: DeepSpeed takes all ranks for replicas, and tensor and sequence parallelism sum
    gradients over the wrong ranks.
    """
    deepspeed = importlib.import_module("deepspeed")
    return replaced(deepspeed, "initialize", functools.partial(deepspeed.initialize, mpu=groups))
