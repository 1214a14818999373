"""--push_to_hub, with a stand-in for the hub's client that takes the calls which the real one takes."""

from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
from helpers import main_of
from huggingface_hub import HfApi

from zerofit.checkpoint.exporter import HubRepository
from zerofit.recipe.errors import UserError


@pytest.fixture
def hub(monkeypatch):
    """The client, and the `files` {path: bytes} that were pushed."""
    api = create_autospec(HfApi, instance=True, endpoint="https://hub")
    api.create_repo.side_effect = lambda name, **_: SimpleNamespace(repo_id=name)
    api.files = {}

    def upload(*, folder_path, **_) -> Future:
        files = (file for file in folder_path.rglob("*") if file.is_file())
        api.files.update({str(file.relative_to(folder_path)): file.read_bytes() for file in files})
        done: Future = Future()
        done.set_result(None)
        return done

    api.upload_folder.side_effect = upload
    monkeypatch.setattr("zerofit.checkpoint.exporter.HfApi", lambda: api)
    return api


@pytest.mark.parametrize("refused", ["create_repo", "auth_check"])
def test_no_right_to_write_and_no_connection_are_found_before_training(hub, refused):
    getattr(hub, refused).side_effect = ConnectionError("403 Forbidden")
    with pytest.raises(UserError, match=r"push_to_hub = .*403 Forbidden"):
        HubRepository("somebody/model")


def test_after_an_outage_the_command_is_said_and_the_next_push_has_everything(hub, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"2")
    repository, upload = HubRepository("somebody/model"), hub.upload_folder.side_effect
    failed: Future = Future()
    failed.set_exception(ConnectionError("503"))
    hub.upload_folder.side_effect = lambda **_: failed
    assert "hf upload somebody/model" in repository.finish(tmp_path / "model")[-1]
    hub.upload_folder.side_effect = upload
    assert repository.finish(tmp_path / "model") == ["hub         https://hub/somebody/model"]
    assert hub.files == {"weights": b"2"}


@pytest.mark.parametrize("flags", [pytest.param((), id="model"), pytest.param(("--lora",), id="adapter")])
@pytest.mark.long
def test_a_run_pushes_what_is_in_its_folder(hub, tmp_path, llama, material, flags):
    model = tmp_path / "run" / "model"
    words = ["--model_name_or_path", llama, "--train_file", material / "text" / "train.txt", "--max_train_steps", 2,
             "--push_to_hub", "somebody/model", *flags, "--output_dir", model.parent]  # fmt: skip
    assert main_of("clm")([*map(str, words)]) == 0
    files = {str(file.relative_to(model)): file.read_bytes() for file in model.rglob("*") if file.is_file()}
    assert hub.files == files
    assert {"README.md", "tokenizer_config.json"} <= set(files)
