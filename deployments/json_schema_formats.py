"""Formats of strings that a grammar can hold to, and how long such strings are. Knows no other keywords.

Some are xgrammar's own. It takes the 30th of February and second 60 for real, so dates, times and addresses are patterns of ours.
"""

from typing import NamedTuple

_DAY, _DAY_30 = "0[1-9]|[12][0-9]|3[01]", "0[1-9]|[12][0-9]|30"
# No leap days: not every year has one.
DATE = f"[1-9][0-9]{{3}}-((0[13578]|1[02])-({_DAY})|(0[469]|11)-({_DAY_30})|02-(0[1-9]|1[0-9]|2[0-8]))"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = f"{_CLOCK}:[0-5][0-9](\\.[0-9]{{1,6}})?(Z|[+-]{_CLOCK})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"


class Format(NamedTuple):
    least: int  # characters
    most: int | None = None
    pattern: str = ""  # empty: xgrammar has one


FORMATS = {
    "date": Format(10, 10, DATE),
    "time": Format(9, 21, TIME),
    "date-time": Format(20, 32, f"{DATE}T{TIME}"),
    "ipv4": Format(7, 15, rf"({_BYTE}\.){{3}}{_BYTE}"),
    "ipv6": Format(2, 45),
    "uuid": Format(36, 36),
    "email": Format(3),
    "duration": Format(3),
    "hostname": Format(1),
    "uri": Format(1),
    "uri-reference": Format(0),
    "uri-template": Format(0),
}


def fitting_format(name: object, least: int, most: int | None) -> Format | None:
    """The format of that name, if such strings have at least and at most so many characters in any case."""
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None or least > found.least or (most is not None and (found.most is None or found.most > most)):
        return None
    return found
