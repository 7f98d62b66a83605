"""The endpoints that run tasks: from the fields of a request to tasks, and from their results to a response."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal

from cedd.apps.serve.correction import CorrectionTask
from cedd.apps.serve.generation import GenerationTask, Record
from cedd.apps.serve.limits import Limits, RequestError
from cedd.apps.serve.pieces import whole_characters
from cedd.apps.serve.registry import TASKS, ModelRegistry
from cedd.apps.serve.request_fields import RequestFields, reject
from cedd.apps.serve.scheduler import Task
from cedd.apps.serve.structured_output import requested_language
from cedd.apps.serve.text_stream import TextStream
from cedd.constraints import Language
from cedd.data.text import before_first
from cedd.data.tokenizers import JSONTokenizer
from cedd.evaluation.likelihood import predicts_tokens
from cedd.names import suggestion
from cedd.samplers import GRIDS, SamplingOptions, get_sampler, text_seeds
from cedd.samplers.guidance import check_guidance
from cedd.spelling.engines import ENGINE_NAMES
from cedd.tasks import LanguageModel
from cedd.tasks.generate import ANSWER, chat_template, constrained_template
from cedd.tasks.infill import parse_template
from cedd.tasks.template import Template

MAX_SEED = 2**53 - 1
"""The largest seed, since integers in browsers are exact up to here."""
MAX_ALTERNATIVES = 20
MAX_LOGPROBS = 5
MAX_STOPS = 4
MAX_MESSAGES = 256
MAX_PARTICLES = 64
MAX_NAME_CHARACTERS = 200
"""Characters of a model's name."""
UNSUPPORTED = {"best_of": 1, "frequency_penalty": 0, "logit_bias": {}, "presence_penalty": 0}
UNSUPPORTED |= {"min_p": 0, "repetition_penalty": 1, "skip_special_tokens": True, "top_k": -1}
"""OpenAI's and vLLM's fields that are not supported, and the values with which they have no effect."""
IGNORED = ("guided_decoding_backend", "stream_options", "user")
"""Their fields that never have an effect on a text."""


@dataclass(frozen=True)
class ParsedRequest:
    """The tasks of a request, and how to respond.

    Args:
        tasks: the work.
        streams: whether steps are sent.
        chunk: makes an event from a record of task number i.
        joined: makes the response from the results of all tasks.
    """

    tasks: Sequence[Task]
    streams: bool
    chunk: Callable[[int, Record], Record]
    joined: Callable[[Sequence[Record]], Record]


def single_task(task: Task, streams: bool) -> ParsedRequest:
    """A request of one task. Its steps are sent as they are, and its result under that name."""

    def chunk(number: int, record: Record) -> Record:
        del number
        return record if "step" in record else {"result": record}

    return ParsedRequest([task], streams, chunk, itemgetter(0))


def requested_model(fields: RequestFields, registry: ModelRegistry, task: str) -> tuple[str, LanguageModel]:
    """The requested model, or the default of the task."""
    able = registry.supporting(task)
    if not able:
        reject(f"no model on this server supports the task {task}, which needs {TASKS[task]}")
    name = fields.text("model", MAX_NAME_CHARACTERS, able[0])
    if name not in registry:
        raise unknown_model(name, registry)
    if name not in able:
        reject(f"the model {name!r} does not support the task {task}; use {', '.join(able)}")
    return name, registry[name]


def unknown_model(name: str, registry: ModelRegistry) -> RequestError:
    """404, with OpenAI's code."""
    name = name[:80]
    return RequestError(404, f"unknown model {name!r}{suggestion(name, registry)}", code="model_not_found")


