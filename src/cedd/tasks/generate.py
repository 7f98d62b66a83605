"""Text from nothing, or after a prompt."""

from __future__ import annotations

from torch import Tensor

from cedd.models.loaded import LoadedModel, SamplingOptions
from cedd.samplers.loop import Callback
from cedd.tasks.template import Template


def prompt_template(loaded: LoadedModel, text: str, length: int | None) -> Template:
    """A prompt, and a blank up to `length` tokens; by default up to as many as the model reads."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"a prompt is a text; got {text!r}")
    size = loaded.length if length is None else length
    loaded.check_length(size)
    if (prompt := Template.of([text, 0], loaded.tokenizer).width) > size:
        raise ValueError(
            f"the prompt has {prompt} tokens, but the model writes {size}; shorten it or train a longer model"
        )
    return Template.of([text, size - prompt], loaded.tokenizer)


def generate_ids(
    loaded: LoadedModel, n: int, length: int | None = None, options: SamplingOptions | None = None
) -> Tensor:
    """n samples of token ids, [n, length]."""
    return prompt_template(loaded, "", length).draw(loaded, n, options)


def generate(
    loaded: LoadedModel,
    n: int = 1,
    *,
    length: int | None = None,
    prompt: str = "",
    options: SamplingOptions | None = None,
    callback: Callback | None = None,
) -> list[str]:
    """n texts of `length` tokens (by default as many as the model reads), each beginning with the prompt exactly."""
    return prompt_template(loaded, prompt, length).fill(loaded, n, options, callback)
