"""Copies a run's checkpoints and results to an object store, in a thread of the main process.

Training never waits for it. What the store does not take is tried again; what is lost of that is said. A checkpoint in
the store that this run did not put there is another run's: then nothing more is written.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerofit.checkpoint.directory import AT_LEAST, MANIFEST, CheckpointDirectory
from zerofit.checkpoint.mirror_store import RESULTS, MirrorStore, files_of, reason
from zerofit.recipe.parsing import counted
from zerofit.record.written_files import CHECKPOINTS, MODEL, files_below

RETRY_S = 30.0  # between two attempts while the store fails
SILENCE_S = 600.0  # a call that takes longer is reported
FINISH_S = 600.0  # at the end of a run


class MirrorLost(Exception):
    """Another run writes to the same address."""


class Mirror:
    """The mirror of one run, on its main process.

    Args:
        store: where it is.
    """

    def __init__(self, store: MirrorStore):
        self.store = store
        self._wanted, self._ending = threading.Event(), threading.Event()
        self._messages: list[str] = []
        self._is_reported, self._busy_since = False, 0.0
        self._made: set[str] = set()  # names of checkpoints
        self._mirrored: dict[str, bytes] = {}  # {name: its manifest} of those that are in the store
        self._found: dict[str, bytes] | None = None  # the same of those that were there before; None: not looked yet
        self._sent: dict[tuple[str, bytes], set[str]] = {}  # files of those that are not complete there
        self._thread: threading.Thread | None = None

    def start(self, folder: Path, directory: CheckpointDirectory, updates: int) -> None:
        """Copy the checkpoints of this folder from now on.

        Args:
            updates: those in the store that are of a later one are removed, as in the folder; -1: all are.
        """
        self._folder, self._directory, self._updates = folder, directory, updates
        directory.finished.append(self.wake)
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()
        self._wanted.set()

    def wake(self, folder: Path) -> None:
        """A checkpoint is complete."""
        self._made.add(folder.name)
        self._wanted.set()

    def messages(self) -> list[str]:
        """What is to be said since the last call."""
        if self._busy_since and time.monotonic() - self._busy_since > SILENCE_S:
            self._report(f"no answer for {SILENCE_S / 60:.0f} minutes")
        messages, self._messages = self._messages, []
        return messages

    def finish(self, limit_s: float | None = None) -> list[str]:
        """Copy what is left, for a limited time. Returns lines for the log. Never fails."""
        limit_s = FINISH_S if limit_s is None else limit_s
        self._ending.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                self._report(f"it was not ready {limit_s / 60:g} minutes after training")
        missing = len(self._made - self._mirrored.keys())
        number = counted(len(self._made & self._mirrored.keys()), "checkpoint")
        return [*self.messages(), f"mirror      {number} mirrored, {missing} not: {self.store.address}"]

    # --------------------------------------------------------------------------------------------------------- copying

    def _work(self) -> None:
        pause_s: float | None = None
        while True:
            self._wanted.wait(pause_s)
            self._wanted.clear()
            is_last, self._busy_since = self._ending.is_set(), time.monotonic()
            try:
                self.copy(is_last)
            except MirrorLost:
                self._messages.append(
                    f"warning   {self.store.address}: another run writes there, and this one no more"
                )
                return
            except Exception as error:  # each store has its own, and none may end the training
                self._report(reason(error))
                pause_s = RETRY_S
            else:
                if self._is_reported:
                    self._messages.append(f"note      {self.store.address} can be written again")
                self._is_reported, pause_s = False, None
                if is_last:
                    return
            finally:
                self._busy_since = 0.0

    def _report(self, why: str) -> None:
        """Say once that the store fails, until it works again."""
        if not self._is_reported:
            self._messages.append(
                f"warning   {self.store.address} cannot be written ({why}): training continues, and it is tried again"
            )
        self._is_reported = True

    def copy(self, is_last: bool) -> None:
        """Copy all that is not in the store, and remove there what is no longer in the folder.

        Raises:
            MirrorLost: another run writes there.
            Exception: of the store.
        """
        self._check_owner()
        for name in RESULTS:
            with contextlib.suppress(FileNotFoundError):
                self._call(self.store.put, (self._folder / name).read_bytes(), name)
        for folder in self._directory.folders():
            self._copy_checkpoint(folder)
        self._drop()
        for name in files_below(self._folder / MODEL, self._folder) if is_last else ():
            self._call(self.store.put, self._folder / name, name)

    def _check_owner(self) -> None:
        """Remove what of an earlier run comes again, once; from then on see that nobody else adds a checkpoint."""
        if self._found is None:
            for name in self.store.checkpoints():
                if self._updates < 0 or name > self._directory.folder(self._updates).name:
                    self._call(self.store.remove, f"{CHECKPOINTS}/{name}")
            self._call(self.store.remove, MODEL)
            self._found = dict(self.store.manifests())
        for name, manifest in self.store.manifests():
            if manifest != self._found.get(name) and (name, manifest) not in self._sent:
                raise MirrorLost

    def _call(self, method: Callable[..., None], *args: Any) -> None:
        """Change the store."""
        self._busy_since = time.monotonic()
        method(*args)

    def _copy_checkpoint(self, folder: Path) -> None:
        """Copy a checkpoint, unless it is in the store. It stays in the folder meanwhile, and the manifest is last."""
        name, place = folder.name, f"{CHECKPOINTS}/{folder.name}"
        with self._directory.reading(folder):
            manifest = self._manifest(folder)
            if manifest is None or self._mirrored.get(name) == manifest:
                return  # it is gone, or there
            self._made.add(name)
            self._mirrored.pop(name, None)
            if self.store.read(f"{place}/{MANIFEST}") != manifest:
                self._send(folder, place, manifest)
                if self._manifest(folder) != manifest:
                    return  # it was written again meanwhile, and this wakes the thread
                self._call(self.store.put, manifest, f"{place}/{MANIFEST}")
            self._mirrored[name] = manifest

    @staticmethod
    def _manifest(folder: Path) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return (folder / MANIFEST).read_bytes()
        return None

    def _send(self, folder: Path, place: str, manifest: bytes) -> None:
        if (folder.name, manifest) not in self._sent:
            self._call(self.store.remove, place)  # what a killed run has left
        sent = self._sent.setdefault((folder.name, manifest), set())
        for file in files_of(manifest):
            if file not in sent:
                self._call(self.store.put, folder / file, f"{place}/{file}")
                sent.add(file)

    def _drop(self) -> None:
        """Remove what is no longer in the folder, but for the newest whole ones."""
        kept, whole = {folder.name for folder in self._directory.folders()}, 0
        for name in self.store.checkpoints():
            is_whole = name in self._mirrored or bool(files_of(self.store.read(f"{CHECKPOINTS}/{name}/{MANIFEST}")))
            whole += is_whole
            if name not in kept and not (is_whole and whole <= AT_LEAST):
                self._call(self.store.remove, f"{CHECKPOINTS}/{name}")
