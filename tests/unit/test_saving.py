"""Saving while training goes on, going on from what is whole, and failing without harm. Checkpoints are complete or
absent, damage is found and named, and those that stay are the ones that should."""

import json
import pickle
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import Harmful, refusal

from zerofit.checkpoint.directory import STATE_FOLDER, CheckpointDirectory, SaveReason, find_damage, write_manifest
from zerofit.checkpoint.writer import AsyncCheckpointWriter, BestEvaluation, RunState
from zerofit.strategy.engine import Engine as SharedEngine
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.state import STATE_KINDS, ReplicatedState


class Alone:
    """An engine of one process, without accelerate."""

    stored_buffers, weight_samples = SharedEngine.stored_buffers, SharedEngine.weight_samples
    strategy = SimpleNamespace(source="ds.json")

    def __init__(self, seed: int = 0, width: int = 16, device: str | torch.device = "cpu"):
        torch.manual_seed(seed)
        layers = torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 4)
        self.module = self.model = self.whole = torch.nn.Sequential(*layers).to(device)
        self.device = torch.device(device)
        self.torch_optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2, weight_decay=0.1)
        self.layout, self.is_main = ParallelLayout(), True
        self.state = ReplicatedState(self)

    def train(self, updates: range) -> list[float]:
        losses = []
        for update in updates:
            rng = torch.Generator().manual_seed(update)
            rows = torch.randn(32, 8, generator=rng).to(self.device)
            loss = self.module(rows).square().mean()
            loss.backward()
            self.torch_optimizer.step()
            self.torch_optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def gather_objects(self, share):
        return [share]

    def from_main(self, value):
        return value

    def per_rank(self, values):
        return [list(values)]

    def alive(self):
        pass

    def loss_scale(self):
        return {}

    def continue_from(self, loss_scale):
        assert loss_scale == {}

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def _in_full(self, parameters):
        return parameters.items()


def fill(folder: Path, weights) -> None:
    from safetensors.torch import save_file

    (folder / "model").mkdir()
    save_file(dict(weights), folder / "model" / "model.safetensors")


def saver_of(engine: Alone, folder: Path, **options) -> AsyncCheckpointWriter:
    return AsyncCheckpointWriter(CheckpointDirectory(folder / "checkpoints"), engine, **options)


def save(saver: AsyncCheckpointWriter, engine: Alone, update: int, fill=fill) -> None:
    saver.save(update, SaveReason.REQUESTED, fill, engine.weights, {"updates": update}, is_best=False)


@pytest.fixture
def three(tmp_path):
    """A run with checkpoints after the updates 2, 4 and 6, and the losses of the updates after 4."""
    engine = Alone()
    saver = saver_of(engine, tmp_path)
    for update in (2, 4, 6):
        engine.train(range(update - 2, update))
        save(saver, engine, update)
    assert not saver.wait()
    reference = Alone()
    reference.train(range(4))
    return saver, reference.train(range(4, 8))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_was_saved_is_what_there_was_when_the_save_began(tmp_path, asynchronous):
    engine = Alone()
    engine.train(range(3))
    before = {name: tensor.clone() for name, tensor in engine.weights().items()}
    moments = {kind: [engine.state.get(kind, shard).clone() for shard in engine.state.held()] for kind in STATE_KINDS}
    saver = saver_of(engine, tmp_path, asynchronous=asynchronous)
    slow = []

    def slowly(folder: Path, weights) -> None:
        while asynchronous and not slow:  # until training has gone on
            pass
        fill(folder, weights)

    save(saver, engine, 3, slowly)
    after = engine.train(range(3, 6))
    slow.append(True)
    assert not saver.wait()
    folder, warnings = saver.choose("auto")
    assert folder == saver.checkpoints.folder(3)
    assert not warnings

    from safetensors.torch import load_file

    saved = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], before[name]) for name in before)
    other = Alone(seed=5)
    assert saver_of(other, tmp_path).load(folder)["updates"] == 3
    for kind in STATE_KINDS:
        for shard, values in zip(other.state.held(), moments[kind]):
            assert torch.equal(other.state.get(kind, shard), values), (kind, shard.name)
    assert other.train(range(3, 6)) == after
    assert saver.records[0]["bytes"] > 0


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "rank_00000.json", "progress.json"])
def test_a_pickle_in_the_place_of_a_file_runs_nothing_even_with_a_manifest_to_match(three, name, tmp_path):
    (saver, _), trace = three, tmp_path / "executed"
    folder = saver.checkpoints.folder(6)
    (folder / STATE_FOLDER / name).write_bytes(pickle.dumps(Harmful(trace)))
    assert saver.choose("auto")[0] == saver.checkpoints.folder(4)
    (folder / "manifest.json").unlink()
    write_manifest(folder, SaveReason.REQUESTED, {})
    assert saver.choose("auto")[0] == folder
    assert "cannot be read" in refusal(saver_of(Alone(), folder).load, folder)
    assert not trace.exists()


