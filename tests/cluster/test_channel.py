import threading
import time

import pytest
import zmq

from loray.cluster import heartbeat
from loray.cluster.channel import Address, StepReceiver, StepSender, bind, connect
from loray.cluster.heartbeat import DriverHeartbeat, start_rank_heartbeat
from loray.models.step import AdapterLoad, Admission, Row, Sampling, Step, StepResult

HOST = "127.0.0.1"
STEP = Step(
    7,
    [AdapterLoad("folder", [1, 2], "signature")],
    [Admission(3, [1, 2, 3], [5], 16, [1, 2], Sampling(0.5, 10, 0.9, 2**63 - 1))],
    [Row(3, 2, [6], True)],
)


def test_every_rank_gets_the_same_step_and_rank_0_answers() -> None:
    sender = StepSender(HOST, world_size=2)
    receivers = [StepReceiver(address) for address in sender.addresses]
    sender.send(STEP)
    assert [receiver.receive() for receiver in receivers] == [STEP, STEP]
    result = StepResult(7, [42], [-0.5], {0: "unreadable"})
    receivers[0].reply(result)
    assert sender.receive(5000) == result


def test_a_waiting_receive_is_woken_from_another_thread() -> None:
    sender = StepSender(HOST, world_size=1)
    threading.Timer(0.1, sender.wake).start()
    started = time.monotonic()
    assert sender.receive(30_000) is None
    assert time.monotonic() - started < 20
    assert sender.receive(10) is None, "one wake-up wakes once"


@pytest.mark.parametrize("stranger", ["no key", "another key"])
def test_a_stranger_can_neither_speak_nor_listen(stranger: str) -> None:
    sock, address = bind(zmq.PULL, HOST)
    if stranger == "no key":
        other = zmq.Context.instance().socket(zmq.PUSH)
        other.linger = 0
        other.connect(address.endpoint)
    else:
        other = connect(zmq.PUSH, Address(address.endpoint, zmq.curve_keypair()[0]))
    other.send(b"let me in")
    assert not sock.poll(300)
    friend = connect(zmq.PUSH, address)
    friend.send(b"hello")
    assert sock.poll(5000) and sock.recv() == b"hello"


def test_silence_is_noticed_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "PERIOD_S", 0.05)
    monkeypatch.setattr(heartbeat, "DEADLINE_S", 0.5)
    silent: list[int] = []
    noticed, driver_gone = threading.Event(), threading.Event()

    def on_silence(rank: int) -> None:
        silent.append(rank)
        noticed.set()

    driver = DriverHeartbeat(HOST, 2, on_silence)
    start_rank_heartbeat(driver.address, 0, driver_gone.set)
    driver.start()
    assert noticed.wait(10) and silent == [1], "rank 1 never beat, rank 0 did"
    assert driver_gone.wait(10), "the driver's thread has ended, so rank 0 hears nothing any more"
