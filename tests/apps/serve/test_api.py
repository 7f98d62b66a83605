"""The server over HTTP: answers, streams, limits and error messages."""

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cedd.apps.correct.numpy_network import NumpyNetwork
from cedd.apps.serve.endpoints import completion
from cedd.apps.serve.generation import GenerationTask, StepStream, alternatives, stacked_constraint
from cedd.apps.serve.limits import Limits
from cedd.apps.serve.pieces import TemplatePieces
from cedd.apps.serve.registry import ModelRegistry
from cedd.apps.serve.request_fields import RequestFields
from cedd.apps.serve.scheduler import JobGroup, Scheduler
from cedd.apps.serve.text_stream import TextStream
from cedd.cli import main
from cedd.data.tokenizers import BPETokenizer, ByteTokenizer
from cedd.models.locate import pretrained_root
from cedd.samplers import SAMPLERS, SamplingOptions, text_seeds
from cedd.samplers.feature_cache import FeatureCache
from cedd.tasks import LanguageModel, generate, infill, load, parse_template
from cedd.tasks.generate import prompt_template
from cedd.tasks.template import Template
from tests.apps.serve.servers import LOCAL_CLIENT, apply_edits, at_once, connected, events, httpx, served, until
from tests.tasks.models import save_random
from tests.tasks.test_block_models import save_blocks


def error_message(reply: Any, status: int) -> str:
    """The message of an error reply, whose status must be this one."""
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error"}
    return reply.json()["error"]["message"]


# ----------------------------------------------------------------------------------------------------------------
# Answers


def test_health_and_models(client: Any, registry: ModelRegistry):
    assert client.get("/healthz").json()["status"] == "ok"
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["small", "masks"]
    tasks = {model["id"]: model["tasks"] for model in listed["data"]}
    assert tasks == {"small": ["write", "fill", "correct"], "masks": ["write", "fill"]}
    for model in listed["data"]:
        assert client.get(f"/v1/models/{model['id']}").json() == model
    unknown = client.get("/v1/models/smal")
    assert error_message(unknown, 404) == "unknown model 'smal'; did you mean 'small'?"
    assert unknown.json()["error"]["code"] == "model_not_found"  # as in OpenAI's API
    assert error_message(client.get("/v1/models/"), 404)
    for model in listed["data"]:  # exactly the listed samplers work
        for sampler in SAMPLERS:
            asked = {"model": model["id"], "sampler": sampler, "max_tokens": 4, "steps": 2}
            worked = client.post("/v1/completions", json=asked).status_code == 200
            assert worked == (sampler in model["samplers"])
            with contextlib.nullcontext() if worked else pytest.raises(ValueError):
                generate(registry[model["id"]], length=4, options=SamplingOptions(sampler=sampler, steps=2))


def test_completion_matches_generate(client: Any, registry: ModelRegistry):
    asked = {"model": "small", "prompt": "the ", "max_tokens": 12, "n": 3, "seed": 5, "steps": 6, "temperature": 0.7}
    reply = client.post("/v1/completions", json=asked).json()
    options = SamplingOptions(seed=5, steps=6, temperature=0.7)
    wanted = generate(registry["small"], 3, length=16, prompt="the ", options=options)
    assert ["the " + choice["text"] for choice in reply["choices"]] == wanted
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length"] * 3
    assert reply["usage"] == {"prompt_tokens": 4, "completion_tokens": 36, "total_tokens": 40}
    assert (reply["object"], reply["model"], reply["seed"]) == ("text_completion", "small", 5)


