"""The state of an optimizer, in shards of whole parameters: the same form under every strategy.

A checkpoint keeps for each trained parameter its value in fp32 (`weight`), AdamW's two moments, or Muon's one, and
with `ema_decay` the mean of its values (`ema`), which lies beside the moments. Each rank holds shards of these: all of
them under DDP, a part under ZeRO. A shard is named by its parameter, by the share of it that tensor parallelism has
cut out, if it has, and by the range of the flattened share (or parameter) that it covers. So what N ranks wrote under
one strategy, M ranks read under another.
"""

import contextlib
import fcntl
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerofit.compat.deepspeed import fragment_of, step_sub_group, swapped_in
from zerofit.model.parameters import true_numel, true_shape
from zerofit.model.tensor_parallel import Cut, shard_rows
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import open_without_links
from zerofit.strategy.muon import Muon, flat

# What AdamW keeps has the shape of the parameter, and so has Muon's mean; what other optimizers keep
# (optimizers.py) has not, and is not cut.
STATE_KINDS = ("weight", "exp_avg", "exp_avg_sq")
EMA = "ema"
MAX_SAMPLED = 16  # of a parameter


@dataclass(frozen=True)
class Shard:
    """Elements [start, stop) of a flattened parameter of this shape; with a cut, of the flattened share."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    cut: Cut | None = None

    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (first elements in the flattened parameter, first elements in the shard, lengths) of what is
        contiguous in both, in ascending order."""
        if self.cut is None:
            first, last, length = (np.array([value]) for value in (self.start, 0, self.stop - self.start))
            return first, last, length
        starts, lengths = self.cut.runs()
        stops = np.cumsum(lengths)
        first = np.maximum(stops - lengths, self.start)
        last = np.minimum(stops, self.stop)
        within = first < last
        starts = starts + first - (stops - lengths)
        return starts[within], first[within] - self.start, (last - first)[within]

    def find(self, elements: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (which of these elements of the flattened parameter are in this shard, where they are in it)."""
        starts, first, lengths = self.runs()
        run = np.searchsorted(starts, elements, "right") - 1
        offset = elements - starts[run]
        inside = (run >= 0) & (offset < lengths[run])
        return np.flatnonzero(inside), (first[run] + offset)[inside]


def sampled_elements(num_elements: int) -> np.ndarray:
    """Elements of a flattened parameter, the first and the last included, by whose values a checkpoint is checked."""
    return np.linspace(0, num_elements - 1, min(num_elements, MAX_SAMPLED)).astype(np.int64)


def overlaps(one: Shard, other: Shard) -> Iterator[tuple[int, int, int]]:
    """Yield (first element in the one, first in the other, length) of what two shards have in common."""
    a, in_a, of_a = one.runs()
    b, in_b, of_b = other.runs()
    i = j = 0
    while i < len(a) and j < len(b):
        first = max(a[i], b[j])
        last = min(a[i] + of_a[i], b[j] + of_b[j])
        if first < last:
            yield int(in_a[i] + first - a[i]), int(in_b[j] + first - b[j]), int(last - first)
        if a[i] + of_a[i] < b[j] + of_b[j]:
            i += 1
        else:
            j += 1


ReadWhole = Callable[[str], torch.Tensor]  # (name) -> what `whole_tensors` had of that name
Read = Callable[[str, Shard], torch.Tensor]  # (kind, shard) -> (stop - start,) fp32 on the CPU


class OptimizerState:
    """The state of an engine's optimizer. All ranks call its methods together. `engine`: the engine; `module` has the
    trained parameters, `torch_optimizer` is the innermost optimizer."""

    kinds: tuple[str, ...] = STATE_KINDS

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.torch_optimizer
        self.parameters: dict[str, Any] = _trained(engine.module)  # with what DeepSpeed hangs on them
        self.whole = _trained(engine.whole)  # of all stages of a pipeline
        self.matrices = self.optimizer.matrices if isinstance(self.optimizer, Muon) else {}

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Names of what is kept of a parameter: its value, and moments."""
        return tuple(kind for kind in self.kinds if kind != "exp_avg_sq" or name not in self.matrices)

    def bytes_of_own(self) -> int:
        """Bytes that this rank writes into a checkpoint."""
        return 4 * sum(len(self.kinds_of(shard.name)) * (shard.stop - shard.start) for shard in self.own())

    def bytes_of_all(self) -> int:
        """Bytes that all ranks write into a checkpoint together."""
        return 4 * sum(len(self.kinds_of(name)) * true_numel(parameter) for name, parameter in self.whole.items())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what this rank writes of its shards, in fp32: views of the optimizer's tensors where that can be."""
        return {
            f"{kind}/{shard.name}": self.get(kind, shard).float()
            for shard in self.own()
            for kind in self.kinds_of(shard.name)
        }

    def whole_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that this rank writes beside its shards, each as it is."""
        return {}

    def samples(self, tensors: dict[str, torch.Tensor] | None = None) -> dict[tuple[str, int], float]:
        """{(parameter, which of its sampled elements ): value} of the weights that this rank writes. `tensors`: what
        `tensors` has returned; None: look at what the optimizer holds now."""
        given = tensors and ((shard, tensors[f"weight/{shard.name}"]) for shard in self.own())
        found: dict[tuple[str, int], float] = {}
        for shard, values in given or ((each, self.get("weight", each)) for each in self._in_memory(self.own())):
            which, places = shard.find(sampled_elements(math.prod(shard.shape)))
            sampled = values[torch.from_numpy(places)].tolist()
            found |= {(shard.name, int(i)): value for i, value in zip(which, sampled)}
        return found

    def _in_memory(self, shards: list[Shard], written: bool = False) -> Iterator[Shard]:
        """Yield the shards, each while what the optimizer keeps of it is in memory. All of them must be asked for.
        `written`: it is changed meanwhile."""
        yield from shards

    def held(self) -> list[Shard]:
        """Return the shards that this rank holds, and so has to read."""
        ranges = [(name, *self._range(parameter)) for name, parameter in self.parameters.items()]
        return [self.shard(name, start, stop) for name, start, stop in ranges if start < stop]

    def _range(self, parameter: Any) -> tuple[int, int]:
        """The elements [start, stop) of a parameter, or of this replica's share of it, that this rank holds."""
        raise NotImplementedError

    def place(self, name: str) -> tuple[torch.Tensor, int, int, int]:
        """Return (tensor, offset, start, stop) of a matrix, for Muon: its elements [start, stop), which this rank has,
        begin at `offset` in the optimizer's flat `tensor`."""
        parameter = self.parameters[name]
        return (*self._held_in(parameter), *self._range(parameter))

    def _held_in(self, parameter: Any) -> tuple[torch.Tensor, int]:
        """Return (the optimizer's tensor that what this rank holds of a parameter is in, its first element there)."""
        return parameter, 0

    def own(self) -> list[Shard]:
        """Return the shards that this rank writes: of all ranks together, every element once. What tensor parallelism
        does not cut is the same on all ranks that share a layer, and the first writes it; so is a tied weight on a
        pipeline's ends."""
        is_first = self.engine.layout.tensor_rank == 0
        return [
            shard
            for shard in self.held()
            if (is_first or shard.cut is not None)
            and not getattr(self.parameters[shard.name], "ds_pipe_replicated", False)
        ]

    def shard(self, name: str, start: int, stop: int) -> Shard:
        """A range of what this rank's replica has of a parameter."""
        parameter = self.parameters[name]
        return Shard(name, tuple(true_shape(parameter)), start, stop, getattr(parameter, "cut", None))

    def get(self, kind: str, shard: Shard) -> torch.Tensor:
        """The values of a shard: flat, fp32, a view of what the optimizer holds."""
        parameter = self.parameters[shard.name]
        tensor, offset = self._held_in(parameter)
        held = tensor if kind == "weight" else self.optimizer.state[tensor][kind]
        first = offset + shard.start - self._range(parameter)[0]
        return flat(held)[first : first + shard.stop - shard.start]

    @torch.no_grad()
    def load(self, read: Read, steps: int, read_whole: ReadWhole | None = None) -> None:
        """Take everything from a checkpoint. `steps`: updates that the optimizer has made (fp16's skipped ones not
        counted). `read_whole`: of an optimizer that keeps other tensors than AdamW."""
        self.initialize_moments()
        for shard in self._in_memory(self.held(), written=True):
            for kind in self.kinds_of(shard.name):
                self.get(kind, shard).copy_(read(kind, shard))
        self._load_whole(read_whole)
        self._set_steps(steps)
        self._weights_follow()

    def initialize_moments(self) -> None:
        """Let the optimizer make its moments, which it does at its first step only: a step that moves nothing."""
        if any(True for _ in self._step_holders()):
            return
        held = self._optimized()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        made = [tensor for tensor in held if tensor.grad is None]
        for tensor in made:
            tensor.grad = torch.zeros_like(tensor)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self._step()
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate
        for tensor in made:
            tensor.grad = None
        self._set_steps(0)

    def _optimized(self) -> list[torch.Tensor]:
        """The tensors that the optimizer moves."""
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]

    def _step(self) -> None:
        self.optimizer.step()

    @property
    def steps(self) -> int:
        """Updates that the optimizer has made."""
        counts = [entry["step"] for entry in self._step_holders()]
        return int(counts[0]) if counts else 0

    def _set_steps(self, steps: int) -> None:
        for holder in self._step_holders():
            if torch.is_tensor(holder["step"]):
                holder["step"].fill_(steps)
            else:
                holder["step"] = steps

    def _step_holders(self) -> Iterator[dict[str, Any]]:
        """Return where the optimizer counts: in the state of each tensor, or (DeepSpeed's fused Adam) in its
        groups."""
        for holder in (*self.optimizer.state.values(), *self.optimizer.param_groups):
            if "step" in holder:
                yield holder

    def _load_whole(self, read_whole: ReadWhole | None) -> None:
        """Take what `whole_tensors` had."""

    def _weights_follow(self) -> None:
        """Give the model the weights that the optimizer has now, where it has its own copy of them."""

    def start_ema(self) -> None:
        """Keep an exponential mean of the weights from now on, beside the moments: these come first, since an
        optimizer makes them where it finds nothing."""
        self.kinds = (*self.kinds, EMA)
        self.initialize_moments()
        for tensor in self._optimized():
            self.optimizer.state[tensor][EMA] = tensor.detach().clone()

    def update_ema(self, decay: float) -> None:
        """Move the mean towards the weights: `decay` of it stays."""
        for tensor in self._optimized():
            flat(self.optimizer.state[tensor][EMA]).lerp_(flat(tensor), 1 - decay)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the model has the mean in the place of its weights. All ranks enter it together."""
        self._swap_ema()
        try:
            yield
        finally:
            self._swap_ema()

    @torch.no_grad()
    def _swap_ema(self) -> None:
        for tensor in self._optimized():
            weights = flat(tensor)
            mean = flat(self.optimizer.state[tensor][EMA])
            weights_before = weights.clone()
            weights.copy_(mean)
            mean.copy_(weights_before)
        self._weights_follow()


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class ReplicatedState(OptimizerState):
    """One process, or DDP: every rank holds everything, and writes a part."""

    def _range(self, parameter: Any) -> tuple[int, int]:
        return 0, parameter.numel()

    def own(self) -> list[Shard]:
        rank = self.engine.layout.rank
        world = self.engine.layout.world_size
        cuts = [(shard, shard.stop * rank // world, shard.stop * (rank + 1) // world) for shard in self.held()]
        return [Shard(shard.name, shard.shape, start, stop) for shard, start, stop in cuts if start < stop]


class RowState(OptimizerState):
    """FSDP2: each rank holds some rows of each parameter; of several replicas the first one writes."""

    def own(self) -> list[Shard]:
        return super().own() if self.engine.layout.rank < self.engine.layout.shard_size else []

    def _range(self, parameter: Any) -> tuple[int, int]:
        layout = self.engine.layout
        inner = parameter.shape[1:].numel()
        first, last = shard_rows(len(parameter), layout.shard_rank, layout.shard_size)
        return first * inner, last * inner

    def _held_in(self, parameter: Any) -> tuple[torch.Tensor, int]:
        return self.engine.rows[parameter], 0

    def _weights_follow(self) -> None:
        self.engine.forget_gathered()


class FlatState(OptimizerState):
    """ZeRO-1 and ZeRO-2: each rank holds a range of all parameters laid end to end."""

    def _range(self, parameter: Any) -> tuple[int, int]:
        fragment = fragment_of(parameter)
        return (0, 0) if fragment is None else (fragment.start, fragment.start + fragment.numel)

    def _held_in(self, parameter: Any) -> tuple[torch.Tensor, int]:
        fragment = fragment_of(parameter)
        if fragment is None:  # this rank takes part in the exchange of a matrix of which it holds nothing
            return next(group["params"][0] for group in self.optimizer.param_groups if group["muon"]), 0
        return self.optimizer.param_groups[fragment.group]["params"][0], fragment.offset

    def _weights_follow(self) -> None:
        self.engine.engine.optimizer.update_lp_params()


class ShardedState(OptimizerState):
    """ZeRO-3: each rank holds an equal shard of each parameter, the last one's filled up."""

    def _range(self, parameter: Any) -> tuple[int, int]:
        shard = parameter.ds_tensor.numel()
        start = min(self.engine.layout.shard_rank * shard, parameter.ds_numel)
        return start, min(start + shard, parameter.ds_numel)

    @property
    def _zero(self) -> Any:
        return self.engine.engine.optimizer

    def _held_in(self, parameter: Any) -> tuple[torch.Tensor, int]:
        number, offset, _ = self._zero.grad_position[self._zero.get_param_id(parameter)]
        return self._zero.fp32_partitioned_groups_flat[number], offset

    def _optimized(self) -> list[torch.Tensor]:
        return list(self._zero.fp32_partitioned_groups_flat)

    def _step(self) -> None:
        for number in range(len(self._optimized())):
            step_sub_group(self._zero, number)

    def _weights_follow(self) -> None:
        self.engine.engine.empty_partition_cache()
        for shard in self._in_memory(self.held()):
            self.parameters[shard.name].ds_tensor[: shard.stop - shard.start].copy_(self.get("weight", shard))
        self._zero.invalidate_secondary_tensor()  # ZeRO++: copies within a machine, of the weights that were there
        if persistent := self._zero.persistent_parameters:
            persistent[0].all_gather(persistent)


