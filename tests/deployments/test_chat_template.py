"""Which chat template writes a prompt, from the adapter's folder to the tokens."""

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loray.deployments import chat_template
from loray.deployments.adapter_service import AdapterService
from loray.deployments.adapter_store import AdapterStore
from loray.deployments.adapter_template import adapter_template
from loray.deployments.chat_template import ChatTemplates
from loray.deployments.config import AdapterArgs
from loray.deployments.configured_template import configured_template
from loray.deployments.driver import check_template
from loray.deployments.driver_client import DriverClient
from loray.deployments.errors import AdapterFailed, AdapterNotFound, LorayError, TemplateError
from loray.deployments.openai import OpenAIApi
from loray.deployments.openai_request import ChatBody
from loray.deployments.request import AdapterRef, AdapterTemplate, GenerationRequest
from loray.deployments.template_renderer import TemplateRenderer
from loray.deployments.tokenizer import Tokenizer
from tests.deployments.file_server import HubServer
from tests.deployments.peft_folder import SHAPES, save_folder
from tests.deployments.rank_in_process import PAGE_BYTES, RankInProcess, start_engine
from tests.deployments.scripted_backend import BASE, HF, ScriptedBackend, run, saying, send, service_of
from tests.tiny_tokenizer import tiny_tokenizer
from tests.weather_tools import WEATHER

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
ROLES = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}{% endfor %}"
)


def answer(backend: ScriptedBackend, args: dict[str, Any], **fields: Any) -> Any:
    service = service_of(backend, **args)
    return send(service, "POST", CHAT, json={"model": BASE, "messages": [{"role": "user", "content": "hello"}], **fields})


def prompt(backend: ScriptedBackend, template: str | None = None, **fields: Any) -> str:
    response = answer(backend, {"model": {"chat_template": template}}, **fields)
    assert response.status_code == 200, response.text
    return str(HF.decode(backend.requests[-1].prompt_ids))


@pytest.mark.slow
def test_the_adapters_own_template_comes_first_then_the_configured_one_then_the_models() -> None:
    backend = saying("x")
    backend.templates["pirate"] = f"arr {ROLES}"
    assert prompt(backend, f"configured {ROLES}", model="pirate") == "arr [user]hello"
    assert prompt(backend, f"configured {ROLES}") == "configured [user]hello"
    assert prompt(backend, f"configured {ROLES}", model="org/poet") == "configured [user]hello"
    assert prompt(backend) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
def test_an_adapters_template_is_asked_for_once_in_a_while() -> None:
    class Counting(ScriptedBackend):
        asked = 0

        async def chat_template(self, adapter: AdapterRef) -> AdapterTemplate:
            self.asked += 1
            return AdapterTemplate(ROLES, "1")

    backend = Counting([[2]])
    service = service_of(backend)
    api = OpenAIApi(service)
    body = ChatBody.model_validate({"model": "pirate", "messages": [{"role": "user", "content": "hello"}]})

    async def three() -> None:
        for _ in range(3):
            await api.chat_call(body, "")

    run(three())
    assert backend.asked == 1


class Long(ScriptedBackend):
    """Its adapters have long templates, and each answer is a text of its own, as over the wire."""

    def __init__(self, num_chars: int) -> None:
        super().__init__([[2]])
        self.num_chars = num_chars
        self.asked: list[str] = []

    async def chat_template(self, adapter: AdapterRef) -> AdapterTemplate:
        self.asked.append(adapter.adapter_id)
        await asyncio.sleep(0)
        return AdapterTemplate("{#\N{GRINNING FACE}" + "-" * self.num_chars + "#}" + ROLES, "1")


@pytest.mark.parametrize(("num_chars", "token_len"), [(1_000_000, 1), (0, 4_000_000)], ids=["templates", "tokens"])
def test_whoever_makes_up_tokens_takes_little_memory(num_chars: int, token_len: int) -> None:
    templates = ChatTemplates(Tokenizer(HF), Long(num_chars), None)

    async def ask() -> None:
        for i in range(32):
            ref = AdapterRef(adapter_id="pirate", api_token=str(i).zfill(token_len))
            assert (await templates.prompt(MESSAGES, [], ref)).text == "[user]hello"

    tracemalloc.start()
    try:
        run(ask())
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 70_000_000


