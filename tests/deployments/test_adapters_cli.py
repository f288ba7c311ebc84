import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.adapters_cli import table
from loray.deployments.cli import main
from loray.deployments.http_app import make_app
from tests.deployments.file_server import FileServer
from tests.deployments.live_server import live
from tests.deployments.scripted_backend import ScriptedBackend, saying, service_of, status_of

NOW = 1_000_000.0


@pytest.fixture(scope="module")
def backend() -> ScriptedBackend:
    return saying("x")


@pytest.fixture(scope="module")
def url(backend: ScriptedBackend) -> Iterator[str]:
    with live(make_app(service_of(backend, api_keys={"admin": "open"}))) as address:
        yield address


@pytest.fixture(autouse=True)
def two_adapters(backend: ScriptedBackend) -> None:
    backend.statuses = {"replica": [status_of("pirate", "gpu", num_served=12), status_of("s3://bucket/a b?#", "host", is_pinned=True)]}
    backend.changes.clear()


def rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines()]


def shape(*statuses: Any) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(status) for status in statuses]


def test_list_prints_a_table(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["adapters", "list", "--url", url, "--key", "open"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["ADAPTER", "STATE", "VERSION", "RANK", "GPU", "HOST", "DISK", "RUNNING", "SERVED", "FAILED", "LAST", "USED"]
    assert first.split() == ["pirate", "gpu", "1f2e3d4c", "8", "-", "1.0M", "-", "0", "12", "0", "never"]
    assert second.startswith("s3://bucket/a b?#") and "host, pinned" in second


def test_list_can_be_of_one_state(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapters", "list", "--state", "gpu", "--url", url, "--key", "open"]) == 0
    assert [row[0] for row in rows(capsys.readouterr().out)] == ["ADAPTER", "pirate"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list"], "no adapters are known"),
        (["list", "--state", "gpu"], "no adapter is in the state gpu"),
        (["unload", "pirate"], "pirate is unloaded"),
    ],
)
def test_where_nothing_is_left_a_line_says_so(
    url: str, backend: ScriptedBackend, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    asked = backend.adapter_statuses

    async def gone() -> dict[str, list[AdapterStatus]]:
        return {"replica": []} if arguments[0] == "list" or backend.changes else await asked()

    backend.adapter_statuses = gone  # type: ignore[method-assign]
    try:
        assert main(["adapters", *arguments, "--url", url, "--key", "open"]) == 0
    finally:
        del backend.adapter_statuses
    assert capsys.readouterr().out == f"{says}\n"


def test_json_is_the_servers_answer(url: str, capsys: pytest.CaptureFixture[str], backend: ScriptedBackend) -> None:
    assert main(["adapters", "list", "--json", "--url", url, "--key", "open"]) == 0
    assert json.loads(capsys.readouterr().out) == {"adapters": shape(*backend.statuses["replica"])}


@pytest.mark.parametrize("action", ["unload", "pin", "unpin", "reload"])
@pytest.mark.parametrize("adapter_id", ["pirate", "s3://bucket/a b?#"])
def test_an_action_names_its_adapter_whatever_the_id(url: str, backend: ScriptedBackend, action: str, adapter_id: str) -> None:
    assert main(["adapters", action, adapter_id, "--url", f"{url}/", "--key", "open"]) == 0
    assert [(change.action, change.ref.adapter_id) for change in backend.changes] == [(action, adapter_id)]


def test_load_passes_everything_on(url: str, backend: ScriptedBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "key").write_text("open\n")
    backend.statuses["replica"].append(status_of("pirate", source="hub", revision="v2"))
    options = ["--source", "hub", "--revision", "v2", "--pin", "--token-file", str(tmp_path / "token")]
    assert main(["adapters", "load", "pirate", *options, "--url", url, "--key-file", str(tmp_path / "key")]) == 0
    (change,) = backend.changes
    assert (change.ref.source, change.ref.revision, change.ref.api_token, change.is_pinned) == ("hub", "v2", "secret", True)
    assert rows(capsys.readouterr().out)[1][0] == "pirate"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "--url", "URL"], "admin key (api_keys.admin) (401)"),
        (["list", "--url", "URL", "--key", "wrong"], "(401)"),
        (["pin", "nobody", "--url", "URL", "--key", "open"], "nobody"),
        (["load", "x", "--source", "ftp", "--url", "URL", "--key", "open"], "source: 'ftp'"),
        (["list", "--url", "URL/elsewhere"], "not found (404)"),
        (["list", "--url", "http://127.0.0.1:1"], "no answer from http://127.0.0.1:1"),
        (["list", "--url", "not an address"], "no address"),
        (["list", "--url", "file:///etc/hostname"], "no address"),
        (["list", "--url", "http://127.0.0.1:x"], "no answer"),
        (["list", "--url", "URL", "--key", "op\nen"], "the admin key has characters"),
        (["list", "--url", "URL", "--key", "ключ"], "the admin key has characters"),
        (["list", "--url", "URL", "--key-file", sys.executable], "can't be read: it is no text"),
        (["list", "--url", "URL/openapi.json?"], "no loray server"),
        (["list", "--key-file", "missing"], "missing can't be read"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str, backend: ScriptedBackend
) -> None:
    assert main(["adapters", *(argument.replace("URL", url) for argument in arguments)]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("loray: ") and says in line and not captured.out and not backend.changes


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_on_this_machine_is_asked_without_the_proxy(url: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with closing(FileServer(tmp_path)) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert main(["adapters", "list", "--url", url.replace("127.0.0.1", host), "--key", "open"]) == 0
        assert not proxy.requests
        assert main(["adapters", "list", "--url", "http://elsewhere.example", "--key", "open"]) == 1
        assert proxy.requests == [("GET", "http://elsewhere.example/admin/adapters")]


@pytest.mark.parametrize("arguments", [[], ["list"], ["load"]])
def test_help_says_what_can_be_done(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["adapters", *arguments, "--help"])
    assert exit_.value.code == 0 and "adapters" in capsys.readouterr().out


def test_the_table_fits_the_terminal_and_numbers_stand_on_the_right() -> None:
    long = "org/" + "x" * 100 + "/tail"
    lines = table(shape(status_of(long), status_of("a", num_served=1234567)), 100, NOW)
    assert max(map(len, lines)) <= 100
    assert lines[1].startswith("org/") and "…" in lines[1] and "/tail" in lines[1].split()[0]
    served = lines[0].index("SERVED") + len("SERVED")
    assert lines[1][:served].endswith(" 0") and lines[2][:served].endswith("1234567")


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(0, "0 s ago"), (-5, "0 s ago"), (3, "3 s ago"), (119, "119 s ago"), (120, "2 min ago"), (7200, "2 h ago"), (200_000, "2 d ago")],
)
def test_last_used_is_said_in_words(seconds: float, says: str) -> None:
    assert table(shape(status_of("a", last_used=NOW - seconds)), 200, NOW)[1].endswith(says)


@pytest.mark.parametrize(
    ("num_bytes", "says"), [(0, "-"), (512, "512B"), (1536, "1.5K"), (10 << 20, "10M"), (1000 << 20, "1.0G"), (5 << 40, "5.0T")]
)
def test_bytes_are_short(num_bytes: int, says: str) -> None:
    line = table(shape(status_of("a", gpu_bytes=num_bytes, host_bytes=0)), 200, NOW)[1]
    assert line.split()[4] == says


def test_under_an_adapter_that_failed_stands_why() -> None:
    lines = table(shape(status_of("a", "failed", version="", error="no such folder")), 200, NOW)
    assert lines[2].strip() == "no such folder"


def test_under_an_adapter_whose_requests_fail_stands_why_once() -> None:
    lines = table(shape(status_of("a", "gpu", error="torn", last_failure="torn"), status_of("b", last_failure="no room")), 200, NOW)
    assert [line.strip().split("  ")[0] for line in lines[1:]] == ["a", "torn", "b", "no room"]


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_whoever_reads_may_stop_reading(url: str, form: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = "import sys; from loray.deployments.cli import main; sys.exit(main())"
    asked = [sys.executable, "-c", command, "adapters", "list", "--url", url, "--key", "open", *form]
    with open(writing, "wb") as pipe:
        ended = subprocess.run(asked, stdout=pipe, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
