"""The folder of a run, and the record of the files that runs have written there: only these are ever removed.

The record, files.json, has the names of the files ({"written": [...]}), and the update after which the run began
({"begun_at": 0}). A name that ends in / stands for a whole folder, which is never removed. A name is added before its
file is written. Checkpoints are not in the record: the manifest of each names its files.
"""

import contextlib
import fcntl
import io
import json
import os
import platform
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any

import yaml
from safetensors import SafetensorError

from zerofit.recipe.base import Recipe
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import (
    TEMPORARY_NAME,
    atomic_file,
    is_disk_error,
    open_without_links,
    parse_object,
    read_record,
    remove,
    sync,
    temporary_path,
)
from zerofit.recipe.options import TrainingRecipe
from zerofit.record.metrics import JsonlFile, line_of_metrics

RECORD = "files.json"
LOCK = ".lock"
MODEL = "model"
CHECKPOINTS = "checkpoints"
# The next names are those of files and links in checkpoints/.
MANIFEST = "manifest.json"
LINKS = ("best", "latest")
UPDATE = re.compile(r"update_\d{8}")  # the name of a checkpoint
# The files that every run may write; names that depend on the data are added when the files are written.
NAMES = {
    "recipe.yaml",
    "strategy.yaml",
    "environment.json",
    "metrics.jsonl",
    "samples.jsonl",
    "stream.jsonl",
    "anomalies.jsonl",
    "loss.png",
    "predictions.jsonl",
    "flight/",
}


class WrittenFiles:
    """The record (files.json) of the files that runs have written to a folder."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def begun_at(self) -> int:
        """Return the update after which the run in the folder began: above 0 if it resumed a run of another folder."""
        begun_at = read_record(self.path / RECORD).get("begun_at")
        return begun_at if type(begun_at) is int else 0

    @property
    def names(self) -> set[str]:
        """Return the names in the record. If a folder has checkpoints but no record, the run was copied in part: then
        return the names of the files that every run writes."""
        if record := read_record(self.path / RECORD):
            written = record.get("written")
            return {name for name in written if is_inside(name)} if isinstance(written, list) else set()
        return NAMES if any((self.path / CHECKPOINTS).glob(f"update_????????/{MANIFEST}")) else set()

    def add(self, names: Iterable[str], begun_at: int | None = None) -> None:
        """Add names to the record, and flush it to the disk."""
        before = read_record(self.path / RECORD)
        record = {
            "begun_at": self.begun_at if begun_at is None else begun_at,
            "written": sorted(self.names.union(names)),
        }
        if record != before:
            with atomic_file(self.path / RECORD) as file:
                file.write(json.dumps(record, indent=1) + "\n")

    def foreign(self, in_checkpoints: bool) -> Iterator[str]:
        """Yield the names of files and links that no run has written; those in checkpoints/ only if asked for."""
        names = self.names
        checkpoints = self.path / CHECKPOINTS
        sealed = {path.parent.name: sealed_files(path.parent) for path in checkpoints.glob(f"*/{MANIFEST}")}
        for name in files_below(self.path, self.path):
            path = self.path / name
            (top, *below) = name.split("/")
            plain, is_temporary = _plain(top)
            if not below:
                names_of_runs = {*names, RECORD, LOCK, *(NAMES if is_temporary else ())}
                # A launch that failed before it was a run has left its exit code.
                left_by_a_launch = name == "environment.json" and "exit_code" in read_record(path)
                is_ours = path.is_file() and not path.is_symlink() and (plain in names_of_runs or left_by_a_launch)
            elif top != CHECKPOINTS:
                is_ours = name in names or f"{plain}/" in names or (is_temporary and plain == MODEL)
            elif len(below) == 1:
                is_link = path.is_symlink() and _plain(below[0])[0] in LINKS
                is_ours = is_link and bool(UPDATE.fullmatch(os.readlink(path)))
            elif (files := sealed.get(below[0])) is not None:
                is_ours = "/".join(below[1:]) in files
            else:  # an unfinished checkpoint, or one with a damaged manifest
                is_ours = bool(names) and bool(UPDATE.fullmatch(_plain(below[0])[0].removesuffix(".partial")))
            if not is_ours and (in_checkpoints or top != CHECKPOINTS or not below):
                yield name

    def remove(self, chosen: Iterable[str]) -> None:
        """Remove those of these files that the record names, empty folders, and temporary files that a kill left."""
        for name in self.names.intersection(chosen):
            path = self.path / name
            if path.is_file() and not any(folder.is_symlink() for folder in (path, *path.parents[: name.count("/")])):
                path.unlink()
        remove_empty(self.path / MODEL)
        for path in self.path.glob("*.partial"):
            match = TEMPORARY_NAME.fullmatch(path.name)
            if match and match["name"] in {*self.names, RECORD, MODEL}:
                remove(path)


def _plain(name: str) -> tuple[str, bool]:
    """Return (the final name of a file or folder, True if its present name is a temporary one)."""
    temporary = TEMPORARY_NAME.fullmatch(name)
    return (temporary["name"], True) if temporary else (name, False)


def sealed_files(checkpoint: Path) -> set[str] | None:
    """Return the files that a checkpoint's manifest names, and the manifest; None if it cannot be read."""
    files = read_record(checkpoint / MANIFEST).get("files")
    return {*files, MANIFEST} if isinstance(files, dict) else None


