"""The side channel that carries tokens from drivers to ingress replicas: one message a step and ingress.

A Serve response stream costs ten times as much CPU a token. Life cycle, cancellation and accounting stay with the Serve call.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec
import zmq
import zmq.asyncio

from loray.cluster.channel import Address, bind, connect
from loray.deployments.request import TokenEvent

logger = logging.getLogger("ray.serve.loray")

# The ingress has closed its end, or there is nobody at its address: it listens before it hands the address out.
LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


class TokenSender:
    """The driver's end. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._sockets: dict[Address, zmq.Socket] = {}
        self._monitors: dict[Address, zmq.Socket] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, events: Iterable[tuple[Address, TokenEvent]]) -> None:
        by_address = defaultdict(list)
        for address, event in events:
            by_address[address].append(event)
        for address, batch in by_address.items():
            if address not in self._sockets:
                sock = self._sockets[address] = connect(zmq.PUSH, address)
                self._monitors[address] = sock.get_monitor_socket(LOST)
            self._sockets[address].send(self._encoder.encode(batch))

    def knows(self, address: Address) -> bool:
        return address in self._sockets

    def keep(self, addresses: set[Address]) -> None:
        """Close what leads to other addresses: an ingress that is gone must not hold memory here."""
        for address in self._sockets.keys() - addresses:
            self._close(address)

    def lost(self) -> list[Address]:
        """Those whose ingress has gone since the last call. They are forgotten here."""
        gone = [address for address, monitor in self._monitors.items() if monitor.poll(0)]
        for address in gone:
            self._close(address)
        return gone

    def close(self) -> None:
        self.keep(set())

    def _close(self, address: Address) -> None:
        sock = self._sockets.pop(address)
        sock.disable_monitor()  # first: an event that finds its monitor closed would block ZeroMQ's thread for ever
        self._monitors.pop(address).close()
        sock.close(linger=1000)


class TokenReceiver:
    """An ingress replica's end: hands every event to `deliver`. A message that can't be read is left out: its requests miss tokens then,
    and find out by themselves."""

    def __init__(self, node_ip: str, deliver: Callable[[TokenEvent], None]) -> None:
        self._socket, self.address = bind(zmq.PULL, node_ip, zmq.asyncio.Context.instance())
        self._deliver = deliver
        self._decoder = msgspec.msgpack.Decoder(list[TokenEvent])

    async def run(self) -> None:
        while True:
            message: bytes = await self._socket.recv()  # type: ignore[misc]  # an asyncio socket's recv is awaitable
            try:
                events = self._decoder.decode(message)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.error("a message of %d bytes with tokens can't be read: %s", len(message), error)
                continue
            for event in events:
                self._deliver(event)
