"""What requests bring as prompts becomes token ids; a text that could be no prompt is not encoded. Knows neither HTTP nor shapes."""

import re
from collections.abc import Sequence
from typing import cast

from loray.deployments.errors import InvalidRequest
from loray.deployments.service import Service

MAX_CHARS_A_TOKEN = 16  # of max_total_tokens, that a text may have: far more than prose has in any language
CUT_TOKENS = 16  # at the beginning of a text that was cut, which may be others than in the whole
WORD_END = re.compile(r"(?<=\w)\W")  # no token of a usual vocabulary goes on from before it to beyond it


def check_text(service: Service, text: str, name: str) -> None:
    """`name` is what the API calls the field."""
    most = MAX_CHARS_A_TOKEN * service.max_total_tokens
    if len(text) > most:
        raise InvalidRequest(
            f"{name}: has {len(text)} characters, more than the {most} that are tokenized at once:"
            f" {MAX_CHARS_A_TOKEN} for each of max_total_tokens, {service.max_total_tokens}",
            name,
        )


async def prompt_ids(service: Service, prompts: Sequence[str | list[int]], names: Sequence[str]) -> list[list[int]]:
    """Of texts or of token ids; `names` are what the API calls them."""
    for prompt, name in zip(prompts, names, strict=True):
        if isinstance(prompt, str):
            check_text(service, prompt, name)
        else:
            _check_ids(prompt, name, service.tokenizer.vocab_size)
    if isinstance(prompts[0], str):
        return await service.tokenizer.encode_all(cast("Sequence[str]", prompts))
    return list(cast("Sequence[list[int]]", prompts))


async def last_ids(service: Service, text: str, num_tokens: int, name: str) -> list[int]:
    """The last tokens of a text, however long it is: of one that is too long only the end is encoded, from the end of a word on.

    Where that might give others than the whole text would, the text is refused."""
    start = len(text) - MAX_CHARS_A_TOKEN * service.max_total_tokens
    if start <= 0:
        return (await service.tokenizer.encode(text))[-num_tokens:]
    word_end = WORD_END.search(text, start, (start + len(text)) // 2)
    token_ids = await service.tokenizer.encode(text[word_end.start() :]) if word_end else []
    if len(token_ids) < num_tokens + CUT_TOKENS:
        check_text(service, text, name)
    return token_ids[-num_tokens:]


def _check_ids(token_ids: list[int], name: str, vocab_size: int) -> None:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name}: {token_id} is not a token id of this model; they end at {vocab_size - 1}", name)
