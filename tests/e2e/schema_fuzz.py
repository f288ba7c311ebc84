"""Requests that schemathesis makes of the server's own OpenAPI description, sent and checked. Starts no server."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from tests.e2e.patience import PATIENCE_S

CHECK_NAMES = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
]
SHORT = {"max_new_tokens": 4, "details": True}
GENERATION = {"inputs": "hello world", "parameters": SHORT}
BODIES: dict[str, dict[str, Any]] = {  # each is answered with 200, but for those that classify
    "/": GENERATION,
    "/generate": GENERATION,
    "/generate_stream": GENERATION,
    "/invocations": GENERATION,
    "/embed": {"inputs": "hello", "parameters": {}},
    "/classify": {"inputs": "hello", "parameters": {}},
    "/classify_batch": {"inputs": ["hello"], "parameters": {}},
    "/tokenize": {"inputs": "hello"},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/v1/embeddings": {"input": "hello"},
    "/admin/adapters": {"adapter_id": "a4"},
}


@st.composite
def grafted(draw: st.DrawFn, operation: APIOperation, model_id: str) -> Case:
    """A body that works, but for one to three of its fields: a body of which all is random is refused before the model sees it."""
    case: Case = draw(operation.as_strategy())
    assert isinstance(case.body, dict)
    body = {**BODIES[operation.path]}
    if operation.path.startswith("/v1/"):
        body["model"] = model_id
    places = [(body, case.body)]
    if isinstance(case.body.get("parameters"), dict):
        body["parameters"] = {**body["parameters"]}
        places.append((body["parameters"], case.body["parameters"]))
    fields = [(ours, name, value) for ours, theirs in places for name, value in theirs.items() if name not in ("model", "parameters")]
    for ours, name, value in draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3)):
        ours[name] = value
    case.body = body
    return case


class SchemaFuzz:
    """`counts` are the cases sent, by operation; `failures` what was wrong, one for each kind, operation and status."""

    def __init__(self, url: str, model_id: str, admin_key: str) -> None:
        load_all_checks()
        self._url = url
        self._model_id = model_id
        self._admin = {"Authorization": f"Bearer {admin_key}"}
        self._schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        self._checks = CHECKS.get_by_names(CHECK_NAMES)
        self._session = requests.Session()
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.failures: dict[tuple[str, str, int], str] = {}

    @property
    def operations(self) -> list[APIOperation]:
        return [found.ok() for found in self._schema.get_all_operations()]

    def send_fuzzed(self, num_cases: int) -> None:
        """So many of each kind and operation: right, wrong, and twice as many right but for a few fields. The same ones every time."""
        for operation in self.operations:
            for strategy in self._strategies(operation):
                self._send_examples(strategy, num_cases)
            if operation.path in BODIES and operation.method == "post":
                self._send_examples(grafted(operation, self._model_id), 2 * num_cases)  # of chats one in three is not refused

    def send_coverage(self) -> None:
        """Each boundary and each violation that the schema's keywords name, and methods that a path has not."""
        modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
        for operation in self.operations:
            for case in self._schema.iter_coverage_cases(
                operation, generation_modes=modes, generation_config=self._schema.config.generation
            ):
                self._send(case)

    def _strategies(self, operation: APIOperation) -> Iterator[st.SearchStrategy[Case]]:
        yield operation.as_strategy()
        if len(operation.body) or len(operation.query):  # nothing else here can be wrong: any text is a path
            yield operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    def _send_examples(self, strategy: st.SearchStrategy[Case], num_cases: int) -> None:
        @hypothesis.settings(
            max_examples=num_cases,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy)
        def send(case: Case) -> None:
            self._send(case)

        send()

    def _send(self, case: Case) -> None:
        operation = case.operation
        self.counts[operation.label] += 1
        headers = self._admin if operation.path.startswith("/admin") else {}
        try:
            response = case.call(base_url=self._url, session=self._session, headers=headers, timeout=PATIENCE_S)
        except requests.RequestException as error:
            self._note(case, type(error).__name__, 0, str(error))
            return
        self.statuses[operation.label, response.status_code] += 1
        try:
            case.validate_response(response, checks=self._checks)
        except schemathesis.errors.FailureGroup as group:
            for failure in group.exceptions:
                self._note(case, type(failure).__name__, response.status_code, str(group))

    def _note(self, case: Case, kind: str, status: int, message: str) -> None:
        self.failures.setdefault((case.operation.label, kind, status), f"{message}\n{case.as_curl_command()}"[:3000])
