"""Checkpoints in an object store, which fails in every way that a store can, and inputs that are read from one."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import yaml
from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem
from helpers import check_refusal, recipe_of

from zerofit.checkpoint import mirror as mirroring
from zerofit.checkpoint.directory import CheckpointDirectory, SaveReason, find_damage
from zerofit.checkpoint.mirror import Mirror, MirrorStore, manifest_files, open_mirror
from zerofit.recipe.errors import UserError
from zerofit.record.run_folder import NAMES, RunFolder, identity_options


class Faults:
    """What goes wrong in the store."""

    def __init__(self):
        self.every = self.dead_after = None  # a call of each so many fails; from this one on all do
        self.truncated = ""  # the end of the name of a file that arrives short, once
        self.open = threading.Event()  # not set: no call ends
        self.open.set()
        self.blocked = threading.Event()  # a call has come that does not end
        self.calls: list[tuple[str, str]] = []

    def meet(self, call: str, path: str) -> None:
        self.calls.append((call, str(path)))
        number = len(self.calls)
        if (self.every and number % self.every == 0) or (self.dead_after is not None and number > self.dead_after):
            raise OSError("HTTP 503: Slow Down")
        if not self.open.is_set():
            self.blocked.set()
            self.open.wait()


class Faulty(LocalFileSystem):
    protocol = "faulty"
    faults = Faults()

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("faulty://"))

    def put_file(self, lpath, rpath, **kwargs):
        self.faults.meet("put", rpath)
        super().put_file(lpath, rpath, **kwargs)
        if self.faults.truncated and rpath.endswith(self.faults.truncated):
            self.faults.truncated = ""
            Path(rpath).write_bytes(Path(rpath).read_bytes()[:-1])


def meeting(call: str, plain):
    """A method of the file system that meets the faults before it does what it does."""

    def method(self, path, *args, **kwargs):
        self.faults.meet(call, path)
        return plain(self, path, *args, **kwargs)

    return method


for _name, _call in {"pipe_file": "put", "cat_file": "get", "get_file": "get", "ls": "ls", "rm": "rm"}.items():
    setattr(Faulty, _name, meeting(_call, getattr(LocalFileSystem, _name)))
register_implementation("faulty", Faulty)


@pytest.fixture
def faults(monkeypatch):
    for name in ("RETRY_S", "RETRY_AT_START_S"):
        monkeypatch.setattr(mirroring, name, 0.001)
    monkeypatch.setattr(Faulty, "faults", Faults())
    yield Faulty.faults
    Faulty.faults.open.set()


class Scene:
    """A run's folder and its mirror."""

    def __init__(self, folder: Path, **options):
        self.place, self.address = folder / "store" / "run", f"faulty://{folder}/store/run"
        self.recipe = recipe_of(mirror=self.address, **options)
        self.folder = RunFolder(folder / "run")
        self.directory = self.directory_of(self.folder)

    @staticmethod
    def directory_of(folder: RunFolder) -> CheckpointDirectory:
        return CheckpointDirectory(folder.path / "checkpoints", limit=2)

    def mirror(self, updates: int = -1) -> Mirror:
        mirror = Mirror(MirrorStore(self.address))
        mirror.start(self.directory, updates)
        return mirror

    def save(self, update: int, best: int | None = None) -> None:
        """A checkpoint with its part of the record."""
        self.folder.path.mkdir(exist_ok=True)
        self.folder.written.add(NAMES)
        identity = identity_options(self.recipe, 8)
        (self.folder.path / "recipe.yaml").write_text(yaml.safe_dump({**self.recipe.to_dict(), **identity}))
        self.folder.metrics.add({"update": update})
        partial = self.directory.partial(update)
        (partial / "state").mkdir(parents=True)
        (partial / "model").mkdir()
        (partial / "state" / "progress.json").write_text(json.dumps({"updates": update, "best": {"update": best}}))
        (partial / "model" / "weights").write_bytes(bytes([update]) * 1000)
        self.directory.finish(update, SaveReason.REQUESTED, best == update, {})

    def there(self) -> list[int]:
        """The updates of the checkpoints in the store that are whole."""
        folders = sorted((self.place / "checkpoints").glob("update_*"))
        return [int(folder.name[-8:]) for folder in folders if find_damage(folder) is None]

    def lose(self) -> None:
        self.folder.metrics.close()
        shutil.rmtree(self.folder.path)

    def restored(self) -> tuple[list[int], list[str]]:
        """(updates of the folder's checkpoints, what was said), of a run that starts."""
        self.folder.metrics.close()
        folder = RunFolder(self.folder.path)
        mirror, notes = open_mirror(self.recipe, folder)
        mirror.finish()
        found = list(self.directory_of(folder).resumable())
        assert not any(map(find_damage, found))
        return [int(path.name[-8:]) for path in found], notes