def test_choices_of_several_prompts_match_single_requests_in_order(client: Any, registry: ModelRegistry):
    prompts = ["the ", "a", "the "]
    asked = {"model": "small", "prompt": prompts, "max_tokens": 9, "n": 2, "seed": 5, "steps": 6}
    reply = client.post("/v1/completions", json=asked).json()
    seeds, wanted = text_seeds(5, 6), list[str]()
    for number, prompt in enumerate(prompts):
        options = SamplingOptions(seeds=seeds[2 * number : 2 * number + 2], steps=6)
        wanted += generate(registry["small"], 2, length=len(prompt) + 9, prompt=prompt, options=options)
    assert [prompts[i // 2] + choice["text"] for i, choice in enumerate(reply["choices"])] == wanted
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert reply["usage"] == {"prompt_tokens": 9, "completion_tokens": 54, "total_tokens": 63}
    alone = client.post("/v1/completions", json={**asked, "prompt": "the "}).json()
    assert alone["choices"] == reply["choices"][:2]  # text i of a request depends on its seed and on i
    chunks = list(events(client.post("/v1/completions", json={**asked, "stream": True})))
    found = {choice["index"]: choice["text"] for chunk in chunks if "step" not in chunk for choice in chunk["choices"]}
    assert [found[i] for i in range(6)] == [choice["text"] for choice in reply["choices"]]
    steps = [(chunk["step"]["prompt"], chunk["step"]["step"]) for chunk in chunks if "step" in chunk]
    assert sorted(steps) == [(number, step) for number in range(3) for step in range(8)]
    whole = client.post("/v1/completions", json={"prompt": ["the ", "a"], "steps": 2}).json()  # up to the context
    assert [len(choice["text"]) for choice in whole["choices"]] == [28, 31]


def test_missing_options_use_settings_of_model(client: Any, registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch):
    own = {"steps": 5, "temperature": 0.0}
    monkeypatch.setitem(registry["small"].folder.config, "sampling", own)
    listed = ModelRegistry({"small": registry["small"]}).info["small"]
    assert {name: listed[name] for name in ("steps", "temperature", "top_p")} == {**own, "top_p": 1.0}
    asked = {"model": "small", "prompt": "the ", "max_tokens": 12, "seed": 5}
    reply = client.post("/v1/completions", json=asked).json()
    wanted = generate(registry["small"], length=16, prompt="the ", options=SamplingOptions(seed=5, **own))
    assert ["the " + choice["text"] for choice in reply["choices"]] == wanted
    monkeypatch.delitem(registry["small"].folder.config, "sampling")
    assert generate(registry["small"], length=16, prompt="the ", options=SamplingOptions(seed=5)) != wanted


def test_server_seed_applies_to_requests_without_seed(registry: ModelRegistry):
    asked = {"model": "small", "prompt": "the ", "max_tokens": 12, "steps": 6}
    with connected(registry, seed=5) as (client, _):
        replies = [client.post("/v1/completions", json=asked | seed).json() for seed in ({}, {}, {"seed": 6})]
        assert client.post("/correct", json={"text": "a cqt"}).status_code == 200  # which takes no seed
    assert [reply["seed"] for reply in replies] == [5, 5, 6]
    assert replies[0]["choices"] == replies[1]["choices"] != replies[2]["choices"]


def test_completion_without_seed_returns_used_seed(client: Any):
    asked = {"max_tokens": 8, "steps": 4}
    first = client.post("/v1/completions", json=asked).json()
    again = client.post("/v1/completions", json={**asked, "seed": first["seed"]}).json()
    other = client.post("/v1/completions", json=asked).json()
    assert again["choices"] == first["choices"]
    assert other["seed"] != first["seed"]


def test_completion_with_stop_and_suffix(client: Any):
    asked = {"max_tokens": 20, "seed": 2, "steps": 6, "echo": True, "prompt": "a"}
    whole = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    assert whole.startswith("a")
    assert len(whole) == 21
    cut = client.post("/v1/completions", json={**asked, "stop": ["QQ", whole[9:11]]}).json()["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole[: 1 + whole[1:].index(whole[9:11])]
    between = client.post("/v1/completions", json={**asked, "suffix": " end."}).json()["choices"][0]["text"]
    assert len(between) == 21


@pytest.mark.parametrize(
    ("process", "method"), [("absorb", "cedd"), pytest.param("uniform", "bayes", marks=pytest.mark.slow)]
)
def test_streams_of_block_model_match_generate(tmp_path: Path, process: str, method: str):
    model = load(save_blocks(tmp_path / "blocks", process, method), device="cpu")
    wanted = model.generate(2, length=24, prompt="the ", seed=5)
    asked = {"prompt": "the ", "max_tokens": 20, "n": 2, "seed": 5, "echo": True}
    with connected(ModelRegistry({"blocks": model})) as (client, _):
        several = client.post("/v1/completions", json={**asked, "prompt": ["the ", "the cat a"]}).json()["choices"]
        filled = client.post("/infill", json={"text": "the ____", "alternatives": 2, "seed": 5}).json()
        found, before = streamed(client.post("/v1/completions", json={**asked, "stream": True, "certainty": True}), 2)
        longer = {**asked, "prompt": "the cat sat on the mat and the dog sat there too", "max_tokens": 30, "n": 1}
        long = client.post("/v1/completions", json=longer).json()
        streams, _ = streamed(client.post("/v1/completions", json={**longer, "stream": True}), 1)
        usual = client.post("/v1/completions", json={"prompt": "the ", "steps": 1}).json()["usage"]
        most = client.post("/v1/completions", json={**asked, "max_tokens": 4097})
        guided = {**asked, "guidance": 2.0}
        if process == "absorb":
            towards, _ = streamed(client.post("/v1/completions", json={**guided, "stream": True}), 2)
            assert towards == model.generate(2, length=24, prompt="the ", seed=5, guidance=2.0)
        else:
            assert client.post("/v1/completions", json=guided).status_code == 422  # it has no masks
    assert found == wanted == [choice["text"] for choice in several[:2]]
    assert [len(choice["text"]) for choice in several[2:]] == [29, 29]
    text = long["choices"][0]["text"]  # longer than the context, like its prompt
    assert [text] == streams == model.generate(length=78, prompt=longer["prompt"], seed=5)
    assert long["usage"]["completion_tokens"] == 30
    assert usual["completion_tokens"] == 256
    assert (most.status_code, most.json()["error"]["message"]) == (422, "max_tokens must be an integer from 1 to 4,096")
    assert any(before) == (process == "absorb")
    assert filled["texts"] == [model.infill("the ____", seed=5)]
    assert "alternatives" not in filled["tokens"][0]


def test_guided_blocks_are_batched_by_prompt_length(tmp_path: Path):
    model = load(save_blocks(tmp_path / "blocks"), device="cpu")
    keys = [
        GenerationTask("blocks", model, prompt_template(model, prompt, 24), [1], options, lambda *_: {}).key
        for options in (SamplingOptions(), SamplingOptions(guidance=2.0))
        for prompt in ("the ", "a cat", "any ")
    ]
    assert len(set(keys[:3])) == 1
    assert len(set(keys[3:])) == 2


def test_streamed_steps_lead_to_final_text(client: Any):
    asked = {"model": "small", "prompt": "the ", "max_tokens": 12, "n": 2, "seed": 5, "steps": 6}
    alone = client.post("/v1/completions", json=asked).json()
    reply = client.post("/v1/completions", json={**asked, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *steps, last = events(reply)
    assert [record["step"]["step"] for record in steps] == list(range(8))  # the start, six steps, and the last to t = 0
    assert [record["step"]["t"] for record in steps] == sorted((r["step"]["t"] for r in steps), reverse=True)
    texts = steps[0]["step"]["texts"]
    assert texts[0][:4] == ["t", "h", "e", " "]
    assert steps[0]["step"]["given"] == [0, 1, 2, 3]
    for record in steps[1:]:
        apply_edits(texts, record["step"])
    assert ["".join(text) for text in texts] == ["the " + choice["text"] for choice in alone["choices"]]
    assert last["choices"] == alone["choices"]


def streamed(reply: Any, n: int) -> tuple[list[str], list[str]]:
    """The text of each choice, assembled from the chunks of a stream, and the text before the last chunk."""
    *steps, last = events(reply)
    before = [""] * n
    for chunk in steps:
        for choice in chunk["choices"]:
            before[choice["index"]] += choice["text"]
    return [text + choice["text"] for text, choice in zip(before, last["choices"], strict=True)], before


@pytest.mark.parametrize(
    "sampler",
    [
        *("analytic", "first-hitting", "remask-capped"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("probability", "gibbs")),
    ],
)
def test_text_is_streamed_once_it_is_final(client: Any, sampler: str):
    """With samplers that may change tokens later, all text comes at the end."""
    asked = {"model": "masks", "prompt": "the ", "max_tokens": 24, "n": 3, "seed": 5, "steps": 12, "sampler": sampler}
    whole = [choice["text"] for choice in client.post("/v1/completions", json=asked).json()["choices"]]
    found, before = streamed(client.post("/v1/completions", json={**asked, "stream": True}), 3)
    assert found == whole
    assert any(before) == (sampler in ("analytic", "first-hitting", "probability"))
    _, before = streamed(
        client.post("/v1/completions", json={**asked, "model": "small", "sampler": "analytic", "stream": True}), 3
    )
    assert before == ["", "", ""]  # tokens of a process that shuffles may change until the end


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_text_ends_before_stop(client: Any, echo: bool):
    asked = {"model": "masks", "prompt": "a", "max_tokens": 24, "n": 4, "seed": 5, "steps": 12, "echo": echo}
    whole = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    asked |= {"stop": [whole[9:12], whole[15:17]]}
    choices = client.post("/v1/completions", json=asked).json()["choices"]
    assert choices[0]["finish_reason"] == "stop"
    found, _ = streamed(client.post("/v1/completions", json={**asked, "stream": True}), 4)
    assert found == [choice["text"] for choice in choices]


def test_possible_beginning_of_stop_is_not_streamed():
    stream, text = TextStream("", False, ["</s>", "\n\n"], True), "one\ntwo</</s>three"
    stream.start([None] * (len(text) + 1))
    sent = ""
    for place, letter in enumerate(text):
        stream.edit(place, letter)
        sent += stream.advance()
        assert "one\ntwo</".startswith(sent)
        assert len(sent) >= min(place + 1, 9) - 3
    assert sent + stream.rest("one\ntwo</") == "one\ntwo</"


@pytest.mark.parametrize("name", ["small", "masks"])
def test_certainty_is_probability_of_token_when_drawn(client: Any, registry: ModelRegistry, name: str):
    """Compared with the network's output for the text before each step, at the time of the step."""
    model = registry[name]
    asked = {"model": name, "prompt": "the ", "max_tokens": 12, "n": 2, "seed": 5, "steps": 6, "stream": True}
    plain = events(client.post("/v1/completions", json=asked))
    assert all(len(edit) == 3 for chunk in plain if "step" in chunk for edit in chunk["step"]["edits"])
    first, *steps, _ = events(client.post("/v1/completions", json={**asked, "certainty": True}))
    size, decided = model.process.vocab_size, 0
    rows = [[size if c is None else int(model.tokenizer.encode(c)[0]) for c in text] for text in first["step"]["texts"]]
    x_t, t = torch.tensor(rows), first["step"]["t"]
    for chunk in steps:
        noise = model.process.noise(t)
        with torch.no_grad():
            outputs = model.model(x_t, noise.sigma.float().expand(2)).double()
        law = model.method.parameterization.log_posterior(outputs, x_t, noise.like(x_t)).exp()
        t, x_t = chunk["step"]["t"], x_t.clone()
        for i, place, character, p in chunk["step"]["edits"]:
            x_t[i, place] = size if character is None else int(model.tokenizer.encode(character)[0])
            wanted = None if character is None else float(law[i, place, x_t[i, place]])
            assert p == (None if wanted is None else pytest.approx(wanted, abs=1e-3))
            decided += p is not None
    assert decided >= 24


def test_infill_matches_model_and_has_alternatives(client: Any, registry: ModelRegistry):
    text = "the ____ cat ___{2}."
    asked = {"model": "small", "text": text, "n": 2, "seed": 3, "steps": 5, "alternatives": 4}
    reply = client.post("/infill", json=asked).json()
    assert reply["texts"] == infill(registry["small"], text, 2, options=SamplingOptions(seed=3, steps=5))
    assert reply["given"].count(False) == 6
    for record in reply["tokens"]:
        assert len(record["alternatives"]) == 6
        for found in record["alternatives"]:
            probabilities = [p for _, p in found]
            assert probabilities == sorted(probabilities, reverse=True)
            assert 0 < sum(probabilities) <= 1.0001
    *steps, last = events(client.post("/infill", json={**asked, "stream": True}))
    assert last["result"] == reply
    assert len(steps) == 7


PAGES = {
    "a page": "the cat ____ on the mat. " * 5,
    "a blank at its ends": "____" + "the cat sat on the mat. " * 3 + "____{5}",
    "a blank wider than a window": "the cat ____{90} sat.",
    "nothing but blanks": "____{70}",
    "one token more than fits": "a" * 29 + "____",
    "as many tokens as fit": "a" * 28 + "____",
    "characters that nobody knows": "caf\u00e9 \U0001f600 ____ " * 5 + "\r\n\ud800 end",
}
QUICK_PAGES = ("a page", "as many tokens as fit", "characters that nobody knows")
"""The other pages are slow tests; tests/tasks/test_windows.py fills such texts without a server."""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            pytest.param("small", text, id=name, marks=() if name in QUICK_PAGES else pytest.mark.slow)
            for name, text in PAGES.items()
        ),
        pytest.param("masks", PAGES["a blank wider than a window"], id="by masks", marks=pytest.mark.slow),
    ],
)
def test_infill_of_any_length_matches_model(client: Any, registry: ModelRegistry, name: str, text: str):
    """Also in windows, if the text does not fit: texts for a seed, the steps that lead to them, and alternatives."""

    def ask(**more: Any) -> Any:  # lone surrogates, too
        asked = {"model": name, "text": text, "n": 2, "seed": 3, "steps": 5, "alternatives": 3, **more}
        return client.post("/infill", content=json.dumps(asked), headers={"Content-Type": "application/json"})

    reply = ask().json()
    assert reply["texts"] == infill(registry[name], text, 2, options=SamplingOptions(seed=3, steps=5))
    assert reply["given"] == parse_template(text, registry[name].tokenizer).given.tolist()
    first, *steps, last = events(ask(stream=True))
    assert last["result"] == reply
    times = [record["step"]["t"] for record in (first, *steps)]
    assert times[0] == pytest.approx(1)
    assert times == sorted(times, reverse=True)
    assert [record["step"]["step"] for record in (first, *steps)] == list(range(len(times)))
    shown = first["step"]["texts"]
    for record in steps:
        assert not any(reply["given"][place] for _, place, _ in record["step"]["edits"])
        apply_edits(shown, record["step"])
    assert shown == [record["pieces"] for record in reply["tokens"]]
    for row, written in zip(shown, reply["texts"], strict=True):
        assert "".join(row) == written.replace("\r\n", "\n").encode("utf-8", "replace").decode()
    for record in reply["tokens"]:
        assert len(record["alternatives"]) == reply["given"].count(False)
        assert all(len(found) == 3 and found[0][1] >= found[1][1] for found in record["alternatives"])


def test_infill_of_long_text_matches_command(client: Any, registry: ModelRegistry, capsys: pytest.CaptureFixture[str]):
    text, path = PAGES["a page"], str(registry["masks"].folder.path)
    words = ["infill", path, text, "--n", "2", "--seed", "7", "--top-p", "0.9", "--json", "--device", "cpu"]
    assert main(words) == 0
    asked = {"model": "masks", "text": text, "n": 2, "seed": 7, "top_p": 0.9}
    assert client.post("/infill", json=asked).json()["texts"] == json.loads(capsys.readouterr().out)["texts"]


def test_alternatives_in_long_text_use_surrounding_text(client: Any, registry: ModelRegistry):
    """The text is read in a window of the context length, with the blank in its middle."""
    model, part = registry["masks"], "the cat sat on the mat and ran. "
    text = part * 2 + "_____" + part * 2
    asked = {"model": "masks", "text": text, "seed": 3, "steps": 5, "alternatives": 4}
    reply = client.post("/infill", json=asked).json()
    ids = torch.from_numpy(model.tokenizer.encode(reply["texts"][0]))
    start = 64 - (32 - 5) // 2
    wanted = alternatives(model, ids[start : start + 32], torch.arange(64, 69) - start, 4)
    found = reply["tokens"][0]["alternatives"]
    assert [[text for text, _ in one] for one in found] == [[text for text, _ in one] for one in wanted]
    assert [p for one in found for _, p in one] == pytest.approx([p for one in wanted for _, p in one], abs=2e-5)


def test_given_characters_are_returned_unchanged(client: Any):
    asked = {"model": "small", "text": "café ____", "steps": 3, "seed": 1}
    reply = client.post("/infill", json=asked).json()
    assert reply["texts"][0].startswith("café ")
    assert "".join(reply["tokens"][0]["pieces"]) == reply["texts"][0]
    first, *_ = events(client.post("/infill", json={**asked, "stream": True}))
    assert first["step"]["texts"][0][:5] == list("café ")


def test_given_characters_stay_whole_if_tokens_are_bytes(tmp_path: Path):
    """No character is shown as its separate bytes."""
    model = load(save_random(tmp_path / "bytes", tokenizer=ByteTokenizer()), "cpu")
    with connected(ModelRegistry({"bytes": model})) as (client, _):
        asked = {"text": "a\U0001f600é\ufffd____{2}\u202eb", "steps": 2, "seed": 1, "stream": True}
        first, *_, last = events(client.post("/infill", json=asked))
        noise = client.post("/noise", json={"text": "a\U0001f600"}).json()
    assert noise["tokens"] == ["a", "", "", "", "\U0001f600"]
    given = ["a", "", "", "", "\U0001f600", "", "é", "", "", "\ufffd"]
    for row in (first["step"]["texts"][0], last["result"]["tokens"][0]["pieces"]):
        assert row[:10] == given
        assert row[12:] == ["", "", "\u202e", "b"]


def test_character_of_several_tokens_is_masked_until_complete():
    """It is never shown as a replacement character; when it is complete, it is shown at the last of its tokens."""
    template = Template.of(["a", 6], ByteTokenizer())
    face, mask = list("\U0001f600".encode()), 256
    job: Any = FakeJob()
    steps, sent = StepStream(job, template), job.sent
    states = {
        (97, mask, mask, mask, mask, mask, mask): ["a", *[None] * 6],
        (97, face[0], mask, face[2], mask, mask, 98): ["a", *[None] * 5, "b"],
        (97, *face[:3], mask, mask, 98): ["a", *[None] * 5, "b"],
        (97, *face, mask, 98): ["a", "", "", "", "\U0001f600", None, "b"],
        (97, *face, face[0], 98): ["a", "", "", "", "\U0001f600", "\ufffd", "b"],  # broken indeed
        (97, *face[:2], 99, face[3], 100, 98): ["a", "", "\ufffd", "c", "\ufffd", "d", "b"],
    }
    row: list[str | None] = []
    for number, (ids, pieces) in enumerate(states.items()):
        assert TemplatePieces(template).pieces(ids) == pieces
        steps.show(number, 0.5, torch.tensor([ids]))
        row = sent[-1]["step"]["texts"][0] if number == 0 else row
        for _, place, piece in sent[-1]["step"]["edits"]:
            row[place] = piece
        assert row == pieces


class FakeJob:
    """A fake job."""

    streams, abandoned = True, False

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, step: Any) -> None:
        self.sent.append(step)


def test_word_after_given_space_is_shown_with_space():
    """The pieces join to the text, whether or not the model wrote another space."""
    tokenizer = ByteTokenizer()
    tokenizer.words_begin_with_spaces = True
    template = Template.of(["a ", 2, " b"], tokenizer)
    shown = TemplatePieces(template)
    for written in (b"cd", b" d"):
        ids = [*b"a", *written, *b" b"]
        assert "".join(text or "" for text in shown.pieces(ids)) == template.write(np.array(ids))
    assert shown.pieces([97, 256, 256, 32, 98]) == ["a", None, None, " ", "b"]
    assert [shown.spaced(place, "c") for place in (1, 2)] == [" c", "c"]


class SpaceAndHalf(ByteTokenizer):
    """Bytes, and one more token for a space together with the first byte of an emoji."""

    words_begin_with_spaces = True

    def decode(self, ids: Any, mask: str | None = "") -> str:
        del mask
        return b"".join(b" \xf0" if i == 255 else bytes([i]) for i in ids).decode("utf-8", "replace")


@pytest.mark.parametrize(
    "parts",
    [["a ", 5, " ", 5, " b"], *(pytest.param(p, marks=pytest.mark.slow) for p in ([6, "\u00e9", 4], ["a", 10]))],
)
def test_pieces_always_join_to_text(parts: list[str | int]):
    """Also if a character would span two blanks or begins with the given space. Replacement characters appear only if
    the text has them."""
    template, rng = Template.of(parts, SpaceAndHalf()), np.random.default_rng(0)
    blanks = (~template.given).nonzero().squeeze(1).numpy()
    ids = (
        np.zeros(template.width, dtype=np.int64) if template.constraint is None else template.constraint.tokens.numpy()
    )
    face, kinds = list("\U0001f600".encode()), 0
    for _ in range(300):
        stock = [
            one
            for k in rng.integers(0, 8, len(blanks))
            for one in ([k + 97], [255, *face[1:]], face, [face[k % 4]])[k % 4]
        ]
        ids[blanks] = stock[: len(blanks)]
        text, masked = template.write(ids), ids.copy()
        assert "".join(piece or "" for piece in TemplatePieces(template).pieces(ids.tolist())) == text
        masked[blanks] = 256
        for place in rng.permutation(blanks):
            broken = "\ufffd" in "".join(piece or "" for piece in TemplatePieces(template).pieces(masked.tolist()))
            assert not broken or "\ufffd" in text
            masked[place] = ids[place]
        kinds += "\U0001f600" in text and "\ufffd" not in text
    assert kinds > 5


@pytest.mark.parametrize("parts", [["a ", 9, " ", 7, " b"], ["a", 30]])
def test_edits_match_comparison_of_whole_texts(parts: list[str | int]):
    """Edits found near the changes equal those of a comparison of the whole texts: none is missing or superfluous."""
    template, rng = Template.of(parts, SpaceAndHalf()), np.random.default_rng(1)
    shown, ids = TemplatePieces(template), template.ids.numpy()
    blanks, stock = (~template.given).nonzero().squeeze(1).numpy(), [256, 97, 255, *"\U0001f600".encode()]
    ids[blanks], beside = 256, 0
    for _ in range(500):
        before, places = ids.tolist(), rng.choice(blanks, rng.integers(1, 4))
        ids[places] = rng.choice(stock, len(places))
        now = ids.tolist()
        changed = [place for place in range(len(now)) if now[place] != before[place]]
        edits, was, pieces = shown.edits(before, now, changed), shown.pieces(before), shown.pieces(now)
        assert edits == {i: pieces[i] for i in range(len(now)) if i in changed or was[i] != pieces[i]}
        beside += len(edits) > len(changed)
    assert beside > 50


def test_alternatives_of_masks_are_network_probabilities(registry: ModelRegistry):
    """On absorb: the network's row for the position when it is masked."""
    model = registry["masks"]
    ids = torch.arange(12) % model.process.vocab_size
    (found,) = alternatives(model, ids, torch.tensor([4]), model.process.vocab_size)
    masked = ids.clone()
    masked[4] = model.process.vocab_size
    sigma = model.process.noise(1 / 12).sigma.float()
    with torch.no_grad():
        law = model.model(masked[None], sigma[None])[0, 4].double().softmax(-1)
    wanted = sorted(((p, model.tokenizer.decode([i])) for i, p in enumerate(law.tolist())), reverse=True)
    assert [text for text, _ in found] == [text for _, text in wanted]
    assert [p for _, p in found] == pytest.approx([p for p, _ in wanted], abs=1e-5)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LanguageModel]]:
    """A client of a server with a word-piece model, and the model."""
    tokenizer = BPETokenizer.train(["The cat sat on the mat, and the cat was happy."] * 50, 300)
    made = load(save_random(tmp_path_factory.mktemp("words") / "words", "absorb", "cedd", tokenizer=tokenizer), "cpu")
    with connected(ModelRegistry({"words": made})) as (client, _):
        yield client, made


