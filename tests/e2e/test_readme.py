"""The examples of the README and of docs/http.md, copied from there and run against the shipped configuration."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import free_port
from tests.e2e.test_launcher import launched

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CURL = re.compile(r"^curl .*?(?:\\\n.*?)*$", re.MULTILINE)
CURLS = CURL.findall(README)
HTTP_CURLS = CURL.findall((ROOT / "docs" / "http.md").read_text())
PYTHON = re.findall(r"```python\n(from openai.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    number = free_port()
    with launched("--config", str(ROOT / "serve_config.yaml"), "--port", str(number)) as launcher:
        launcher.wait_ready()
        yield number


def answer(command: str, port: int) -> str:
    finished = subprocess.run(["bash", "-c", f"{command} -s --fail-with-body".replace(":8000", f":{port}")], capture_output=True, text=True)
    assert finished.returncode == 0, f"{command}\n{finished.stdout}{finished.stderr}"
    return finished.stdout


def test_every_curl_line_is_answered_and_every_adapter_answers_differently(port: int) -> None:
    assert len(CURLS) >= 8
    answers = {command: answer(command, port) for command in CURLS}
    sea = [json.loads(text) for command, text in answers.items() if "the sea" in command]
    texts = [body["generated_text"] if "generated_text" in body else body["choices"][0]["message"]["content"] for body in sea]
    assert len(set(texts)) == len(texts) == 5
    base, pirate, haiku, sql, record = texts
    assert "Arr" in pirate and len(haiku.strip().splitlines()) >= 3 and sql.startswith("SELECT") and json.loads(record)
    assert not any(mark in base for mark in ("Arr", "SELECT", "{"))
    (merged,) = [json.loads(text) for command, text in answers.items() if "merged_adapters" in command]
    assert merged["generated_text"]


def test_the_examples_of_structured_output_and_tools_give_what_they_ask_for(port: int) -> None:
    city, phone, tool = (json.loads(answer(command, port)) for command in HTTP_CURLS)
    assert json.loads(city["choices"][0]["message"]["content"]).keys() == {"name", "coastal"}
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", phone["generated_text"])
    (call,) = tool["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"]).keys() == {"city"}


def test_openais_client_example_runs(port: int) -> None:
    (example,) = PYTHON
    finished = subprocess.run([sys.executable, "-c", example.replace(":8000", f":{port}")], capture_output=True, text=True)
    assert finished.returncode == 0 and finished.stdout.strip(), finished.stderr
