"""How a run has ended is in its folder, and never how another one has."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, environment, on_a_terminal

from zerofit.health.shutdown import ShutdownHandler, StopReason
from zerofit.launch.command import exit_code_of
from zerofit.launch.exit_code import ExitCode, find_folder
from zerofit.record.run_folder import RunFolder
from zerofit.tools.submit.submit import reason_not_requeued

TYPO = ["--learnin_rate", "1"]
RANK = """
import os, sys, time
from zerofit.training.entry import end, write_exit_code_at_end

write_exit_code_at_end("clm")

def main(start):
    {body}

end(main, None)
"""
RECIPE = "recipes/clm/stdlib-gpt2.yaml"


def recorded(folder) -> dict:
    return json.loads((folder / "environment.json").read_text())


def stale(folder, code: int = 85):
    """A folder with the code of the launch before."""
    folder.mkdir(exist_ok=True)
    (folder / "environment.json").write_text(json.dumps({"zerofit_commit": "a", "exit_code": code}))
    return folder


def clm(*words, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "train" / "clm.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(**variables))


def program(file, body: str) -> list[str]:
    """The command of a run whose task is `body`."""
    file.with_name("run.py").write_text(RANK.format(body=body))
    return [sys.executable, str(file.with_name("run.py")), "--output_dir", str(file)]


def started(command: list[str], **variables: str) -> subprocess.Popen:
    """A program that has said that it is ready."""
    how = {"env": environment(PYTHONPATH=str(ROOT), **variables), "start_new_session": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_folder_is_found_however_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "notes.yaml"
    file.write_text("block_size: 8\noutput_dir: 'a b'  # here\n")
    (tmp_path / "broken.yaml").write_text("output_dir: c\nblock_size: [8\n")
    (tmp_path / "none.yaml").write_text("block_size: 8\n")
    for words, folder in {
        "--output_dir x": "x", "--output-dir=x --config notes.yaml": "x", "--config notes.yaml": "a b",
        "--config broken.yaml": "outputs/clm", "--config=none.yaml": "outputs/none",
        "--config=absent.yaml --output_dir x": "x", "": "outputs/clm", "--learnin_rate 1 --output_dir x": "x",
        "--evaluate_only --model_name_or_path y/model": "outputs/y-evaluate",
        "--config notes.yaml --predict_file f --model_name_or_path z": "a b-predict",
        "--output_dir x --predict_file f": "x", "--evaluate_only false --output_dir": "outputs/clm",
    }.items():  # fmt: skip
        assert str(find_folder("clm", words.split())) == folder, words
    monkeypatch.chdir(ROOT)
    for words in ([RECIPE], ["stdlib-gpt2"], ["--config", RECIPE], ["train/clm.py", "--config", RECIPE]):
        assert exit_code_of(["--strategy", "zero3", *words]).folder.path == Path("outputs/stdlib-gpt2")
        assert exit_code_of([*words, "--output_dir", "other"]).folder.path == Path("other")


@pytest.mark.parametrize("mistake", ["option", "file", "folder"])
def test_a_mistake_is_on_record_in_place_of_the_code_before(tmp_path, mistake):
    folder, words = stale(tmp_path / "run"), ["--output_dir", tmp_path / "run"]
    words += {"option": TYPO, "file": ["--train_file", tmp_path / "absent.txt"]}.get(mistake, [])
    if mistake == "folder":
        (folder / "model").mkdir()
        words += ["--evaluate_only", "--model_name_or_path", "gpt2"]
    done = clm(*words)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert recorded(folder)["exit_code"] == 2
    assert recorded(folder)["exit_reason"].startswith("error: ")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"])
def test_a_launchers_variable_that_is_not_a_number(tmp_path, name):
    done = clm("--output_dir", stale(tmp_path), **{name: "two"})
    assert done.stderr.startswith(f"error: {name} = 'two' in the environment: expected a number")
    assert done.stderr.count("\n") == 1
    assert done.returncode == recorded(tmp_path)["exit_code"] == 2


def test_the_code_of_a_run_that_is_at_work_stays(tmp_path):
    stale(tmp_path, 85)
    folder = RunFolder(tmp_path)
    folder.lock()
    assert clm("--output_dir", tmp_path, *TYPO).returncode == 2
    assert recorded(tmp_path)["exit_code"] == 85
    del folder


def test_the_first_failure_is_the_cause(tmp_path):
    ranks = [ExitCode(stale(tmp_path), {"RANK": str(rank)}) for rank in range(3)]
    ranks[1].forget()
    assert recorded(tmp_path)["exit_code"] == 85
    ranks[0].forget()
    assert "exit_code" not in recorded(tmp_path)
    ranks[2].write(87, "out of memory")
    ranks[0].write(1, "another process is gone")
    assert recorded(tmp_path) == {"zerofit_commit": "a", "exit_code": 87, "exit_reason": "out of memory"}


SLEEP = "print('ready', flush=True); time.sleep(20)"
IN_NATIVE_CODE = "import hashlib; print('ready', flush=True); hashlib.pbkdf2_hmac('sha256', b'a', b'b', 10**8)"


@pytest.mark.parametrize(
    ("body", "number", "code"),
    [
        (IN_NATIVE_CODE, signal.SIGTERM, 85),
        (SLEEP, signal.SIGHUP, 85),
        ("import os; os.fork() and time.sleep(20); " + SLEEP, signal.SIGUSR1, 85),
        ("print('ready', flush=True); raise ValueError('no')", None, 1),
    ],
)
def test_the_end_of_a_run_that_starts_is_on_record(tmp_path, body, number, code):
    folder = stale(tmp_path / "run", 86)
    with started(program(folder, body)) as process:
        if number:
            assert "exit_code" not in recorded(folder), "a crash from here on leaves none"
            os.killpg(process.pid, number)  # a forked child ends with it
        _, said = process.communicate()
    assert process.returncode == code, said
    assert recorded(folder)["exit_code"] == code


LEAVES = """
    from zerofit.recipe.errors import EXIT, UserError
    def slow():
        print("ready", flush=True); os.close(spare); time.sleep(1.5)
    spare = os.dup(1); EXIT.cleanup = slow
    {ends}
