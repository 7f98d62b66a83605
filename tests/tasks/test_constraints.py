"""Constraints, particles, guidance and labels through `LanguageModel`: results and errors."""

import itertools
import json
import math
import re
from typing import Any

import pytest
import torch

import cedd
from cedd.constraints import TokenAutomaton, choice, compile_tokens, json_schema, length, regex
from cedd.data.token_languages import language_constraint
from cedd.data.tokenizers import BERTTokenizer, BPETokenizer, CharTokenizer, PaddedTokenizer, Tokenizer
from cedd.tasks import LanguageModel, load
from tests.combinations import covering
from tests.tasks.models import save_random

CHARACTERS = 'abcdefghijklmnopqrstuvwxyz .,T0123456789{}":-\n'
WORDS = ["the cat sat on the mat.", "a dog, a cat and 12 birds", '{"a": 1, "b": "cat"}', "yes no maybe 2024-01-31"]
TOKENIZERS = {
    "char": lambda: CharTokenizer(CHARACTERS),
    "padded": lambda: PaddedTokenizer(CharTokenizer(CHARACTERS)),
    "bpe": lambda: BPETokenizer.train(WORDS * 20, 300),
    "bert": lambda: BERTTokenizer(
        [
            "[PAD]",
            "[UNK]",
            "[CLS]",
            "[SEP]",
            "[MASK]",
            *"abcdefghij.,:{}0123456789-",
            '"',
            *(f"##{c}" for c in "abc123"),
            "cat",
            "yes",
        ]
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, LanguageModel]:
    folder, made = tmp_path_factory.mktemp("models"), {}
    for name, make in TOKENIZERS.items():
        path = save_random(folder / name, "absorb", "cedd", tokenizer=make(), length=24, time_input="none")
        made[name] = load(path, "cpu")
        generator = torch.Generator().manual_seed(0)
        for parameter in made[name].model.parameters():  # outputs that depend on the text
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return made


LANGUAGES = {
    "char": (regex("[a-c]{2,6}"), regex(r"(ab|c)*\.+")),
    "padded": (choice(["yes", "cat a", "b."]), regex(r"1[0-9]{1,2}-(a|b)")),
    "bpe": (choice(["yes", "cat a", "b."]), regex(r"1[0-9]{1,2}-(a|b)")),
    "bert": (choice(["yes", "cat a", "b."]), regex("[a-e]( cat)*1?")),
}


@pytest.mark.parametrize(
    ("name", "how"),
    covering(
        itertools.product(
            TOKENIZERS, ({}, {"sampler": "first-hitting"}, {"sampler": "entropy", "steps": 4}, {"top_p": 0.7})
        )
    ),
)
def test_texts_satisfy_constraint(models, name, how):
    for language in LANGUAGES[name]:
        texts = models[name].generate(2, length=6, constraint=language, seed=1, **how)
        assert all(language.matches(text) for text in texts)


def test_constraint_applies_after_prompt(models):
    for name, prompt in (("bpe", "the cat "), ("bpe", "a dog"), ("padded", "so, "), ("char", "on ")):
        language = regex("[a-d]{3}")
        for text in models[name].generate(3, prompt=prompt, constraint=language, seed=0):
            assert text.startswith(prompt)
            assert language.matches(text.removeprefix(prompt)), (name, text)


def test_text_stops_at_end_token(models):
    """Nothing that follows an end token is written."""
    for name in ("padded", "bpe"):
        texts = models[name].generate(5, length=20, constraint=choice(["yes", "no"]), seed=0)
        assert set(texts) <= {"yes", "no"}


@pytest.mark.parametrize(
    ("name", "language", "expected"),
    [
        ("bpe", choice(["yes", "no"]), 4),  # three bytes and the end
        ("char", choice(["yes", "no"]), 3),
        ("char", regex("[a-z]{2,900}"), 20),  # twice the shortest length plus 16
        *(
            pytest.param("padded", regex(pattern), tokens, marks=pytest.mark.slow)
            for pattern, tokens in (("[a-z]{2,900}", 21), ("[a-z]+", 24))
        ),
        ("bpe", regex("(?s).*"), 24),
    ],
)
def test_default_length_under_constraint(models, name, language, expected):
    seen: list[int] = []
    models[name].generate(1, constraint=language, seed=0, callback=lambda step, t, x: seen.append(x.shape[1]))
    assert set(seen) == {expected}


def test_each_blank_can_have_its_own_constraint(models):
    for name in ("bpe", "char"):
        found = models[name].infill(
            "the ____{4} sat on ______ at ____{2}.", 4, [regex("[a-f]{4}"), None, regex("[0-9]{2}")]
        )
        for text in found:
            assert re.fullmatch(r"(?s)the [a-f]{4} sat on .* at [0-9]{2}\.", text), text
        both = models[name].infill("____{3} and ____{3}", 3, regex("[a-f]{3}"))
        assert all(re.fullmatch("[a-f]{3} and [a-f]{3}", text) for text in both)


def test_constrained_blanks_of_long_texts(models):
    """They are filled in windows, each with the constraints of its own blanks."""
    model = models["char"]
    text = "a cat sat on the mat, ____{4} and then the dog came in from the garden ____{3}. it was a dog, ____{4}."
    for found in model.infill(text, 2, regex("[a-c]+"), seed=0):
        assert re.fullmatch(
            text.replace("____{4}", "[a-c]{4}").replace("____{3}", "[a-c]{3}").replace(".", r"\."), found
        )
    with pytest.raises(ValueError, match="a blank with a constraint has at most 12 tokens"):
        model.infill(text.replace("____{3}", "____{20}"), constraint=regex("[a-c]+"))


def test_generated_json_follows_schema(models):
    schema = {"type": "object", "properties": {"a": {"enum": ["b", 1]}, "c": {"type": "boolean"}}, "required": ["a"]}
    for name in ("bpe", "padded"):
        for text in models[name].generate(4, constraint=json_schema(schema), seed=2):
            value = json.loads(text)
            assert value["a"] in ("b", 1)
            assert set(value) <= {"a", "c"}


def test_constrained_texts_depend_on_seed_not_on_batch(models):
    model, how = models["bpe"], {"constraint": regex("[a-e ]{3,9}"), "length": 9}
    together = model.generate(5, seed=4, **how)
    assert model.generate(5, seed=4, batch=2, **how) == together
    assert model.generate(2, seed=4, **how) == together[:2]


def test_autoregressive_model_with_constraint(tmp_path):
    model = load(save_random(tmp_path / "ar", "absorb", "ar", tokenizer=TOKENIZERS["bpe"](), length=24), "cpu")
    language = regex("[a-e]{3}( [0-9]+)?")
    texts = model.generate(4, length=8, prompt="the ", constraint=language, seed=0)
    assert all(language.matches(text.removeprefix("the ")) for text in texts)
    with pytest.raises(ValueError, match=r"particles need a model that only masks .* this one is autoregressive"):
        model.generate(length=8, prompt="the ", constraint=language, particles=2)


@pytest.mark.parametrize(
    ("process", "method", "reason"),
    [("uniform", "bayes", "this one also replaces tokens"), ("absorb", "sedd", "this one gives ratios")],
)
def test_constraints_name_what_a_model_lacks(tmp_path, process, method, reason):
    model = load(save_random(tmp_path / "m", process, method, length=24), "cpu")
    with pytest.raises(ValueError, match=f"a constraint on the text .* needs a model that .*; {reason}"):
        model.generate(length=8, constraint=regex("[a-e]+"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.generate(constraint=regex("[a-z]{30}")), "no text of 24 tokens .*; the nearest length is 30"),
        (lambda m: m.generate(length=2, constraint=choice(["yes"])), "no text of 2 .*; the nearest length is 3 tokens"),
        (lambda m: m.generate(constraint=regex("")), "no text of 1 token satisfies .*; the nearest length is 0 tokens"),
        (lambda m: m.generate(constraint=regex("é")), "no text of up to .* or the tokenizer lacks some"),
        (lambda m: m.generate(constraint=cedd.constraints.intersect(regex("a"), length(2))), "no text satisfies"),
        (lambda m: m.infill("____ a", constraint=regex("a{5}")), "no text of 4 tokens satisfies"),
        (
            lambda m: m.infill("____ a ____", constraint=[regex("a+")]),
            r"give one constraint per blank \(constraints: 1, blanks: 2\)",
        ),
        (lambda m: m.generate(constraint=regex("a+"), sampler="gibbs"), "gibbs cannot write texts under a constraint"),
        (lambda m: m.generate(guidance=2.0), "guidance needs a condition"),
        (lambda m: m.generate(guidance=math.nan), "guidance must be a finite number"),
        (lambda m: m.generate(particles=0), "particles must be at least 1 .got 0"),
        (lambda m: m.generate(particles=True), "particles must be an integer .got True"),
        (lambda m: m.generate(reward=len), "give their number, for example particles=16"),
        (lambda m: m.generate(particles=2, sampler="entropy"), "not as entropy does; omit the sampler"),
        (lambda m: m.infill("a" * 30 + "____", particles=2), "particles need a text of at most 24 tokens"),
    ],
)
def test_impossible_requests_give_one_line_errors(models, call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call(models["char"])
    assert "\n" not in str(caught.value)


# Particles, rewards, guidance


def test_particles_return_weighted_texts(models):
    model, language = models["bpe"], choice(["yes", "no", "cat"])
    sets = model.particles(2, 6, prompt="a ", constraint=language, seed=0)
    for one in sets:
        assert len(one.texts) == len(one.weights) == 6
        assert sum(one.weights) == pytest.approx(1.0)
        assert one.text in one.texts
        assert all(language.matches(text.removeprefix("a ")) for text in one.texts)
        assert one.log_normalizer < 0
        assert 1 <= one.effective_sample_size <= 6
    assert model.particles(1, 6, prompt="a ", constraint=language, seed=0)[0] == sets[0]
    assert model.generate(2, prompt="a ", constraint=language, particles=6, seed=0) == [one.text for one in sets]


@pytest.mark.slow
def test_reward_steers_generated_texts(models):
    seen: list[list[str]] = []

    def letters(texts: list[str]) -> list[float]:
        seen.append(texts)
        return [sum(letter in "abcdefgh" for letter in text) for text in texts]

    model, how = models["char"], {"length": 8, "seed": 0}
    steered = letters(model.generate(6, particles=8, reward=letters, strength=3.0, **how))
    plain = letters(model.generate(6, **how))
    assert all(isinstance(text, str) and len(text) == 8 for texts in seen for text in texts)
    assert sum(steered) > 2 * sum(plain) + 3


def test_guidance_by_prompt(models):
    model, how = models["char"], {"prompt": "the cat ", "length": 16, "sampler": "first-hitting", "seed": 3}
    plain = model.generate(3, **how)
    assert model.generate(3, guidance=1.0, **how) == plain
    strong = model.generate(3, guidance=8.0, **how)
    assert strong != plain
    assert all(text.startswith("the cat ") for text in strong)
    assert model.generate(3, guidance=8.0, batch=1, **how) == strong


# Labels


def test_classify_follows_bayes_rule(models):
    model = models["char"]
    found = model.classify("the cat", ["a", "b", "c"], "{text} is {label}")
    values = model.log_likelihood("the cat is ", ["a", "b", "c"])
    shares = torch.softmax(torch.tensor([float(value) for value in values], dtype=torch.float64), 0)
    assert found.probabilities == pytest.approx(dict(zip("abc", shares.tolist(), strict=True)))
    assert found.label == max(found.probabilities, key=lambda label: found.probabilities[label])
    assert list(found.probabilities.values()) == sorted(found.probabilities.values(), reverse=True)
    assert all(one.exact for one in found.log_likelihoods.values())
    turned = model.classify("at", ["a", "b"], "{label}: {text}")
    values = model.log_likelihood("", ["a: at", "b: at"], draws=8)
    assert turned.log_likelihoods == dict(sorted(zip("ab", values, strict=True), key=lambda pair: -pair[1]))


def test_probability_intervals_contain_result_of_many_draws(models):
    model, labels = models["char"], ["abcde", "edcba", "bbbbb"]
    exact = model.classify("the", ["a", "b"])
    assert exact.intervals == {label: (p, p) for label, p in exact.probabilities.items()}
    certain = model.classify("the", labels, draws=300)
    inside = []
    for seed in range(12):
        found = model.classify("the", labels, draws=3, seed=seed)
        assert not any(one.exact for one in found.log_likelihoods.values())
        for label, (low, high) in found.intervals.items():
            assert 0 <= low < found.probabilities[label] < high <= 1
            inside.append(low < certain.probabilities[label] < high)
        for label, value in found.log_likelihoods.items():
            low, high = value.ci95
            inside.append(low < certain.log_likelihoods[label] < high)
    assert sum(inside) > 0.88 * len(inside)


def test_answers_share_network_calls(models, monkeypatch):
    model, calls, features = models["char"], [], type(models["char"].model).features
    together = model.log_likelihood("the ", ["abcde", "edcba", "bbbbb"], seed=3)

    def counted(self, x_t, *args, **options):
        calls.append(len(x_t))
        return features(self, x_t, *args, **options)

    monkeypatch.setattr(type(model.model), "features", counted)
    alone = [model.log_likelihood("the ", [one], seed=3)[0] for one in ("abcde", "edcba", "bbbbb")]
    separate = len(calls)
    assert model.log_likelihood("the ", ["abcde", "edcba", "bbbbb"], seed=3) == together == pytest.approx(alone)
    assert len(calls) - separate < 0.6 * separate


def test_rank_orders_texts_by_likelihood(models):
    model = models["char"]
    found = model.rank(["the", "cat", "abcde"])
    assert [one.text for one in found] == sorted(
        ["the", "cat", "abcde"], key=lambda text: -model.rank([text])[0].log_likelihood if len(text) < 5 else math.inf
    )
    per_token = model.rank(["the", "abcde"], per_token=True)
    values = [one.log_likelihood / one.log_likelihood.tokens for one in per_token]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("method", ["ar", "cedd"])
def test_likelihoods_of_all_answers_of_one_length_sum_to_one(tmp_path, method):
    options: dict[str, Any] = {} if method == "ar" else {"time_input": "none"}
    folder = save_random(tmp_path / "m", "absorb", method, tokenizer=CharTokenizer("abc"), length=8, **options)
    answers = [first + second for first in "abc" for second in "abc"]
    model = load(folder, "cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.model.parameters():  # outputs that depend on the text
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    found = model.log_likelihood("ab", answers)
    assert all(one.exact for one in found)
    assert len({round(one, 6) for one in found}) == 9
    assert math.fsum(map(math.exp, found)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.classify("a", ["b"]), "at least two different texts"),
        (lambda m: m.classify("a", ["b", "b"]), "at least two different texts"),
        (lambda m: m.classify("a", "bc"), "labels must be a list of at least one text .got 'bc'"),
        (lambda m: m.classify("a", ["b", "c"], "{label}"), "must have {text} and {label} once each"),
        (lambda m: m.rank("abc"), "list of at least one text"),
        (lambda m: m.rank([]), "list of at least one text"),
        (lambda m: m.rank(None), "list of at least one text"),
        (lambda m: m.rank(["a", ""]), r"texts must not be empty texts \(got '' at index 1\)"),
        (lambda m: m.log_likelihood("a", [""]), r"answers must not be empty texts \(got '' at index 0\)"),
        (lambda m: m.classify("a", ["b", ""]), r"labels must not be empty texts \(got '' at index 1\)"),
        (lambda m: m.classify("a", None), "list of at least one text"),
        (lambda m: m.classify("a", ["日", "本"]), "the labels '日' and '本' have the same tokens in this model"),
    ],
)
def test_invalid_labels_and_texts_are_rejected(models, call, message):
    with pytest.raises(ValueError, match=message):
        call(models["char"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.generate(constraint="a+"), r"such as cedd.constraints.regex\(.*got 'a\+'"),
        (lambda m: m.generate(constraint=re.compile("a+")), r"such as cedd.constraints.regex\("),
        (lambda m: m.generate(prompt="a", constraint="a+"), r"such as cedd.constraints.regex\("),
        (lambda m: m.infill("a ____ b", constraint="a+"), r"such as cedd.constraints.regex\(...\)"),
        (lambda m: m.infill("a ____ b", constraint=["a+"]), r"such as cedd.constraints.regex\(...\)"),
        (
            lambda m: m.particles(reward=lambda texts: None),
            r"must return one number for each of the .* texts \(got None\)",
        ),
        (lambda m: m.particles(reward=lambda texts: ["a"] * len(texts)), "must return one number for each"),
        (lambda m: m.particles(reward=lambda texts: 1.0), r"one number for each of the .* texts \(got the shape \(\)"),
        (lambda m: m.particles(reward=lambda texts: [1.0]), r"one number for each of .*\(got the shape \(1,\)"),
        (lambda m: m.particles(reward=lambda texts: [math.nan] * len(texts)), "nan or infinity for .* texts"),
        (lambda m: m.particles(count="a"), "particles must be an integer .got 'a'"),
        (lambda m: m.generate(prompt="a", guidance="2"), "guidance must be a finite number .got '2'"),
        (lambda m: m.particles(reward=5), "reward must be a function of texts .got 5"),
        (lambda m: m.particles(reward=len, strength="a"), "must be a finite number .got 'a'"),
        (lambda m: m.particles(strength=2.0), "strength has no effect without a reward"),
        (lambda m: m.generate(constraint=lambda x: None), r"must return states of shape \[1, 24\] \(got NoneType\)"),
        (lambda m: m.generate(constraint=lambda x: x[:, 1:]), r"of shape \[1, 24\] \(got \[1, 23\]\)"),
        (lambda m: m.generate(reward=len), "give their number, for example particles=16"),
    ],
)
def test_invalid_constraints_and_rewards_give_one_line_errors(models, call, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call(models["char"])
    assert "\n" not in str(caught.value)


def test_reward_exception_is_propagated(models):
    def reward(texts: list[str]) -> list[float]:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        models["char"].particles(reward=reward)


# The cache


def test_compiled_constraints_are_cached_on_disk(tmp_path, monkeypatch):
    from cedd.data import token_languages as module

    monkeypatch.setattr(module, "SLOW", 0.0)
    monkeypatch.setattr(module, "MOST_FILES", 2)
    tokenizer: Tokenizer = TOKENIZERS["bpe"]()

    def compiled(pattern: str):
        module._compiled.cache_clear()
        return module.token_language(regex(pattern), tokenizer, may_end=True, cache=tmp_path).automaton

    first = compiled("[a-c]+")
    (file,) = (tmp_path / "constraints").iterdir()
    monkeypatch.setattr(module, "compile_tokens", None)  # from now on, only the file can provide it
    again = compiled("[a-c]+")
    assert all((one == other).all() for one, other in zip(first.transitions, again.transitions, strict=True))
    assert (first.classes == again.classes).all()
    assert (first.accepting == again.accepting).all()
    monkeypatch.undo()
    monkeypatch.setattr(module, "SLOW", 0.0)
    for damage in (b"", file.read_bytes()[:-40]):
        file.write_bytes(damage)
        assert compiled("[a-c]+").num_states == first.num_states
    monkeypatch.setattr(module, "MOST_FILES", 2)
    for pattern in ("a", "b", "c"):
        compiled(pattern)
    assert len(list((tmp_path / "constraints").iterdir())) == 2


def test_constraint_is_compiled_once_for_several_lengths(models, monkeypatch):
    from cedd.data import token_languages as module

    compiled = list[bool]()

    def counted(*parts: Any, may_end: bool) -> TokenAutomaton:
        compiled.append(may_end)
        return compile_tokens(*parts, may_end=may_end)

    monkeypatch.setattr(module, "compile_tokens", counted)
    for tokens in (6, 6, 7):
        models["padded"].generate(1, length=tokens, constraint=regex("[b-e]{2,5}"), seed=0)
    assert compiled == [True]


def test_language_constraint_in_cedd_sample():
    """`language_constraint` combines a language with a tokenizer; a language by itself is rejected."""
    tokenizer, language = CharTokenizer("abc"), regex("[ab]{2,3}")

    def network(x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*x_t.shape, tokenizer.vocab_size)

    process, how = cedd.absorb(tokenizer.vocab_size), {"method": "cedd", "steps": 2}
    drawn = cedd.sample(network, process, (8, 3), constraint=language_constraint(language, tokenizer, 3), **how)
    assert all(language.matches(tokenizer.decode(one.numpy())) for one in drawn)
    with pytest.raises(
        TypeError, match=r"pass .*language_constraint\(language, tokenizer, length\) instead of Language\(regex"
    ):
        cedd.sample(network, process, (8, 3), constraint=language, **how)  # pyright: ignore
