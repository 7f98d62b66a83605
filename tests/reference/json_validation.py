"""A JSON Schema validator, written directly from the specification."""

import datetime
import re
from typing import Any

FORMATS = {
    "date": datetime.date.fromisoformat,
    "time": lambda text: datetime.time.fromisoformat(text.replace("Z", "+00:00")),
    "date-time": lambda text: datetime.datetime.fromisoformat(text.replace("Z", "+00:00")),
}


def is_type(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        whole = not isinstance(value, float) or value.is_integer()
        return isinstance(value, int | float) and not isinstance(value, bool) and (name == "number" or whole)
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[name])


def is_valid(value: Any, schema: Any, root: Any = None) -> bool:
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    checks = {
        "type": lambda given: any(is_type(value, name) for name in ([given] if isinstance(given, str) else given)),
        "enum": lambda given: any(same(value, each) for each in given),
        "const": lambda given: same(value, given),
        "anyOf": lambda given: any(is_valid(value, each, root) for each in given),
        "oneOf": lambda given: sum(is_valid(value, each, root) for each in given) == 1,
        "allOf": lambda given: all(is_valid(value, each, root) for each in given),
        "$ref": lambda given: is_valid(value, lookup(root, given), root),
    }
    if not all(check(schema[keyword]) for keyword, check in checks.items() if keyword in schema):
        return False
    if isinstance(value, str):
        return valid_string(value, schema)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return valid_number(value, schema)
    if isinstance(value, list):
        return valid_list(value, schema, root)
    return not isinstance(value, dict) or valid_object(value, schema, root)


def lookup(root: Any, reference: str) -> Any:
    for name in reference.removeprefix("#").split("/")[1:]:
        root = root[name]
    return root


def same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def valid_string(value: str, schema: Any) -> bool:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if schema.get("format") in FORMATS:
        try:
            FORMATS[schema["format"]](value)
        except ValueError:
            return False
    return True


def valid_number(value: float, schema: Any) -> bool:
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and not value <= schema.get("exclusiveMinimum", float("-inf"))
        and not value >= schema.get("exclusiveMaximum", float("inf"))
    )


def valid_list(value: list[Any], schema: Any, root: Any) -> bool:
    first = schema.get("prefixItems", [])
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        return False
    if not all(is_valid(each, own, root) for each, own in zip(value, first, strict=False)):
        return False
    return all(is_valid(each, schema.get("items", True), root) for each in value[len(first) :])


def valid_object(value: dict[str, Any], schema: Any, root: Any) -> bool:
    properties = schema.get("properties", {})
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
        return False
    if not all(name in value for name in schema.get("required", [])):
        return False
    others = schema.get("additionalProperties", True)
    return all(is_valid(each, properties.get(name, others), root) for name, each in value.items())
