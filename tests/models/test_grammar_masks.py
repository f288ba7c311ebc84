"""Grammars on the ranks: tokens always follow them, in any mix, after a recomputation and on several ranks; a bad one fails alone."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import xgrammar
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from loray.models import grammar_masks as module
from loray.models.grammar_masks import GrammarMasks
from loray.models.grammar_vocabulary import grammar_vocabulary
from loray.models.step import RowFailure, Sampling, grammar_key
from tests.models.conductor import Conductor, Output, Request, prompt_of
from tests.models.rank_threads import ThreadGroup
from tests.models.sampling_jobs import EOS_ID, VOCAB_SIZE, grammar, mixed_requests, play_mixed, play_unequally, save_model
from tests.models.test_causal_lm import HostedConductor

AMBIGUOUS = "root ::= x x x x x x x x\nx ::= [^b]* | x [^c]* x | x x [^d]* x x"
PATTERNS = ["[0-9]{3}", "(yes|no)", "x[a-c]*y"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("grammar_model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def conductor(folder: Path) -> Conductor:
    return Conductor(folder)


@pytest.fixture(scope="module")
def together(folder: Path, conductor: Conductor) -> list[Output]:
    return conductor.play(mixed_requests(), chunk=7, stagger=1)


def until_eos(token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(EOS_ID)] if EOS_ID in token_ids else token_ids


def test_several_grammars_at_once_are_all_followed(together: list[Output], tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [tokenizer.decode(until_eos(output.token_ids)) for output in together]
    for pattern, text, output in zip(PATTERNS, texts, together, strict=False):
        assert EOS_ID in output.token_ids or pattern == PATTERNS[2]
        assert re.fullmatch(pattern if EOS_ID in output.token_ids else "x[a-c]*", text), text
    answer = json.loads(texts[3])
    assert list(answer) == ["name", "age"] and answer["name"] in ("a", "bc") and 0 <= answer["age"] <= 99
    assert not any(output.failures for output in together)


def test_a_request_with_a_grammar_gets_alone_what_it_gets_among_others(folder: Path, conductor: Conductor, together: list[Output]) -> None:
    for request, expected in zip(mixed_requests(), together, strict=True):
        (alone,) = conductor.play([request])
        if request.sampling.grammar:  # beyond its end a row draws what nobody reads
            assert until_eos(alone.token_ids) == until_eos(expected.token_ids)
        else:
            assert alone.token_ids == expected.token_ids
        assert alone.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=1e-4)


def test_two_ranks_give_what_one_gives(folder: Path, together: list[Output]) -> None:
    for outputs in ThreadGroup(2).run(play_mixed, folder):
        for found, expected in zip(outputs, together, strict=True):
            assert found.token_ids == expected.token_ids
            assert found.logprobs == pytest.approx(expected.logprobs, abs=2e-4)
            assert found.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=2e-4)


def test_a_hosted_model_gives_what_ours_gives(folder: Path, together: list[Output]) -> None:
    outputs = HostedConductor(folder).play(mixed_requests(), chunk=7, stagger=1)
    for found, expected in zip(outputs, together, strict=True):
        assert until_eos(found.token_ids) == until_eos(expected.token_ids)
        assert found.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=2e-4)
        assert [len(alternatives) for alternatives in found.alternatives] == [len(others) for others in expected.alternatives]


def test_a_recomputed_request_goes_on_within_its_grammar(folder: Path, conductor: Conductor, together: list[Output]) -> None:
    request, whole = mixed_requests()[3], until_eos(together[3].token_ids)
    for num_done in (1, len(whole) // 2):
        (rest,) = conductor.play([Request(request.prompt, [], request.sampling, 24 - num_done, whole[:num_done])])
        assert whole[:num_done] + until_eos(rest.token_ids) == whole


@pytest.mark.parametrize("broken", [b"nothing", zlib.compress(b"{}"), zlib.compress(b"\xff")])
def test_a_grammar_that_cannot_be_read_fails_its_own_request_alone(
    folder: Path, conductor: Conductor, together: list[Output], broken: bytes
) -> None:
    good = mixed_requests()[:2]
    bad = Request(prompt_of(9, 0, VOCAB_SIZE), sampling=Sampling(grammar=broken), num_new=24)
    outputs = conductor.play([bad, *good], chunk=7)
    assert outputs[0].failures and all(failure.is_callers for failure in outputs[0].failures)
    assert all("the grammar can't be read" in failure.reason for failure in outputs[0].failures)
    for found, expected in zip(outputs[1:], together, strict=False):
        assert until_eos(found.token_ids) == until_eos(expected.token_ids) and not found.failures


@pytest.mark.slow
def test_an_ambiguous_grammar_fails_its_own_request_alone_before_others_wait_long(
    folder: Path, conductor: Conductor, together: list[Output]
) -> None:
    sampling = Sampling(temperature=1.0, grammar=grammar(ebnf=AMBIGUOUS), min_new_tokens=100, stop_ids=[EOS_ID])
    slow = Request(prompt_of(9, 0, VOCAB_SIZE), sampling=sampling, num_new=100)
    outputs = conductor.play([*mixed_requests()[:2], slow])
    assert any("takes too long" in failure.reason and failure.is_callers for failure in outputs[2].failures)
    for found, expected in zip(outputs[:2], together, strict=False):
        assert until_eos(found.token_ids) == until_eos(expected.token_ids) and not found.failures


def test_output_that_the_grammar_refuses_fails_the_request(folder: Path, conductor: Conductor) -> None:
    sampling = Sampling(grammar=grammar(regex="[0-9]{3}"))
    bad = Request(prompt_of(9, 0, VOCAB_SIZE), sampling=sampling, num_new=2, output=[EOS_ID])
    (output,) = conductor.play([bad])
    assert output.failures == {RowFailure(f"the grammar does not allow token {EOS_ID} where it was generated")}
    (again,) = conductor.play([Request(prompt_of(9, 0, VOCAB_SIZE), sampling=sampling, num_new=3)])
    assert not again.failures, "the slot has forgotten"


def test_a_text_that_is_whole_may_end_before_min_new_tokens_but_no_sooner_than_it_must(
    folder: Path, conductor: Conductor, tokenizer: PreTrainedTokenizerFast
) -> None:
    def text(pattern: str) -> str:
        sampling = Sampling(temperature=1.0, grammar=grammar(regex=pattern), min_new_tokens=6, stop_ids=[EOS_ID])
        (output,) = conductor.play([Request(prompt_of(9, 0, VOCAB_SIZE), sampling=sampling, num_new=20)])
        assert not output.failures
        return tokenizer.decode(until_eos(output.token_ids))

    assert text("[0-9]{3}").isdigit()
    assert len(text("[0-9]+")) >= 6


def test_logits_beyond_the_vocabulary_are_impossible_too(folder: Path) -> None:
    masks = GrammarMasks(folder)
    masks.admit(1, grammar(regex="[ab]"), [])
    scores = torch.zeros(2, VOCAB_SIZE + 100)
    masks.mask(scores, [0, 1], [[], []])
    assert scores[0].isfinite().all() and scores[1].isfinite().sum() == 2


def test_a_prepared_grammar_is_compiled_once_until_it_is_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_grammar, compiled = xgrammar.GrammarCompiler.compile_grammar, []

    def counted(compiler: xgrammar.GrammarCompiler, rules: Any) -> xgrammar.CompiledGrammar:
        compiled.append(rules)
        return compile_grammar(compiler, rules)

    monkeypatch.setattr(xgrammar.GrammarCompiler, "compile_grammar", counted)
    masks, rules = GrammarMasks(folder), grammar(regex="[ab]")
    assert masks.compiled.prepare(rules) > 0
    masks.admit(0, rules, [])
    masks.admit(1, rules, [])
    assert len(compiled) == 1 and 0 in masks and 1 in masks
    masks.compiled.drop(grammar_key(rules))
    masks.admit(2, rules, [])
    assert len(compiled) == 2 and 2 in masks, "what nobody has prepared is compiled where it is needed"


def test_the_time_to_compile_a_grammar_is_nobodys_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAVED_S", 0.0)
    masks = GrammarMasks(folder)
    masks.admit(0, grammar(regex="[ab]"), [])
    assert 0 in masks and not masks.failures


def test_special_tokens_are_no_text_for_a_grammar(folder: Path) -> None:
    vocabulary = grammar_vocabulary(folder)
    assert {0, 1} <= set(vocabulary.special_token_ids) and vocabulary.stop_token_ids == [EOS_ID]
    assert vocabulary.vocab_size == VOCAB_SIZE


def test_a_grammar_that_one_rank_cannot_read_fails_on_all(folder: Path) -> None:
    outputs = ThreadGroup(2).run(play_unequally, folder)
    assert [len(output.failures) for output in outputs] == [1, 1]
    assert outputs[0].failures == {RowFailure("another rank can't read the grammar")}


def test_a_dead_end_after_several_tokens_is_the_callers_mistake(folder: Path, conductor: Conductor, together: list[Output]) -> None:
    sampling = Sampling(grammar=grammar(ebnf='root ::= "aaaaaa" x\nx ::= x'))
    good = mixed_requests()[0]
    dead, other = conductor.play([Request(prompt_of(9, 0, VOCAB_SIZE), sampling=sampling, num_new=24), good])
    assert dead.failures == {RowFailure("the grammar leads to where it allows none of the model's tokens", is_callers=True)}
    assert until_eos(other.token_ids) == until_eos(together[0].token_ids) and not other.failures


def test_a_vocabulary_that_cannot_be_read_is_not_the_callers_mistake(folder: Path, tmp_path: Path) -> None:
    masks = GrammarMasks(tmp_path)
    masks.admit(0, grammar(regex="[ab]"), [])
    assert "the vocabulary can't be read" in masks.failures[0].reason and not masks.failures[0].is_callers