"""
ENDS = {"raise UserError('no such file')": 2, "return 86": 86, "return 0": 0, "raise ValueError('no')": 1}


SIGNALLED = zip(ENDS, (0, 0, 0, 1), (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM), strict=True)


@pytest.mark.parametrize(("ends", "rank", "number"), SIGNALLED)
def test_a_signal_does_not_change_a_code_that_is_decided(tmp_path, ends, rank, number):
    """Also where the rank waits for its launcher, which ends it with SIGTERM."""
    command = program(tmp_path / "run", LEAVES.format(ends=ends))
    ours = environment(PYTHONPATH=str(ROOT), RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ours) as process:
        if rank:
            while not (tmp_path / "run" / "environment.json").is_file():  # its code is on record, and it waits
                assert process.poll() is None
            process.send_signal(number)
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, said = process.communicate()
    assert process.returncode == ENDS[ends], said
    assert "Bad file descriptor" not in said


def test_under_nohup_sighup_stays_ignored(tmp_path):
    body = "print('ready', flush=True); time.sleep(1.5); return 0"
    with started(["nohup", *program(tmp_path / "run", body)]) as process:
        process.send_signal(signal.SIGHUP)
        process.communicate()
    assert process.returncode == 0


TERM, HUP, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT


@pytest.mark.parametrize(
    ("numbers", "reason", "code"),
    [
        ((HUP,), StopReason.SIGHUP, None),
        ((HUP, HUP, HUP), StopReason.SIGHUP, None),
        ((INT, HUP, HUP), StopReason.CTRL_C, None),  # Ctrl-C has ended the terminal's own program
        ((HUP, TERM), StopReason.SIGTERM, None),  # of systemd, or of a launcher that ends
        ((HUP, TERM, TERM), StopReason.SIGTERM, 143),
        ((TERM, HUP, INT), StopReason.SIGTERM, 130),
        ((TERM, TERM), StopReason.SIGTERM, 143),
    ],
)
def test_a_second_signal_ends_a_run_at_once_but_not_sighup(monkeypatch, numbers, reason, code):
    left, now = [], [1000.0]
    monkeypatch.setattr("zerofit.recipe.errors.EXIT.code", None)
    monkeypatch.setattr("zerofit.health.shutdown.leave", left.append)
    monkeypatch.setattr("zerofit.health.shutdown.time.time", lambda: now[0])
    handler = ShutdownHandler(None, 0.0)
    for number in numbers:
        handler.receive(number)
        now[0] += 5
    assert handler.reason() is reason
    assert left == ([] if code is None else [code])


@pytest.mark.parametrize(("dead", "code"), [(False, 85), (True, None)])
def test_sigterm_of_a_launcher_whose_other_rank_has_died_is_no_stop(tmp_path, dead, code):
    """torchrun ends the remaining ranks with SIGTERM: the cause is elsewhere, and the run is not requeued for it."""
    folder = stale(tmp_path / "run")
    command = program(folder, SLEEP)
    ranks = [started(command, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2") for rank in range(2)]
    if dead:
        ranks[1].kill()
        ranks[1].wait()
    for rank in ranks:
        rank.terminate()
    codes = [rank.wait(timeout=20) for rank in ranks]
    for rank in ranks:
        rank.communicate()
    assert recorded(folder).get("exit_code") == code
    assert codes[0] == (143 if dead else 85)


def test_a_job_is_queued_again_as_the_table_says(tmp_path):
    """Of docs/resume.md, after five launches that make no update."""
    page = (ROOT / "docs" / "resume.md").read_text()
    table = page.partition("| how the run ended |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(rows) == 9
    expected = {"done": 0, "requeue": 5, "requeue, not after two failures at the same update": 1}
    for _, code, action in rows:
        number = 137 if code == "none" else int(code)
        refused = [reason_not_requeued(number, tmp_path / "run", is_first=launch == 0) for launch in range(5)]
        queued = next((launch for launch, why in enumerate(refused) if why), 5)
        assert queued == expected[action], code


def test_a_log_on_a_full_disk_ends_no_run(tmp_path):
    command = program(tmp_path / "run", "print('a line' * 9999, flush=True); return 0")
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, stderr=full, env=environment(PYTHONPATH=str(ROOT))).returncode == 0


# ------------------------------------------------------------------------------------------------------ the last words


LAUNCHER = """
import subprocess, sys
code = subprocess.run([sys.executable, sys.argv[-1]]).returncode
raise subprocess.CalledProcessError(code, "the command " * 20)
"""
RUN = """
from zerofit.recipe.errors import UserError, reports_user_errors

