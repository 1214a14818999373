"""The dashboard of `zerofit show`: every value of every run is in it once, and it is served on this machine alone."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from unittest.mock import patch

import pytest
from helpers import ROOT
from test_show import line, make_run

from zerofit.cli import main
from zerofit.record.run_folder import RunFolder
from zerofit.record.trackers import is_installed
from zerofit.tools.show.board import PROJECT, Board
from zerofit.tools.show.watched_run import WatchedRuns

pytestmark = pytest.mark.skipif(not is_installed("trackio"), reason="trackio is not installed")


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """Trackio has one store for a process."""
    return Board(tmp_path_factory.mktemp("store"))


def stored(board, name: str) -> dict[int, float]:
    """{update: loss} of a run, as the dashboard gets it."""
    logs = board.storage.get_logs(PROJECT, name, run_id=name)
    found = {each["step"]: each["loss"] for each in logs if "loss" in each}
    assert len(found) == len([each for each in logs if "loss" in each]), "an update is there twice"
    return found


def test_every_update_is_there_once_through_kills_resumes_and_rewinds(board, tmp_path):
    folders = {f"run-{number:02}": make_run(tmp_path / f"run-{number:02}", 30, code=0) for number in range(17)}
    folders |= {name: make_run(tmp_path / name, 20) for name in ("training", "resumed", "rewound")}
    runs = WatchedRuns([str(tmp_path)])
    board.feed(runs.poll())
    folders["training"].metrics.add(line(21))
    folders["rewound"].metrics.start(10)
    folders["rewound"].metrics.add({"update": 11, "epoch": 0.2, "consumed_samples": 88, "skipped": True})
    folders["rewound"].metrics.add(line(12, loss=7.5))
    board.feed(runs.poll())
    folders["resumed"] = RunFolder(folders["resumed"].path)
    folders["resumed"].metrics.start(15)
    board.feed(runs.poll())
    folders["resumed"].metrics.add(line(16, loss=6.5, rank_seconds={"slowest_rank": 0.5}))
    folders["training"].write_environment({"exit_code": 87, "exit_reason": "out of memory"})
    (folders["training"].path / "checkpoints" / "update_00000020").mkdir(parents=True)
    (folders["training"].path / "checkpoints" / "update_00000020" / "manifest.json").write_text("{}")
    for _ in range(2):
        board.feed(runs.poll())
    for name, folder in folders.items():
        recorded = {each["update"]: each["loss"] for each in folder.metrics.read() if "loss" in each}
        assert stored(board, name) == recorded, name
    assert (len(stored(board, "resumed")), stored(board, "resumed")[16], stored(board, "rewound")[12]) == (
        16,
        6.5,
        7.5,
    )
    alerts = [(each["level"], each["step"], each["title"]) for each in board.storage.get_alerts(PROJECT)]
    assert sorted(alerts) == [
        ("error", 11, "rewound: update 11: skipped after a rewind"),
        ("error", 21, "training: exit code 87: out of memory"),
        ("info", 20, "training: update 20: checkpoint"),
        ("warn", 10, "rewound: update 10: restart 1"),
        ("warn", 15, "resumed: update 15: restart 1"),
    ]
    make_run(tmp_path / "elsewhere" / "resumed", 3)
    board.feed(WatchedRuns([str(tmp_path), str(tmp_path / "elsewhere")]).poll())
    assert len(stored(board, "elsewhere/resumed")) == 3
    assert len(stored(board, f"{tmp_path.name}/resumed")) == 16
    assert stored(board, "resumed") == {}
    configuration = board.storage.get_run_config(PROJECT, "rewound", run_id="rewound")
    assert configuration["strategy"] == "zero3_offload_optimizer"
    assert configuration["num_train_epochs"] == 2


def test_it_is_served_on_this_machine_alone(tmp_path):
    make_run(tmp_path / "run", code=0)
    code = (
        "import socket, sys\n"
        "connect, bind = socket.socket.connect, socket.socket.bind\n"
        "def local(function):\n"
        "    def called(self, address, *rest):\n"
        "        assert not isinstance(address, tuple) or address[0] in ('127.0.0.1', '::1', 'localhost'), address\n"
        "        return function(self, address, *rest)\n"
        "    return called\n"
        "socket.socket.connect, socket.socket.bind = local(connect), local(bind)\n"
        f"from zerofit.cli import main\nsys.exit(main(['show', '--no_browser', {str(tmp_path)!r}]))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as program:
        try:
            said = program.stdout.readline()
            assert said.startswith("1 run at http://127.0.0.1:"), said
            url = said.split()[-1]
            with urllib.request.urlopen(url) as page:
                assert b"Trackio" in page.read()
            if shutil.which("chromium"):
                assert "run" in names_in_the_browser(url)
        finally:
            program.send_signal(signal.SIGINT)
    assert program.returncode == 130


def names_in_the_browser(url: str) -> list[str]:
    """The names of the runs in the list beside the plots."""
    browser = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    done = subprocess.run([*browser, "--dump-dom", url], capture_output=True, text=True)
    return [text.split("<")[0].strip() for text in done.stdout.split(">")]


def test_a_port_that_is_in_use(tmp_path, capsys):
    make_run(tmp_path / "run", code=0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with patch.dict(os.environ):
            assert main(["show", "--no_browser", "--port", str(port), str(tmp_path)]) == 2
    assert f"port = {port}" in capsys.readouterr().err
