import zmq

from loray.cluster.channel import bind
from loray.deployments.request import TokenEvent
from loray.deployments.token_channel import TokenSender


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