def test_a_checkpoint_of_another_model_is_refused(three):
    saver, _ = three
    message = refusal(saver_of(Alone(width=17), Path()).load, saver.checkpoints.folder(6))
    assert "of another model: 0.weight is (16, 8) in it, and (17, 8) here" in message


class Shifted(ReplicatedState):
    """Takes what lies `by` elements later in the same weight for a shard, and round the end."""

    by = 0

    def get(self, kind, shard):
        return super().get(kind, shard).roll(self.by) if kind == "weight" else super().get(kind, shard)


def test_shards_that_are_other_weights_end_the_run_before_a_save(tmp_path):
    engine = Alone()
    engine.state = Shifted(engine)
    engine.train(range(2))
    saver = saver_of(engine, tmp_path)
    saver.check()
    save(saver, engine, 2)
    assert not saver.wait()
    engine.state.by = 5
    for act in (saver.check, lambda: save(saver, engine, 3)):
        assert "ds.json: what the optimizer keeps for 0.weight is not what the model has" in refusal(act)
    assert saver.choose("auto")[0] == saver.checkpoints.folder(2)


def test_a_checkpoint_that_does_not_give_its_runs_weights_is_refused(three):
    saver, _ = three
    folder = saver.checkpoints.folder(6)
    progress = folder / STATE_FOLDER / "progress.json"
    content = json.loads(progress.read_text())
    assert {len(values) for values in content["weights"].values()} == {16, 4}
    content["weights"]["2.weight"][7] *= 1.5
    progress.write_text(json.dumps(content))
    assert "2.weight differs" in refusal(saver_of(Alone(), folder).load, folder)


