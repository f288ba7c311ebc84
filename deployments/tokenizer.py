"""Text to token ids and back, and chat messages to a prompt. Knows nothing of requests or HTTP."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec

from loray.deployments.errors import MissingTemplateVariable, TemplateError
from loray.deployments.off_loop import off_loop_if
from loray.deployments.token_bytes import TokenBytes
from loray.models.converted import is_converted

OFF_LOOP_CHARS = 4096  # about 1 ms of encoding; longer texts would hold up every other stream, so a thread does them, without the GIL
OFF_LOOP_MESSAGES = 64  # the same, of what is done for each; or texts
OFF_LOOP_IDS = 4096  # the same, of decoding them at once


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
        self.bytes = TokenBytes(self._backend, self.special_texts)

    @classmethod
    def load(cls, folder: Path, trust_remote_code: bool = False) -> "Tokenizer":
        # transformers is imported here, so that who only builds the application does not wait for it.
        if _is_plain(folder):
            from transformers import PreTrainedTokenizerFast

            return cls(PreTrainedTokenizerFast.from_pretrained(folder), folder)
        from transformers import AutoTokenizer

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
        (token_ids,) = await self.encode_all([text])
        return token_ids

    async def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The same of each."""
        return await off_loop_if(is_long(texts), lambda: [encoding.ids for encoding in self._encodings(texts)])

    async def spans(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[TokenSpan]]:
        """Of each text."""
        return await off_loop_if(is_long(texts), lambda: [_spans(encoding) for encoding in self._encodings(texts, add_special_tokens)])

    async def places(self, texts: Sequence[str]) -> list[list[int]]:
        """Of each text: the place of its tokens in it. One that the tokenizer adds takes none."""
        return await off_loop_if(is_long(texts), lambda: [_places(_spans(encoding)) for encoding in self._encodings(texts)])

    def chat_template(self, has_tools: bool) -> str:
        """The model's own, "" for none; some have another one for tools."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = (has_tools and template.get("tool_use")) or template.get("default")
        return template or ""

    async def render_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: str) -> str:
        """The prompt that asks for the next assistant message. The template runs here: it is the model's own or the configured one."""
        is_slow = is_much(messages) or is_long([message["content"] for message in messages])
        is_slow = is_slow or bool(tools) or template != self.chat_template(has_tools=False)
        return await off_loop_if(is_slow, lambda: self._render(messages, tools, template))

    async def encode_rendered(self, text: str) -> list[int]:
        """A prompt that a chat template wrote, its own special tokens included."""
        try:
            return await off_loop_if(is_long([text]), lambda: self._encodings([text], add_special_tokens=False)[0].ids)
        except TypeError as error:  # half of a surrogate pair, which a template can write
            raise TemplateError("messages: the chat template wrote half of a surrogate pair, which is no text", param="messages") from error

    async def decode_all(self, prompts: Sequence[list[int]]) -> list[str]:
        """As `decode`, of each; they may be long."""
        return await off_loop_if(sum(map(len, prompts)) > OFF_LOOP_IDS, lambda: [self.decode(token_ids) for token_ids in prompts])

    def _encodings(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Any]:
        """`encode` holds the GIL until it is done, in a thread too; `encode_batch` lets it go."""
        if is_long(texts):
            return self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [self._backend.encode(text, add_special_tokens=add_special_tokens) for text in texts]

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

    def own_text(self, token_id: int) -> str:
        """What a token of whole characters writes after others: at the beginning of a text some decoders drop its space."""
        return self.decode([token_id, token_id])[len(self.decode([token_id])) :]


def is_long(texts: Sequence[str]) -> bool:
    """Together."""
    return len(texts) > OFF_LOOP_MESSAGES or sum(map(len, texts)) > OFF_LOOP_CHARS


def is_much(messages: list[dict[str, Any]]) -> bool:
    """Arguments of calls are JSON of any length."""
    return len(messages) > OFF_LOOP_MESSAGES or any("tool_calls" in message for message in messages)


def _spans(encoding: Any) -> list[TokenSpan]:
    return [TokenSpan(token_id, *offsets) for token_id, offsets in zip(encoding.ids, encoding.offsets, strict=True)]


def _places(spans: list[TokenSpan]) -> list[int]:
    """Spaces before a token, which some tokenizers leave out of its span, are the token's."""
    places = []
    end = 0
    for span in spans:
        places.append(min(span.start, end) if span.start < span.stop else end)
        end = max(end, span.stop)
    return places


def _is_plain(folder: Path) -> bool:
    """Whether its class is known: to find it out, transformers imports torch, which takes 4 s and 200 MB more. Only of files that loray
    has written, since some on the hub name a class that is wrong."""
    if not is_converted(folder):
        return False
    config: dict[str, Any] = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
    return config.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in config
