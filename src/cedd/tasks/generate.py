"""Generating text, with or without a prompt. Models that write blocks, and autoregressive models, write a text from
left to right. Other models do so beyond their context length: in parts of at most half of it, each given at least as
many tokens before it (tasks/windows.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral

from torch import Tensor

from cedd.constraints import Language
from cedd.data.tokenizers import JSONTokenizer
from cedd.models.loaded_model import LoadedModel
from cedd.network import capabilities_of
from cedd.samplers import Constraint, SamplingOptions
from cedd.samplers.random_numbers import check_shape
from cedd.tasks.template import Blank, Given, Template

ANSWER = 256
"""Default limit on the number of generated tokens."""
Messages = Sequence[Mapping[str, str]]
"""{"role": ..., "content": ...} each."""


def prompt_template(loaded: LoadedModel, text: str, length: int | None) -> Template:
    """A prompt, and a blank up to `length` tokens; by default of at most `ANSWER` tokens, within the model's length."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"prompt must be a string (got {text!r})")
    if length is not None and not (isinstance(length, Integral) and length >= 1):
        raise ValueError(f"length must be a number of tokens, at least 1 (got {length})")
    prompt = Template.of([text, 0], loaded.tokenizer).width
    size = min(loaded.length, prompt + ANSWER) if length is None else length
    check_shape((1, size))
    if prompt > size:
        raise ValueError(f"the prompt has {prompt} tokens, but the text only {size}; shorten it, or ask for more")
    return Template.of([text, size - prompt], loaded.tokenizer)


def chat_template(loaded: LoadedModel, messages: str | Messages, length: int | None = None) -> Template:
    """Messages in the model's chat template, and a blank of `length` tokens for the answer. A str is a single message
    of the user."""
    tokenizer = loaded.tokenizer
    if not isinstance(tokenizer, JSONTokenizer):
        raise ValueError(f"the tokenizer {tokenizer.name} has no chat template; give the prompt as text")
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    if not said or any(not isinstance(one.get(part), str) for one in said for part in ("role", "content")):
        raise ValueError("messages must be a list of at least one {'role': text, 'content': text}")
    ids = tokenizer.encode_chat(said)
    if len(ids) and ids[0] == _start_row(loaded):  # the network reads it anyway
        ids = ids[1:]
    room = loaded.length - len(ids)
    if room < 1 and not loaded.writes_blocks:
        raise ValueError(f"the messages have {len(ids)} tokens, but the model reads {loaded.length}; shorten them")
    size = (ANSWER if loaded.writes_blocks else min(ANSWER, room)) if length is None else length
    if not (isinstance(size, Integral) and size >= 1):
        raise ValueError(f"length must be a number of tokens, at least 1 (got {size})")
    return Template([Given("", ids), Blank(int(size))], tokenizer)


def _start_row(loaded: LoadedModel) -> int | None:
    """The row of the embedding that the network reads before every prompt, if there is one."""
    options = getattr(loaded.model, "options", None)
    row = getattr(options, "start_row", None)
    if loaded.method.dynamics.noisy:
        return row
    return None if capabilities_of(loaded.model).optional_start else getattr(options, "mask_row", row)


def generate_ids(
    loaded: LoadedModel, n: int, length: int | None = None, options: SamplingOptions | None = None
) -> Tensor:
    """n samples of token ids, [n, length]; by default of the model's context length."""
    return prompt_template(loaded, "", loaded.length if length is None else length).draw(loaded, n, options)


def constrained_template(loaded: LoadedModel, prompt: str, length: int | None, language: Language) -> Template:
    """A prompt, and a blank whose text is in a language and may end before the tokens do.

    The default length is that of `prompt_template`. If the language has a longest text, there is room for it, but at
    most for 16 tokens more than twice those of the shortest text.
    """
    template = prompt_template(loaded, prompt, length).in_languages([language], may_end=True)
    if length is not None:
        half, (blank,) = loaded.length // 2, template.blanks
        if length > loaded.length and len(blank) > half and not loaded.writes_blocks:
            raise ValueError(
                f"length must be at most {loaded.length} for a constraint on more than {half} tokens (got {length})"
            )
        return template
    room, before = len(template.spans[0]), template.width - len(template.spans[0])
    texts = prompt_template(loaded, prompt, length).in_languages([language]).spans[0].language.automaton
    if not (lengths := texts.lengths(room)) or texts.is_infinite:
        return template
    most = min(lengths[-1], 2 * lengths[0] + 16)
    longest = max(count for count in lengths if count <= most)
    size = max(1, before + min(longest + bool(loaded.tokenizer.ends), room))
    return prompt_template(loaded, prompt, size).in_languages([language], may_end=True)


def template_of(
    loaded: LoadedModel, prompt: str, length: int | None, constraint: Constraint | Language | None
) -> tuple[Template, Constraint | None]:
    """The template that `generate` fills, with any language in it, and any other constraint."""
    if isinstance(constraint, Language):
        return constrained_template(loaded, prompt, length, constraint), None
    return prompt_template(loaded, prompt, length), constraint


def generate(
    loaded: LoadedModel,
    n: int = 1,
    *,
    length: int | None = None,
    prompt: str = "",
    until_end: bool = False,
    constraint: Constraint | Language | None = None,
    options: SamplingOptions | None = None,
) -> list[str]:
    """n texts of `length` tokens (by default those of `prompt_template`), each beginning with the prompt exactly.

    With a language, what follows the prompt is in it, and by default has the length of `constrained_template`. If
    `until_end`, texts end before their first end-of-text token.
    """
    if until_end:
        options = replace(options or SamplingOptions(), stop=ends_of_text(loaded))
    template, constraint = template_of(loaded, prompt, length, constraint)
    return template.fill(loaded, n, options, constraint)


def chat(
    loaded: LoadedModel,
    messages: str | Messages,
    n: int = 1,
    *,
    length: int | None = None,
    constraint: Language | None = None,
    options: SamplingOptions | None = None,
) -> list[str]:
    """n answers of at most `length` tokens, which end where the model ends them."""
    template = chat_template(loaded, messages, length)
    if constraint is not None:
        template = template.in_languages([constraint], may_end=True)
    return template.fill(loaded, n, replace(options or SamplingOptions(), stop=ends_of_text(loaded)))


def ends_of_text(loaded: LoadedModel) -> tuple[int, ...]:
    """The tokens that end a text, the first of which ends a document."""
    tokenizer = loaded.tokenizer
    if tokenizer.eos_id is None:
        raise ValueError(f"the tokenizer {tokenizer.name} has no end-of-text token, so texts cannot end early")
    return tokenizer.stops if isinstance(tokenizer, JSONTokenizer) else (tokenizer.eos_id,)
