"""The writer and reader of state/ of a checkpoint, on all ranks together: shards of the optimizer's state from every
rank, and the progress of the run.

    state/progress.json            the fields of RunState; `run`: its options, strategy and number of processes;
                                   `data`: size, checksum and grouping of the training set; `steps` of the optimizer;
                                   `loss_scale`; `weights`: sampled elements of each weight (strategy/state.py)
    state/rank_00000.safetensors   {kind}/{parameter} -> the shard that this rank wrote, flat, fp32
                                   on rank 0 also unsharded tensors of optimizers other than AdamW
    state/rank_00000.json          which part of which parameter each shard is: a range of the flattened parameter, or
                                   of its tensor-parallel slice; and the checksum of the file above

Nothing here is ever unpickled.

A save has two halves. While training pauses, each rank copies its shards to the host's memory. Then a thread of each
rank writes the copy while training continues; the thread of the main process waits for the files of the other ranks,
builds model/ from them, and writes the manifest. So no rank gathers the whole model, except weights that the state
lacks: frozen ones, or all of them if only the model is kept. To check the state, weights are gathered one at a time.
Ranks wait for each other only there and in `wait`: before the next save, after a failure, at the end.
"""

import contextlib
import json
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from zerofit.checkpoint.directory import PROGRESS_FILE, STATE_FOLDER, CheckpointDirectory, find_damage, manifest_entry
from zerofit.model.export import NamedWeights
from zerofit.model.parameters import true_numel, true_shape
from zerofit.model.tensor_parallel import Cut
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import SECONDS_TO_APPEAR, atomic_file, is_disk_error, is_there, remove, wait_until
from zerofit.record.run_folder import MANIFEST
from zerofit.strategy.devices import pins_memory
from zerofit.strategy.engine import Engine
from zerofit.strategy.host_memory import host_memory
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.state import Shard, overlaps
from zerofit.strategy.strategy import SHARED_FOLDER_REMEDY, all_gather_objects, check_same

ALIGNMENT_BYTES = 64
MIN_BLOCK_BYTES = 2**16
SAMPLE_TOLERANCE = 2**-7  # relative: bf16 rounds by 2**-8 at most
SMALLEST_FP16 = 2**-24
FillFolder = Callable[[Path, NamedWeights], None]


@dataclass
class BestEvaluation:
    """The best evaluation of a run so far."""

    update: int | None = None  # None: there was no evaluation
    metric: str = ""  # the figure's name without `eval_`; empty: nothing was evaluated
    value: float = math.nan
    worse_in_a_row: int = 0  # number of evaluations since
    figures: dict[str, float] = field(default_factory=dict)


@dataclass
class RunState:
    """The progress of a run. The consumed samples are not a field: they follow from `updates`."""

    updates: int = 0
    tokens: float = 0.0  # trained on so far, without padding
    positions: float = 0.0  # the same with padding
    held_out_before: dict[str, float] = field(default_factory=dict)  # figures before the first update
    held_out: dict[str, float] = field(default_factory=dict)  # figures of the latest evaluation
    skipped_updates: list[int] = field(default_factory=list)  # after a rewind from an anomaly
    anomalies_in_a_row: int = 0
    tracker_ids: dict[str, str] = field(default_factory=dict)  # the run's id at each tracker
    anomaly_history: dict[str, list[float]] = field(default_factory=dict)  # of the anomaly detector
    best: BestEvaluation = field(default_factory=BestEvaluation)

    def restore(self, saved: dict[str, Any]) -> None:
        """Set the fields to the values in state/progress.json. The objects stay the same, since others hold them. A
        field that is missing in the file is reset to its default."""
        new = RunState()
        saved_best = saved.get("best", {})
        for name in vars(self).keys() - {"best"}:
            setattr(self, name, saved.get(name, getattr(new, name)))
        for name, default in vars(new.best).items():
            setattr(self.best, name, saved_best.get(name, default))


