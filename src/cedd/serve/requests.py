"""From a request's fields to work, and from its result to an answer; one function for each address that does work."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cedd.data.text import before_first
from cedd.models.loaded import SamplingOptions
from cedd.samplers import GRIDS
from cedd.serve.desk import Work
from cedd.serve.fields import Fields, unprocessable
from cedd.serve.limits import Limits
from cedd.serve.models import TASKS, Shelf
from cedd.serve.work import Correcting, Record, Writing
from cedd.tasks import LanguageModel
from cedd.tasks.infill import blank_template
from cedd.tasks.template import Template

SEEDS = 2**53 - 1
"""The largest seed: a browser's numbers are exact up to here."""
MOST_ALTERNATIVES = 20
MOST_STOPS = 4
WITHOUT = ("best_of", "frequency_penalty", "logit_bias", "logprobs", "presence_penalty")
"""Fields of OpenAI's that are refused where they would have an effect."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for, and whether it wants to see the steps.

    Args:
        work: what.
        streams: whether steps are sent.
        chunk: makes an event of a step, or of the result.
    """

    work: Work
    streams: bool
    chunk: Callable[[Record], Record]


def plain_chunk(record: Record) -> Record:
    """A step as it is, and a result by that name."""
    return record if "step" in record else {"result": record}


def model_of(fields: Fields, shelf: Shelf, task: str) -> tuple[str, LanguageModel]:
    """The model that is asked for, or the default of the task."""
    able = shelf.able(task)
    if not able:
        unprocessable(f"none of the models here can {task}; that takes {TASKS[task]}")
    name = fields.choice("model", able, able[0])
    return name, shelf[name]


def sampling_of(fields: Fields, shelf: Shelf, name: str, limits: Limits) -> tuple[SamplingOptions, int]:
    """How to sample, by the model's own defaults where nothing is given, and the seed, by chance where none is."""
    options = SamplingOptions(
        sampler=fields.choice("sampler", shelf.about[name]["samplers"], "analytic"),
        steps=fields.whole("steps", 1, limits.most_steps, None),
        temperature=fields.number("temperature", 0.0, 10.0, None),
        top_p=fields.number("top_p", 1e-6, 1.0, None),
        grid=fields.choice("grid", GRIDS, "uniform"),
    )
    seed = fields.whole("seed", 0, SEEDS, None)
    return options, secrets.randbelow(2**32) if seed is None else seed


def completion(fields: Fields, shelf: Shelf, limits: Limits) -> Asked:
    """`POST /v1/completions`: a prompt, and what follows it, in OpenAI's form."""
    name, model = model_of(fields, shelf, "write")
    prompts = fields.texts("prompt", 1, limits.most_characters, [""])
    suffix = fields.text("suffix", limits.most_characters, "")

    def template(width: int) -> Template:
        return Template.of([*prompts, width, *([suffix] if suffix else [])], model.tokenizer)

    given = template(0).width
    if (room := model.length - given) < 1:
        unprocessable(f"the prompt has {given} tokens, and the model reads {model.length}; shorten it")
    width = fields.whole("max_tokens", 1, room, room)
    n = fields.whole("n", 1, limits.most_texts, 1)
    stops = fields.texts("stop", MOST_STOPS, limits.most_characters, [])
    echo, streams = fields.flag("echo"), fields.flag("stream")
    options, seed = sampling_of(fields, shelf, name, limits)
    fields.without(*WITHOUT)
    fields.forget("user", "stream_options")
    fields.end()
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
    head |= {"model": name, "seed": seed}
    prompt = "".join(prompts)

    def result(texts: list[str], tokens: list[Record]) -> Record:
        del tokens
        written = [cut(text[len(prompt) : len(text) - len(suffix)], stops) for text in texts]
        choices = [
            {"index": i, "text": prompt * echo + text, "logprobs": None, "finish_reason": reason}
            for i, (text, reason) in enumerate(written)
        ]
        usage = {"prompt_tokens": given, "completion_tokens": n * width}
        return {**head, "choices": choices, "usage": {**usage, "total_tokens": sum(usage.values())}}

    def chunk(record: Record) -> Record:
        nothing = [{"index": i, "text": "", "logprobs": None, "finish_reason": None} for i in range(n)]
        return {**head, "choices": nothing, **record} if "step" in record else record

    return Asked(Writing(name, model, template(width), n, seed, options, result), streams, chunk)


def cut(text: str, stops: list[str]) -> tuple[str, Literal["stop", "length"]]:
    """A text up to the first of the stops that is in it, and why it ends."""
    kept = before_first(text, stops)
    return kept, "length" if kept == text else "stop"


def infilling(fields: Fields, shelf: Shelf, limits: Limits) -> Asked:
    """`POST /infill`: a text with blanks."""
    name, model = model_of(fields, shelf, "fill")
    text = fields.text("text", limits.most_characters)
    n = fields.whole("n", 1, limits.most_texts, 1)
    alternatives, streams = fields.whole("alternatives", 0, MOST_ALTERNATIVES, 0), fields.flag("stream")
    options, seed = sampling_of(fields, shelf, name, limits)
    fields.end()
    template = blank_template(model, text)
    given = template.given.tolist()

    def result(texts: list[str], tokens: list[Record]) -> Record:
        return {"texts": texts, "model": name, "seed": seed, "given": given, "tokens": tokens}

    return Asked(Writing(name, model, template, n, seed, options, result, alternatives), streams, plain_chunk)


def correction(fields: Fields, shelf: Shelf, limits: Limits) -> Asked:
    """`POST /correct`: a text with mistakes."""
    _, model = model_of(fields, shelf, "correct")
    text = fields.text("text", limits.most_characters)
    options: dict[str, Any] = {
        "threshold": fields.number("threshold", 0.0, 1.0, None),
        "rate": fields.number("rate", 1e-6, 1.0, None),
        "passes": fields.whole("passes", 1, 16, None),
        "change": fields.choice("change", ("words", "letters", "all"), None),
        "ignored_words": tuple(fields.texts("ignored_words", 1000, 100, [])),
    }
    suggest, streams = fields.whole("suggest", 1, MOST_ALTERNATIVES, None), fields.flag("stream")
    fields.end()
    return Asked(Correcting(model, text, options, suggest, shelf.memory, shelf.readers), streams, plain_chunk)


ADDRESSES: Mapping[str, Callable[[Fields, Shelf, Limits], Asked]] = {
    "/v1/completions": completion,
    "/infill": infilling,
    "/correct": correction,
}
"""Where work is asked for."""
