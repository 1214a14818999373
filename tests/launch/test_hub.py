"""--push_to_hub, against a server that speaks the part of the hub's protocol that is needed."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from helpers import launch
from huggingface_hub import constants

from zerofit.checkpoint.exporter import HubRepository
from zerofit.recipe.errors import UserError


@pytest.fixture
def hub(monkeypatch):
    """Its `files` {path: bytes}, the `commits`, and the names of the calls that it `refuses`."""
    state = SimpleNamespace(files={}, commits=[], refuses=set())

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            call = next(
                name for name in ("create", "auth-check", "preupload", "commit", "models", "") if name in self.path
            )
            if call in state.refuses:
                self.send(403 if call in ("create", "auth-check", "models") else 400, {"error": "refused"})
                return
            result = {"id": "somebody/model", "url": f"{state.url}/somebody/model", "sha": "0" * 40, "siblings": []}
            if call == "preupload":
                files = json.loads(body)["files"]
                result = {
                    "files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
                }
            elif call == "commit":
                lines = [json.loads(line) for line in body.splitlines()]
                for line in lines[1:]:
                    value = line["value"]
                    state.files[value["path"]] = base64.b64decode(value["content"])
                state.commits.append(lines[0]["value"]["summary"])
                result |= {"commitUrl": f"{state.url}/somebody/model/commit/0", "commitOid": "0" * 40}
            self.send(200, result)

        do_GET = do_POST

        def send(self, code, result):
            text = json.dumps(result).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", state.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", state.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield state
    server.shutdown()


@pytest.mark.parametrize("refused", ["create", "auth-check", "all"])
def test_no_right_to_write_and_no_connection_are_found_before_training(hub, refused, monkeypatch):
    hub.refuses = {refused, "models"}
    if refused == "all":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="push_to_hub"):
        HubRepository("somebody/model")


def test_after_an_outage_the_command_is_said_and_the_next_push_has_everything(hub, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"2")
    hub.refuses = {"commit"}
    assert "hf upload somebody/model" in HubRepository("somebody/model").finish(tmp_path / "model")[-1]
    hub.refuses = set()
    assert HubRepository("somebody/model").finish(tmp_path / "model") == [f"hub         {hub.url}/somebody/model"]
    assert hub.files == {"weights": b"2"}


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [pytest.param("zero3", (), id="model"), pytest.param("ddp", ["--lora"], id="adapter")],
)
@pytest.mark.long
def test_a_run_pushes_what_is_in_its_folder(hub, tmp_path, llama, material, strategy, flags):
    run = tmp_path / "run"
    launch(
        run, "--model_name_or_path", llama, "--train_file", material / "text" / "train.txt", "--max_train_steps", 4,
        "--save_steps", 2, "--push_to_hub", "somebody/model", *flags,
        strategy=strategy, processes=2, launcher=True,
    )  # fmt: skip
    files = {
        str(file.relative_to(run / "model")): file.read_bytes()
        for file in (run / "model").rglob("*")
        if file.is_file()
    }
    assert hub.files == files
    assert {"README.md", "tokenizer_config.json"} <= set(files)
    assert hub.commits == ["trained"]