@pytest.fixture
def small_files(tmp_path):
    """A folder in which no file may have more than 96 KiB, as on a disk that is full."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (96 * 1024, limits[1]))
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_in_the_middle_of_a_save_harms_nothing(small_files, capfd):
    engine = Alone()
    saver = saver_of(engine, small_files)
    engine.train(range(2))
    save(saver, engine, 2)
    assert not saver.wait()

    def too_much(folder: Path, weights) -> None:
        fill(folder, weights)
        (folder / "model" / "more").write_bytes(bytes(200 * 1024))

    losses = engine.train(range(2, 4))
    save(saver, engine, 4, too_much)
    losses += engine.train(range(4, 6))  # training goes on
    assert saver.wait()
    assert len(saver.messages) == 1
    assert "too large" in saver.messages[0]
    assert "earlier checkpoints are intact" in saver.messages[0]
    assert sorted(path.name for path in saver.checkpoints.path.iterdir()) == ["latest", "update_00000002"]
    folder, warnings = saver.choose("auto")
    assert (folder, warnings) == (saver.checkpoints.folder(2), [])
    other = Alone(seed=9)
    saver_of(other, small_files).load(folder)
    assert other.train(range(2, 6)) == losses
    save(saver, engine, 6)  # and when there is room again
    assert not saver.wait()
    assert saver.choose("auto")[0] == saver.checkpoints.folder(6)
    assert "Traceback" not in "".join(capfd.readouterr())


def write(checkpoints: CheckpointDirectory, update: int, why: str = SaveReason.REQUESTED, best: bool = False) -> None:
    partial = checkpoints.partial(update)
    (partial / "model").mkdir(parents=True)
    (partial / "model" / "weights").write_text(f"weights {update}")
    if why != SaveReason.BEST:
        (partial / "state").mkdir()
        (partial / "state" / "progress.json").write_text(f'{{"updates": {update}}}\n')
        (partial / "state" / "rank_00000.safetensors").write_bytes(bytes(range(256)) * 4)
    checkpoints.finish(update, why, best, {})


def there(checkpoints: CheckpointDirectory) -> list[int]:
    return sorted(int(folder.name.removeprefix("update_")) for folder in checkpoints.path.glob("update_????????"))


@pytest.mark.parametrize(
    ("limit", "best", "kept"), [(None, 2, [1, 2, 3, 4, 5, 6]), (1, 5, [5, 6]), (1, 6, [6]), (2, 1, [1, 5, 6])]
)
def test_the_last_and_the_best_are_kept(tmp_path, limit, best, kept):
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints", limit)
    for update in range(1, 7):
        write(checkpoints, update, best=update == best)
    assert there(checkpoints) == kept
    assert (checkpoints.latest / "model" / "weights").read_text() == "weights 6"
    assert (checkpoints.best / "model" / "weights").read_text() == f"weights {best}"


def test_of_those_that_nobody_asked_for_the_last_two_stay(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    for update, why in enumerate(("asked", "clock", "clock", "asked", "clock", "leaving"), start=1):
        write(checkpoints, update, why=why)
    assert there(checkpoints) == [1, 4, 5, 6]


def test_every_damage_to_every_file_is_found_and_named(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    write(checkpoints, 7)
    folder = checkpoints.folder(7)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 4  # the manifest among them
    assert find_damage(folder) is None
    for path in files:
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        damages = {"removed": None, "emptied": b"", "truncated": data[:-1], "flipped": bytes(flipped)}
        for damage, content in damages.items():
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
            found = find_damage(folder)
            assert found, f"{path.name} {damage}"
            assert path.relative_to(folder).as_posix() in found, f"{path.name} {damage}: {found}"
            path.write_bytes(data)
        assert find_damage(folder) is None


def test_a_manifest_of_other_things_is_no_manifest(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    write(checkpoints, 7)
    for content in ([], {"files": {}}, {"files": {"a": 1}}, {"files": {"../a": {"bytes": 1, "xxh3_128": ""}}}):
        (checkpoints.folder(7) / "manifest.json").write_text(json.dumps(content))
        assert "manifest.json" in find_damage(checkpoints.folder(7))


def test_a_field_that_an_earlier_version_did_not_have_begins_as_in_a_new_run():
    state = RunState(anomalies_in_a_row=2, best=BestEvaluation(update=7, worse_in_a_row=1))
    state.restore({"updates": 3, "gone": 1, "best": {"update": 2, "metric": "loss"}})
    assert state == RunState(updates=3, best=BestEvaluation(update=2, metric="loss", value=state.best.value))  # NaN


def test_what_a_killed_run_left_half_goes_and_what_comes_again_goes(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    for update in (2, 4, 6):
        write(checkpoints, update, best=update == 6)
    checkpoints.partial(8).mkdir()
    checkpoints.drop(lambda update: update > 4)
    assert sorted(path.name for path in checkpoints.path.iterdir()) == ["latest", "update_00000002", "update_00000004"]
    assert checkpoints.latest.resolve().name == "update_00000004"
