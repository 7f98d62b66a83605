"""The server with OpenAI's Python client."""

import re
from pathlib import Path
from typing import Any

import pytest

from cedd.apps.serve.registry import ModelRegistry
from cedd.samplers import SamplingOptions
from cedd.tasks import generate

openai = pytest.importorskip("openai", reason="openai is not installed: pip install openai")


@pytest.mark.slow
def test_openai_client_completes_and_streams(server: tuple[str, object], registry: ModelRegistry):
    client = openai.OpenAI(base_url=f"{server[0]}v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["small", "masks"]
    assert client.models.retrieve("masks").id == "masks"
    asked = {"model": "small", "prompt": "the ", "max_tokens": 12, "n": 2, "seed": 3, "extra_body": {"steps": 6}}
    wanted = generate(registry["small"], 2, length=16, prompt="the ", options=SamplingOptions(seed=3, steps=6))
    reply = client.completions.create(**asked)
    assert ["the " + choice.text for choice in reply.choices] == wanted
    assert reply.usage.total_tokens == 28
    texts, steps = ["", ""], 0
    for chunk in client.completions.create(**asked, stream=True):
        steps += getattr(chunk, "step", None) is not None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert ["the " + text for text in texts] == wanted
    assert steps == 8
    several = client.completions.create(**{**asked, "prompt": ["the ", "a"]})
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in several.choices[:2]] == [choice.text for choice in reply.choices]
    with pytest.raises(openai.UnprocessableEntityError, match="max_tokens must be"):
        client.completions.create(model="small", prompt="", max_tokens=1000)
    client.close()


@pytest.mark.slow
def test_program_in_serve_guide_works(server: tuple[str, object], capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).parents[3] / "docs" / "guides" / "serve.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(from openai.*?)```", page, re.DOTALL)
    ours = {"http://127.0.0.1:8008/": server[0], "english-char": "small", "max_tokens=64": "max_tokens=28"}
    for theirs, other in ours.items():
        assert theirs in program
        program = program.replace(theirs, other)
    names: dict[str, Any] = {}
    exec(compile(program, "serve.md", "exec"), names)
    names["client"].close()
    assert len(capsys.readouterr().out) == 28 + len("\n")