@pytest.fixture
def scene(faults, tmp_path) -> Scene:
    return Scene(tmp_path)


def test_checkpoints_results_and_the_model_are_there_and_manifests_come_last(scene, faults):
    mirror = scene.mirror()
    for update in (1, 2):
        scene.save(update)
    (scene.folder.path / "model").mkdir()
    (scene.folder.path / "model" / "weights").write_text("exported")
    assert mirror.finish() == [f"mirror      2 checkpoints mirrored, 0 not: {scene.address}"]
    assert scene.there() == [1, 2]
    assert (scene.place / "model" / "weights").read_text() == "exported"
    assert (scene.place / "metrics.jsonl").read_text() == (scene.folder.path / "metrics.jsonl").read_text()
    for update in (1, 2):
        written = [path for call, path in faults.calls if call == "put" and f"update_{update:08}" in path]
        assert len(written) == 3
        assert written[-1].endswith("manifest.json")


def test_old_ones_go_as_they_go_in_the_folder(scene):
    mirror = scene.mirror()
    for update in range(1, 7):
        scene.save(update, best=3 if update >= 3 else None)
    mirror.finish()
    assert scene.there() == [3, 5, 6] == sorted(int(folder.name[-8:]) for folder in scene.directory.folders())


def test_a_store_that_fails_now_and_then_gets_everything(scene, faults):
    faults.every, faults.truncated = 17, "update_00000001/model/weights"
    mirror = scene.mirror()
    scene.save(1)
    scene.save(2)
    assert "2 checkpoints mirrored, 0 not" in mirror.finish()[-1]
    assert not faults.truncated, "an object that arrives short is written again"
    assert scene.there() == [1, 2]


def test_without_credentials_a_run_does_not_wait(scene, faults, monkeypatch):
    unknown = type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")
    monkeypatch.setattr(faults, "meet", lambda *call: (_ for _ in ()).throw(unknown))
    with pytest.raises(UserError, match=r"mirror = .*Unable to locate credentials"):
        open_mirror(scene.recipe, scene.folder)


def test_a_store_that_is_dead_is_reported_once_and_harms_nothing(scene, faults, monkeypatch):
    mirror = scene.mirror()
    scene.save(1)
    while scene.there() != [1]:
        pass
    faults.dead_after = len(faults.calls)
    for update in (2, 3):
        scene.save(update)
    while len(faults.calls) < faults.dead_after + 20:
        pass
    monkeypatch.setattr(mirroring, "MIRROR_TIMEOUT_S", 0.01)
    said = mirror.finish()
    assert [line for line in said if "cannot be written" in line] == said[:1]
    assert "HTTP 503" in said[0]
    assert "1 checkpoint mirrored, 2 not" in said[-1]
    assert [find_damage(folder) for folder in scene.directory.folders()] == [None, None]
    faults.dead_after = None
    mirror._thread.join()
    assert scene.there() == [2, 3], "it went on trying"


def test_a_store_that_never_answers_stops_nothing(scene, faults, monkeypatch):
    mirror = scene.mirror()
    faults.open.clear()
    scene.save(1)
    assert faults.blocked.wait(60)
    for update in range(2, 21):  # the loop goes on, and nothing that it calls waits
        scene.save(update)
        assert not mirror.messages()
    kept = {int(folder.name[-8:]) for folder in scene.directory.folders()}
    assert {19, 20} <= kept <= {1, 19, 20}, "and what is being read"
    monkeypatch.setattr(mirroring, "MIRROR_TIMEOUT_S", 0.01)
    line, summary = mirror.finish()
    assert "it was not ready" in line
    assert "0 checkpoints mirrored, 20 not" in summary


