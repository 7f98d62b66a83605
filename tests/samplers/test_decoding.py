"""Decoding rules of other projects: recorded trajectories, reference implementations, and independence of texts."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import cedd
from cedd.samplers import ConfidenceDecoding, Fixed
from cedd.samplers.decoding import DECODING_RULES
from cedd.samplers.random_numbers import RandomNumbers, Use
from tests.models import plain_llama
from tests.models.test_published_llama import fixture_folder

V, MASK = plain_llama.V, 20


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> cedd.LanguageModel:
    return cedd.import_model(plain_llama.write(tmp_path_factory.mktemp("llada"), "llada"), device="cpu")


@pytest.fixture(scope="module")
def dream(tmp_path_factory: pytest.TempPathFactory) -> cedd.LanguageModel:
    return cedd.import_model(plain_llama.write(tmp_path_factory.mktemp("dream"), "dream"), device="cpu")


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> cedd.LanguageModel:
    return cedd.import_model(plain_llama.write(tmp_path_factory.mktemp("sdar"), "sdar"), device="cpu")


def states_of(model: cedd.LanguageModel, prompts: Tensor, length: int, sampler: Any, **options: Any) -> Tensor:
    """The sampler's state after each step, [n + 1, B, P + length]; masks are V."""
    seen: list[Tensor] = []
    size = prompts.shape[1] + length
    where = torch.arange(size) < prompts.shape[1]
    fixed = Fixed(torch.nn.functional.pad(prompts, (0, length)), where.expand(len(prompts), -1))
    cedd.sample(
        options.pop("network", model.model),
        model.process,
        (len(prompts), size),
        method=model.method,
        sampler=sampler,
        constraint=fixed,
        seed=0,
        callback=lambda _step, _t, x: seen.append(x.clone()),
        **{"temperature": 0.0, **options},
    )
    return torch.stack(seen)


# ---- what LLaDA's own code wrote --------------------------------------------------------------------------------

LLADA_CASES: dict[str, dict[str, Any]] = {
    "greedy": {"steps": 16, "block_length": 16},
    "blocks": {"steps": 8, "block_length": 8},
    "uneven": {"steps": 6, "block_length": 8},
    "plain": {"steps": 8, "block_length": 16},
    "no_eos": {"steps": 8, "block_length": 16, "exclude": (96,)},
    "eos_unsure": {"steps": 8, "block_length": 16, "sampler": ConfidenceDecoding("llada", unsure=(96, 121))},
    "cfg": {"steps": 8, "block_length": 8, "guidance": 2.5},
}


@pytest.mark.parametrize("name", LLADA_CASES)
def test_llada_trajectories_match_original_code(name: str) -> None:
    folder = fixture_folder("llada")
    io, model = load_file(folder / "io.safetensors"), cedd.import_model(folder, device="cpu")
    prompts, expected = io[f"{name}.prompt"], io[f"{name}.states"]
    options: dict[str, Any] = {"sampler": "llada", **LLADA_CASES[name]}
    found = states_of(model, prompts, expected.shape[2] - prompts.shape[1], **options)
    assert torch.equal(found.masked_fill(found == 128, 120), expected)


