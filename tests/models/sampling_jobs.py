"""Requests that ask for everything of sampling at once, for one rank or several."""

import json
import zlib
from pathlib import Path

from loray.models.parallel import Parallel
from loray.models.step import Sampling
from tests.models.conductor import Conductor, Output, Request, prompt_of
from tests.models.tiny_llama import save_llama
from tests.tiny_tokenizer import save_tiny_tokenizer

VOCAB_SIZE, EOS_ID = 330, 2  # some more tokens than the tokenizer has
LARGE_VOCAB_SIZE = 1500  # more than top-p looks at first
PLAIN = [  # of what a launch need not wait for
    Sampling(),
    Sampling(temperature=0.7, seed=1, num_alternatives=3),
    Sampling(temperature=1.0, seed=2, top_k=40, repetition_penalty=1.3),
    Sampling(temperature=1.0, seed=3, top_p=0.9, logit_bias={5: 3.0, 9: -2.0}),
    Sampling(temperature=1.5, seed=4, top_p=0.99, top_k=1200, frequency_penalty=0.5),
    Sampling(temperature=0.9, seed=5, typical_p=0.8, presence_penalty=-0.5, num_alternatives=5),
    Sampling(presence_penalty=1.0, min_new_tokens=20, stop_ids=[2, 3], num_alternatives=1),
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "bc"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def save_model(folder: Path) -> Path:
    save_llama(folder, vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID)
    return save_tiny_tokenizer(folder)


def grammar(*, regex: str = "", schema: object = None, ebnf: str = "") -> bytes:
    import xgrammar

    if ebnf:
        rules = xgrammar.Grammar.from_ebnf(ebnf)
    else:
        rules = xgrammar.Grammar.from_regex(regex) if regex else xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    return zlib.compress(rules.serialize_json().encode())


def mixed_requests() -> list[Request]:
    patterns = ["[0-9]{3}", "(yes|no)", "x[a-c]*y", ""]
    requests = []
    for i, pattern in enumerate(patterns):
        allowed = grammar(regex=pattern) if pattern else grammar(schema=SCHEMA)
        sampling = Sampling(temperature=1.0, seed=i, grammar=allowed, num_alternatives=i, repetition_penalty=1.1)
        requests.append(Request(prompt_of(9 + i, i, VOCAB_SIZE), sampling=sampling, num_new=24, wants_prompt_logprobs=i % 2 == 0))
    drawn = Sampling(temperature=0.8, top_k=50, seed=9, frequency_penalty=0.5, logit_bias={5: 2.0}, watermark=True)
    requests.append(Request(prompt_of(17, 9, VOCAB_SIZE), sampling=drawn, num_new=24, wants_prompt_logprobs=True))
    requests.append(Request(prompt_of(5, 8, VOCAB_SIZE), num_new=24))
    return requests


def play_mixed(parallel: Parallel, folder: Path) -> list[Output]:
    return Conductor(folder, parallel).play(mixed_requests(), chunk=7, stagger=1)


def play_unequally(parallel: Parallel, folder: Path) -> Output:
    """The last rank is given something else than a grammar."""
    is_last = parallel.rank == parallel.world_size - 1
    allowed = b"nothing" if is_last else grammar(regex="[0-9]{3}")
    return Conductor(folder, parallel).play([Request([1, 2], sampling=Sampling(grammar=allowed), num_new=2)])[0]
