"""Guidance by enumeration: at weight 1 the law is that of the conditional model, and elsewhere it is the normalised
mixture at each position."""

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

import cedd
from cedd.network import UNKNOWN_LABEL, Capabilities
from cedd.samplers.guidance import ClassifierGuided, Guided, check_guidance, mixed
from tests.combinations import covering
from tests.reference.reveals import time_free_law

V, L, CONDITIONS = 3, 3, 2
MASK = V
TEXTS = list(itertools.product(range(V), repeat=L))
JOINT = np.random.default_rng(0).dirichlet(np.full(len(TEXTS) * CONDITIONS, 0.3)).reshape(len(TEXTS), CONDITIONS)
"""p(x, c)."""


def agrees(text: tuple[int, ...], seen: tuple[int, ...]) -> bool:
    return all(token in (own, MASK) for own, token in zip(text, seen, strict=True))


@cache
def weight(seen: tuple[int, ...], condition: int) -> float:
    """p(x_t, c), the sum over the texts behind the masks; both for an unknown condition."""
    which = slice(None) if condition == UNKNOWN_LABEL else condition
    return float(sum(JOINT[k, which].sum() for k, text in enumerate(TEXTS) if agrees(text, seen)))


def perfect(x_t: Tensor, sigma: Tensor, label: Tensor | None = None) -> Tensor:
    """log p(x_i = v | x_t, c) of every position, [B, L, V]."""
    labels = [UNKNOWN_LABEL] * len(x_t) if label is None else label.tolist()
    rows = []
    for seen, condition in zip(map(tuple, x_t.tolist()), labels, strict=True):
        chances = [
            [weight((*seen[:i], v, *seen[i + 1 :]), condition) if seen[i] in (v, MASK) else 0.0 for v in range(V)]
            for i in range(L)
        ]
        rows.append(torch.tensor(chances, dtype=torch.float64).clamp_min(1e-300).log())
    return torch.stack([row - row.logsumexp(-1, keepdim=True) for row in rows])


class WithHead:
    """The same network as features and a head."""

    capabilities = Capabilities(features=True, time_conditioned=False)

    def features(self, x_t: Tensor, sigma: Tensor, **conditions: Tensor) -> Tensor:
        return perfect(x_t, sigma, **conditions)

    def head(self, rows: Tensor) -> Tensor:
        return 1.0 * rows


def logits_of(network, **conditions):
    """The network in the form that the reference takes."""

    def outputs(seen, sigma):
        x_t = torch.tensor(seen)
        repeated = {name: value.expand(len(x_t), *value.shape[1:]) for name, value in conditions.items()}
        return network(x_t, torch.full((len(x_t),), sigma), **repeated).numpy()

    return outputs


def law(network, **conditions) -> np.ndarray:
    return np.array([time_free_law(logits_of(network, **conditions), text, MASK) for text in TEXTS])


def conditional(condition: int) -> np.ndarray:
    return JOINT[:, condition] / JOINT[:, condition].sum()


@pytest.mark.parametrize(
    ("network", "condition"), covering(itertools.product((perfect, WithHead()), range(CONDITIONS)))
)
def test_weight_one_gives_conditional_model(network, condition):
    label = torch.tensor([condition])
    np.testing.assert_allclose(law(Guided(network, 1.0), label=label), conditional(condition), atol=1e-12)


def test_weight_zero_gives_unconditional_model():
    np.testing.assert_allclose(law(Guided(perfect, 0.0), label=torch.tensor([1])), JOINT.sum(1), atol=1e-12)


def test_other_weights_mix_per_position_and_differ_from_classifier_power():
    """One position checked by hand, and the distance from p(x) p(c | x)^w."""
    label, strength = torch.tensor([0]), 2.5
    guided = Guided(perfect, strength)
    x_t = torch.tensor([[MASK, 1, MASK]])
    own, without = perfect(x_t, x_t[:, 0], label).exp(), perfect(x_t, x_t[:, 0]).exp()
    expected = own**strength * without ** (1 - strength)
    found = guided(x_t, torch.ones(1), label=label).exp()
    np.testing.assert_allclose(found[0, 0], (expected / expected.sum(-1, keepdim=True))[0, 0], rtol=1e-9)
    np.testing.assert_allclose(found[0, 2].sum(), 1.0, rtol=1e-12)
    drawn = law(guided, label=label)
    assert drawn.sum() == pytest.approx(1.0)
    tilted = JOINT.sum(1) * (JOINT[:, 0] / JOINT.sum(1)) ** strength
    distance = 0.5 * np.abs(drawn - tilted / tilted.sum()).sum()
    assert 0.01 < distance < 0.5