def lay_out_blocks(sizes: dict[str, int]) -> tuple[list[int], dict[str, tuple[int, int]]]:
    """Pack tensors into blocks whose sizes are powers of two. Each block is the largest that the remaining tensors can
    fill, and takes the largest tensors first. `sizes`: {tensor: bytes}. Returns the bytes of each block, and {tensor:
    (number of its block, first byte in it)}."""
    rounded = {name: -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for name, size in sizes.items()}
    remaining = sorted(rounded, key=rounded.__getitem__, reverse=True)
    blocks: list[int] = []
    places: dict[str, tuple[int, int]] = {}
    while remaining:
        total = sum(rounded[name] for name in remaining)
        block = max(1 << total.bit_length() >> 1, 1 << (rounded[remaining[0]] - 1).bit_length(), MIN_BLOCK_BYTES)
        used_bytes = 0
        for name in remaining:
            if used_bytes + rounded[name] <= block:
                places[name] = len(blocks), used_bytes
                used_bytes += rounded[name]
        blocks.append(block)
        remaining = [name for name in remaining if name not in places]
    return blocks, places


class HostCopies:
    """The host memory for copies of tensors. It is allocated for the first ones, and used again for the same shapes.

    A device copies asynchronously only to page-locked memory, which torch allocates in blocks of powers of two
    (ATen/core/CachingHostAllocator.h: PowerOf2Ceil). One block per tensor would take up to twice the memory that is
    needed; so many tensors share few blocks, which they fill.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return contiguous copies of the tensors on the CPU; the next call overwrites them."""
        if _shapes_and_dtypes(tensors) != _shapes_and_dtypes(self._buffers):
            self._buffers = {}  # the old ones are freed first
            pinned = {name: tensor.nbytes for name, tensor in tensors.items() if pins_memory(tensor.device)}
            sizes, places = lay_out_blocks(pinned)
            blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            for name, tensor in tensors.items():
                if name in places:
                    block, start = places[name]
                    flat = blocks[block][start : start + tensor.nbytes].view(tensor.dtype)
                    self._buffers[name] = flat.view(tensor.shape)
                else:
                    self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return {name: self._buffers[name].copy_(tensor.detach()) for name, tensor in tensors.items()}


def _shapes_and_dtypes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def write_shard(folder: Path, rank: int, shards: list[Shard], tensors: dict[str, torch.Tensor]) -> None:
    """Write the shards of this rank: the tensors first, and the .json when they are on the disk."""
    data = _shard_file(folder, rank)
    save_file(tensors, data)
    parts: dict[str, dict[str, Any]] = {}
    for shard in shards:
        parts[shard.name] = {"shape": shard.shape, "start": shard.start, "stop": shard.stop}
        if shard.cut is not None:
            parts[shard.name]["cut"] = {"dim": shard.cut.dim, "ranges": shard.cut.ranges}
    with atomic_file(data.with_suffix(".json")) as file:
        file.write(json.dumps({"data": manifest_entry(data), "pieces": parts}) + "\n")


