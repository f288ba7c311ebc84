"""Numbers of a JSON schema that are too large for xgrammar, and how many properties an object may have. Knows no other keywords."""

import sys
from typing import Any

from loray.deployments.json_schema_patterns import Unenforceable

Schema = dict[str, Any]

BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
COUNTS = ["minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"]
LARGEST = dict.fromkeys(BOUNDS, sys.float_info.max) | dict.fromkeys(COUNTS, 2**63 - 1)


def refuse_large_numbers(schema: Schema, path: str) -> None:
    """Bounds and counts of this schema itself."""
    for name in sorted(schema.keys() & LARGEST.keys()):
        if abs(schema[name]) > LARGEST[name]:
            raise Unenforceable(path, f"{name} is too large a number")


def property_counts(schema: Schema, is_open: bool, num_required: int, path: str) -> Schema:
    """A name may come twice in an open object, and counts once."""
    least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties")
    if is_open and least > max(1, num_required):
        raise Unenforceable(path, "minProperties can't be enforced where properties are not all named")
    counts = {} if least <= num_required else {"minProperties": least}
    return counts if most is None else counts | {"maxProperties": int(most)}


def has_large_integer(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(map(has_large_integer, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63
