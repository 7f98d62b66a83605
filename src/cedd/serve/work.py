"""What requests ask for: texts written or filled, and corrected.

Shapes: B texts, L tokens, P blank tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from cedd.data.text import REPLACEMENT
from cedd.data.tokenizers import Tokenizer
from cedd.models.loaded import LoadedModel, SamplingOptions
from cedd.network import Network, Only, Places
from cedd.samplers import Fixed
from cedd.samplers.memory import Memory
from cedd.serve.desk import Job
from cedd.serve.gathering import MOST_TOKENS, AskingModel, Ended, Run
from cedd.serve.readers import Readers, RemoteReader, found_by
from cedd.spelling.correct import lexicon_file, reader_beside
from cedd.spelling.rewrite import Doubt, Reader
from cedd.spelling.scores import leave_one_out, rate_of_time
from cedd.tasks import LanguageModel
from cedd.tasks.correct import correct, correction_record
from cedd.tasks.template import Blank, Template
from cedd.tasks.windows import windows_amid

LOG = logging.getLogger("cedd.serve")
Record = dict[str, Any]


@lru_cache(maxsize=1 << 16)
def piece(tokenizer: Tokenizer, token: int) -> str | None:
    """The text of a token; None for the mask."""
    return None if token >= tokenizer.vocab_size else tokenizer.decode([token])


def whole_characters(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The texts of tokens [L] none of which holds part of a character: one that several tokens spell, as bytes do an
    emoji, stands at the last of them."""
    shown, begun = list[str](), 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[begun:end])
        whole = end == len(ids) or not text.endswith(REPLACEMENT)
        shown.append(text if whole else "")
        begun = end if whole else begun
    return shown


class Shown:
    """The tokens of a filled template as pieces that together are its text: given characters as they were given, and a
    word after a given space with that space, whether or not the model wrote one of its own.

    Args:
        template: whose.
    """

    def __init__(self, template: Template) -> None:
        self.tokenizer, self._given = template.tokenizer, template.characters
        self._blanks: list[range] = []
        self._begins = False
        self._after_space: set[int] = set()
        """Where blanks begin whose space is not among the tokens (`Blank.after_space`)."""
        for part, place in template.placed:
            if isinstance(part, Blank):
                self._blanks.append(range(place.start, place.stop))
                self._after_space |= {place.start} if part.after_space else set()
                self._begins = part.begins_text or self._begins
            elif self.tokenizer.characters is None:
                self._given |= enumerate(whole_characters(self.tokenizer, part.ids.tolist()), place.start)

    def piece(self, place: int, token: int) -> str | None:
        """What a token is at this place; None for the mask."""
        text = self._given.get(place, piece(self.tokenizer, token))
        return None if text is None else self.spaced(place, text)

    def spaced(self, place: int, text: str) -> str:
        """What is written at this place, with the given space before it."""
        if place == 0 and self._begins:
            return text.removeprefix(" ")
        return f" {text}" if place in self._after_space and not text.startswith(" ") else text

    def pieces(self, ids: Sequence[int]) -> list[str | None]:
        """All of the tokens [L]; a character that several of them spell is at the last of these, and where one of them
        is still a mask the others are shown as masks. As in the text, none spans the edge of a blank."""
        shown = [self.piece(place, token) for place, token in enumerate(ids)]
        for blank in self._blanks:
            for place, text in self._written(ids, blank).items():
                shown[place] = text
        return shown

    def _written(self, ids: Sequence[int], blank: range) -> dict[int, str | None]:
        """The pieces of a blank of the tokens [L], by their places."""
        shown = {place: self.piece(place, ids[place]) for place in blank}
        for places in _split(shown, blank):
            open_end = any(shown.get(place, "") is None for place in (places.start - 1, places.stop))
            texts, begun = whole_characters(self.tokenizer, [ids[i] for i in places]), 0
            for end, text in enumerate(texts, 1):
                if text:
                    half, spelling, begun = open_end and REPLACEMENT in text, places[begun:end], end
                    for place in spelling:
                        shown[place] = None if half else ""
                    if not half:
                        shown[spelling[-1]] = self.spaced(spelling[0], text)
        return shown

    def edits(self, before: Sequence[int], now: Sequence[int], changed: Sequence[int]) -> dict[int, str | None]:
        """What the tokens [L] show now at the `changed` places, in order, and beside them, where that is shown
        otherwise for the change. Of a long text only these are looked at."""
        if self.tokenizer.characters is not None:
            return {place: self.piece(place, now[place]) for place in changed}
        found: dict[int, str | None] = {}
        for blank, places in groupby(changed, self._blank_of):
            inside = list(places)
            near = self._near(now, range(inside[0], inside[-1] + 1), blank)
            was, shown = self._written(before, near), self._written(now, near)
            found |= {i: shown[i] for i in near if before[i] != now[i] or was[i] != shown[i]}
        return found

    def _blank_of(self, place: int) -> range:
        return self._blanks[bisect_right(self._blanks, place, key=attrgetter("start")) - 1]

    def _near(self, ids: Sequence[int], places: range, blank: range) -> range:
        """These places of a blank, the tokens beside them that hold parts of characters, and one more on either side,
        which says whether these parts are all."""
        start, stop = places.start, places.stop
        while start > blank.start and self._is_part(ids[start - 1]):
            start -= 1
        while stop < blank.stop and self._is_part(ids[stop]):
            stop += 1
        return range(max(blank.start, start - 1), min(blank.stop, stop + 1))

    def _is_part(self, token: int) -> bool:
        return REPLACEMENT in (piece(self.tokenizer, token) or "")