def requested_sampling(
    fields: RequestFields, registry: ModelRegistry, name: str, limits: Limits
) -> tuple[SamplingOptions, int]:
    """Sampling options, by default the model's, and the seed, by default random."""
    options = SamplingOptions(
        sampler=fields.choice("sampler", registry.info[name]["samplers"], "analytic"),
        steps=fields.integer("steps", 1, limits.max_steps, None),
        temperature=fields.number("temperature", 0.0, 10.0, None),
        top_p=fields.number("top_p", 1e-6, 1.0, None),
        grid=fields.choice("grid", GRIDS, None),
        label=fields.text("label", MAX_NAME_CHARACTERS, "") or None,
        guidance=fields.number("guidance", 0.0, 100.0, None),
        particles=fields.integer("particles", 1, MAX_PARTICLES, None),
    )
    model = registry[name]
    try:
        model.conditions(options.label, 1)
        if options.guidance is not None:
            check_guidance(model.method, model.process)
    except ValueError as error:
        reject(str(error))
    seed = fields.integer("seed", 0, MAX_SEED, None)
    return options, secrets.randbelow(2**32) if seed is None else seed


def completion(fields: RequestFields, registry: ModelRegistry, limits: Limits) -> ParsedRequest:
    """`POST /v1/completions`: continuations of one or several prompts, in OpenAI's form.

    Choices i n to (i + 1) n - 1 continue prompt i. Choice j depends on the seed and on j alone.
    """
    name, model = requested_model(fields, registry, "write")
    prompts = fields.texts("prompt", limits.max_texts, limits.max_characters, [""]) or [""]
    suffix = fields.text("suffix", limits.max_characters, "")
    language = requested_language(fields, limits)

    def template(prompt: str, width: int) -> Template:
        made = Template.of([prompt, width, *([suffix] if suffix else [])], model.tokenizer)
        return made if language is None else made.in_languages([language], may_end=not suffix)

    given = [Template.of([prompt, 0, suffix], model.tokenizer).width for prompt in prompts]
    rooms = [limits.max_blank_tokens if model.writes_blocks else model.length - tokens for tokens in given]
    if (room := min(rooms)) < 1:
        reject(f"the prompt has {max(given)} tokens but the model's context is {model.length}; shorten it")
    why = f": the prompt has {max(given)} tokens and the model's context is {model.length}" if max(given) else ""
    width = fields.integer("max_tokens", 1, room, None, "" if model.writes_blocks else why)
    n = fields.integer("n", 1, limits.max_texts // len(prompts), 1)
    stops = fields.texts("stop", MAX_STOPS, limits.max_characters, [])
    echo, streams = fields.boolean("echo"), fields.boolean("stream")
    certainty = fields.boolean("certainty") and model.method.dynamics.noisy
    options, seed = requested_sampling(fields, registry, name, limits)
    options = replace(options, stop=end_tokens(model))
    fields.refuse_unsupported(**UNSUPPORTED)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS, None)
    fields.ignore(*IGNORED)
    fields.end()
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
    head |= {"model": name, "seed": seed}
    widths = [width or min(ANSWER, most) for most in rooms]
    if language is not None and not suffix:
        widths = [constrained_width(model, *each, language, width) for each in zip(prompts, given, strict=True)]
    if logprobs is not None:
        check_logprobs(model, name, max(sum(each) for each in zip(given, widths, strict=True)))
    monotone = get_sampler(options.sampler, model.method).tokens_are_final(model.method, model.process)
    shown_ends = [*stops, *texts_of(options.stop, model)]
    monotone = monotone and language is None  # tokens after the end of a text are not part of it
    sent = [TextStream(prompt, echo, shown_ends, monotone) for prompt in prompts for _ in range(n)]

    def result(number: int, texts: list[str], tokens: list[Record]) -> Record:
        prompt = prompts[number]
        parts = [text[len(prompt) : len(text) - len(suffix)] for text in texts]
        written = [
            cut(text, stops, one.get("written"), language is not None) for text, one in zip(parts, tokens, strict=True)
        ]
        first = 0 if echo else given[number]
        choices = [
            {
                "index": number * n + i,
                "text": prompt * echo + text,
                "logprobs": logprobs_of(one, first, len(prompt * echo + text), bool(logprobs)),
                "finish_reason": reason,
            }
            for i, ((text, reason), one) in enumerate(zip(written, tokens, strict=True))
        ]
        return {**head, "choices": choices, "usage": usage(given[number], token_count(tokens, widths[number]))}

    def chunk(number: int, record: Record) -> Record:
        if "step" not in record:
            choices = [{**one, "text": sent[one["index"]].rest(one["text"])} for one in record["choices"]]
            return {**record, "choices": choices}
        texts = new_texts(sent[number * n : (number + 1) * n], record["step"])
        choices = [
            {"index": number * n + i, "text": text, "logprobs": None, "finish_reason": None}
            for i, text in enumerate(texts)
        ]
        return {**head, "choices": choices, "step": {"prompt": number, **record["step"]}}

    def joined(records: Sequence[Record]) -> Record:
        choices = [choice for record in records for choice in record["choices"]]
        counts = [record["usage"]["completion_tokens"] for record in records]
        return {**head, "choices": choices, "usage": usage(sum(given), sum(counts))}

    for prompt, one in zip(prompts, widths, strict=True):
        check_condition(options, template(prompt, one), model)
    seeds = text_seeds(seed, n * len(prompts))
    tasks = [
        GenerationTask(
            name,
            model,
            check_spans(template(prompt, widths[number])),
            seeds[number * n : (number + 1) * n],
            options,
            partial(result, number),
            certainty=certainty,
            logprobs=logprobs,
        )
        for number, prompt in enumerate(prompts)
    ]
    return ParsedRequest(tasks, streams, chunk, joined)


