"""A run whose output folder is lost, or behind its mirror: brings back its record and its newest whole checkpoint."""

import contextlib
import json
import time

from zerofit.checkpoint.directory import MANIFEST, STATE, CheckpointDirectory, flaw
from zerofit.checkpoint.mirror import RESULTS, Mirror, MirrorStore, reason
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import atomic_file, remove, temporary_path
from zerofit.recipe.options import TrainingRecipe
from zerofit.recipe.parsing import object_of
from zerofit.record.run_folder import RunFolder, evident_differences
from zerofit.record.terminal import say
from zerofit.record.written_files import CHECKPOINTS

# Of boto, Google's and Azure's libraries, of which any may be missing.
NO_CREDENTIALS = ("NoCredentialsError", "DefaultCredentialsError", "ClientAuthenticationError")
OUTAGE_S = 600.0  # the store is tried so long, where nothing is known of the run without it
RETRY_S = 10.0


def open_mirror(recipe: TrainingRecipe, folder: RunFolder) -> tuple[Mirror, list[str]]:
    """The mirror of a run, and notes for the log; what the folder lacks is in it.

    Raises:
        UserError: the store refuses, or a package is missing; it has another run, or one that would be deleted; its
            checkpoints are all damaged; the folder has files of somebody else.
        ConnectionError: it cannot be reached, and there is nothing to resume from without it.
    """
    assert recipe.mirror is not None, "of a run with a mirror"
    mirror, until, is_reported = Mirror(MirrorStore(recipe.mirror)), time.monotonic() + OUTAGE_S, False
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
                say(f"warning   {failed}, and may have checkpoints of this run: tried for {OUTAGE_S / 60:.0f} minutes")
            is_reported = True
            time.sleep(RETRY_S)


def _restore(store: MirrorStore, recipe: TrainingRecipe, folder: RunFolder) -> list[str]:
    """Bring back the newest whole checkpoint, where the folder has none or only earlier ones, and the run's record.
    Returns notes for the log.

    Raises:
        UserError: see open_mirror.
        Exception: of the store.
    """
    directory = CheckpointDirectory(folder.path / CHECKPOINTS)
    newest = next(directory.resumable(), None)
    candidates = [(name, files) for name, files in store.complete() if newest is None or name > newest.name]
    if not candidates:
        return []
    differing = evident_differences(recipe, object_of(store.read("recipe.yaml") or b"", is_yaml=True) or {})
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
    folder.refuse_foreign_files(directory.foreign(bool(folder.written.names)), recipe.overwrite_output_dir)
    notes: list[str] = []
    for name, files in candidates:
        if not any(file.startswith(f"{STATE}/") for file in files):
            continue
        problem = _bring(store, directory, name, files)
        if problem is None:
            _bring_record(store, folder)
            _bring_best(store, directory, name)
            return [*notes, f"mirror    {name} is brought back from {store.address}"]
        notes.append(f"warning   {store.address}/{CHECKPOINTS}/{name} is not used: {problem}")
    if notes and newest is None and not recipe.overwrite_output_dir:
        raise UserError(
            [note.removeprefix("warning   ") for note in notes]
            + [f"mirror = {store.address!r}: no checkpoint can be used. Start over with --overwrite_output_dir"]
        )
    return notes


def _bring(store: MirrorStore, directory: CheckpointDirectory, name: str, files: list[str]) -> str | None:
    """Download a checkpoint. Returns what is wrong with it; None if it is whole, and in its place."""
    partial = temporary_path(directory.path / name)
    try:
        for file in (MANIFEST, *files):
            with contextlib.suppress(FileNotFoundError):
                store.get(f"{CHECKPOINTS}/{name}/{file}", partial / file)
        if (problem := flaw(partial)) is None:
            directory.take_in(partial, name)
        return problem
    finally:
        if partial.exists():
            remove(partial)


def _bring_record(store: MirrorStore, folder: RunFolder) -> None:
    for name in RESULTS:
        content = None if name in ("environment.json", "loss.png") else store.read(name)
        if content is not None:
            with atomic_file(folder.path / name, "wb") as file:
                file.write(content)


def _bring_best(store: MirrorStore, directory: CheckpointDirectory, name: str) -> None:
    """Bring back the best checkpoint as of this one, where it is in the store."""
    best = json.loads((directory.path / name / STATE / "progress.json").read_text())["best"]["update"]
    wanted = directory.folder(best).name if best is not None else None
    files = next((files for there, files in store.complete() if there == wanted), None)
    if wanted and (wanted == name or (files and _bring(store, directory, wanted, files) is None)):
        directory.point_to_the_best(best)
