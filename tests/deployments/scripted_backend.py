"""A backend that plays a script instead of a model, and notes what was asked of it and how each request ended."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI

from loray.deployments.adapter_records import AdapterChange, AdapterRecord, AdapterSet, Changed
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.config import ServerArgs
from loray.deployments.http_app import make_app
from loray.deployments.request import AdapterRef, AdapterTemplate, GenerationRequest, TokenEvent
from loray.deployments.service import Service
from loray.deployments.tokenizer import Tokenizer
from tests.tiny_tokenizer import tiny_tokenizer

T = TypeVar("T")

HF = tiny_tokenizer()
EOS_ID = HF.eos_token_id
BASE = ServerArgs().model.id
MAX_TOTAL_TOKENS = 64
FACTS = {"model_device_type": "cpu", "model_sha": None, "attention": "scripted", "max_batch_total_tokens": 1456 * 16}  # a driver's


class ScriptedBackend:
    """Plays `script`: token ids that come together, or an error to raise, one item a turn. Ends with `finish`.

    Every token has the log-probability that `logprob_of` its request says; log-probabilities of the prompt and alternatives
    come when they are wanted. For a request that pools the token ids of the script are turns to wait, and `embedding_of` its
    prompt is the end."""

    def __init__(self, script: Sequence[list[int] | Exception], finish: str = "eos_token", turn_s: float = 0.0) -> None:
        self.script = script
        self.finish = finish
        self.turn_s = turn_s
        self.queue_s = 0.0  # what it says of its queue
        self.requests: list[GenerationRequest] = []
        self.endings: list[str] = []  # "" = ran to its end
        self.is_healthy = True
        self.statuses: dict[str, list[AdapterStatus]] = {"replica": []}
        self.changes: list[AdapterChange] = []
        self.records = AdapterSet()
        self.templates: dict[str, str] = {}  # chat templates, by the id of the adapter that brings one
        self.versions: dict[str, str] = {}  # of adapters, by id
        self.loads: dict[str, list[AdapterStatus]] = {}  # by adapter id: how its status goes on after a change, one at each look

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        ending = ""
        try:
            script = self.script_of(request)
            if not script or not isinstance(script[0], Exception):
                yield TokenEvent(request.request_id)
            for turn, item in enumerate(script):
                await asyncio.sleep(self.turn_s)
                if isinstance(item, Exception):
                    raise item
                if request.pooling:
                    continue
                yield self._event(request, item, turn == 0, self.finish if turn == len(script) - 1 else "")
            if request.pooling and self.finish:
                yield TokenEvent(request.request_id, finish_reason="embedding", embedding=self.embedding_of(request.prompt_ids))
        except BaseException as error:
            ending = type(error).__name__
            raise
        finally:
            self.endings.append(ending)

    def script_of(self, request: GenerationRequest) -> Sequence[list[int] | Exception]:
        return self.script

    def logprob_of(self, request: GenerationRequest) -> float:
        return -0.5

    @staticmethod
    def alternatives_of(token_id: int, num: int) -> list[tuple[int, float]]:
        """The token itself and those after it, less and less probable."""
        return [(token_id + i, -0.5 - i) for i in range(num)]

    def _event(self, request: GenerationRequest, token_ids: list[int], is_first: bool, finish: str) -> TokenEvent:
        num, num_prompt = request.sampling.num_alternatives, request.sampling.num_prompt_alternatives
        others = request.prompt_ids[1:] if is_first and request.wants_prompt_logprobs else []
        return TokenEvent(
            request.request_id,
            token_ids,
            [self.logprob_of(request)] * len(token_ids),
            finish,
            alternatives=[self.alternatives_of(token_id, num) for token_id in token_ids] if num else [],
            prompt_logprobs=[-float(place) for place, _ in enumerate(others, 1)],
            prompt_alternatives=[self.alternatives_of(token_id, num_prompt) for token_id in others] if num_prompt else [],
            queue_s=self.queue_s if is_first else 0.0,
        )

    @staticmethod
    def embedding_of(prompt_ids: list[int]) -> list[float]:
        """Values that float32 holds exactly."""
        return [len(prompt_ids) / 8, -float(prompt_ids[0]), 0.5]

    async def stats(self) -> dict[str, dict[str, float]]:
        return {"d1": {"running": 3, "kv_blocks": 1456, "steps_total": 12}, "d2": {"running": 1, "kv_blocks": 1456, "steps_total": 5}}

    async def adapters(self) -> list[str]:
        return ["pirate", "org/poet"]

    async def adapter_statuses(self) -> dict[str, list[AdapterStatus]]:
        for adapter_id, coming in self.loads.items():
            if coming and any(change.ref.adapter_id == adapter_id for change in self.changes):
                others = [status for status in self.statuses["replica"] if status.adapter_id != adapter_id]
                self.statuses["replica"] = [*others, coming.pop(0)]
        return self.statuses

    async def change_adapter(self, change: AdapterChange) -> Changed:
        self.changes.append(change)
        if change.action == "unload":
            self.statuses["replica"] = [status for status in self.statuses["replica"] if status.adapter_id != change.ref.adapter_id]
        return self.records.change(change)

    async def is_overtaken(self, record: AdapterRecord) -> bool:
        return self.records.is_overtaken(record)

    async def undo_adapter_change(self, changed: Changed) -> None:
        self.records.undo(changed)

    async def chat_template(self, adapter: AdapterRef) -> AdapterTemplate:
        return AdapterTemplate(self.templates.get(adapter.adapter_id, ""), self.versions.get(adapter.adapter_id, ""))

    async def healthy(self) -> bool:
        return self.is_healthy


def status_of(adapter_id: str, state: Any = "host", **fields: Any) -> AdapterStatus:
    values = {
        "source": "local",
        "revision": "",
        "version": "1f2e3d4c5b6a",
        "rank": 8,
        "is_pinned": False,
        "is_private": False,
        "gpu_bytes": 0,
        "host_bytes": 1 << 20,
        "disk_bytes": 0,
        "num_running": 0,
        "num_served": 0,
        "num_failed": 0,
        "last_used": 0.0,
    }
    return AdapterStatus(adapter_id=adapter_id, state=state, **{**values, **fields})


def tokens_of(text: str) -> list[list[int]]:
    """One turn for each token."""
    return [[token_id] for token_id in HF.encode(text)]


def saying(text: str, turn_s: float = 0.0) -> ScriptedBackend:
    return ScriptedBackend([*tokens_of(text), [EOS_ID]], turn_s=turn_s)


def service_of(backend: ScriptedBackend, **args: Any) -> Service:
    return Service(ServerArgs(**args), Tokenizer(HF), backend, MAX_TOTAL_TOKENS, FACTS)


def send(service: Service, method: str, path: str, **kwargs: Any) -> httpx.Response:
    return run(_response(make_app(service), method, path, **kwargs))


def post(backend: ScriptedBackend, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    """To a server with the default arguments, whose numbers are those of all such calls. A body that is bytes is JSON already."""
    service, app = _default_app()
    service.backend = backend
    if not isinstance(body, bytes):
        return run(_response(app, "POST", path, json=body, headers=headers))
    return run(_response(app, "POST", path, content=body, headers={"Content-Type": "application/json", **(headers or {})}))


@functools.cache
def _default_app() -> tuple[Service, FastAPI]:
    """Made once: it takes longer than most requests."""
    service = service_of(ScriptedBackend([]))
    return service, make_app(service)


async def _response(app: FastAPI, method: str, path: str, **kwargs: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://loray") as client:
        return await client.request(method, path, **kwargs)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))