@pytest.mark.parametrize("block", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_logprobs_are_conditioned_on_previous_tokens(tmp_path: Path, block: int | None):
    """For an autoregressive model and for a model with blocks of one token."""
    if block is None:
        made = load(save_random(tmp_path / "m", "absorb", "ar", length=24), "cpu")
    else:
        plain = load(save_random(tmp_path / "m", "absorb", "cedd", length=24, time_input="none"), "cpu")
        folder = replace(plain.folder, method=plain.method.in_blocks(block))
        made = LanguageModel(folder, plain.device)
        assert made.writes_blocks
    body = {"prompt": "The cat", "max_tokens": 6, "n": 2, "seed": 1, "temperature": 1.5}
    with connected(ModelRegistry({"m": made})) as (client, _):
        echo = {"logprobs": 2, "echo": True}
        more = ({}, {"logprobs": 2}, {"logprobs": 0, "echo": True}, {"logprobs": 2, "stream": True}, echo)
        plain, short, whole, streamed, full = (client.post("/v1/completions", json=body | one) for one in more)
        if block is not None:
            long = client.post("/v1/completions", json=body | {"max_tokens": 30, "logprobs": 1})
            assert long.status_code == 422
            assert "logprobs need texts within the model's context of 24 tokens (got 37)" in long.text
    assert [one["logprobs"] for one in [*events(streamed)][-1]["choices"]] == [
        one["logprobs"] for one in short.json()["choices"]
    ]
    for one in full.json()["choices"]:  # also for the tokens of the prompt
        found = one["logprobs"]
        for token, log_p, top in zip(*(found[name] for name in LOGPROBS[:3]), strict=True):
            assert top[token] == log_p
            assert len(top) >= 2
    plain, short, whole = (one.json()["choices"] for one in (plain, short, whole))
    for one, cut, echoed in zip(plain, short, whole, strict=True):
        assert one["logprobs"] is None
        assert cut["text"] == one["text"] == "".join(cut["logprobs"]["tokens"])
        (expected,) = made.log_likelihood("The cat", [one["text"]])
        assert expected.exact
        assert sum(cut["logprobs"]["token_logprobs"]) == pytest.approx(expected, abs=1e-5)
        assert sum(echoed["logprobs"]["token_logprobs"]) == pytest.approx(
            made.log_likelihood("", [echoed["text"]])[0], abs=1e-5
        )
        assert echoed["logprobs"]["top_logprobs"] is None
        for token, log_p, top, offset in zip(*(cut["logprobs"][name] for name in LOGPROBS), strict=True):
            assert cut["text"][offset:].startswith(token)
            assert 2 <= len(top) <= 3
            assert top[token] == log_p


LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def test_only_spaced_tokens_follow_given_space(words: tuple[Any, LanguageModel]):
    """In the text and in the alternatives, whose probabilities sum to one."""
    client, model = words
    text = "____{2} O ____{2} sat"
    spaced = sorted(model.tokenizer.decode([token]) for token in model.tokenizer.spaced.nonzero()[0].tolist())
    asked = {"text": text, "n": 8, "seed": 3, "steps": 5, "alternatives": len(spaced) + 1}
    reply = client.post("/infill", json=asked).json()
    assert reply["texts"] == infill(model, text, 8, options=SamplingOptions(seed=3, steps=5))
    for written, record in zip(reply["texts"], reply["tokens"], strict=True):
        assert "".join(record["pieces"]) == written
        first, free, second, _ = record["alternatives"]
        assert sorted(text for text, _ in second) == spaced
        assert sorted(text for text, _ in first) == sorted(text.removeprefix(" ") for text in spaced)
        assert len(free) == len(spaced) + 1
        for found in (first, second):
            assert sum(p for _, p in found) == pytest.approx(1, abs=1e-3)
        assert sum(p for _, p in free) < 0.99


def test_batched_texts_keep_their_own_spaces(words: tuple[Any, LanguageModel]):
    tokenizer = words[1].tokenizer
    spaced, plain = (Template.of(parts, tokenizer) for parts in (["a ", 2, "b"], ["a", 2, "b"]))
    held = stacked_constraint([(plain, 1), (spaced, 2)])
    assert held is not None
    assert held.only is not None
    assert held.only.where.tolist() == [[False] * 4, *[[False, True, False, False]] * 2]
    both = stacked_constraint([(plain, 2)])
    assert both is not None
    assert both.only is None


def test_certainty_after_given_space_is_relative_to_spaced_tokens(words: tuple[Any, LanguageModel]):
    client, model = words
    asked = {"prompt": "The ", "max_tokens": 1, "steps": 1, "seed": 1, "stream": True, "certainty": True}
    *steps, _ = events(client.post("/v1/completions", json=asked))
    before, now = next(pair for pair in pairwise(steps) if pair[1]["step"]["edits"])
    ((_, place, piece, p),) = now["step"]["edits"]
    tokenizer, process = model.tokenizer, model.process
    x_t = torch.tensor([[*tokenizer.encode("The").tolist(), process.vocab_size]])
    with torch.no_grad():
        outputs = model.model(x_t, process.noise(before["step"]["t"]).sigma.float()[None])[0, place].double()
    law = outputs.where(torch.from_numpy(tokenizer.spaced), -torch.inf).softmax(-1)
    assert p == pytest.approx(
        float(law[[tokenizer.decode([token]) for token in range(len(law))].index(piece)]), abs=1e-3
    )


def test_correction_matches_model(client: Any, registry: ModelRegistry):
    text = "the cqt sat. \U0001f600 on"
    reply = client.post("/correct", json={"text": text}).json()
    wanted = registry["small"].correct(text)
    assert (reply["text"], reply["original"]) == (wanted.text, text)
    assert [(c["position"], c["after"]) for c in reply["changes"]] == [(c.position, c.after) for c in wanted.changes]
    assert [c["confidence"] for c in reply["changes"]] == pytest.approx([c.confidence for c in wanted.changes])
    *steps, last = events(client.post("/correct", json={"text": text, "stream": True}))
    assert last["result"]["text"] == reply["text"]
    assert steps[-1]["step"]["edits"] == [[c["position"], c["before"], c["after"]] for c in reply["changes"]]


def test_noise_curves_of_every_process(client: Any):
    reply = client.post("/noise", json={"text": "the cat", "seed": 3}).json()
    assert reply["tokens"] == list("the cat")
    assert set(reply["processes"]) == {"absorb", "uniform", "roulette", "hybrid"}
    for name, curves in reply["processes"].items():
        assert (curves["keep"][0], curves["alive"][0]) == (1, 1)
        assert curves["keep"] == sorted(curves["keep"], reverse=True)
        assert all(keep <= alive for keep, alive in zip(curves["keep"], curves["alive"], strict=True))
        assert (curves["alive"][-1] == 1) == (name == "uniform")  # which has no mask
    assert reply["processes"]["absorb"]["keep"] == reply["processes"]["absorb"]["alive"]  # which only masks


# ----------------------------------------------------------------------------------------------------------------
# Invalid requests


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/completions", {"n": 17}, 422, "n must be an integer from 1 to 16"),
        ("/v1/completions", {"steps": 1025}, 422, "steps must be an integer from 1 to 1,024"),
        ("/v1/completions", {"max_tokens": 33}, 422, "max_tokens must be an integer from 1 to 32"),
        ("/v1/completions", {"max_tokens": True}, 422, "max_tokens must be"),
        (
            "/v1/completions",
            {"prompt": "abc", "max_tokens": 30},
            422,
            "to 29: the prompt has 3 tokens and the model's context is 32",
        ),
        ("/v1/completions", {"temperature": -1}, 422, "temperature must be a number from 0 to 10"),
        ("/v1/completions", {"temperature": 10**400}, 422, "temperature must be a number from 0 to 10"),
        ("/correct", {"text": "a", "threshold": -(10**400)}, 422, "threshold must be a number from 0 to 1"),
        ("/v1/completions", {"seed": 2**60}, 422, "seed must be"),
        ("/v1/completions", {"prompt": "a" * 40}, 422, "shorten it"),
        ("/v1/completions", {"prompt": ["a"] * 17}, 422, "prompt has 17 texts; the maximum is 16"),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 9}, 422, "n must be an integer from 1 to 8"),
        ("/v1/completions", {"prompt": ["a", "b" * 33]}, 422, "the prompt has 33 tokens"),
        ("/v1/completions", {"prompt": [1, 2]}, 422, "prompt must be a string or a list of strings"),
        ("/v1/completions", {"stop": {"a": 1}}, 422, "stop must be a string or a list of strings"),
        ("/correct", {"text": "a", "ignored_words": "grammer"}, 422, "ignored_words must be a list of strings"),
        ("/correct", {"text": "a", "ignored_words": ["a", 1]}, 422, "ignored_words must be a list of strings"),
        ("/v1/completions", {"model": "smal"}, 404, "unknown model 'smal'; did you mean 'small'?"),
        ("/infill", {"text": "a ____", "model": "gpt-4"}, 404, "unknown model 'gpt-4'"),
        ("/correct", {"text": "a", "model": "gpt-4"}, 404, "unknown model 'gpt-4'"),
        ("/v1/completions", {"sampler": "first-hitting", "model": "small"}, 422, "sampler: invalid choice"),
        ("/v1/completions", {"logprobs": 5}, 422, "without time input; small draws tokens in any order"),
        ("/v1/completions", {"logprobs": 0}, 422, "logprobs need an autoregressive model"),
        ("/v1/completions", {"logprobs": 6}, 422, "logprobs must be an integer from 0 to 5"),
        ("/v1/completions", {"logprobs": False}, 422, "logprobs must be an integer from 0 to 5"),
        ("/v1/completions", {"frequency_penalty": 1, "best_of": 1}, 422, "frequency_penalty is not supported"),
        ("/v1/completions", {"presence_penalty": 1.0, "logprobs": False}, 422, "presence_penalty is not supported"),
        ("/v1/completions", {"top_k": 40, "guided_decoding_backend": "auto"}, 422, "top_k is not supported"),
        ("/v1/completions", {"max_token": 5}, 422, "did you mean 'max_tokens'?"),
        ("/infill", {"text": "no gap"}, 422, "no blank to fill"),
        ("/infill", {"text": "a ____{2.5}"}, 422, "the blank '____{2.5}' has no width; write ____{12}"),
        ("/infill", {}, 422, "text is required"),
        ("/infill", {"text": "a ____{4000} b ____{97}"}, 422, "the text has 4,097 tokens in blanks; at most 4,096 are"),
        ("/infill", {"text": f"____{{{'9' * 30}}}"}, 422, "a blank is too wide: at most 4,096 tokens are filled"),
        ("/infill", {"text": ""}, 422, "no blank to fill"),
        ("/infill", {"text": "____" + "a" * 16_384}, 413, "text has 16,388 characters; the maximum is 16,384"),
        (
            "/correct",
            {"text": "a", "model": "masks"},
            422,
            "the model 'masks' does not support the task correct; use small",
        ),
        ("/correct", {"text": "a" * 20_000}, 413, "the maximum is 16,384"),
        ("/correct", {"text": "a" * 200_000}, 413, "131,072 bytes"),
        ("/correct", [], 400, "JSON object"),
        ("/noise", {"text": 5}, 422, "text must be a string"),
    ],
)
def test_invalid_requests_give_error_message(client: Any, path: str, body: Any, status: int, said: str):
    assert said in error_message(client.post(path, json=body), status)


