"""Adapters of many kinds through small tiers: from folders, over HTTP and from S3, merged, changed and broken, over real ranks."""

import json
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer

from loray.models.adapter import CONFIG_FILE, WEIGHTS_FILE
from tests.deployments.file_server import HubServer
from tests.e2e.adapter_zoo import random_adapter
from tests.e2e.bad_adapters import (
    BAD_FOLDER,
    NUM_NEW,
    STREAM_PROMPT,
    Kind,
    Wish,
    ask_all,
    bad_kinds,
    bad_times,
    run_rounds,
    stream_until,
    wishes,
)
from tests.e2e.conftest import App
from tests.e2e.file_server import FileServer, serving
from tests.e2e.moving_adapter import Moving, moving
from tests.e2e.oracle import Oracle
from tests.e2e.patience import PATIENCE_S
from tests.e2e.replicas import adapter_series, opened
from tests.e2e.stored_times import store
from tests.models.tiny_llama import save_adapter, save_llama

pytestmark = pytest.mark.slow

PROMPT = "hello world, this is a prompt that is longer than one block of the cache, so that its beginning could be found again there"
PAGE_BYTES = 44_096  # of the tiny model: 8 ranks of all its linears in float32
NUM_PAGES, NUM_HOST_PAGES = 20, 40
RANKS = (4, 8, 12, 20, 32, 64)
NUM_ADAPTERS = 30
SOURCES = ["a4", "a8", "a20"]
GOOD = ["", *SOURCES]
NUM_POOLED = 40  # threads, or open files, by which a process may have grown: pools fill when more come at once than before
S3_OPTIONS = {"key": "testing", "secret": "testing"}
ADMIN = {"Authorization": "Bearer open"}
SHELF = f"shelf-{uuid.uuid4().hex}"  # a bucket of this run's own: downloads outlive the server


