"""Traces that are kept on disk: the same model, rows and code give the same trace."""

import contextlib
import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from zerofit.estimate.allocations import Segment
from zerofit.estimate.module_visits import Visit
from zerofit.estimate.operations import EXCHANGES, KINDS, Operation
from zerofit.recipe.cache import cache_root
from zerofit.recipe.files import atomic_file
from zerofit.recipe.model_options import LoraOptions, ModelOptions

PACKAGE = Path(__file__).resolve().parents[1]
TRACED_CODE = (  # whose change may change a trace
    "model/**/*.py", "strategy/expert_parallel.py", "strategy/offloaded_inputs.py", "strategy/sequence.py",
    "estimate/*.py",
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
    segments: dict[int, list[Segment]] = dataclasses.field(default_factory=dict)


class TraceCache:
    """The traces of one tracer, as JSON in the cache of prepared data. A file that is not one of ours is ignored and
    written again, and one that cannot be written is done without.

    Args:
        key: all that a trace depends on but the batch size, the code and the libraries.
    """

    def __init__(self, key: Any):
        name = hashlib.sha256(repr((key, _code(), torch.__version__, transformers.__version__)).encode()).hexdigest()
        self.path = cache_root(None) / "traces" / f"{name[:32]}.json"

    def read(self) -> Traces:
        try:
            return traces_of(json.loads(self.path.read_bytes()))
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return Traces()

    def write(self, traces: Traces) -> None:
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.path) as file:
                json.dump(content_of(traces), file, separators=(",", ":"))


def content_of(traces: Traces) -> dict[str, Any]:
    """Traces as JSON has them: each different operation once, and its number in the segments."""
    numbers: dict[Operation, int] = {}
    segments = {
        size: [
            {**vars(segment), "operations": [numbers.setdefault(one, len(numbers)) for one in segment.operations]}
            for segment in several
        ]
        for size, several in traces.segments.items()
    }
    return {"stacks": traces.stacks, "largest": traces.largest, "operations": list(numbers), "segments": segments}


def traces_of(content: dict[str, Any]) -> Traces:
    """The reverse of content_of.

    Raises:
        ValueError, TypeError, KeyError, IndexError, AttributeError: it is not what content_of makes.
    """
    operations = [
        Operation(kind, half, flops, moved, tuple(shape)) for kind, half, flops, moved, shape in content["operations"]
    ]
    for kind, *sizes, shape in operations:
        if kind not in (*KINDS, *EXCHANGES):
            raise ValueError(kind)
        _check_numbers([*sizes, *shape])
    found = {
        int(size): [_segment(one, operations) for one in several] for size, several in content["segments"].items()
    }
    _check_numbers([content["largest"], *content["stacks"].values()])
    return Traces(content["stacks"], content["largest"], found)


def _segment(fields: dict[str, Any], operations: list[Operation]) -> Segment:
    segment = Segment(**fields)
    _check_numbers([segment.start, segment.peak, segment.end, segment.gradient, segment.offloaded])
    segment.name = tuple(segment.name) if isinstance(segment.name, list) else segment.name
    segment.operations = [operations[number] for number in fields["operations"]]
    if segment.visit is not None:
        parts: list[Any] = [tuple(part) if isinstance(part, list) else part for part in fields["visit"]]
        segment.visit = Visit(*parts)
    return segment


def _check_numbers(values: list[Any]) -> None:
    if not all(isinstance(value, int) for value in values):
        raise ValueError(values)


def model_key(recipe: Any, config: Any) -> tuple[Any, ...]:
    """What the recipe and the configuration say of the model that is traced."""
    fields = [*dataclasses.fields(ModelOptions), *dataclasses.fields(LoraOptions)]
    options = tuple((field.name, repr(getattr(recipe, field.name))) for field in fields)
    return type(config).__name__, json.dumps(config.to_dict(), sort_keys=True, default=str), options


@functools.cache
def _code() -> str:
    digest = hashlib.sha256()
    for pattern in TRACED_CODE:
        for file in sorted(PACKAGE.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()
