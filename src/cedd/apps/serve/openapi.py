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
    "alternatives": "Number of alternatives for each token in a blank. Not available for block diffusion models.",
    "certainty": "Whether the steps of a stream include the probability with which each token was predicted.",
    "change": "letters: only letters without accent may change. all: any character may change (engine letters).",
    "echo": "Whether the returned text includes the prompt.",
    "engine": "words: correct English words with a lexicon. letters: correct letters. Default: the model's own.",
    "grid": "Time grid of the steps. Default: that of the model's method.",
    "guidance": "Guidance weight of the label, or without a label of the prompt or given text. 1 is no guidance.",
    "guided_choice": "Generate one of these texts.",
    "guided_json": "Generate JSON that is valid under this schema.",
    "guided_regex": "Generate a text that this regular expression matches as a whole.",
    "ignored_words": "Words to treat as correct.",
    "label": "Generate a text with this label. The model must have been trained with labels.",
    "logprobs": "Return the log-probability of each token and of this number of the most probable tokens there.",
    "max_completion_tokens": "Same as max_tokens.",
    "max_tokens": "Tokens to generate. Default: 256, or as many as fit into the context of a model without blocks.",
    "messages": "The conversation so far. The last message is the one to answer.",
    "model": "Name of the model. Default: the first one that supports the task.",
    "n": "Number of texts per prompt.",
    "particles": "Weighted candidates per text, so that texts under a constraint follow the model's distribution.",
    "passes": "Passes over the text (engine letters).",
    "prompt": "Text to continue, or a list of texts.",
    "rate": "Expected share of wrong letters (engine letters).",
    "response_format": "json_schema with a schema, json_object or text, as in OpenAI's API.",
    "sampler": "Name of the sampler. /v1/models lists the samplers of each model.",
    "seed": "The same seed gives the same texts. Default: random.",
    "steps": "Number of sampling steps. Default: the model's own.",
    "stop": "String at which the text ends, or a list of strings.",
    "stream": "Whether to stream the response as server-sent events, one per step.",
    "structured_outputs": "json, regex or choice, as guided_json, guided_regex and guided_choice, or json_object.",
    "suffix": "Text that follows the generated text.",
    "suggest": "Number of candidates to list for each suspicious word.",
    "temperature": "Sampling temperature; 0 always takes the most probable token. Default: the model's own.",
    "text": "The text. For /infill, ____ or ____{12} is a blank.",
    "threshold": "Threshold of correction; lower values change less. Default: the model's own.",
    "top_p": "Nucleus sampling: draw from the most probable tokens with this total mass. Default: the model's own.",
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
    failed = {"description": "The error, in OpenAI's format.", "content": _json({"$ref": "#/components/schemas/Error"})}
    paths: JSONObject = {
        path: {"get": {"summary": summary, "responses": {"200": {"description": "OK", "content": anything}}}}
        for path, summary in (
            ("/healthz", "Whether the server is up, and how many requests are waiting and running."),
            ("/v1/models", "The models with their tasks, and the limits of the server."),
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