class ShardReader:
    """The reader of the shards in a folder. Only what is asked for is read into memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._shards: dict[str, list[tuple[int, Shard]]] = {}  # {parameter: (rank, the shard that it wrote)}
        self._files: dict[int, Any] = {}  # {rank: its open file}
        for index in sorted(folder.glob("rank_*.json")):
            rank = int(index.stem.removeprefix("rank_"))
            for name, part in json.loads(index.read_text())["pieces"].items():
                shape = self.shapes[name] = tuple(part["shape"])
                cut = part.get("cut")
                cut = cut and Cut(shape, cut["dim"], tuple(map(tuple, cut["ranges"])))
                shard = Shard(name, shape, part["start"], part["stop"], cut)
                self._shards.setdefault(name, []).append((rank, shard))

    def problems(self, parameters: dict[str, torch.nn.Parameter]) -> list[str]:
        """Return lines on the trained parameters that the folder lacks, or has with another shape."""
        model = {name: tuple(true_shape(parameter)) for name, parameter in parameters.items()}
        return [
            f"{name} is {self.shapes.get(name, 'absent')} in it, and {model.get(name, 'not trained')} here"
            for name in {**model, **self.shapes}
            if self.shapes.get(name) != model.get(name)
        ]

    def weight(self, name: str) -> torch.Tensor:
        """Return the unsharded value of a parameter, fp32."""
        shape = self.shapes[name]
        return self.read("weight", Shard(name, shape, 0, math.prod(shape))).view(shape)

    def read(self, kind: str, shard: Shard) -> torch.Tensor:
        """Return (stop - start,) fp32: the value or a moment of a shard, which may be cut otherwise than the shards in
        the folder. Raises RuntimeError: some elements are missing."""
        values = torch.empty(shard.stop - shard.start)
        filled = 0
        for rank, written in self._shards[shard.name]:
            common = list(overlaps(shard, written))
            if not common:
                continue
            begin = common[0][1]
            end = common[-1][1] + common[-1][2]
            part = self._open(rank).get_slice(f"{kind}/{shard.name}")[begin:end]
            for first, first_written, length in common:
                start = first_written - begin
                values[first : first + length] = part[start : start + length]
                filled += length
        if filled != len(values):
            missing = len(values) - filled
            raise RuntimeError(f"{self.folder}: of {kind} of {shard.name}, {missing} elements are missing")
        return values

    def unsharded(self, name: str) -> torch.Tensor:
        """Return a tensor that rank 0 wrote unsharded."""
        return self._open(0).get_tensor(name)

    def _open(self, rank: int) -> Any:  # safetensors has no types
        if rank not in self._files:
            self._files[rank] = safe_open(_shard_file(self.folder, rank), "pt")
        return self._files[rank]


def _shard_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05}.safetensors"


class AsyncCheckpointWriter:
    """The writer of an engine's checkpoints, which also reads them into it. All ranks call its methods together.

    Args:
        whole: model/ holds all weights of the model, and not only the trained ones.
        asynchronous: write while training continues; None: if the host's memory has room for the copies.
    """

    def __init__(
        self, checkpoints: CheckpointDirectory, engine: Engine, whole: bool = True, asynchronous: bool | None = None
    ):
        self.checkpoints = checkpoints
        self.engine = engine
        self._asynchronous = asynchronous
        trained = list(engine.state.whole.values())
        exported = list(engine.whole.parameters()) if whole else trained
        self._whole = whole
        self.bytes_of_weights = sum(true_numel(weight) * weight.element_size() for weight in exported)
        self._state_has_all = len(exported) == len(trained)
        self._save: _Save | None = None
        self._state_copies = HostCopies()
        self.messages: list[str] = []  # warnings about failed saves, on the main process
        self.records: list[dict[str, Any]] = []  # {update, bytes, blocked_s (of training), seconds} of each save
        self.last_failed = False

    @property
    def has_failed(self) -> bool:
        """Return True if this rank's shard of the current save has failed. Then all ranks must call `wait`."""
        return self._save is not None and self._save.failure is not None

    def save(
        self,
        update: int,
        why: str,
        fill: FillFolder,
        weights: Callable[[], NamedWeights],
        progress: dict[str, Any] | None,
        *,
        is_best: bool,
    ) -> None:
        """Start to write the checkpoint of this update. If it fails, `messages` has a warning after `wait`.

        Args:
            why: the reason, for the manifest.
            fill: writes model/ and predictions into a folder from the weights, which it gets one after another; called
                on the main process, in a thread.
            weights: yields the exported weights, on the main process; called on all ranks if the state lacks some.
            progress: RunState and the other fields of progress.json; None: only the model is kept, and no state.
        """
        began = time.perf_counter()
        self.wait()
        engine = self.engine
        copied = self._copies_before_writing()
        shards: list[Shard] = []
        tensors: dict[str, torch.Tensor] = {}
        if progress is not None:
            engine.state.initialize_moments()
            shards = engine.state.own()
            tensors = {**engine.state.tensors(), **engine.state.whole_tensors()}
            if copied:
                tensors = self._state_copies.copy(tensors)
            else:
                tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
            scalars = {"steps": engine.state.steps, "loss_scale": engine.loss_scale()}
            progress = {**progress, **scalars, "weights": self.check(tensors)}
        from_state = progress is not None and self._state_has_all
        buffers = engine.stored_buffers() if self._whole else {}
        exported = {} if from_state else dict(weights())
        exported |= {name: buffer.to("cpu", copy=True) for name, buffer in buffers.items()}  # training changes them
        dtypes = {name: parameter.dtype for name, parameter in engine.state.whole.items()} if from_state else {}
        fill_on_main = fill if engine.is_main else None
        self._save = save = _Save(self.checkpoints, update, why, is_best, engine.layout, began, fill_on_main)
        arguments = (shards, tensors, progress, exported, dtypes)
        save.thread = threading.Thread(target=save.write, args=arguments, name="checkpoint", daemon=True)
        save.thread.start()
        if copied:
            save.blocked_s = time.perf_counter() - began
        else:
            self.wait()

    def check(self, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, list[float]]:
        """Check that a few elements of each of the model's weights equal those of the optimizer's shards: of the state
        that is being written (`tensors`), or of the current one. Returns the model's elements, on the main process.
        Raises UserError: they differ, so that shards are not mapped to weights as assumed."""
        engine = self.engine
        model_samples = engine.weight_samples()
        if engine.layout.data_rank > 0:  # the replicas have the same weights
            model_samples = {}
        weights: dict[str, list[float]] = {}
        shards: dict[tuple[str, int], float] = {}
        for of_model, of_shards in engine.gather_objects((model_samples, engine.state.samples(tensors))) or ():
            weights |= of_model
            shards |= of_shards
        kept = {name: [shards.get((name, i), math.inf) for i in range(len(row))] for name, row in weights.items()}
        if name := engine.from_main(_first_difference(weights, kept)):
            raise UserError(
                f"{engine.strategy.source}: what the optimizer keeps for {name} is not what the model has there: with "
                "these settings the optimizer has its weights in another order than it says, and checkpoints would be "
                "wrong. Remove from zero_optimization what the pairs in accelerate_configs/ do not have"
            )
        return weights

    def _copies_before_writing(self) -> bool:
        """Return True if saves are copied first. All ranks decide together, at the first save."""
        if self._asynchronous is None:
            free_bytes = 0.8 * host_memory()[0] / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            weights_bytes = self.bytes_of_weights if self.engine.is_main else 0  # it builds the exported model
            fits = self.engine.per_rank([float(self.engine.state.bytes_of_own() + weights_bytes < free_bytes)])
            self._asynchronous = all(rank_fits for (rank_fits,) in fits)
        return self._asynchronous

    def wait(self) -> bool:
        """Wait for the current save, on all ranks. Returns True if it failed; then its files are removed."""
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

    def choose(self, requested: str) -> tuple[Path | None, list[str]]:
        """Return (the checkpoint to resume from, warnings about damaged ones). `requested`: "auto" for the newest
        intact one, or a folder. Raises UserError: this folder is not an intact checkpoint."""
        candidates = []
        if self.engine.is_main:
            is_named = requested != "auto"
            candidates = [Path(requested).expanduser().resolve()] if is_named else list(self.checkpoints.resumable())
        warnings: list[str] = []
        for folder in self.engine.from_main(candidates):
            problem = self._find_problem(folder)
            if problem is None:
                return folder, warnings
            if requested != "auto":
                raise UserError(f"resume = {requested!r}: {problem}. Name another")
            warnings.append(f"warning   {folder} is not used: {problem}")
        return None, warnings

    def _find_problem(self, folder: Path) -> str | None:
        """Return what is wrong with a checkpoint; None if it is intact. Each rank reads a part of its files, and must
        see the files that rank 0 sees."""
        engine = self.engine
        manifest = folder / MANIFEST
        problem = named_checkpoint_problem(folder) or (None if is_there(manifest) else f"{MANIFEST} is missing")
        if problem := engine.from_main(problem):
            return problem
        is_seen = wait_until(lambda: is_there(manifest))
        check_same({f"view of {folder}": "it is there" if is_seen else "it is not there"}, SHARED_FOLDER_REMEDY)
        problems = all_gather_objects(find_damage(folder, engine.layout.rank, engine.layout.world_size))
        return next(filter(None, problems), None)

    def load(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint's state into the engine. Returns the content of its progress.json. Raises UserError: it is
        of another model, or cannot be read."""
        state = self.engine.state
        try:
            progress: dict[str, Any] = json.loads((folder / STATE_FOLDER / PROGRESS_FILE).read_text())
            reader = ShardReader(folder / STATE_FOLDER)
            if problems := reader.problems(state.whole):
                raise UserError(
                    f"the checkpoint {folder} is of another model: {problems[0]} ({len(problems)} such weights). "
                    "Choose another --output_dir, or start over with --resume never --overwrite_output_dir"
                )
            state.load(reader.read, progress["steps"], reader.unsharded)
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise UserError(f"the checkpoint {folder} cannot be read: {first_line(error)}") from None
        if name := self.engine.from_main(_first_difference(self.check(), progress.get("weights", {}))):
            raise UserError(
                f"the checkpoint {folder}, read, does not give the weights that its run had: {name} differs. Name an "
                "earlier one, or start over with --resume never --overwrite_output_dir"
            )
        self.engine.continue_from(progress["loss_scale"])
        return progress


def _first_difference(expected: dict[str, list[float]], actual: dict[str, list[float]]) -> str | None:
    """Return the first weight whose samples differ by more than the rounding of half precision."""
    for name, samples in expected.items():
        values = torch.tensor(samples, dtype=torch.float64)
        difference = values - torch.tensor(actual.get(name, samples), dtype=torch.float64)
        if difference.norm() > SAMPLE_TOLERANCE * values.norm() + SMALLEST_FP16 * math.sqrt(len(values)):
            return name
    return None


def named_checkpoint_problem(folder: Path) -> str | None:
    """Return why a run cannot resume from a folder that a user names, as far as the folder's listing shows."""
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / STATE_FOLDER).is_dir():
        inside = sorted(str(path.relative_to(folder)) for path in folder.rglob("update_????????"))
        remedy = f"; its checkpoints are {', '.join(inside)}" if inside else ""
        return f"it is not a checkpoint to resume from, it has no {STATE_FOLDER}/ folder{remedy}"
    return None


