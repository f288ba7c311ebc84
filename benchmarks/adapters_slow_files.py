"""A file server that takes its time over one adapter: `python -m benchmarks.adapters_slow_files FOLDER NAME SECONDS`; prints its port.

A process of its own, so that what it does is not done by the threads of whoever measures.
"""

import sys
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PIECE_S = 0.1


class SlowHandler(SimpleHTTPRequestHandler):
    def __init__(self, *args: Any, slow_name: str, slow_s: float, **kwargs: Any) -> None:
        self._slow_name = slow_name
        self._slow_s = slow_s
        super().__init__(*args, **kwargs)

    def copyfile(self, source: Any, outputfile: Any) -> None:
        path = Path(self.translate_path(self.path))
        if path.parent.name != self._slow_name or path.suffix != ".safetensors":
            return super().copyfile(source, outputfile)
        started, num_pieces = time.monotonic(), round(self._slow_s / PIECE_S)
        piece_len = -(-path.stat().st_size // num_pieces)
        for number in range(1, num_pieces + 1):
            outputfile.write(source.read(piece_len))
            outputfile.flush()
            time.sleep(max(0.0, started + number * PIECE_S - time.monotonic()))

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main(folder: str, slow_name: str, slow_s: float) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SlowHandler, directory=folder, slow_name=slow_name, slow_s=slow_s))
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
