"""Strings and numbers of a JSON schema as xgrammar enforces them. Raises Unenforceable; knows no other keywords."""

import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from loray.deployments.json_schema_formats import fitting_format
from loray.deployments.json_schema_patterns import Unenforceable, string_pattern
from loray.deployments.string_lengths import MAX_LENGTH, length_pattern

Schema = dict[str, Any]
Tree = dict[str, "Tree"]  # of names, by their next character; END: one ends here
END = ""

MAX_MULTIPLE = 1024  # of an integer; xgrammar ignores larger ones
MAX_MULTIPLE_RANGE = 10_000  # integers between two bounds, where there is a multipleOf too
GRID = Decimal(1_000_000)  # a number between bounds has at most six decimals
# What a JSON string may hold without an escape, less surrogates, which are no text in UTF-8, and less what GAPS below says.
CHARACTER = r"[ !#-\[\]-\u07fe\u0800-\ud7ff\ue000-\ufffe\u{10000}-\u{10ffff}]"
# What follows stands within character classes. Of one that has two neighbours whose UTF-8 differs in length, xgrammar makes bytes that
# are no UTF-8: so the last of each length but one, which hardly anybody writes, is left out, and with it go the surrogates.
CONTROLS = r"\u0000-\u001f"
BEYOND_ASCII = r"\u007f-\u{10ffff}"
GAPS = r"\u07ff\ud800-\udfff\uffff"


def string(schema: Schema, path: str) -> Schema:
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    if most is not None and least > most:
        raise Unenforceable(path, "minLength is more than maxLength")
    if least > MAX_LENGTH:
        raise Unenforceable(path, f"minLength can't be enforced beyond {MAX_LENGTH}")
    if "pattern" in schema:
        if least or most is not None:
            raise Unenforceable(path, "pattern can't be enforced together with minLength or maxLength")
        return {"type": "string", "pattern": string_pattern(schema["pattern"], path)}
    if held := fitting_format(schema.get("format"), least, most):
        pattern = {"pattern": string_pattern(f"^(?:{held.pattern})$", path)} if held.pattern else {"format": schema["format"]}
        return {"type": "string", **pattern}
    if least or most is not None:  # these are rules, a format is a remark
        return {"type": "string", "pattern": length_pattern(least, None if most is None else min(int(most), MAX_LENGTH))}
    return {"type": "string"}


def any_name_but(names: Iterable[str]) -> str:
    """A pattern of strings without escapes, as xgrammar writes all the others, that are none of these. Not of all such strings: after
    the beginning of one of these only ASCII leads away from it, because each state that reads UTF-8 takes a lot of memory."""
    tree: Tree = {}
    for name in names:
        if not re.search(f'["{CONTROLS}\\\\{GAPS}]', name):  # such a name has escapes anyway
            branch = tree
            for char in name:
                branch = branch.setdefault(char, {})
            branch[END] = {}
    choices = filter(None, [f"{_leading_away(tree, GAPS)}{CHARACTER}*", _unfinished(tree)])
    return f"^({'|'.join(choices)})$"


def _leading_away(tree: Tree, forbidden: str) -> str:
    branches = {_escape(char): rest for char, rest in tree.items() if char != END}
    others = f'[^{CONTROLS}"\\\\{forbidden}{"".join(branches)}]'
    return f"({'|'.join([others, *(char + _leading_away(rest, BEYOND_ASCII) for char, rest in branches.items())])})"


def _unfinished(tree: Tree) -> str:
    """A pattern of the beginnings of the names that are no names themselves; empty if there are none."""
    rests = [(_escape(char), _unfinished(rest)) for char, rest in tree.items() if char != END]
    choices = [char + rest for char, rest in rests if rest] + ([] if END in tree else [""])
    return f"({'|'.join(choices)})" if choices else ""


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\u{{{ord(char):x}}}"


def integer(schema: Schema, path: str) -> Schema:
    lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    lows += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
    highs += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    if lows and highs and max(lows) > min(highs):
        raise Unenforceable(path, "no integer is within its bounds")
    result: Schema = {"type": "integer"}
    if lows:
        result["minimum"] = max(lows)
    if highs:
        result["maximum"] = min(highs)
    if "multipleOf" in schema:
        multiple = schema["multipleOf"]
        is_narrow = bool(lows and highs) and min(highs) - max(lows) < MAX_MULTIPLE_RANGE
        if multiple != int(multiple) or multiple > MAX_MULTIPLE or not (is_narrow or not lows and not highs):
            limits = f"whole, at most {MAX_MULTIPLE}, and with two near bounds or none"
            raise Unenforceable(path, f"multipleOf can be enforced if it is {limits}")
        result["multipleOf"] = int(multiple)
    return result


def number(schema: Schema, path: str) -> Schema:
    if "multipleOf" in schema:
        raise Unenforceable(path, "multipleOf can be enforced of integers only")
    bounds: Schema = {name: schema[name] for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if name in schema}
    grid = {name: Decimal(str(value)) * GRID for name, value in bounds.items()}
    lows = [math.ceil(grid["minimum"])] if "minimum" in grid else []
    lows += [math.floor(grid["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in grid else []
    highs = [math.floor(grid["maximum"])] if "maximum" in grid else []
    highs += [math.ceil(grid["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in grid else []
    if lows and highs and max(lows) > min(highs):
        raise Unenforceable(path, "no number of six decimals is within its bounds")
    return {"type": "number", **bounds}
