import asyncio
import re
from collections.abc import AsyncGenerator

import pytest

from loray.deployments import adapter_metrics
from loray.deployments import service as service_module
from loray.deployments.adapter_status import AdapterStatus, TierUse
from loray.deployments.config import ServerArgs
from loray.deployments.errors import AdapterNotFound, Overloaded
from loray.deployments.generation import Generation, Timing
from loray.deployments.metrics import Metrics
from loray.deployments.request import AdapterRef, GenerationRequest, TokenEvent
from loray.deployments.service import Service
from loray.deployments.tokenizer import Tokenizer
from loray.models.step import Sampling
from tests.deployments.rank_in_process import RankInProcess, start_engine
from tests.deployments.scripted_backend import FACTS, HF, MAX_TOTAL_TOKENS, ScriptedBackend, saying, send, service_of, status_of

pytestmark = pytest.mark.slow  # waits


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


def test_failures_are_counted_by_type_and_the_time_in_the_queue_is_a_histogram() -> None:
    class Queued(ScriptedBackend):
        async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
            yield TokenEvent(request.request_id)
            await asyncio.sleep(0.06)
            yield TokenEvent(request.request_id, [5], [-0.5], "length", queue_s=0.05)

    service = service_of(Queued([]))
    send(service, "POST", "/generate", json={"inputs": "hello"})
    for path in ["/generate", "/v1/completions", "/embed"]:
        send(service, "POST", path, json={})
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_failures_total{type="validation"}') == 3
    assert value(text, 'loray_queue_seconds_count{adapter="base"}') == 1
    assert value(text, 'loray_queue_seconds_sum{adapter="base"}') >= 0.05


def test_each_histogram_is_of_the_time_between_the_moments_that_it_names() -> None:
    adapter = AdapterRef(adapter_id="pirate")
    request = GenerationRequest(request_id="r", prompt_ids=[5, 6], max_new_tokens=50, sampling=Sampling(), adapter=adapter)
    moments = {"received": 1.0, "validated": 3.0, "accepted": 7.0, "admitted": 15.0, "first_token": 31.0, "finished": 127.0}
    timing = Timing(**moments, latest_token=63.0, gaps=[0.5, 0.25])
    generation = Generation(request, saying("x"), Tokenizer(HF), [], timing)
    generation.num_tokens = 3
    metrics = Metrics()
    metrics.observe_generation(generation, "length")
    metrics.observe_embedding(request, timing, "success")
    text = metrics.text({}).decode()
    expected = {"time_to_first_token": 30, "queue": 12, "inter_token": 0.75, "generation": 126, "embedding": 126}
    assert {name: value(text, f'loray_{name}_seconds_sum{{adapter="adapter"}}') for name in expected} == expected
    expected = {"queue": 14, "time_to_first_token": 30}
    assert {name: value(text, f'loray_adapter_{name}_seconds_sum{{adapter="pirate"}}') for name in expected} == expected


def test_unknown_paths_share_one_label() -> None:
    service = service_of(saying("x"))
    for number in range(3):
        send(service, "GET", f"/scan/{number}")
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_requests_total{route="unknown",status="404"}') == 3
    assert "/scan" not in text


def test_each_driver_replica_has_series_of_its_own() -> None:
    text = send(service_of(saying("x")), "GET", "/metrics").text
    assert [value(text, f'loray_driver_running{{replica="{replica}"}}') for replica in ("d1", "d2")] == [3, 1]
    assert [value(text, f'loray_driver_steps_total{{replica="{replica}"}}') for replica in ("d1", "d2")] == [12, 5]


def test_what_a_driver_counts_is_a_counter_and_what_it_has_is_a_gauge() -> None:
    engine = start_engine(RankInProcess())
    kinds = {name: "counter" if name.endswith("_total") else "gauge" for name in engine.stats()}
    text = Metrics().text({"d": engine.stats()}).decode()
    assert dict(re.findall(r"^# TYPE loray_driver_(\S+) (\S+)$", text, re.MULTILINE)) == kinds
    names = ("running", "kv_blocks", "kv_blocks_used", "adapter_pages", "adapter_host_bytes", "steps_total", "preemptions_total")
    assert [kinds[name] for name in names] == ["gauge"] * 5 + ["counter"] * 2