def test_unknown_paths_and_methods_are_rejected(client: Any):
    assert error_message(client.get("/../../etc/passwd"), 404)
    assert error_message(client.get("/healthz/"), 404)
    assert error_message(client.get("/v1/completions"), 405)
    assert error_message(client.post("/correct", content=b'{"text": "a"}'), 415)


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_fuzzed_bodies_never_cause_server_error(client: Any, count: int):
    """Random bytes and nearly valid requests: an answer or a 4xx error, never a 500."""
    chance = random.Random(count)
    values: list[Any] = [None, True, -1, 0, 1, 7, 1e308, 2**70, "", "a ____ b", "\ud800", "\x00<script>", [], [[]], {}]
    values += [["a"] * 9, "\u202eabc", "é" * 50, {"a": {"b": []}}, 0.5, "analytic", "small", "words", 10**400]
    names = ["text", "prompt", "model", "n", "steps", "seed", "stop", "max_tokens", "temperature", "top_p", "sampler"]
    names += ["grid", "stream", "suffix", "echo", "alternatives", "threshold", "suggest", "change", "user", "\ud800"]
    bases: dict[str, dict[str, Any]] = {
        "/v1/completions": {"max_tokens": 4, "steps": 2},
        "/infill": {"text": "a ____", "steps": 2},
        "/correct": {"text": "a cqt"},
        "/noise": {"text": "a cat"},
    }
    seen: dict[int, int] = {}
    for _ in range(count):
        path = chance.choice(list(bases))
        if chance.random() < 0.25:
            body = chance.randbytes(chance.randrange(60))
        else:
            changed = {chance.choice(names): chance.choice(values) for _ in range(chance.randrange(3))}
            body = json.dumps({**bases[path], **changed}).encode()
            if chance.random() < 0.3:
                place = chance.randrange(len(body))
                body = body[:place] + chance.randbytes(1) + body[place + chance.randrange(4) :]
        reply = client.post(path, content=body, headers={"Content-Type": "application/json"})
        seen[reply.status_code] = seen.get(reply.status_code, 0) + 1
        if reply.status_code != 200:
            assert error_message(reply, reply.status_code)
    assert {200, 400, 422} <= set(seen) <= {200, 400, 404, 422}
    assert seen[200] > count / 10


