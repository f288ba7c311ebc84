"""A trace through the running application: the caller's, over the proxy and ingress to the driver, as a collector sees it."""

import secrets

import httpx
import pytest

from tests.e2e.conftest import App
from tests.e2e.patience import PATIENCE_S
from tests.otlp_collector import Collector

pytestmark = pytest.mark.slow


def test_a_trace_goes_from_the_caller_over_ingress_to_the_driver(app: App, collector: Collector) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace_id}-{caller}-01", "tracestate": "congo=t61rcWkgMzE", "X-Request-Id": f"call-{caller}"}
    body = {"inputs": "hello world", "parameters": {"adapter_id": "a4", "max_new_tokens": 3, "ignore_eos_token": True}}
    response = httpx.post(f"{app.url}/generate", json=body, headers=headers, timeout=PATIENCE_S)
    assert response.status_code == 200 and "traceparent" not in response.headers
    spans = collector.spans(trace_id, 5)
    ingress, driver = spans["/generate"], spans["generate"]
    assert (ingress.parent_id, driver.parent_id) == (caller, ingress.span_id)
    assert {span.tracestate for span in spans.values()} == {"congo=t61rcWkgMzE"}
    assert ingress.attributes["loray.request_id"] == f"call-{caller}"
    assert driver.attributes["loray.request_id"].startswith(f"call-{caller}-")
    assert (driver.attributes["loray.adapter_id"], driver.attributes["gen_ai.usage.output_tokens"]) == ("a4", 3)
