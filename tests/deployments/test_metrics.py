import re

from loray.deployments.errors import Overloaded
from tests.deployments.scripted_backend import ScriptedBackend, saying, send, service_of


def value(text: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    assert found, f"{series} is not in\n{text}"
    return float(found[1])


def test_requests_tokens_and_times_are_counted() -> None:
    service = service_of(saying(" world"))
    for adapter_id in ["pirate", "org/poet", None]:
        send(service, "POST", "/generate", json={"inputs": "hello", "parameters": {"adapter_id": adapter_id}})
    send(service, "POST", "/generate", json={})
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_requests_total{route="/generate",status="200"}') == 3
    assert value(text, 'loray_requests_total{route="/generate",status="422"}') == 1
    assert value(text, 'loray_generations_total{adapter="adapter",outcome="eos_token"}') == 2
    assert value(text, 'loray_generations_total{adapter="base",outcome="eos_token"}') == 1
    assert value(text, 'loray_generated_tokens_total{adapter="base"}') == 2
    assert value(text, 'loray_time_to_first_token_seconds_count{adapter="adapter"}') == 2
    assert value(text, 'loray_inter_token_seconds_count{adapter="base"}') == 1
    assert value(text, 'loray_generation_seconds_count{adapter="base"}') == 1


def test_a_generation_that_failed_is_counted_by_its_error() -> None:
    service = service_of(ScriptedBackend([Overloaded("full")]))
    send(service, "POST", "/generate", json={"inputs": "hello"})
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_requests_total{route="/generate",status="429"}') == 1
    assert value(text, 'loray_generations_total{adapter="base",outcome="overloaded"}') == 1
    assert "loray_time_to_first_token_seconds_count" not in text


def test_unknown_paths_share_one_label() -> None:
    service = service_of(saying("x"))
    for number in range(3):
        send(service, "GET", f"/scan/{number}")
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_requests_total{route="unknown",status="404"}') == 3
    assert "/scan" not in text


def test_the_drivers_numbers_are_gauges() -> None:
    text = send(service_of(saying("x")), "GET", "/metrics").text
    assert value(text, "loray_driver_running") == 3
    assert value(text, "loray_driver_kv_blocks_total") == 1456


def test_metrics_are_readable_while_the_driver_is_down() -> None:
    class Down(ScriptedBackend):
        async def stats(self) -> dict[str, float]:
            raise ConnectionError("no driver")

    response = send(service_of(Down([])), "GET", "/metrics")
    assert response.status_code == 200 and "loray_driver" not in response.text


def test_json_has_the_same_numbers() -> None:
    response = send(service_of(saying("x")), "GET", "/metrics", headers={"Accept": "application/json"})
    (running,) = [family for family in response.json() if family["name"] == "loray_driver_running"]
    assert running["samples"] == [{"name": "loray_driver_running", "labels": {}, "value": 3}]
