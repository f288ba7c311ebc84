import asyncio
from contextlib import closing

import msgspec
import pytest
import zmq

from loray.cluster.channel import bind, connect
from loray.deployments.request import TokenEvent
from loray.deployments.token_channel import TokenReceiver, TokenSender

UNREADABLE = [b"\xc1", msgspec.msgpack.encode([["r", "no list"]]), msgspec.msgpack.encode([[b"\xff"]]), b"\x91\x91\xa1\xff"]


def test_messages_that_cannot_be_read_are_told_and_those_after_them_arrive(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        arrived: asyncio.Queue[TokenEvent] = asyncio.Queue()
        receiver = TokenReceiver("127.0.0.1", arrived.put_nowait)
        receiving = asyncio.create_task(receiver.run())
        with closing(connect(zmq.PUSH, receiver.address)) as sock:
            for message in [*UNREADABLE, msgspec.msgpack.encode([TokenEvent("r", [7])])]:
                sock.send(message)
            assert await asyncio.wait_for(arrived.get(), 5) == TokenEvent("r", [7])
        assert caplog.text.count("can't be read") == len(UNREADABLE)
        receiving.cancel()

    asyncio.run(scenario())


def test_an_address_that_is_not_kept_is_hung_up_on_and_the_others_go_on() -> None:
    kept, kept_address = bind(zmq.PULL, "127.0.0.1")
    dropped, dropped_address = bind(zmq.PULL, "127.0.0.1")
    hung_up = dropped.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    sender = TokenSender()
    sender.send([(kept_address, TokenEvent("1")), (dropped_address, TokenEvent("2"))])
    assert kept.poll(5000) and kept.recv() and dropped.poll(5000) and dropped.recv()
    sender.keep({kept_address})
    assert sender.knows(kept_address) and not sender.knows(dropped_address)
    assert hung_up.poll(5000), "its connection is still open"
    sender.send([(kept_address, TokenEvent("3")), (dropped_address, TokenEvent("4"))])
    assert kept.poll(5000) and dropped.poll(5000), "both can be written to, the dropped one anew"
    assert sender.lost() == []
    dropped.disable_monitor()
    sender.close()
