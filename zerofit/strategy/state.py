"""The state of an optimizer as shards of whole parameters: the same form under every strategy.

A checkpoint has for each trained parameter its value in fp32 (`weight`), AdamW's two moments, or Muon's one, and with
`ema_decay` the mean of its values (`ema`), stored with the moments. Each rank has shards of these: all of them under
DDP, a part under ZeRO. A shard is identified by its parameter, by its cut under tensor parallelism, and by its range
of the flattened parameter (or cut). So M ranks under one strategy can read what N ranks wrote under another.
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

# AdamW's moments and Muon's have the shape of the parameter. The state of other optimizers (optimizers.py) has another
# shape, and is not sharded.
STATE_KINDS = ("weight", "exp_avg", "exp_avg_sq")
EMA = "ema"
MAX_SAMPLED = 16  # elements of a parameter


@dataclass(frozen=True)
class Shard:
    """Elements [start, stop) of a flattened parameter of this shape, or of its flattened cut."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    cut: Cut | None = None

    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (first elements in the flattened parameter, first elements in the shard, lengths) of the runs that
        are contiguous in both, in ascending order."""
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
    """Return the indices of the elements, the first and the last included, whose values check a checkpoint."""
    return np.linspace(0, num_elements - 1, min(num_elements, MAX_SAMPLED)).astype(np.int64)


def overlaps(one: Shard, other: Shard) -> Iterator[tuple[int, int, int]]:
    """Yield (first element in one shard, first in the other, length) of the runs that two shards have in common."""
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


ReadWhole = Callable[[str], torch.Tensor]  # (name) -> the tensor of this name in `whole_tensors`
Read = Callable[[str, Shard], torch.Tensor]  # (kind, shard) -> (stop - start,) fp32 on the CPU


class OptimizerState:
    """The state of an engine's optimizer. All ranks call its methods together. `engine`: the engine; `module` has the
    trained parameters, `torch_optimizer` is the innermost optimizer."""

    kinds: tuple[str, ...] = STATE_KINDS

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.torch_optimizer
        self.parameters: dict[str, Any] = _trained(engine.module)  # DeepSpeed adds attributes to them
        self.whole = _trained(engine.whole)  # those of all pipeline stages
        self.matrices = self.optimizer.matrices if isinstance(self.optimizer, Muon) else {}

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Return the kinds of tensors of a parameter's state: its value and its moments."""
        return tuple(kind for kind in self.kinds if kind != "exp_avg_sq" or name not in self.matrices)

    def bytes_of_own(self) -> int:
        """Return the bytes that this rank writes to a checkpoint."""
        return 4 * sum(len(self.kinds_of(shard.name)) * (shard.stop - shard.start) for shard in self.own())

    def bytes_of_all(self) -> int:
        """Return the bytes that all ranks together write to a checkpoint."""
        return 4 * sum(len(self.kinds_of(name)) * true_numel(parameter) for name, parameter in self.whole.items())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the shards that this rank writes, in fp32: views of the optimizer's tensors if possible."""
        return {
            f"{kind}/{shard.name}": self.get(kind, shard).float()
            for shard in self.own()
            for kind in self.kinds_of(shard.name)
        }

    def whole_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that this rank writes besides its shards, unchanged."""
        return {}

    def samples(self, tensors: dict[str, torch.Tensor] | None = None) -> dict[tuple[str, int], float]:
        """Return {(parameter, number of a sampled element): value} of the weights that this rank writes. `tensors`:
        the result of `tensors()`; None: the optimizer's present tensors."""
        given = tensors and ((shard, tensors[f"weight/{shard.name}"]) for shard in self.own())
        found: dict[tuple[str, int], float] = {}
        for shard, values in given or ((each, self.get("weight", each)) for each in self._in_memory(self.own())):
            which, places = shard.find(sampled_elements(math.prod(shard.shape)))
            sampled = values[torch.from_numpy(places)].tolist()
            found |= {(shard.name, int(i)): value for i, value in zip(which, sampled)}
        return found

    def _in_memory(self, shards: list[Shard], written: bool = False) -> Iterator[Shard]:
        """Yield the shards, each while its state is in memory. The caller must iterate to the end. `written`: the
        caller changes the state."""
        yield from shards

    def held(self) -> list[Shard]:
        """Return the shards that this rank has, and so must read."""
        ranges = [(name, *self._range(parameter)) for name, parameter in self.parameters.items()]
        return [self.shard(name, start, stop) for name, start, stop in ranges if start < stop]

    def _range(self, parameter: Any) -> tuple[int, int]:
        """Return this rank's elements [start, stop) of a parameter, or of its cut."""
        raise NotImplementedError

    def place(self, name: str) -> tuple[torch.Tensor, int, int, int]:
        """Return (tensor, offset, start, stop) of a matrix, for Muon: this rank's elements [start, stop) begin at
        `offset` in the optimizer's flat `tensor`."""
        parameter = self.parameters[name]
        return (*self._held_in(parameter), *self._range(parameter))

    def _held_in(self, parameter: Any) -> tuple[torch.Tensor, int]:
        """Return (the optimizer's tensor with this rank's shard of a parameter, the shard's first element in it)."""
        return parameter, 0

    def own(self) -> list[Shard]:
        """Return the shards that this rank writes: all ranks together write every element once. The first of the ranks
        that share a layer writes what tensor parallelism does not cut; the first stage of a pipeline writes a tied
        weight."""
        is_first = self.engine.layout.tensor_rank == 0
        return [
            shard
            for shard in self.held()
            if (is_first or shard.cut is not None)
            and not getattr(self.parameters[shard.name], "ds_pipe_replicated", False)
        ]

    def shard(self, name: str, start: int, stop: int) -> Shard:
        """Return the shard with this range of a parameter, or of its cut."""
        parameter = self.parameters[name]
        return Shard(name, tuple(true_shape(parameter)), start, stop, getattr(parameter, "cut", None))

    def get(self, kind: str, shard: Shard) -> torch.Tensor:
        """Return the values of a shard: flat, fp32, a view of the optimizer's tensor."""
        parameter = self.parameters[shard.name]
        tensor, offset = self._held_in(parameter)
        values = tensor if kind == "weight" else self.optimizer.state[tensor][kind]
        first = offset + shard.start - self._range(parameter)[0]
        return flat(values)[first : first + shard.stop - shard.start]

    @torch.no_grad()
    def load(self, read: Read, steps: int, read_whole: ReadWhole | None = None) -> None:
        """Load all state from a checkpoint. `steps`: updates that the optimizer has made, without those that fp16
        skipped. `read_whole`: set for optimizers whose state differs from AdamW's."""
        self.initialize_moments()
        for shard in self._in_memory(self.held(), written=True):
            for kind in self.kinds_of(shard.name):
                self.get(kind, shard).copy_(read(kind, shard))
        self._load_whole(read_whole)
        self._set_steps(steps)
        self._weights_follow()

    def initialize_moments(self) -> None:
        """Make the optimizer allocate its moments, which it does at its first step: take one that changes no
        weight."""
        if any(True for _ in self._step_holders()):
            return
        tensors = self._optimized()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        made = [tensor for tensor in tensors if tensor.grad is None]
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
        """Return the tensors that the optimizer updates."""
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]

    def _step(self) -> None:
        self.optimizer.step()

    @property
    def steps(self) -> int:
        """The number of updates that the optimizer has made."""
        counts = [entry["step"] for entry in self._step_holders()]
        return int(counts[0]) if counts else 0

    def _set_steps(self, steps: int) -> None:
        for holder in self._step_holders():
            if torch.is_tensor(holder["step"]):
                holder["step"].fill_(steps)
            else:
                holder["step"] = steps

    def _step_holders(self) -> Iterator[dict[str, Any]]:
        """Yield the dictionaries with the optimizer's step counts: the state of each tensor, or (DeepSpeed's fused
        Adam) its groups."""
        for holder in (*self.optimizer.state.values(), *self.optimizer.param_groups):
            if "step" in holder:
                yield holder

    def _load_whole(self, read_whole: ReadWhole | None) -> None:
        """Load the tensors of `whole_tensors`."""

    def _weights_follow(self) -> None:
        """Copy the optimizer's weights to the model, if the model has its own copy."""

    def start_ema(self) -> None:
        """Keep an exponential mean of the weights from now on, next to the moments. The moments are made first, since
        an optimizer makes them only in an empty state."""
        self.kinds = (*self.kinds, EMA)
        self.initialize_moments()
        for tensor in self._optimized():
            self.optimizer.state[tensor][EMA] = tensor.detach().clone()

    def update_ema(self, decay: float) -> None:
        """Update the mean: ema = decay * ema + (1 - decay) * weights."""
        for tensor in self._optimized():
            flat(self.optimizer.state[tensor][EMA]).lerp_(flat(tensor), 1 - decay)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the model's weights by their mean within this context. All ranks enter it together."""
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
    """The state under one process or DDP: every rank has all of it, and writes a part."""

    def _range(self, parameter: Any) -> tuple[int, int]:
        return 0, parameter.numel()

    def own(self) -> list[Shard]:
        rank = self.engine.layout.rank
        world = self.engine.layout.world_size
        cuts = [(shard, shard.stop * rank // world, shard.stop * (rank + 1) // world) for shard in self.held()]
        return [Shard(shard.name, shard.shape, start, stop) for shard, start, stop in cuts if start < stop]


class RowState(OptimizerState):
    """The state under FSDP2: each rank has some rows of each parameter; the first replica writes."""

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
    """The state under ZeRO-1 and ZeRO-2: each rank has a range of the concatenated parameters."""

    def _range(self, parameter: Any) -> tuple[int, int]:
        fragment = fragment_of(parameter)
        return (0, 0) if fragment is None else (fragment.start, fragment.start + fragment.numel)

    def _held_in(self, parameter: Any) -> tuple[torch.Tensor, int]:
        fragment = fragment_of(parameter)
        if fragment is None:  # this rank has nothing of the matrix, and takes part in its exchange
            return next(group["params"][0] for group in self.optimizer.param_groups if group["muon"]), 0
        return self.optimizer.param_groups[fragment.group]["params"][0], fragment.offset

    def _weights_follow(self) -> None:
        self.engine.engine.optimizer.update_lp_params()


class ShardedState(OptimizerState):
    """The state under ZeRO-3: each rank has an equal shard of each parameter; the last one is padded."""

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
        self._zero.invalidate_secondary_tensor()  # ZeRO++: copies of the old weights within a machine
        if persistent := self._zero.persistent_parameters:
            persistent[0].all_gather(persistent)


FOLDER_PREFIX = "zerofit-"
SAVED_FILE = "saved.bin"
_LOCKS: list[int] = []  # file descriptors, open as long as this process lives


def check_async_io() -> None:
    """Check that DeepSpeed can build its reader and writer of NVMe disks. Raises UserError: it cannot."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not installed_ops.get("async_io") and not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError(
            'zero_optimization.offload_optimizer.device = "nvme": DeepSpeed compiles async_io against libaio, whose '
            "headers are not installed. Install them (apt install libaio-dev), or use --strategy zero3_offload"
        )


def own_folder(below: str) -> Path:
    """Make a folder for this process, and remove those of killed processes. DeepSpeed names its files only after
    parameters and ranks: two runs in one folder would read each other's state. A process holds a lock next to its
    folder, which the system drops when the process ends. On a file system without locks nothing is removed."""
    base = Path(below).expanduser().resolve()
    base.mkdir(parents=True, exist_ok=True)
    for lock in base.glob(f"{FOLDER_PREFIX}*.lock"):
        with suppress(OSError), open(lock, "a", opener=open_without_links) as file:  # another process may hold it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=base, prefix=FOLDER_PREFIX, suffix=".partial")
    with suppress(OSError):  # some network file systems have no locks
        fcntl.flock(handle, fcntl.LOCK_EX)  # before others see it as a lock
    _LOCKS.append(handle)
    folder = Path(name).rename(Path(name).with_suffix(".lock")).with_suffix("")
    folder.mkdir()
    return folder


def remove_disk_folder(folder: Path) -> None:
    """Remove a folder of `own_folder`, and its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".lock").unlink(missing_ok=True)


class DiskState(ShardedState):
    """The state under ZeRO-3 with the optimizer on a disk: DeepSpeed has one sub-group in memory at a time. `folder`:
    this process's, on the disk. The copy from which a checkpoint is written is a file there."""

    def __init__(self, engine: Any, folder: Path) -> None:
        super().__init__(engine)
        self.folder = folder

    def tensors(self) -> dict[str, torch.Tensor]:
        shards = self.own()
        size = len(self.kinds) * sum(shard.stop - shard.start for shard in shards)
        file = self.folder / SAVED_FILE
        file.unlink(missing_ok=True)  # a save in progress keeps its open file
        copies = torch.from_file(str(file), shared=True, size=size) if size else torch.empty(0)
        saved = {}
        start = 0
        for shard in self._in_memory(shards):
            for kind in self.kinds:
                values = self.get(kind, shard)
                saved[f"{kind}/{shard.name}"] = copies[start : start + len(values)].copy_(values)
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
