"""What a completions request asks of the model, prompt by prompt. Starts no generation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from loray.deployments.errors import InvalidRequest
from loray.deployments.openai_request import DEFAULT_COMPLETION_TOKENS, MAX_PROMPTS, CompletionBody
from loray.deployments.prompt_texts import prompt_ids
from loray.deployments.request import GenerationRequest
from loray.deployments.service import FieldNames, Service, Wanted
from loray.deployments.tokenizer import Tokenizer

NAMES = FieldNames(prompt="prompt", max_new_tokens="max_tokens")
MAX_SCORED_TOKENS = 65_536  # of prompts, in all sequences, whose log-probabilities one answer tells; a single prompt's always


@dataclass(frozen=True, slots=True)
class PromptPlan:
    requests: list[GenerationRequest]  # one for each sequence
    echo: str  # what stands before their texts
    places: Sequence[int]  # of the prompt's tokens in the echo; none where it is made of them, or they are not told

    @property
    def num_tokens(self) -> int:
        return len(self.requests[0].prompt_ids)


async def completion_plan(service: Service, body: CompletionBody, token: str, received: float) -> list[PromptPlan]:
    """`token` is the caller's own, for adapters; `received` as in Service.in_time. Raises InvalidRequest."""
    _check_num_sequences(body, service.args.limits.max_choices)
    async with service.in_time(received):
        all_ids = await prompt_ids(service, body.prompts, [NAMES.prompt] * len(body.prompts))
        _check_scored(body, sum(map(len, all_ids)), service.max_total_tokens)
        all_requests = [_requests(service, body, token_ids, token) for token_ids in all_ids]  # checks lengths, before any is decoded
        echoes = await _echoes(service.tokenizer, body)
    return [PromptPlan(requests, *echo) for requests, echo in zip(all_requests, echoes, strict=True)]


def _check_num_sequences(body: CompletionBody, max_choices: int) -> None:
    num_prompts, most = len(body.prompts), max(MAX_PROMPTS, max_choices)
    if num_prompts * body.num_sequences > most:
        raise InvalidRequest(
            f"prompt: {num_prompts} prompts with {body.num_sequences} sequences each are more than {most} sequences in one request",
            "prompt",
        )


def _check_scored(body: CompletionBody, num_prompt_tokens: int, max_total_tokens: int) -> None:
    num_scored, most = num_prompt_tokens * body.num_sequences, max(MAX_SCORED_TOKENS, max_total_tokens)
    if body.scores_prompts and num_scored > most:
        raise InvalidRequest(
            f"echo: with logprobs {num_scored} tokens of prompts, in all sequences, are more than the {most} that one answer tells", "echo"
        )


def _requests(service: Service, body: CompletionBody, token_ids: list[int], token: str) -> list[GenerationRequest]:
    """Of one prompt."""
    max_new_tokens = body.max_tokens
    if max_new_tokens is None:
        max_new_tokens = min(DEFAULT_COMPLETION_TOKENS, service.max_total_tokens - len(token_ids))
    wanted = [
        Wanted(
            sampling=body.sampling(b"", seed),
            adapter=body.adapter(service.model_id, token),
            max_new_tokens=max(1, max_new_tokens),
            ignore_eos=bool(body.ignore_eos),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            prompt_logprobs=body.scores_prompts,
        )
        for seed in body.seeds()
    ]
    return [service.request(token_ids, one, NAMES) for one in wanted]


async def _echoes(tokenizer: Tokenizer, body: CompletionBody) -> list[tuple[str, Sequence[int]]]:
    """`echo` and `places` of each prompt."""
    if not body.echo:
        return [("", ())] * len(body.prompts)
    if not isinstance(body.prompts[0], str):
        return [(text, ()) for text in await tokenizer.decode_all(cast("Sequence[list[int]]", body.prompts))]
    texts = cast("Sequence[str]", body.prompts)
    return list(zip(texts, await tokenizer.places(texts), strict=True)) if body.scores_prompts else [(text, ()) for text in texts]
