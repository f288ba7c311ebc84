import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loray.deployments.node_locks import NodeLocks

HOLDER = """
import sys
from pathlib import Path
from loray.deployments.node_locks import NodeLocks
locks = NodeLocks(Path(sys.argv[1]))
locks.share("mine")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pair(tmp_path: Path) -> tuple[NodeLocks, NodeLocks]:
    """As in two processes."""
    return NodeLocks(tmp_path / "new" / "lock"), NodeLocks(tmp_path / "new" / "lock")


def is_free(locks: NodeLocks, name: str) -> bool:
    with locks.if_free(name) as is_locked:
        pass
    assert [is_locked] == locks.are_free([name])
    return is_locked


def test_what_one_shares_nobody_has_alone_until_all_have_let_it_go(pair: tuple[NodeLocks, NodeLocks]) -> None:
    for locks in pair:
        locks.share("a")
    pair[0].share("b")
    for locks in pair:
        assert [is_free(locks, name) for name in "abc"] == [False, False, True]
    pair[0].unshare("a")
    assert not is_free(pair[0], "a") and not is_free(pair[1], "b")
    pair[1].unshare("a")
    assert is_free(pair[0], "a")


def test_what_somebody_has_alone_is_not_shared_and_not_had_by_another(pair: tuple[NodeLocks, NodeLocks]) -> None:
    with pair[0].if_free("a") as is_locked:
        assert is_locked and not is_free(pair[0], "a") and not is_free(pair[1], "a")
        pair[1].share("a")
    assert is_free(pair[0], "a")
    pair[1].share("a")
    assert not is_free(pair[0], "a")


def test_threads_and_processes_wait_for_their_turn(pair: tuple[NodeLocks, NodeLocks]) -> None:
    inside: list[int] = []

    def enter(locks: NodeLocks) -> None:
        for _ in range(50):
            with locks.only_one("a"):
                inside.append(1)
                assert sum(inside) == 1
                inside.append(-1)

    threads = [threading.Thread(target=enter, args=(pair[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(inside) == 400


def test_another_process_holds_until_it_dies(tmp_path: Path) -> None:
    locks = NodeLocks(tmp_path / "lock")
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        assert not is_free(locks, "mine") and is_free(locks, "other")
        holder.kill()
    assert is_free(locks, "mine")


def test_where_nothing_can_be_written_sharing_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    locks = NodeLocks(tmp_path / "file" / "lock")
    locks.share("a")
    locks.unshare("a")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"] and not (tmp_path / "file").read_bytes()
