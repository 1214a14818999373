"""The runs in the dashboard of trackio, https://github.com/gradio-app/trackio.

Its store is a folder that lives as long as this process, since all that is in it comes from the folders of the runs. A
record that was replaced, at a resume or a rewind, is stored again as a whole: every update is there once.
"""

import contextlib
import io
import itertools
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zerofit.recipe.errors import UserError
from zerofit.recipe.words import counted
from zerofit.record.terminal import doing, say
from zerofit.record.trackers import is_installed
from zerofit.tools.show.watched_run import EXIT, KILLED, WatchedRun, WatchedRuns

PROJECT, VERSION = "runs", "0.43.0"
POLL_S = 5.0
HOST = "127.0.0.1"
ORDER = "loss,eval_loss,grad_norm,learning_rate,tokens_per_s,mfu,peak_memory_bytes,seconds"  # of the plots
# Of strategy.yaml, and what it is called among the options of the recipe.
FROM_STRATEGY = {"name": "strategy", "num_processes": "num_processes", "precision": "precision"}


def show_board(runs: WatchedRuns, port: int | None, open_browser: bool) -> None:
    """Serve the dashboard on this machine alone, and keep it current until Ctrl-C.

    Raises:
        UserError: trackio is not installed; the port is in use.
    """
    if not is_installed("trackio"):
        raise UserError(
            f"trackio is not installed, which shows the runs. `pip install trackio=={VERSION}`, or --watch"
        )
    with tempfile.TemporaryDirectory(prefix="zerofit-show-") as store:
        with doing() as say_now:
            say_now("reading the runs ...")
            board = Board(Path(store))
            board.feed(runs.poll())
        url = board.serve(port, open_browser)
        say(f"{counted(len(runs.poll()), 'run')} at {url}", "Ctrl-C ends the dashboard, and no run")
        while True:
            time.sleep(POLL_S)
            board.feed(runs.poll())


class Board:
    """What trackio has of the runs.

    Args:
        store: an empty folder.
    """

    def __init__(self, store: Path):
        for name in [name for name in os.environ if name.startswith("TRACKIO_") and name.endswith("_ID")]:
            del os.environ[name]  # of a store on the hub
        os.environ |= {"TRACKIO_DIR": str(store), "TRACKIO_PLOT_ORDER": ORDER}  # read when it is imported
        from trackio.sqlite_storage import SQLiteStorage

        self.storage = SQLiteStorage
        self._sent: dict[str, tuple[int, int, set[str]]] = {}  # of each run: restarts, lines, events

    def serve(self, port: int | None, open_browser: bool) -> str:
        """Start to serve. Returns the address."""
        import trackio

        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it explains how others may write to the dashboard
                _, url, *_ = trackio.show(
                    PROJECT, host=HOST, server_port=port, open_browser=open_browser, block_thread=False, share=False
                )
        except OSError:
            raise UserError(f"port = {port}: it is in use. Choose another --port") from None
        return f"{url}?project={PROJECT}"

    def feed(self, runs: dict[str, WatchedRun]) -> None:
        """Hand over what is new in each run."""
        for name in self._sent.keys() - runs.keys():  # another run of this name has begun, and both have longer ones
            self.storage.delete_run(PROJECT, name, run_id=name)
            del self._sent[name]
        for name, run in runs.items():
            restarts, lines, events = self._sent.get(name, (0, 0, set()))
            if run.restarts != restarts:
                self.storage.delete_run(PROJECT, name, run_id=name)
                restarts, lines, events = run.restarts, 0, set()
            self._send_lines(name, run, lines)
            found = {f"{name}: {text}": (level, update) for level, update, text in events_of(run)}
            new = [text for text in found if text not in events]
            self.storage.bulk_alert(
                PROJECT,
                name,
                titles=new,
                texts=[None] * len(new),
                levels=[found[text][0] for text in new],
                steps=[found[text][1] for text in new],
                run_id=name,
            )
            self._sent[name] = restarts, len(run.lines), {*events, *new}

    def _send_lines(self, name: str, run: WatchedRun, known: int) -> None:
        lines = list(run.lines.values())
        seconds = list(itertools.accumulate(_seconds(line) for line in lines))
        if len(lines) > known:
            self.storage.bulk_log(
                PROJECT,
                name,
                metrics_list=[figures(line) for line in lines[known:]],
                steps=[line["update"] for line in lines[known:]],
                timestamps=[_time(run.written_at - seconds[-1] + each) for each in seconds[known:]],
                config=configuration(run),
                log_ids=[f"{name}/{run.restarts}/{line['update']}" for line in lines[known:]],
                run_id=name,
            )


def figures(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line, those of ranks under names of their own."""
    ranks = {f"rank_seconds/{name}": value for name, value in line.get("rank_seconds", {}).items()}
    numbers = {name: value for name, value in line.items() if isinstance(value, (int, float)) and name != "update"}
    return numbers | ranks


def configuration(run: WatchedRun) -> dict[str, Any]:
    """The recipe, and of the strategy what tells runs apart."""
    strategy = {ours: run.strategy[name] for name, ours in FROM_STRATEGY.items() if name in run.strategy}
    return {name: value for name, value in run.recipe.items() if value is not None} | strategy


def events_of(run: WatchedRun) -> list[tuple[str, int, str]]:
    """(level, update, what happened): anomalies, checkpoints, restarts and the end."""
    found = [
        ("error", line["update"], f"update {line['update']}: {line.get('anomaly', 'skipped after a rewind')}")
        for line in run.lines.values()
        if "anomaly" in line or "skipped" in line
    ]
    found += [("info", update, f"update {update}: checkpoint") for update in run.checkpoints()]
    if run.restarts:
        found.append(("warn", run.restarted_at, f"update {run.restarted_at}: restart {run.restarts}"))
    state, code = run.state(time.time())
    if state == EXIT:
        reason = run.environment.get("exit_reason")
        found.append(("error", run.updates, f"exit code {code}" + (f": {reason}" if reason else "")))
    return found + ([("error", run.updates, "killed: no exit code")] if state == KILLED else [])


def _seconds(line: dict[str, Any]) -> float:
    return line.get("seconds", 0) + line.get("evaluation_seconds", 0)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