@dataclass
class _Save:
    """One save on one rank."""

    checkpoints: CheckpointDirectory
    update: int
    why: str
    is_best: bool
    layout: ParallelLayout
    began: float  # time.perf_counter()
    fill: FillFolder | None  # None: this is not the main process
    thread: threading.Thread = field(init=False)
    shard_is_written: threading.Event = field(default_factory=threading.Event)
    failure: str | None = None
    blocked_s: float | None = None  # seconds; None: until the save has ended
    seconds: float = 0.0
    bytes: int = 0
    until: float = math.inf  # when the main process stops waiting for other ranks' files; 0: now, a rank has failed

    def write(
        self,
        shards: list[Shard],
        tensors: dict[str, torch.Tensor],
        progress: dict[str, Any] | None,
        exported: dict[str, torch.Tensor],
        dtypes: dict[str, torch.dtype],
    ) -> None:
        """Write this rank's shard, and on the main process the other files, too."""
        try:
            partial = self.checkpoints.partial(self.update)
            if progress is not None:
                (partial / STATE_FOLDER).mkdir(parents=True, exist_ok=True)
                write_shard(partial / STATE_FOLDER, self.layout.rank, shards, tensors)
            self.shard_is_written.set()
            if self.fill is None or (progress is not None and not self._all_are_there()):
                return
            partial.mkdir(parents=True, exist_ok=True)
            files = ShardReader(partial / STATE_FOLDER)
            trained = ((name, files.weight(name).to(dtype)) for name, dtype in dtypes.items())
            self.fill(partial, chain(exported.items(), trained))
            checked = {}
            if progress is not None:
                (partial / STATE_FOLDER / PROGRESS_FILE).write_text(json.dumps(progress) + "\n")
                for index in (partial / STATE_FOLDER).glob("rank_*.json"):  # each has the checksum of its rank's file
                    name = index.with_suffix(".safetensors").name
                    checked[f"{STATE_FOLDER}/{name}"] = json.loads(index.read_text())["data"]
            self.bytes = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
            self.checkpoints.finish(self.update, self.why, self.is_best, checked)
        except Exception as error:  # no error of a save may end the training
            self.failure = first_line(error)
            if not is_disk_error(error):
                traceback.print_exc()
        finally:
            self.seconds = time.perf_counter() - self.began
            self.shard_is_written.set()

    def _all_are_there(self) -> bool:
        """Wait for the files of the other ranks. Returns False if one of them has failed."""
        folder = self.checkpoints.partial(self.update) / STATE_FOLDER
        expected = {_shard_file(folder, rank).with_suffix(".json").name for rank in range(self.layout.world_size)}
        # The folder is listed, since NFS may cache that a single name is absent.
        while missing := sorted(expected - set(os.listdir(folder))):
            if time.perf_counter() > self.until:
                if self.until:
                    self.failure = f"{', '.join(missing)} do not appear in {folder}: {SHARED_FOLDER_REMEDY}"
                return False
            time.sleep(0.05)
        return True
