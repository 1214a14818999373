"""The mirror of a run in an object store: its checkpoints and results, from which a lost output folder is restored.

A thread of the main process copies; training never waits for it, and a failed copy is tried again. If the store has a
checkpoint that this run did not write, another run writes there: then this one stops copying.

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

from zerofit.checkpoint.directory import MIN_CHECKPOINTS, PROGRESS_FILE, STATE_FOLDER, CheckpointDirectory, find_damage
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
MAX_OUTAGE_S = 600.0  # how long a run without a checkpoint on the disk waits for the store when it starts
MIRROR_TIMEOUT_S = 600.0  # at the end of a run
# The files that every run writes, in the order in which they are copied.
RESULT_FILES = (
    "recipe.yaml",
    "strategy.yaml",
    RECORD,
    "metrics.jsonl",
    "samples.jsonl",
    "stream.jsonl",
    "anomalies.jsonl",
    "environment.json",
    "loss.png",
)
# The errors' names in the libraries of Amazon, Google and Azure, any of which may be missing.
CREDENTIAL_ERRORS = ("NoCredentialsError", "DefaultCredentialsError", "ClientAuthenticationError")


class MirrorStore:
    """The files at one address, such as s3://bucket/run. Its methods raise the store's own errors. Raises UserError:
    addresses of this kind are not supported, or a package is missing."""

    def __init__(self, address: str):
        self.address = address
        files, root = open_address("mirror", address)
        self.files = DirFileSystem(root, files)

    def put(self, source: Path | bytes, name: str) -> None:
        """Write a file: the content of `source`, a file on the disk or bytes. Raises OSError: it arrived cut."""
        if isinstance(source, bytes):
            self.files.pipe_file(name, source)
        else:
            self.files.put_file(str(source), name)
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        self.files.invalidate_cache()
        if (stored_bytes := self.files.size(name)) != size:
            raise OSError(f"{name} has {size:,} bytes, and {stored_bytes:,} have arrived")

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it is missing."""
        with contextlib.suppress(FileNotFoundError):
            return bytes(self.files.cat_file(name))
        return None

    def remove(self, name: str) -> None:
        """Remove a folder. A checkpoint's manifest is removed first, so that a kill leaves no valid checkpoint."""
        for path in (f"{name}/{MANIFEST}", name):
            self.files.invalidate_cache()
            if self.files.exists(path):
                self.files.rm(path, recursive=True)

    def checkpoints(self) -> dict[str, bytes | None]:
        """Return {name: manifest} of the checkpoints, the newest first; the manifest of an incomplete one is None."""
        self.files.invalidate_cache()
        try:
            paths = self.files.ls(CHECKPOINTS, detail=False)
        except FileNotFoundError:
            return {}
        names = sorted(filter(UPDATE.fullmatch, (Path(path).name for path in paths)), reverse=True)
        manifests = {name: self.read(f"{CHECKPOINTS}/{name}/{MANIFEST}") for name in names}
        return {name: manifest if manifest_files(manifest) else None for name, manifest in manifests.items()}


def manifest_files(manifest: bytes | None) -> list[str]:
    """Return the files that a manifest names; an empty list if it cannot be read."""
    files = (parse_object(manifest or b"") or {}).get("files")
    return list(files) if isinstance(files, dict) and all(map(is_inside, files)) else []


def error_reason(error: Exception) -> str:
    """Return the type and the first line of an error, for a message."""
    return f"{type(error).__name__}: {first_line(error)}"


