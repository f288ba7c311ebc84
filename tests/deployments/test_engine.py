import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from loray.cluster.channel import Address, bind
from loray.deployments import engine as engine_module
from loray.deployments.adapters import Adapter
from loray.deployments.engine import Engine
from loray.deployments.errors import AdapterFailed
from loray.deployments.plan import Plan
from loray.deployments.request import GenerationRequest, TokenEvent
from loray.deployments.sequence import Ending
from loray.deployments.step_pace import SHARE, StepPace
from loray.models.step import Pooling, Sampling
from tests.deployments.rank_in_process import BLOCK, HOST_BYTES, NUM_BLOCKS, NUM_PAGES, RankInProcess, start_engine
from tests.deployments.simulated_rank import embedding, greedy


class Client:
    """Listens where the engine sends tokens, over a real socket."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.socket, self.address = bind(zmq.PULL, "127.0.0.1")
        self.events: dict[str, list[TokenEvent]] = {}
        self.ended: dict[str, threading.Event] = {}
        self.errors: dict[str, str] = {}
        self.endings: dict[str, Ending] = {}

    def submit(
        self,
        name: str,
        prompt: list[int],
        max_new_tokens: int = 8,
        adapter: Adapter | None = None,
        output: list[int] | None = None,
        **fields: Any,
    ) -> None:
        settings = {"output_ids": output or [], "max_new_tokens": max_new_tokens, "sampling": Sampling(), **fields}
        self._send(GenerationRequest(request_id=name, prompt_ids=prompt, **settings), adapter)

    def embed(self, name: str, prompt: list[int], adapter: Adapter | None = None) -> None:
        self._send(GenerationRequest(request_id=name, prompt_ids=prompt, max_new_tokens=1, sampling=Sampling(), pooling="mean"), adapter)

    def _send(self, request: GenerationRequest, adapter: Adapter | None) -> None:
        self.events[request.request_id] = []
        self.ended[request.request_id] = threading.Event()
        self.engine.submit(request, adapter, self.address, lambda ending: self.end(request.request_id, ending))

    def end(self, name: str, ending: Ending) -> None:
        self.errors[name] = ending.error
        self.endings[name] = ending
        self.ended[name].set()

    def finish(self, name: str) -> list[TokenEvent]:
        while not (self.events[name] and self.events[name][-1].is_last):
            assert self.socket.poll(5000), f"no last event for {name}"
            for event in msgspec.msgpack.decode(self.socket.recv(), type=list[TokenEvent]):
                self.events[event.request_id].append(event)
        assert self.ended[name].wait(5)
        return self.events[name]

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.finish(name) for token in event.token_ids]


@pytest.fixture
def steps() -> RankInProcess:
    return RankInProcess()


@pytest.fixture
def engine(steps: RankInProcess) -> Iterator[Engine]:
    engine = start_engine(steps)
    yield engine
    deadline = time.monotonic() + 5
    while engine.stats()["kv_blocks_used"] or engine.stats()["adapter_references"]:
        assert time.monotonic() < deadline, f"something is left behind: {engine.stats()}"
        time.sleep(0.01)


@pytest.fixture
def client(engine: Engine) -> Client:
    return Client(engine)


def test_the_first_event_says_accepted_and_the_last_says_why_it_ended(client: Client) -> None:
    client.submit("r", [1, 2, 3])
    events = client.finish("r")
    assert not events[0].token_ids and not events[0].is_last
    assert [event.finish_reason for event in events[1:]] == [""] * 7 + ["length"]
    assert client.tokens("r") == greedy("", [1, 2, 3], 8)


def test_a_request_continues_where_another_replica_left_it(client: Client) -> None:
    tokens = greedy("", [1, 2, 3], 8)
    client.submit("r", [1, 2, 3], output=tokens[:5])
    assert client.tokens("r") == tokens[5:]


def test_a_request_that_comes_twice_runs_once_and_both_calls_end(client: Client, steps: RankInProcess) -> None:
    steps.gate.clear()
    second: list[Ending] = []
    request = GenerationRequest(request_id="r", prompt_ids=[1, 2, 3], max_new_tokens=8, sampling=Sampling())
    client.submit("r", request.prompt_ids)
    client.engine.submit(request, None, client.address, second.append)
    steps.gate.set()
    assert client.tokens("r") == greedy("", [1, 2, 3], 8)
    client.submit("next", [1, 2, 3])
    assert client.tokens("next") == greedy("", [1, 2, 3], 8), "the engine goes on"
    assert second == [client.endings["r"]]


def test_an_ending_tells_what_was_made_here_and_when(client: Client) -> None:
    started = time.monotonic()
    client.submit("whole", [1, 2, 3])
    client.submit("continued", [1, 2, 3], output=client.tokens("whole")[:5])
    client.finish("continued")
    client.embed("embedded", [1, 2, 3])
    client.finish("embedded")
    made = {name: (ending.error, ending.finish_reason, ending.num_tokens) for name, ending in client.endings.items()}
    assert made == {"whole": ("", "length", 8), "continued": ("", "length", 3), "embedded": ("", "embedding", 0)}
    assert all(ending.queue_s > 0 for ending in client.endings.values())
    assert started <= client.endings["whole"].first_token_at <= time.monotonic() and client.endings["embedded"].first_token_at == 0


def test_logprobs_alternatives_and_the_prompts_come_with_their_tokens(client: Client) -> None:
    prompt = list(range(1, 40))
    client.submit("r", prompt, sampling=Sampling(num_alternatives=2, num_prompt_alternatives=3), wants_prompt_logprobs=True)
    client.submit("same prompt", prompt, wants_prompt_logprobs=True)
    _, first, *others = client.finish("r")
    assert first.prompt_logprobs == [-float(token) for token in prompt[1:]]
    assert first.prompt_alternatives == [[(0, logprob)] * 3 for logprob in first.prompt_logprobs]
    assert not any(event.prompt_logprobs or event.prompt_alternatives or event.queue_s for event in others)
    for event in (first, *others):
        (token,) = event.token_ids
        assert event.logprobs == [-float(token)] and event.alternatives == [[(token, -float(token))] * 2]
    _, first, *others = client.finish("same prompt")
    assert first.prompt_logprobs == [-float(token) for token in prompt[1:]], "no part of it was taken from the cache"
    assert not any(event.alternatives or event.prompt_alternatives for event in (first, *others))


def test_prompt_logprobs_do_not_come_again_when_another_replica_goes_on(client: Client, steps: RankInProcess) -> None:
    tokens = greedy("", [1, 2, 3], 8)
    client.submit("r", [1, 2, 3], output=tokens[:3], wants_prompt_logprobs=True)
    assert client.tokens("r") == tokens[3:]
    assert not any(event.prompt_logprobs for event in client.finish("r"))
    (admission,) = [admission for step in steps.rank.steps for admission in step.admissions]
    assert (admission.num_output, admission.wants_prompt_logprobs) == (3, False)


def test_the_first_token_says_how_long_its_request_waited_for_a_slot(client: Client, steps: RankInProcess) -> None:
    steps.slow_paths = {"slow"}
    slow = Adapter("slow", "slow", "slow", 1)
    client.submit("slow", [1], adapter=slow)
    client.submit("x", [1])
    client.finish("x")
    assert client.events["slow"], "accepted"
    accepted = time.monotonic()
    client.submit("y", [1])
    client.finish("y")
    waited = time.monotonic() - accepted
    steps.prepare(slow.host_copy)
    assert client.finish("slow")[1].queue_s >= waited > 0 < client.finish("x")[1].queue_s


def test_a_stop_token_ends_a_request_even_one_that_ignores_eos(client: Client) -> None:
    tokens = greedy("", [1, 2, 3], 8)
    client.submit("r", [1, 2, 3], stop_token_ids=[tokens[3]], ignore_eos=True)
    assert client.tokens("r") == tokens[: tokens.index(tokens[3]) + 1]
    assert client.finish("r")[-1].finish_reason == "stop_token"


def test_the_ranks_hear_which_tokens_may_not_end_a_request_yet(client: Client, steps: RankInProcess) -> None:
    client.submit("young", [1], sampling=Sampling(min_new_tokens=3), stop_token_ids=[49, 7])
    client.submit("plain", [1], stop_token_ids=[7])
    client.finish("young"), client.finish("plain")
    stop_ids = [admission.sampling.stop_ids for step in steps.rank.steps for admission in step.admissions]
    assert stop_ids == [[7, 49], []]


@pytest.mark.parametrize(("grammar", "error"), [(b"a dead end", "GrammarFailed"), (b"no vocabulary", "Incomplete")])
def test_a_grammar_that_cannot_be_followed_fails_its_own_request_alone_and_says_whose_mistake_it_is(
    client: Client, grammar: bytes, error: str
) -> None:
    client.submit("bad", [1, 2], sampling=Sampling(grammar=grammar))
    client.submit("good", [1, 2])
    last = client.finish("bad")[-1]
    assert (last.error, last.message, client.errors["bad"]) == (error, grammar.decode(), error)
    assert not any(event.token_ids for event in client.finish("bad")), "what such a row yields is worthless"
    assert client.tokens("good") == greedy("", [1, 2], 8)


@pytest.mark.parametrize("pooling", ["", "mean"])
@pytest.mark.parametrize(("path", "error", "said"), [("huge", "AdapterFailed", "adapter 'huge'"), ("", "Incomplete", "this text")])
def test_numbers_that_are_not_finite_fail_the_requests_that_have_them_and_say_whose_they_are(
    client: Client, steps: RankInProcess, pooling: Pooling, path: str, error: str, said: str
) -> None:
    steps.rank.overflowing = {path}
    client.submit("bad", [1, 2], 1, adapter=Adapter(path, path, path, 1) if path else None, pooling=pooling)
    client.submit("good", [1, 2], adapter=Adapter("good", "good", "good", 1))
    last = client.finish("bad")[-1]
    assert (last.error, client.errors["bad"]) == (error, error) and said in last.message and "not finite" in last.message
    assert not any(event.token_ids or event.embedding for event in client.finish("bad"))
    assert client.tokens("good") == greedy("good", [1, 2], 8)


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs(
    client: Client, steps: RankInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "IDLE_WAIT_MS", 60_000)  # so that nothing but the deadline wakes it
    steps.slow_paths = {"slow"}
    client.submit("waits", [1], adapter=Adapter("slow", "slow", "slow", 1), deadline_s=0.05)
    assert client.finish("waits")[-1].error == "DeadlineExceeded", "an idle engine wakes for it"
    steps.gate.clear()
    client.submit("runs", [1], max_new_tokens=60, adapter=Adapter("a", "a", "a", 1), deadline_s=0.05)
    last = client.finish("runs")[-1]
    assert last.error == client.errors["runs"] == "DeadlineExceeded" and "0 tokens were generated" in last.message
    steps.gate.set()
    for deadline_s in (60, 1e300, float("inf"), float("nan"), -1):
        client.submit(f"in {deadline_s}", [1], deadline_s=deadline_s)
        assert client.tokens(f"in {deadline_s}") == greedy("", [1], 8)


def test_an_embedding_comes_in_one_event_after_the_accepting_one(client: Client, engine: Engine) -> None:
    client.submit("g", [1, 2, 3])
    client.embed("e", list(range(40)), adapter=Adapter("a", "a", "a", 1))
    accepted, last = client.finish("e")
    assert not accepted.is_last and not accepted.embedding
    assert (last.embedding, last.finish_reason, last.token_ids) == (embedding("a", list(range(40))), "embedding", [])
    assert client.tokens("g") == greedy("", [1, 2, 3], 8)
    assert (engine.stats()["embeddings_total"], engine.stats()["generated_tokens_total"]) == (1, 8)


def test_a_text_to_embed_may_fill_the_cache_and_not_one_token_more(client: Client) -> None:
    client.embed("fits", [1] * NUM_BLOCKS * BLOCK)
    assert client.finish("fits")[-1].embedding == embedding("", [1] * NUM_BLOCKS * BLOCK)
    client.embed("not", [1] * (NUM_BLOCKS * BLOCK + 1))
    (event,) = client.finish("not")
    assert event.error == "InvalidRequest" and "the input is 129 tokens" in event.message and "128" in event.message


def test_an_embedding_whose_adapter_can_not_be_loaded_ends_in_its_error(client: Client, steps: RankInProcess) -> None:
    steps.rank.bad_paths = {"bad"}
    client.embed("bad", [1], adapter=Adapter("bad", "bad", "bad", 1))
    client.embed("good", [1])
    assert client.finish("bad")[-1].error == "AdapterFailed"
    assert client.finish("good")[-1].embedding == embedding("", [1])


def test_a_new_ingress_ends_the_connection_to_one_without_requests(client: Client, engine: Engine) -> None:
    idle = Client(engine)
    idle.submit("first", [1])
    idle.finish("first")
    hung_up = idle.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.submit("r", [1])
    assert hung_up.poll(5000), "an ingress that is gone would hold memory here for ever"
    idle.socket.disable_monitor()
    idle.submit("second", [1])
    assert idle.tokens("second") == client.tokens("r") == greedy("", [1], 8)


def test_a_request_that_never_fits_is_refused_with_both_numbers(client: Client) -> None:
    client.submit("r", [1] * 100, max_new_tokens=100)
    (event,) = client.finish("r")
    assert event.error == "InvalidRequest" and "200" in event.message and "128" in event.message


def test_an_adapter_larger_than_the_pool_is_refused(client: Client) -> None:
    client.submit("r", [1], adapter=Adapter("huge", "v", "huge", NUM_PAGES + 1))
    (event,) = client.finish("r")
    assert event.error == "AdapterFailed" and "huge" in event.message


def test_a_full_queue_is_answered_with_overloaded(client: Client, steps: RankInProcess) -> None:
    steps.gate.clear()
    for i in range(20):
        client.submit(str(i), [i] * 10)
    steps.gate.set()
    endings = [client.finish(str(i))[-1] for i in range(20)]
    refused = [event for event in endings if event.error]
    assert refused and all(event.error == "Overloaded" for event in refused)
    assert any(event.finish_reason == "length" for event in endings)


def test_an_abort_frees_everything_and_ends_the_call(client: Client, steps: RankInProcess, engine: Engine) -> None:
    steps.gate.clear()
    client.submit("gone", [1] * 10, max_new_tokens=50, adapter=Adapter("a", "a", "a", 1))
    client.submit("stays", [2] * 10)
    engine.abort("gone")
    engine.abort("never there")
    steps.gate.set()
    assert client.ended["gone"].wait(5)
    assert client.tokens("stays") == greedy("", [2] * 10, 8)


def test_an_adapter_that_can_not_be_loaded_fails_its_own_requests_alone(client: Client, steps: RankInProcess, engine: Engine) -> None:
    steps.rank.bad_paths = {"bad"}
    bad = Adapter("bad", "bad", "bad", 1)
    good = Adapter("good", "good", "good", 1)
    client.submit("1", [1], adapter=bad)
    client.submit("2", [1], adapter=good)
    client.submit("3", [1])
    assert client.finish("1")[-1].error == "AdapterFailed" and "unreadable" in client.finish("1")[-1].message
    assert client.tokens("2") == greedy("good", [1], 8)
    assert client.tokens("3") == greedy("", [1], 8)
    assert engine.stats()["adapters_resident"] == 1
    steps.rank.bad_paths = set()
    client.submit("4", [1], adapter=bad)
    assert client.tokens("4") == greedy("bad", [1], 8)


def test_of_two_adapters_that_come_with_one_step_the_one_that_can_not_be_loaded_fails(
    client: Client, steps: RankInProcess, engine: Engine
) -> None:
    steps.rank.bad_paths = {"bad"}
    steps.slow_paths = {"good", "bad"}
    good, bad = Adapter("good", "good", "good", 1), Adapter("bad", "bad", "bad", 1)
    client.submit("good", [1], adapter=good)
    client.submit("bad", [1], adapter=bad)
    client.submit("base", [1])
    client.finish("base")
    engine.call(lambda tiers: (steps.prepare(good.host_copy), steps.prepare(bad.host_copy)))  # so that no turn comes between them
    assert client.finish("bad")[-1].error == "AdapterFailed"
    assert client.tokens("good") == greedy("good", [1], 8)
    assert [[load.path for load in step.loads] for step in steps.rank.steps if step.loads] == [["good", "bad"]]


def test_an_ingress_that_is_gone_stops_nobody(client: Client, engine: Engine) -> None:
    ended = threading.Event()
    request = GenerationRequest(request_id="lost", prompt_ids=[1], max_new_tokens=20, sampling=Sampling())
    nowhere = Address("tcp://127.0.0.1:9", zmq.curve_keypair()[0])
    engine.submit(request, None, nowhere, lambda ending: ended.set())
    assert ended.wait(5)
    client.submit("r", [1])
    assert client.tokens("r") == greedy("", [1], 8)


def test_requests_of_an_ingress_that_dies_are_aborted(client: Client, engine: Engine, steps: RankInProcess) -> None:
    steps.gate.clear()
    other = Client(engine)
    for name in ("a", "b"):
        other.submit(name, [1, 2], max_new_tokens=60, adapter=Adapter("x", "x", "x", 1))
        assert other.socket.poll(5000) and other.socket.recv(), "the engine has said: accepted"
    client.submit("r", [1])
    other.socket.close()
    assert other.ended["a"].wait(5) and other.ended["b"].wait(5)
    steps.gate.set()
    assert client.tokens("r") == greedy("", [1], 8)


def test_a_load_that_fails_after_the_client_left_harms_nobody(client: Client, steps: RankInProcess, engine: Engine) -> None:
    steps.rank.bad_paths = {"bad"}
    steps.gate.clear()
    client.submit("gone", [1], adapter=Adapter("bad", "bad", "bad", NUM_PAGES))
    deadline = time.monotonic() + 5
    while not steps.queue and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.abort("gone")
    assert client.ended["gone"].wait(5)
    steps.gate.set()
    for name in ("x", "y"):
        client.submit(name, [1], adapter=Adapter(name, name, name, NUM_PAGES))
    assert client.tokens("x") == greedy("x", [1], 8) and client.tokens("y") == greedy("y", [1], 8)


def test_pending_work_without_results_counts_as_a_stall_and_the_idle_time_before_it_does_not(
    client: Client, steps: RankInProcess, engine: Engine
) -> None:
    assert engine.seconds_stalled() == 0
    engine._last_progress -= 3600
    steps.gate.clear()
    client.submit("r", [1])
    wait_for_steps(steps, 1)
    assert engine.seconds_stalled() < 600
    deadline = time.monotonic() + 5
    while engine.seconds_stalled() < 0.1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    steps.gate.set()
    client.finish("r")


def test_requests_that_only_wait_for_an_adapter_are_no_stall(client: Client, steps: RankInProcess, engine: Engine) -> None:
    steps.slow_paths = {"slow"}
    slow = Adapter("slow", "slow", "slow", 1)
    client.submit("waits", [1], adapter=slow)
    client.submit("runs", [1])
    client.finish("runs")
    assert not client.ended["waits"].is_set() and engine.seconds_stalled() == 0
    steps.prepare(slow.host_copy)
    assert client.tokens("waits") == greedy("slow", [1], 8)


def test_an_adapter_that_is_being_read_holds_up_nobody_but_its_own(client: Client, steps: RankInProcess) -> None:
    steps.slow_paths = {"slow"}
    slow = Adapter("slow", "slow", "slow", 1)
    client.submit("slow", [1], adapter=slow)
    for name in ("x", "y"):
        client.submit(name, [1], adapter=Adapter(name, name, name, 1))
    assert client.tokens("x") == greedy("x", [1], 8) and client.tokens("y") == greedy("y", [1], 8)
    assert [event.token_ids for event in client.events["slow"]] == [[]], "accepted, and nothing more"
    steps.prepare(slow.host_copy)
    assert client.tokens("slow") == greedy("slow", [1], 8)


def test_files_that_changed_before_they_were_read_are_told_apart_from_those_that_cannot_be_read(
    client: Client, steps: RankInProcess
) -> None:
    steps.changed_paths = {"new"}
    client.submit("1", [1], adapter=Adapter("new", "v1", "new", 1, signature="old files"))
    assert (client.finish("1")[-1].error, client.finish("1")[-1].message) == ("AdapterChanged", "torn")
    steps.changed_paths = set()
    client.submit("2", [1], adapter=Adapter("new", "v2", "new", 1, signature="new files"))
    assert client.tokens("2") == greedy("new", [1], 8)


def test_whoever_is_accepted_hears_of_its_adapters_version(client: Client) -> None:
    client.submit("1", [1], adapter=Adapter("a", "v1", "a", 1))
    client.submit("2", [1])
    assert [client.finish(name)[0].version for name in ("1", "2")] == ["v1", ""]


def test_an_adapter_that_no_rank_can_read_fails_its_own_requests_and_is_tried_again_once_it_is_forgotten(
    client: Client, steps: RankInProcess, engine: Engine
) -> None:
    steps.lost_paths = {"torn"}
    client.submit("1", [1], adapter=Adapter("torn", "torn", "torn", 1))
    client.submit("2", [1])
    assert (client.finish("1")[-1].error, client.finish("1")[-1].message) == ("AdapterFailed", "torn")
    assert client.errors["1"] == "AdapterFailed" and client.tokens("2") == greedy("", [1], 8)
    assert engine.stats()["adapters_in_host"] == engine.stats()["adapter_host_bytes_used"] == 0
    steps.lost_paths = set()
    client.submit("soon", [1], adapter=Adapter("torn", "torn", "torn", 1))
    assert client.finish("soon")[-1].message == "torn" and len(steps.prepared) == 1, "nobody has it read again at once"
    engine.call(lambda tiers: tiers.unload("torn")).result(5)
    client.submit("3", [1], adapter=Adapter("torn", "torn", "torn", 1))
    assert client.tokens("3") == greedy("torn", [1], 8) and client.errors["3"] == ""


def test_more_adapters_than_either_tier_holds_are_all_served(client: Client, steps: RankInProcess, engine: Engine) -> None:
    names = [f"a{i}" for i in range(12)]
    for turn in range(3):
        for name in names:
            client.submit(f"{name}-{turn}", [1], adapter=Adapter(name, name, name, 2))
            assert client.tokens(f"{name}-{turn}") == greedy(name, [1], 8)
    stats = engine.stats()
    assert stats["adapter_evictions_gpu_total"] == 34 and stats["adapter_evictions_host_total"] >= 32
    assert stats["adapter_host_bytes_used"] <= HOST_BYTES and len(steps.prepared) == 36


def test_one_that_found_no_room_far_back_in_line_holds_up_none_before_it(
    client: Client, steps: RankInProcess, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others wait for the first that found no room in host memory, also those that are asked for again each turn."""
    monkeypatch.setattr(engine_module, "NUM_PREFETCHED", 2)
    adapters = {name: Adapter(name, name, name, 2) for name in ("a", "b", "c", "d", "e", "late")}  # host memory holds two
    steps.slow_paths = set(adapters)
    *early, late = adapters
    for name in early:
        client.submit(name, [1], adapter=adapters[name])
    arrive(engine, steps, adapters["a"])
    until_read(engine, adapters["c"])
    client.submit(late, [1], adapter=adapters[late])
    for name in ("b", "c", late, "d", "e"):
        arrive(engine, steps, adapters[name])
        assert client.tokens(name) == greedy(name, [1], 8)
    client.finish("a")


