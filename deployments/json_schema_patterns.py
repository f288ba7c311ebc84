"""Regular expressions as xgrammar holds them to the letter: read as Python reads them, written anew. Knows neither schemas nor xgrammar.

xgrammar makes an automaton of a schema's pattern, which takes a|a{0,2} or (b{2,}|){1,} for more than they are; it is right where nothing
but single characters is chosen or repeated. Of a pattern with a character beyond ASCII it makes rules. They are right, but let quotes into
strings, and counts take much more memory. So each pattern says itself what JSON has without an escape, and gets rules where it needs them.
"""

import re
import warnings
from collections.abc import Iterable
from re import _constants as codes  # type: ignore[attr-defined]  # the only reader of regular expressions that reads as `re` does
from re import _parser as reader  # type: ignore[attr-defined]
from typing import Any

Ranges = list[tuple[int, int]]  # of characters, both ends included, in order, none touching another

FORCES_RULES = "日{0}"  # nothing, but beyond ASCII
LAST = 0x10FFFF
# Surrogates, which are no text in UTF-8, and the last characters whose UTF-8 has two and three bytes, which hardly anybody writes: of two
# neighbours whose UTF-8 differs in length xgrammar's automaton makes bytes that are no UTF-8.
NEVER: Ranges = [(0x7FF, 0x7FF), (0xD800, 0xDFFF), (0xFFFF, 0xFFFF)]
ESCAPED: Ranges = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]  # within a JSON string
ASCII_SPACES: Ranges = [(0x09, 0x0D), (0x20, 0x20)]
LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]  # that no dot is
# What ECMA or Python takes for a space.
SPACES: Ranges = [(0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
SPACES += [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
DIGITS: Ranges = [(0x30, 0x39)]
WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
SHORTHANDS = {codes.CATEGORY_DIGIT: (DIGITS, DIGITS), codes.CATEGORY_SPACE: (ASCII_SPACES, SPACES), codes.CATEGORY_WORD: (WORD, WORD)}
NEGATED = {codes.CATEGORY_NOT_DIGIT: DIGITS, codes.CATEGORY_NOT_SPACE: SPACES, codes.CATEGORY_NOT_WORD: WORD}
READ_ALIKE = re.compile(r"(?:[^\\\[{]|\{(?!,\d*\})|\\.|\[(?!\^?\])(?:\\.|[^\]\\])+\])*", re.DOTALL)  # by ECMA and by Python
SIGNS = {(0, codes.MAXREPEAT): "*", (1, codes.MAXREPEAT): "+", (0, 1): "?"}
CHARACTERS = {codes.ANY, codes.LITERAL, codes.NOT_LITERAL, codes.IN}
ONLY_GROUPS = {codes.ASSERT, codes.ASSERT_NOT, codes.ATOMIC_GROUP, codes.GROUPREF, codes.GROUPREF_EXISTS, codes.FAILURE}


class Unenforceable(ValueError):
    def __init__(self, path: str, reason: str) -> None:
        place = path.strip("/")
        super().__init__(f"{place}: {reason}" if place else reason)


def text_pattern(pattern: str) -> str:
    """Of texts that match it from end to end. Raises Unenforceable."""
    return f"^{_Writer(pattern, '', []).written()}$"


def string_pattern(pattern: str, path: str) -> str:
    """Of JSON strings, without their quotes and without escapes, that match it from end to end. Raises Unenforceable."""
    if not READ_ALIKE.fullmatch(pattern):
        raise Unenforceable(path, f"pattern {pattern!r}: [] and {{,n}} can't be enforced, for not all read them alike")
    writer = _Writer(pattern, path, ESCAPED)
    written = writer.written()
    return f"^{written}$" if writer.is_chain else f"^{written}{FORCES_RULES}$"


class _Writer:
    def __init__(self, pattern: str, path: str, forbidden: Ranges) -> None:
        self._pattern = pattern
        self._path = path
        self._forbidden = _union([*NEVER, *forbidden])
        self.is_chain = True  # nothing but single characters is chosen or repeated

    def written(self) -> str:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of brackets that may mean something else one day
                tree = reader.parse(self._pattern)
        except (re.error, OverflowError) as error:
            raise self._unenforceable(f"is no regular expression: {error}") from error
        if tree.state.flags & ~codes.SRE_FLAG_UNICODE:
            raise self._unenforceable("only plain and (?:…) groups can be enforced")
        return self._sequence(tree, is_first=True, is_last=True)

    def _unenforceable(self, reason: str) -> Unenforceable:
        return Unenforceable(self._path, f"pattern {self._pattern!r}: {reason}")

    def _sequence(self, items: Any, is_first: bool, is_last: bool) -> str:
        """`is_first`, `is_last`: it stands at an end of the whole."""
        texts = [i for i, (code, _) in enumerate(items) if code is not codes.AT] or [len(items), 0]
        first, last = texts[0], texts[-1]
        places = enumerate(items)
        return "".join(self._item(code, value, is_first and i <= first, is_last and i >= last) for i, (code, value) in places)

    def _item(self, code: Any, value: Any, is_first: bool, is_last: bool) -> str:
        if code is codes.BRANCH:
            self.is_chain = False
            return f"({'|'.join(self._sequence(branch, is_first, is_last) for branch in value[1])})"
        if code is codes.SUBPATTERN:
            _, added_flags, removed_flags, items = value
            if added_flags or removed_flags:
                raise self._unenforceable("only plain and (?:…) groups can be enforced")
            return self._sequence(items, is_first, is_last)
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            return self._repeat(*value)
        if code is codes.AT:
            if not (value is codes.AT_BEGINNING and is_first or value is codes.AT_END and is_last):
                raise self._unenforceable("^ and $ can be enforced at its two ends only, other places in a text nowhere")
            return ""
        if code is codes.POSSESSIVE_REPEAT:
            raise self._unenforceable("*+, ++, ?+ and }+ can't be enforced")
        if code in ONLY_GROUPS:
            raise self._unenforceable("only plain and (?:…) groups can be enforced")
        return self._class(self._characters(code, value))

    def _repeat(self, least: int, most: int, items: Any) -> str:
        if most == 0:
            return ""
        is_character = len(items) == 1 and items[0][0] in CHARACTERS
        self.is_chain &= is_character
        body = self._sequence(items, is_first=False, is_last=False)
        if not body:
            return ""
        sign = SIGNS.get((least, most)) or f"{{{least},{'' if most is codes.MAXREPEAT else most}}}"
        return f"{body if is_character else f'({body})'}{sign}"

    def _characters(self, code: Any, value: Any) -> Ranges:
        if code is codes.ANY:
            return _others(LINE_ENDS)
        if code is codes.NOT_LITERAL:
            return _others([(value, value)])
        if code is not codes.IN:
            return _member(code, value, is_negated=False)
        is_negated = value[0][0] is codes.NEGATE
        members = _union(found for code, value in value[is_negated:] for found in _member(code, value, is_negated))
        return _others(members) if is_negated else members

    def _class(self, characters: Ranges) -> str:
        allowed = _others(_union([*_others(characters), *self._forbidden]))
        if not allowed:
            raise self._unenforceable("wants a character that JSON escapes, or that there is not")
        if len(allowed) == 1 and allowed[0][0] == allowed[0][1]:
            return _written(allowed[0][0])
        return f"[{''.join(_written(low) if low == high else f'{_written(low)}-{_written(high)}' for low, high in allowed)}]"


def _member(code: Any, value: Any, is_negated: bool) -> Ranges:
    """Of a class. `is_negated`: its characters are to be left out, so that where two readings differ, more of them are taken."""
    if code is codes.LITERAL:
        return [(value, value)]
    if code is codes.RANGE:
        return [value]
    assert code is codes.CATEGORY, f"{code} in a class of characters"
    if value in SHORTHANDS:
        return SHORTHANDS[value][is_negated]
    return _others(ASCII_SPACES if is_negated and value is codes.CATEGORY_NOT_SPACE else NEGATED[value])


def _union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: Ranges = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def _others(ranges: Ranges) -> Ranges:
    """All characters but these."""
    edges = [-1, *(edge for low, high in ranges for edge in (low - 1, high)), LAST]
    return [(low + 1, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


def _written(char: int) -> str:
    text = chr(char)
    if text.isascii() and text.isalnum():
        return text
    return f"\\u{char:04x}" if char < 0x10000 else f"\\u{{{char:x}}}"