class Mirror:
    """The copying of one run to a store, by a thread of its main process."""

    def __init__(self, store: MirrorStore):
        self.store = store
        self._wanted = threading.Event()
        self._ending = threading.Event()
        self._messages: list[str] = []
        self._is_reported = False
        self._made: set[str] = set()  # names of this run's checkpoints
        self._mirrored: set[str] = set()  # those of them that are in the store
        self._known_manifests: set[bytes] | None = None  # of this launch and earlier ones; None: not listed yet
        self._sent: dict[tuple[str, bytes], set[str]] = {}  # {(name, manifest): files that are in the store}
        self._thread: threading.Thread | None = None

    def start(self, directory: CheckpointDirectory, updates: int) -> None:
        """Copy the run's folder with these checkpoints from now on. Checkpoints in the store whose update is later
        than `updates` are removed, as in the folder; -1: all are removed."""
        self._folder = directory.path.parent
        self._directory = directory
        self._updates = updates
        directory.finished.append(self.wake)
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()
        self._wanted.set()

    def wake(self, folder: Path) -> None:
        """Let the thread copy a complete checkpoint."""
        self._made.add(folder.name)
        self._mirrored.discard(folder.name)
        self._wanted.set()

    def messages(self) -> list[str]:
        """Return the lines for the log since the last call."""
        messages = self._messages
        self._messages = []
        return messages

    def finish(self) -> list[str]:
        """Copy the remaining files, for a limited time. Returns lines for the log. Never fails."""
        self._ending.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(MIRROR_TIMEOUT_S)
            if self._thread.is_alive():
                self._report(f"it was not ready {MIRROR_TIMEOUT_S / 60:g} minutes after training")
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
                self._report(error_reason(error))
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
        """Copy all that is not in the store, and remove there what is no longer in the folder. Returns False if the
        store has a checkpoint that no launch of this run has written. Raises the store's own errors."""
        stored = self.store.checkpoints()
        if self._known_manifests is None:
            for name in stored:
                if name > self._directory.folder(self._updates).name:
                    self.store.remove(f"{CHECKPOINTS}/{name}")
            self.store.remove(MODEL)
            stored = self.store.checkpoints()
            self._known_manifests = set(filter(None, stored.values()))
        if not self._known_manifests.issuperset(filter(None, stored.values())):
            return False
        for name in RESULT_FILES:
            with contextlib.suppress(FileNotFoundError):
                self.store.put((self._folder / name).read_bytes(), name)
        for folder in self._directory.folders():
            with self._directory.reading(folder):  # it stays in the folder meanwhile
                self._copy_checkpoint(folder, stored.get(folder.name))
        local_names = {folder.name for folder in self._directory.folders()}
        num_complete = 0
        for name, manifest in self.store.checkpoints().items():
            num_complete += manifest is not None  # the newest complete ones stay, even if the folder lacks them
            if name not in local_names and (manifest is None or num_complete > MIN_CHECKPOINTS):
                self.store.remove(f"{CHECKPOINTS}/{name}")
        for name in files_below(self._folder / MODEL, self._folder) if is_last else ():
            self.store.put(self._folder / name, name)
        return True

    def _copy_checkpoint(self, folder: Path, stored_manifest: bytes | None) -> None:
        """Copy a checkpoint, the manifest last. `stored_manifest`: of the copy in the store; None: there is none."""
        assert self._known_manifests is not None, "after the store was listed"
        name = folder.name
        address = f"{CHECKPOINTS}/{name}"
        manifest = _read_manifest(folder)
        if manifest is None:
            return
        self._made.add(name)
        if stored_manifest != manifest:
            if (name, manifest) not in self._sent:
                self.store.remove(address)  # files that a killed run has left
            sent = self._sent.setdefault((name, manifest), set())
            for file in manifest_files(manifest):
                if file not in sent:
                    self.store.put(folder / file, f"{address}/{file}")
                    sent.add(file)
            if _read_manifest(folder) != manifest:
                return  # it was written again meanwhile, which wakes the thread
            self._known_manifests.add(manifest)
            self.store.put(manifest, f"{address}/{MANIFEST}")
        self._mirrored.add(name)


