"""Whether a value can come to an end under each schema of a rewritten one: references may lead in circles. Knows no other rule."""

from typing import Any

from loray.deployments.json_schema_patterns import Unenforceable

Schema = dict[str, Any]


def refuse_endless(schema: Schema, defs: dict[str, Schema]) -> None:
    """`defs`: what its references lead to."""
    ending: set[str] = set()
    left, num_left = list(reversed(defs)), len(defs) + 1  # the last first: most lead from one to a later one
    while len(left) < num_left:
        num_left = len(left)
        for name in left:
            if _can_end(defs[name], ending):
                ending.add(name)
        left = [name for name in left if name not in ending]
    if left or not _can_end(schema, ending):
        raise Unenforceable("", "$ref: leads in a circle that no value comes to an end of")


def _can_end(schema: Schema, ending: set[str]) -> bool:
    """`ending`: the names of references that can."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2] in ending
    if "anyOf" in schema:
        return any(_can_end(branch, ending) for branch in schema["anyOf"])
    needed = [schema["properties"][name] for name in schema.get("required", [])]
    min_items, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
    needed += prefix[:min_items]
    if min_items > len(prefix) and isinstance(schema.get("items"), dict):
        needed.append(schema["items"])
    return all(_can_end(part, ending) for part in needed)
