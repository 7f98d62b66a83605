"""Samplers with languages: every sequence is in the language, and the law is the tilted one, by enumeration."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import cedd
from cedd.samplers import Fixed, sample
from cedd.samplers.choice import Sharpening
from cedd.samplers.constraints import Draw
from cedd.samplers.languages import LanguageConstraint, SpanPlaces
from tests.combinations import covering
from tests.samplers.chains import ERROR_RATE, HalvedTable, Table, p_value
from tests.samplers.languages import State, constraint, marginals, members, product_law, span, tilted_law

V, L = 3, 4
PATTERN = "(ab|c)*|b{4}"
SAMPLERS = [
    "first-hitting",
    "probability",
    "margin",
    "entropy",
    "analytic",
    "euler",
    "remask-capped",
    "remask-confidence",
]
LOGITS = torch.randn(L, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PROCESS = cedd.absorb(V, cedd.LogLinear(eps=1e-9))  # all masks at t = 1


def blind(x_t: Tensor, sigma: Tensor) -> Tensor:
    """The same laws for every text."""
    return LOGITS.expand(len(x_t), L, V)


def table(halved: bool = False) -> Table:
    """A network that depends on the text, but not on the time."""
    made = (HalvedTable if halved else Table)(PROCESS, L, seed=3, size=1.5)
    made.sway *= 0
    return made


def laws_of(network):
    def laws(seen):
        return torch.softmax(network.outputs(torch.tensor([seen]), torch.ones(1))[0], -1).numpy()

    return laws


def counted(x: Tensor, texts) -> np.ndarray:
    found = dict.fromkeys(texts, 0)
    for row in map(tuple, x.tolist()):
        found[row] += 1  # a KeyError where a text is not in the language
    return np.array(list(found.values()))


def draw(network, n: int, **how) -> Tensor:
    how = {"constraint": constraint(PATTERN, V, L), "seeds": range(n), "sampler": "first-hitting"} | how
    return sample(network, PROCESS, (n, L), method="cedd", **how)


@pytest.mark.parametrize(
    ("sampler", "steps"),
    [
        *(
            pytest.param(sampler, 3, marks=pytest.mark.slow if sampler in ("probability", "margin") else ())
            for sampler in SAMPLERS
        ),
        *(("analytic", 1), ("entropy", 1)),
    ],
)
def test_text_independent_networks_give_product_law(sampler, steps):
    """Every call has the same law, however many tokens are revealed at once."""
    texts = members(PATTERN, V, L)
    law = product_law(torch.softmax(LOGITS, -1).numpy(), (V,) * L, texts, V)
    expected = np.array([law[text] for text in texts]) / sum(law.values())
    found = counted(draw(blind, 600, sampler=sampler, steps=steps), texts)
    assert p_value(found, expected) > ERROR_RATE


@pytest.mark.parametrize("halved", [pytest.param(False, marks=pytest.mark.slow), True])
def test_first_hitting_follows_tilted_law(halved):
    network, texts = table(halved), members(PATTERN, V, L)
    law = tilted_law(laws_of(network), L, texts, V)
    found = counted(draw(network, 1500), texts)
    assert p_value(found, np.array([law[text] for text in texts])) > ERROR_RATE


def test_span_places_are_found_without_synchronization():
    """The meta device raises an error on synchronization."""
    x, rows, chosen = torch.zeros(2, L, device="meta").long(), torch.tensor([0, 2, 3, 5, 6]), torch.tensor([1, 3])
    places = SpanPlaces(span(PATTERN, V, 0, L), x, rows, chosen)
    assert len(places.sequences) == 2


def test_tilted_law_differs_from_law_given_language():
    network, texts = table(), members(PATTERN, V, L)
    everything = list(itertools.product(range(V), repeat=L))
    plain, tilted = (tilted_law(laws_of(network), L, which, V) for which in (everything, texts))
    given = np.array([plain[text] for text in texts])
    distance = 0.5 * np.abs(given / given.sum() - np.array([tilted[text] for text in texts])).sum()
    assert distance > 0.03


@pytest.mark.parametrize("order", ["probability", "margin", "entropy"])
def test_confidence_uses_law_given_language(order):
    """One mask at a time, with the likeliest token: the sequence of states follows by enumeration."""
    network, texts = table(), members(PATTERN, V, L)
    seen = (V,) * L
    while V in seen:
        f = laws_of(network)(seen)
        own = marginals(f, seen, texts, V)
        ordered = np.sort(own, -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = np.nansum(own * np.log(own), -1)
        confidence = {"probability": ordered[:, -1], "margin": ordered[:, -1] - ordered[:, -2], "entropy": entropy}[
            order
        ]
        i = max((i for i in range(L) if seen[i] == V), key=lambda i: confidence[i])
        best = max(product_law(f, seen, texts, V).items(), key=lambda each: each[1])[0]
        seen = (*seen[:i], best[i], *seen[i + 1 :])
    found = draw(network, 2, sampler=order, steps=L, temperature=0)
    assert found.tolist() == [list(seen)] * 2


@pytest.mark.parametrize(
    ("sampler", "how"),
    covering(
        itertools.product(
            (*SAMPLERS, "next-token"), ({}, {"temperature": 0.3}, {"temperature": 0}, {"top_p": 0.5}, {"exclude": [2]})
        )
    ),
)
def test_every_sequence_is_in_the_language(sampler, how):
    method = "ar" if sampler == "next-token" else "cedd"
    process, n = (cedd.absorb(V) if method == "ar" else PROCESS), 10
    network = table() if method == "cedd" else blind
    settings = {"method": method, "sampler": sampler, "steps": 3, "constraint": constraint(PATTERN, V, L)} | how
    x = sample(network, process, (n, L), seeds=range(n), **settings)
    texts = set(members(PATTERN, V, L))
    assert {tuple(row) for row in x.tolist()} <= texts
    if "exclude" in how:
        assert not bool((x == 2).any())
    alone = sample(network, process, (2, L), seeds=[7, 8], **settings)
    assert torch.equal(alone, x[7:9])


def test_temperature_zero_in_one_call_gives_most_likely_sequence():
    texts = members(PATTERN, V, L)
    law = product_law(torch.softmax(LOGITS, -1).numpy(), (V,) * L, texts, V)
    found = draw(blind, 1, sampler="analytic", steps=1, temperature=0)
    assert tuple(found[0].tolist()) == max(law, key=lambda text: law[text])


def test_temperature_is_applied_before_language():
    texts = members(PATTERN, V, L)
    law = product_law(torch.softmax(LOGITS / 0.5, -1).numpy(), (V,) * L, texts, V)
    found = counted(draw(blind, 600, temperature=0.5), texts)
    assert p_value(found, np.array([law[text] for text in texts]) / sum(law.values())) > ERROR_RATE


@pytest.mark.parametrize("sampler", ["first-hitting", "analytic"])
def test_top_p_is_applied_to_law_given_language(sampler):
    """Left to right in one call: by hand."""
    texts = members(PATTERN, V, L)
    f, top_p = torch.softmax(LOGITS, -1).numpy(), 0.6
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for i in range(L):
        following: dict[State, float] = {}
        for begun, chance in expected.items():
            own = marginals(f, (*begun, *(V,) * (L - i)), texts, V)[i]
            order = np.argsort(-own)
            kept = order[: 1 + int(np.searchsorted(own[order].cumsum(), top_p))]
            for v in kept.tolist():
                if own[v] > 0:
                    following[(*begun, v)] = chance * own[v] / own[kept].sum()
        expected = following
    if sampler == "analytic":
        found = counted(draw(blind, 500, sampler=sampler, steps=1, top_p=top_p), texts)
        assert p_value(found, np.array([expected.get(text, 0.0) for text in texts])) > ERROR_RATE
    else:
        assert set(map(tuple, draw(blind, 50, top_p=top_p).tolist())) <= set(texts)


def test_autoregressive_models_draw_only_continuable_tokens():
    """The next-token law, restricted to tokens with which some text of the language continues."""
    texts = members(PATTERN, V, L)
    f = torch.softmax(LOGITS, -1).numpy()
    expected: dict[State, float] = {(): 1.0}
    for i in range(L):
        following: dict[State, float] = {}
        for begun, chance in expected.items():
            own = np.array([f[i, v] * any(text[: i + 1] == (*begun, v) for text in texts) for v in range(V)])
            following |= {(*begun, v): chance * own[v] / own.sum() for v in range(V) if own[v]}
        expected = following
    x = sample(blind, cedd.absorb(V), (600, L), method="ar", constraint=constraint(PATTERN, V, L), seeds=range(600))
    assert p_value(counted(x, texts), np.array([expected[text] for text in texts])) > ERROR_RATE


def test_spans_and_fixed_tokens():
    """Two spans, a position that is free and one that is fixed; blind, so that the law is a product over them."""
    length, n = 6, 600
    logits = torch.randn(length, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    where = torch.zeros(length, dtype=torch.bool)
    where[[0, 3]] = True
    fixed = Fixed(torch.tensor([1, 0, 0, 2, 0, 0]), where)
    spans = [span("(aa|bb|bc)", V, 0, 2), span("(cab|caa|cbb)", V, 3, 6)]
    both = LanguageConstraint.of(length, spans).holding(fixed)
    x = sample(
        lambda x_t, sigma: logits.expand(len(x_t), length, V),
        PROCESS,
        (n, length),
        method="cedd",
        constraint=both,
        sampler="analytic",
        steps=2,
        seeds=range(n),
    )
    f = torch.softmax(logits, -1).numpy()
    expected = {
        (1, a, b, 2, *end): f[1, a] * f[2, b] * f[4, end[0]] * f[5, end[1]]
        for a in (1, 2)
        for b in range(V)
        for end in ((0, 1), (0, 0), (1, 1))
    }
    law = np.array(list(expected.values()))
    assert p_value(counted(x, expected), law / law.sum()) > ERROR_RATE


def test_no_noise_tokens_remain():
    """With a process that leaves a third of the tokens unmasked at t = 1."""
    process = cedd.absorb(V, cedd.LogLinear(eps=0.3))
    for sampler in ("analytic", "first-hitting"):
        how = {"sampler": sampler, "constraint": constraint(PATTERN, V, L), "steps": 2, "seeds": range(30)}
        x = sample(blind, process, (30, L), method="cedd", **how)
        assert set(map(tuple, x.tolist())) <= set(members(PATTERN, V, L))


def test_excluded_tokens_may_be_drawn_if_they_end_a_text():
    part = span("[ac]{4}", V, 0, L, ends=(2,))
    x = draw(blind, 50, constraint=LanguageConstraint.of(L, [part]), exclude=[2])
    assert bool((x == 2).any())
    with pytest.raises(ValueError, match=r"every text that satisfies regex\('\[c\]\{4\}'\) has probability 0"):
        draw(blind, 5, constraint=LanguageConstraint.of(L, [span("[c]{4}", V, 0, L)]), exclude=[2])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: constraint("(ab)*", V, 5),
            r"no text of 5 tokens satisfies regex\('\(ab\)\*'\); the nearest lengths are 4 and 6 tokens",
        ),
        (lambda: constraint("a{9}", V, L), "no text of 4 tokens .*; the nearest length is 9 tokens"),
        (lambda: constraint("a", V, L), "the nearest length is 1 token$"),
        (lambda: constraint("d{4}", V, L), "the tokenizer lacks some of their characters"),
        (lambda: constraint("a*", V + 1, L), "is compiled for 4 tokens, not 3"),
        (lambda: LanguageConstraint.of(L, [span("a*", V, 2, 7)]), "is not within 4 tokens"),
        (
            lambda: constraint("(ab)*", V, L).holding(Fixed(torch.full((L,), 1), torch.arange(L) == 0)),
            "no text of 4 tokens with the tokens that are fixed satisfies",
        ),
    ],
)
def test_impossible_languages_are_rejected_before_sampling(made, message):
    def never(x_t, sigma):
        raise AssertionError("the network was called")

    length = 5 if "5 tokens" in message else L
    with pytest.raises(ValueError, match=message) as caught:
        sample(never, PROCESS, (2, length), method="cedd", sampler="first-hitting", constraint=made())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sampler", ["gibbs", "stratified"])
def test_samplers_without_joint_drawing_are_rejected(sampler):
    process = cedd.absorb(V) if sampler == "gibbs" else cedd.uniform(V)
    with pytest.raises(ValueError, match="cannot write texts under a constraint"):
        sample(blind, process, (2, L), method="bayes", sampler=sampler, constraint=constraint(PATTERN, V, L))


@pytest.mark.parametrize("places", [slice(0, 5), slice(1, 4)])
def test_preparing_places_before_network_call_gives_same_draws(places: slice):
    """Spans over all masks and over some, whether the draws are prepared before the network is called or after it."""
    process = cedd.absorb(3, cedd.LogLinear(eps=1e-9))
    network, kept = Table(process, 5, seed=5, size=0.7), constraint("(ab|c)*a?", 3, places.stop - places.start)
    span = kept.spans[0].moved(-places.start)
    how = {"constraint": LanguageConstraint.of(5, [span]), "seeds": range(20), "sampler": "first-hitting"}
    both = [sample(network, process, (20, 5), method="cedd", deterministic=one, **how) for one in (True, False)]
    assert torch.equal(*both)
    prepared = [0]

    class Counted(LanguageConstraint):
        def prepared(self, x: Tensor, rows: Tensor, sharpening: Sharpening, chosen: Tensor) -> Draw:
            prepared[0] += 1
            return super().prepared(x, rows, sharpening, chosen)

    how["constraint"] = Counted(*(getattr(how["constraint"], one) for one in ("tokens", "where", "only", "spans")))
    assert torch.equal(sample(network, process, (20, 5), method="cedd", deterministic=False, **how), both[0])
    assert prepared[0] >= 5