def test_mixing_keeps_known_sums_of_ratios():
    """At masks both have the known sum, and so has the mixture."""
    shares = torch.randn(2, 5, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    known = torch.linspace(-3, 2, 5, dtype=torch.float64)[:, None]
    found = mixed(shares[0] + known, shares[1] + known, 3.0)
    torch.testing.assert_close(found.logsumexp(-1, keepdim=True), known)
    torch.testing.assert_close(mixed(shares[0] + known, shares[1] - known, 1.0), shares[0] + known)


def test_hidden_prompt_is_a_condition():
    """Weight 0 is the model without the prompt, weight 1 the plain model."""
    hidden = torch.tensor([[True, False, False]])
    x_t = torch.tensor([[2, MASK, MASK]])
    sigma = torch.ones(1)
    for weight_, seen in ((1.0, x_t), (0.0, x_t.masked_fill(hidden, MASK))):
        found = Guided(perfect, weight_, MASK)(x_t, sigma, hidden=hidden)
        torch.testing.assert_close(found[:, 1:], perfect(seen, sigma)[:, 1:], atol=1e-12, rtol=0)


def classifier(x_t: Tensor, sigma: Tensor) -> Tensor:
    """log p(c = 0 | x_t), exactly; far below any other where the text is impossible."""
    seen = list(map(tuple, x_t.tolist()))
    return torch.tensor([np.log(max(weight(x, 0), 1e-250) / max(weight(x, UNKNOWN_LABEL), 1e-200)) for x in seen])


def test_exact_classifier_gives_conditional_law():
    guided = ClassifierGuided(perfect, classifier, 1.0, exact=True)
    np.testing.assert_allclose(law(guided), conditional(0), atol=1e-9)


def test_gradient_guidance_is_exact_for_linear_classifiers():
    table = torch.randn(L, V + 1, generator=torch.Generator().manual_seed(0))

    def linear(texts: Tensor, sigma: Tensor) -> Tensor:
        if texts.dim() == 2:
            texts = torch.nn.functional.one_hot(texts, V + 1).float()
        return (texts * table).sum((1, 2))

    x_t, sigma = torch.tensor([[MASK, 1, MASK], [0, 2, MASK]]), torch.ones(2)
    by_gradient, exact = (ClassifierGuided(perfect, linear, 1.7, exact=exact) for exact in (False, True))
    found, expected = (guided(x_t, sigma).log_softmax(-1) for guided in (by_gradient, exact))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(found, perfect(x_t, sigma), atol=0.1)


def test_classifier_returning_nan_is_rejected():
    guided = ClassifierGuided(perfect, lambda x_t, sigma: torch.full((len(x_t),), torch.nan), exact=True)
    with pytest.raises(ValueError, match="classifier returned nan"):
        guided(torch.full((1, L), MASK), torch.ones(1))


@pytest.mark.parametrize(
    ("classifier", "how", "message"),
    [
        (None, {}, "the classifier must be a function"),
        (classifier, {"guidance": float("inf")}, "guidance must be a finite number"),
        (lambda x_t, sigma: torch.zeros(2), {"exact": True}, r"one log-probability for each of the 3 texts .*\(2,\)"),
        (lambda x_t, sigma: torch.zeros(len(x_t), 1), {}, r"each of the 1 texts .*\(1, 1\)"),
        (lambda x_t, sigma: torch.zeros(len(x_t)), {}, "no gradient with respect to the texts; use exact=True"),
        (lambda x_t, sigma: torch.zeros(len(x_t), requires_grad=True), {}, "no gradient with respect to the texts"),
    ],
)
def test_invalid_classifiers_are_rejected(classifier, how, message):
    with pytest.raises(ValueError, match=message):
        ClassifierGuided(perfect, classifier, **how)(torch.full((1, L), MASK), torch.ones(1))


def test_methods_without_guidance_are_rejected():
    with pytest.raises(ValueError, match="guidance needs a diffusion method, and ar is not one"):
        check_guidance(cedd.METHODS["ar"], cedd.absorb(V))
    with pytest.raises(ValueError, match="needs probabilities, and sedd gives ratios"):
        check_guidance(cedd.METHODS["sedd"], cedd.uniform(V))
    for method, process in (("sedd", cedd.absorb(V)), ("cedd", cedd.roulette(V)), ("bayes", cedd.uniform(V))):
        check_guidance(cedd.METHODS[method], process)
