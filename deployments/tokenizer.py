"""Text to token ids and back, and chat messages to a prompt. Knows nothing of requests or HTTP."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jinja2

from loray.deployments.errors import MissingTemplateVariable, TemplateError

OFF_LOOP_CHARS = 4096  # about 1 ms of encoding; longer texts would hold up every other stream, so a thread does them
OFF_LOOP_MESSAGES = 64  # the same, of what is done for each
OFF_LOOP_TOKENS = 4096  # the same, of decoding

T = TypeVar("T")


class TokenSpan(NamedTuple):
    id: int
    start: int  # in characters of the text
    stop: int


class Tokenizer:
    def __init__(self, tokenizer: Any, folder: Path | None = None) -> None:
        """`folder` is where it came from."""
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} has no tokenizer.json form, which loray needs")
        self.folder = folder
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # Some checkpoints ship a length limit or padding inside tokenizer.json. Here nothing may cut or pad a prompt.
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_texts: dict[int, str] = {token_id: token.content for token_id, token in added.items() if token.special}

    @classmethod
    def load(cls, folder: Path, trust_remote_code: bool = False) -> "Tokenizer":
        from transformers import AutoTokenizer  # here, so that who only builds the application does not wait for it

        return cls(AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code), folder)

    @property
    def special_tokens(self) -> dict[str, Any]:
        """By name, as chat templates know them."""
        return dict(self._tokenizer.special_tokens_map)

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    async def encode(self, text: str) -> list[int]:
        """With the special tokens the model expects around a plain prompt."""
        return await off_loop_if(len(text) > OFF_LOOP_CHARS, lambda: self._backend.encode(text).ids)

    async def spans(self, text: str, add_special_tokens: bool) -> list[TokenSpan]:
        return await off_loop_if(len(text) > OFF_LOOP_CHARS, lambda: self._spans(text, add_special_tokens))

    def chat_template(self, has_tools: bool) -> str:
        """The model's own, "" for none; some have another one for tools."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = (has_tools and template.get("tool_use")) or template.get("default")
        return template or ""

    async def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: str) -> list[int]:
        """The prompt that asks for the next assistant message. The template runs here: it is the model's own or the configured one."""
        is_long = is_much(messages) or sum(len(message["content"]) for message in messages) > OFF_LOOP_CHARS
        is_long = is_long or bool(tools) or template != self.chat_template(has_tools=False)
        return await off_loop_if(is_long, lambda: self._encode_chat(messages, tools, template))

    async def encode_rendered(self, text: str) -> list[int]:
        """A prompt that a chat template wrote, its own special tokens included."""
        return await off_loop_if(len(text) > OFF_LOOP_CHARS, lambda: self._encode_rendered(text))

    async def decode_prompt(self, token_ids: list[int]) -> str:
        """As `decode`; it may be long."""
        return await off_loop_if(len(token_ids) > OFF_LOOP_TOKENS, lambda: self.decode(token_ids))

    def _spans(self, text: str, add_special_tokens: bool) -> list[TokenSpan]:
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return [TokenSpan(token_id, *offsets) for token_id, offsets in zip(encoding.ids, encoding.offsets, strict=True)]

    def _encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: str) -> list[int]:
        return self._encode_rendered(self._render(messages, tools, template))

    def _encode_rendered(self, text: str) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=False).ids  # the template wrote its own
        except TypeError as error:  # half of a surrogate pair, which a template can write
            raise TemplateError("messages: the chat template wrote half of a surrogate pair, which is no text", param="messages") from error

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: str) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools or None, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        except jinja2.UndefinedError as error:
            raise MissingTemplateVariable(f"messages: the chat template wants what is not there: {error}", param="messages") from error
        except Exception as error:  # a template is a program: it may raise anything
            raise TemplateError(f"messages: the chat template refused them: {error}", param="messages") from error
        return text

    def decode(self, token_ids: list[int]) -> str:
        """Without special tokens, and without Hugging Face's space clean-up, which is not stable as text grows."""
        return self._backend.decode(token_ids, skip_special_tokens=True)


def is_much(messages: list[dict[str, Any]]) -> bool:
    """Arguments of calls are JSON of any length."""
    return len(messages) > OFF_LOOP_MESSAGES or any("tool_calls" in message for message in messages)


async def off_loop_if(is_long: bool, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if is_long else work()