def until_read(engine: Engine, adapter: Adapter) -> None:
    deadline = time.monotonic() + 5
    while not engine.call(lambda tiers: tiers.host.is_loading(adapter)).result(5):
        assert time.monotonic() < deadline, f"{adapter.adapter_id} is never read"
        time.sleep(0.001)


def arrive(engine: Engine, steps: RankInProcess, adapter: Adapter) -> None:
    until_read(engine, adapter)
    steps.prepare(adapter.host_copy)


def test_unloading_frees_both_tiers_after_the_last_request(client: Client, steps: RankInProcess, engine: Engine) -> None:
    freed = threading.Event()
    steps.gate.clear()
    client.submit("r", [1], adapter=Adapter("a", "a", "a", 2))
    engine.call(lambda tiers: tiers.unload("a", freed.set)).result(5)
    assert not freed.is_set() and "a" in engine.call(lambda tiers: tiers.places(["a"])).result(5)
    steps.gate.set()
    assert client.tokens("r") == greedy("a", [1], 8)
    assert freed.wait(5)
    stats = engine.stats()
    assert (stats["adapters_resident"], stats["adapter_pages_used"], stats["adapter_host_bytes_used"]) == (0, 0, 0)
    assert engine.call(lambda tiers: tiers.places(["a"])).result(5) == {}
    client.submit("base", [1])
    client.finish("base")
    assert sorted(page for step in steps.rank.steps for page in step.freed_pages) == [0, 1], "the ranks are told"
    client.submit("again", [1], adapter=Adapter("a", "a", "a", 2))
    assert client.tokens("again") == greedy("a", [1], 8)
    unknown = threading.Event()
    engine.call(lambda tiers: tiers.unload("unknown", unknown.set)).result(5)
    assert unknown.is_set()