def _read_manifest(folder: Path) -> bytes | None:
    """Return the manifest of a checkpoint on the disk; None if the checkpoint was removed."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / MANIFEST).read_bytes()
    return None


# ----------------------------------------------------------------------------------------------------------- restoring


def open_mirror(recipe: TrainingRecipe, folder: RunFolder) -> tuple[Mirror, list[str]]:
    """Restore what the folder lacks. Returns (the mirror of the run, notes for the log). Raises UserError: the store
    denies access, or a package is missing; it has another run, or one that would be deleted; all its checkpoints are
    damaged; the folder has foreign files. Raises ConnectionError: the store cannot be reached, and the folder has no
    checkpoint to resume from."""
    assert recipe.mirror is not None, "of a run with a mirror"
    mirror = Mirror(MirrorStore(recipe.mirror))
    until = time.monotonic() + MAX_OUTAGE_S
    is_reported = False
    while True:
        try:
            return mirror, _restore(mirror.store, recipe, folder)
        except UserError:
            raise
        except Exception as error:  # each store has its own
            if isinstance(error, PermissionError) or type(error).__name__ in CREDENTIAL_ERRORS:
                raise UserError(f"mirror = {recipe.mirror!r} cannot be used: {error_reason(error)}") from None
            failure = f"{recipe.mirror} cannot be read ({error_reason(error)})"
            if any(CheckpointDirectory(folder.path / CHECKPOINTS).resumable()):
                return mirror, [f"warning   {failure}: it is tried again"]
            failure += ", and may have checkpoints of this run"
            if time.monotonic() > until:
                raise ConnectionError(f"mirror: {failure}") from None
            if not is_reported:
                log_lines(f"warning   {failure}: tried for {MAX_OUTAGE_S / 60:.0f} minutes")
            is_reported = True
            time.sleep(RETRY_AT_START_S)


def _restore(store: MirrorStore, recipe: TrainingRecipe, folder: RunFolder) -> list[str]:
    """Download the newest intact checkpoint if the folder has no checkpoint or an earlier one, and the run's record.
    Returns notes for the log. Raises the errors of open_mirror, and the store's own."""
    directory = CheckpointDirectory(folder.path / CHECKPOINTS)
    newest = next(directory.resumable(), None)
    stored = store.checkpoints()
    candidates = [name for name, manifest in stored.items() if manifest and (newest is None or name > newest.name)]
    if not candidates:
        return []
    differing = evident_differences(recipe, parse_object(store.read("recipe.yaml") or b"", is_yaml=True) or {})
    if recipe.resume != "auto" or differing:
        if newest is None and not recipe.overwrite_output_dir:
            content = f"a different run: {'; '.join(differing[:5])}" if differing else "checkpoints of this run"
            raise UserError(
                f"mirror = {store.address!r} holds {content}, and this run would start over. Choose another --mirror, "
                "or delete what is there with --overwrite_output_dir"
            )
        return []
    if evident_differences(recipe, folder.recorded() or {}):
        return []  # the folder's run is refused later, or replaced
    folder.refuse_foreign_files(recipe.overwrite_output_dir)
    notes: list[str] = []
    for name in candidates:
        if not any(file.startswith(f"{STATE_FOLDER}/") for file in manifest_files(stored[name])):
            continue
        problem = _download(store, directory, name, stored[name])
        if problem is None:
            for file in RESULT_FILES[:-2]:  # the others are written again
                if (data := store.read(file)) is not None:
                    with atomic_file(folder.path / file, "wb") as written:
                        written.write(data)
            progress = json.loads((directory.path / name / STATE_FOLDER / PROGRESS_FILE).read_text())
            if (best_update := progress["best"]["update"]) is not None:  # as of this checkpoint
                best = directory.folder(best_update)
                if best.name == name or _download(store, directory, best.name, stored.get(best.name)) is None:
                    directory.point_link(directory.best, best)
            return [*notes, f"mirror    {name} is brought back from {store.address}"]
        notes.append(f"warning   {store.address}/{CHECKPOINTS}/{name} is not used: {problem}")
    if notes and newest is None and not recipe.overwrite_output_dir:
        raise UserError(
            [note.removeprefix("warning   ") for note in notes]
            + [f"mirror = {store.address!r}: no checkpoint can be used. Start over with --overwrite_output_dir"]
        )
    return notes


def _download(store: MirrorStore, directory: CheckpointDirectory, name: str, manifest: bytes | None) -> str | None:
    """Download a checkpoint into the folder. Returns what is wrong with it; None if it is intact."""
    partial = temporary_path(directory.path / name)
    try:
        for file in (MANIFEST, *manifest_files(manifest)):
            (partial / file).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                store.files.get_file(f"{CHECKPOINTS}/{name}/{file}", str(partial / file))
        if (problem := find_damage(partial)) is None:
            directory.add_downloaded(partial, name)
        return problem
    finally:
        if partial.exists():
            remove(partial)