FOLDER_PREFIX = "zerofit-"
SAVED_FILE = "saved.bin"
_LOCKS: list[int] = []  # file descriptors, open as long as this process lives


def check_async_io() -> None:
    """Raises UserError where DeepSpeed cannot build what reads and writes an NVMe disk."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not installed_ops.get("async_io") and not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError(
            'zero_optimization.offload_optimizer.device = "nvme": DeepSpeed compiles async_io against libaio, whose '
            "headers are not here. Install them (apt install libaio-dev), or use --strategy zero3_offload"
        )


def own_folder(below: str) -> Path:
    """A new folder of this process; those of processes that were killed are removed. DeepSpeed names its files after
    parameters and ranks alone: two runs in one folder would read each other's state. A process holds a lock beside its
    folder, which the system drops when it ends, however it ends. On a file system without locks nothing is removed."""
    base = Path(below).expanduser().resolve()
    base.mkdir(parents=True, exist_ok=True)
    for lock in base.glob(f"{FOLDER_PREFIX}*.lock"):
        with suppress(OSError), open(lock, "a", opener=open_without_links) as file:  # it is held, or not ours
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=base, prefix=FOLDER_PREFIX, suffix=".partial")
    with suppress(OSError):  # some network file systems have none
        fcntl.flock(handle, fcntl.LOCK_EX)  # before others see it as a lock
    _LOCKS.append(handle)
    folder = Path(name).rename(Path(name).with_suffix(".lock")).with_suffix("")
    folder.mkdir()
    return folder


def remove_disk_folder(folder: Path) -> None:
    """Remove such a folder, and its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".lock").unlink(missing_ok=True)