def test_a_long_template_that_many_ask_for_at_once_or_that_is_replaced_often_drives_out_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LIFETIME_S", 600.0)
    backend = Long(num_chars=1_000_000)
    templates, other, long = ChatTemplates(Tokenizer(HF), backend, None), AdapterRef(adapter_id="a"), AdapterRef(adapter_id="b")

    async def ask() -> None:
        await templates.prompt(MESSAGES, [], other)
        await asyncio.gather(*(templates.prompt(MESSAGES, [], long) for _ in range(12)))
        for _ in range(12):
            templates.forget(long)
            await templates.prompt(MESSAGES, [], long)
        await templates.prompt(MESSAGES, [], other)

    run(ask())
    assert backend.asked == ["a", *["b"] * 24]


class Replaced(ScriptedBackend):
    """Its adapter is replaced between the question for the template and the request, so many times."""

    num_left = 1

    def script_of(self, request: GenerationRequest) -> Sequence[list[int] | Exception]:
        if self.num_left:
            self.num_left -= 1
            number = int(self.versions["pirate"]) + 1
            self.versions["pirate"], self.templates["pirate"] = str(number), f"v{number} {ROLES}"
        try:
            check_template(request, AdapterTemplate(self.templates["pirate"], self.versions["pirate"]))
        except LorayError as error:
            return [error]
        return self.script


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_written_anew_when_its_adapter_was_replaced_since(stream: bool) -> None:
    backend = Replaced([[2]])
    backend.templates["pirate"], backend.versions["pirate"] = f"v1 {ROLES}", "1"
    service = service_of(backend)
    for wanted, num_requests in (("v2", 2), ("v2", 3)):
        response = send(service, "POST", CHAT, json={"model": "pirate", "messages": MESSAGES, "stream": stream})
        assert response.status_code == 200 and "error" not in response.text
        assert len(backend.requests) == num_requests
        assert HF.decode(backend.requests[-1].prompt_ids) == f"{wanted} [user]hello"


@pytest.mark.parametrize(
    ("older", "newer", "num_requests"),
    [("", "", 1), (ROLES, ROLES, 1), (ROLES, "", 2), ("", ROLES, 2), ("", f"new {ROLES}", 2)],
    ids=["none", "the same", "older alone", "newer alone", "newer alone, another"],
)
def test_replicas_with_two_versions_of_an_adapter_answer_what_each_would_write(older: str, newer: str, num_requests: int) -> None:
    """Requests go to the one that has the newer; its template is asked of the other first, and of either where that was wrong."""

    class Other(ScriptedBackend):
        async def chat_template(self, adapter: AdapterRef) -> AdapterTemplate:
            return AdapterTemplate(newer, "2") if self.requests else AdapterTemplate(older, "1")

        def script_of(self, request: GenerationRequest) -> Sequence[list[int] | Exception]:
            try:
                check_template(request, AdapterTemplate(newer, "2"))
            except LorayError as error:
                return [error]
            return self.script

    backend = Other([[2]])
    assert answer(backend, {}, model="pirate").status_code == 200
    assert len(backend.requests) == num_requests
    plain = ScriptedBackend([[2]])
    answer(plain, {})
    wanted = newer.replace(ROLES, "[user]hello") or HF.decode(plain.requests[-1].prompt_ids)
    assert HF.decode(backend.requests[-1].prompt_ids) == wanted


def test_an_adapter_that_is_replaced_again_and_again_is_told() -> None:
    backend = Replaced([[2]])
    backend.num_left, backend.templates["pirate"], backend.versions["pirate"] = 9, ROLES, "1"
    response = answer(backend, {}, model="pirate")
    assert response.status_code == 424 and "replaced since its chat template was read" in response.text


