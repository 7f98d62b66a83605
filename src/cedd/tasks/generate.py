"""Text from nothing, or after a prompt."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from cedd.models.loaded import Setting, Settings
from cedd.samplers.loop import Callback
from cedd.tasks.template import Blank, Template


def prompt_template(setting: Setting, text: str, length: int | None) -> Template:
    """A prompt, and a blank up to `length` tokens; by default up to as many as the model reads."""
    size = setting.folder.length if length is None else length
    setting.check_length(size)
    prompt = Template.of([text], setting.folder.tokenizer)
    if prompt.width > size:
        raise ValueError(
            f"the prompt has {prompt.width} tokens, but the model writes {size}; shorten it or train a longer model"
        )
    return replace(prompt, parts=[*prompt.parts, Blank(size - prompt.width)])


def generate_ids(setting: Setting, n: int, length: int | None = None, settings: Settings | None = None) -> Tensor:
    """n samples of token ids, [n, length]."""
    return prompt_template(setting, "", length).draw(setting, n, settings, None)


def generate(
    setting: Setting,
    n: int = 1,
    *,
    length: int | None = None,
    prompt: str = "",
    settings: Settings | None = None,
    callback: Callback | None = None,
) -> list[str]:
    """n texts of `length` tokens (by default as many as the model reads), each beginning with the prompt exactly."""
    template = prompt_template(setting, prompt, length)
    return [template.write(row.numpy()) for row in template.draw(setting, n, settings, callback)]
