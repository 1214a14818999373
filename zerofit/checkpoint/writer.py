"""Saving and resuming, on all ranks together: shards of the optimizer's state from every rank, and how far the run had
come.

    state/progress.json            the fields of RunState (above); `run`: its options, strategy and processes;
                                   `data`: size, checksum and grouping of the training set; `steps` of the optimizer;
                                   `loss_scale`; `weights`: sampled elements of each in the model (state.py)
    state/rank_00000.safetensors   {kind}/{parameter} -> the part that this rank wrote, flat, fp32
                                   on rank 0 also {what}/{parameter}, whole, of an optimizer other than AdamW
    state/rank_00000.json          which part of which parameter that is: a range of the flattened parameter, or of the
                                   share that tensor parallelism has cut out of it; and the checksum of the above

Nothing here is ever unpickled.

A save has two halves. While training pauses, each rank copies what it owns to the host's memory. Then a thread
of each rank writes its copy while training continues; the main process's thread waits for the files of the others,
makes model/ out of them, and seals the checkpoint. So no rank gathers the whole model, unless the state lacks some of
it: weights that are not trained, or all of them where only the model is kept. To check the state, weights are gathered
one at a time. Ranks wait for each other there and in `wait` only: before the next save, after a failure, at the end.
"""

import contextlib
import functools
import json
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from zerofit.checkpoint.directory import MANIFEST, PROGRESS, STATE, CheckpointDirectory, find_damage, manifest_entry
from zerofit.model.export import NamedWeights
from zerofit.model.parameters import true_numel, true_shape
from zerofit.model.tensor_parallel import Cut
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import SECONDS_TO_APPEAR, atomic_file, is_disk_error, is_there, remove, wait_until
from zerofit.strategy.devices import pins_memory
from zerofit.strategy.engine import Engine
from zerofit.strategy.host_memory import host_memory
from zerofit.strategy.state import Shard, overlaps
from zerofit.strategy.strategy import SHARED_FOLDER_REMEDY, all_gather_objects, check_same


@dataclass
class BestEvaluation:
    """The best evaluation so far."""

    update: int | None = None  # None: there was none
    metric: str = ""  # the figure's name without `eval_`; empty: nothing was evaluated
    value: float = math.nan
    worse_in_a_row: int = 0  # evaluations since
    figures: dict[str, float] = field(default_factory=dict)


@dataclass
class RunState:
    """The progress of a run. `consumed samples` is no field: it follows from `updates`."""

    updates: int = 0
    tokens: float = 0.0  # seen so far
    positions: float = 0.0  # tokens and padding
    held_out_before: dict[str, float] = field(default_factory=dict)  # figures before the first update
    held_out: dict[str, float] = field(default_factory=dict)  # of the latest evaluation
    skipped_updates: list[int] = field(default_factory=list)  # not trained on, after on_anomaly = rewind
    anomalies_in_a_row: int = 0
    tracker_ids: dict[str, str] = field(default_factory=dict)  # the run's id at each tracker
    anomaly_history: dict[str, list[float]] = field(default_factory=dict)  # of the anomaly detector
    best: BestEvaluation = field(default_factory=BestEvaluation)

    def restore(self, saved: dict[str, Any]) -> None:
        """Take the values of state/progress.json, in place: whoever holds this object sees them. A field that the
        version which wrote the file did not have begins as in a new run."""
        new = RunState()
        saved_best = saved.get("best", {})
        for each in fields(self):
            if each.name != "best":
                setattr(self, each.name, saved.get(each.name, getattr(new, each.name)))
        for each in fields(self.best):
            setattr(self.best, each.name, saved_best.get(each.name, getattr(new.best, each.name)))


ALIGNMENT = 64  # bytes
SMALLEST_COPY = 2**16


def lay_out(sizes: dict[str, int]) -> tuple[list[int], dict[str, tuple[int, int]]]:
    """Lay tensors of these bytes into blocks of powers of two. Each block is the largest that what is left could fill,
    and takes the largest tensors first. Returns the bytes of each block, and {tensor: (block, first byte in it)}."""
    rounded = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
    left = sorted(rounded, key=rounded.__getitem__, reverse=True)
    blocks: list[int] = []
    places: dict[str, tuple[int, int]] = {}
    while left:
        total = sum(rounded[name] for name in left)
        block = max(1 << total.bit_length() >> 1, 1 << (rounded[left[0]] - 1).bit_length(), SMALLEST_COPY)
        taken = 0
        for name in left:
            if taken + rounded[name] <= block:
                places[name] = len(blocks), taken
                taken += rounded[name]
        blocks.append(block)
        left = [name for name in left if name not in places]
    return blocks, places


