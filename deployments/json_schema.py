"""Makes of a JSON schema one that xgrammar enforces to the letter, or says what can't be enforced. Knows neither xgrammar nor requests.

xgrammar ignores what it can't express: of allOf everything, of anyOf, enum and $ref whatever stands beside them, of a pattern
the lengths, and so on. So keywords are merged, spelled in another way, or refused; what comes out may allow less than what went
in, never more.
"""

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from loray.deployments.json_schema_endings import refuse_endless
from loray.deployments.json_schema_merge import merged, merged_within
from loray.deployments.json_schema_patterns import Unenforceable, string_pattern
from loray.deployments.json_schema_sizes import has_large_integer, property_counts, refuse_large_numbers
from loray.deployments.json_schema_values import any_name_but, integer, number, string

Schema = dict[str, Any]

REFUSED = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef", "$anchor")
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"}
ANNOTATIONS |= {"$comment", "$schema", "$id", "$defs", "definitions", "contentMediaType", "contentEncoding"}
KEYWORDS = {
    "object": ["properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties"],
    "array": ["items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "unevaluatedItems"],
    "string": ["pattern", "minLength", "maxLength", "format"],
    "number": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
}
KEYWORDS["object"].append("unevaluatedProperties")
MAX_SCHEMAS = 30_000  # once references that can't stay ones are replaced: they may lead in circles, or double again and again


def enforceable(schema: Any) -> Schema:
    """Raises Unenforceable."""
    try:
        Draft202012Validator.check_schema(schema)
        return _Rewriter(schema).result()
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path))
        raise Unenforceable(place, error.message) from error
    except RecursionError as error:
        raise Unenforceable("", "is nested too deep") from error