def new_texts(streams: Sequence[TextStream], step: Record) -> list[str]:
    """Apply a step to the text streams, and return the new text of each."""
    for stream, pieces in zip(streams, step.get("texts", ()), strict=False):
        stream.start(pieces)
    for i, place, piece, *_ in step["edits"]:
        streams[i].edit(place, piece)
    return [stream.advance() for stream in streams]


def check_logprobs(model: LanguageModel, name: str, tokens: int) -> None:
    """Refuse log-probabilities of texts of this number of tokens that a model does not give."""
    if not predicts_tokens(model):
        reject(
            "logprobs need an autoregressive model, or block diffusion in blocks of one token without time input; "
            f"{name} draws tokens in any order, so a token has no probability given those before it"
        )
    if tokens > model.length:
        reject(
            f"logprobs need texts within the model's context of {model.length} tokens (got {tokens}); lower max_tokens"
        )


def logprobs_of(tokens: Record, first: int, characters: int, has_top: bool) -> Record | None:
    """The log-probabilities of the tokens from `first` that begin within this number of characters, in OpenAI's form;
    None if they were not requested."""
    if "logprobs" not in tokens:
        return None
    found: Record = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if has_top else None, "text_offset": []}
    offset = 0
    for text, (value, top) in zip(tokens["pieces"][first:], tokens["logprobs"][first:], strict=True):
        if offset >= characters:
            break
        found["tokens"].append(text or "")
        found["token_logprobs"].append(value)
        if has_top:
            found["top_logprobs"].append(top)
        found["text_offset"].append(offset)
        offset += len(text or "")
    return found


def usage(prompt: int, completion: int) -> Record:
    """The token counts of a completion, in OpenAI's form."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def end_tokens(model: LanguageModel) -> tuple[int, ...]:
    """The tokens at which the model's texts end: those of a tokenizer.json, whose models were trained to end texts."""
    return model.tokenizer.stops if isinstance(model.tokenizer, JSONTokenizer) else ()


def texts_of(tokens: Sequence[int], model: LanguageModel) -> list[str]:
    """What each token looks like in a stream, at the beginning and later."""
    tokenizer = model.tokenizer
    forms = [form([token]) for token in tokens for form in (tokenizer.decode_after, tokenizer.decode)]
    return [text for text in forms if text]