def test_internal_error_is_logged_and_reported(client: Any, monkeypatch: pytest.MonkeyPatch):
    said = list[str]()
    monkeypatch.setattr(
        "cedd.apps.serve.scheduler.LOG.error", lambda message, exc_info: said.append(f"{message}: {exc_info}")
    )

    def broken(*asked: object) -> None:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr("cedd.apps.serve.app.noise_curves", broken)
    assert "see the server's log" in error_message(client.post("/noise", json={"text": "a cat"}), 500)
    assert said == ["a request failed: 'nobody thought of this'"]


def test_deeply_nested_json_is_rejected(client: Any):
    body = b'{"text":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    assert error_message(client.post("/correct", content=body, headers={"Content-Type": "application/json"}), 400)


# ----------------------------------------------------------------------------------------------------------------
# Under load


LONG = {"max_tokens": 32, "steps": 1000, "seed": 1, "model": "small"}


def test_full_queue_gives_503_with_retry_after(registry: ModelRegistry):
    with connected(registry, max_queue=2) as (client, scheduler):
        assert isinstance(scheduler, Scheduler)
        with (
            client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as first,
            client.stream("POST", "/v1/completions", json={**LONG, "stream": True, "steps": 999}) as second,
        ):
            assert first.status_code == second.status_code == 200
            refused = client.post("/correct", json={"text": "a"})
            assert "2 requests" in error_message(refused, 503)
            assert int(refused.headers["retry-after"]) > 0
        until(lambda: scheduler.counts == (0, 0))  # both clients disconnected, which ended their runs
        assert client.post("/correct", json={"text": "a"}).status_code == 200


