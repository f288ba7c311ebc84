"""schemathesis against the running application, over its own OpenAPI description: whatever is sent, the answer is a documented one."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import App
from tests.e2e.oracle import Oracle
from tests.e2e.patience import PATIENCE_S
from tests.e2e.schema_fuzz import BODIES, SchemaFuzz

pytestmark = pytest.mark.slow

ADMIN_KEY = "fuzz"
MAX_TOTAL_TOKENS = 48  # a request that asks for all there is must not take long
NUM_OPERATIONS = 26
JSON = "application/json"
# FIELD stands for the one that every body of the route needs.
HOSTILE_BODIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", JSON),
    "no object": (b"null", JSON),
    "cut off": (b'{"FIELD":', JSON),
    "endless nesting": (b"[" * 100_000, JSON),
    "deep nesting": (b'{"FIELD":' + b"[" * 900 + b"]" * 900 + b"}", JSON),
    "no UTF-8": (b'{"FIELD":"\xff\xfe"}', JSON),
    "UTF-16": ('{"FIELD":"a"}'.encode("utf-16"), JSON),
    "half a surrogate pair": (rb'{"FIELD":"\ud800"}', JSON),
    "half a surrogate pair as a name": (rb'{"FIELD":"a","\udfff":1}', JSON),
    "NUL as a name": (rb'{"FIELD":"a","\u0000":1}', JSON),
    "an integer of 5,000 digits": (b'{"FIELD":' + b"9" * 5000 + b"}", JSON),
    "no number": (b'{"FIELD":NaN}', JSON),
    "compressed, it says": (b"\x1f\x8b\x08", JSON),
    "a form": (b"FIELD=a", "application/x-www-form-urlencoded"),
    "XML": (b"<FIELD/>", "application/xml"),
    "JSON under another name": (b'{"FIELD":"a"}', "text/plain"),
    "an unreadable type": (b'{"FIELD":"a"}', "application/;;;=json"),
}


@pytest.fixture(scope="module")
def app(start_app: Callable[..., Any], tiny_model: Path, tiny_adapters: Path) -> Iterator[App]:
    args = {
        "model": {"id": str(tiny_model), "max_total_tokens": MAX_TOTAL_TOKENS},
        "adapters": {"local_roots": [tiny_adapters]},
        "api_keys": {"admin": ADMIN_KEY},
        "limits": {"max_choices": 2},
        "grammars": {"compile_timeout_s": 5},
    }
    with start_app("fuzz", **args) as app:
        yield app


@pytest.fixture
def fuzz(app: App, tiny_model: Path) -> SchemaFuzz:
    return SchemaFuzz(app.url, str(tiny_model), ADMIN_KEY)


def assert_unharmed(app: App, tiny_model: Path) -> None:
    """It is idle, and its tokens are the right ones."""
    app.wait_until_idle()
    oracle = Oracle(tiny_model, {})
    prompt_ids = oracle.tokenizer("hello world")["input_ids"]
    parameters = {"max_new_tokens": 12, "ignore_eos_token": True, "details": True}
    answer = app.post("/generate", {"inputs": "hello world", "parameters": parameters}).json()
    oracle.assert_greedy("", prompt_ids, [token["id"] for token in answer["details"]["tokens"]])


def assert_all_documented(fuzz: SchemaFuzz) -> None:
    assert not fuzz.failures, "\n\n".join(f"{where}: {what}" for where, what in fuzz.failures.items())
    assert len(fuzz.counts) == NUM_OPERATIONS, f"routes came or went: {sorted(fuzz.counts)}"
    for path in BODIES:
        if not path.startswith("/classify"):
            assert fuzz.statuses[f"POST {path}", 200], f"nothing that was sent to {path} got past the validation"


def test_requests_made_of_the_openapi_description_get_documented_answers(app: App, fuzz: SchemaFuzz, tiny_model: Path) -> None:
    fuzz.send_fuzzed(num_cases=5)
    assert fuzz.counts.total() >= 200
    assert_all_documented(fuzz)
    assert_unharmed(app, tiny_model)


def test_bodies_that_are_no_json_objects_are_refused_in_the_apis_shape(app: App, tiny_model: Path) -> None:
    def refusal(path: str, body: bytes, media_type: str) -> httpx.Response:
        body = body.replace(b"FIELD", next(iter(BODIES[path])).encode())
        headers = {"Content-Type": media_type, "Authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.post(app.url + path, content=body, headers=headers, timeout=PATIENCE_S)

    cases = [(path, name, *body) for path in BODIES for name, body in HOSTILE_BODIES.items()]
    with ThreadPoolExecutor(8) as pool:
        responses = pool.map(lambda case: refusal(case[0], *case[2:]), cases)
        for (path, name, *_), response in zip(cases, responses, strict=True):
            is_openai = path.startswith("/v1/")
            assert response.status_code == (400 if is_openai else 422), f"{name} to {path}: {response.status_code} {response.text}"
            error = response.json()["error"]
            assert isinstance(error["message"] if is_openai else error, str), json.dumps(response.json())
    assert_unharmed(app, tiny_model)


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/", "GET, HEAD, POST"), ("/generate", "POST"), ("/v1/models", "GET"), ("/admin/adapters/a4", "DELETE, GET")],
)
def test_a_method_that_a_path_has_not_is_answered_with_those_it_has(app: App, path: str, methods: str) -> None:
    response = httpx.options(app.url + path, headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    assert (response.status_code, response.headers["allow"]) == (405, methods)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_thousands_of_requests_made_of_the_openapi_description_get_documented_answers(app: App, fuzz: SchemaFuzz, tiny_model: Path) -> None:
    fuzz.send_coverage()
    fuzz.send_fuzzed(num_cases=50)
    print({operation: fuzz.counts[operation] for operation in sorted(fuzz.counts)})
    assert fuzz.counts.total() >= 2000
    assert_all_documented(fuzz)
    assert_unharmed(app, tiny_model)
