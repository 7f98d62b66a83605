"""Chat completions over HTTP, in OpenAI's format."""

from collections.abc import Iterator
from typing import Any

import pytest

from cedd import LanguageModel, import_model
from cedd.apps.serve.registry import ModelRegistry
from tests.apps.serve.servers import events
from tests.apps.serve.test_api import error_message
from tests.tasks.test_chat import published

ASKED = {"messages": [{"role": "user", "content": "w7 w8"}], "max_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, LanguageModel]]]:
    """A client of a server with an autoregressive and a masked model."""
    from tests.apps.serve.servers import connected

    folder = tmp_path_factory.mktemp("chat")
    models = {
        "next": import_model(published(folder / "next", "llama"), device="cpu"),
        "masks": import_model(published(folder / "masks", "llada"), device="cpu", mask_id=20),
    }
    with connected(ModelRegistry(models)) as (client, _):
        yield client, models


@pytest.mark.parametrize("name", ["next", "masks"])
def test_answers_match_model(chats: tuple[Any, dict[str, LanguageModel]], name: str) -> None:
    client, models = chats
    reply = client.post("/v1/chat/completions", json={**ASKED, "model": name, "n": 3}).json()
    assert (reply["object"], reply["model"], reply["seed"]) == ("chat.completion", name, 3)
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert texts == models[name].chat("w7 w8", 3, length=12, seed=3)
    assert {choice["message"]["role"] for choice in reply["choices"]} == {"assistant"}
    ended = [choice["finish_reason"] == "stop" for choice in reply["choices"]]
    lengths = [len(text.split()) for text in texts]
    assert [length < 12 for length in lengths] == ended
    assert reply["usage"]["completion_tokens"] == sum(lengths) + sum(ended)


@pytest.mark.parametrize("name", ["next", "masks"])
def test_streamed_text_matches_answer(chats: tuple[Any, dict[str, LanguageModel]], name: str) -> None:
    client, _ = chats
    asked = {**ASKED, "model": name, "n": 4}
    whole = client.post("/v1/chat/completions", json=asked).json()["choices"]
    chunks = list(events(client.post("/v1/chat/completions", json={**asked, "stream": True})))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    texts, early = [""] * 4, 0
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"]["content"]
        early += sum(len(choice["delta"]["content"]) for choice in chunk["choices"]) if chunk is not chunks[-1] else 0
    assert texts == [choice["message"]["content"] for choice in whole]
    assert early > 0
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    ends = [choice["finish_reason"] for choice in chunks[-1]["choices"]]
    assert ends == [choice["finish_reason"] for choice in whole]


def test_completion_stops_at_end_token_of_model(chats: tuple[Any, dict[str, LanguageModel]]) -> None:
    client, models = chats
    asked = {"model": "next", "prompt": "w7", "max_tokens": 12, "n": 6, "seed": 3}
    choices = client.post("/v1/completions", json=asked).json()["choices"]
    expected = models["next"].generate(6, length=13, prompt="w7", until_end=True, seed=3)
    assert ["w7" + choice["text"] for choice in choices] == expected
    assert {choice["finish_reason"] for choice in choices} == {"stop", "length"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": []}, 'messages must be a list of messages, {"role": "user", "content": "Hello"} each'),
        ({"messages": [{"role": "user", "content": 1}]}, "messages must be a list of messages"),
        ({"max_tokens": 15}, "the messages have 3 tokens and the model's context is 16: too few for 15 more"),
        (
            {"messages": [{"role": "user", "content": "w7 " * 20}]},
            "the messages have 21 tokens, but the model reads 16",
        ),
        ({"tools": []}, "unknown field 'tools'"),
    ],
)
def test_invalid_requests_give_one_line_errors(chats: tuple[Any, Any], change: dict[str, Any], said: str) -> None:
    assert said in error_message(chats[0].post("/v1/chat/completions", json={**ASKED, **change}), 422)


def test_chat_requires_model_with_template(client: Any) -> None:
    reply = client.post("/v1/chat/completions", json=ASKED)
    assert (
        error_message(reply, 422)
        == "no model on this server supports the task chat, which needs a model whose tokenizer has a chat template"
    )
    assert "/v1/chat/completions" not in client.get("/openapi.json").json()["paths"]


def test_openapi_describes_chat_messages(chats: tuple[Any, Any]) -> None:
    client, _ = chats
    described = client.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["messages"]
    assert schema["properties"]["messages"]["items"]["required"] == ["role", "content"]
