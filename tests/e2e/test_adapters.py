"""Adapters of many kinds through small tiers: from folders, over HTTP and from S3, merged, changed and broken, over real ranks."""

import json
import os
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer

from loray.models.adapter import CONFIG_FILE, WEIGHTS_FILE
from tests.deployments.file_server import HubServer
from tests.e2e.adapter_zoo import random_adapter
from tests.e2e.conftest import App
from tests.e2e.file_server import FileServer, serving
from tests.e2e.moving_adapter import Moving, moving
from tests.e2e.oracle import Oracle
from tests.e2e.patience import PATIENCE_S
from tests.e2e.stored_times import spread, store
from tests.models.tiny_llama import save_adapter, save_llama

pytestmark = pytest.mark.slow

PROMPT = "hello world, this is a prompt that is longer than one block of the cache, so that its beginning could be found again there"
PAGE_BYTES = 44_096  # of the tiny model: 8 ranks of all its linears in float32
NUM_PAGES, NUM_HOST_PAGES = 20, 40
RANKS = (4, 8, 12, 20, 32, 64)
NUM_ADAPTERS = 30
SOURCES = ["a4", "a8", "a20"]
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


def bad_adapters(app: App, root: Path, tiny_model: Path, folder: Path, files: FileServer) -> dict[str, str]:
    """Ids that can't be served, by the reason."""
    good = root / "a4"
    (shutil.copytree(good, root / "torn") / WEIGHTS_FILE).write_bytes(b"torn")
    shutil.copytree(good, root / "pickle", ignore=shutil.ignore_patterns(WEIGHTS_FILE))
    (root / "pickle" / "adapter_model.bin").write_bytes(b"pickle")
    other = save_llama(folder / "other", hidden_size=24)
    save_adapter(other, root / "foreign", r=4)
    random_adapter(good, root / "huge", 8 * NUM_PAGES + 1, seed=1)
    shutil.copytree(good, folder / "outside")
    os.symlink(folder / "outside", root / "link")
    (shutil.copytree(good, root / "badjson") / CONFIG_FILE).write_text("{")
    return {
        "missing": "nobody", "torn": "torn", "a pickle": "pickle", "of another base": "foreign", "too large": "huge", "not JSON": "badjson",
        "a path out of the root": "../adapters/../outside", "a link out of the root": "link", "a folder elsewhere": str(folder / "outside"),
        "a URL off the list": "http://169.254.169.254/x", "a bucket off the list": "s3://elsewhere/a4",
        "a URL with ..": f"{files.url}/../etc", "a URL of nothing": f"{files.url}/absent",
        "an unknown scheme": "ftp://x/y", "no name": "\x00", "a long name": "a" * 5000,
    }  # fmt: skip


def check_bad_requests(app: App, bad: dict[str, str], count: int) -> dict[str, Any]:
    """Each is answered with a clear error, good requests beside them go on, and everything taken is given back. What it took."""
    ids = list(bad.values())
    expected = token_ids(app, "a20", max_new_tokens=64)
    before = app.wait_until_idle()
    is_over = threading.Event()

    def good() -> int:
        count = 0
        while not is_over.is_set():
            assert token_ids(app, "a20", max_new_tokens=64) == expected
            count += 1
        return count

    with httpx.Client(timeout=PATIENCE_S) as client, ThreadPoolExecutor(16) as clients:
        goods = [clients.submit(good) for _ in range(8)]
        try:
            answers = list(clients.map(lambda i: client.post(app.url + "/generate", json=body(ids[i % len(ids)])), range(count)))
        finally:
            is_over.set()
        num_good = [call.result() for call in goods]
        assert all(num_good)
    for answer in answers:
        assert 400 <= answer.status_code < 500 and len(answer.json()["error"]) > 20, answer.text
    after = app.wait_until_idle()
    names = ["adapter_pages_used", "adapter_host_bytes_used", "adapters_in_host", "kv_blocks_used", "adapter_references", "running"]
    names += ["waiting"]
    assert {name: after[name] for name in names} == {name: before[name] for name in names}
    assert not set(ids) & {name for name, one in adapters(app).items() if one["num_running"] or one["gpu_bytes"] or one["host_bytes"]}
    seconds = [answer.elapsed.total_seconds() for answer in answers]
    by_reason = {reason: spread(seconds[i :: len(bad)]) for i, reason in enumerate(bad)}
    return {"good_answers_beside_them": sum(num_good), "all": spread(seconds), **by_reason}


def test_bad_adapters_are_refused_and_leave_nothing_behind(
    app: App, root: Path, tiny_model: Path, tmp_path: Path, files: FileServer
) -> None:
    check_bad_requests(app, bad_adapters(app, root, tiny_model, tmp_path, files), 160)


@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/embed"])
def test_an_adapter_with_which_no_number_is_finite_is_an_error_that_names_it(app: App, root: Path, route: str) -> None:
    name = f"overflows{route.replace('/', '-')}"
    random_adapter(root / "a4", root / name, 4, seed=7, std=1e30)
    expected = token_ids(app, "a20")
    response = app.post(route, {"inputs": PROMPT, "parameters": {"adapter_id": name}})
    assert response.status_code == 424, response.text
    assert f"adapter '{name}'" in response.text and "not finite" in response.text
    assert (adapters(app)[name]["num_failed"], adapters(app)[name]["num_served"]) == (1, 0)
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
def test_ten_thousand_bad_requests(app: App, root: Path, tiny_model: Path, tmp_path: Path, files: FileServer) -> None:
    """The only one that leaves its times behind, in benchmarks/results/: how long the slowest of so many took depends on the machine."""
    for folder in ("torn", "pickle", "foreign", "huge", "badjson"):
        shutil.rmtree(root / folder, ignore_errors=True)
    (root / "link").unlink(missing_ok=True)
    times = check_bad_requests(app, bad_adapters(app, root, tiny_model, tmp_path, files), 10_000)
    store("bad_adapters", "python -m pytest -m soak --timeout=0 tests/e2e/test_adapters.py -k ten_thousand", times)


def test_metrics_tell_of_adapters_and_of_the_prefix_cache(app: App) -> None:
    token_ids(app, "a4")
    families = httpx.get(f"{app.url}/metrics", headers={"Accept": "application/json"}, timeout=PATIENCE_S).json()
    assert "loray_adapter_requests" in json.dumps(families) and "loray_driver_adapter_evictions_host_total" in json.dumps(families)
