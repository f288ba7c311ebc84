"""Strings of so many characters, as rules of a grammar in xgrammar's EBNF. Knows neither schemas nor the rest of the grammar.

An automaton that counts to n takes 9 ms a character to compile with a vocabulary of 49,000, and xgrammar's own counting 20 ms a token
to follow. So blocks of a few characters follow one another, and all lengths share them: 0.6 s to compile, 0.5 ms a token. A token that
goes past the end of a block would have to be tried by itself; STEADY, which runs on over that end, spares most tokens that.
"""

import re

MAX_LENGTH = 32_768  # characters that are counted; takes no longer to follow than 100
BLOCK = 16  # characters
# What a JSON string may hold without an escape, less surrogates, which are no text in UTF-8.
CHARACTER = r"[ !#-\[\]-\u07fe\u0800-\ud7ff\ue000-\ufffe\U00010000-\U0010ffff]"
# xgrammar remembers what a rule surely allows only where it forbids more than 1,000 tokens too: hence not all of ASCII.
STEADY = "[ A-Za-z]"
MARK = '"\\x01"'  # as a grammar is printed; no other string of a schema's grammar holds this character
ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)", re.DOTALL)
MARKED = re.compile(rf'{re.escape(MARK)} ((?:"[0-9,]" )+){re.escape(MARK)}')


def length_pattern(least: int, most: int | None) -> str:
    """A regular expression that stands for the strings of such lengths until `with_lengths` has seen the grammar."""
    return rf"^\u0001{least},{'' if most is None else most}\u0001$"


def with_lengths(grammar: str) -> str:
    """The grammar, as xgrammar prints it, with rules in the places of its length patterns."""
    rules = _Rules()

    def name(match: re.Match[str]) -> str:
        least, most = re.sub('[" ]', "", match[1]).split(",")
        return rules.between(int(least), int(most) if most else None)

    text = ESCAPE.sub(_fixed, MARKED.sub(name, grammar))
    return "\n".join([text, *(f"{name} ::= {body}" for name, body in rules.bodies.items())])


def _fixed(escape: re.Match[str]) -> str:
    """xgrammar prints two digits after an x, and reads as many as there are."""
    return f"\\u00{escape[1]}" if escape[1] else escape[0]


class _Rules:
    """Every method answers with a rule's name."""

    def __init__(self) -> None:
        self.bodies: dict[str, str] = {}  # by name

    def between(self, least: int, most: int | None) -> str:
        assert max(least, most or 0) <= MAX_LENGTH, "longer ones are not counted"
        if most is None:
            return self._rule(f"length_{least}_more", f"{self._exactly(least)} {CHARACTER}*")
        if most < 2 * BLOCK:
            return self._few(least, most)
        if not least or least == most:
            return self._exactly(most) if least else self._up_to(most)
        body = f"{self._exactly(least)} {self._up_to(most - least)}"
        if least < 2 * BLOCK <= most:
            body += f" | {STEADY}{{{least},{2 * BLOCK - 1}}}"
        return self._rule(f"length_{least}_{most}", body)

    def _up_to(self, most: int) -> str:
        if most < 2 * BLOCK:
            return self._few(0, most)
        few = self._few(0, BLOCK)
        steady = self._rule("length_steady", f"{STEADY}{{0,{2 * BLOCK - 1}}}")
        rest = few
        for length in _steps(2 * BLOCK, most):
            block = self._exactly(length % BLOCK or BLOCK)
            rest = self._rule(f"length_0_{length}", f"{steady} | {few} | {block} {rest}")
        return rest

    def _exactly(self, count: int) -> str:
        if count < 2 * BLOCK:
            return self._few(count, count)
        block = self._exactly(BLOCK)
        steady = self._rule("length_steady_blocks", f"{STEADY}{{{2 * BLOCK}}}")
        before, rest = self._exactly(0), block
        for length in _steps(2 * BLOCK, count):
            body = f"{self._exactly(length % BLOCK)} {rest}" if length % BLOCK else f"{block} {rest} | {steady} {before}"
            before, rest = rest, self._rule(f"length_{length}_{length}", body)
        return rest

    def _few(self, least: int, most: int) -> str:
        return self._rule(f"length_{least}_{most}", f"{CHARACTER}{{{least},{most}}}" if most else '""')

    def _rule(self, name: str, body: str) -> str:
        self.bodies[name] = body
        return name


def _steps(first: int, last: int) -> list[int]:
    """Whole blocks, and what is left at the end."""
    return [*range(first, last + 1, BLOCK), *([last] if last % BLOCK else [])]
