"""Checkpoints are complete or absent, damage is found and named, and those that stay are the ones that should."""

import json

import pytest

from zerofit.checkpoint.directory import ASKED, BEST, CLOCK, LEAVING, CheckpointDirectory, find_damage
from zerofit.checkpoint.writer import BestEvaluation, RunState


def write(checkpoints: CheckpointDirectory, update: int, why: str = ASKED, best: bool = False) -> None:
    partial = checkpoints.partial(update)
    (partial / "model").mkdir(parents=True)
    (partial / "model" / "weights").write_text(f"weights {update}")
    if why != BEST:
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
    for update, why in ((1, ASKED), (2, CLOCK), (3, CLOCK), (4, ASKED), (5, CLOCK), (6, LEAVING)):
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
