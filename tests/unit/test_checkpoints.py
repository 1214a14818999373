"""Which checkpoints stay: the last K and the best, each of them complete."""

import pytest

from train.run.checkpoints import Checkpoints


def write(checkpoints: Checkpoints, update: int, saved: bool = True, best: bool = False) -> None:
    checkpoints.write(update, lambda folder: (folder / "model").write_text(f"weights {update}"), saved, best)


def there(checkpoints: Checkpoints) -> list[int]:
    return sorted(int(folder.name.removeprefix("update_")) for folder in checkpoints.path.glob("update_????????"))


@pytest.mark.parametrize(
    ("limit", "best", "kept"), [(None, 2, [1, 2, 3, 4, 5]), (2, 2, [2, 4, 5]), (1, 5, [5]), (1, 4, [4, 5])]
)
def test_the_last_and_the_best_are_kept(tmp_path, limit, best, kept):
    checkpoints = Checkpoints(tmp_path / "checkpoints", limit)
    for update in range(1, 6):
        write(checkpoints, update, best=update == best)
    assert there(checkpoints) == kept
    assert (checkpoints.latest / "model").read_text() == "weights 5"
    assert (checkpoints.best / "model").read_text() == f"weights {best}"


def test_of_those_kept_as_the_best_only_the_last_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for update in (3, 5, 9):
        write(checkpoints, update, saved=False, best=True)
    write(checkpoints, 10)
    assert there(checkpoints) == [9, 10]
    assert checkpoints.best.resolve().name == "update_00000009"
    assert checkpoints.latest.resolve().name == "update_00000010"


def test_a_checkpoint_is_complete_or_absent(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", limit=1)
    write(checkpoints, 1)

    def fails(folder):
        (folder / "model").write_text("half")
        raise OSError("no space left on device")

    with pytest.raises(OSError):
        checkpoints.write(2, fails, True, True)
    assert there(checkpoints) == [1]
    assert (checkpoints.latest / "model").read_text() == "weights 1"
    assert not checkpoints.best.exists()
    write(checkpoints, 2)
    assert (checkpoints.latest / "model").read_text() == "weights 2"
    assert there(checkpoints) == [2]
    assert not list(checkpoints.path.glob("*.partial"))