class HostCopies:
    """Room for the copies of some tensors: made for the first ones, and used again for others of the same shapes.

    What a device copies to by itself must be page-locked, and torch takes page-locked memory in blocks of powers of
    two (ATen/core/CachingHostAllocator.h: PowerOf2Ceil): one by one, tensors take up to twice the memory that they
    need. So many tensors share few blocks, which they fill.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self._room: dict[str, torch.Tensor] = {}

    def of(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors on the CPU, contiguous; the next call writes over them."""
        kinds = {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}
        if kinds != self._kinds:
            # what there was is given back first
            self._kinds = {}
            self._room = {}
            pinned = {name: tensor.nbytes for name, tensor in tensors.items() if pins_memory(tensor.device)}
            sizes, places = lay_out(pinned)
            blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            for name, tensor in tensors.items():
                if name in places:
                    block, start = places[name]
                    flat = blocks[block][start : start + tensor.nbytes].view(tensor.dtype)
                    self._room[name] = flat.view(tensor.shape)
                else:
                    self._room[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._kinds = kinds
        return {name: self._room[name].copy_(tensor.detach()) for name, tensor in tensors.items()}


def write_shard(folder: Path, rank: int, shards: list[Shard], tensors: dict[str, torch.Tensor]) -> None:
    """Write what this rank owns; its .json comes into being when the rest is on the disk."""
    data = _file(folder, rank)
    save_file(tensors, data)
    parts: dict[str, dict[str, Any]] = {}
    for shard in shards:
        parts[shard.name] = {"shape": shard.shape, "start": shard.start, "stop": shard.stop}
        if shard.cut is not None:
            parts[shard.name]["cut"] = {"dim": shard.cut.dim, "ranges": shard.cut.ranges}
    with atomic_file(data.with_suffix(".json")) as file:
        file.write(json.dumps({"data": manifest_entry(data), "pieces": parts}) + "\n")


class ShardReader:
    """The shards in a folder, read where they lie: only what is asked for is held in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._shards: dict[str, list[tuple[int, Shard]]] = {}  # (rank, what it wrote) of each parameter
        self._open: dict[int, Any] = {}
        for index in sorted(folder.glob("rank_*.json")):
            rank = int(index.stem.removeprefix("rank_"))
            for name, part in json.loads(index.read_text())["pieces"].items():
                shape = self.shapes[name] = tuple(part["shape"])
                cut = part.get("cut")
                cut = cut and Cut(shape, cut["dim"], tuple(map(tuple, cut["ranges"])))
                shard = Shard(name, shape, part["start"], part["stop"], cut)
                self._shards.setdefault(name, []).append((rank, shard))

    def problems(self, parameters: dict[str, torch.nn.Parameter]) -> list[str]:
        """Lines on trained parameters of a model that are not here, or have another shape."""
        here = self.shapes
        there = {name: tuple(true_shape(parameter)) for name, parameter in parameters.items()}
        return [
            f"{name} is {here.get(name, 'absent')} in it, and {there.get(name, 'not trained')} here"
            for name in {**there, **here}
            if here.get(name) != there.get(name)
        ]

    def weight(self, name: str) -> torch.Tensor:
        """A parameter's whole value, fp32."""
        shape = self.shapes[name]
        return self.read("weight", Shard(name, shape, 0, math.prod(shape))).view(shape)

    def read(self, kind: str, shard: Shard) -> torch.Tensor:
        """Return (stop - start,) fp32: the value or a moment of a shard, put together from the shards that were
        written."""
        values = torch.empty(shard.stop - shard.start)
        filled = 0
        for rank, written in self._shards[shard.name]:
            common = list(overlaps(shard, written))
            if not common:
                continue
            begin = common[0][1]
            end = common[-1][1] + common[-1][2]
            part = self._of(rank).get_slice(f"{kind}/{shard.name}")[begin:end]
            for first, there, length in common:
                values[first : first + length] = part[there - begin : there - begin + length]
                filled += length
        if filled != len(values):
            missing = len(values) - filled
            raise RuntimeError(f"{self.folder}: of {kind} of {shard.name}, {missing} elements are missing")
        return values

    def whole(self, name: str) -> torch.Tensor:
        """Read a tensor that the first rank wrote beside its shards."""
        return self._of(0).get_tensor(name)

    def _of(self, rank: int) -> Any:  # safetensors has no types
        if rank not in self._open:
            self._open[rank] = safe_open(_file(self.folder, rank), "pt")
        return self._open[rank]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05}.safetensors"


