"""From a request's fields to work, and from its result to an answer; one function for each address that does work."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Literal

from cedd.data.text import before_first
from cedd.models.loaded import SamplingOptions
from cedd.samplers import GRIDS, text_seeds
from cedd.serve.desk import Work
from cedd.serve.fields import Fields, unprocessable
from cedd.serve.limits import Limits
from cedd.serve.models import TASKS, Shelf
from cedd.serve.work import Correcting, Record, Writing
from cedd.tasks import LanguageModel
from cedd.tasks.infill import parse_template
from cedd.tasks.template import Template

SEEDS = 2**53 - 1
"""The largest seed: a browser's numbers are exact up to here."""
MOST_ALTERNATIVES = 20
MOST_STOPS = 4
WITHOUT = {"best_of": 1, "frequency_penalty": 0, "logit_bias": {}, "logprobs": False, "presence_penalty": 0}
"""Fields of OpenAI's that are refused where they would have an effect, and the values with which they have none."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for, and whether it wants to see the steps.

    Args:
        works: what.
        streams: whether steps are sent.
        chunk: makes an event of a step, or of the answer, of work of this number.
        joined: makes the answer of the answers of all works.
    """

    works: Sequence[Work]
    streams: bool
    chunk: Callable[[int, Record], Record]
    joined: Callable[[Sequence[Record]], Record]


def asked_once(work: Work, streams: bool) -> Asked:
    """A single work: a step as it is, and a result by that name."""
    return Asked([work], streams, lambda _, record: record if "step" in record else {"result": record}, itemgetter(0))


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
    """`POST /v1/completions`: a prompt or several, and what follows each, in OpenAI's form.

    Of P prompts, choices i n to (i + 1) n - 1 follow prompt i; choice j depends on the seed and on j alone.
    """
    name, model = model_of(fields, shelf, "write")
    prompts = fields.texts("prompt", limits.most_texts, limits.most_characters, [""]) or [""]
    suffix = fields.text("suffix", limits.most_characters, "")

    def template(prompt: str, width: int) -> Template:
        return Template.of([prompt, width, *([suffix] if suffix else [])], model.tokenizer)

    given = [template(prompt, 0).width for prompt in prompts]
    if (room := model.length - max(given)) < 1:
        unprocessable(f"the prompt has {max(given)} tokens, and the model reads {model.length}; shorten it")
    why = f": the prompt has {max(given)} tokens, and the model reads {model.length}" if max(given) else ""
    width = fields.whole("max_tokens", 1, room, None, why)
    n = fields.whole("n", 1, limits.most_texts // len(prompts), 1)
    stops = fields.texts("stop", MOST_STOPS, limits.most_characters, [])
    echo, streams = fields.flag("echo"), fields.flag("stream")
    certainty = fields.flag("certainty") and model.method.dynamics.noisy
    options, seed = sampling_of(fields, shelf, name, limits)
    fields.without(**WITHOUT)
    fields.forget("user", "stream_options")
    fields.end()
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
    head |= {"model": name, "seed": seed}
    widths = [width or model.length - tokens for tokens in given]

    def result(number: int, texts: list[str], tokens: list[Record]) -> Record:
        del tokens
        prompt = prompts[number]
        written = [cut(text[len(prompt) : len(text) - len(suffix)], stops) for text in texts]
        choices = [
            {"index": number * n + i, "text": prompt * echo + text, "logprobs": None, "finish_reason": reason}
            for i, (text, reason) in enumerate(written)
        ]
        return {**head, "choices": choices, "usage": usage(given[number], n * widths[number])}

    def chunk(number: int, record: Record) -> Record:
        if "step" not in record:
            return record
        nothing = [{"index": number * n + i, "text": "", "logprobs": None, "finish_reason": None} for i in range(n)]
        return {**head, "choices": nothing, "step": {"prompt": number, **record["step"]}}

    def joined(records: Sequence[Record]) -> Record:
        choices = [choice for record in records for choice in record["choices"]]
        return {**head, "choices": choices, "usage": usage(sum(given), n * sum(widths))}

    seeds = text_seeds(seed, n * len(prompts))
    works = [
        Writing(
            name,
            model,
            template(prompt, widths[number]),
            seeds[number * n : (number + 1) * n],
            options,
            partial(result, number),
            certainty=certainty,
        )
        for number, prompt in enumerate(prompts)
    ]
    return Asked(works, streams, chunk, joined)


def usage(prompt: int, completion: int) -> Record:
    """How many tokens were given and made."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


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
    template = parse_template(text, model.tokenizer, limits.most_blank)
    given = template.given.tolist()

    def result(texts: list[str], tokens: list[Record]) -> Record:
        return {"texts": texts, "model": name, "seed": seed, "given": given, "tokens": tokens}

    work = Writing(name, model, template, text_seeds(seed, n), options, result, alternatives)
    return asked_once(work, streams)


def correction(fields: Fields, shelf: Shelf, limits: Limits) -> Asked:
    """`POST /correct`: a text with mistakes."""
    name, _ = model_of(fields, shelf, "correct")
    text = fields.text("text", limits.most_characters)
    options: dict[str, Any] = {
        "threshold": fields.number("threshold", 0.0, 1.0, None),
        "rate": fields.number("rate", 1e-6, 1.0, None),
        "passes": fields.whole("passes", 1, 16, None),
        "change": fields.choice("change", ("words", "letters", "all"), None),
    }
    ignored = tuple(fields.texts("ignored_words", 1000, 100, [], listed=True))
    suggest, streams = fields.whole("suggest", 1, MOST_ALTERNATIVES, None), fields.flag("stream")
    fields.end()
    model, options = shelf.corrector(name, options), {**options, "ignored_words": ignored}
    return asked_once(Correcting(model, text, options, suggest, shelf.memory, shelf.readers), streams)


ADDRESSES: Mapping[str, Callable[[Fields, Shelf, Limits], Asked]] = {
    "/v1/completions": completion,
    "/infill": infilling,
    "/correct": correction,
}
"""Where work is asked for."""