def test_an_adapter_that_can_not_be_used_is_refused_with_its_own_error() -> None:
    class Gone(ScriptedBackend):
        async def chat_template(self, adapter: AdapterRef) -> AdapterTemplate:
            raise AdapterNotFound(f"no adapter {adapter.adapter_id!r}")

    response = answer(Gone([[2]]), {}, model="gone")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_the_configured_template_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(f"file {ROLES}")
    assert prompt(saying("x"), str(tmp_path / "t.jinja")) == "file [user]hello"
    with pytest.raises(ValueError, match="chat_template.*missing.jinja"):
        configured_template(str(tmp_path / "missing.jinja"))


@pytest.mark.parametrize(
    ("template", "says", "code"),
    [
        ("{{ persona.name }}", "'persona' is undefined", "missing_template_variable"),
        ("{{ messages[0].mood.upper() }}", "has no attribute 'mood'", "missing_template_variable"),
        ("{% if %}", "Expected an expression", "template_error"),
        ("{{ 1 // 0 }}", "division", "template_error"),
        ("{{ raise_exception('only alternating roles') }}", "only alternating roles", "template_error"),
        ("{{ '\\ud800' }}", "half of a surrogate pair", "template_error"),
    ],
)
def test_a_template_that_fails_says_why(template: str, says: str, code: str) -> None:
    response = answer(saying("x"), {"model": {"chat_template": template}})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "messages", code) and says in error["message"]


def test_a_name_that_nobody_gave_is_false_and_nothing_as_in_transformers() -> None:
    template = "{{ persona }}{% if persona %}x{% endif %}{% for part in persona %}x{% endfor %}"
    assert prompt(saying("x"), template + ROLES) == "[user]hello"


@pytest.mark.slow
def test_what_an_adapters_template_can_not_be_given_or_tell_is_refused() -> None:
    backend = saying("x")
    backend.templates |= {"tools": TOOLS, "half": "{{ '\\ud800' }}", "raises": "{{ raise_exception('\\ud800') }}"}
    service = service_of(backend)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": f'{{"city": {10**30}}}'}}
    body: dict[str, Any] = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    for name, says in {"tools": "too large a number", "half": "half of a surrogate pair", "raises": "refused them: ?"}.items():
        response = send(service, "POST", CHAT, json={**body, "model": name})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "template_error") and says in error["message"]


@pytest.mark.parametrize(("num_messages", "has_calls", "is_alone"), [(2, False, False), (100, False, True), (2, True, True)])
def test_a_template_with_much_to_do_holds_nobody_up(num_messages: int, has_calls: bool, is_alone: bool) -> None:
    class Noting(Tokenizer):
        def _render(self, *args: Any) -> str:
            threads.append(threading.current_thread())
            return super()._render(*args)

    threads: list[threading.Thread] = []
    message = {"role": "user", "content": ""} | ({"tool_calls": []} if has_calls else {})
    tokenizer = Noting(HF)
    run(tokenizer.render_chat([message] * num_messages, [], tokenizer.chat_template(has_tools=False)))
    assert [thread is not threading.main_thread() for thread in threads] == [is_alone]


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    messages = [{"role": "developer", "content": "be kind"}]
    assert prompt(saying("x"), ROLES, messages=messages) == "[system]be kind"
    assert prompt(saying("x"), ROLES + "{# developer #}", messages=messages) == "[developer]be kind"


def test_a_template_that_knows_tools_gets_calls_and_their_arguments_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "sun", "tool_call_id": "1"}]
    assert prompt(saying("x"), TOOLS, messages=messages) == "[assistant]weather(Bern)[tool]sun"
    short = "{{ messages[0].content[:12] }}"
    assert prompt(saying("x"), short, messages=messages) == "<tool_call>\n"


def test_a_template_that_refuses_a_system_message_is_told_of_tools_by_the_user() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + ROLES
    templates = ChatTemplates(Tokenizer(HF), saying("x"), template)
    written = run(templates.prompt(MESSAGES, [WEATHER], None)).text
    assert written.startswith("[user]You can call functions") and written.endswith("</tool_call>\n\nhello")
    with pytest.raises(TemplateError, match="no system role"):
        run(templates.prompt([{"role": "system", "content": "be kind"}, *MESSAGES], [WEATHER], None))


