"""Serves a folder over HTTP; files of adapters that are held back stop in the middle until they are let go."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

HALF_SENT = 100  # bytes that come before the wait


class FileServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # as real servers have; beyond the usual 5, who connects waits a second to try again

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.held: set[str] = set()  # names of adapters
        self.waiting = threading.Event()  # somebody has got half of a file
        self.let_go = threading.Event()
        self.num_reads = 0  # of weights


class _Handler(SimpleHTTPRequestHandler):
    server: FileServer

    def copyfile(self, source: Any, outputfile: IO[bytes]) -> None:
        if self.path.endswith(".safetensors"):
            self.server.num_reads += 1
        if self.path.endswith(".safetensors") and self.path.split("/")[-2] in self.server.held:
            outputfile.write(source.read(HALF_SENT))
            outputfile.flush()
            self.server.waiting.set()
            assert self.server.let_go.wait(60)
        super().copyfile(source, outputfile)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[FileServer]:
    server = FileServer(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