def test_a_pinned_adapter_stays_and_what_no_longer_fits_beside_it_is_refused(client: Client, steps: RankInProcess, engine: Engine) -> None:
    pinned = Adapter("pinned", "pinned", "pinned", 2)
    engine.call(lambda tiers: tiers.pin(pinned)).result(5)
    for turn in range(2):
        for name in ("pinned", "x", "y", "z"):
            client.submit(f"{name}-{turn}", [1], adapter=Adapter(name, name, name, 2))
            client.finish(f"{name}-{turn}")
    assert [copy.path for copy in steps.prepared].count("pinned") == 1
    loads = [load.path for step in steps.rank.steps for load in step.loads]
    assert loads.count("pinned") == 1, "it was never evicted from the pool"
    client.submit("big", [1], adapter=Adapter("big", "big", "big", 3))
    assert "2 of them pinned" in client.finish("big")[-1].message
    with pytest.raises(AdapterFailed, match="cannot be pinned"):
        engine.call(lambda tiers: tiers.pin(Adapter("x", "x", "x", 2))).result(5)
    engine.call(lambda tiers: tiers.unpin("pinned")).result(5)
    client.submit("big again", [1], adapter=Adapter("big", "big", "big", 3))
    assert client.tokens("big again") == greedy("big", [1], 8)


