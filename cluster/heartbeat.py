"""Signs of life between the driver and its ranks, both ways, apart from the steps.

Ray notices a dead process at once but a cut network only after a minute. A rank that hears nothing from its driver exits and
frees its GPU; a driver that hears nothing from a rank gives its replica up.
"""

import threading
import time
from collections.abc import Callable

import zmq

from loray.cluster.channel import Address, bind, connect

PERIOD_S = 1.0
DEADLINE_S = 15.0  # generous: a rank that loads a big adapter on a busy machine may be slow to answer


class DriverHeartbeat:
    """Answers every rank's beat; calls `on_silence(rank)` once if one has been silent for too long."""

    def __init__(self, node_ip: str, world_size: int, on_silence: Callable[[int], None]) -> None:
        self._socket, self.address = bind(zmq.ROUTER, node_ip)
        self._last_seen: dict[int, float] = {}
        self._world_size = world_size
        self._on_silence = on_silence
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """From now on every rank must be heard."""
        self._last_seen = dict.fromkeys(range(self._world_size), time.monotonic())
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._socket.poll(int(PERIOD_S * 1000))
            while self._socket.poll(0):
                identity, rank = self._socket.recv_multipart()
                self._last_seen[int(rank)] = time.monotonic()
                self._socket.send_multipart([identity, rank])
            oldest = min(self._last_seen, key=self._last_seen.__getitem__)
            if time.monotonic() - self._last_seen[oldest] > DEADLINE_S:
                return self._on_silence(oldest)


def start_rank_heartbeat(address: Address, rank: int, on_silence: Callable[[], None]) -> None:
    """Beat from a thread of its own; `on_silence` is called if the driver does not answer any more."""
    threading.Thread(target=_beat, args=(address, rank, on_silence), name="heartbeat", daemon=True).start()


def _beat(address: Address, rank: int, on_silence: Callable[[], None]) -> None:
    sock = connect(zmq.DEALER, address)
    last_seen = time.monotonic()
    while time.monotonic() - last_seen <= DEADLINE_S:
        sock.send(str(rank).encode())
        if sock.poll(int(PERIOD_S * 1000)):
            while sock.poll(0):
                sock.recv()
            last_seen = time.monotonic()
            time.sleep(PERIOD_S)
    on_silence()
