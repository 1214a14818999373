"""Traces that are kept on disk: the same model, rows and code give the same trace."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import torch
import transformers

from train.recipe.cache import cache_root
from train.recipe.files import atomic_file
from train.recipe.model_options import LoraOptions, ModelOptions

TRAIN = Path(__file__).resolve().parents[2]
TRACED_CODE = (  # whose change may change a trace
    "model/**/*.py", "strategy/expert_parallel.py", "strategy/offloaded_inputs.py", "strategy/sequence.py",
    "tools/plan/*.py",
)  # fmt: skip


@dataclasses.dataclass
class Traces:
    """What is kept of one tracer.

    Attributes:
        stacks: {name of a stack of layers: layers of it in the full model}.
        largest: the largest batch that is traced.
        segments: {batch size: segments of the model with few layers}.
    """

    stacks: dict[str, int] = dataclasses.field(default_factory=dict)
    largest: int = 0
    segments: dict[int, list[Any]] = dataclasses.field(default_factory=dict)


class TraceCache:
    """The traces of one tracer, in a file of the cache of prepared data. A file that cannot be read is made anew, and
    one that cannot be written is done without.

    Args:
        key: all that a trace depends on but the batch size, the code and the libraries.
    """

    def __init__(self, key: Any):
        name = hashlib.sha256(repr((key, _code(), torch.__version__, transformers.__version__)).encode()).hexdigest()
        self.path = cache_root(None) / "traces" / f"{name[:32]}.pickle"

    def read(self) -> Traces:
        try:
            return pickle.loads(self.path.read_bytes())
        except (OSError, EOFError, ValueError, AttributeError, ImportError, pickle.UnpicklingError):
            return Traces()

    def write(self, traces: Traces) -> None:
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.path, "wb") as file:
                file.write(pickle.dumps(traces))


def model_key(recipe: Any, config: Any) -> tuple:
    """What the recipe and the configuration say of the model that is traced."""
    fields = [*dataclasses.fields(ModelOptions), *dataclasses.fields(LoraOptions)]
    options = tuple((field.name, repr(getattr(recipe, field.name))) for field in fields)
    return type(config).__name__, json.dumps(config.to_dict(), sort_keys=True, default=str), options


@functools.cache
def _code() -> str:
    digest = hashlib.sha256()
    for pattern in TRACED_CODE:
        for file in sorted(TRAIN.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()