TOLERANCE = 2**-7  # relative: bf16 rounds by 2**-8 at most
SMALLEST = 2**-24  # of fp16
Fill = Callable[[Path, NamedWeights], None]


class AsyncCheckpointWriter:
    """Writes checkpoints of an engine, and reads them into it. All ranks call its methods together. `whole`: model/
    holds the whole model, and not only what is trained. `asynchronous`: write while training continues; None: where
    the host's memory has room for the copies."""

    def __init__(
        self, checkpoints: CheckpointDirectory, engine: Engine, whole: bool = True, asynchronous: bool | None = None
    ):
        self.checkpoints = checkpoints
        self.engine = engine
        self._asynchronous = asynchronous
        parameters = list(engine.whole.parameters())
        trained = list(engine.state.whole.values())
        exported = parameters if whole else trained
        self._whole = whole
        self.bytes_of_weights = sum(true_numel(each) * each.element_size() for each in exported)
        self._state_has_all = len(exported) == len(trained)
        self._save: _Save | None = None
        self._state_copies = HostCopies()  # which training cannot change
        self.messages: list[str] = []  # what has become of saves, on the main process
        self.records: list[dict[str, Any]] = []  # update, bytes, seconds that training paused, seconds in all
        self.last_failed = False

    @property
    def has_failed(self) -> bool:
        """True if this rank's shard of the save under way has failed. Ranks tell each other, and then `wait`."""
        return self._save is not None and self._save.failure is not None

    def save(
        self,
        update: int,
        why: str,
        fill: Fill,
        weights: Callable[[], NamedWeights],
        progress: dict[str, Any] | None,
        *,
        is_best: bool,
    ) -> None:
        """Begin to write the checkpoint of this update; what came of it is in `messages` later.

        Args:
            why: ASKED, CLOCK, ... of zerofit/checkpoint/directory.py.
            fill: writes what is for others (model/, predictions) into a folder, given the weights one after another;
                called on the main process, in a thread.
            weights: yields the exported weights, on the main process; called on all ranks if the state lacks some.
            progress: RunState and what else goes to progress.json; None: only the model is kept, and no state.
        """
        began = time.perf_counter()
        self.wait()
        engine = self.engine
        copied = self.copies_before_writing()
        shards: list[Shard] = []
        tensors: dict[str, torch.Tensor] = {}
        if progress is not None:
            engine.state.initialize_moments()
            shards = engine.state.own()
            tensors = {**engine.state.tensors(), **engine.state.whole_tensors()}
            if copied:
                tensors = self._state_copies.of(tensors)
            else:
                tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
            kept = {"steps": engine.state.steps, "loss_scale": engine.loss_scale(), "weights": self.check(tensors)}
            progress = {**progress, **kept}
        from_state = progress is not None and self._state_has_all
        buffers = engine.stored_buffers() if self._whole else {}
        exported = {} if from_state else dict(weights())
        exported |= {name: buffer.to("cpu", copy=True) for name, buffer in buffers.items()}  # training changes them
        dtypes = {name: parameter.dtype for name, parameter in engine.state.whole.items()} if from_state else {}
        rank = engine.layout.rank
        world_size = engine.layout.world_size
        self._save = save = _Save(self.checkpoints, update, why, is_best, rank, world_size=world_size, began=began)
        fill_on_main = fill if engine.is_main else None
        work = functools.partial(save.write, shards, tensors, progress, fill_on_main, exported, dtypes=dtypes)
        save.thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        save.thread.start()
        if copied:
            save.blocked_s = time.perf_counter() - began
        else:
            self.wait()

    def check(self, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, list[float]]:
        """Check that the optimizer's shards equal the weights that the model computes with, by a few elements of each
        in the state as it is written (`tensors`), or as it is. Returns these of the model, on the main process. Raises
        UserError: they differ: shards are not mapped to weights as assumed, and a checkpoint would be wrong."""
        engine = self.engine
        of_model = engine.weight_samples()
        of_shards = engine.state.samples(tensors)
        is_first = engine.layout.data_rank == 0  # of the replicas, which have the same
        weights: dict[str, list[float]] = {}
        kept: dict[tuple[str, int], float] = {}
        for in_model, in_shards in engine.gather_objects((of_model if is_first else {}, of_shards)) or ():
            weights |= in_model
            kept |= in_shards
        shards = {name: [kept.get((name, i), math.inf) for i in range(len(each))] for name, each in weights.items()}
        if name := engine.from_main(_first_unlike(weights, shards)):
            raise UserError(
                f"{engine.strategy.source}: what the optimizer keeps for {name} is not what the model has there: with "
                "these settings the optimizer has its weights in another order than it says, and checkpoints would be "
                "wrong. Remove from zero_optimization what the pairs in accelerate_configs/ do not have"
            )
        return weights

    def copies_before_writing(self) -> bool:
        """Return True if saves are copied first; all ranks decide alike, at the first one."""
        if self._asynchronous is None:
            room = 0.8 * host_memory()[0] / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            weights = self.bytes_of_weights if self.engine.is_main else 0  # which puts the model together
            fits = self.engine.per_rank([float(self.engine.state.bytes_of_own() + weights < room)])
            self._asynchronous = all(rank[0] for rank in fits)
        return self._asynchronous

    def wait(self) -> bool:
        """Wait for the save under way, on all ranks. Returns whether it failed; nothing is left of it then."""
        save = self._save
        engine = self.engine
        if save is None:
            return False
        save.shard_is_written.wait()
        failures = engine.gather_objects(save.failure)
        failure = engine.from_main(next(filter(None, failures or ()), None))
        if engine.is_main:  # every rank's shard is written, or has failed
            save.until = 0.0 if failure else time.perf_counter() + SECONDS_TO_APPEAR
            save.thread.join()
            failure = failure or save.failure
            if failure is None:
                blocked_s = time.perf_counter() - save.began if save.blocked_s is None else save.blocked_s
                record = {"update": save.update, "bytes": save.bytes, "blocked_s": blocked_s, "seconds": save.seconds}
                self.records.append(record)
            else:
                with contextlib.suppress(OSError):
                    remove(self.checkpoints.partial(save.update))
                left = "earlier checkpoints are intact" if any(self.checkpoints.resumable()) else "there is no other"
                self.messages.append(
                    f"warning   update {save.update}: the checkpoint could not be written ({failure}); {left}"
                )
        failed = engine.from_main(failure) is not None
        self._save = None
        self.last_failed = failed
        return failed

    # -------------------------------------------------------------------------------------------------------- reading

    def choose(self, requested: str) -> tuple[Path | None, list[str]]:
        """The checkpoint to resume from (the newest whole one, or the one that is named), and warnings about others.
        Raises UserError: the one that is named is not a whole checkpoint."""
        candidates = []
        if self.engine.is_main:
            is_named = requested != "auto"
            candidates = [Path(requested).expanduser().resolve()] if is_named else list(self.checkpoints.resumable())
        warnings: list[str] = []
        for folder in self.engine.from_main(candidates):
            problem = self._flaw(folder)
            if problem is None:
                return folder, warnings
            if requested != "auto":
                raise UserError(f"resume = {requested!r}: {problem}. Name another")
            warnings.append(f"warning   {folder} is not used: {problem}")
        return None, warnings

    def _flaw(self, folder: Path) -> str | None:
        """Find what is wrong with a checkpoint. Each rank reads a part of its files, and must see what rank 0 sees."""
        engine = self.engine
        manifest = folder / MANIFEST
        problem = named_checkpoint_problem(folder) or (None if is_there(manifest) else f"{MANIFEST} is missing")
        if problem := engine.from_main(problem):
            return problem
        seen = wait_until(lambda: is_there(manifest))
        check_same({f"view of {folder}": "it is there" if seen else "it is not there"}, SHARED_FOLDER_REMEDY)
        problems = all_gather_objects(find_damage(folder, engine.layout.rank, engine.layout.world_size))
        return next(filter(None, problems), None)

    def load(self, folder: Path) -> dict[str, Any]:
        """Put a checkpoint's state into the engine. Returns the progress of its run. Raises UserError: it is of
        another model, or no checkpoint at all."""
        state = self.engine.state
        try:
            progress: dict[str, Any] = json.loads((folder / STATE / PROGRESS).read_text())
            files = ShardReader(folder / STATE)
            problems = files.problems(state.whole)
            if not problems:
                state.load(files.read, progress["steps"], files.whole)
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise UserError(f"the checkpoint {folder} cannot be read: {first_line(error)}") from None
        if problems:
            raise UserError(
                f"the checkpoint {folder} is of another model: {problems[0]} ({len(problems)} such weights). Choose "
                "another --output_dir, or start over with --resume never --overwrite_output_dir"
            )
        name = _first_unlike(self.check(), progress.get("weights", {}))
        if name := self.engine.from_main(name):
            raise UserError(
                f"the checkpoint {folder}, read, does not give the weights that its run had: {name} differs. Name an "
                "earlier one, or start over with --resume never --overwrite_output_dir"
            )
        self.engine.continue_from(progress["loss_scale"])
        return progress


