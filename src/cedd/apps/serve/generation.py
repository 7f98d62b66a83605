"""Generation and infilling: a task, its steps, and the probabilities of tokens.

Shapes: B texts, L tokens, P blank tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from cedd.apps.serve.batcher import MAX_CALL_TOKENS, BatchedModel, Fiber
from cedd.apps.serve.pieces import TemplatePieces, piece
from cedd.apps.serve.scheduler import Job
from cedd.evaluation.likelihood import TextLikelihoods
from cedd.models.loaded_model import LoadedModel
from cedd.network import AllowedTokens, Network, Places
from cedd.samplers import Fixed, SamplingOptions
from cedd.spelling.scores import leave_one_out, rate_of_time
from cedd.storage import JSONObject
from cedd.tasks import LanguageModel
from cedd.tasks.template import Template
from cedd.tasks.windows import windows_of_filled_text

Record = JSONObject
TokenLogProbability = tuple[float, dict[str, float]]
"""The log-probability of a token, and those of the most probable tokens at its position, by their texts."""


@dataclass(frozen=True)
class GenerationTask:
    """Texts from a template: a prompt to continue, or a text with blanks.

    Args:
        name: the name of the model.
        model: the model.
        template: the given tokens and the blanks.
        seeds: one per text; a text depends on its own seed only.
        options: how to sample.
        result: makes the response from the texts and their tokens.
        alternatives: number of alternatives for each generated token; none for block diffusion models.
        certainty: whether steps have the probability of each token when it was drawn.
        logprobs: if given, the log-probability of each token and of this number of most probable tokens are added.
    """

    name: str
    model: LanguageModel
    template: Template
    seeds: Sequence[int]
    options: SamplingOptions
    result: Callable[[list[str], list[Record]], Record]
    alternatives: int = 0
    certainty: bool = False
    logprobs: int | None = None

    @property
    def key(self) -> Hashable | None:
        """Texts of the same model, length and options are drawn as one batch. Texts that are filled window by window
        or have a constraint are not: only their forward passes are batched. Blocks that are guided by what is given
        are drawn with others for which the same tokens are given."""
        width, blocks = self.template.width, self.model.writes_blocks
        if self.template.spans or not (width <= self.model.length or blocks):
            return None
        by_prompt = blocks and self.options.guidance is not None and self.options.label is None
        given = tuple(map(bool, self.template.given)) if by_prompt else ()
        return self.name, width, self.options, given

    @property
    def texts(self) -> int:
        return len(self.seeds)

    def run(self, fiber: Fiber, jobs: Sequence[Job]) -> None:
        """Draw the texts of all these jobs, each text by its own seed."""
        tasks = [job.task for job in jobs if isinstance(job.task, GenerationTask)]
        assert len(tasks) == len(jobs)
        loaded, width = fiber.batched(self.model), self.template.width
        seeds = [seed for task in tasks for seed in task.seeds]
        parts = list(pairwise(accumulate((task.texts for task in tasks), initial=0)))
        steps = [
            StepStream(job, task.template, loaded if task.certainty else None)
            for job, task in zip(jobs, tasks, strict=True)
        ]

        def callback(step: int, t: float, x: Tensor) -> None:
            for one, (start, stop) in zip(steps, parts, strict=True):
                one.show(step, t, x[start:stop])

        particles = self.options.particles is not None  # whose steps are not those of a text
        options = replace(self.options, seeds=seeds, callback=None if particles else callback)
        if self.key is None:
            drawn = self.template.draw(loaded, len(seeds), options)
        else:
            held = stacked_constraint([(task.template, task.texts) for task in tasks])
            drawn = loaded.draw((len(seeds), width), options, held)
        for job, task, (start, stop) in zip(jobs, tasks, parts, strict=True):
            if not job.abandoned:
                job.finish(task.response(fiber, loaded, drawn[start:stop]))

    def response(self, fiber: Fiber, loaded: LoadedModel, ids: Tensor) -> Record:
        """The response with the texts of tokens [n, L]."""
        texts, tokens, shown = list[str](), list[Record](), TemplatePieces(self.template)
        for row in ids:
            fiber.yield_turn()
            texts.append(self.template.write(row.numpy(), self.options.stop))
            tokens.append({"pieces": shown.pieces(row.tolist())})
            if self.options.stop:
                tokens[-1]["written"] = self.template.written(row.numpy(), self.options.stop)
            if self.logprobs is not None:
                tokens[-1]["logprobs"] = self._log_probabilities(loaded, row, shown)
        if self.alternatives and not loaded.writes_blocks:
            blanks, only = (~self.template.given).nonzero().squeeze(1), self.template.only
            cuts = windows_of_filled_text(self.template.blanks, self.template.width, loaded.length)
            for record, row in zip(tokens, ids, strict=True):
                found = list[list[list[Any]]]()
                for cut in cuts:
                    places = blanks[(blanks >= cut.first) & (blanks < cut.last)] - cut.start
                    here = slice(cut.start, cut.stop)
                    found += alternatives(loaded, row[here], places, self.alternatives, only and only.of(here))
                pairs = zip(blanks.tolist(), found, strict=True)
                record["alternatives"] = [[[shown.spaced(i, text), p] for text, p in others] for i, others in pairs]
        return self.result(texts, tokens)

    @torch.no_grad()
    def _log_probabilities(self, loaded: LoadedModel, ids: Tensor, shown: TemplatePieces) -> list[TokenLogProbability]:
        """Of each token [L] given those before it, by the model itself: at temperature 1 and without constraint. The
        most probable tokens are preceded by the token itself, as in OpenAI's API."""
        assert self.logprobs is not None
        laws = TextLikelihoods(loaded).token_log_probs(ids[:0], ids)
        own = laws.gather(1, ids[:, None])[:, 0].tolist()
        values, others = laws.topk(min(self.logprobs, laws.shape[1]), -1)
        found = list[TokenLogProbability]()
        each = zip(ids.tolist(), own, values.tolist(), others.tolist(), strict=True)
        for i, (token, value, *best) in enumerate(each):
            top = {shown.piece(i, token) or "": value} if self.logprobs else {}
            for log_p, other in zip(*best, strict=True):
                if other != token:
                    top.setdefault(shown.alternative(i, other) or "", log_p)
            found.append((value, top))
        return found


