"""The grammars that a rank has compiled for its vocabulary, in any thread: xgrammar lets the others run. Knows neither slots nor steps.

They travel as xgrammar's rules: what it compiles of them has, as JSON, the whole automaton once for each rule, 64 MiB for 20 tools."""

import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from loray.models.grammar_vocabulary import grammar_vocabulary
from loray.models.step import grammar_key

if TYPE_CHECKING:  # imported when the first grammar comes: few servers see one
    from xgrammar import CompiledGrammar, TokenizerInfo


class CompiledGrammars:
    def __init__(self, model_path: Path, trust_remote_code: bool = False) -> None:
        self._model_path = model_path
        self._trust_remote_code = trust_remote_code
        self._vocabulary: TokenizerInfo | None = None
        self._reading = threading.Lock()  # over the vocabulary, until it is there
        self._prepared: dict[bytes, CompiledGrammar] = {}  # by key

    def vocabulary(self) -> "TokenizerInfo":
        """The first time it takes seconds, in which a rank would do nothing else. Any thread may ask for it before."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = grammar_vocabulary(self._model_path, self._trust_remote_code)
            return self._vocabulary

    def prepare(self, grammar: bytes) -> int:
        """Beside the steps: seconds may pass. It is kept until it is dropped. Its bytes."""
        compiled = self._prepared[grammar_key(grammar)] = self._compile(grammar)
        return compiled.memory_size_bytes

    def drop(self, key: bytes) -> None:
        self._prepared.pop(key, None)

    def get(self, grammar: bytes) -> "CompiledGrammar":
        """Compiled here and now if nobody has prepared it. Raises RuntimeError, ValueError or zlib.error for what is none."""
        return self._prepared.get(grammar_key(grammar)) or self._compile(grammar)

    def _compile(self, grammar: bytes) -> "CompiledGrammar":
        import xgrammar

        # A compiler's cache would print the rules and read them again, which is not the same for all characters.
        rules = xgrammar.Grammar.deserialize_json(zlib.decompress(grammar).decode())
        return xgrammar.GrammarCompiler(self.vocabulary(), max_threads=1, cache_enabled=False).compile_grammar(rules)
