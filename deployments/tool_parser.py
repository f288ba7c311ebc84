"""Finds tool calls in a model's text as it comes. Pure: it knows no tools and checks nothing, for a grammar has made sure of the form."""

import re
from dataclasses import dataclass, field

from loray.deployments.tool_format import BEGIN, END

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"arguments"\s*:')


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The first piece of a call has its name and nothing else, the others have arguments."""

    index: int
    name: str = ""
    arguments: str = ""  # a part of the JSON


@dataclass(slots=True)
class Said:
    text: str = ""  # outside of calls
    calls: list[CallPiece] = field(default_factory=list)


class ToolCallParser:
    """White space around calls is no text, and neither is the beginning of a marker."""

    def __init__(self, is_first: bool = False) -> None:
        """`is_first`: there are calls only if the text begins with one."""
        self.num_calls = 0
        self._is_first = is_first
        self._held = ""  # not given out yet
        self._read = self._read_text
        self._depth = 0  # of brackets within the arguments
        self._is_string = False
        self._is_escaped = False

    def push(self, piece: str) -> Said:
        self._held += piece
        said = Said()
        while self._read(said):
            pass
        return said

    def flush(self, is_cut: bool) -> str:
        """The text still held at the end. `is_cut`: the model would have gone on, so what begins a marker is the beginning of a call."""
        held = self._held if self._read == self._read_text else ""
        self._held = ""
        if is_cut:
            held = held[: len(held) - _num_begun(held)]
        return held if held.strip() or not self.num_calls else ""

    def _read_text(self, said: Said) -> bool:
        if self._is_first and not self.num_calls and not _may_begin_call(self._held):
            self._read = self._read_plain
            return True
        text, marker, rest = self._held.partition(BEGIN)
        if marker:
            said.text += text.rstrip()
            self._held, self._read = rest, self._read_head
            return True
        stop = len(text[: len(text) - _num_begun(text)].rstrip())
        said.text += text[:stop]
        self._held = text[stop:]
        return False

    def _read_plain(self, said: Said) -> bool:
        said.text += self._held
        self._held = ""
        return False

    def _read_head(self, said: Said) -> bool:
        head = HEAD.match(self._held)
        if not head:
            return False
        said.calls.append(CallPiece(self.num_calls, name=head[1]))
        self.num_calls += 1
        self._held, self._read = self._held[head.end() :], self._read_arguments
        return True

    def _read_arguments(self, said: Said) -> bool:
        if not self._depth:
            self._held = self._held.lstrip()
        stop = self._end_of_arguments()
        arguments = self._held if stop is None else self._held[:stop]
        if arguments:
            said.calls.append(CallPiece(self.num_calls - 1, arguments=arguments))
        self._held = self._held[len(arguments) :]
        if stop is not None:
            self._read = self._read_tail
        return stop is not None

    def _read_tail(self, said: Said) -> bool:
        _, marker, rest = self._held.partition(END)
        if not marker:
            return False
        self._held, self._read = rest, self._read_text
        return True

    def _end_of_arguments(self) -> int | None:
        """Where the object ends in what is held; None: later."""
        for position, character in enumerate(self._held):
            if self._is_string:
                self._is_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return position + 1
        return None


def _may_begin_call(text: str) -> bool:
    begun = text.lstrip()[: len(BEGIN)]
    return BEGIN.startswith(begun)


def _num_begun(text: str) -> int:
    """Length of the longest end of the text that begins a marker."""
    return next((num for num in range(min(len(BEGIN) - 1, len(text)), 0, -1) if BEGIN.startswith(text[-num:])), 0)
