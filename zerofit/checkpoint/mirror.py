"""Copies a run's checkpoints and results to an object store, and brings them back where the output folder is lost.

A thread of the main process copies; training never waits for it, and what the store does not take is tried again. A
checkpoint in the store that this run did not put there is another run's: then nothing more is written.

s3://bucket/run/
  recipe.yaml, metrics.jsonl, ..., model/   as in the run's folder
  checkpoints/update_00000100/              as there; the manifest is written last, and is removed first
"""

import contextlib
import json
import threading
import time
from pathlib import Path

from fsspec.implementations.dirfs import DirFileSystem

from zerofit.checkpoint.directory import MIN_CHECKPOINTS, STATE, CheckpointDirectory, find_damage
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import atomic_file, counted, parse_object, remove, temporary_path
from zerofit.recipe.options import TrainingRecipe
from zerofit.recipe.paths import open_address
from zerofit.record.run_folder import (
    CHECKPOINTS,
    MANIFEST,
    MODEL,
    RECORD,
    UPDATE,
    RunFolder,
    evident_differences,
    files_below,
    is_inside,
)
from zerofit.record.terminal import log_lines

RETRY_S = 30.0  # between two attempts while the store fails
RETRY_AT_START_S = 10.0
OUTAGE_S = 600.0  # the store is tried so long, where nothing is known of the run without it
FINISH_S = 600.0  # at the end of a run
# What every run writes, in the order in which it is copied.
RESULTS = (
    "recipe.yaml", "strategy.yaml", RECORD, "metrics.jsonl", "samples.jsonl", "stream.jsonl", "anomalies.jsonl",
    "environment.json", "loss.png",
)  # fmt: skip
# Of boto, Google's and Azure's libraries, of which any may be missing.
NO_CREDENTIALS = ("NoCredentialsError", "DefaultCredentialsError", "ClientAuthenticationError")


class MirrorStore:
    """The files at one address, such as s3://bucket/run. Its methods raise whatever the store raises. Raises
    UserError: nothing is known of such addresses, or a package is missing."""

    def __init__(self, address: str):
        self.address = address
        files, root = open_address("mirror", address)
        self.files = DirFileSystem(root, files)

    def put(self, source: Path | bytes, name: str) -> None:
        """Write a file. Raises OSError where it has not arrived whole."""
        if isinstance(source, bytes):
            self.files.pipe_file(name, source)
        else:
            self.files.put_file(str(source), name)
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        self.files.invalidate_cache()
        if (there := self.files.size(name)) != size:
            raise OSError(f"{name} has {size:,} bytes, and {there:,} have arrived")

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        with contextlib.suppress(FileNotFoundError):
            content: bytes = self.files.cat_file(name)
            return content
        return None

    def remove(self, name: str) -> None:
        """Remove a folder; of a checkpoint the manifest first, so that what a kill leaves is not a checkpoint."""
        for path in (f"{name}/{MANIFEST}", name):
            self.files.invalidate_cache()
            if self.files.exists(path):
                self.files.rm(path, recursive=True)

    def checkpoints(self) -> dict[str, bytes | None]:
        """{name: manifest} of the checkpoints, the newest first; None: it is only half there."""
        self.files.invalidate_cache()
        try:
            places = self.files.ls(CHECKPOINTS, detail=False)
        except FileNotFoundError:
            return {}
        names = sorted(filter(UPDATE.fullmatch, (Path(place).name for place in places)), reverse=True)
        manifests = {name: self.read(f"{CHECKPOINTS}/{name}/{MANIFEST}") for name in names}
        return {name: manifest if files_of(manifest) else None for name, manifest in manifests.items()}


def files_of(manifest: bytes | None) -> list[str]:
    """The files that a manifest names; none where it cannot be read."""
    files = (parse_object(manifest or b"") or {}).get("files")
    return list(files) if isinstance(files, dict) and all(map(is_inside, files)) else []


def reason(error: Exception) -> str:
    """The reason of a store's error, for a message."""
    return f"{type(error).__name__}: {first_line(error)}"


