"""Everything the routes share: model, tokenizer, backend, limits, metrics. Knows neither request nor response shapes."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec

from loray.deployments import request_log
from loray.deployments.adapter_registry import merge_replicas
from loray.deployments.adapter_status import AdapterStatus
from loray.deployments.backend import Backend
from loray.deployments.config import ServerArgs
from loray.deployments.deadlines import in_time, seconds_left
from loray.deployments.errors import DeadlineExceeded, EmbeddingFailed, GrammarFailed, Incomplete, InvalidRequest, LorayError
from loray.deployments.generation import Generation, Timing
from loray.deployments.grammars import Grammars
from loray.deployments.metrics import EMBEDDED, Metrics
from loray.deployments.request import AdapterRef, GenerationRequest, TemplateMark
from loray.deployments.stop_strings import Shelter
from loray.deployments.tokenizer import Tokenizer
from loray.models.step import Sampling

logger = logging.getLogger(__name__)

MAX_SEED = 2**63 - 1
MAX_STOPS = 4
MAX_ALTERNATIVES = 20  # most probable tokens reported for each new one
FAILED = "error"  # the outcome of what met a bug
ANSWER_S = 5.0  # for questions about health and numbers; one that is unanswered by then has failed

VERY_MANY = 1000  # adapters, whose list takes drivers and ingress some tenths of a second
REST_SHARE = 20.0  # of the time that such a list takes, until the next


class FieldNames(NamedTuple):
    """What one API calls the fields that error messages point at."""

    prompt: str
    max_new_tokens: str
    min_new_tokens: str = "min_tokens"
    grammar: str = "response_format"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a request asks of the model, in terms of none of the APIs."""

    sampling: Sampling
    adapter: AdapterRef | None = None
    max_new_tokens: int | None = None  # None = what fits
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    prompt_logprobs: bool = False
    template: TemplateMark | None = None


def random_seed() -> int:
    return secrets.randbelow(MAX_SEED + 1)


