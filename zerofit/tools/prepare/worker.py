"""A worker process of `zerofit prepare`: takes parts of the input from a socket, and sends back what to write."""

import os
import queue
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from zerofit.tools.prepare.cutting import work
from zerofit.tools.prepare.encode import Mismatch, encoder_of


def serve(descriptor: int) -> None:
    """Receive a Setup from a socket and answer "ready"; then receive parts of the input and send what `work` makes of
    each, until the other end is closed. An error is sent as well."""
    line = Connection(descriptor)
    tasks: queue.SimpleQueue = queue.SimpleQueue()

    def receive() -> None:  # a thread: so neither side waits for the other while both send
        try:
            while True:
                tasks.put(line.recv())
        except (EOFError, OSError):
            os._exit(0)  # the parent has ended, or needs no more

    def send(answer: Any) -> None:
        try:
            line.send(answer)
        except OSError:
            os._exit(0)

    setup = line.recv()
    threading.Thread(target=receive, daemon=True).start()
    encoder = _attempt(lambda: encoder_of(setup))
    send(encoder if isinstance(encoder, Exception) else "ready")
    while True:
        task = tasks.get()
        send(_attempt(lambda: work(encoder, setup, task)))  # noqa: B023


def _attempt(do) -> Any:
    """The result of `do`, or its error with the traceback as text."""
    try:
        return do()
    except Mismatch as error:
        return error
    except Exception:
        return RuntimeError(traceback.format_exc())