class Mirror:
    """The mirror of one run, on its main process."""

    def __init__(self, store: MirrorStore):
        self.store = store
        self._wanted = threading.Event()
        self._ending = threading.Event()
        self._messages: list[str] = []
        self._is_reported = False
        self._made: set[str] = set()  # names of checkpoints
        self._mirrored: set[str] = set()  # those of them that are in the store
        self._known: set[bytes] | None = None  # manifests of ours and of an earlier launch; None: not looked yet
        self._sent: dict[tuple[str, bytes], set[str]] = {}  # {(name, manifest): files that are in the store}
        self._thread: threading.Thread | None = None

    def start(self, folder: Path, directory: CheckpointDirectory, updates: int) -> None:
        """Copy the checkpoints of this folder from now on. Those in the store that are of later updates than `updates`
        are removed, as in the folder; -1: all are."""
        self._folder = folder
        self._directory = directory
        self._updates = updates
        directory.finished.append(self.wake)
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()
        self._wanted.set()

    def wake(self, folder: Path) -> None:
        """Copy a checkpoint, which is complete."""
        self._made.add(folder.name)
        self._mirrored.discard(folder.name)
        self._wanted.set()

    def messages(self) -> list[str]:
        """Lines for the log since the last call."""
        messages = self._messages
        self._messages = []
        return messages

    def finish(self) -> list[str]:
        """Copy what is left, for a limited time. Returns lines for the log. Never fails."""
        self._ending.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(FINISH_S)
            if self._thread.is_alive():
                self._report(f"it was not ready {FINISH_S / 60:g} minutes after training")
        number = counted(len(self._mirrored), "checkpoint")
        missing = len(self._made - self._mirrored)
        return [*self.messages(), f"mirror      {number} mirrored, {missing} not: {self.store.address}"]

    def _work(self) -> None:
        pause_s: float | None = None
        while True:
            self._wanted.wait(pause_s)
            self._wanted.clear()
            is_last = self._ending.is_set()
            try:
                if not self.copy(is_last):
                    self._messages.append(
                        f"warning   {self.store.address}: another run writes there, and this one no more"
                    )
                    return
            except Exception as error:  # each store has its own, and none may end the training
                self._report(reason(error))
                pause_s = RETRY_S
                continue
            self._is_reported = False
            pause_s = None
            if is_last:
                return

    def _report(self, why: str) -> None:
        """Report once that the store fails, until it works again."""
        if not self._is_reported:
            self._messages.append(
                f"warning   {self.store.address} cannot be written ({why}): training continues, and it is tried again"
            )
        self._is_reported = True

    def copy(self, is_last: bool) -> bool:
        """Copy all that is not in the store, and remove there what is no longer in the folder. Returns False where a
        checkpoint is there that neither this run nor an earlier launch of it has written. Raises what the store
        raises."""
        there = self.store.checkpoints()
        if self._known is None:
            for name in there:
                if name > self._directory.folder(self._updates).name:
                    self.store.remove(f"{CHECKPOINTS}/{name}")
            self.store.remove(MODEL)
            there = self.store.checkpoints()
            self._known = set(filter(None, there.values()))
        if not self._known.issuperset(filter(None, there.values())):
            return False
        for name in RESULTS:
            with contextlib.suppress(FileNotFoundError):
                self.store.put((self._folder / name).read_bytes(), name)
        for folder in self._directory.folders():
            with self._directory.reading(folder):  # it stays in the folder meanwhile
                self._copy_checkpoint(folder, there.get(folder.name))
        kept = {folder.name for folder in self._directory.folders()}
        whole = 0
        for name, manifest in self.store.checkpoints().items():
            whole += manifest is not None  # of those that are no longer in the folder the newest whole ones stay
            if name not in kept and (manifest is None or whole > MIN_CHECKPOINTS):
                self.store.remove(f"{CHECKPOINTS}/{name}")
        for name in files_below(self._folder / MODEL, self._folder) if is_last else ():
            self.store.put(self._folder / name, name)
        return True

    def _copy_checkpoint(self, folder: Path, there: bytes | None) -> None:
        """Copy a checkpoint, the manifest last, unless it is in the store: then its manifest is `there`."""
        assert self._known is not None, "of a store that was looked at"
        name = folder.name
        place = f"{CHECKPOINTS}/{folder.name}"
        manifest = _manifest(folder)
        if manifest is None:
            return  # it is gone
        self._made.add(name)
        if there != manifest:
            if (name, manifest) not in self._sent:
                self.store.remove(place)  # what a killed run has left
            sent = self._sent.setdefault((name, manifest), set())
            for each in files_of(manifest):
                if each not in sent:
                    self.store.put(folder / each, f"{place}/{each}")
                    sent.add(each)
            if _manifest(folder) != manifest:
                return  # it was written again meanwhile, and this wakes the thread
            self._known.add(manifest)
            self.store.put(manifest, f"{place}/{MANIFEST}")
        self._mirrored.add(name)


