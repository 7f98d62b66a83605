"""The OpenAPI description matches what the server accepts."""

from collections.abc import Iterator
from typing import Any

import pytest

from cedd import import_model
from cedd.apps.serve.endpoints import ENDPOINTS
from cedd.apps.serve.limits import Limits
from cedd.apps.serve.openapi import MEANINGS, openapi_document
from cedd.apps.serve.registry import ModelRegistry
from cedd.tasks import load
from tests.tasks.models import save_random
from tests.tasks.test_chat import published

SMALL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"max_tokens": 2, "steps": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w7"}], "max_tokens": 2},
    "/infill": {"text": "a____{2}b", "steps": 1},
    "/correct": {"text": "teh"},
}
"""A small request to each endpoint."""


def properties(described: dict[str, Any], path: str) -> dict[str, Any]:
    content = described["paths"][path]["post"]["requestBody"]["content"]
    return content["application/json"]["schema"]["properties"]


def valid(schema: dict[str, Any]) -> Any:
    """A value that a schema allows."""
    if "anyOf" in schema:
        return "a"
    if "enum" in schema:
        return schema.get("default", schema["enum"][0])
    values = {"string": "a", "array": ["a"], "boolean": False, "integer": 1, "number": 0.1}
    return values.get(str(schema["type"]))


SPECIAL: dict[str, dict[str, Any]] = {
    "guided_regex": {"guided_regex": "a*", "model": "masks"},
    "guided_choice": {"guided_choice": ["aa"], "model": "masks"},
    "guided_json": {"guided_json": {"type": "null"}, "model": "masks"},
    "structured_outputs": {"structured_outputs": {"regex": "a*"}, "model": "masks"},
    "response_format": {"response_format": {"type": "text"}},
    "particles": {"particles": 2, "guided_regex": "a*", "model": "masks"},
    "logprobs": {"logprobs": 1, "model": "next"},
}
"""Requests for fields that only some models support."""


def invalid(schema: dict[str, Any]) -> Any:
    """A value that a schema forbids."""
    if "maximum" in schema:
        return schema["maximum"] + 1
    return 7 if schema.get("type") != "boolean" else "yes"


@pytest.fixture(scope="module")
def described(client: Any) -> dict[str, Any]:
    return client.get("/openapi.json").json()


@pytest.fixture(scope="module")
def client(registry: ModelRegistry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a server whose models together support everything."""
    from tests.apps.serve.servers import connected

    chat = import_model(published(tmp_path_factory.mktemp("chat"), "llada"), device="cpu", mask_id=20)
    following = load(save_random(tmp_path_factory.mktemp("ar") / "ar", "absorb", "ar"), "cpu")
    models = ModelRegistry({"small": registry["small"], "masks": registry["masks"], "chat": chat, "next": following})
    with connected(models) as (made, _):
        yield made


def test_every_endpoint_is_described(described: dict[str, Any]):
    assert described["openapi"].startswith("3.1")
    assert set(described["paths"]) == {"/healthz", "/v1/models", *ENDPOINTS}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_described_fields_are_accepted_and_checked(client: Any, described: dict[str, Any], path: str):
    fields = properties(described, path)
    assert set(fields) <= set(MEANINGS)
    for name, schema in fields.items():
        good = {**SMALL[path], name: SMALL[path].get(name, valid(schema)), **SPECIAL.get(name, {})}
        if "chat" in path:
            good["model"] = "chat"
        reply = client.post(path, json=good)
        reasons = ("is an option of the engine", "no text of", "not trained with labels", "guidance needs a condition")
        understood = any(reason in reply.text for reason in reasons)
        assert reply.status_code == 200 or understood, (name, reply.text)
        assert client.post(path, json={**SMALL[path], name: invalid(schema)}).status_code in (400, 404, 413, 422), name
    refused = client.post(path, json={**SMALL[path], "no_such_field": 1})
    assert refused.status_code == 422


def test_endpoint_without_capable_model_is_left_out(registry: ModelRegistry):
    only_masks = ModelRegistry({"masks": registry["masks"]})
    assert set(openapi_document(only_masks, Limits(), "0")["paths"]) == {
        "/healthz",
        "/v1/models",
        "/v1/completions",
        "/infill",
    }
    assert properties(openapi_document(registry, Limits(), "0"), "/infill")["model"]["enum"] == ["small", "masks"]
