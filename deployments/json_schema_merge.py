"""Two JSON schemas that must both hold, as one. Raises Unenforceable where one schema can't say it."""

from typing import Any

from loray.deployments.json_schema_patterns import Unenforceable

Schema = dict[str, Any]

LARGER = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
SMALLER = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}
IGNORED = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator", "$comment"}
IGNORED |= {"$schema", "$defs", "definitions"}
NESTED = {"items", "propertyNames", "additionalProperties"}  # one schema each
# Each speaks of what no other keyword of its schema speaks of, nor any of the schemas within that are about the same value.
UNEVALUATED = {
    "unevaluatedProperties": {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"},
    "unevaluatedItems": {"items", "prefixItems", "unevaluatedItems"},
}
WITHIN = {"allOf", "anyOf", "oneOf", "$ref"}


def merged(one: Any, other: Any, path: str) -> Schema:
    if one is False or other is False:
        raise Unenforceable(path, "false allows nothing")
    one, other = ({} if schema is True else schema for schema in (one, other))
    _check_scopes(one, other, path)
    _check_scopes(other, one, path)
    result = {name: value for name, value in one.items() if name not in IGNORED}
    for name, value in other.items():
        if name in IGNORED:
            continue
        result[name] = _both(name, result[name], value, path) if name in result else value
    return result


def merged_within(outer: Schema, inner: list[Any], path: str) -> Schema:
    """A schema and those within it that are about the same value: what they leave unevaluated, it speaks of."""
    unevaluated = {name: value for name, value in outer.items() if name in UNEVALUATED}
    whole = {name: value for name, value in outer.items() if name not in UNEVALUATED}
    for part in inner:
        whole = merged(whole, part, path)
    return {**unevaluated, **whole}


def _both(name: str, one: Any, other: Any, path: str) -> Any:
    if _is_same(one, other):
        return one
    if name in LARGER:
        return max(one, other)
    if name in SMALLER:
        return min(one, other)
    if name == "required":
        return list(dict.fromkeys([*one, *other]))
    if name == "type":
        return _common_types(one, other, path)
    if name == "properties":
        shared = {key: {"allOf": [one[key], other[key]]} for key in one.keys() & other.keys()}
        return {**one, **other, **shared}
    if name == "enum":
        return [value for value in one if any(_is_same(value, allowed) for allowed in other)]
    if name in NESTED:
        return False if one is False or other is False else {"allOf": [one, other]}
    if name == "allOf":
        return [*one, *other]
    raise Unenforceable(path, f"two rules for {name} can't be enforced together")


def _is_same(one: Any, other: Any) -> bool:
    """As JSON values: to Python, true is the number 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _common_types(one: Any, other: Any, path: str) -> list[str]:
    sets = [[types] if isinstance(types, str) else types for types in (one, other)]
    left, right = ({*types, "integer"} if "number" in types else set(types) for types in sets)
    common = left & right
    if not common:
        raise Unenforceable(path, f"nothing is of type {one} and {other}")
    return sorted(common - {"integer"}) if "number" in common else sorted(common)


def _check_scopes(one: Schema, other: Schema, path: str) -> None:
    """Some keywords speak of all that their own schema does not name: beside more names they would mean something else."""
    foreign = other.get("properties", {}).keys() - one.get("properties", {}).keys()
    if foreign and (one.get("additionalProperties", True) is not True or "patternProperties" in one):
        raise Unenforceable(path, "additionalProperties and patternProperties can't be enforced beside the properties of another part")
    foreign = other.get("patternProperties", {}).keys() - one.get("patternProperties", {}).keys()
    if foreign and one.get("additionalProperties", True) is not True:
        raise Unenforceable(path, "additionalProperties can't be enforced beside the patternProperties of another part")
    if "prefixItems" in other and "items" in one and "prefixItems" not in one:
        raise Unenforceable(path, "items can't be enforced beside the prefixItems of another part")
    for name, seen in UNEVALUATED.items():
        beside = sorted(other.keys() & (seen | WITHIN))
        if name in one and beside:
            raise Unenforceable(path, f"{name} can't be enforced beside the {beside[0]} of another part")
