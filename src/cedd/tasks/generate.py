"""Text from nothing, or after a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from cedd.samplers import Fixed, prompt
from cedd.samplers.loop import Callback
from cedd.tasks.setting import Setting, Settings


def prompt_constraint(setting: Setting, text: str, length: int) -> Fixed | None:
    """The samples begin with `text`."""
    if not text:
        return None
    tokens = torch.from_numpy(setting.folder.tokenizer.encode(text))
    if len(tokens) > length:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens, but the model writes {length}; shorten it or train a longer model"
        )
    return prompt(tokens, length)


def generate_ids(
    setting: Setting,
    n: int,
    length: int | None = None,
    text: str = "",
    settings: Settings | None = None,
    callback: Callback | None = None,
) -> Tensor:
    """n samples of token ids, [n, length]."""
    size = setting.folder.length if length is None else length
    setting.check_length(size)
    if n < 1:
        raise ValueError(f"at least one sample must be asked for; got {n}")
    constraint = prompt_constraint(setting, text, size)
    return setting.draw((n, size), settings or Settings(), constraint, callback)


def generate(
    setting: Setting,
    n: int = 1,
    *,
    length: int | None = None,
    prompt: str = "",
    settings: Settings | None = None,
    callback: Callback | None = None,
) -> list[str]:
    """n texts of `length` tokens (by default as many as the model reads), each beginning with the prompt."""
    drawn = generate_ids(setting, n, length, prompt, settings, callback)
    return [setting.folder.tokenizer.decode(row.numpy()) for row in drawn]
