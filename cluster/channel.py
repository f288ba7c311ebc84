"""ZeroMQ sockets between the processes of one application: steps, heartbeats, tokens. Encrypted and closed to strangers.

The side that binds makes a CURVE key pair and hands its address and public key out over Ray calls only. Who does not know that
key can neither speak nor listen. Messages are msgpack of the structs they carry; no pickle.
"""

import socket
from collections.abc import Callable

import msgspec
import zmq

from loray.cluster.waker import Waker
from loray.models.step import Step, StepResult

POLL_MS = 1  # how late a rank may see that the GPU is through, where no step waits


class Address(msgspec.Struct, frozen=True):
    """Where a socket is bound. Knowing `public_key` is what entitles a process to connect."""

    endpoint: str
    public_key: bytes


def bind(kind: int, node_ip: str, context: zmq.Context | None = None) -> tuple[zmq.Socket, Address]:
    """A bound socket on a free port of this node's own address."""
    public_key, secret_key = zmq.curve_keypair()
    sock = _socket(kind, context)
    sock.curve_secretkey, sock.curve_publickey, sock.curve_server = secret_key, public_key, True
    host = f"[{node_ip}]" if ":" in node_ip else node_ip
    port = sock.bind_to_random_port(f"tcp://{host}")
    return sock, Address(f"tcp://{host}:{port}", public_key)


def connect(kind: int, address: Address) -> zmq.Socket:
    sock = _socket(kind)
    sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
    sock.curve_serverkey = address.public_key
    sock.connect(address.endpoint)
    return sock


def _socket(kind: int, context: zmq.Context | None = None) -> zmq.Socket:
    sock = (context or zmq.Context.instance()).socket(kind)
    sock.ipv6 = socket.has_ipv6
    sock.linger = 0
    sock.sndhwm = sock.rcvhwm = 0  # nothing is dropped; what bounds the queues is one step ahead
    return sock


class StepSender:
    """The driver's end: one socket a rank, the same bytes to each. Belongs to the engine's thread once started."""

    def __init__(self, node_ip: str, world_size: int) -> None:
        bound = [bind(zmq.DEALER, node_ip) for _ in range(world_size)]
        self._sockets = [sock for sock, _ in bound]
        self.addresses = [address for _, address in bound]
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepResult)
        self._poller = zmq.Poller()
        self._poller.register(self._sockets[0], zmq.POLLIN)
        self._waker = Waker()
        self._poller.register(self._waker.fd, zmq.POLLIN)

    def send(self, step: Step) -> None:
        message = self._encoder.encode(step)
        for sock in self._sockets:
            sock.send(message)

    def wake(self) -> None:
        """Ends a waiting receive. Any thread may call this."""
        self._waker.wake()

    def receive(self, timeout_ms: int) -> StepResult | None:
        """Rank 0's next result; None when woken, or when time ran out first."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._waker.fd in ready:
            self._waker.clear()
        if self._sockets[0] in ready:
            return self._decoder.decode(self._sockets[0].recv())
        return None


class StepReceiver:
    """A rank's end."""

    def __init__(self, address: Address) -> None:
        self._socket = connect(zmq.DEALER, address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Step)

    def receive(self, until: Callable[[], bool] | None = None) -> Step | None:
        """The next step; None when `until` says so first."""
        while until is not None and not self._socket.poll(POLL_MS):
            if until():
                return None
        return self._decoder.decode(self._socket.recv())

    def reply(self, result: StepResult) -> None:
        self._socket.send(self._encoder.encode(result))
