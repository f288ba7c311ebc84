"""W3C trace context: which trace a request belongs to, as its two headers say it. Knows nothing of spans."""

import re
from collections.abc import Sequence

import msgspec

IDS = r"-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
TRACEPARENT = re.compile(rf"00{IDS}|(?!00|ff)[0-9a-f]{{2}}{IDS}(-.*)?")  # only later versions may say more
TRACESTATE = re.compile(r"[\t\x20-\x7e]{0,4096}")  # nobody has to pass on more than 512 characters


class TraceContext(msgspec.Struct, frozen=True):
    traceparent: str = ""  # of the span that what comes next belongs under; "" = of no trace
    tracestate: str = ""  # what other tracing systems wrote beside it: passed on, never read

    @property
    def trace_id(self) -> str:
        return self.traceparent[3:35]


def received(traceparents: Sequence[str], tracestates: Sequence[str]) -> TraceContext:
    """From all headers of these names. A traceparent that is none, or one of two, counts as not sent, and the tracestate with it."""
    if len(traceparents) != 1 or not TRACEPARENT.fullmatch(traceparents[0]):
        return TraceContext()
    state = ",".join(tracestates)
    return TraceContext(f"00{traceparents[0][2:55]}", state if TRACESTATE.fullmatch(state) else "")