def test_pins_leave_room_in_host_memory_and_who_waits_for_what_they_took_is_told(
    client: Client, steps: RankInProcess, engine: Engine
) -> None:
    steps.gate.clear()
    client.submit("runs", [1], adapter=Adapter("x", "x", "x", 1))
    client.submit("waits", [1], adapter=Adapter("wide", "wide", "wide", NUM_PAGES))
    engine.call(lambda tiers: tiers.pin(Adapter("x", "x", "x", 1))).result(5)
    assert "pinned" in client.finish("waits")[-1].message
    with pytest.raises(AdapterFailed, match="cannot be pinned"):
        engine.call(lambda tiers: tiers.pin(Adapter("w", "w", "w", 3))).result(5)
    steps.gate.set()
    assert client.tokens("runs") == greedy("x", [1], 8)
    engine.call(lambda tiers: tiers.pin(Adapter("y", "y", "y", 2))).result(5)
    client.submit("other", [1], adapter=Adapter("z", "z", "z", 1))
    assert client.tokens("other") == greedy("z", [1], 8)
    engine.call(lambda tiers: tiers.unload("y")).result(5)
    engine.call(lambda tiers: tiers.pin(Adapter("q", "q", "q", 2))).result(5)  # unloading has taken the pin back


def test_who_does_not_wait_for_the_engines_answer_harms_nobody(client: Client, engine: Engine) -> None:
    held, go = threading.Event(), threading.Event()
    engine.call(lambda tiers: (held.set(), go.wait(5)))
    assert held.wait(5)
    cancelled = engine.call(lambda tiers: tiers.places([]))
    assert cancelled.cancel()
    go.set()
    client.submit("r", [1])
    assert client.tokens("r") == greedy("", [1], 8)


