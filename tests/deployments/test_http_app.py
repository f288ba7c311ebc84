import asyncio
import threading
from typing import Any

import httpx
import pytest

from loray.deployments import health
from loray.deployments.http_app import make_app
from tests.deployments.live_server import eventually, live
from tests.deployments.scripted_backend import BASE, HF, MAX_TOTAL_TOKENS, ScriptedBackend, run, saying, send, service_of

JSON = {"Content-Type": "application/json"}
NO_JSON = ["text/json", "json", "application/jsonfoo", "application/x-json", "application/a/b+json"]
KEY = {"api_keys": {"inference": "sesame"}}
INFO = "model_id model_sha model_dtype model_device_type max_concurrent_requests max_best_of max_stop_sequences max_input_length"
INFO += " max_total_tokens max_batch_total_tokens version attention adapter_roots"


@pytest.mark.parametrize("path", ["/health", "/ping", "/"])
def test_health_is_whether_tokens_can_be_made(path: str) -> None:
    backend = saying("x")
    assert send(service_of(backend), "GET", path).status_code == 200
    backend.is_healthy = False
    response = send(service_of(backend), "GET", path)
    assert (response.status_code, response.json()) == (503, {"error": "unhealthy", "error_type": "healthcheck"})


def test_a_backend_that_cannot_answer_is_unhealthy() -> None:
    class Down(ScriptedBackend):
        async def healthy(self) -> bool:
            raise ConnectionError("no driver")

    assert send(service_of(Down([])), "GET", "/health").status_code == 503


def test_a_backend_that_does_not_answer_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ANSWER_S", 0.02)

    class Silent(ScriptedBackend):
        async def healthy(self) -> bool:
            await asyncio.Event().wait()
            return True

    assert send(service_of(Silent([])), "GET", "/health").status_code == 503


def test_startup_makes_one_real_token_once() -> None:
    backend = saying("")
    service = service_of(backend)
    assert [send(service, "GET", "/startup").status_code for _ in range(2)] == [200, 200]
    assert [request.max_new_tokens for request in backend.requests] == [1]


def test_startup_is_known_from_a_users_generation() -> None:
    backend = saying("x")
    service = service_of(backend)
    send(service, "POST", "/generate", json={"inputs": "hi"})
    assert send(service, "GET", "/startup").status_code == 200 and len(backend.requests) == 1


def test_those_who_ask_for_startup_wait_for_the_same_token_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ANSWER_S", 0.02)
    asked: list[asyncio.Event] = []

    class Waiting(ScriptedBackend):
        async def generate(self, request: Any) -> Any:
            asked.append(asyncio.Event())
            await asked[-1].wait()
            async for event in super().generate(request):
                yield event

    async def scenario() -> list[int]:
        transport = httpx.ASGITransport(make_app(service_of(Waiting([[5]], finish="length"))))
        async with httpx.AsyncClient(transport=transport, base_url="http://loray") as client:
            answers = await asyncio.gather(*[client.get("/startup") for _ in range(3)])
            answers.append(await client.get("/startup"))
            asked[0].set()
            monkeypatch.setattr(health, "ANSWER_S", 10)
            answers.append(await client.get("/startup"))
            return [answer.status_code for answer in answers]

    assert run(scenario()) == [503] * 4 + [200]
    assert len(asked) == 1


def test_startup_fails_until_a_token_was_made() -> None:
    response = send(service_of(ScriptedBackend([])), "GET", "/startup")
    assert (response.status_code, response.json()["error_type"]) == (503, "healthcheck")


def test_info_tells_the_model_and_the_limits() -> None:
    info = send(service_of(saying("x")), "GET", "/info").json()
    assert set(INFO.split()) <= info.keys()
    assert (info["model_id"], info["max_total_tokens"], info["attention"]) == (BASE, MAX_TOTAL_TOKENS, "scripted")


def test_the_api_describes_itself() -> None:
    paths = send(service_of(saying("x")), "GET", "/openapi.json").json()["paths"]
    assert {"/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/info"} <= paths.keys()
    assert send(service_of(saying("x")), "GET", "/docs").status_code == 200


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"content": '{"inputs": ', "headers": JSON}, "not valid JSON"),
        ({"content": b"\xff\xfe{}", "headers": JSON}, "not valid JSON"),
        ({"content": "[" * 100_000, "headers": JSON}, "not valid JSON"),
        ({"content": "{}", "headers": {"Content-Type": "text/plain"}}, "application/json"),
        *[({"content": "{}", "headers": {"Content-Type": name}}, "application/json") for name in NO_JSON],
        ({"data": {"inputs": "x"}}, "application/json"),
        ({}, "application/json"),
        ({"json": []}, "valid dictionary"),
        ({"json": "text"}, "valid dictionary"),
        ({"json": None}, ""),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused_in_each_shape(kwargs: dict[str, Any], says: str) -> None:
    native = send(service_of(saying("x")), "POST", "/generate", **kwargs)
    assert (native.status_code, native.json()["error_type"]) == (422, "validation")
    compatible = send(service_of(saying("x")), "POST", "/v1/chat/completions", **kwargs)
    assert (compatible.status_code, compatible.json()["error"]["type"]) == (400, "invalid_request_error")
    assert says in native.json()["error"] and says in compatible.json()["error"]["message"]


@pytest.mark.parametrize("name", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
def test_a_wrong_body_of_any_of_jsons_names_is_told_what_is_wrong_in_it(name: str) -> None:
    response = send(service_of(saying("x")), "POST", "/generate", content="[]", headers={"Content-Type": name})
    assert response.status_code == 422 and "valid dictionary" in response.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nope", 404), ("POST", "/generate/", 404), ("GET", "/generate", 405), ("DELETE", "/", 405)]
)
def test_an_unknown_route_answers_in_the_native_shape(method: str, path: str, status: int) -> None:
    response = send(service_of(saying("x")), method, path)
    assert (response.status_code, response.json().keys()) == (status, {"error", "error_type"})