def test_full_queue_of_one_uses_singular_message(registry: ModelRegistry):
    with (
        connected(registry, max_queue=1) as (client, _),
        client.stream("POST", "/v1/completions", json={**LONG, "stream": True}),
    ):
        said = error_message(client.post("/correct", json={"text": "a"}), 503)
    assert said == "the queue is full (1 request is waiting or running); try again in a few seconds"


def test_default_is_first_model_or_first_word_corrector(registry: ModelRegistry):
    english, small = load(pretrained_root() / "english", "cpu"), registry["small"]
    for models in ({"english": english, "small": small}, {"small": small, "english": english}):
        offered = ModelRegistry(models)
        assert [offered.supporting(task)[0] for task in ("write", "fill")] == [next(iter(models))] * 2
        assert offered.supporting("correct") == ["english", "small"]


def test_models_with_same_word_corrector_share_its_network(monkeypatch: pytest.MonkeyPatch):
    """The network is loaded once, not once per model."""
    asked, read = list[NumpyNetwork](), NumpyNetwork.read
    monkeypatch.setattr(NumpyNetwork, "read", lambda network, *given: asked.append(network) or read(network, *given))
    models = {name: load(pretrained_root() / name, "cpu") for name in ("english-char", "english")}
    registry = ModelRegistry(models)
    text = "He had a strang feling that sumthing was rong with teh hous."
    with connected(registry) as (client, _):
        answers, calls = [], []
        for name in models:
            registry.memory = FeatureCache()
            before = len(asked)
            answers.append(client.post("/correct", json={"text": text, "model": name}).json())
            calls.append(len(asked) - before)
    assert answers[0] == answers[1]
    assert answers[0]["changes"]
    assert calls[0] == calls[1] > 0
    assert len(set(map(id, asked))) == 1
    assert registry.corrector("english-char", "letters") is models["english-char"]