def token_count(tokens: Sequence[Record], width: int) -> int:
    """The number of tokens that were written, of texts of at most `width`."""
    return sum(one["written"][0] if "written" in one else width for one in tokens)


def cut(
    text: str, stops: list[str], written: tuple[int, bool] | None = None, complete: bool = False
) -> tuple[str, Literal["stop", "length"]]:
    """A text up to the first stop in it, and OpenAI's name of the reason why it ends.

    written: the number of its tokens, and whether the last one ends a text.
    complete: whether it ended by itself, as a text in a language does.
    """
    kept = before_first(text, stops)
    ended = complete or kept != text or (written is not None and written[1])
    return kept, "stop" if ended else "length"


def constrained_width(model: LanguageModel, prompt: str, given: int, language: Language, most: int | None) -> int:
    """The tokens of a text in a language after a prompt: at most `most`, or what `generate` chooses. Without a token
    that ends texts it is the largest number of tokens that the language has a text of."""
    try:
        made = constrained_template(model, prompt, most and given + most, language)
        (span,) = made.spans
        lengths = span.language.automaton.lengths(len(span))
        if not lengths:
            span.check()
    except ValueError as error:
        reject(str(error))
    return lengths[-1]


def check_condition(options: SamplingOptions, template: Template, model: LanguageModel) -> None:
    """Refuse guidance without a condition (a label, or given text that masks can replace), and particles without a
    constraint."""
    hides = model.process.has_mask
    if options.guidance is not None and options.label is None and not (hides and bool(template.given.any())):
        kinds = "a label, a prompt or other given text" if hides else "a label"
        reject(f"guidance needs a condition: {kinds}")
    if options.particles is not None and not template.spans:
        reject("particles need a constraint, such as guided_regex")


def check_spans(template: Template) -> Template:
    """The template; refused if a blank has no text that its constraint allows."""
    try:
        for span in template.spans:
            span.check()
    except ValueError as error:
        reject(str(error))
    return template


def chat_completion(fields: RequestFields, registry: ModelRegistry, limits: Limits) -> ParsedRequest:
    """`POST /v1/chat/completions`: answers to messages, in OpenAI's form. Answer i depends on the seed and on i
    alone."""
    name, model = requested_model(fields, registry, "chat")
    messages = fields.messages("messages", MAX_MESSAGES, limits.max_characters)
    room = limits.max_blank_tokens if model.writes_blocks else model.length
    most = fields.integer("max_tokens", 1, room, None)
    most = fields.integer("max_completion_tokens", 1, room, most)
    n = fields.integer("n", 1, limits.max_texts, 1)
    stops = fields.texts("stop", MAX_STOPS, limits.max_characters, [])
    streams = fields.boolean("stream")
    options, seed = requested_sampling(fields, registry, name, limits)
    language = requested_language(fields, limits)
    fields.refuse_unsupported(**UNSUPPORTED, logprobs=False, top_logprobs=0)
    fields.ignore(*IGNORED)
    fields.end()
    template = chat_template(model, messages, most)
    width, given = len(template.blanks[0]), template.blanks[0].start
    if template.width > model.length and not model.writes_blocks:
        reject(f"the messages have {given} tokens and the model's context is {model.length}: too few for {width} more")
    if language is not None:
        template = check_spans(template.in_languages([language], may_end=True))
    check_condition(options, template, model)
    options = replace(options, stop=end_tokens(model))
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": name, "seed": seed}
    monotone = get_sampler(options.sampler, model.method).tokens_are_final(model.method, model.process)
    monotone = monotone and language is None
    before = "".join(whole_characters(model.tokenizer, template.ids[:given].tolist()))
    sent = [TextStream(before, False, [*stops, *texts_of(options.stop, model)], monotone) for _ in range(n)]

    def result(texts: list[str], tokens: list[Record]) -> Record:
        choices = list[Record]()
        for index, (text, one) in enumerate(zip(texts, tokens, strict=True)):
            content, reason = cut(text, stops, one.get("written"), language is not None)
            message = {"role": "assistant", "content": content}
            choices.append({"index": index, "message": message, "logprobs": None, "finish_reason": reason})
        count = usage(given, token_count(tokens, width))
        return {**head, "object": "chat.completion", "choices": choices, "usage": count}

    def chunk(number: int, record: Record) -> Record:
        del number
        own = {**head, "object": "chat.completion.chunk"}
        if "step" not in record:
            ends = [
                {
                    "index": one["index"],
                    "delta": {"content": sent[one["index"]].rest(one["message"]["content"])},
                    "finish_reason": one["finish_reason"],
                }
                for one in record["choices"]
            ]
            return {**own, "choices": ends, "usage": record["usage"]}
        role = {"role": "assistant"} if "texts" in record["step"] else {}
        choices = [
            {"index": i, "delta": {**role, "content": text}, "finish_reason": None}
            for i, text in enumerate(new_texts(sent, record["step"]))
        ]
        return {**own, "choices": choices}

    task = GenerationTask(name, model, template, text_seeds(seed, n), options, result)
    return ParsedRequest([task], streams, chunk, itemgetter(0))