class DiskState(ShardedState):
    """The state of ZeRO-3's optimizer on a disk, of which DeepSpeed has one sub-group in memory at a time. `folder`:
    of this process, on the disk. What a checkpoint is written from lies in a file there, not in memory."""

    def __init__(self, engine: Any, folder: Path) -> None:
        super().__init__(engine)
        self.folder = folder

    def tensors(self) -> dict[str, torch.Tensor]:
        shards = self.own()
        size = len(self.kinds) * sum(shard.stop - shard.start for shard in shards)
        file = self.folder / SAVED_FILE
        file.unlink(missing_ok=True)  # a save under way keeps what it has
        room = torch.from_file(str(file), shared=True, size=size) if size else torch.empty(0)
        saved = {}
        start = 0
        for shard in self._in_memory(shards):
            for kind in self.kinds:
                values = self.get(kind, shard)
                saved[f"{kind}/{shard.name}"] = room[start : start + len(values)].copy_(values)
                start += len(values)
        return saved

    def _step(self) -> None:
        for number, group in enumerate(self._zero.fp32_partitioned_groups_flat):
            with swapped_in(self._zero, number, written=True):
                group.grad = torch.zeros_like(group)
                step_sub_group(self._zero, number)

    def _in_memory(self, shards: list[Shard], written: bool = False) -> Iterator[Shard]:
        def number(shard: Shard) -> int:
            return self._zero.grad_position[self._zero.get_param_id(self.parameters[shard.name])][0]

        for key, several in groupby(sorted(shards, key=number), number):
            with swapped_in(self._zero, key, written):
                yield from several