def files_below(folder: Path, root: Path) -> Iterator[str]:
    """Yield the names, relative to `root`, of all files and symbolic links in a folder. No link is followed."""
    for below, folders, files in os.walk(folder):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(below, name))]
        yield from (Path(below, name).relative_to(root).as_posix() for name in sorted([*files, *links]))


def remove_empty(folder: Path) -> None:
    """Remove a folder and its subfolders, except those that hold files."""
    for below, _, _ in () if folder.is_symlink() else os.walk(folder, topdown=False):
        if not os.listdir(below):
            os.rmdir(below)


def is_inside(name: Any) -> bool:
    """Return True if a name lies inside the record's folder. A record may come from an untrusted source."""
    path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath("/")
    return not path.is_absolute() and ".." not in path.parts


SHOWN = 3  # in a message
STARTED_TWICE = (
    "Wait for its end, or end it. If a launcher has started this run several times, start it once on each machine "
    "(srun --ntasks-per-node=1, mpirun --map-by ppr:1:node, a Job with parallelism: 1): `zerofit launch` starts a "
    "process on each accelerator. Or give each run an --output_dir of its own"
)
# The field of strategy.yaml with the number of data-parallel processes for which the options give the global batch.
GIVEN_FOR = "options_given_for"


class RunFolder:
    """The folder of one run: recipe.yaml, strategy.yaml, environment.json, metrics.jsonl, loss.png, checkpoints/ and
    model/; samples.jsonl with --record_samples, anomalies.jsonl after an anomaly. `option`: its name in messages."""

    def __init__(self, path: str | Path, option: str = "output_dir"):
        self.path = Path(path)
        self.option = option
        self.model = self.path / MODEL
        self.metrics = JsonlFile(self.path / "metrics.jsonl", line_of_metrics)
        self.samples = JsonlFile(self.path / "samples.jsonl")
        self.anomalies = JsonlFile(self.path / "anomalies.jsonl")
        self.written = WrittenFiles(self.path)
        self.missing: dict[str, str] = {}  # {key: what could not be written, and why}
        self._lock: io.FileIO | None = None

    def recorded(self) -> dict[str, Any] | None:
        """Return the options of the run in the folder, and the number of processes that they were given for; None if
        it made no update of its own, or recipe.yaml cannot be read."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output_dir = {str(self.path)!r} is a file. Choose a folder")
        options = read_record(self.path / "recipe.yaml")
        if not options or not self.has_updates():
            return None
        given_for = read_record(self.path / "strategy.yaml").get(GIVEN_FOR)
        return {**options, GIVEN_FOR: given_for} if is_count(given_for) else options

    def refuse_foreign_files(self, overwrite: bool, in_checkpoints: bool = True) -> None:
        """Check that no foreign file is in the way of a run, and that the folder is empty if it has no run yet,
        unless `overwrite` is set. `in_checkpoints`: look into checkpoints/ as well, since the run starts over. Raises
        UserError: it names the first files."""
        foreign = self.written.foreign(in_checkpoints)
        stays = overwrite or bool(self.written.names)
        names = list(islice(filter(_is_in_the_way, foreign) if stays else foreign, SHOWN + 1))
        if names:
            more = " and more" if len(names) > SHOWN else ""
            or_keep = "" if any(map(_is_in_the_way, names)) else ", or keep them with --overwrite_output_dir"
            raise UserError(
                f"{self.option} = {str(self.path)!r} holds what no run has written: {', '.join(names[:SHOWN])}{more}. "
                f"Choose another --{self.option}, or move these away{or_keep}"
            )

    def refuse_a_different_run(self, differing: list[str]) -> None:
        """Raise UserError: the folder holds another run than this one."""
        other_options = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise UserError(
            f"output_dir = {str(self.path)!r} holds a different run: {'; '.join(differing[:5])}{other_options}. "
            "Choose another --output_dir, or replace that run with --overwrite_output_dir"
        )

    @property
    def is_finished(self) -> bool:
        """Return True if the run in the folder is finished."""
        return self.model.is_dir() and self.environment().get("finished") is True

    def environment(self) -> dict[str, Any]:
        """Return environment.json, without an exit code that is not a number; empty if it is absent."""
        content = read_record(self.path / "environment.json")
        if type(content.get("exit_code", 0)) is not int:
            del content["exit_code"]
        return content

    def lock(self) -> None:
        """Lock the folder against other launches while this process lives. Raises UserError: another launch has locked
        it, or the folder cannot be written."""
        if self._lock is not None or not self.path.is_dir():
            return
        try:
            file = os.fdopen(open_without_links(self.path / LOCK, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
        except OSError as error:
            raise UserError(f"{self.option} = {str(self.path)!r} cannot be written: {error.strerror}") from None
        with contextlib.suppress(OSError):  # not every file system has such locks
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                who = file.read().decode(errors="replace").strip()
                raise UserError(
                    f"{self.option} = {str(self.path)!r}: another run is at work there ({who}). {STARTED_TWICE}"
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} of {platform.node()}\n".encode())
        self._lock = file

    def has_updates(self) -> bool:
        """Return True if the run in the folder has made an update itself, besides those of a run that it resumed."""
        begun_at = self.written.begun_at
        return any(line["update"] > begun_at for line in self.metrics.read())

    def start(
        self,
        recipe: TrainingRecipe,
        global_batch: int,
        strategy: dict[str, Any],
        environment: dict[str, Any],
        updates: int = 0,
        *,
        resumed_from: Path | None = None,
    ) -> None:
        """Write what the run is, and start its record, or continue it after `updates` updates. Raises UserError: the
        folder cannot be written. `environment` gets `resumed_after`: the updates after which launches of this run have
        resumed it. `resumed_from`: the folder of the run that is resumed: this one, or another whose record is copied.
        """
        with self.writing():
            if updates:
                earlier = read_record((resumed_from or self.path) / "environment.json").get("resumed_after")
                marks = earlier if isinstance(earlier, list) else []
                environment["resumed_after"] = [
                    *(mark for mark in marks if type(mark) is int and mark < updates),
                    updates,
                ]
            self._clear(updates, resumed_from)
            self._describe({**recipe.to_dict(), **identity_options(recipe, global_batch)}, strategy, environment)
            self.metrics.start(updates)
            if recipe.record_samples:
                self.samples.start(updates)

    def start_answers(self, options: dict[str, Any], strategy: dict[str, Any], environment: dict[str, Any]) -> None:
        """Start the record of a launch without training; it replaces that of an earlier one. Raises UserError: the
        folder cannot be written."""
        with self.writing():
            self._clear(0, None)
            self._describe(options, strategy, environment)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Make and lock the folder. Raises UserError if writing fails within the block."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            yield
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            raise UserError(f"{self.option} = {str(self.path)!r} cannot be written: {why}") from None

    def _describe(self, options: dict[str, Any], strategy: dict[str, Any], environment: dict[str, Any]) -> None:
        self._write("recipe.yaml", yaml.safe_dump(options, sort_keys=False, allow_unicode=True))
        self._write("strategy.yaml", yaml.safe_dump(json.loads(json.dumps(strategy)), sort_keys=False))
        earlier = self.environment()  # another rank may have failed meanwhile (zerofit/launch/exit_code.py)
        failure: dict[str, Any] = {name: earlier[name] for name in ("exit_code", "exit_reason") if name in earlier}
        self.write_environment({**environment, **failure})

    def _clear(self, updates: int, resumed_from: Path | None) -> None:
        """Remove the files of the earlier run, except checkpoints and the record that this run continues."""
        written = self.written.names
        for lines in (self.metrics, self.samples, self.anomalies):
            lines.close()
        if resumed_from is not None and resumed_from.resolve() == self.path.resolve():
            self.written.remove(name for name in written if name.startswith(f"{MODEL}/") or name.endswith(".png"))
            self.written.add(NAMES)
            return
        self.written.remove(written)
        self.written.add(NAMES, begun_at=updates)
        for lines in (self.metrics, self.samples):
            if resumed_from is not None and (resumed_from / lines.path.name).is_file():
                with atomic_file(lines.path, "wb") as file:
                    file.write((resumed_from / lines.path.name).read_bytes())

    def write_environment(self, environment: dict[str, Any]) -> None:
        """Replace environment.json. On a full disk it is removed first: how a run ends must find room, and an old exit
        code may not stay."""
        text = json.dumps(environment, indent=2) + "\n"
        try:
            self._write("environment.json", text)
        except OSError:
            (self.path / "environment.json").unlink(missing_ok=True)
            self._write("environment.json", text)

    def write_predictions(self, rows: Iterable[dict[str, Any]], suffix: str = "") -> None:
        """predictions.jsonl of the latest evaluation, one held-out example a line, in the order of the data. Where the
        disk does not take it, that is in `missing`, and those before it are gone: no training ends for it."""
        name = f"predictions{suffix}.jsonl"
        self.missing.pop(name, None)
        try:
            with self.new_file(name) as file:
                file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        except OSError as error:
            self.note_missing(name, error)
            with contextlib.suppress(OSError):
                (self.path / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """The context in which a file is written: where that fails, `missing` has the file and why, and the run goes
        on."""
        self.missing.pop(name, None)
        try:
            yield
        except Exception as error:
            self.note_missing(name, error)

    def note_missing(self, name: str, error: Exception) -> None:
        """Take down that a file could not be written, and why."""
        if not is_disk_error(error):
            traceback.print_exception(error)
        self.missing[name] = f"{name} ({first_line(error)})"

    def predictions(self, suffix: str = "", fields: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Read predictions.jsonl, of this launch or of an earlier one: the lines that have these fields."""
        rows = JsonlFile(self.path / f"predictions{suffix}.jsonl", parse_object).read()
        return [row for row in rows if row.keys() >= set(fields)]

    def claim(self, name: str) -> None:
        """Note that a file of this name is the run's. Raises UserError: there is one which no run has written."""
        if name not in self.written.names and os.path.lexists(self.path / name):
            raise UserError(f"{self.path / name} was written by no run, and is not replaced. Move it away")
        self.written.add([name])

    @contextlib.contextmanager
    def new_file(self, name: str, mode: str = "w") -> Iterator[IO[Any]]:
        """Open a file of the run; it replaces an earlier one at the end of the block. Raises UserError: no run has
        written the file that has this name."""
        self.claim(name)
        with atomic_file(self.path / name, mode) as file:
            yield file

    @contextlib.contextmanager
    def new_model(self, below: str = "") -> Iterator[Path]:
        """Make a temporary folder to write model/ (or a folder below it) in; it gets its name at the end of the block,
        so that a folder of this name always has complete weights."""
        folder = self.model / below
        partial = temporary_path(self.model)
        try:
            partial.mkdir(parents=True)
            yield partial
            for file in (path for path in partial.rglob("*") if path.is_file()):
                sync(file)
            with contextlib.suppress(OSError):  # no room for the names: no reason to lose the weights
                self.written.add(
                    (folder / name).relative_to(self.path).as_posix() for name in files_below(partial, partial)
                )
            partial.rename(folder)
            sync(folder.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                remove(partial)
            raise

    def _write(self, name: str, text: str) -> None:
        with atomic_file(self.path / name) as file:
            file.write(text)


def _is_in_the_way(name: str) -> bool:
    """Return True if a run would have to replace this file, or write through this link."""
    is_checkpoint = re.match(rf"{CHECKPOINTS}/(update_\d{{8}}|(best|latest)$)", name)
    return name in {*NAMES, LOCK, CHECKPOINTS} or name.partition("/")[0] == MODEL or bool(is_checkpoint)


def is_count(value: Any) -> bool:
    """Return True if a value of the record is a whole number above 0."""
    return type(value) is int and value > 0


def check_folder_of(output: Path, file: str, noun: str) -> None:
    """Check that a tool's folder is empty, or holds an earlier `noun`, identified by its `file`. Raises UserError: it
    holds something else."""
    if output.exists() and not output.is_dir():
        raise UserError(f"output = {str(output)!r} is a file. Name a folder")
    if output.is_dir() and any(output.iterdir()) and not (output / file).is_file():
        raise UserError(f"output = {str(output)!r} holds something else than an earlier {noun}. Name another folder")


def evident_differences(recipe: Recipe, recorded: dict[str, Any]) -> list[str]:
    """Return the differing options that a recipe sets. Options that it leaves open do not count: the strategy sets
    them later."""
    left_open = {name for name, value in recipe.to_dict().items() if value is None}
    differing = differing_options(identity_options(recipe, recorded.get("global_batch_size")), recorded)
    return [text for text in differing if text.split()[0] not in left_open]


def differing_options(now: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """Return the identity options in which a run differs from a recorded one, each with both values."""
    names = [name for name in now if name in recorded and recorded[name] != now[name]]
    return [f"{name} was {recorded[name]!r}, now {now[name]!r}" for name in names]


def identity_options(recipe: Recipe, global_batch: int | None) -> dict[str, Any]:
    """Return the options that identify a run: if one of them changes, it is a different run."""
    names = recipe.names_with(identity=True)
    options = recipe.to_dict()
    return {**{name: options[name] for name in names}, "global_batch_size": global_batch}
