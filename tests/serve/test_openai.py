"""OpenAI's own client against the server."""

import pytest

from cedd.models.loaded import SamplingOptions
from cedd.serve.models import Shelf
from cedd.tasks import generate

openai = pytest.importorskip("openai", reason="openai is not installed: pip install openai")


@pytest.mark.slow
def test_the_client_of_openai_completes_and_streams(server: tuple[str, object], shelf: Shelf):
    client = openai.OpenAI(base_url=f"{server[0]}v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["small", "masks"]
    asked = {"model": "small", "prompt": "the ", "max_tokens": 12, "n": 2, "seed": 3, "extra_body": {"steps": 6}}
    wanted = generate(shelf["small"], 2, length=16, prompt="the ", options=SamplingOptions(seed=3, steps=6))
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
    with pytest.raises(openai.UnprocessableEntityError, match="max_tokens must be"):
        client.completions.create(model="small", prompt="", max_tokens=1000)
