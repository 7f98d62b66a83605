"""The decoding rules of large masked language models: LLaDA, Dream, SDAR, and confidence thresholds.

Shapes: B batch, L positions, V vocabulary; R masked positions.

In every step a token is drawn for every mask, and the most confident ones are kept. The rules differ in the definition
of confidence, in the number of tokens kept, and in whether the text is written in segments from left to right:

    llada                 the same number in every step; confidence f(token), at temperature 1; segments of block_length
    llada-random          the same in random order
    dream-origin          each with probability 1 - s/t, t from 1 to 0.001 in equal steps
    dream-maskgit-plus    the m (1 - s/t) most confident of m masks, by f(token)
    dream-topk-margin     the same, by the largest f minus the second largest
    dream-entropy         the same, by the lowest entropy
    sdar-static           as llada, with f after temperature and top-p; a block of the model is a segment
    sdar-dynamic          the same, and all masks whose confidence is above a threshold (0.85)
    sdar-sequential       the same number in every step, from left to right
    threshold             all above a threshold (0.9), and always the most confident one (Fast-dLLM)

At temperature 0 they keep the same tokens at the same steps as the projects' own code. The texts of a batch are
independent. Dream's code shares the number of tokens to keep among the texts of a batch; here each text has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from cedd.network import Places, flat_places, put_at
from cedd.parameterization import at_token
from cedd.samplers.choice import Sharpening
from cedd.samplers.first_hitting import RevealSampler
from cedd.samplers.random_numbers import Use
from cedd.samplers.sampler import SamplingRun

LAST_TIME = 1e-3
"""The time of Dream's last step."""


