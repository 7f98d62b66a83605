"""Correction: a task that corrects one text."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from cedd.apps.correct.decisions import Scores
from cedd.apps.correct.engine import lexicon_file, reader_for, word_scores
from cedd.apps.correct.likelihood import MASKED_TIME, numpy_network
from cedd.apps.correct.reader import Reader
from cedd.apps.correct.suspects import Suspect
from cedd.apps.serve.batcher import Cancelled, ConcurrentPassageReader, Fiber
from cedd.apps.serve.reader_pool import ReaderPool, RemoteReader, found_by
from cedd.apps.serve.scheduler import Job
from cedd.models.loaded_model import LoadedModel
from cedd.samplers.feature_cache import FeatureCache
from cedd.spelling.changes import Watch
from cedd.storage import JSONMapping
from cedd.tasks.correct import correct, correction_record

LOG = logging.getLogger("cedd.apps.serve")


@dataclass(frozen=True)
class CorrectionTask:
    """Correct the spelling of a text.

    Args:
        model: the corrector.
        text: the text.
        engine: words or letters.
        options: options of the engine.
        suggest: number of candidates for each suspicious word or letter.
        memory: features and scores of texts that were read recently.
        reader_pool: processes that find suspicious words.
    """

    model: LoadedModel
    text: str
    engine: str
    options: JSONMapping
    suggest: int | None = None
    memory: FeatureCache | None = None
    reader_pool: ReaderPool | None = None
    key: Hashable | None = None
    texts: int = 1

    def run(self, fiber: Fiber, jobs: Sequence[Job]) -> None:
        """Correct the text; a step is sent after each batch of the network."""
        (job,) = jobs
        step = 0

        def watch(share: float) -> None:
            nonlocal step
            del share
            step += 1
            job.send({"step": {"step": step, "edits": []}})

        batched = fiber.batched(self.model, self.memory)
        words = {}
        if self.engine == "words":
            words = {"reader": self.reader(fiber, job), "scores": self.scores(fiber, batched, watch)}
        corrected = correct(batched, self.text, engine=self.engine, watch=watch, **words, **self.options)
        record = correction_record(corrected, self.suggest)
        edits = [[change["position"], change["before"], change["after"]] for change in record["changes"]]
        job.send({"step": {"step": step + 1, "edits": edits}})
        job.finish(record)

    def scores(self, fiber: Fiber, batched: LoadedModel, watch: Watch) -> Scores:
        """Scores of candidates. A masked model runs in NumPy, outside the fiber's turns, and its scores are cached."""
        if self.model.process.can_shuffle:
            return word_scores(batched, watch)
        known = None if self.memory is None else self.memory.numbers[self.model]
        network = ConcurrentPassageReader(numpy_network(self.model, MASKED_TIME), fiber)
        return word_scores(self.model, watch, network=network, known=known)

    def reader(self, fiber: Fiber, job: Job) -> Reader | None:
        """A reader that finds suspicious words in another process; None to find them in this one."""
        file = lexicon_file(self.model)
        if file is None or self.reader_pool is None or not self.reader_pool.processes:
            return None
        own, pool = reader_for(self.model), self.reader_pool

        def find(text: str, threshold: float, ignored: Collection[str]) -> list[Suspect]:
            def wait() -> list[Suspect]:
                with pool.free() as process:
                    if job.abandoned:
                        raise Cancelled
                    return process.suspects(file, text, threshold, ignored, lambda: not job.abandoned)

            try:
                return fiber.blocking(wait)
            except (OSError, EOFError, ValueError):
                if job.abandoned:
                    raise Cancelled from None
                LOG.warning("a lookup process has ended and is restarted")
                return found_by(own, text, threshold, ignored)

        return RemoteReader(own, find)