def infilling(fields: RequestFields, registry: ModelRegistry, limits: Limits) -> ParsedRequest:
    """`POST /infill`: fill the blanks of a text."""
    name, model = requested_model(fields, registry, "fill")
    text = fields.text("text", limits.max_characters)
    n = fields.integer("n", 1, limits.max_texts, 1)
    alternatives, streams = fields.integer("alternatives", 0, MAX_ALTERNATIVES, 0), fields.boolean("stream")
    options, seed = requested_sampling(fields, registry, name, limits)
    language = requested_language(fields, limits)
    fields.end()
    template = parse_template(text, model.tokenizer, limits.max_blank_tokens)
    if language is not None:
        template = check_spans(template.in_languages([language] * len(template.blanks)))
    check_condition(options, template, model)
    given = template.given.tolist()

    def result(texts: list[str], tokens: list[Record]) -> Record:
        return {"texts": texts, "model": name, "seed": seed, "given": given, "tokens": tokens}

    task = GenerationTask(name, model, template, text_seeds(seed, n), options, result, alternatives)
    return single_task(task, streams)


def correction(fields: RequestFields, registry: ModelRegistry, limits: Limits) -> ParsedRequest:
    """`POST /correct`: correct the spelling of a text."""
    name, _ = requested_model(fields, registry, "correct")
    text = fields.text("text", limits.max_characters)
    engine = fields.choice("engine", ENGINE_NAMES, registry.engine(name))
    options: dict[str, Any] = {
        "threshold": fields.number("threshold", 0.0, 1.0, None),
        "rate": fields.number("rate", 1e-6, 1.0, None),
        "passes": fields.integer("passes", 1, 16, None),
        "change": fields.choice("change", ("letters", "all"), None),
    }
    ignored = fields.texts("ignored_words", 1000, 100, [], listed=True)
    suggest, streams = fields.integer("suggest", 1, MAX_ALTERNATIVES, None), fields.boolean("stream")
    fields.end()
    options |= {"ignored_words": tuple(ignored)} if ignored else {}
    corrector = registry.corrector(name, engine)
    task = CorrectionTask(corrector, text, engine, options, suggest, registry.memory, registry.reader_pool)
    return single_task(task, streams)


ENDPOINTS: Mapping[str, Callable[[RequestFields, ModelRegistry, Limits], ParsedRequest]] = {
    "/v1/completions": completion,
    "/v1/chat/completions": chat_completion,
    "/infill": infilling,
    "/correct": correction,
}
"""The endpoints that run tasks."""
