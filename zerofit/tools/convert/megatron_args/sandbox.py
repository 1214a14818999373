"""Runs bash where it can do no harm: without the user's files, programs or network. Linux only.

`unshare` (util-linux) makes new namespaces of mounts, processes and network. In them, bash runs in a file system in
memory that holds nothing but a read-only copy of bash with its libraries; nothing else there can be executed. Time,
memory, processes and file sizes have limits. This file is the inner side as well, as a program of its own: it imports
the standard library only.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMESPACES = ("--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
SECONDS, CPU_SECONDS = 10, 3  # of a run; of each of its processes
MEMORY, FILE, FOLDER = 256 << 20, 1 << 20, "16m"  # bytes of a process, of a file, of all files
NOBODY = 65534
SHELL = ".bash"  # the folder of bash and its libraries
HOME = "here"  # where scripts run


class Unconfined(Exception):
    """This machine has no bash, or no namespaces to confine it to."""


class Sandbox:
    """Use with `with`. Raises Unconfined."""

    def __enter__(self) -> "Sandbox":
        self.root = tempfile.mkdtemp()
        own_user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
        command = ["unshare", *own_user, *NAMESPACES, sys.executable, "-I", "-S", __file__, self.root]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            self.inner = subprocess.Popen(command, **pipes, text=True, encoding="utf-8", env={"PATH": os.defpath})
        except OSError as error:
            os.rmdir(self.root)
            raise Unconfined(f"unshare: {error.strerror}") from None
        if self.inner.stdout.readline() != "ready\n":
            why = self.inner.communicate()[1].strip().splitlines()
            os.rmdir(self.root)
            raise Unconfined(why[-1] if why else "unshare failed")
        return self

    def __exit__(self, *_) -> None:
        self.inner.communicate()
        os.rmdir(self.root)

    def run(self, files: dict[str, str], folders: list[str], command: list[str], env: dict[str, str]) -> dict:
        """Run bash with these arguments. Paths are absolute, and those of the sandbox.

        Returns {"stderr": text, "files": {path: text} of all files afterwards, "in_time": whether it ended by itself}.
        """
        job = {"files": files, "folders": folders, "command": command, "env": env}
        self.inner.stdin.write(json.dumps(job) + "\n")
        self.inner.stdin.flush()
        return json.loads(self.inner.stdout.readline())


# ------------------------------------------------------------------------------------------------------ the inner side


def _serve(root: Path) -> None:
    bash = _prepare(root)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(root, bash, **json.loads(line))), flush=True)


def _prepare(root: Path) -> list[str]:
    """Mount the file system. Returns the words that start bash in it."""
    options = f"nosuid,nodev,size={FOLDER}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},noexec,nr_inodes=4096", "tmpfs", root], check=True)
    shell = root / SHELL
    shell.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", shell], check=True)
    bash = shutil.which("bash")
    if not bash:
        sys.exit("there is no bash")
    listed = subprocess.run(["ldd", bash], capture_output=True, text=True).stdout
    libraries = re.findall(r"(/\S+) \(0x", listed)
    for file in [bash, *libraries]:
        shutil.copy(file, shell / Path(file).name)
    (shell / Path(bash).name).rename(shell / "bash")
    subprocess.run(["mount", "-o", f"remount,ro,{options}", "tmpfs", shell], check=True)
    loader = [Path(file).name for file in libraries if Path(file).name.startswith("ld")]
    start = [f"/{SHELL}/{loader[0]}", "--library-path", f"/{SHELL}"] if loader else []
    return [*start, f"/{SHELL}/bash"]


def _run(root: Path, bash: list[str], files: dict, folders: list, command: list, env: dict) -> dict:
    for old in root.iterdir():
        if old.name != SHELL:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for folder in ("/dev", "/tmp", f"/{HOME}", *folders):
        try:
            os.makedirs(f"{root}{folder}", exist_ok=True)
        except OSError:
            continue  # a file is in its place, or the name is too long: the script fails there in the same way
    for path, text in {"/dev/null": "", **files}.items():
        (root / path.lstrip("/")).write_text(text, encoding="utf-8")
    for path, _, names in os.walk(root):
        if path != str(root / SHELL):
            for name in ("", *names):
                os.chmod(os.path.join(path, name), 0o777)
    with (root / ".stderr").open("wb") as stderr:
        tasks = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
        subprocess.Popen(
            [*bash, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            preexec_fn=lambda: _confine(root, tasks + 200),
        ).returncode = 0
    in_time = _wait()
    found = {}
    for path, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != SHELL]
        for file in (Path(path, name) for name in names):
            found["/" + str(file.relative_to(root))] = file.read_text(encoding="utf-8", errors="replace")
    return {"stderr": found.pop("/.stderr", ""), "files": found, "in_time": in_time}


def _confine(root: Path, processes: int) -> None:
    limits = {
        resource.RLIMIT_CPU: CPU_SECONDS,
        resource.RLIMIT_AS: MEMORY,
        resource.RLIMIT_FSIZE: FILE,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_CORE: 0,
    }
    os.chroot(root)
    os.chdir(f"/{HOME}")
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    except OSError:
        pass  # a user namespace of one user: its root is that user outside


def _wait() -> bool:
    """Wait until all processes have ended, background ones too, or kill them: this process is the init of them all."""
    end, in_time = time.monotonic() + SECONDS, True
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                in_time = False  # more than CPU_SECONDS
            if process == 0:
                if time.monotonic() > end:
                    in_time = False
                    os.kill(-1, signal.SIGKILL)
                time.sleep(0.002)
        except (ChildProcessError, ProcessLookupError):
            return in_time


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