def test_what_an_ingress_replica_counts_carries_its_name_and_what_it_was_told_does_not() -> None:
    backend = saying(" world")
    backend.statuses = {"replica": [status_of("pirate", "gpu")]}
    service = Service(ServerArgs(), Tokenizer(HF), backend, MAX_TOTAL_TOKENS, FACTS, replica="i1")
    generate(service, "pirate")
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_requests_total{replica="i1",route="/generate",status="200"}') == 1
    assert value(text, 'loray_adapter_requests_total{adapter="pirate",outcome="eos_token",replica="i1"}') == 1
    assert value(text, 'loray_generation_seconds_count{adapter="adapter",replica="i1"}') == 1
    assert value(text, 'loray_adapters{state="gpu"}') == 1
    assert value(text, 'loray_driver_running{replica="d1"}') == 3


def test_metrics_are_readable_while_the_driver_is_down() -> None:
    class Down(ScriptedBackend):
        async def stats(self) -> dict[str, dict[str, float]]:
            raise ConnectionError("no driver")

    response = send(service_of(Down([])), "GET", "/metrics")
    assert response.status_code == 200 and "loray_driver" not in response.text


def test_json_has_the_same_numbers() -> None:
    response = send(service_of(saying("x")), "GET", "/metrics", headers={"Accept": "application/json"})
    (running,) = [family for family in response.json() if family["name"] == "loray_driver_running"]
    assert running["samples"][0] == {"name": "loray_driver_running", "labels": {"replica": "d1"}, "value": 3}
    (steps,) = [family for family in response.json() if family["name"] == "loray_driver_steps"]
    assert (steps["type"], steps["samples"][1]["name"], steps["samples"][1]["value"]) == ("counter", "loray_driver_steps_total", 5)


def generate(service: Service, adapter_id: str, **parameters: str) -> None:
    send(service, "POST", "/generate", json={"inputs": "hello", "parameters": {"adapter_id": adapter_id, **parameters}})


def test_an_adapter_has_series_of_its_own() -> None:
    service = service_of(saying(" world"))
    for adapter_id in ["pirate", "pirate", "org/poet"]:
        generate(service, adapter_id)
    send(service, "POST", "/embed", json={"inputs": "hello", "parameters": {"adapter_id": "pirate"}})
    generate(service, "")
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_adapter_requests_total{adapter="pirate",outcome="eos_token"}') == 2
    assert value(text, 'loray_adapter_requests_total{adapter="pirate",outcome="success"}') == 1
    assert value(text, 'loray_adapter_requests_total{adapter="org/poet",outcome="eos_token"}') == 1
    assert value(text, 'loray_adapter_tokens_total{adapter="pirate",kind="generated"}') == 4
    assert value(text, 'loray_adapter_tokens_total{adapter="pirate",kind="prompt"}') > 0
    assert value(text, 'loray_adapter_queue_seconds_count{adapter="pirate"}') == 2
    assert value(text, 'loray_adapter_time_to_first_token_seconds_count{adapter="org/poet"}') == 1
    assert 'loray_adapter_requests_total{adapter=""' not in text, "the base model is no adapter"


def test_all_ways_to_write_an_adapters_name_are_one_label() -> None:
    service = service_of(saying(" world"))
    for adapter_id in ["pirate", "./pirate", "pirate/"]:
        generate(service, adapter_id)
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_adapter_requests_total{adapter="pirate",outcome="eos_token"}') == 3


@pytest.mark.parametrize("name", ["other", "private", "merged"])
def test_an_adapter_that_is_called_like_a_shared_label_is_one_of_the_others(name: str) -> None:
    backend = saying(" world")
    service = service_of(backend)
    backend.statuses = {"replica": [status_of(name, "gpu")]}
    for _ in range(2):
        generate(service, name)
        send(service, "GET", "/metrics")
    backend.statuses = {"replica": []}
    for _ in range(3):
        text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_adapter_requests_total{adapter="other",outcome="eos_token"}') == 2


def test_merges_share_a_label_whatever_they_are_called() -> None:
    service = service_of(saying(" world"))
    merge = {"ids": ["a", "b"], "weights": [1, 1]}
    send(service, "POST", "/generate", json={"inputs": "hello", "parameters": {"merged_adapters": merge}})
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_adapter_requests_total{adapter="merged",outcome="eos_token"}') == 1