def _split(shown: Mapping[int, str | None], blank: range) -> list[range]:
    """Stretches of a blank whose tokens hold parts of characters."""
    split = ((place, REPLACEMENT in (shown[place] or "")) for place in blank)
    runs = ([place for place, _ in run] for part, run in groupby(split, itemgetter(1)) if part)
    return [range(run[0], run[-1] + 1) for run in runs]


# ----------------------------------------------------------------------------------------------------------------
# Writing and filling


@dataclass(frozen=True)
class Writing:
    """Texts of a template: after a prompt, or around what is given.

    Args:
        name: the model's.
        model: writes.
        template: what is given, and its blanks.
        seeds: one for each text, which depends on it alone.
        options: how to sample.
        result: makes the answer of the texts and their tokens [n, L].
        alternatives: so many other tokens for each that was written, with their probabilities.
        certainty: whether steps say how probable each token was when it was decided.
    """

    name: str
    model: LanguageModel
    template: Template
    seeds: Sequence[int]
    options: SamplingOptions
    result: Callable[[list[str], list[Record]], Record]
    alternatives: int = 0
    certainty: bool = False

    @property
    def key(self) -> Hashable | None:
        """Texts of one model, length and way of sampling are drawn at once; those that are filled in windows, which are
        of one length, share the calls of their network only."""
        width = self.template.width
        return None if width > self.model.length else (self.name, width, self.options)

    @property
    def texts(self) -> int:
        return len(self.seeds)

    def run(self, run: Run, jobs: Sequence[Job]) -> None:
        """Draw the texts of all these jobs, each by its own seed."""
        works = [job.work for job in jobs]
        writings = [work for work in works if isinstance(work, Writing)]
        assert len(writings) == len(jobs)
        loaded, width = run.over(self.model), self.template.width
        seeds = [seed for work in writings for seed in work.seeds]
        options = replace(self.options, seeds=seeds)
        parts = list(pairwise(accumulate((work.texts for work in writings), initial=0)))
        steps = [
            Steps(job, work.template, loaded if work.certainty else None)
            for job, work in zip(jobs, writings, strict=True)
        ]

        def callback(step: int, t: float, x: Tensor) -> None:
            for one, (start, stop) in zip(steps, parts, strict=True):
                one.show(step, t, x[start:stop])

        if self.key is None:
            drawn = self.template.draw(loaded, len(seeds), options, callback)
        else:
            held = stacked([(work.template, work.texts) for work in writings])
            drawn = loaded.draw((len(seeds), width), options, held, callback)
        for job, work, (start, stop) in zip(jobs, writings, parts, strict=True):
            if not job.gone:
                job.finish(work.answer(run, loaded, drawn[start:stop]))

    def answer(self, run: Run, loaded: LoadedModel, ids: Tensor) -> Record:
        """The texts of tokens [n, L] as this work's result."""
        texts, tokens, shown = list[str](), list[Record](), Shown(self.template)
        for row in ids:
            run.rest()
            texts.append(self.template.write(row.numpy()))
            tokens.append({"pieces": shown.pieces(row.tolist())})
        if self.alternatives:
            blanks, only = (~self.template.given).nonzero().squeeze(1), self.template.only
            cuts = windows_amid(self.template.blanks, self.template.width, loaded.length)
            for record, row in zip(tokens, ids, strict=True):
                found = list[list[list[Any]]]()
                for cut in cuts:
                    places = blanks[(blanks >= cut.first) & (blanks < cut.last)] - cut.start
                    here = slice(cut.start, cut.stop)
                    found += alternatives(loaded, row[here], places, self.alternatives, only and only.of(here))
                pairs = zip(blanks.tolist(), found, strict=True)
                record["alternatives"] = [[[shown.spaced(i, text), p] for text, p in others] for i, others in pairs]
        return self.result(texts, tokens)


def stacked(templates: Sequence[tuple[Template, int]]) -> Fixed | None:
    """What holds the given tokens of texts of one width, so many of each template; None where nothing is given."""
    if all(template.constraint is None for template, _ in templates):
        return None
    held = [one for template, n in templates for one in [template.held] * n]
    only = next((one.only for one in held if one.only is not None), None)
    if only is not None:
        nowhere = torch.zeros_like(held[0].where)
        only = replace(only, where=torch.stack([nowhere if one.only is None else one.only.where for one in held]))
    return Fixed(torch.stack([one.tokens for one in held]), torch.stack([one.where for one in held]), only)


