"""What callers learn when a driver or the registry fails, over a handle whose calls all do. The causes are the log's."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RaySystemError, RayTaskError

from loray.deployments.driver_client import DriverClient
from loray.deployments.errors import AdapterFailed, Incomplete, LorayError
from loray.deployments.request import AdapterRef
from tests.deployments.scripted_backend import run

SECRET = "/secret/path, pid=7"


class Failing:
    """Serve's handle to a replica whose methods raise, or that is lost, and the way to such a registry."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: bytes) -> Any:
            raise self._error

        return SimpleNamespace(remote=call)

    async def ask(self, method: str, *messages: bytes) -> bytes:
        raise self._error


QUESTIONS: dict[str, Callable[[DriverClient], Awaitable[Any]]] = {
    "adapters": lambda client: client.adapters(),
    "chat_template": lambda client: client.chat_template(AdapterRef(adapter_id="pirate")),
    "statuses": lambda client: client.adapter_statuses(),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "failing"])
def test_what_befalls_another_process_is_for_the_log_alone(caplog: pytest.LogCaptureFixture, question: str, is_lost: bool) -> None:
    failure = RayTaskError(question, f"a traceback of {SECRET}", PermissionError(SECRET)).as_instanceof_cause()
    replica = Failing(RaySystemError(SECRET) if is_lost else failure)

    async def ask() -> None:
        await QUESTIONS[question](DriverClient(replica, replica))  # type: ignore[arg-type]

    with pytest.raises(LorayError) as told:
        run(ask())
    assert "secret" not in told.value.message and SECRET in caplog.text
    assert isinstance(told.value, Incomplete) or is_lost
    assert is_lost or told.value.message.endswith("failed; its log says why")


def test_a_refusal_of_the_driver_stays_what_it_is() -> None:
    refusal = RayTaskError("chat_template", "a traceback", AdapterFailed("too large")).as_instanceof_cause()

    async def ask() -> None:
        await DriverClient(Failing(refusal), None).chat_template(AdapterRef(adapter_id="pirate"))  # type: ignore[arg-type]

    with pytest.raises(AdapterFailed, match="^too large$"):
        run(ask())
