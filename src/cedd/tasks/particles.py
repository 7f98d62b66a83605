"""Weighted texts from particles, with an estimate of the normalizer.

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
    """The text drawn by weight."""
    texts: Sequence[str]
    """All texts."""
    weights: Sequence[float]
    """The weights, which sum to 1."""
    log_normalizer: float
    """The logarithm of an unbiased estimate of E[(satisfies the constraint) exp(strength reward)] over the model's
    texts; without a reward, this expectation is the probability of the constraint."""
    effective_sizes: Sequence[float]
    """The effective sample size before each network call and at the end, before resampling."""

    @property
    def effective_sample_size(self) -> float:
        """The final effective sample size."""
        return self.effective_sizes[-1]


def weighted_texts(template: Template, loaded: LoadedModel, n: int, options: SamplingOptions) -> list[WeightedTexts]:
    """n sets of weighted texts for a template, with one text per particle."""
    found: list[ParticleSet] = []
    template.draw(loaded, n, replace(options, on_particles=found.append))
    made: list[WeightedTexts] = []
    for one in found:
        texts = [template.write(row.numpy(), options.stop) for row in one.tokens]
        weights = one.log_weights.exp().tolist()
        made.append(WeightedTexts(texts[one.chosen], texts, weights, one.log_normalizer, one.effective_sizes))
    return made
