"""The description of the server's endpoints, `GET /openapi.json`.

The fields of a request are those that the code of its endpoint reads: it is run with `DescribedFields`, which record
each field with its type, range and default instead of reading a body.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from cedd.apps.serve.endpoints import ENDPOINTS, ParsedRequest
from cedd.apps.serve.limits import Limits, RequestError
from cedd.apps.serve.registry import ModelRegistry
from cedd.apps.serve.request_fields import REQUIRED, RequestFields
from cedd.storage import JSONMapping, JSONObject

Default = TypeVar("Default")

SUMMARIES: Mapping[str, tuple[str, str]] = {
    "/v1/completions": ("write", "Continue prompts, in the form of OpenAI's completions."),
    "/v1/chat/completions": ("chat", "Answer messages, in the form of OpenAI's chat completions."),
    "/infill": ("fill", "Fill the blanks of a text."),
    "/correct": ("correct", "Correct the spelling of a text."),
}
"""The task of each endpoint that runs a model, and its summary."""
MEANINGS: Mapping[str, str] = {
    "alternatives": "Number of alternatives to list for each token in a blank; none by models that write blocks.",
    "certainty": "Whether the steps of a stream have the probability of each token before it was drawn.",
    "change": "letters: only plain letters may change. all: anything may.",
    "echo": "Whether the text begins with the prompt.",
    "engine": "words corrects English words; letters corrects letter by letter.",
    "grid": "Where the steps lie in time. Default: the model's own.",
    "guidance": "Strength of the label, or else of the given text: 1 is the model itself, more overstates it.",
    "guided_choice": "Write one of these texts.",
    "guided_json": "Write JSON that is valid under this schema.",
    "guided_regex": "Write a text that this regular expression matches from beginning to end.",
    "ignored_words": "Words that are correct.",
    "label": "Write a text of this label, with a model that was trained with labels.",
    "logprobs": "Add the log-probability of each token, and of this number of the most probable tokens in its place.",
    "max_completion_tokens": "The same as max_tokens.",
    "max_tokens": "Tokens to write. Default: 256, or as many as fit into the context of a model without blocks.",
    "messages": "The conversation, up to the message to answer.",
    "model": "Name of the model. Default: the first that can do the task.",
    "n": "Number of texts per prompt.",
    "passes": "Passes over the text (engine letters).",
    "prompt": "The beginning of the text, or a list of beginnings.",
    "rate": "Expected share of wrong letters (engine letters).",
    "response_format": "json_schema with a schema, json_object or text, as in OpenAI's API.",
    "sampler": "Name of the sampler; /v1/models lists those of each model.",
    "seed": "The same seed gives the same texts. Default: random.",
    "steps": "Steps from noise to text. Default: the model's own.",
    "stop": "A text at which the result ends, or a list of them.",
    "stream": "Whether the answer is a stream of server-sent events, one per step.",
    "structured_outputs": "An object with json, regex or choice, as guided_json, guided_regex and guided_choice.",
    "suffix": "The end of the text.",
    "suggest": "Number of candidates to list for each suspicious word.",
    "temperature": "Temperature of the token distribution; 0 takes the most probable token. Default: the model's own.",
    "text": "The text. Blanks are written ____ or ____{12}.",
    "threshold": "Lower values change less. Default: the model's own.",
    "top_p": "Draw only from the most probable tokens that together have this probability. Default: the model's own.",
}
"""What each field means."""


class AllRead(Exception):
    """Raised when the last field of a request has been read: nothing is run."""


class DescribedFields(RequestFields):
    """Records the fields that a request may have, as JSON schemas by name."""

    def __init__(self) -> None:
        super().__init__(b"{}")
        self.properties: dict[str, JSONObject] = {}
        self.required: list[str] = []

    def _describe(self, name: str, default: Any, instead: Any, **schema: Any) -> Any:
        """Record a field; the value that the code goes on with."""
        if name in MEANINGS:
            schema["description"] = MEANINGS[name]
        if default is REQUIRED:
            self.required.append(name)
        elif default is not None:
            schema["default"] = default
        self.properties[name] = schema
        return instead if default is REQUIRED else default

    def text(self, name: str, most: int, default: str = REQUIRED) -> str:
        return self._describe(name, default, "", type="string", maxLength=most)

    def texts(
        self, name: str, most: int, longest: int, default: list[str] = REQUIRED, *, listed: bool = False
    ) -> list[str]:
        one = {"type": "string", "maxLength": longest}
        several = {"type": "array", "items": one, "maxItems": most}
        return self._describe(name, default, [], **(several if listed else {"anyOf": [one, several]}))

    def messages(self, name: str, most: int, longest: int) -> list[dict[str, str]]:
        part = {"type": "string", "maxLength": longest}
        one = {"type": "object", "properties": {"role": part, "content": part}, "required": ["role", "content"]}
        self._describe(name, REQUIRED, [], type="array", items=one, minItems=1, maxItems=most)
        return []

    def record(self, name: str, *, or_text: bool = False) -> Any:
        return self._describe(name, None, None, type=["object", "string"] if or_text else "object")

    def integer(self, name: str, low: int, high: int, default: Default = REQUIRED, why: str = "") -> int | Default:
        return self._describe(name, default, low, type="integer", minimum=low, maximum=high)

    def number(self, name: str, low: float, high: float, default: Default = REQUIRED) -> float | Default:
        return self._describe(name, default, low, type="number", minimum=low, maximum=high)

    def boolean(self, name: str) -> bool:
        return self._describe(name, False, False, type="boolean")

    def choice(self, name: str, choices: Collection[str], default: Default = REQUIRED) -> str | Default:
        return self._describe(name, default, next(iter(choices)), type="string", enum=list(choices))

    def end(self) -> None:
        raise AllRead


def request_schema(parse: Callable[..., ParsedRequest], registry: ModelRegistry, limits: Limits) -> JSONObject | None:
    """The JSON schema of the requests to an endpoint; None if no model here can do its task."""
    fields = DescribedFields()
    try:
        parse(fields, registry, limits)
    except AllRead:
        pass
    except RequestError:
        return None
    return {
        "type": "object",
        "properties": fields.properties,
        "required": fields.required,
        "additionalProperties": False,
    }


def openapi_document(registry: ModelRegistry, limits: Limits, version: str) -> JSONObject:
    """The server's endpoints in the OpenAPI format, version 3.1."""
    anything = {"application/json": {"schema": {"type": "object"}}}
    failed = {"description": "Why it could not be done.", "content": _json({"$ref": "#/components/schemas/Error"})}
    paths: JSONObject = {
        path: {"get": {"summary": summary, "responses": {"200": {"description": "OK", "content": anything}}}}
        for path, summary in (
            ("/healthz", "Whether the server runs, and how many requests are waiting and running."),
            ("/v1/models", "The models, what each can do, and the limits."),
        )
    }
    for path, parse in ENDPOINTS.items():
        task, summary = SUMMARIES[path]
        if (schema := request_schema(parse, registry, limits)) is None:
            continue
        schema["properties"]["model"]["enum"] = registry.supporting(task)
        answered = {"description": "The result.", "content": {**anything, "text/event-stream": {}}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": _json(schema)},
                "responses": {"200": answered, "default": failed},
            }
        }
    message = {"type": "object", "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "code": {}}}
    error = {"type": "object", "properties": {"error": message}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "cedd", "version": version},
        "servers": [{"url": "."}],
        "paths": paths,
        "components": {"schemas": {"Error": error}},
    }


def _json(schema: JSONMapping) -> JSONObject:
    return {"application/json": {"schema": schema}}
