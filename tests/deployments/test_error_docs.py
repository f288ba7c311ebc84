"""Which errors the API's own description names for each route: those that can be provoked there, all of them and no others."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any

import httpx
import jsonschema
import pytest

from loray.deployments.adapter_records import AdapterChange, Changed
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.errors import (
    AdapterFailed,
    AdapterNotFound,
    DeadlineExceeded,
    GrammarFailed,
    Incomplete,
    InvalidRequest,
    LorayError,
    Overloaded,
    Unhealthy,
)
from loray.deployments.http_app import make_app
from loray.deployments.request import GenerationRequest, TokenEvent
from tests.deployments.scripted_backend import BASE, ScriptedBackend, run, service_of, status_of

MAX_BODY_BYTES = 4096
NUM_OPERATIONS = 26
GENERATE, EMBED = {"inputs": "hello"}, {"inputs": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    "/": GENERATE,
    "/generate": GENERATE,
    "/generate_stream": GENERATE,
    "/invocations": GENERATE,
    "/embed": EMBED,
    "/classify": EMBED,
    "/classify_batch": {"inputs": ["hello"]},
    "/tokenize": {"inputs": "hello"},
    "/v1/chat/completions": {"model": BASE, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"model": BASE, "prompt": "hello"},
    "/v1/embeddings": {"model": BASE, "input": "hello"},
    "/admin/adapters": {"adapter_id": "poet"},
}
# What comes to ingress: of a request, and of any other question.
FAILURES = [kind("why") for kind in (InvalidRequest, GrammarFailed, AdapterFailed, AdapterNotFound, Overloaded, DeadlineExceeded)]
UNANSWERED = [Incomplete("why"), Unhealthy("why")]


class Failing(ScriptedBackend):
    """Does well unless there is an `error` to raise; while its gate is closed nothing is generated."""

    def __init__(self) -> None:
        super().__init__([[65]], finish="length")
        self.error: LorayError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_held = False

    def _raise(self) -> None:
        if self.error:
            raise self.error

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self._raise()
        self.is_held = not self.gate.is_set()
        await self.gate.wait()
        async for event in super().generate(request):
            yield event

    async def adapters(self) -> list[str]:
        self._raise()
        return await super().adapters()

    async def adapter_statuses(self) -> dict[str, list[AdapterStatus]]:
        self._raise()
        return await super().adapter_statuses()

    async def change_adapter(self, change: AdapterChange) -> Changed:
        self._raise()
        kept = dict(self.statuses)  # what is unloaded is to be asked for again
        changed = await super().change_adapter(change)
        self.statuses = kept
        return changed

    async def healthy(self) -> bool:
        self._raise()
        return True


class Provoked:
    """A server, and the answers that it has given to each operation (method and path)."""

    def __init__(self, keys: dict[str, str]) -> None:
        self.backend = Failing()
        limits = {"max_body_bytes": MAX_BODY_BYTES, "max_concurrent_requests": 1, "body_timeout_s": 0.02}
        self.service = service_of(self.backend, api_keys=keys, limits=limits)
        self._keys = keys
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(self.service)), base_url="http://loray")
        self.described: dict[tuple[str, str], dict[str, Any]] = {}  # the responses of each
        self.answers: dict[tuple[str, str], list[httpx.Response]] = defaultdict(list)

    async def describe(self) -> None:
        description = (await self.client.get("/openapi.json", headers=self.key_to("/openapi.json"))).json()
        self.described = {
            (method, path): operation["responses"] for path, found in description["paths"].items() for method, operation in found.items()
        }
        assert len(self.described) == NUM_OPERATIONS

    def key_to(self, path: str) -> dict[str, str]:
        key = self._keys.get("admin" if path.startswith("/admin") else "inference")
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def ask(self, operations: Iterable[tuple[str, str]], name: str = "poet", has_key: bool = True, **sent: Any) -> None:
        """What has a body gets one that works, unless another is `sent`. `name` is the adapter in the paths."""
        for method, path in operations:
            body = {"json": BODIES[path]} if method == "post" and path in BODIES else {}
            url = path.replace("{adapter_id}", name).replace("{model_id}", name)
            answer = await self.client.request(method, url, headers=self.key_to(path) if has_key else {}, **(sent or body))
            self.answers[method, path].append(answer)


async def never() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.Event().wait()


async def fail_within(server: Provoked) -> None:
    """The routes' own errors."""
    backend, all_operations = server.backend, list(server.described)
    for status in (status_of("poet"), status_of("poet", "failed", error="torn")):
        backend.statuses = {"replica": [status]}
        await server.ask(all_operations, "poet")
        await server.ask(all_operations, "pirate")
    await server.ask(all_operations, json={"unknown": 1}, params={"state": "unknown"})
    of_model = [(method, path) for method, path in all_operations if method == "post" and path in BODIES and path != "/admin/adapters"]
    for error in [*FAILURES, *UNANSWERED]:
        backend.error, server.service.has_generated = error, False
        await server.ask(all_operations if error in UNANSWERED else of_model)
    backend.error = None


async def refuse_before(server: Provoked) -> None:
    """The guards' errors."""
    all_operations = list(server.described)
    await server.ask(all_operations, has_key=False)
    await server.ask(all_operations, content=b" " * (MAX_BODY_BYTES + 1))
    for operation in all_operations:
        await server.ask([operation], content=never())
    server.backend.gate.clear()
    holding = asyncio.create_task(server.client.post("/generate", json=GENERATE, headers=server.key_to("/generate")))
    while not server.backend.is_held:
        await asyncio.sleep(0)
    server.service.has_generated = True
    await server.ask(all_operations)
    server.backend.gate.set()
    assert (await holding).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"inference": "sesame", "admin": "root"}, {"admin": "root"}], ids=["both keys", "admin key"])
def test_every_route_is_described_with_what_it_may_answer_and_with_nothing_else(keys: dict[str, str]) -> None:
    async def scenario() -> None:
        server = Provoked(keys)
        await server.describe()
        await fail_within(server)
        await refuse_before(server)
        for operation, responses in server.described.items():
            answers = server.answers[operation]
            assert {str(answer.status_code) for answer in answers} == responses.keys(), operation
            for answer in answers:
                if answer.status_code >= 400:
                    jsonschema.validate(answer.json(), responses[str(answer.status_code)]["content"]["application/json"]["schema"])

    run(scenario())


def test_where_nobody_is_an_admin_that_is_what_admins_are_told() -> None:
    async def scenario() -> None:
        server = Provoked({})
        await server.describe()
        await server.ask(operation for operation in server.described if operation[1].startswith("/admin"))
        assert len(server.answers) > 5
        for operation, (answer,) in server.answers.items():
            assert answer.status_code == 403 and {"401", "403"} & server.described[operation].keys() == {"403"}, operation

    run(scenario())