@reports_user_errors
def main(argv=None):
    raise {error}

raise SystemExit(main())
"""


def lines_of(folder, error: str, on_screen: bool, **variables: str) -> list[str]:
    """The lines that a launcher and its program print, which fails; on a terminal or not."""
    (folder / "launcher").write_text(LAUNCHER)
    (folder / "run.py").write_text(RUN.format(error=error))
    command = [sys.executable, folder / "launcher", folder / "run.py"]
    ours = environment(PYTHONPATH=str(ROOT), **variables)
    if on_screen:
        return on_a_terminal(command, env=ours)[1].split("\r\n")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ours)
    return done.stdout.splitlines()


LAST = [
    ("UserError('epochs = 0: no')", "error: epochs = 0: no"),
    ("ValueError('no')", "ValueError: no (its traceback is above)"),
    ("KeyboardInterrupt()", "interrupted while the run was starting: its folder is unchanged"),
]
ACCELERATE = {"ACCELERATE_DYNAMO_BACKEND": "NO"}


@pytest.mark.parametrize(("error", "last"), LAST)
@pytest.mark.parametrize("on_screen", [True, False])
def test_of_several_processes_torchruns_summary_has_it(tmp_path, error, last, on_screen):
    file = tmp_path / "error.json"
    lines = lines_of(tmp_path, error, on_screen, TORCHELASTIC_ERROR_FILE=str(file), **ACCELERATE)
    if error.startswith("Keyboard"):  # the launcher gets Ctrl-C itself
        assert lines.count(last) == 1
        assert not file.exists()
    else:
        assert json.loads(file.read_text())["message"]["message"] == last
        assert last not in lines


def test_a_log_and_a_launch_without_a_traceback_have_the_message_once(tmp_path):
    error, last = LAST[0]
    for on_screen, variables in ((False, ACCELERATE), (True, {"ZEROFIT_LAUNCHER": "{}"}), (True, {})):
        assert lines_of(tmp_path, error, on_screen, **variables).count(last) == 1
