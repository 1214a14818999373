"""Machines for tests: network namespaces of this one, each with its own name and address (needs root, Linux).

Their cables go to a switch that is a namespace as well: nothing outside is changed, and nothing outside is reached.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from helpers import ROOT, environment

NEEDS = ("ip", "unshare", "hostname")
HOSTS = Path("/etc/netns")  # `ip netns exec` lets a namespace see its own /etc/hosts


def why_not() -> str:
    """Why there can be no such machines here; empty where there can."""
    if sys.platform != "linux" or os.geteuid():
        return "network namespaces need Linux and root"
    if missing := [program for program in NEEDS if not shutil.which(program)]:
        return f"{', '.join(missing)}: not installed"
    made = subprocess.run(["ip", "netns", "add", name := f"zf{os.getpid()}"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"no network namespaces: {made.stderr.strip()}" if made.returncode else ""


def sh(line: str) -> str:
    return subprocess.run(line.split(), capture_output=True, text=True, check=True).stdout


class Machine:
    """One namespace. Processes are started by `start`, which all end with `stop`."""

    def __init__(self, fleet: str, number: int):
        self.namespace, self.name, self.number = f"{fleet}m{number}", f"gpu{number:02d}", number
        self.address = f"10.77.0.{number + 1}"
        self.started: list[subprocess.Popen] = []

    def start(self, *command: object, log: Path, **variables: str) -> subprocess.Popen:
        """Start a command; what it prints is appended to a log."""
        line = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*line, self.name, *map(str, command)],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment(GLOO_SOCKET_IFNAME="eth0", **variables),
            )
        self.started.append(process)
        return process

    def processes(self) -> list[psutil.Process]:
        pids = sh(f"ip netns pids {self.namespace}").split()
        return [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]

    def ranks(self) -> dict[int, psutil.Process]:
        """{rank: its process} of the training that runs here."""
        found = {}
        for process in self.processes():
            try:
                variables, parent = process.environ(), process.parent()
                if "LOCAL_RANK" in variables and parent and "LOCAL_RANK" not in parent.environ():
                    found[int(variables["RANK"])] = process
            except psutil.Error:
                continue
        return found

    def power_off(self) -> None:
        """All processes are gone at once, and with them the machine's connections, without a word to others."""
        self.unplug()
        for process in self.processes():
            process.send_signal(signal.SIGKILL)
        for process in self.started:
            process.wait()

    def knows(self, name: str, address: str) -> None:
        """Another machine's name, as a cluster's DNS would tell it."""
        with (HOSTS / self.namespace / "hosts").open("a") as hosts:
            hosts.write(f"{address} {name}\n")

    def unplug(self) -> None:
        sh(f"ip -n {self.namespace} link set eth0 down")

    def plug(self) -> None:
        sh(f"ip -n {self.namespace} link set eth0 up")


class Fleet:
    """Some machines at one switch."""

    def __init__(self, count: int):
        self.name = f"zf{os.getpid()}"
        self.machines = [Machine(self.name, number) for number in range(count)]

    def __enter__(self) -> "Fleet":
        sh(f"ip netns add {self.name}")
        sh(f"ip -n {self.name} link add switch type bridge")
        sh(f"ip -n {self.name} link set switch up")
        hosts = "".join(f"{machine.address} {machine.name}\n" for machine in self.machines)
        for machine in self.machines:
            space, cable = machine.namespace, f"c{machine.number}"
            sh(f"ip netns add {space}")
            sh(f"ip link add eth0 netns {space} type veth peer name {cable} netns {self.name}")
            sh(f"ip -n {self.name} link set {cable} master switch up")
            sh(f"ip -n {space} address add {machine.address}/24 dev eth0")
            sh(f"ip -n {space} link set lo up")
            sh(f"ip -n {space} link set eth0 up")
            (HOSTS / space).mkdir(parents=True)
            (HOSTS / space / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        return self

    def stop(self) -> None:
        """End all processes, and repair what was unplugged."""
        for machine in self.machines:
            for process in machine.processes():
                process.send_signal(signal.SIGKILL)
            for started in machine.started:
                started.wait()
            machine.started.clear()
            machine.plug()

    def __exit__(self, *_) -> None:
        self.stop()
        for machine in self.machines:
            shutil.rmtree(HOSTS / machine.namespace)
            sh(f"ip netns del {machine.namespace}")
        sh(f"ip netns del {self.name}")


def wait_for(condition, limit_s: float, what: str) -> None:
    """Wait until `condition()` is true.

    Raises:
        AssertionError: it is not, for so long.
    """
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, f"not within {limit_s:g} s: {what}"
        time.sleep(0.1)
