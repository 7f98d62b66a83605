"""The fields by which clients of vLLM and OpenAI ask for structured output, as a language.

guided_regex, guided_choice, guided_json             vLLM's
structured_outputs: {"regex" | "choice" | "json"}    vLLM's newer form of the same, or {"json_object": true}
response_format: {"type": "json_schema", "json_schema": {"schema": ...}}, or {"type": "json_object"}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cedd.apps.serve.limits import Limits, RequestError
from cedd.apps.serve.request_fields import RequestFields, reject
from cedd.constraints import Language, choice, json_schema, regex

MAKERS: Mapping[str, Callable[[Any], Language]] = {"regex": regex, "choice": choice, "json": json_schema}
MAX_CHOICES = 1000
ANY_OBJECT = {"type": "object"}
_NAMES = (b"guided_", b"structured_outputs", b"response_format")


def asks_for_structure(body: bytes) -> bool:
    """Whether a request may ask for structured output, which can take a second to compile."""
    return any(name in body for name in _NAMES)


def requested_language(fields: RequestFields, limits: Limits) -> Language | None:
    """The language that a request asks for, if any. An invalid one is refused with status 400, as in vLLM."""
    try:
        return _language(fields, limits)
    except RequestError as error:
        raise RequestError(400, error.message) if error.status == 422 else error from None


def _language(fields: RequestFields, limits: Limits) -> Language | None:
    most, no_choices = limits.max_characters, list[str]()
    choices = fields.texts("guided_choice", MAX_CHOICES, most, no_choices, listed=True)
    given = {
        "guided_regex": ("regex", fields.text("guided_regex", most, "") or None),
        "guided_choice": ("choice", None if choices is no_choices else choices),
        "guided_json": ("json", fields.record("guided_json", or_text=True)),
        "structured_outputs": _structured_outputs(fields.record("structured_outputs")),
        "response_format": _response_format(fields.record("response_format")),
    }
    asked = {name: (kind, value) for name, (kind, value) in given.items() if value is not None}
    if len(asked) > 1:
        reject(f"{' and '.join(asked)} cannot be combined; use one of them")
    for name, (kind, value) in asked.items():
        try:
            made = MAKERS[kind](value)
            _ = made.automaton  # refuses a language without texts
        except ValueError as error:
            reject(f"{name}: {error}")
        return made
    return None


def _structured_outputs(record: Any) -> tuple[str, Any]:
    """The kind of a constraint, and the constraint."""
    if record is None:
        return "", None
    given = {name: value for name, value in record.items() if value not in (None, False)}  # vLLM's defaults
    if given == {"json_object": True}:
        return "json", ANY_OBJECT
    if len(given) != 1 or next(iter(given)) not in MAKERS:
        reject("structured_outputs must have one of the fields json, json_object, regex and choice")
    return next(iter(given.items()))


def _response_format(record: Any) -> tuple[str, Any]:
    """The same; None for plain text."""
    if record is None or (kind := record.get("type")) == "text":
        return "", None
    if kind == "json_object":
        return "json", ANY_OBJECT
    form = record.get("json_schema")
    if kind != "json_schema" or not isinstance(form, dict) or "schema" not in form:
        reject('response_format must be {"type": "json_schema", "json_schema": {"schema": ...}}, json_object or text')
    return "json", form["schema"]
