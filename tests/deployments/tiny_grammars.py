"""The real grammar compiler over the tiny tokenizer, started once for all tests, and what a matcher lets pass."""

import functools
import json
import random
import tempfile
import zlib
from pathlib import Path

import numpy as np
import xgrammar

from loray.deployments.config import GrammarArgs
from loray.deployments.grammars import Grammars
from loray.models.grammar_vocabulary import grammar_vocabulary
from tests.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer


@functools.cache
def tiny_model_folder() -> Path:
    """No weights: what tells of the vocabulary."""
    folder = save_tiny_tokenizer(Path(tempfile.mkdtemp(prefix="tiny-grammars-")))
    tokenizer = tiny_tokenizer()
    config = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "num_attention_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def grammars(**limits: object) -> Grammars:
    return Grammars(tiny_model_folder(), False, GrammarArgs.model_validate(limits))


@functools.cache
def shared_grammars() -> Grammars:
    return grammars()


@functools.cache
def vocabulary() -> xgrammar.TokenizerInfo:
    return grammar_vocabulary(tiny_model_folder())


@functools.cache
def texts_of_tokens() -> list[bytes]:
    return list(vocabulary().decoded_vocab)


def read(compiled: bytes) -> xgrammar.CompiledGrammar:
    """As a rank does."""
    rules = xgrammar.Grammar.deserialize_json(zlib.decompress(compiled).decode())
    return xgrammar.GrammarCompiler(vocabulary(), max_threads=1, cache_enabled=False).compile_grammar(rules)


def random_text(compiled: bytes, seed: int, max_tokens: int = 400) -> str | None:
    """What a model that knows nothing would write; None where it did not come to an end."""
    rng = random.Random(seed)
    matcher = xgrammar.GrammarMatcher(read(compiled))
    bits = xgrammar.allocate_token_bitmask(1, vocabulary().vocab_size)
    text, texts = b"", texts_of_tokens()
    for num_tokens in range(max_tokens):
        matcher.fill_next_token_bitmask(bits)
        allowed = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little").nonzero()[0]
        closing = [i for i in allowed if texts[i][:1] in (b"", b'"', b"]", b"}", b",", b"@")] if rng.random() < num_tokens / 40 else []
        choice = int(rng.choice(closing or allowed))
        assert matcher.accept_token(choice)
        if matcher.is_terminated():
            return text.decode(errors="replace")  # as a detokenizer does
        text += texts[choice]
    return None