class Service:
    """`facts` are shown in /info and win over what the arguments say (model_dtype, attention, …). `replica` is a label in /metrics."""

    def __init__(
        self, args: ServerArgs, tokenizer: Tokenizer, backend: Backend, max_total_tokens: int, facts: Mapping[str, Any], replica: str = ""
    ) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.backend = backend
        self.max_total_tokens = max_total_tokens
        self.facts = facts
        self.metrics = Metrics(replica, args.adapters.default_source)
        self.grammars = Grammars(tokenizer.folder, args.model.trust_remote_code, args.grammars)
        self.has_generated = False  # any token, for anybody
        self._looks_again = 0.0  # at adapters for the metrics, by the monotonic clock

    @property
    def model_id(self) -> str:
        return self.args.model.id

    @property
    def deadline_s(self) -> float:
        """Of each request, from its receipt on; 0 = none."""
        return self.args.limits.request_timeout_s or 0.0

    @asynccontextmanager
    async def in_time(self, received: float) -> AsyncGenerator[None, None]:
        """Around what takes time before a driver gets the request. Raises DeadlineExceeded."""
        with self._telling_the_limit():
            async with in_time(seconds_left(self.deadline_s, request_log.receipt(received)), "it was still being prepared"):
                yield

    @contextmanager
    def _telling_the_limit(self) -> Iterator[None]:
        try:
            yield
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"not finished within {self.deadline_s:g} s: {error.message}") from error

    @property
    def compute_type(self) -> str:
        return "gpu" if str(self.facts.get("model_device_type", "cpu")).startswith("cuda") else "cpu"

    def request(self, prompt_ids: list[int], wanted: Wanted, names: FieldNames) -> GenerationRequest:
        """Checks the lengths and that the model knows the tokens."""
        self._check_prompt(prompt_ids, names.prompt)
        self._check_tokens(wanted.stop_token_ids, "stop_token_ids")
        self._check_tokens(wanted.sampling.logit_bias, "logit_bias")
        max_new_tokens = self._max_new_tokens(len(prompt_ids), wanted, names)
        return GenerationRequest(
            request_id=request_log.new_sequence_id(),
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            ignore_eos=wanted.ignore_eos,
            sampling=wanted.sampling,
            adapter=wanted.adapter,
            template=wanted.template,
            stop_token_ids=list(wanted.stop_token_ids),
            wants_prompt_logprobs=wanted.prompt_logprobs,
            grammar_field=names.grammar,
            deadline_s=self.deadline_s,
            trace=request_log.trace(),
        )

    def again(self, request: GenerationRequest) -> GenerationRequest:
        """The same with another seed, as one more try beside it. The prompt's log-probabilities are the same: only the first has them."""
        sampling = msgspec.structs.replace(request.sampling, seed=random_seed())
        return msgspec.structs.replace(request, request_id=request_log.new_sequence_id(), sampling=sampling, wants_prompt_logprobs=False)

    def _max_new_tokens(self, num_prompt: int, wanted: Wanted, names: FieldNames) -> int:
        fits = self.max_total_tokens - num_prompt
        if fits < 1:
            raise InvalidRequest(
                f"{names.prompt}: has {num_prompt} tokens, which leaves no room in max_total_tokens, {self.max_total_tokens}",
                names.prompt,
            )
        max_new_tokens = wanted.max_new_tokens
        if max_new_tokens is not None and max_new_tokens > fits:
            raise InvalidRequest(
                f"{names.max_new_tokens}: {num_prompt} input tokens and {max_new_tokens} new tokens"
                f" are more than max_total_tokens, {self.max_total_tokens}",
                names.max_new_tokens,
            )
        most = fits if max_new_tokens is None else max_new_tokens
        if wanted.sampling.min_new_tokens > most:
            raise InvalidRequest(
                f"{names.min_new_tokens}: {wanted.sampling.min_new_tokens} new tokens are more than the {most} that there may be",
                names.min_new_tokens,
            )
        return most

    def embedding_request(self, prompt_ids: list[int], adapter: AdapterRef | None, name: str) -> GenerationRequest:
        """Checks the length; `name` is what the API calls the field."""
        self._check_prompt(prompt_ids, name)
        if len(prompt_ids) > self.max_total_tokens:
            raise InvalidRequest(f"{name}: has {len(prompt_ids)} tokens, more than max_total_tokens, {self.max_total_tokens}", name)
        return GenerationRequest(
            request_id=request_log.new_sequence_id(),
            prompt_ids=prompt_ids,
            max_new_tokens=1,
            sampling=Sampling(),
            adapter=adapter,
            pooling=self.args.model.pooling,
            deadline_s=self.deadline_s,
            trace=request_log.trace(),
        )

    def _check_prompt(self, prompt_ids: list[int], name: str) -> None:
        if not prompt_ids:
            raise InvalidRequest(f"{name}: must have at least one token", name)
        self._check_tokens(prompt_ids, name)

    def _check_tokens(self, token_ids: Collection[int], name: str) -> None:
        """A tokenizer may know tokens that the model has no embedding for."""
        vocab_size = self.facts.get("vocab_size")
        if vocab_size is not None and token_ids and max(token_ids) >= vocab_size:
            raise InvalidRequest(f"{name}: token {max(token_ids)} is unknown to the model, whose last is {vocab_size - 1}", name)

    @asynccontextmanager
    async def generation(
        self, request: GenerationRequest, stops: list[str], timing: Timing, shelter: Shelter | None = None
    ) -> AsyncGenerator[Generation, None]:
        """Leaving the block ends the generation, in whatever way, and counts it. `shelter`: where in the text no stop string counts."""
        request = _with_time_left(request, timing)
        generation = Generation(request, self.backend, self.tokenizer, stops, timing, shelter)
        outcome = "cancelled"
        try:
            with self._telling_the_limit():
                yield generation
            outcome = generation.finish_reason or outcome
            self.has_generated = self.has_generated or generation.num_tokens > 0
        except LorayError as error:
            outcome = error.error_type
            _note_refusal(error, timing)
            if isinstance(error, GrammarFailed):
                raise InvalidRequest(f"{request.grammar_field}: {error.message}", request.grammar_field) from error
            raise
        except Exception:
            outcome = FAILED
            raise
        finally:
            await generation.aclose()
            self.metrics.observe_generation(generation, outcome)
            request_log.add(request, timing, generation.num_tokens, outcome)

    async def embed(self, request: GenerationRequest, name: str, timing: Timing) -> list[float]:
        """The embedding. Cancelling it aborts the request; it is counted in any case. `name` is what the API calls the field."""
        outcome = "cancelled"
        request = _with_time_left(request, timing)
        timing.validated = time.monotonic()
        try:
            with self._telling_the_limit():
                embedding = await self._embedding(request, timing)
            outcome = EMBEDDED
            return embedding
        except LorayError as error:
            _note_refusal(error, timing)
            told = _of_embedding(error, name)
            outcome = told.error_type
            if told is error:
                raise
            raise told from error
        except Exception as error:
            outcome = FAILED
            logger.exception("an embedding failed")
            raise EmbeddingFailed(f"{name}: internal error") from error
        finally:
            timing.finished = time.monotonic()
            self.metrics.observe_embedding(request, timing, outcome)
            request_log.add(request, timing, 0, outcome)

    async def _embedding(self, request: GenerationRequest, timing: Timing) -> list[float]:
        async with aclosing(self.backend.generate(request)) as events:
            async for event in events:
                timing.accepted = timing.accepted or time.monotonic()
                if event.embedding:
                    timing.admitted = timing.accepted + event.queue_s
                    return event.embedding
        raise EmbeddingFailed("the embedding broke off")

    async def driver_stats(self) -> dict[str, dict[str, float]]:
        """By replica. Empty while no driver can answer: metrics must be readable just then."""
        try:
            return await asyncio.wait_for(self.backend.stats(), ANSWER_S)
        except Exception:
            return {}

    async def adapter_statuses(self) -> list[AdapterStatus]:
        """Of all replicas together."""
        by_replica = await self.backend.adapter_statuses()
        return merge_replicas(status for statuses in by_replica.values() for status in statuses)

    async def measure_adapters(self) -> None:
        """For the metrics, which must be readable also when nobody can tell. Not so often that it costs much where very many are known."""
        began = time.monotonic()
        if began < self._looks_again:
            return
        is_costly = False
        try:
            statuses = await asyncio.wait_for(self.adapter_statuses(), ANSWER_S)
            is_costly = len(statuses) > VERY_MANY
            self.metrics.observe_adapters(statuses)
        except TimeoutError:
            is_costly = True
        except Exception:
            pass
        now = time.monotonic()
        self._looks_again = now + REST_SHARE * (now - began) if is_costly else 0.0

    def info(self) -> dict[str, Any]:
        return {
            "model_id": self.model_id,
            "model_dtype": self.args.model.dtype,
            "model_device_type": self.args.device,
            "max_concurrent_requests": self.args.limits.max_concurrent_requests,
            "max_best_of": self.args.limits.max_best_of,
            "max_stop_sequences": MAX_STOPS,
            "max_input_length": self.max_total_tokens - 1,
            "max_total_tokens": self.max_total_tokens,
            "pooling": self.args.model.pooling,
            "tensor_parallel_size": self.args.tensor_parallel_size,
            "adapter_roots": len(self.args.adapters.local_roots),
            "version": version("loray"),
            **self.facts,
        }


def _note_refusal(error: LorayError, timing: Timing) -> None:
    """A driver says that it has a request whose adapter takes long to come, and may refuse it later."""
    if error.status < 500 and not timing.admitted:
        timing.accepted = 0.0


def _of_embedding(error: LorayError, name: str) -> LorayError:
    if isinstance(error, InvalidRequest):
        return InvalidRequest(f"{name}: {error.message}", name)
    if isinstance(error, Incomplete | DeadlineExceeded | EmbeddingFailed):
        return EmbeddingFailed(f"{name}: {error.message}")
    return error


def _with_time_left(request: GenerationRequest, timing: Timing) -> GenerationRequest:
    return msgspec.structs.replace(request, deadline_s=seconds_left(request.deadline_s, request_log.receipt(timing.received)))
