"""Structured output over HTTP, as requested by clients of vLLM and OpenAI."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cedd
from cedd.apps.serve.registry import ModelRegistry
from cedd.constraints import regex
from cedd.data.tokenizers import CharTokenizer, PaddedTokenizer
from cedd.models.folder import ModelFolder, save_folder
from cedd.models.transformer import Transformer, config_from_preset
from cedd.tasks import generate, infill, load
from tests.apps.serve.servers import LOCAL_CLIENT, at_once, connected, httpx, served
from tests.combinations import covering
from tests.tasks.models import save_random

CHARACTERS = 'abcdefghijklmnopqrstuvwxyz .,0123456789{}":-\n'
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
NESTED: dict[str, Any] = {"type": "null"}
for _ in range(60):
    NESTED = {"type": "array", "items": NESTED}
JSON = r'\{"a": ?(1|22)\}'
ASKED = [
    ({"guided_regex": "[ab]{2,5}c"}, "[ab]{2,5}c"),
    ({"guided_choice": ["yes", "no", "maybe"]}, "yes|no|maybe"),
    ({"guided_json": SCHEMA}, JSON),
    ({"guided_json": json.dumps(SCHEMA)}, JSON),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"regex": "a+", "json": None, "disable_any_whitespace": False}}, "a+"),
    ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
    ({"guided_regex": "[ab]{2,5}c", "particles": 2}, "[ab]{2,5}c"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, JSON),
    ({"response_format": {"type": "text"}, "guided_regex": "[xyz]+"}, "[xyz]+"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    """One model with an end token and one without."""
    folder, how = tmp_path_factory.mktemp("served"), {"length": 24, "time_input": "none"}
    padded, plain = PaddedTokenizer(CharTokenizer(CHARACTERS)), CharTokenizer(CHARACTERS)
    made = {
        "padded": save_random(folder / "padded", "absorb", "cedd", tokenizer=padded, **how),
        "plain": save_random(folder / "plain", "absorb", "cedd", tokenizer=plain, **how),
    }
    return ModelRegistry({name: load(Path(path), "cpu") for name, path in made.items()})


@pytest.fixture(scope="module")
def client(models: ModelRegistry) -> Iterator[Any]:
    with connected(models) as (made, _):
        yield made


def texts(reply: Any) -> list[str]:
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


@pytest.mark.parametrize(
    ("model", "asked", "pattern"), covering((model, *row) for row in ASKED for model in ("padded", "plain"))
)
def test_completions_satisfy_constraint(client: Any, model: str, asked: dict[str, Any], pattern: str):
    body = {"model": model, "prompt": "a: ", "n": 3, "max_tokens": 14, "seed": 1, "steps": 8, **asked}
    reply = client.post("/v1/completions", json=body)
    for text in texts(reply):
        assert re.fullmatch(pattern, text), text
    assert {choice["finish_reason"] for choice in reply.json()["choices"]} == {"stop"}


def test_constrained_texts_match_generate(client: Any, models: ModelRegistry):
    body = {"model": "padded", "prompt": "a: ", "n": 2, "max_tokens": 9, "seed": 4, "guided_regex": "[a-c]{2,6}"}
    found = texts(client.post("/v1/completions", json=body))
    expected = generate(models["padded"], 2, length=12, prompt="a: ", constraint=regex("[a-c]{2,6}"), options=_seed(4))
    assert ["a: " + text for text in found] == expected


def _seed(seed: int) -> Any:
    from cedd.samplers import SamplingOptions

    return SamplingOptions(seed=seed)


def test_constraints_with_suffixes_streams_and_blanks(client: Any, models: ModelRegistry):
    body = {"model": "plain", "prompt": "a", "suffix": "z", "max_tokens": 4, "guided_regex": "[bc]{4}", "seed": 0}
    (text,) = texts(client.post("/v1/completions", json=body))
    sent_along = {"guided_decoding_backend": "auto", "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert texts(client.post("/v1/completions", json=body | sent_along)) == [text]
    assert re.fullmatch("[bc]{4}", text)
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert "".join(one["choices"][0]["text"] for one in events) == text
    reply = client.post(
        "/infill", json={"model": "plain", "text": "a ____ b ____", "guided_regex": "[0-9]+", "seed": 3}
    )
    expected = infill(models["plain"], "a ____ b ____", constraint=regex("[0-9]+"), options=_seed(3))
    assert reply.json()["texts"] == expected
    assert re.fullmatch("a [0-9]{4} b [0-9]{4}", expected[0])


def test_concurrent_requests_keep_their_own_constraints(client: Any):
    patterns = ["[ab]{3,9}", "[0-9]{2,8}", "(xy)+", ""] * 3
    found: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        body = {"model": "padded", "n": 2, "max_tokens": 10, "steps": 4, "seed": number}
        own = {"guided_regex": patterns[number]} if patterns[number] else {}
        found[number] = texts(client.post("/v1/completions", json=body | own))

    at_once(ask, len(patterns))
    for number, pattern in enumerate(patterns):
        assert all(re.fullmatch(pattern or ".*", text, re.DOTALL) for text in found[number])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"guided_regex": "a("}, "guided_regex: "),
        ({"guided_regex": r"(?=a)b"}, "guided_regex: "),
        ({"guided_json": {"type": "objekt"}}, "guided_json: "),
        ({"guided_json": "{"}, "guided_json: "),
        ({"guided_json": 3}, "guided_json must be a JSON object or its text"),
        ({"guided_choice": []}, "guided_choice: the choices must be a non-empty list of strings"),
        ({"guided_choice": "yes"}, "guided_choice must be a list of strings"),
        (
            {"guided_regex": "a", "guided_choice": ["b"]},
            "guided_regex and guided_choice cannot be combined; use one of them",
        ),
        (
            {"structured_outputs": {"grammar": "a"}},
            "structured_outputs must have one of the fields json, json_object, regex and",
        ),
        ({"response_format": {"type": "xml"}}, "response_format must be"),
        ({"guided_regex": "((a{0,100}){0,100}){0,100}"}, "guided_regex: the constraint can match a text in too many"),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex: no text satisfies the constraint"),
        ({"guided_regex": 5}, "guided_regex must be a string"),
        ({"guided_json": {"properties": {"age": {"type": "integer", "minimum": "a"}}}}, "properties.age.minimum: must"),
        ({"guided_json": {"type": "array", "maxItems": 100_000}}, "maxItems: must be at most 10,000 (got 100,000)"),
        ({"guided_json": NESTED}, "more than 50 nested levels"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format: JSON",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format must be"),
        ({"response_format": "json_object"}, "response_format must be a JSON object"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs: a regular expression must be a string"),
    ],
)
def test_invalid_constraints_give_one_line_errors(client: Any, body: dict[str, Any], message: str):
    check_rejected(client.post("/v1/completions", json={"model": "plain", **body}), 400, message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"guided_grammar": "root ::= a"}, "unknown field 'guided_grammar'"),
        ({"guided_regex": "a{9}", "max_tokens": 4}, "no text of"),
        ({"guided_regex": "é"}, "no text of"),
        ({"guided_regex": "(ab ){1000}"}, "the shortest takes at least 3,000"),
        ({"prompt": "a", "suffix": "b", "max_tokens": 4, "guided_choice": ["abc"]}, "no text of 4 tokens satisfies"),
        ({"particles": 2}, "particles need a constraint, such as guided_regex"),
        ({"guided_regex": "a+", "particles": 2, "temperature": 0}, "they need a temperature above 0 and top_p 1"),
    ],
)
def test_unsatisfiable_constraints_are_rejected(client: Any, body: dict[str, Any], message: str):
    check_rejected(client.post("/v1/completions", json={"model": "plain", **body}), 422, message)


def check_rejected(reply: Any, status: int, message: str) -> None:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", status)
    assert message in error["message"]
    assert "\n" not in error["message"]


def test_unsatisfiable_blanks_are_rejected(client: Any):
    reply = client.post("/infill", json={"model": "plain", "text": "a ____", "guided_choice": ["abc"]})
    assert reply.status_code == 422
    assert "no text of 4 tokens satisfies" in reply.json()["error"]["message"]


def test_concurrent_requests_keep_their_own_labels(tmp_path: Path):
    """Each request gets the texts of its label, in batches with other labels and with none."""
    network = Transformer(config_from_preset("tiny", vocab_size=30, has_mask=True, length=16, depth=1, labels=2))
    parameters = dict(network.named_parameters())
    torch.manual_seed(0)
    with torch.no_grad():
        for name in ("backbone.conditioning.labels.weight", "backbone.conditioning.modulation.weight", "head.weight"):
            parameters[name].normal_()
    tokenizer, process = CharTokenizer("abcdefghijklmnopqrstuvwxyz .,\n"[:30]), cedd.absorb(30)
    folder = ModelFolder(network, process, cedd.get_method("cedd"), tokenizer, 16)
    save_folder(tmp_path / "labelled", folder, extra={"labels": ["no", "yes"]})
    model = load(tmp_path / "labelled", "cpu")
    asked = [{}, {"label": "no"}, {"label": "yes"}, {"label": "no"}, {"label": "no", "guidance": 3.0}]
    wanted = [model.generate(2, seed=3, steps=8, length=16, **fields) for fields in asked]
    assert len({*map(tuple, wanted)}) == 4
    found: dict[int, list[str]] = {}
    with served(ModelRegistry({"labelled": model})) as (address, _):
        body = {"n": 2, "seed": 3, "steps": 8, "max_tokens": 16}

        def ask(number: int) -> None:
            with httpx.Client(base_url=address, timeout=30, **LOCAL_CLIENT) as client:
                found[number] = texts(client.post("/v1/completions", json=body | asked[number]))

        at_once(ask, len(asked))
        with httpx.Client(base_url=address, timeout=30, **LOCAL_CLIENT) as client:
            reply = client.post("/v1/completions", json=body | {"label": "ye"})
            unconditional = client.post("/v1/completions", json=body | {"guidance": 2})
            by_prompt = texts(
                client.post("/v1/completions", json=body | {"guidance": 2, "prompt": "ab", "max_tokens": 14})
            )
            described = client.get("/openapi.json").text
            (shown,) = client.get("/v1/models").json()["data"]
    assert shown["labels"] == ["no", "yes"]
    assert [found[number] for number in range(len(asked))] == wanted
    assert reply.status_code == 422
    assert "label: invalid choice: 'ye'; did you mean 'yes'?" in reply.json()["error"]["message"]
    assert unconditional.status_code == 422
    message = "guidance needs a condition: a label, a prompt or other given text"
    assert message in unconditional.json()["error"]["message"]
    assert by_prompt == [text[2:] for text in model.generate(2, prompt="ab", guidance=2.0, seed=3, steps=8, length=16)]
    assert "Guidance weight of the label" in described
