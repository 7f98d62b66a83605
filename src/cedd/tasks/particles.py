"""Weighted texts: what particles make of a prompt, with weights and an estimate of the normalizer.

Shapes: N particles, L positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cedd.models.loaded_model import LoadedModel
from cedd.samplers import SamplingOptions
from cedd.samplers.particle_set import ParticleSet
from cedd.tasks.template import Template


@dataclass(frozen=True)
class WeightedTexts:
    """The particles of one text; see `cedd.samplers.particles`."""

    text: str
    """The one that was drawn by the weights."""
    texts: Sequence[str]
    """All of them."""
    weights: Sequence[float]
    """Their weights, which sum to 1."""
    log_normalizer: float
    """An estimate of the logarithm of E[(satisfies the constraint) exp(strength reward)] over the model's own texts;
    without a reward that is the probability of the constraint. The estimate of the expectation itself is unbiased."""
    effective_sizes: Sequence[float]
    """The effective sample size before each network call and in the end, before resampling."""

    @property
    def effective_sample_size(self) -> float:
        """How many equally weighted texts these are worth."""
        return self.effective_sizes[-1]


def weighted_texts(template: Template, loaded: LoadedModel, n: int, options: SamplingOptions) -> list[WeightedTexts]:
    """n times as many weighted ways to fill a template as the options have particles."""
    found: list[ParticleSet] = []
    template.draw(loaded, n, replace(options, on_particles=found.append))
    made: list[WeightedTexts] = []
    for one in found:
        texts = [template.write(row.numpy()) for row in one.tokens]
        weights = one.log_weights.exp().tolist()
        made.append(WeightedTexts(texts[one.chosen], texts, weights, one.log_normalizer, one.effective_sizes))
    return made