def test_it_stops_where_another_run_writes_too(scene, tmp_path):
    mirror = scene.mirror()
    scene.save(1)
    while scene.there() != [1]:
        pass
    other = Scene(tmp_path)  # the same address, from another folder
    other.folder, other.directory = RunFolder(tmp_path / "b"), Scene.directory_of(RunFolder(tmp_path / "b"))
    other.save(7)
    shutil.copytree(other.directory.folder(7), scene.place / "checkpoints" / "update_00000007")
    scene.save(2)
    mirror._thread.join()
    said = mirror.finish()
    assert "another run writes there" in said[0]
    assert "1 checkpoint mirrored, 1 not" in said[-1]
    assert scene.there() == [1, 7]


@pytest.fixture
def lost(scene) -> Scene:
    """A run with the checkpoints 2 and 3 in its mirror, and without its folder."""
    mirror = scene.mirror()
    for update in (1, 2, 3):
        scene.save(update, best=2)
    mirror.finish()
    scene.lose()
    return scene


def test_the_newest_comes_back_with_its_record_and_the_best(lost):
    found, notes = lost.restored()
    assert found == [3, 2]
    assert "update_00000003 is brought back" in notes[-1]
    assert lost.directory.latest.resolve().name == "update_00000003"
    assert lost.directory.best.resolve().name == "update_00000002"
    assert [line["update"] for line in RunFolder(lost.folder.path).metrics.read()] == [1, 2, 3]
    assert lost.restored() == ([3, 2], []), "what is there is not read again"


@pytest.mark.parametrize("file", ["state/progress.json", "model/weights", "manifest.json"])
@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_the_one_before_a_damaged_one(lost, file, harm):
    path = lost.place / "checkpoints" / "update_00000003" / file
    path.write_bytes(path.read_bytes()[:-3] + b"???") if harm == "damaged" else path.unlink()
    found, notes = lost.restored()
    assert found == [2]
    assert file == "manifest.json" or "update_00000003 is not used" in notes[0]


def test_a_mirror_without_a_whole_one_is_not_overwritten_in_silence(lost):
    for path in lost.place.glob("checkpoints/*/model/weights"):
        path.write_bytes(b"")
    words = ["weights is not what was written", "no checkpoint can be used", "--overwrite_output_dir"]
    check_refusal(words, lost.restored)
    assert not list(lost.folder.path.glob("checkpoints/*"))


def test_a_folder_behind_its_mirror_catches_up_and_one_ahead_stays(lost):
    shutil.copytree(lost.place / "checkpoints" / "update_00000002", lost.folder.path / "checkpoints/update_00000002")
    for name in ("files.json", "recipe.yaml", "metrics.jsonl"):
        shutil.copy(lost.place / name, lost.folder.path)
    assert lost.restored()[0] == [3, 2]
    lost.save(4)
    assert lost.restored() == ([4, 3, 2], [])


def test_another_run_and_one_that_starts_over_are_refused(lost, tmp_path):
    other = Scene(tmp_path, learning_rate=0.5)
    check_refusal(["mirror", "a different run", "learning_rate"], other.restored)
    other = Scene(tmp_path, resume="never")
    check_refusal(["mirror", "would start over", "--overwrite_output_dir"], other.restored)
    assert Scene(tmp_path, resume="never", overwrite_output_dir=True).restored() == ([], [])
    assert Scene(tmp_path, learning_rate=0.5, overwrite_output_dir=True).restored() == ([], [])
    lost.folder.path.mkdir(exist_ok=True)
    (lost.folder.path / "thesis.txt").write_text("mine")
    check_refusal(["thesis.txt"], lost.restored)
    assert [path.name for path in lost.folder.path.iterdir()] == ["thesis.txt"]


def test_an_outage_at_the_start(lost, faults, monkeypatch):
    faults.calls[:] = [("", "")] * 999
    faults.every = 1000  # the first call fails, and no other one
    assert lost.restored()[0] == [3, 2]
    faults.every, faults.dead_after = None, 0
    found, (note,) = lost.restored()
    assert found == [3, 2]
    assert "cannot be read" in note
    lost.lose()
    monkeypatch.setattr(mirroring, "MAX_OUTAGE_S", 0.0)
    with pytest.raises(ConnectionError, match="may have checkpoints of this run"):
        lost.restored()


def test_manifests_of_strangers_name_no_file_elsewhere():
    assert manifest_files(b'{"files": {"state/a": {}}}') == ["state/a"]
    for text in (b'{"files": {"../a": {}}}', b'{"files": {"/a": {}}}', b"{", b"[]", None):
        assert manifest_files(text) == []