class _Rewriter:
    """Every target of a $ref becomes one of the result's $defs, once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._validator = Draft202012Validator(root)
        self._names: dict[str, str] = {}  # $ref -> its name in the new $defs
        self._new: list[str] = []  # references whose targets are still to be rewritten
        self._num_schemas = 0

    def result(self) -> Schema:
        schema = self._schema(self._root, "")
        defs: dict[str, Schema] = {}
        while self._new:
            uri = self._new.pop()
            defs[self._names[uri]] = self._schema(self._target(uri, ""), uri.removeprefix("#/"))
        refuse_endless(schema, defs)
        return {**schema, "$defs": defs} if defs else schema

    def _count(self) -> None:
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise Unenforceable("", f"has more than {MAX_SCHEMAS} schemas within it once references are replaced by what they refer to")

    def _schema(self, schema: Any, path: str) -> Schema:
        self._count()
        if isinstance(schema, bool):
            if not schema:
                raise Unenforceable(path, "false allows nothing")
            return {}
        if path and "$id" in schema:
            raise Unenforceable(path, "$id is supported at the top only")
        rest = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
        if "enum" in rest or "const" in rest:
            return self._finite(rest, path)
        if "$ref" in rest and len(rest) == 1:
            return {"$ref": self._reference(rest["$ref"], path)}
        for name in REFUSED:
            if name in rest:
                raise Unenforceable(path, f"{name} can't be enforced")
        if "$ref" in rest or "allOf" in rest:
            return self._schema(self._flat(rest, path), path)
        for name in ("anyOf", "oneOf"):
            if name in rest:
                return self._choice(rest, name, path)
        return self._typed(rest, path)

    def _finite(self, schema: Schema, path: str) -> Schema:
        """Whatever stands beside an enumeration only takes values out of it."""
        values = schema.get("enum", [schema.get("const")])
        beside = {name: value for name, value in schema.items() if name != ("enum" if "enum" in schema else "const")}
        if beside:
            validator = self._validator.evolve(schema=beside)
            values = [value for value in values if validator.is_valid(value)]
        if not values:
            raise Unenforceable(path, "none of its values is allowed by what stands beside them")
        if any(has_large_integer(value) for value in values):
            raise Unenforceable(path, "has an integer of more than 64 bits")
        return {"enum": values}

    def _flat(self, schema: Schema, path: str) -> Schema:
        """Without $ref and allOf, unless there are values to choose from."""
        seen: list[Schema] = []
        while ("$ref" in schema or "allOf" in schema) and "enum" not in schema and "const" not in schema:
            if schema in seen:
                raise Unenforceable(path, "$ref: leads in a circle")
            seen.append(schema)
            schema = self._all_of(schema, path)
        return schema

    def _all_of(self, schema: Schema, path: str) -> Schema:
        whole = {name: value for name, value in schema.items() if name not in ("$ref", "allOf")}
        parts = list(schema.get("allOf", []))
        if "$ref" in schema:
            parts.append({"$ref": schema["$ref"]})
        return merged_within(whole, [self._part(part, path) for part in parts], path)

    def _part(self, part: Any, path: str) -> Any:
        """Of an allOf, without $ref."""
        self._count()
        seen: set[str] = set()
        while isinstance(part, dict) and "$ref" in part:
            _refuse_again(part["$ref"], seen, path)
            others = {name: value for name, value in part.items() if name != "$ref"}
            part = merged_within(others, [self._target(part["$ref"], path)], path)
        return part

    def _choice(self, schema: Schema, name: str, path: str) -> Schema:
        branches = schema[name]
        if name == "oneOf":
            for index, branch in enumerate(branches):
                if not all(self._exclude(branch, other, path) for other in branches[:index]):
                    raise Unenforceable(
                        path, "oneOf: its choices don't exclude each other by type, constant or required property; use anyOf"
                    )
        beside = {other: value for other, value in schema.items() if other != name}
        if beside:
            branches = [merged_within(beside, [self._resolved(branch, path)], path) for branch in branches]
        return {"anyOf": [self._schema(branch, f"{path}/{name}/{index}") for index, branch in enumerate(branches)]}

    def _typed(self, schema: Schema, path: str) -> Schema:
        types = schema.get("type") or [kind for kind, names in KEYWORDS.items() if any(name in schema for name in names)]
        if isinstance(types, str):
            types = [types]
        refuse_large_numbers(schema, path)
        rewrite: dict[str, Callable[[Schema, str], Schema]] = {
            "object": self._object,
            "array": self._array,
            "string": string,
            "number": number,
            "integer": integer,
        }
        branches = [rewrite[kind](schema, path) if kind in rewrite else {"type": kind} for kind in types]
        if len(branches) > 1:
            return {"anyOf": branches}
        return branches[0] if branches else {}

    def _array(self, schema: Schema, path: str) -> Schema:
        if schema.get("uniqueItems"):
            raise Unenforceable(path, "uniqueItems can't be enforced")
        if "contains" in schema:
            raise Unenforceable(path, "contains can't be enforced")
        counts: Schema = {name: int(schema[name]) for name in ("minItems", "maxItems") if name in schema}
        prefix = schema.get("prefixItems", [])[: counts.get("maxItems")]
        result: Schema = {"type": "array", **counts}
        if prefix:
            result["prefixItems"] = [self._schema(item, f"{path}/prefixItems/{index}") for index, item in enumerate(prefix)]
        others = schema.get("items", schema.get("unevaluatedItems", not prefix or schema.get("minItems", 0) > len(prefix)))
        result["items"] = False if others is False else self._schema(others, f"{path}/items")
        return result

    def _object(self, schema: Schema, path: str) -> Schema:
        properties = dict(schema.get("properties", {}))
        patterns = schema.get("patternProperties", {})
        is_plain = not properties and not patterns
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties", is_plain))
        if patterns:
            self._check_patterns(schema, others, path)
            others = False
        required = schema.get("required", [])
        for name in required:
            if name not in properties:
                if patterns or others is False and ("additionalProperties" in schema or "unevaluatedProperties" in schema):
                    raise Unenforceable(path, f"required: {name} is none of the properties")
                properties[name] = others if isinstance(others, dict) else {}
            elif properties[name] is False:
                raise Unenforceable(f"{path}/properties/{name}", "false allows nothing, and it is required")
        if others is False:
            properties = {name: value for name, value in properties.items() if value is not False}
        result: Schema = {"type": "object", "additionalProperties": others is not False}
        if properties:
            result["properties"] = {name: self._schema(value, f"{path}/properties/{name}") for name, value in properties.items()}
            result["required"] = list(dict.fromkeys(required))
        if properties and others is not False:  # xgrammar would let a declared name come again, spelled with an escape
            result["patternProperties"] = {any_name_but(properties): self._schema(others, f"{path}/additionalProperties")}
            result["additionalProperties"] = False
        elif isinstance(others, dict):
            result["additionalProperties"] = self._schema(others, f"{path}/additionalProperties")
        if patterns:
            (pattern, value) = next(iter(patterns.items()))
            result["patternProperties"] = {string_pattern(pattern, path): self._schema(value, f"{path}/patternProperties")}
        if "propertyNames" in schema and schema["propertyNames"] is not True:
            if properties or patterns:
                raise Unenforceable(path, "propertyNames can't be enforced beside properties or patternProperties")
            if others is not False:  # else there are no names, but xgrammar would let some come
                place = f"{path}/propertyNames"
                result["propertyNames"] = self._schema(merged({"type": "string"}, schema["propertyNames"], place), place)
        is_open = others is not False or bool(patterns)
        return result | property_counts(schema, is_open, len(result.get("required", [])), path)

    def _check_patterns(self, schema: Schema, others: Any, path: str) -> None:
        """A name that is also declared, or matches twice, would have to satisfy both schemas."""
        if len(schema["patternProperties"]) > 1:
            raise Unenforceable(path, "several patternProperties can't be enforced together")
        if schema.get("properties") and (others is not False or self._matches_pattern(schema)):
            raise Unenforceable(path, "patternProperties need additionalProperties: false, and patterns that match none of the properties")

    def _matches_pattern(self, schema: Schema) -> bool:
        probe = self._validator.evolve(schema={"patternProperties": dict.fromkeys(schema["patternProperties"], False)})
        return not all(probe.is_valid({name: None}) for name in schema["properties"])

    def _reference(self, uri: str, path: str) -> str:
        if uri not in self._names:
            self._target(uri, path)
            self._names[uri] = f"r{len(self._names)}"
            self._new.append(uri)
        return f"#/$defs/{self._names[uri]}"

    def _target(self, uri: str, path: str) -> Any:
        if uri != "#" and not uri.startswith("#/"):
            raise Unenforceable(path, f"$ref: {uri} is not a place in the schema itself, such as #/$defs/name")
        found = self._root
        for part in uri.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise Unenforceable(path, f"$ref: there is no {uri}") from error
        if not isinstance(found, dict | bool):
            raise Unenforceable(path, f"$ref: {uri} is no schema")
        return found

    def _resolved(self, schema: Any, path: str) -> Any:
        seen: set[str] = set()
        while isinstance(schema, dict) and "$ref" in schema and not schema.keys() - ANNOTATIONS - {"$ref"}:
            _refuse_again(schema["$ref"], seen, path)
            schema = self._target(schema["$ref"], path)
        return schema

    def _exclude(self, one: Any, other: Any, path: str) -> bool:
        """Whether it is plain that no value satisfies both."""
        self._count()
        one, other = self._resolved(one, path), self._resolved(other, path)
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        for left, right in ((one, other), (other, one)):
            if "const" in left or "enum" in left:
                return not any(self._validator.evolve(schema=right).is_valid(value) for value in left.get("enum", [left.get("const")]))
        if "type" in one and "type" in other and not _types(one) & _types(other):
            return True
        if _types(one) != {"object"} or _types(other) != {"object"}:
            return False
        mine, theirs = one.get("properties", {}), other.get("properties", {})
        shared = set(one.get("required", [])) & set(other.get("required", [])) & mine.keys() & theirs.keys()
        return any(self._exclude(mine[name], theirs[name], path) for name in shared)


def _types(schema: Schema) -> set[str]:
    types = schema.get("type", [])
    found = {types} if isinstance(types, str) else set(types)
    return found | {"integer"} if "number" in found else found


def _refuse_again(uri: str, seen: set[str], path: str) -> None:
    if uri in seen:
        raise Unenforceable(path, "$ref: leads in a circle")
    seen.add(uri)