def test_disconnected_client_ends_its_run(registry: ModelRegistry):
    with served(registry) as (address, scheduler):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}v1/completions", json=LONG, timeout=0.3, **LOCAL_CLIENT)
        until(lambda: scheduler.counts == (0, 0), 5)
        calls = scheduler.batcher.calls
        assert 0 < calls < 900


def test_request_has_deadline(registry: ModelRegistry):
    with served(registry, timeout=0.2) as (address, _):
        reply = httpx.post(f"{address}v1/completions", json=LONG, **LOCAL_CLIENT)
        assert "0.2 s" in error_message(reply, 504)
        *_, last = events(httpx.post(f"{address}v1/completions", json={**LONG, "stream": True}, **LOCAL_CLIENT))
        assert last["error"]["code"] == 504


def test_running_request_gets_503_at_shutdown(registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cedd.apps.serve.server.GRACE_SECONDS", 0.1)
    replies: list[Any] = []

    def ask() -> None:
        replies.append(httpx.post(f"{address}v1/completions", json=LONG, timeout=30, **LOCAL_CLIENT))

    with served(registry) as (address, scheduler):
        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: scheduler.batcher.calls > 3)
    asking.join(10)
    assert "shutting down" in error_message(replies[0], 503)


def test_concurrent_requests_are_batched_and_keep_their_own_texts(registry: ModelRegistry):
    def ask(i: int) -> None:
        body = {"max_tokens": 10 if i % 2 else 12, "prompt": "ab" if i % 2 else "", "steps": 8 + i % 3, "seed": i}
        found[i] = httpx.post(f"{address}v1/completions", json=body, timeout=30, **LOCAL_CLIENT).json()

    found: dict[int, Any] = {}
    with served(registry) as (address, scheduler):
        at_once(ask, 8)
    for i, reply in found.items():
        options = SamplingOptions(seed=i, steps=8 + i % 3)
        (alone,) = generate(registry["small"], length=12, prompt="ab" if i % 2 else "", options=options)
        assert ("ab" if i % 2 else "") + reply["choices"][0]["text"] == alone
    assert len(found) == 8
    assert scheduler.batcher.calls < scheduler.batcher.sequences / 2


