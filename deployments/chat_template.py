"""Which chat template writes a prompt: the adapter's own, else the configured one, else the model's. Knows neither HTTP nor Ray."""

from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from loray.deployments import tool_format
from loray.deployments.backend import Backend
from loray.deployments.configured_template import configured_template
from loray.deployments.errors import TemplateError
from loray.deployments.expiring import Expiring
from loray.deployments.off_loop import off_loop_if
from loray.deployments.request import AdapterRef, AdapterTemplate, TemplateMark
from loray.deployments.template_renderer import TemplateRenderer
from loray.deployments.tokenizer import Tokenizer, is_much

LIFETIME_S = 10.0  # of what is remembered; an adapter that is replaced meanwhile is noticed by its version
MAX_REMEMBERED = 1024  # each with a token of its own, also where callers make these up
NUM_CHARS = 8 << 10  # a longer template counts as several: all take 64 MiB at the most, of 8 bytes a character with its UTF-8


class Prompt(NamedTuple):
    text: str
    template: TemplateMark | None  # of the adapter


class ChatTemplates:
    def __init__(self, tokenizer: Tokenizer, backend: Backend, configured: str | None) -> None:
        self._tokenizer = tokenizer
        self._backend = backend
        self._configured = configured_template(configured) if configured else ""
        self._strangers = TemplateRenderer(tokenizer.special_tokens)
        self._of_adapters: Expiring[bytes, AdapterTemplate] = Expiring(
            LIFETIME_S, MAX_REMEMBERED, count=lambda template: 1 + len(template.text) // NUM_CHARS
        )

    async def prompt(self, messages: list[dict[str, Any]], tools: list[tool_format.Tool], adapter: AdapterRef | None) -> Prompt:
        """That asks for the next assistant message. Raises TemplateError, and the adapter's errors."""
        own = await self._of(adapter) if adapter else None
        text = await self._write(messages, tools, own.text if own else "")
        return Prompt(text, own.mark if own else None)

    def forget(self, adapter: AdapterRef | None) -> None:
        """It was replaced."""
        forgotten = _key(adapter) if adapter else b""
        self._of_adapters.drop(lambda key: key == forgotten)

    async def _write(self, messages: list[dict[str, Any]], tools: list[tool_format.Tool], own: str) -> str:
        template = own or self._configured or self._tokenizer.chat_template(bool(tools))
        if not template:
            raise TemplateError("the model has no chat template: use /v1/completions or /generate", param="messages")
        if "developer" not in template:  # the newer name of the same role
            messages = [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]
        if tool_format.is_spoken_by(template):
            return await self._render(template, messages, tools)
        try:
            return await self._render(template, await _described(messages, tools), [])
        except TemplateError:
            if not tools or messages[0]["role"] == "system":
                raise
        return await self._render(template, await _described(messages, tools, has_system=False), [])  # such as Gemma's

    async def _render(self, template: str, messages: list[dict[str, Any]], tools: list[tool_format.Tool]) -> str:
        own = {self._configured, *map(self._tokenizer.chat_template, (False, True))}
        if template in own:
            return await self._tokenizer.render_chat(messages, tools, template)
        return await self._strangers.render(template, messages, tools)

    async def _of(self, adapter: AdapterRef) -> AdapterTemplate:
        key = _key(adapter)
        template = self._of_adapters.get(key)
        if template is None:
            template = await self._backend.chat_template(adapter)
            self._of_adapters.put(key, template)
        return template


def _key(adapter: AdapterRef) -> bytes:
    """Of one size, however long the token is."""
    return blake2b(msgspec.msgpack.encode(adapter), digest_size=32).digest()


async def _described(messages: list[dict[str, Any]], tools: list[tool_format.Tool], has_system: bool = True) -> list[dict[str, Any]]:
    return await off_loop_if(is_much(messages), lambda: tool_format.described(messages, tools, has_system))