def test_who_waits_for_an_adapter_that_has_left_the_pool_and_fits_no_more_beside_a_pin_is_told(steps: RankInProcess) -> None:
    engine = start_engine(steps, max_running=1)
    client = Client(engine)
    steps.gate.clear()
    client.submit("x1", [1, 2, 3], 60, Adapter("x", "x", "x", 3))
    client.submit("x2", [4, 5], 8, Adapter("x", "x", "x", 3))
    steps.pause_after(6)
    steps.gate.set()
    assert steps.is_paused.wait(5)
    engine.call(lambda tiers: tiers.pin(Adapter("y", "y", "y", 2))).result(5)
    client.submit("y1", [7], 8, Adapter("y", "y", "y", 2))
    steps.gate.set()
    assert len(client.tokens("x1")) == 60 and len(client.tokens("y1")) == 8
    assert "pinned" in client.finish("x2")[-1].message


def test_a_queue_that_others_have_filled_still_takes_who_has_nobody_in_it(client: Client, steps: RankInProcess) -> None:
    steps.gate.clear()
    for name in "abc":
        client.submit(name, [1], max_new_tokens=40, adapter=Adapter(name, name, name, NUM_PAGES))
    client.submit("a again", [1], adapter=Adapter("a", "a", "a", NUM_PAGES))
    client.submit("cold", [1])
    steps.gate.set()
    assert client.finish("a again")[-1].error == "Overloaded"
    assert client.tokens("cold") == greedy("", [1], 8)