def _manifest(folder: Path) -> bytes | None:
    """The manifest of a checkpoint on the disk; None: it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / MANIFEST).read_bytes()
    return None


# ------------------------------------------------------------------------------------------------------- bringing back


def open_mirror(recipe: TrainingRecipe, folder: RunFolder) -> tuple[Mirror, list[str]]:
    """The mirror of a run, and notes for the log; what the folder lacks is in it. Raises UserError: the store refuses,
    or a package is missing; it has another run, or one that would be deleted; its checkpoints are all damaged; the
    folder has files of somebody else. Raises ConnectionError: it cannot be reached, and there is nothing to resume
    from without it."""
    assert recipe.mirror is not None, "of a run with a mirror"
    mirror = Mirror(MirrorStore(recipe.mirror))
    until = time.monotonic() + OUTAGE_S
    is_reported = False
    while True:
        try:
            return mirror, _restore(mirror.store, recipe, folder)
        except UserError:
            raise
        except Exception as error:  # each store has its own
            if isinstance(error, PermissionError) or type(error).__name__ in NO_CREDENTIALS:
                raise UserError(f"mirror = {recipe.mirror!r} cannot be used: {reason(error)}") from None
            failed = f"{recipe.mirror} cannot be read ({reason(error)})"
            if any(CheckpointDirectory(folder.path / CHECKPOINTS).resumable()):
                return mirror, [f"warning   {failed}: it is tried again"]
            if time.monotonic() > until:
                raise ConnectionError(f"mirror: {failed}, and may have checkpoints of this run") from None
            if not is_reported:
                log_lines(
                    f"warning   {failed}, and may have checkpoints of this run: tried for {OUTAGE_S / 60:.0f} minutes"
                )
            is_reported = True
            time.sleep(RETRY_AT_START_S)


def _restore(store: MirrorStore, recipe: TrainingRecipe, folder: RunFolder) -> list[str]:
    """Bring back the newest whole checkpoint, where the folder has none or only earlier ones, and the run's record.
    Returns notes for the log. Raises as open_mirror, and whatever the store raises."""
    directory = CheckpointDirectory(folder.path / CHECKPOINTS)
    newest = next(directory.resumable(), None)
    there = store.checkpoints()
    candidates = [name for name, manifest in there.items() if manifest and (newest is None or name > newest.name)]
    if not candidates:
        return []
    differing = evident_differences(recipe, parse_object(store.read("recipe.yaml") or b"", is_yaml=True) or {})
    if recipe.resume != "auto" or differing:
        if newest is None and not recipe.overwrite_output_dir:
            what = f"a different run: {'; '.join(differing[:5])}" if differing else "checkpoints of this run"
            raise UserError(
                f"mirror = {store.address!r} holds {what}, and this run would start over. Choose another --mirror, or "
                "delete what is there with --overwrite_output_dir"
            )
        return []
    if evident_differences(recipe, folder.recorded() or {}):
        return []  # which is refused later, or replaced
    folder.refuse_foreign_files(recipe.overwrite_output_dir)
    notes: list[str] = []
    for name in candidates:
        if not any(file.startswith(f"{STATE}/") for file in files_of(there[name])):
            continue
        problem = _bring(store, directory, name, there[name])
        if problem is None:
            for file in RESULTS[:-2]:  # the rest is made again
                if (content := store.read(file)) is not None:
                    with atomic_file(folder.path / file, "wb") as written:
                        written.write(content)
            progress = json.loads((directory.path / name / STATE / "progress.json").read_text())
            if (best := progress["best"]["update"]) is not None:  # as of this checkpoint
                best_name = directory.folder(best).name
                if best_name == name or _bring(store, directory, best_name, there.get(best_name)) is None:
                    directory.point(directory.best, directory.folder(best))
            return [*notes, f"mirror    {name} is brought back from {store.address}"]
        notes.append(f"warning   {store.address}/{CHECKPOINTS}/{name} is not used: {problem}")
    if notes and newest is None and not recipe.overwrite_output_dir:
        raise UserError(
            [note.removeprefix("warning   ") for note in notes]
            + [f"mirror = {store.address!r}: no checkpoint can be used. Start over with --overwrite_output_dir"]
        )
    return notes


def _bring(store: MirrorStore, directory: CheckpointDirectory, name: str, manifest: bytes | None) -> str | None:
    """Download a checkpoint. Returns what is wrong with it; None if it is whole, and in its place."""
    partial = temporary_path(directory.path / name)
    try:
        for file in (MANIFEST, *files_of(manifest)):
            (partial / file).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                store.files.get_file(f"{CHECKPOINTS}/{name}/{file}", str(partial / file))
        if (problem := find_damage(partial)) is None:
            directory.take_in(partial, name)
        return problem
    finally:
        if partial.exists():
            remove(partial)