def test_adapters_beyond_the_bound_share_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_metrics, "MAX_LABELS", 2)
    service = service_of(saying(""))
    for adapter_id in ["a", "b", "c", "d", "a"]:
        generate(service, adapter_id)
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_adapter_requests_total{adapter="a",outcome="eos_token"}') == 2
    assert value(text, 'loray_adapter_requests_total{adapter="other",outcome="eos_token"}') == 2
    assert 'adapter="c"' not in text


def test_names_that_never_worked_take_nobodys_label() -> None:
    failing = service_of(ScriptedBackend([AdapterNotFound("who?")]))
    for number in range(3):
        generate(failing, f"nobody{number}")
    text = send(failing, "GET", "/metrics").text
    assert value(text, 'loray_adapter_requests_total{adapter="other",outcome="generation"}') == 3
    assert "nobody" not in text


def test_private_adapters_are_not_named() -> None:
    backend = saying("")
    backend.statuses = {"replica": [status_of("hidden", "gpu", is_private=True)]}
    service = service_of(backend)
    generate(service, "hidden", api_token="secret")
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_adapter_requests_total{adapter="private",outcome="eos_token"}') == 1
    assert value(text, 'loray_adapters{state="gpu"}') == 1
    assert "hidden" not in text
    generate(service, "hidden")  # read with the server's own token
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_adapter_requests_total{adapter="private",outcome="eos_token"}') == 2 and "hidden" not in text


def test_an_adapter_that_turns_out_to_be_private_is_named_no_longer() -> None:
    backend = saying("")
    service = service_of(backend)
    generate(service, "hidden")
    backend.statuses = {"replica": [status_of("hidden", "gpu", is_private=True)]}
    assert "hidden" not in send(service, "GET", "/metrics").text


def test_one_that_is_still_being_downloaded_is_not_named() -> None:
    backend = saying("")
    backend.statuses = {"replica": [status_of("hidden", "loading", version="")]}
    service = service_of(backend)
    send(service, "GET", "/metrics")
    generate(service, "hidden", api_token="secret")
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_adapter_requests_total{adapter="private",outcome="eos_token"}') == 1 and "hidden" not in text


def test_a_token_where_none_is_needed_hides_no_name() -> None:
    backend = saying("")
    backend.statuses = {"replica": [status_of("pirate", "gpu")]}
    service = service_of(backend)
    generate(service, "pirate", api_token="for the gateway")  # who may read it is not known here yet
    send(service, "GET", "/metrics")
    generate(service, "pirate", api_token="for the gateway")
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_adapter_requests_total{adapter="private",outcome="eos_token"}') == 1
    assert value(text, 'loray_adapter_requests_total{adapter="pirate",outcome="eos_token"}') == 1


def test_the_label_of_an_adapter_that_came_and_went_between_two_looks_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_metrics, "MAX_LABELS", 1)
    backend = saying("")
    backend.statuses = {"replica": [status_of("later", "gpu")]}
    service = service_of(backend)
    generate(service, "short")
    for _ in range(2):
        send(service, "GET", "/metrics")
    generate(service, "later")
    text = send(service, "GET", "/metrics").text
    assert "short" not in text and value(text, 'loray_adapter_requests_total{adapter="later",outcome="eos_token"}') == 1


def test_residency_is_told_by_tier_and_ends_with_an_unload() -> None:
    backend = saying("")
    backend.statuses = {"replica": [status_of("pirate", "gpu", gpu_bytes=10, host_bytes=20, disk_bytes=30), status_of("idle")]}
    service = service_of(backend)
    generate(service, "pirate")
    text = send(service, "GET", "/metrics").text
    tiers = {"gpu": 10, "host": 20, "disk": 30}
    assert {tier: value(text, f'loray_adapter_resident_bytes{{adapter="pirate",tier="{tier}"}}') for tier in tiers} == tiers
    assert (value(text, 'loray_adapters{state="gpu"}'), value(text, 'loray_adapters{state="host"}')) == (1, 1)
    backend.statuses = {"replica": [status_of("idle")]}
    assert "pirate" not in send(service, "GET", "/metrics").text
    generate(service, "pirate")
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_adapter_requests_total{adapter="pirate",outcome="eos_token"}') == 1