def stacked_constraint(templates: Sequence[tuple[Template, int]]) -> Fixed | None:
    """The given tokens of a batch with n texts per template, all of one width; None if nothing is given."""
    if all(template.constraint is None for template, _ in templates):
        return None
    held = [one for template, n in templates for one in [template.held] * n]
    only = next((one.only for one in held if one.only is not None), None)
    if only is not None:
        nowhere = torch.zeros_like(held[0].where)
        only = replace(only, where=torch.stack([nowhere if one.only is None else one.only.where for one in held]))
    return Fixed(torch.stack([one.tokens for one in held]), torch.stack([one.where for one in held]), only)


@dataclass
class StepStream:
    """Sends the steps of a job: first the whole texts, then the pieces that have changed.

    Args:
        job: the job.
        template: the template of its texts.
        model: if given, each edit has the probability of its token under this model.
    """

    job: Job
    template: Template
    model: BatchedModel | None = None
    _last: Tensor | None = field(default=None, repr=False)
    _t: float = 1.0

    @cached_property
    def _pieces(self) -> TemplatePieces:
        return TemplatePieces(self.template)

    def show(self, step: int, t: float, x: Tensor) -> None:
        """Send the state x [n, L] after a step, at time t."""
        if not self.job.streams or self.job.abandoned:
            return
        x, record = x.cpu(), Record(step=step, t=t, edits=[])
        if self._last is None:
            record["texts"] = [self._pieces.pieces(row) for row in x.tolist()]
            record["given"] = self.template.given.nonzero().squeeze(1).tolist()
        else:
            for i, (now, before) in enumerate(zip(x, self._last, strict=True)):
                record["edits"] += self.edits(i, now, before)
        self._last, self._t = x.clone(), t
        self.job.send({"step": record})

    def edits(self, i: int, now: Tensor, before: Tensor) -> list[list[Any]]:
        """The pieces of text i that differ between two states [L]."""
        changed = (now != before).nonzero().squeeze(1).tolist()
        if not changed:
            return []
        pieces = self._pieces.edits(before.tolist(), now.tolist(), changed)
        found = [[i, place, text] for place, text in sorted(pieces.items())]
        if self.model is None:
            return found
        places = torch.tensor(sorted(pieces))
        probabilities = token_probabilities(self.model, before, places, now[places], self._t, self.template.only)
        return [[*edit, p] for edit, p in zip(found, probabilities, strict=True)]