LONG_TEXT = "the cat ____ on the mat. " * 40


def test_concurrent_long_texts_share_network_calls_without_changing_results(registry: ModelRegistry):
    """Also with a text that fits and is as long as a window."""

    def ask(i: int) -> None:
        body = {"model": "masks", "text": texts[i], "steps": 4, "seed": i}
        found[i] = httpx.post(f"{address}infill", json=body, timeout=60, **LOCAL_CLIENT).json()["texts"]

    found: dict[int, Any] = {}
    texts = ["the cat ____ on the mat. " * (3 + i) for i in range(3)] + ["a" * 28 + "____"]
    with served(registry) as (address, scheduler):
        at_once(ask, len(texts))
    for i, text in enumerate(texts):
        assert found[i] == infill(registry["masks"], text, options=SamplingOptions(seed=i, steps=4))
    assert scheduler.batcher.calls < scheduler.batcher.sequences / 1.5


def test_long_infill_stops_on_disconnect_or_deadline(registry: ModelRegistry):
    asked = {"model": "small", "text": LONG_TEXT, "steps": 200, "seed": 1}
    with served(registry) as (address, scheduler):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}infill", json=asked, timeout=0.5, **LOCAL_CLIENT)
        until(lambda: scheduler.counts == (0, 0), 5)
        assert scheduler.batcher.calls > 3
    with served(registry, timeout=0.3) as (address, _):
        assert "0.3 s" in error_message(httpx.post(f"{address}infill", json=asked, **LOCAL_CLIENT), 504)
        *steps, last = events(httpx.post(f"{address}infill", json={**asked, "stream": True}, **LOCAL_CLIENT))
        assert last["error"]["code"] == 504
        assert steps


@pytest.mark.slow
def test_other_requests_are_answered_during_long_infill(registry: ModelRegistry):
    """A text that fits into a window joins the network calls of the windows."""
    asked = {"model": "small", "text": LONG_TEXT, "steps": 200, "seed": 1, "stream": True}
    with connected(registry) as (client, scheduler), client.stream("POST", "/infill", json=asked) as filling:
        until(lambda: scheduler.batcher.calls > 3)
        calls, sequences = scheduler.batcher.calls, scheduler.batcher.sequences
        reply = client.post("/v1/completions", json={"model": "small", "max_tokens": 32, "steps": 50, "seed": 2})
        assert scheduler.batcher.sequences - sequences > scheduler.batcher.calls - calls
        until(lambda: scheduler.counts == (0, 1))  # the long text, still under way
        assert filling.status_code == 200
    options = SamplingOptions(seed=2, steps=50)
    assert [reply.json()["choices"][0]["text"]] == generate(registry["small"], options=options)


def test_max_blank_tokens_can_be_set(registry: ModelRegistry):
    with served(registry, max_blank_tokens=6) as (address, _):
        reply = httpx.post(f"{address}infill", json={"text": "a ____ b ___", "steps": 2}, **LOCAL_CLIENT)
        assert error_message(reply, 422) == "the text has 7 tokens in blanks; at most 6 are filled"
        reply = httpx.post(f"{address}infill", json={"text": "a ___ b ___" + "c" * 50, "steps": 2}, **LOCAL_CLIENT)
        assert reply.status_code == 200
        assert httpx.get(f"{address}v1/models", **LOCAL_CLIENT).json()["limits"]["blank_tokens"] == 6


def test_concurrent_completions_share_batch_and_keep_their_own_steps(registry: ModelRegistry):
    """With equal length and sampling options, for any prompts and numbers of texts: one run, with the calls of one."""

    async def ask() -> list[list[Any]]:
        scheduler, asked_jobs = Scheduler(Limits()), list[JobGroup]()
        for seed, (prompt, n) in enumerate([("", 1), ("ab", 3), ("abcd", 2)]):
            body = {"model": "small", "prompt": prompt, "max_tokens": 12 - len(prompt), "n": n, "steps": 5}
            fields = RequestFields(json.dumps({**body, "seed": seed, "stream": seed == 1}).encode())
            asked = completion(fields, registry, scheduler.limits)
            asked_jobs.append(JobGroup(asked.tasks, 30, asked.streams))
            scheduler.submit(*asked_jobs[-1].jobs)
        scheduler.start()
        records = [[record async for _, record in jobs.records()] for jobs in asked_jobs]
        scheduler.close(1)
        calls.append(scheduler.batcher.calls)
        return records

    calls: list[int] = []
    found = asyncio.run(ask())
    assert calls[0] <= 6  # five steps and the last one, for all three
    for seed, (prompt, n) in enumerate([("", 1), ("ab", 3), ("abcd", 2)]):
        wanted = generate(registry["small"], n, length=12, prompt=prompt, options=SamplingOptions(seed=seed, steps=5))
        assert [prompt + choice["text"] for choice in found[seed][-1]["choices"]] == wanted
    assert [len(records) for records in found] == [1, 8, 1]  # steps only for the streaming request
    texts = found[1][0]["step"]["texts"]
    for record in found[1][1:-1]:
        apply_edits(texts, record["step"])
    assert ["".join(text)[2:] for text in texts] == [choice["text"] for choice in found[1][-1]["choices"]]


def test_max_concurrent_limits_running_requests(registry: ModelRegistry):
    with connected(registry, max_concurrent=1) as (client, scheduler):
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}):
            until(lambda: scheduler.counts == (0, 1))
            with pytest.raises(httpx.ReadTimeout):
                client.post("/correct", json={"text": "a"}, timeout=0.3)
        until(lambda: scheduler.counts == (0, 0))
        assert client.post("/correct", json={"text": "a"}).status_code == 200


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="--max-texts must be above 0"):
        Limits(max_texts=0)