def test_a_models_own_template_for_tools_is_no_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def render(*_: Any) -> str:
        raise AssertionError("it is no stranger's")

    monkeypatch.setattr(TemplateRenderer, "render", render)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": ROLES, "tool_use": f"tools {ROLES}"}
    templates = ChatTemplates(Tokenizer(tokenizer), saying("x"), None)
    assert run(templates.prompt(MESSAGES, [WEATHER], None)).text.startswith("tools [system]You can call functions")


def test_a_folders_template_is_its_jinja_file_else_in_its_tokenizers_configuration(tmp_path: Path) -> None:
    assert adapter_template(tmp_path, "a") == ""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 8}))
    assert adapter_template(tmp_path, "a") == ""
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert adapter_template(tmp_path, "a") == "d"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"max": float("inf"), "chat_template": [*several, {"name": "odd"}]}))
    assert adapter_template(tmp_path, "a") == "d"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    assert adapter_template(tmp_path, "a") == "old"
    (tmp_path / "chat_template.jinja").write_text("näw")
    assert adapter_template(tmp_path, "a") == "näw"


def test_a_folders_broken_template_is_the_adapters_failure(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{{ secret }}")
    folder = tmp_path / "adapter"
    folder.mkdir()
    for content in ("{", "[]", '{"chat_template": 5}', '{"chat_template": [{}]}'):
        (folder / "tokenizer_config.json").write_text(content)
        with pytest.raises(AdapterFailed, match="tokenizer_config.json"):
            adapter_template(folder, "a")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(AdapterFailed, match="does not lie with its other files"):
        adapter_template(folder, "a")


def test_a_template_may_be_a_link_to_where_the_adapters_other_files_are(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    folder.mkdir()
    blobs.mkdir()
    for name, content in (("adapter_config.json", "{}"), ("adapter_model.safetensors", ""), ("chat_template.jinja", "linked")):
        (blobs / f"{name}-digest").write_text(content)
        (folder / name).symlink_to(blobs / f"{name}-digest")
    assert adapter_template(folder, "a") == "linked"


def test_a_replica_finds_the_template_of_an_adapter(tmp_path: Path) -> None:
    save_folder(tmp_path / "root" / "plain", 4)
    save_folder(tmp_path / "root" / "own", 4)
    (tmp_path / "root" / "own" / "chat_template.jinja").write_text(ROLES)
    store = AdapterStore(AdapterArgs(local_roots=[tmp_path / "root"]), SHAPES, tmp_path / "cache")

    async def templates() -> list[str]:
        service = AdapterService(store, start_engine(RankInProcess()), max_waiting=2, page_bytes=PAGE_BYTES)
        found = [(await service.chat_template(AdapterRef(adapter_id=name))).text for name in ("plain", "own")]
        with pytest.raises(AdapterNotFound):
            await service.chat_template(AdapterRef(adapter_id="gone"))
        return found

    assert run(templates()) == ["", ROLES]


def test_a_template_is_downloaded_and_changes_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hub" / "org" / "small"
    save_folder(folder, 4)
    hub = HubServer(tmp_path / "hub")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    store = AdapterStore(AdapterArgs(local_roots=[]), SHAPES, tmp_path / "cache")
    ref = AdapterRef(adapter_id="org/small", source="hub")
    found = []
    try:
        for template in ("one", "two", None):
            (folder / "chat_template.jinja").unlink(missing_ok=True)
            if template:
                (folder / "chat_template.jinja").write_text(template)
            store.forget(ref)
            found.append(adapter_template(Path(store.find(ref).path), "org/small"))
    finally:
        hub.close()
    assert found == ["one", "two", ""]


@pytest.mark.parametrize("error", [AdapterFailed("adapter 'a': is broken"), AdapterNotFound("adapter 'a' is gone")])
def test_what_a_replica_says_of_the_adapter_reaches_the_caller(error: LorayError) -> None:
    async def asked(ref: bytes) -> LorayError:
        return error

    async def ask() -> None:
        driver = SimpleNamespace(chat_template=SimpleNamespace(remote=lambda ref: asyncio.create_task(asked(ref))))
        await DriverClient(driver, None).chat_template(AdapterRef(adapter_id="a"))  # type: ignore[arg-type]

    with pytest.raises(type(error), match=error.message):
        run(ask())