def _of_token(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return at_token(log_probs, tokens).exp()


def _margin(log_probs: Tensor, tokens: Tensor) -> Tensor:
    del tokens
    best = log_probs.topk(2, -1).values.exp()
    return best[:, 0] - best[:, 1]


def _negative_entropy(log_probs: Tensor, tokens: Tensor) -> Tensor:
    del tokens
    return (log_probs.exp() * log_probs.nan_to_num(neginf=0.0)).sum(-1)


@dataclass(frozen=True)
class ConfidenceDecoding(RevealSampler):
    """Draws a token for every mask, and keeps the most confident ones.

    Args:
        name: what the table and error messages call it.
        confidence: a function (log-probabilities [R, V], drawn tokens [R]) -> [R], "random" or "leftmost".
        schedule: how many are kept in a step: even, equally many, the remainder in the first steps; dream, see above;
            dream-origin, each with that probability; none, those above the threshold.
        sharpened: whether confidence is computed after temperature and top-p.
        threshold: keep all tokens with a higher confidence, if these are more than the schedule's.
        block_length: tokens per stretch; stretches are written one after the other. None: the whole text is one
            stretch.
        place_temperature: draw which are kept, with probability ∝ exp(confidence / this), without replacement (Dream's
            alg_temp); 0: the most confident ones.
        unsure: tokens whose confidence is always the lowest (LLaDA's confidence_eos_eot_inf).
        counts_block: with the even schedule, keep the share of a whole block in each step, even if some of the block
            is given (SDAR).
    """

    name: str
    confidence: Callable[[Tensor, Tensor], Tensor] | Literal["random", "leftmost"] = _of_token
    schedule: Literal["even", "dream", "dream-origin", "none"] = "even"
    sharpened: bool = False
    threshold: float | None = None
    block_length: int | None = None
    place_temperature: float = 0.0
    unsure: tuple[int, ...] = ()
    counts_block: bool = False
    draws_jointly: ClassVar[bool] = False

    @property
    def unused(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("grid", "corrector", *(("steps",) if self.schedule == "none" else ()))

    @property
    def own_options(self) -> tuple[str, ...]:  # type: ignore[override]
        stretches = ("block_length",) if self.schedule in ("even", "none") else ()
        drawn = ("place_temperature",) if self.schedule == "dream" else ()
        return (*stretches, *drawn, *(("threshold",) if self.threshold is not None else ()))

    def steps_taken(self, steps: int, length: int) -> int:
        return length if self.schedule == "none" else steps

    def with_options(self, run: SamplingRun) -> ConfidenceDecoding:
        """The rule with the options' threshold, block length and place temperature."""
        options = run.options
        threshold = self.threshold if options.threshold is None else options.threshold
        places = self.place_temperature if options.place_temperature is None else options.place_temperature
        return replace(
            self,
            threshold=None if self.threshold is None else threshold,
            block_length=self.block_length if options.block_length is None else options.block_length,
            place_temperature=places,
        )

    def sample(self, run: SamplingRun) -> Tensor:
        return _Decoding(self.with_options(run), run).sample()


class _Decoding:
    """A run of the sampler."""

    def __init__(self, sampler: ConfidenceDecoding, run: SamplingRun) -> None:
        self.sampler, self.run = sampler, run
        self.x = run.start(run.masks)
        masked = self.masked()
        places = torch.arange(run.length, device=run.device)
        first = masked.int().argmax(1, keepdim=True)
        width = sampler.block_length or run.length
        self.stretch = (places - first).div(width, rounding_mode="floor")
        """Of each position, [B, L]."""
        stretches = 1 + torch.where(masked, self.stretch, 0).amax(1)
        self.per_stretch = (run.steps // stretches).clamp_min(1)
        """Steps of a stretch, [B]."""
        self.calls = int((self.per_stretch * stretches).max())
        self.at_first = masked.new_zeros(len(masked), dtype=torch.int64)
        """Tokens that are divided among the steps of the current stretch, [B]: its masks at its start, or a block."""
        self.of_block = run.part is not None and sampler.counts_block and sampler.block_length is None
        # As Dream computes them, in float32: how many tokens are kept is a product rounded down.
        self.times = torch.linspace(1, LAST_TIME, run.steps + 1)

    def masked(self) -> Tensor:
        return self.x == self.run.process.vocab_size

    def sample(self) -> Tensor:
        run = self.run
        run.show(0, 1.0, self.x)
        step = 0
        while step < self.calls or self.sampler.schedule == "none":
            masked = self.masked()
            if not bool(masked.any()):
                break
            candidates, quota = self._turn(masked, step)
            rows = flat_places(candidates & self._matters(quota)[:, None])
            if len(rows):
                tokens, confidence = self._draw(rows, step)
                kept = self._kept(rows, confidence, quota, step)
                self.x = put_at(self.x, rows[kept], tokens[kept])
            step += 1
            if run.callback is not None:
                run.show(step, float(self.masked().double().mean()), self.x)
        return self.x

    def _turn(self, masked: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The candidate masks [B, L], and how many tokens of each text are kept [B]."""
        run, kind = self.run, self.sampler.schedule
        if kind == "none":
            present = torch.where(masked, self.stretch, run.length).amin(1)
            return masked & (self.stretch == present[:, None]), masked.any(1).long()
        number, within = step // self.per_stretch, step % self.per_stretch
        candidates = masked & (self.stretch == number[:, None])
        count = candidates.sum(1)
        if kind == "even":
            divided = torch.full_like(count, run.length) if self.of_block else count
            self.at_first = torch.where(within == 0, divided, self.at_first)
            extra = within < self.at_first % self.per_stretch
            return candidates, torch.minimum(self.at_first // self.per_stretch + extra.long(), count)
        if step == self.calls - 1:
            return candidates, count
        kept = count.cpu() * (1 - self.times[step + 1] / self.times[step])
        return candidates, kept.long().to(count.device)

    def _matters(self, quota: Tensor) -> Tensor:
        """Whether any token of a text may be kept, [B]."""
        always = self.sampler.threshold is not None or self.sampler.schedule == "dream-origin"
        return torch.ones_like(quota, dtype=torch.bool) if always else quota > 0

    def _draw(self, rows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Tokens [R] for masks at flat positions [R], and their confidence [R]."""
        run, process, sampler = self.run, self.run.process, self.sampler
        sharpening = run.sharpening if run.sharpening.temperature else replace(run.sharpening, temperature=1.0)
        law = sharpening if sampler.sharpened else Sharpening(excluded=run.sharpening.excluded)
        share = self.masked().double().mean(1).clamp_max(float(process.kernel(1.0).a))
        v = run.uniform(Use.TARGET, step).flatten()
        tokens, confidence = torch.zeros_like(rows), torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        outputs = run.network.rows(self.x, -torch.log1p(-share), Places(rows), full_precision=True)
        for made, part in outputs.chunks():
            tokens[part] = run.draw_tokens(self.x, rows[part], made, slice(None), v[rows[part]])
            if callable(sampler.confidence):
                judged = made.double()
                if sampler.unsure:
                    judged[:, list(sampler.unsure)] = -torch.inf
                confidence[part] = sampler.confidence(law.log_probs(judged), tokens[part])
        if sampler.confidence == "random":
            confidence = run.uniform(Use.PLACE, step).flatten()[rows]
        elif sampler.confidence == "leftmost":
            confidence = -(rows % run.length).double()
        return tokens, confidence

    @staticmethod
    def _best(keys: Tensor, quota: Tensor) -> Tensor:
        """The `quota` most confident positions of each text, [B, L]. Ties are broken as in the projects' code, which
        calls topk on one text at a time."""
        best = torch.zeros_like(keys, dtype=torch.bool)
        counts = cast(list[int], quota.tolist())  # pyright: ignore[reportUnknownMemberType]
        for number, count in enumerate(counts):
            if count > 0:
                best[number, keys[number].topk(count).indices] = True
        return best

    def _kept(self, rows: Tensor, confidence: Tensor, quota: Tensor, step: int) -> Tensor:
        """Which of the masks [R] keep their token."""
        run, sampler = self.run, self.sampler
        if sampler.schedule == "dream-origin":
            share = 1.0 if step == self.calls - 1 else float(1 - self.times[step + 1] / self.times[step])
            return run.uniform(Use.PLACE, step).flatten()[rows] < share
        keys = confidence
        if sampler.place_temperature:
            u = run.uniform(Use.PLACE, step).flatten()[rows]
            keys = confidence / sampler.place_temperature - torch.log(-torch.log(u))
        text = rows // run.length
        ranked = torch.full(run.shape, -torch.inf, dtype=torch.float64, device=rows.device)
        kept = self._best(put_at(ranked, rows, keys), quota).flatten()[rows]
        if sampler.threshold is None:
            return kept
        above = confidence > sampler.threshold
        more = torch.zeros_like(quota).index_add(0, text, above.long()) >= quota
        return torch.where(more[text], above, kept)


DECODING_RULES: dict[str, ConfidenceDecoding] = {
    rule.name: rule
    for rule in (
        ConfidenceDecoding("llada"),
        ConfidenceDecoding("llada-random", "random"),
        ConfidenceDecoding("dream-origin", schedule="dream-origin"),
        ConfidenceDecoding("dream-maskgit-plus", schedule="dream", sharpened=True),
        ConfidenceDecoding("dream-topk-margin", _margin, "dream", sharpened=True),
        ConfidenceDecoding("dream-entropy", _negative_entropy, "dream", sharpened=True),
        ConfidenceDecoding("sdar-static", sharpened=True, counts_block=True),
        ConfidenceDecoding("sdar-dynamic", sharpened=True, threshold=0.85, counts_block=True),
        ConfidenceDecoding("sdar-sequential", "leftmost", counts_block=True),
        ConfidenceDecoding("threshold", schedule="none", threshold=0.9),
    )
}
