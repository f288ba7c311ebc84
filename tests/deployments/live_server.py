"""Runs an app on a real socket in a thread, for clients that bring their own HTTP."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI


@contextlib.contextmanager
def live(app: FastAPI) -> Iterator[str]:
    """The base address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)


def eventually(claim: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Whether the claim becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if claim():
            return True
        time.sleep(0.01)
    return False