@dataclass
class Steps:
    """Sends a job its steps: the first text as a whole, and then what has changed.

    Args:
        job: to whom.
        template: of its texts.
        asking: whose network decides; if given, an edit has the probability of its token as well.
    """

    job: Job
    template: Template
    asking: AskingModel | None = None
    _last: Tensor | None = field(default=None, repr=False)
    _t: float = 1.0

    @cached_property
    def _shown(self) -> Shown:
        return Shown(self.template)

    def show(self, step: int, t: float, x: Tensor) -> None:
        """The state x [n, L] after a step, at time t."""
        if not self.job.streams or self.job.gone:
            return
        x, record = x.cpu(), Record(step=step, t=t, edits=[])
        if self._last is None:
            record["texts"] = [self._shown.pieces(row) for row in x.tolist()]
            record["given"] = self.template.given.nonzero().squeeze(1).tolist()
        else:
            for i, (now, before) in enumerate(zip(x, self._last, strict=True)):
                record["edits"] += self.edits(i, now, before)
        self._last, self._t = x.clone(), t
        self.job.send({"step": record})

    def edits(self, i: int, now: Tensor, before: Tensor) -> list[list[Any]]:
        """What has changed in text i [L], and what is shown otherwise because a token beside it has changed."""
        changed = (now != before).nonzero().squeeze(1).tolist()
        if not changed:
            return []
        shown = self._shown.edits(before.tolist(), now.tolist(), changed)
        found = [[i, place, text] for place, text in sorted(shown.items())]
        if self.asking is None:
            return found
        places = torch.tensor(sorted(shown))
        sure = certainties(self.asking, before, places, now[places], self._t, self.template.only)
        return [[*edit, p] for edit, p in zip(found, sure, strict=True)]


@torch.no_grad()
def certainties(
    asking: AskingModel, x_t: Tensor, places: Tensor, tokens: Tensor, t: float, only: Only | None = None
) -> list[float | None]:
    """p(x_0 = token | x_t) of tokens [P] at these places of x_t [L], which the network has read last at time t, among
    those that are possible there; None of a mask, and of all where it has read something else."""
    process, read = asking.process, asking.last_read
    outputs = None if read is None else read.outputs(x_t, places)
    if outputs is None:
        return [None] * len(tokens)
    if only is not None:
        outputs = outputs.masked_fill(only.barred(places), -torch.inf)
    x = x_t[places]
    log_posterior = asking.method.parameterization.log_posterior(outputs.double(), x, process.noise(t).like(x))
    words = tokens < process.vocab_size
    p = log_posterior.gather(-1, tokens.where(words, 0)[:, None]).squeeze(-1).exp()
    return [round(value, 4) if is_word else None for value, is_word in zip(p.tolist(), words.tolist(), strict=True)]


@torch.no_grad()
def alternatives(
    loaded: LoadedModel, ids: Tensor, places: Tensor, count: int, only: Only | None = None
) -> list[list[list[Any]]]:
    """Of the tokens at these places [P] of a text [L], the likeliest given all others, of those that are possible
    there: [[text, p], ...] each.

    A process that shuffles gives them for all places in one reading (`leave_one_out`); of another, each place is masked
    in its turn.
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
        for part in places.split(max(1, MOST_TOKENS // len(ids))):
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


# ----------------------------------------------------------------------------------------------------------------
# Correction


@dataclass(frozen=True)
class Correcting:
    """A text corrected.

    Args:
        model: corrects.
        text: what.
        options: of `cedd.tasks.correct`.
        suggest: so many candidates for each change and doubt.
        memory: of what the network has read lately.
        readers: processes that find doubtful words.
    """

    model: LoadedModel
    text: str
    options: Mapping[str, Any]
    suggest: int | None = None
    memory: Memory | None = None
    readers: Readers | None = None
    key: Hashable | None = None
    texts: int = 1

    def run(self, run: Run, jobs: Sequence[Job]) -> None:
        """Correct it, a step being what the network reads at once."""
        (job,) = jobs
        step = 0

        def watch(share: float) -> None:
            nonlocal step
            del share
            step += 1
            job.send({"step": {"step": step, "edits": []}})

        asking, reader = run.over(self.model, self.memory), self.reader(run, job)
        corrected = correct(asking, self.text, watch=watch, reader=reader, **self.options)
        record = correction_record(corrected, self.suggest)
        edits = [[change["position"], change["before"], change["after"]] for change in record["changes"]]
        job.send({"step": {"step": step + 1, "edits": edits}})
        job.finish(record)

    def reader(self, run: Run, job: Job) -> Reader | None:
        """Finds the doubtful words in another process while others have their turns; None: here, as always."""
        file = lexicon_file(self.model)
        if file is None or self.readers is None or not self.readers.processes:
            return None
        own, readers = reader_beside(self.model), self.readers

        def find(text: str, threshold: float, ignored: Collection[str]) -> list[Doubt]:
            def wait() -> list[Doubt]:
                with readers.free() as process:
                    if job.gone:
                        raise Ended
                    return process.doubts(file, text, threshold, ignored, lambda: not job.gone)

            try:
                return run.outside(wait)
            except (OSError, EOFError, ValueError):
                if job.gone:
                    raise Ended from None
                LOG.warning("a process that reads words has ended; it is begun anew")
                return found_by(own, text, threshold, ignored)

        return RemoteReader(own, find)