def _first_unlike(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> str | None:
    """The first weight whose samples differ by more than half precision rounds."""
    for name, values in ours.items():
        one, other = (torch.tensor(each, dtype=torch.float64) for each in (values, theirs.get(name, values)))
        if (one - other).norm() > TOLERANCE * one.norm() + SMALLEST * math.sqrt(len(one)):
            return name
    return None


def named_checkpoint_problem(folder: Path) -> str | None:
    """Find what is wrong with a folder that somebody names to resume from, as far as its listing tells."""
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / STATE).is_dir():
        inside = sorted(str(path.relative_to(folder)) for path in folder.rglob("update_????????"))
        remedy = f"; its checkpoints are {', '.join(inside)}" if inside else ""
        return f"it is not a checkpoint to resume from, it has no {STATE}/ folder{remedy}"
    return None


@dataclass
class _Save:
    """One save under way on one rank."""

    checkpoints: CheckpointDirectory
    update: int
    why: str
    is_best: bool
    rank: int
    world_size: int
    began: float
    thread: threading.Thread = field(init=False)
    shard_is_written: threading.Event = field(default_factory=threading.Event)
    failure: str | None = None
    blocked_s: float | None = None  # seconds; None: until the save has ended
    seconds: float = 0.0
    bytes: int = 0
    until: float = math.inf  # when the main process stops waiting for others' files; 0: one has failed, stop now

    def write(
        self,
        shards: list[Shard],
        tensors: dict[str, torch.Tensor],
        progress: dict[str, Any] | None,
        fill: Fill | None,
        exported: dict[str, torch.Tensor],
        *,
        dtypes: dict[str, torch.dtype],
    ) -> None:
        """Write this rank's shard; on the main process (where there is a `fill`) the rest, too."""
        try:
            partial = self.checkpoints.partial(self.update)
            if progress is not None:
                (partial / STATE).mkdir(parents=True, exist_ok=True)
                write_shard(partial / STATE, self.rank, shards, tensors)
            self.shard_is_written.set()
            if fill is None or (progress is not None and not self._all_are_there()):
                return
            partial.mkdir(parents=True, exist_ok=True)
            files = ShardReader(partial / STATE)
            trained = ((name, files.weight(name).to(dtype)) for name, dtype in dtypes.items())
            fill(partial, chain(exported.items(), trained))
            checked = {}
            if progress is not None:
                (partial / STATE / PROGRESS).write_text(json.dumps(progress) + "\n")
                for index in (partial / STATE).glob("rank_*.json"):  # what each rank says of its own file
                    name = index.with_suffix(".safetensors").name
                    checked[f"{STATE}/{name}"] = json.loads(index.read_text())["data"]
            self.bytes = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
            self.checkpoints.finish(self.update, self.why, self.is_best, checked)
        except Exception as error:  # whatever it is, it must not end the training
            self.failure = first_line(error)
            if not is_disk_error(error):
                traceback.print_exc()
        finally:
            self.seconds = time.perf_counter() - self.began
            self.shard_is_written.set()

    def _all_are_there(self) -> bool:
        """Wait for the files of the other ranks. Returns False if one of them has failed."""
        folder = self.checkpoints.partial(self.update) / STATE
        expected = {_file(folder, rank).with_suffix(".json").name for rank in range(self.world_size)}
        # A listing, since NFS remembers for a while that a name was absent.
        while missing := sorted(expected - set(os.listdir(folder))):
            if time.perf_counter() > self.until:
                if self.until:
                    self.failure = f"{', '.join(missing)} do not appear in {folder}: {SHARED_FOLDER_REMEDY}"
                return False
            time.sleep(0.05)
        return True