@pytest.fixture(scope="module")
def root(tiny_adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(shutil.copytree(tiny_adapters, tmp_path_factory.mktemp("zoo") / "adapters"))
    for i in range(NUM_ADAPTERS):
        random_adapter(root / "a4", root / f"zoo{i}", RANKS[i % len(RANKS)], seed=i)
    return root


@pytest.fixture(scope="module")
def files(tiny_adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileServer]:
    folder = Path(shutil.copytree(tiny_adapters, tmp_path_factory.mktemp("web") / "adapters"))
    for i in range(10):
        random_adapter(folder / "a4", folder / f"other{i}", 4, seed=100 + i)
    with serving(folder) as server:
        yield server


@pytest.fixture(scope="module")
def s3(tiny_adapters: Path) -> Iterator[str]:
    """The endpoint of a server that has the bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="testing", aws_secret_access_key="testing", region_name="us-east-1"
    )
    client.create_bucket(Bucket=SHELF)
    for name in SOURCES:
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            client.upload_file(str(tiny_adapters / name / file), SHELF, f"{name}/{file}")
    yield endpoint
    server.stop()


@pytest.fixture(scope="module")
def app(start_app: Callable[..., Any], tiny_model: Path, root: Path, files: FileServer, s3: str) -> Iterator[App]:
    adapters = {
        "local_roots": [root],
        "gpu_bytes": NUM_PAGES * PAGE_BYTES,
        "host_bytes": NUM_HOST_PAGES * PAGE_BYTES,
        "allowed_urls": [files.url, f"s3://{SHELF}"],
        "storage_options": {"s3": {"endpoint_url": s3, **S3_OPTIONS}},
        "preload": ["a20", "nobody"],
    }
    with start_app("zoo", model={"id": str(tiny_model)}, adapters=adapters, api_keys={"admin": "open"}) as app:
        yield app


@pytest.fixture(scope="module")
def oracle(tiny_model: Path, root: Path) -> Oracle:
    return Oracle(tiny_model, {folder.name: folder for folder in sorted(root.iterdir()) if folder.name.startswith(("a", "zoo"))})


def body(adapter_id: str = "", max_new_tokens: int = 12, **parameters: Any) -> dict[str, Any]:
    parameters = {"adapter_id": adapter_id, "max_new_tokens": max_new_tokens, "ignore_eos_token": True, "details": True, **parameters}
    return {"inputs": PROMPT, "parameters": parameters}


def token_ids(app: App, adapter_id: str = "", **parameters: Any) -> list[int]:
    response = app.post("/generate", body(adapter_id, **parameters))
    assert response.status_code == 200, response.text
    return [token["id"] for token in response.json()["details"]["tokens"]]


def adapters(app: App) -> dict[str, dict[str, Any]]:
    return {one["adapter_id"]: one for one in httpx.get(f"{app.url}/admin/adapters", headers=ADMIN, timeout=PATIENCE_S).json()["adapters"]}


def assert_right(oracle: Oracle, adapter_id: str, output_ids: list[int]) -> None:
    oracle.assert_greedy(adapter_id, oracle.tokenizer(PROMPT)["input_ids"], output_ids)


def test_preloaded_adapters_are_in_host_memory_before_the_first_request(app: App) -> None:
    known = adapters(app)
    assert known["a20"]["state"] == "host" and known["a20"]["rank"] == 20 and known["a20"]["num_served"] == 0
    assert known["nobody"]["state"] == "failed" and "nobody" in known["nobody"]["error"]


def test_many_adapters_through_small_tiers_are_all_served_right(app: App, oracle: Oracle) -> None:
    rng = random.Random(0)
    names = [f"zoo{i}" for i in range(NUM_ADAPTERS)]
    wanted = rng.choices(names, weights=[1 / (i + 1) for i in range(NUM_ADAPTERS)], k=90) + names
    with ThreadPoolExecutor(12) as clients:
        outputs = list(clients.map(lambda name: token_ids(app, name), wanted))
    for name, output_ids in zip(wanted, outputs, strict=True):
        assert_right(oracle, name, output_ids)
    stats = app.wait_until_idle()
    assert stats["adapter_evictions_gpu_total"] > 0 and stats["adapter_evictions_host_total"] > 0
    assert stats["adapter_pages_used"] <= NUM_PAGES and stats["adapter_host_bytes_used"] <= NUM_HOST_PAGES * PAGE_BYTES
    served = adapters(app)
    assert sum(served[name]["num_served"] for name in names) == len(wanted)


def test_an_adapter_that_is_slow_to_come_holds_up_nobody(app: App, oracle: Oracle, files: FileServer) -> None:
    files.held = {"a8"}
    slow = f"{files.url}/a8"
    with ThreadPoolExecutor(12) as clients:
        waiting = [clients.submit(token_ids, app, slow) for _ in range(2)]
        assert files.waiting.wait(30)
        others = [clients.submit(token_ids, app, f"{files.url}/other{i}") for i in range(10)]
        assert len({tuple(other.result(PATIENCE_S)) for other in others}) > 1
        assert_right(oracle, "", token_ids(app))
        assert not any(call.done() for call in waiting)
        files.held = set()
        files.let_go.set()
        for call in waiting:
            assert_right(oracle, "a8", call.result(PATIENCE_S))
    assert files.num_reads == 11, "two requests for one adapter, one download"


def test_an_adapter_in_s3_is_served_and_unloading_it_frees_all_three_tiers(app: App, oracle: Oracle, own_cache: Path) -> None:
    by_url, by_source = f"s3://{SHELF}/a4", f"{SHELF}/a8"
    for adapter_id, parameters in ((by_url, {}), (by_source, {"adapter_source": "s3"})):
        assert_right(oracle, adapter_id[-2:], token_ids(app, adapter_id, **parameters))
    status = adapters(app)[by_url]
    assert status["state"] == "gpu" and min(status["gpu_bytes"], status["host_bytes"], status["disk_bytes"]) > 0
    before = app.wait_until_idle()
    downloads = own_cache / "loray" / "adapters"
    num_files = len(list(downloads.rglob(WEIGHTS_FILE)))
    assert num_files >= 2
    for adapter_id in (by_url, by_source):
        assert httpx.delete(f"{app.url}/admin/adapters/{adapter_id}", headers=ADMIN, timeout=PATIENCE_S).status_code == 200
    app.wait_until(lambda stats: stats["adapter_pages_used"] == before["adapter_pages_used"] - 2)
    app.wait_until(lambda stats: stats["adapter_host_bytes_used"] < before["adapter_host_bytes_used"])
    deadline = time.monotonic() + 30
    while {by_url, by_source} & adapters(app).keys() or len(list(downloads.rglob(WEIGHTS_FILE))) != num_files - 2:
        assert time.monotonic() < deadline, "it is still listed, or on disk"
        time.sleep(0.05)
    assert_right(oracle, "a4", token_ids(app, by_url))
    assert httpx.delete(f"{app.url}/admin/adapters/{by_url}", headers=ADMIN, timeout=PATIENCE_S).status_code == 200


def test_a_private_adapter_of_the_hub_is_for_those_alone_whose_token_may_read_it(
    app: App, oracle: Oracle, hub: HubServer, tiny_adapters: Path
) -> None:
    shutil.copytree(tiny_adapters / "a8", hub.root / "org" / "secret")
    shutil.copytree(tiny_adapters / "a4", hub.root / "org" / "open")
    hub.readers["org/secret"] = {"hf_good"}

    def answer(name: str, token: str = "") -> httpx.Response:
        return app.post("/generate", body(name, adapter_source="hub", **({"api_token": token} if token else {})))

    missing = answer("org/absent").text.replace("absent", "secret")
    for _ in range(2):  # the second time it is on disk and in memory
        for token in ("", "hf_bad"):
            assert (refused := answer("org/secret", token)).status_code == 424 and refused.text == missing
        response = answer("org/secret", "hf_good")
        assert response.status_code == 200, response.text
        assert_right(oracle, "a8", [token["id"] for token in response.json()["details"]["tokens"]])
    response = answer("org/open")
    assert_right(oracle, "a4", [token["id"] for token in response.json()["details"]["tokens"]])
    assert adapters(app)["org/secret"]["is_private"] and not adapters(app)["org/open"]["is_private"]
    for path in ("/v1/models", "/metrics"):
        assert "secret" not in app.get(path).text
    assert 'adapter="org/open"' in app.get("/metrics").text


@pytest.mark.parametrize("strategy", ["linear", "ties", "dare_linear", "dare_ties"])
def test_merged_adapters_are_what_peft_makes_of_them(app: App, tiny_model: Path, root: Path, strategy: str) -> None:
    random_adapter(root / "a4", root / f"same-{strategy}", 8, seed=77)
    parts, weights = {"a8": root / "a8", "same": root / f"same-{strategy}"}, [0.5, 1.5]
    expected = Oracle(tiny_model, parts)
    density = 1.0 if "dare" in strategy else 0.5  # what DARE drops is drawn
    expected.add_weighted(list(parts), weights, "merged", combination_type="cat" if strategy == "linear" else strategy, density=density)
    recipe = {"ids": ["a8", f"same-{strategy}"], "weights": weights, "merge_strategy": strategy, "density": density}
    assert_right(expected, "merged", token_ids(app, merged_adapters=recipe))
    assert "merged" not in app.post("/generate", body(merged_adapters={**recipe, "ids": ["a8", "nobody"]})).text


@pytest.fixture
def make_bad(root: Path, files: FileServer, tmp_path: Path) -> Iterator[Callable[[int, int], list[Kind]]]:
    """Takes how many folders of a kind, and how many ids of one that needs none."""
    shutil.copytree(root / "a4", tmp_path / "good")
    save_adapter(save_llama(tmp_path / "other", hidden_size=24), tmp_path / "foreign", r=4)
    random_adapter(root / "a4", tmp_path / "huge", 8 * NUM_PAGES + 1, seed=1)
    yield lambda num_folders, num_new: bad_kinds(root, tmp_path, files, num_folders, num_new)
    for place in (root, files.folder):
        shutil.rmtree(place / BAD_FOLDER)


def held(app: App, cache: Path) -> dict[str, Any]:
    """All that a request could leave behind, but for what streams change."""
    changing = ("steps_total", "tokens_total", "seconds_total", "prefix_hit_rate", "kv_blocks_cached")
    stats = app.wait_until_idle()
    return {
        "pools and counters": {name: value for name, value in stats.items() if not name.endswith(changing)},
        "listed": {name: (one["state"], one["num_running"], one["num_failed"]) for name, one in adapters(app).items()},
        "on disk": set((cache / "loray" / "adapters").rglob("*")),
    }


def check_bad_requests(
    app: App, oracle: Oracle, cache: Path, kinds: list[Kind], rounds: list[list[Wish]], num_alone: int
) -> dict[str, Any]:
    """Each is answered with a clear error, streams beside them stay right, and everything taken is given back. What it took."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(ask_all, app.url, wishes(kinds, 2 * len(kinds))).result()  # what is made once is made now
        stream_until(app.url, GOOD, lambda num_ended: num_ended > 0)
        before, had_series, were_open, stats = held(app, cache), adapter_series(app), opened(app.name), app.ask_driver("stats")
        traffic = run_rounds(app.url, GOOD, rounds, num_alone, process)
    for one in traffic.answers:
        assert one.status in (422, 424) and one.wish.says in one.text, one
    prompt_ids, streams = oracle.tokenizer(STREAM_PROMPT)["input_ids"], traffic.alone + traffic.beside
    for adapter_id, token_ids in {(one.adapter_id, one.token_ids) for one in streams}:
        oracle.assert_greedy(adapter_id, prompt_ids, list(token_ids))
    assert held(app, cache) == before
    assert adapter_series(app) <= had_series  # without those of adapters that an earlier test has unloaded
    for name, num_each in (("prompt_tokens_total", len(prompt_ids)), ("generated_tokens_total", NUM_NEW)):
        assert app.ask_driver("stats")[name] - stats[name] == num_each * len(streams), f"what was refused is among the {name}"
    are_open = opened(app.name)
    lasting = are_open.keys() & were_open.keys()
    assert {name.split()[0] for name in lasting} == {"Driver", "Ingress"}, "of each kind one was there all the time"
    assert all(are_open[name] < were_open[name] + NUM_POOLED for name in lasting), are_open
    return {**bad_times(traffic), "opened": {"before": were_open, "after": are_open}}


def test_bad_adapters_are_refused_and_leave_nothing_behind(
    app: App, oracle: Oracle, own_cache: Path, make_bad: Callable[[int, int], list[Kind]]
) -> None:
    kinds = make_bad(6, 6)
    check_bad_requests(app, oracle, own_cache, kinds, [wishes(kinds, 6 * len(kinds))], num_alone=8)


@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/embed"])
def test_an_adapter_with_which_no_number_is_finite_is_an_error_that_names_it(app: App, root: Path, route: str) -> None:
    name = f"overflows{route.replace('/', '-')}"
    random_adapter(root / "a4", root / name, 4, seed=7, std=1e30)
    expected = token_ids(app, "a20")
    response = app.post(route, {"inputs": PROMPT, "parameters": {"adapter_id": name}})
    assert response.status_code == 424, response.text
    assert f"adapter '{name}'" in response.text and "not finite" in response.text
    assert (adapters(app)[name]["num_failed"], adapters(app)[name]["num_served"]) == (1, 0)
    assert "not finite" in adapters(app)[name]["last_failure"]
    assert token_ids(app, "a20") == expected
    shutil.rmtree(root / name)


def check_reload(app: App, root: Path, target: Moving, num_versions: int, num_clients: int) -> None:
    """Every answer is one version's, whole, and whoever asks after a change gets what it brought."""
    versions = [random_adapter(root / "a4", root / f"{target.folder.name}-{i}", 8, seed=500 + i) for i in range(num_versions)]
    expected = {tuple(token_ids(app, version.name, max_new_tokens=24)): i for i, version in enumerate(versions)}
    assert len(expected) == num_versions, "every version answers differently"
    shutil.copytree(versions[0], target.folder)
    is_over = threading.Event()

    def ask() -> set[int]:
        seen = set()
        while not is_over.is_set():
            seen.add(expected[tuple(token_ids(app, target.adapter_id, max_new_tokens=24))])
        return seen

    assert expected[tuple(token_ids(app, target.adapter_id, max_new_tokens=24))] == 0
    with ThreadPoolExecutor(num_clients) as clients:
        calls = [clients.submit(ask) for _ in range(num_clients)]
        try:
            for i, version in enumerate(versions[1:], 1):
                target.change(app, version, ADMIN)
                assert expected[tuple(token_ids(app, target.adapter_id, max_new_tokens=24))] == i
        finally:
            is_over.set()
        assert len(set().union(*(call.result() for call in calls))) > 1
    app.wait_until_idle()
    for folder in (*versions, target.folder):
        shutil.rmtree(folder)


@pytest.mark.parametrize("how", ["a folder", "a download, reloaded"])
def test_each_answer_is_of_one_version_while_the_adapter_changes(app: App, root: Path, files: FileServer, how: str) -> None:
    check_reload(app, root, moving(how, root, files), num_versions=5, num_clients=16)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["a folder", "a folder, reloaded", "a download, reloaded"])