def test_loads_and_evictions_are_told_by_adapter_and_tier() -> None:
    backend = saying("")
    uses = {
        "gpu_use": TierUse(num_loads=3, load_seconds=0.5, num_evictions=2),
        "host_use": TierUse(num_loads=1, load_seconds=2.0),
        "disk_use": TierUse(num_loads=4, load_seconds=8.0, num_evictions=3),
    }
    backend.statuses = {"replica": [status_of("pirate", "gpu", **uses), status_of("idle", "known", **uses)]}
    service = service_of(backend)
    generate(service, "pirate")
    text = send(service, "GET", "/metrics").text
    names = ("loads", "load_seconds", "evictions")
    for tier, expected in (("gpu", [3, 0.5, 2]), ("host", [1, 2, 0]), ("disk", [4, 8, 3])):
        assert [value(text, f'loray_adapter_{name}_total{{adapter="pirate",tier="{tier}"}}') for name in names] == expected
    assert 'adapter="idle"' not in text


def test_metrics_are_readable_while_nobody_tells_of_adapters() -> None:
    class Down(ScriptedBackend):
        async def adapter_statuses(self) -> dict[str, list[AdapterStatus]]:
            raise ConnectionError("no registry")

    response = send(service_of(Down([])), "GET", "/metrics")
    assert response.status_code == 200 and "loray_driver_running" in response.text


@pytest.mark.parametrize(("num_known", "num_looks"), [(3, 3), (4, 1)])
def test_very_many_adapters_are_not_looked_at_for_every_reading(monkeypatch: pytest.MonkeyPatch, num_known: int, num_looks: int) -> None:
    monkeypatch.setattr(service_module, "VERY_MANY", 3)
    monkeypatch.setattr(service_module, "REST_SHARE", 1e9)
    looks = []

    class Counting(ScriptedBackend):
        async def adapter_statuses(self) -> dict[str, list[AdapterStatus]]:
            looks.append(await super().adapter_statuses())
            await asyncio.sleep(0.01)  # it takes some time
            return looks[-1]

    backend = Counting([])
    backend.statuses = {"replica": [status_of(f"a{number}", "gpu") for number in range(num_known)]}
    service = service_of(backend)
    texts = [send(service, "GET", "/metrics").text for _ in range(3)]
    assert len(looks) == num_looks
    assert [value(text, 'loray_adapters{state="gpu"}') for text in texts] == [num_known] * 3


def test_two_versions_of_an_adapter_count_together() -> None:
    backend = saying("")
    uses = [TierUse(num_loads=number, load_seconds=number / 2, num_evictions=number) for number in (1, 2)]
    both = [status_of("pirate", "gpu", version=str(use.num_loads), gpu_bytes=10, gpu_use=use) for use in uses]
    backend.statuses = {"replica": both}
    service = service_of(backend)
    generate(service, "pirate")
    for num_bytes, num_loads in ((20, 3), (10, 1)):  # then the second is gone
        text = send(service, "GET", "/metrics").text
        assert value(text, 'loray_adapter_resident_bytes{adapter="pirate",tier="gpu"}') == num_bytes
        names = ("loads", "load_seconds", "evictions")
        told = [value(text, f'loray_adapter_{name}_total{{adapter="pirate",tier="gpu"}}') for name in names]
        assert told == [num_loads, num_loads / 2, num_loads]
        backend.statuses = {"replica": both[:1]}


def test_an_embeddings_tokens_count_for_its_adapter() -> None:
    service = service_of(saying(" world"))
    send(service, "POST", "/embed", json={"inputs": "hello", "parameters": {"adapter_id": "pirate"}})
    text = send(service, "GET", "/metrics").text
    assert value(text, 'loray_adapter_tokens_total{adapter="pirate",kind="prompt"}') > 0


def test_a_list_of_adapters_that_takes_too_long_is_not_asked_for_at_every_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "ANSWER_S", 0.01)
    monkeypatch.setattr(service_module, "REST_SHARE", 1e9)
    looks = []

    class Slow(ScriptedBackend):
        async def adapter_statuses(self) -> dict[str, list[AdapterStatus]]:
            looks.append(1)
            await asyncio.sleep(10)
            return {}

    service = service_of(Slow([]))
    assert [send(service, "GET", "/metrics").status_code for _ in range(3)] == [200] * 3
    assert len(looks) == 1