def test_llada_random_order_matches_original_code(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fixture_folder("llada")
    io, model = load_file(folder / "io.safetensors"), cedd.import_model(folder, device="cpu")
    expected, uniform = io["random.states"], RandomNumbers.uniform

    def given(self: RandomNumbers, use: Use, step: int = 0) -> Tensor:
        return io["random.places"][step].double() if use is Use.PLACE else uniform(self, use, step)

    monkeypatch.setattr(RandomNumbers, "uniform", given)
    length = expected.shape[2] - io["random.prompt"].shape[1]
    found = states_of(model, io["random.prompt"], length, "llada-random", steps=8, block_length=16)
    assert torch.equal(found.masked_fill(found == 128, 120), expected)


# ---- their rules, written out -----------------------------------------------------------------------------------


def logits_of(model: cedd.LanguageModel, x: Tensor) -> Tensor:
    """The network's logits for one text [L]."""
    return model.model(x[None])[0].double()


def transcribed_dream(model: cedd.LanguageModel, x: Tensor, steps: int, alg: str) -> list[Tensor]:
    """`diffusion_generate` of Dream at temperature 0 for one text [L], after each step."""
    x, seen = x.clone(), []
    times = torch.linspace(1, 1e-3, steps + 1)
    for i in range(steps):
        masked = x == V
        logits = logits_of(model, x)[masked]
        probs = logits.softmax(-1)
        confidence, tokens = probs.max(-1)
        if alg == "topk-margin":
            best = probs.sort(-1, descending=True).values
            confidence = best[:, 0] - best[:, 1]
        elif alg == "entropy":
            confidence = (probs * torch.log(probs + 1e-10)).sum(-1)
        count = masked.sum().float()
        number = int(count * (1 - times[i + 1] / times[i])) if i < steps - 1 else int(count)
        if number:
            kept = confidence.topk(number).indices
            places = masked.nonzero()[:, 0]
            x[places[kept]] = tokens[kept]
        seen.append(x.clone())
    return seen


@pytest.mark.parametrize("alg", ["maskgit-plus", "topk-margin", "entropy"])
@pytest.mark.parametrize("steps", [4, 7, 11])
def test_dream_rules_match_reference(dream: cedd.LanguageModel, alg: str, steps: int) -> None:
    prompts = torch.tensor([[3, 9, 14]])
    found = states_of(dream, prompts, 11, f"dream-{alg}", steps=steps)
    expected = transcribed_dream(dream, found[0, 0], steps, alg)
    assert torch.equal(found[1:, 0], torch.stack(expected))


def test_dream_origin_reveals_at_random_times(dream: cedd.LanguageModel) -> None:
    """For 40 texts of 11 masks, the masks left after step i are binomial with t_{i+1}: 5 standard deviations."""
    prompts = torch.tensor([[3, 9, 14]]).expand(40, -1)
    found = states_of(dream, prompts, 11, "dream-origin", steps=5)
    left = (found == V).double().sum((1, 2)) / (40 * 11)
    times = torch.linspace(1, 1e-3, 6).double()
    assert float(left[-1]) == 0
    assert bool(((left - times)[:-1].abs() < 5 * (times * (1 - times) / 440).sqrt()[:-1] + 1e-12).all())


def test_dream_positions_can_be_sampled(dream: cedd.LanguageModel) -> None:
    """With alg_temp: a low temperature keeps the most confident tokens, a high one any."""
    prompts = torch.tensor([[3, 9, 14]]).expand(8, -1)
    rule = DECODING_RULES["dream-entropy"]
    plain, cold, hot = (
        states_of(dream, prompts, 11, sampler, steps=6)
        for sampler in (rule, with_temperature(rule, 1e-4), with_temperature(rule, 100.0))
    )
    option = states_of(dream, prompts, 11, "dream-entropy", steps=6, place_temperature=100.0)
    assert torch.equal(option, hot)
    assert torch.equal(plain, cold)
    assert not torch.equal(plain, hot)
    assert torch.equal((plain == V).sum(2), (hot == V).sum(2))  # the same number in each step


def with_temperature(rule: ConfidenceDecoding, temperature: float) -> ConfidenceDecoding:
    return ConfidenceDecoding(rule.name, rule.confidence, rule.schedule, rule.sharpened, place_temperature=temperature)


def transcribed_threshold(
    model: cedd.LanguageModel, x: Tensor, steps: int | None, threshold: float | None, rule: str
) -> list[Tensor]:
    """SDAR's rules for one block, and Fast-dLLM's (steps None), at temperature 0."""
    x, seen, step = x.clone(), [], 0
    count = int((x == V).sum())
    while bool((x == V).any()):
        masked = x == V
        places = masked.nonzero()[:, 0]
        confidence, tokens = logits_of(model, x)[masked].softmax(-1).max(-1)
        number = 1 if steps is None else count // steps + (step < count % steps)
        if rule == "sequential":
            kept = torch.arange(number)
        else:
            kept = confidence.topk(min(number, len(confidence))).indices
            if threshold is not None and int((confidence > threshold).sum()) >= number:
                kept = (confidence > threshold).nonzero()[:, 0]
        x[places[kept]] = tokens[kept]
        seen.append(x.clone())
        step += 1
    return seen


@pytest.mark.parametrize(
    ("sampler", "steps", "threshold", "rule"),
    [
        ("sdar-static", 4, None, "static"),
        ("sdar-dynamic", 4, 0.35, "dynamic"),
        ("sdar-sequential", 4, None, "sequential"),
        ("threshold", None, 0.35, "threshold"),
    ],
)
def test_sdar_and_threshold_rules_match_reference(
    llada: cedd.LanguageModel, sampler: str, steps: int | None, threshold: float | None, rule: str
) -> None:
    given = {"steps": steps} if steps else {}
    found = states_of(llada, torch.tensor([[3, 9, 14]]), 10, sampler, threshold=threshold, **given)
    expected = transcribed_threshold(llada, found[0, 0], steps, threshold, rule)
    assert torch.equal(found[1 : 1 + len(expected), 0], torch.stack(expected))
    assert bool((found[len(expected) :] != V).all())
    if threshold is not None:
        assert int((found[1:] != found[:-1]).sum((1, 2)).max()) > (3 if steps else 1)  # so that the threshold matters


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("given", [5, 6, 7])
@pytest.mark.parametrize("sampler", ["sdar-static", "sdar-dynamic", "sdar-sequential"])
def test_sdar_matches_reference_if_prompt_ends_within_block(
    sdar: cedd.LanguageModel, sampler: str, given: int, steps: int
) -> None:
    """`block_diffusion_generate` of SDAR, without the tokens that it overwrites when fewer masks are left."""
    block, threshold = 4, 0.3
    x = torch.cat([torch.arange(given), torch.full((12 - given,), MASK)])
    expected = [x]
    for start in range(given // block * block, 12, block):
        here = slice(start, start + block)
        for step in range(steps):
            if not bool((masked := x[here] == MASK).any()):
                break
            logits = sdar.original_logits(x[None, : start + block])[0, here].double()
            logits[:, MASK] = -torch.inf
            confidence, tokens = logits.softmax(-1).max(-1)
            number = min(block // steps + (step < block % steps), int(masked.sum()))
            ranked = confidence.masked_fill(~masked, -1.0)
            kept = masked.nonzero()[:number, 0] if sampler == "sdar-sequential" else ranked.topk(number).indices
            if sampler == "sdar-dynamic" and int((ranked > threshold).sum()) >= number:
                kept = (ranked > threshold).nonzero()[:, 0]
            x = x.clone()
            x[here][kept] = tokens[kept]
            expected.append(x)
    chosen: dict[str, Any] = {"threshold": threshold} if sampler == "sdar-dynamic" else {}
    prompts = torch.arange(given)[None]
    found = states_of(sdar, prompts, 12 - given, sampler, steps=steps, exclude=(MASK,), **chosen)[:, 0]
    found = torch.unique_consecutive(found.masked_fill(found == V, MASK), dim=0)
    assert torch.equal(found, torch.stack(expected))


# ---- whatever the rule ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODING_RULES)
def test_text_does_not_depend_on_batch(llada: cedd.LanguageModel, name: str) -> None:
    """Whatever other texts are drawn with it, and however many of their tokens are given."""
    size, numbers = 14, [3, 8, 0]
    rows = torch.randint(V, (3, size), generator=torch.Generator().manual_seed(1))
    where = torch.arange(size) < torch.tensor(numbers)[:, None]
    options: dict[str, Any] = {"method": llada.method, "sampler": name, "temperature": 0.7, "deterministic": False}
    options |= {} if name == "threshold" else {"steps": 5}
    options |= {"block_length": 4} if "block_length" in DECODING_RULES[name].own_options else {}
    together = cedd.sample(
        llada.model, llada.process, (3, size), constraint=Fixed(rows, where), seeds=[5, 6, 7], **options
    )
    assert bool((together < V).all())
    assert torch.equal(together[where], rows[where])
    for i in range(3):
        held = Fixed(rows[i : i + 1], where[i : i + 1]) if numbers[i] else None
        alone = cedd.sample(llada.model, llada.process, (1, size), constraint=held, seeds=[5 + i], **options)
        assert torch.equal(alone[0], together[i])


def test_blocks_are_completed_in_order(llada: cedd.LanguageModel) -> None:
    for name in ("llada", "threshold", "sdar-dynamic"):
        given = {} if name == "threshold" else {"steps": 6}
        states = states_of(llada, torch.tensor([[3, 9, 14]]), 9, name, block_length=3, temperature=1.0, **given)
        for x in states[:, 0, 3:]:
            done = (x != V).view(3, 3)
            assert all(bool(done[i].all()) for i in range(2) if bool(done[i + 1].any()))


def test_temperature_one_samples_from_network(llada: cedd.LanguageModel) -> None:
    """A single mask: 4,000 draws, chi-square with 22 degrees of freedom, false-alarm rate 1e-4."""
    context = torch.tensor([3, 9, 14, 2])
    tokens = torch.cat([context, torch.zeros(1, dtype=torch.int64)])
    constraint = Fixed(tokens, torch.arange(5) < 4)
    how: dict[str, Any] = {"method": llada.method, "sampler": "llada", "steps": 1, "constraint": constraint, "seed": 0}
    drawn = cedd.sample(llada.model, llada.process, (4000, 5), deterministic=False, **how)[:, 4]
    x = torch.cat([context, torch.tensor([V])])
    expected = 4000 * logits_of(llada, x)[4].softmax(-1)
    counts = torch.bincount(drawn, minlength=V).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 55.5


def test_unused_or_invalid_sampler_options_are_rejected(llada: cedd.LanguageModel, tmp_path, capsys) -> None:
    from cedd.cli import main

    llada.save_pretrained(tmp_path / "model")
    words = ["sample", str(tmp_path / "model"), "--length", "6", "--device", "cpu", "--seed", "1"]
    assert main([*words, "--sampler", "llada", "--block-length", "2", "--steps", "3", "--temperature", "0"]) == 0
    assert len(capsys.readouterr().out.split()) >= 6
    assert main([*words, "--block-length", "2"]) == 2
    assert "--block-length has no effect with the sampler analytic" in capsys.readouterr().err
    assert main([*words, "--sampler", "llada", "--threshold", "0.5"]) == 2
    assert "--threshold has no effect with the sampler llada" in capsys.readouterr().err
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"block_length": 0}, "block_length must be at least 1 \\(got 0"),
        ({"threshold": 1.5}, r"threshold must be in \[0, 1\] \(got 1.5"),
        ({"place_temperature": -1.0}, r"place_temperature must be at least 0 and finite \(got -1.0\)"),
    ]
    for settings, message in wrong:
        with pytest.raises(ValueError, match=message):
            llada.generate(1, length=6, sampler="threshold", **settings)
    uniform = cedd.uniform(V)
    with pytest.raises(ValueError, match="llada reveals masks, and this process has none"):
        cedd.sample(lambda x, s: torch.zeros(*x.shape, V), uniform, (1, 4), method="bayes", sampler="llada")