def test_each_answer_is_of_one_version_while_the_adapter_changes_twenty_times(app: App, root: Path, files: FileServer, how: str) -> None:
    check_reload(app, root, moving(how, root, files), num_versions=21, num_clients=100)


@pytest.mark.soak
def test_ten_thousand_bad_requests(app: App, oracle: Oracle, own_cache: Path, make_bad: Callable[[int, int], list[Kind]]) -> None:
    """The only one that leaves its times behind, in benchmarks/results/: how long the slowest of so many took depends on the machine."""
    kinds = make_bad(100, 500)
    wanted = wishes(kinds, 10_000)
    times = check_bad_requests(app, oracle, own_cache, kinds, [wanted[i : i + 1000] for i in range(0, len(wanted), 1000)], num_alone=320)
    store("bad_adapters", "python -m pytest -m soak --timeout=0 tests/e2e/test_adapters.py -k ten_thousand", times)


def test_metrics_tell_of_adapters_and_of_the_prefix_cache(app: App) -> None:
    token_ids(app, "a4")
    num_cached = app.ask_driver("stats")["prefix_cached_tokens_total"]
    token_ids(app, "a4")
    stats = app.wait_until_idle()
    assert stats["prefix_cached_tokens_total"] > num_cached, "the same prompt with the same version"
    assert stats["prefix_hit_rate"] == stats["prefix_cached_tokens_total"] / stats["prompt_tokens_total"]
    metrics = app.get("/metrics").text
    [hit_rate] = [line.split()[-1] for line in metrics.splitlines() if line.startswith("loray_driver_prefix_hit_rate{")]
    assert float(hit_rate) == stats["prefix_hit_rate"]
    assert "loray_adapter_requests" in metrics and "loray_driver_adapter_evictions_host_total" in metrics
    families = httpx.get(f"{app.url}/metrics", headers={"Accept": "application/json"}, timeout=PATIENCE_S).json()
    assert "loray_adapter_requests" in json.dumps(families)