@torch.no_grad()
def token_probabilities(
    model: BatchedModel, x_t: Tensor, places: Tensor, tokens: Tensor, t: float, only: AllowedTokens | None = None
) -> list[float | None]:
    """p(x_0 = token | x_t) of tokens [P] at these positions of x_t [L], among the allowed tokens, from the model's last
    forward pass at time t. None for a mask, and for all tokens if x_t was not in that pass."""
    process, last = model.process, model.last_forward
    outputs = None if last is None else last.outputs(x_t, places)
    if outputs is None:
        return [None] * len(tokens)
    if only is not None:
        outputs = outputs.masked_fill(only.barred(places), -torch.inf)
    x = x_t[places]
    log_posterior = model.method.parameterization.log_posterior(outputs.double(), x, process.noise(t).like(x))
    words = tokens < process.vocab_size
    p = log_posterior.gather(-1, tokens.where(words, 0)[:, None]).squeeze(-1).exp()
    return [round(value, 4) if is_word else None for value, is_word in zip(p.tolist(), words.tolist(), strict=True)]


@torch.no_grad()
def alternatives(
    loaded: LoadedModel, ids: Tensor, places: Tensor, count: int, only: AllowedTokens | None = None
) -> list[list[list[Any]]]:
    """The most probable tokens at these positions [P] of a text [L] given all others, among the allowed tokens, as
    [[text, p], ...] per position.

    A process that shuffles needs one forward pass for all positions (`leave_one_out`); for any other, each position is
    masked in turn.
    """
    process, method, tokenizer = loaded.process, loaded.method, loaded.tokenizer
    network = Network.of(loaded.network(1, len(ids)), process.vocab_size, loaded.device)
    t = 1 / max(2, len(ids))
    noise, found = process.noise(t), list[Tensor]()
    if process.can_shuffle:
        outputs = network.rows(ids[None], noise.sigma.expand(1), Places(places))
        vocabulary = torch.arange(process.vocab_size)
        for chunk, part in outputs.chunks():
            x = ids[places[part]]
            log_posterior = method.parameterization.log_posterior(chunk.double(), x, noise.like(x))
            tokens = torch.cat([x[:, None], vocabulary.expand(len(x), -1)], -1)
            found.append(leave_one_out(log_posterior, tokens, rate_of_time(process, t))[:, 1:].exp())
    else:
        for part in places.split(max(1, MAX_CALL_TOKENS // len(ids))):
            x_t = ids.repeat(len(part), 1)
            x_t[torch.arange(len(part)), part] = process.vocab_size
            rows = torch.arange(len(part)) * len(ids) + part
            x = x_t.flatten()[rows]
            outputs = network.rows(x_t, noise.sigma.expand(len(part)), Places(rows))
            found.append(
                outputs.map(
                    lambda chunk, which, x=x: method.parameterization.log_posterior(
                        chunk.double(), x[which], noise.like(x[which])
                    ).exp()
                )
            )
    probs = torch.cat(found)
    if only is not None:
        possible = probs.masked_fill(only.barred(places), 0.0)
        probs = torch.where(only.where[places, None], possible / possible.sum(-1, keepdim=True), probs)
    values, tokens = probs.topk(min(count, process.vocab_size), -1)
    return [
        [[piece(tokenizer, token), round(p, 5)] for p, token in zip(row, which, strict=True) if p > 0]
        for row, which in zip(values.tolist(), tokens.tolist(), strict=True)
    ]