def wait_for_steps(steps: RankInProcess, num_steps: int) -> None:
    deadline = time.monotonic() + 60
    while len(steps.queue) < num_steps:
        assert time.monotonic() < deadline, f"{len(steps.queue)} steps"
        time.sleep(0.001)


def test_who_comes_while_a_step_with_prompts_runs_is_in_the_next(
    client: Client, steps: RankInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepPace, "wait_s", lambda pace, plan: 600.0 if plan.num_tokens > len(plan.rows) else 0.0)
    steps.gate.clear()
    client.submit("first", [1, 2, 3])
    wait_for_steps(steps, 1)
    client.submit("second", [4, 5, 6])
    time.sleep(0.05)
    assert len(steps.queue) == 1
    steps.pause_after(1)
    steps.gate.set()
    assert steps.is_paused.wait(60)
    wait_for_steps(steps, 1)
    assert [row.num_tokens for row in steps.queue[0].rows] == [1, 3]
    steps.gate.set()
    assert client.tokens("first") == greedy("", [1, 2, 3], 8) and client.tokens("second") == greedy("", [4, 5, 6], 8)


def test_the_next_step_is_planned_in_its_time_though_nothing_happens(
    client: Client, steps: RankInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    receive = steps.receive
    monkeypatch.setattr(steps, "receive", lambda timeout_ms: receive(waits.append(timeout_ms) or timeout_ms))
    monkeypatch.setattr(StepPace, "wait_s", lambda pace, plan: 0.05)
    steps.gate.clear()
    client.submit("r", [1, 2, 3])
    wait_for_steps(steps, 2)
    assert min(waits) <= 50
    steps.gate.set()
    assert client.tokens("r") == greedy("", [1, 2, 3], 8)


def test_how_long_a_step_with_prompts_took_is_remembered(client: Client, steps: RankInProcess) -> None:
    steps.gate.clear()
    client.submit("slow", [1, 2, 3], 1)
    wait_for_steps(steps, 1)
    time.sleep(0.1)
    steps.gate.set()
    client.finish("slow")
    assert client.engine._pace.wait_s(Plan(rows={object(): object()}, num_tokens=3)) >= 0.1 * SHARE  # type: ignore[dict-item]