@pytest.mark.parametrize("path", ["/prefix", "/prefix/"])
def test_the_applications_prefix_is_its_root_with_and_without_a_slash(path: str) -> None:
    """lorax-client posts to the bare address that it was given."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(service_of(saying("x"))), root_path="/prefix")
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json={"inputs": "hi"})

    response = asyncio.run(ask())
    assert response.status_code == 200 and "generated_text" in response.text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nope", 404), ("GET", "/v1/completions", 405)])
def test_an_unknown_v1_route_answers_in_openais_shape(method: str, path: str, status: int) -> None:
    response = send(service_of(saying("x")), method, path)
    assert (response.status_code, response.json()["error"].keys()) == (status, {"message", "type", "param", "code"})


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_bug_answers_in_shape_and_tells_nothing(path: str) -> None:
    response = send(service_of(ScriptedBackend([KeyError("secret")])), "POST", path, json={"inputs": "hello"})
    assert (response.status_code, response.json()) == (500, {"error": "internal error", "error_type": "incomplete_generation"})


def test_a_source_that_no_header_can_carry_is_written_in_ascii() -> None:
    response = send(service_of(saying("x")), "POST", "/generate", json={"inputs": "hi", "parameters": {"adapter_id": "日://x"}})
    assert (response.status_code, response.headers["x-adapter-source"]) == (200, "%E6%97%A5")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/"),
        ("POST", "/generate"),
        ("GET", "/info"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/nope"),
    ],
)
@pytest.mark.parametrize("header", [None, "Bearer wrong", "sesame", "Bearer sésame"])
def test_without_the_key_nothing_is_answered(method: str, path: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    response = send(service_of(saying("x"), **KEY), method, path, headers=headers)
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    code = response.json()["error"]["code"] if path.startswith("/v1") else response.json()["error_type"]
    assert code in ("invalid_api_key", "unauthorized")


def test_with_the_key_everything_is_answered_and_health_needs_none() -> None:
    service = service_of(saying("x"), **KEY)
    headers = {"Authorization": "Bearer sesame"}
    assert send(service, "POST", "/generate", json={"inputs": "hello"}, headers=headers).status_code == 200
    assert [send(service, "GET", path).status_code for path in ["/", "/health", "/ping", "/startup"]] == [200] * 4


@pytest.mark.parametrize(("text", "is_off_loop"), [("hello world", False), ("hello world " * 1000, True)])
def test_a_long_prompt_is_tokenized_off_the_event_loop(monkeypatch: pytest.MonkeyPatch, text: str, is_off_loop: bool) -> None:
    tokenizer = service_of(saying("x")).tokenizer
    threads = []

    class Spy:
        def encode(self, text: str, **options: bool) -> Any:
            threads.append(threading.get_ident())
            return HF.backend_tokenizer.encode(text, **options)

        def encode_batch(self, texts: list[str], **options: bool) -> Any:
            threads.append(threading.get_ident())
            return HF.backend_tokenizer.encode_batch(texts, **options)

    monkeypatch.setattr(tokenizer, "_backend", Spy())
    assert run(tokenizer.encode(text)) == HF.encode(text)
    assert (threads != [threading.get_ident()]) == is_off_loop


@pytest.mark.parametrize(
    ("path", "body"), [("/generate_stream", {"inputs": "hi"}), ("/v1/completions", {"model": BASE, "prompt": "hi", "stream": True})]
)
def test_a_client_that_leaves_a_stream_ends_the_generation(path: str, body: dict[str, Any]) -> None:
    backend = saying("hello world, this is a test", turn_s=0.05)
    with live(make_app(service_of(backend))) as address:
        with httpx.stream("POST", f"{address}{path}", json=body) as response:
            next(response.iter_lines())
        assert eventually(lambda: backend.endings == ["CancelledError"])


def test_a_handler_that_is_cancelled_ends_the_generation() -> None:
    backend = saying("hello world, this is a test", turn_s=0.05)

    async def give_up() -> None:
        transport = httpx.ASGITransport(make_app(service_of(backend)))
        async with httpx.AsyncClient(transport=transport, base_url="http://loray") as client:
            await asyncio.wait_for(client.post("/generate", json={"inputs": "hi"}), 0.12)

    with pytest.raises(TimeoutError):
        run(give_up())
    assert backend.endings == ["CancelledError"]


def test_a_stream_that_is_cut_while_it_waits_for_the_client_ends_the_generation() -> None:
    """The generator is then at rest, so that nothing but closing it reaches the backend."""
    backend = saying("hello world, this is a test")

    async def cut() -> list[str]:
        blocked = asyncio.Event()

        received = [{"type": "http.request", "body": b'{"inputs": "hi"}', "more_body": False}]

        async def receive() -> dict[str, Any]:
            return received.pop() if received else await asyncio.sleep(60, {"type": "http.disconnect"})

        async def send(message: Any) -> None:
            if b"token" in message.get("body", b""):
                blocked.set()
                await asyncio.sleep(60)

        scope = {"type": "http", "method": "POST", "path": "/generate_stream", "headers": [(b"content-type", b"application/json")]}
        scope |= {
            "query_string": b"",
            "root_path": "",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "server": ("x", 80),
        }
        request = asyncio.create_task(make_app(service_of(backend))(scope, receive, send))
        await blocked.wait()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        return list(backend.endings)

    assert run(cut()) == ["GeneratorExit"]
