"""Every loss and its gradient against a naive dense formula; weights, rows, times, errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cedd
from cedd import METHODS, Bayes, Denoiser, Method, PowerShare, ScaledScore, Score, TokenProcess
from cedd.dynamics.causal import shift_right, start_symbol
from cedd.losses import NoiseDraws, NoisyBatch, batch_loss, draw_times, noisy_batch
from cedd.methods import get_method
from cedd.models.head import VocabularyHead
from cedd.names import ALIASES
from cedd.network import Capabilities
from cedd.objectives.cross_entropy import CrossEntropy, constant, likelihood, star
from cedd.objectives.objective import Rows
from cedd.objectives.score_entropy import ScoreEntropy, true_ratios
from cedd.process import Noise
from tests import reference
from tests.combinations import covering
from tests.networks import matching_chain

V, B, L = 4, 3, 5
PROCESSES = {
    "absorb": cedd.absorb(V),
    "uniform": cedd.uniform(V),
    "roulette": cedd.roulette(V, 0.6),
    "eroulette": cedd.eroulette(V, mask_share=PowerShare(0.1, 0.9)),
    "cosine": cedd.absorb(V, cedd.Cosine()),
    "hybrid": cedd.hybrid(V, 0.3),
}
# Score entropy is defined for every parameterization, not only for those of the table.
MORE = {
    "bayes by score entropy": Method("bayes by score entropy", Bayes(), ScoreEntropy()),
    "denoiser by score entropy": Method("denoiser by score entropy", Denoiser(rescale=False), ScoreEntropy()),
}
ALL = {**METHODS, **MORE}


def pairs() -> list[tuple[str, str]]:
    return [(m, p) for m in ALL for p in PROCESSES if m != "dfm" or p in ("absorb", "cosine")]


# ---- naive formulas ---------------------------------------------------------------------------------------------


def dense(process: TokenProcess, t: float) -> tuple[Tensor, Tensor]:
    """P_t and Q_t of one token, from the oracle."""
    chain = matching_chain(process, 1)
    return torch.tensor(reference.transition(chain, t)), torch.tensor(reference.rate_matrix(chain, t))


def naive_scores(method: Method, outputs: Tensor, x: int, matrix: Tensor) -> Tensor:
    """s_y [V] by sums over h."""
    tokens = matrix[:V, :V]
    if isinstance(method.parameterization, ScaledScore):
        return outputs.exp() * (tokens / matrix[x, :V]).mean(-1)
    if isinstance(method.parameterization, Score):
        return outputs.exp()
    f = torch.softmax(outputs, -1)
    if isinstance(method.parameterization, Bayes):
        return tokens @ f / (matrix[x, :V] @ f)
    return (tokens / matrix[x, :V]) @ f


def naive_row(method: Method, process: TokenProcess, outputs: Tensor, x: int, x0: int, t: float) -> Tensor:
    """The loss of one position, from its definition."""
    matrix, rates = dense(process, t)
    nothing = outputs.sum() * 0
    if isinstance(method.objective, ScoreEntropy):
        total = nothing
        for y in range(V):
            if y != x and rates[x, y] > 0:
                s = naive_scores(method, outputs, x, matrix)[y]
                total = total + rates[x, y] * (s - matrix[y, x0] / matrix[x, x0] * s.log())
        return total
    everywhere = method.name in ("dfm", "ar")
    if not everywhere and not process.can_shuffle and x < V:
        return nothing
    f = torch.softmax(outputs, -1)
    if isinstance(method.parameterization, Bayes):
        f = f * matrix[x, :V] / (f * matrix[x, :V]).sum()
    sigma, rate = float(process.sigma(t)), float(process.alpha_rate(t) + process.beta_rate(t))
    weight = {"cedd-star": math.log(math.e + 0.3 / t), "bayes-star": math.log(math.e + 0.3 / t)}
    weight["ceddt"] = rate / math.expm1(sigma)
    return -weight.get(method.name, 1.0) * f[x0].log()


TIMES = torch.tensor([0.02, 0.4, 0.95], dtype=torch.float64)
TOKEN_TIMES = torch.linspace(0.01, 0.99, B * L, dtype=torch.float64).reshape(L, B).T
WHERE = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 1, 1], [1, 1, 0, 1, 1]]).bool()


@pytest.mark.parametrize(
    ("name", "kind", "t", "where"),
    covering((*pair, *how) for pair in pairs() for how in ((TOKEN_TIMES, WHERE), (TIMES, None))),
)
def test_loss_and_gradient_match_naive_formula(name: str, kind: str, t: Tensor, where: Tensor | None) -> None:
    """Each position is computed at its own time and counts only if it is selected."""
    method, process = ALL[name], PROCESSES[kind]
    generator = torch.Generator().manual_seed(7)
    x0 = torch.randint(V, (B, L), generator=generator)
    outputs = torch.randn(B, L, V, generator=generator, dtype=torch.float64, requires_grad=True)
    draws = NoiseDraws.make((B, L), V, x0.device, generator)
    batch = noisy_batch(method, process, x0, t, draws, where=where)
    times = t if t.dim() == 2 else t[:, None].expand(B, L)
    x_t = x0.clone()
    for i in range(B):
        for j in range(L):
            matrix = process.transition_matrix(times[i, j])
            kept, alive = matrix[0, 0] - matrix[1, 0], matrix[:V, 0].sum()
            u = draws.u[i, j]
            x_t[i, j] = x0[i, j] if u < kept else draws.redraw[i, j] if u < alive else V
    loss = batch_loss(method, lambda x, sigma: outputs, batch)
    counted = [(i, j) for i in range(B) for j in range(L) if where is None or where[i, j]]
    naive = sum(
        (
            naive_row(method, process, outputs[i, j], int(x_t[i, j]), int(x0[i, j]), float(times[i, j]))
            for i, j in counted
        ),
        start=torch.zeros((), dtype=torch.float64),
    )
    naive = naive / len(counted)
    torch.testing.assert_close(loss, naive, rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss, outputs)
    (expected,) = torch.autograd.grad(naive, outputs)
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-11)
    assert float(gradient.abs().max()) > 0


class WithHead(torch.nn.Module):
    """Features that depend on all of the input, and a head that computes its losses itself."""

    capabilities = Capabilities(features=True, selected_rows=True, head_losses=True)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(V + 1, 6, dtype=torch.float64)
        self.head = VocabularyHead(6, V).double()
        for parameter in self.head.parameters():
            torch.nn.init.normal_(parameter)

    def features(self, x_t: Tensor, sigma: Tensor, *, where: Tensor | None = None) -> Tensor:
        return torch.tanh(
            self.embedding(x_t) + self.embedding(x_t).mean(1, keepdim=True) + sigma.double()[:, None, None]
        )

    def rows(self, features: Tensor, places: Tensor) -> Tensor:
        return features.flatten(0, 1)[places]


def random_noisy_batch(method: Method, kind: str, capacity: int | None = None) -> NoisyBatch:
    """Random text at three times."""
    x0, t = torch.randint(V, (B, L)), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    draws = NoiseDraws.make((B, L), V, torch.device("cpu"), torch.Generator().manual_seed(2))
    return noisy_batch(method, PROCESSES[kind], x0, t, draws, capacity)


@pytest.mark.parametrize(
    ("name", "kind", "filled"), covering((*pair, filled) for pair in pairs() for filled in (False, True))
)
def test_head_losses_match_losses_of_outputs(name: str, kind: str, filled: bool) -> None:
    method, model = ALL[name], WithHead()
    batch = random_noisy_batch(method, kind, B * L - 1 if filled else None)
    found = []
    for network in (model, lambda x_t, sigma: model.head(model.features(x_t, sigma))):
        model.zero_grad()
        loss = batch_loss(method, network, batch)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-11)


def test_closed_form_weights_are_zero_at_time_zero() -> None:
    x0 = torch.randint(V, (B, L))
    noise = PROCESSES["uniform"].noise(torch.zeros(B, dtype=torch.float64)).like(x0)  # where shuffling begins
    assert (noise.beta_rate > 0).all()
    rows = Rows(x0.reshape(-1), x0.reshape(-1), noise.map(lambda v: v.expand(B, L).reshape(-1)))
    closed = ScoreEntropy().closed_form(Score(), rows)
    assert closed is not None
    assert not closed.weight.any()


def test_only_built_in_scores_have_closed_form() -> None:
    """A custom score may interpret its outputs differently."""

    class Halved(Score):
        def log_ratios(self, outputs: Tensor, x_t: Tensor, noise: Noise) -> Tensor:
            return outputs / 2

    for parameterization, known in ((Score(), True), (ScaledScore(), True), (Halved(), False), (Bayes(), False)):
        rows = random_noisy_batch(Method("", parameterization, ScoreEntropy()), "roulette").rows
        assert (ScoreEntropy().closed_form(parameterization, rows) is not None) == known


@pytest.mark.parametrize("name", METHODS)
def test_low_precision_outputs_give_nearly_same_loss(name: str) -> None:
    method = METHODS[name]
    process = PROCESSES["absorb"] if name == "dfm" else PROCESSES["roulette"]
    generator = torch.Generator().manual_seed(3)
    x0, outputs = torch.randint(V, (B, L), generator=generator), torch.randn(B, L, V, generator=generator)
    batch = noisy_batch(
        method, process, x0, torch.tensor([0.1, 0.5, 0.9]), NoiseDraws.make((B, L), V, x0.device, generator)
    )
    exact = float(batch_loss(method, lambda x, s: outputs.double(), batch))
    assert float(batch_loss(method, lambda x, s: outputs, batch)) == pytest.approx(exact, rel=1e-5)
    assert float(batch_loss(method, lambda x, s: outputs.bfloat16(), batch)) == pytest.approx(exact, rel=0.05)


# ---- true ratios ------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(PROCESSES)), st.floats(1e-4, 1.0))
def test_true_ratios(kind: str, t: float) -> None:
    process = PROCESSES[kind]
    matrix, rates = dense(process, t)
    for x in range(process.num_states):
        for x0 in range(V):
            if matrix[x, x0] == 0 or (x < V and not process.can_shuffle):
                continue
            ratios = true_ratios(torch.tensor(x), torch.tensor(x0), process.noise(t))
            for y in set(range(V)) - {x}:
                assert float(ratios.rate) == pytest.approx(float(rates[x, y]), rel=1e-9, abs=1e-12)
                r = float(ratios.common) + (float(ratios.extra) if y == x0 else 0.0)
                assert r == pytest.approx(float(matrix[y, x0] / matrix[x, x0]), rel=1e-8)


# ---- weights ----------------------------------------------------------------------------------------------------


@given(st.floats(1e-6, 1.0))
def test_weights_match_formulas(t: float) -> None:
    noise, x_t = cedd.absorb(V).noise(t), torch.tensor(V)
    sigma, rate = float(noise.sigma), float(cedd.LogLinear().rate(t))
    assert float(constant(noise, x_t)) == 1.0
    assert float(star(noise, x_t)) == pytest.approx(math.log(math.e + 0.3 / t), rel=1e-12)
    assert float(likelihood(noise, x_t)) == pytest.approx(rate / math.expm1(sigma), rel=1e-12)
    # On the log-linear schedule this is 1/t: alive falls linearly.
    assert float(likelihood(noise, x_t)) == pytest.approx(1 / t, rel=1e-9)


def test_weights_are_finite_at_zero() -> None:
    for weight in (constant, star, likelihood):
        assert bool(torch.isfinite(weight(cedd.absorb(V).noise(0.0), torch.tensor(V))))


# ---- which rows count -------------------------------------------------------------------------------------------


def test_absorb_counts_masked_positions_only() -> None:
    x0 = torch.zeros(2, 4, dtype=torch.int64)
    draws = NoiseDraws(torch.tensor([[0.1, 0.9, 0.2, 0.8]] * 2).double(), x0)
    for name in ("sedd", "cedd", "ceddt", "bayes"):
        batch = noisy_batch(METHODS[name], cedd.absorb(V), x0, torch.tensor([0.5, 0.5]), draws)
        assert batch.places.tolist() == [1, 3, 5, 7]
        assert batch.rows.x_t.tolist() == [V] * 4
        assert batch.tokens == 8
    for name in ("dfm", "ar"):
        assert len(noisy_batch(METHODS[name], cedd.absorb(V), x0, torch.tensor([0.5, 0.5]), draws).places) == 8
    assert len(noisy_batch(METHODS["cedd"], cedd.uniform(V), x0, torch.tensor([0.5, 0.5]), draws).places) == 8


def test_batch_without_noise_has_zero_loss() -> None:
    x0 = torch.zeros(2, 4, dtype=torch.int64)
    model = torch.nn.Embedding(V + 1, V)
    loss = cedd.loss(lambda x, s: model(x), cedd.absorb(V), x0, method="cedd", t=0.0)
    assert float(loss.detach()) == 0.0
    loss.backward()  # and is still differentiable


def test_network_receives_noisy_tokens_and_float32_sigma() -> None:
    seen = {}

    def model(x: Tensor, sigma: Tensor) -> Tensor:
        seen.update(x=x, sigma=sigma)
        return torch.zeros(*x.shape, V)

    x0 = torch.randint(V, (6, 50), generator=torch.Generator().manual_seed(0))
    t = torch.linspace(0.1, 0.9, 6)
    cedd.loss(model, cedd.absorb(V), x0, method="cedd", t=t, generator=torch.Generator().manual_seed(1))
    assert seen["sigma"].dtype == torch.float32
    torch.testing.assert_close(seen["sigma"], cedd.absorb(V).sigma(t).float())
    assert bool(((seen["x"] == x0) | (seen["x"] == V)).all())
    cedd.loss(model, cedd.absorb(V), x0, method="ar", t=t)
    assert torch.equal(seen["x"], torch.cat([torch.full((6, 1), V), x0[:, :-1]], 1))


def test_start_symbol_and_shift() -> None:
    assert start_symbol(cedd.absorb(V)) == V
    assert start_symbol(cedd.uniform(V)) == 0
    assert shift_right(torch.tensor([[1, 2, 3]]), 9).tolist() == [[9, 1, 2]]


def test_same_seed_gives_same_loss() -> None:
    x0 = torch.randint(V, (8, 20), generator=torch.Generator().manual_seed(0))
    model = torch.nn.Embedding(V + 1, V).double()
    first, second = (
        float(cedd.loss(lambda x, s: model(x), cedd.roulette(V), x0, method="sedd", generator=g).detach())
        for g in (torch.Generator().manual_seed(4), torch.Generator().manual_seed(4))
    )
    assert first == second


# ---- times ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(0, 100), st.floats(0.0, 0.9))
def test_stratified_times_have_one_per_stratum(count: int, seed: int, low: float) -> None:
    t = draw_times(count, torch.Generator().manual_seed(seed), low=low)
    assert t.dtype == torch.float64
    places = ((t - low) / (1 - low) * count).clamp(0, count - 1e-9)
    # Rounding may move a time just past the edge of its stratum, never further.
    assert np.abs(np.sort(places.numpy()) - np.arange(count) - 0.5).max() <= 0.5 + 1e-9


def test_independent_times_and_invalid_arguments() -> None:
    t = draw_times(10_000, torch.Generator().manual_seed(0), stratified=False)
    assert 1e-3 <= float(t.min()) < 2e-3
    assert float(t.max()) <= 1.0
    assert abs(float(t.mean()) - 0.5005) < 4 * 0.2887 / 100  # 4 standard errors
    for count, low, message in ((0, 0.0, "at least one sequence"), (1, 1.0, r"be in \[0, 1\]"), (1, -0.1, "be in")):
        with pytest.raises(ValueError, match=message):
            draw_times(count, low=low)


# ---- names and errors -------------------------------------------------------------------------------------------


def test_method_names_and_aliases() -> None:
    assert {"sedd", "sedds", "cedd", "cedd-star", "ceddt", "bayes", "bayes-star", "dfm", "ar"} < set(METHODS)
    assert get_method("CEDD*") is METHODS["cedd-star"] is METHODS["cedd*"] is METHODS.get("Cedd*")
    assert "bayes*" in METHODS
    assert METHODS.get("gpt*") is None
    with pytest.raises(KeyError, match=r"gpt\*"):
        METHODS["gpt*"]
    assert get_method(METHODS["dfm"]) is METHODS["dfm"]
    for alias, (method, process) in ALIASES.items():
        assert get_method(alias) is get_method(alias.upper()) is METHODS[method]
        assert alias not in list(METHODS)
        METHODS[method].check(PROCESSES[process])


def test_mdlm_gradient_equals_bayes_elbo_gradient() -> None:
    """Its weighted cross entropy and the bound of a leave-one-out denoiser differ by a constant without a gradient."""
    process = cedd.absorb(V)
    generator = torch.Generator().manual_seed(5)
    x0, outputs = torch.randint(V, (B, L), generator=generator), torch.randn(B, L, V, generator=generator).double()
    gradients: list[Tensor] = []
    for name in ("mdlm", "bayes-elbo"):
        leaf = outputs.clone().requires_grad_()
        cedd.loss(
            lambda x, s, o=leaf: o, process, x0, method=name, generator=torch.Generator().manual_seed(1)
        ).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert float(gradients[0].abs().max()) > 0.01
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


MODEL = torch.nn.Embedding(V + 1, V)
TOKENS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_method(3), "unknown method 3; use one of sedd"),  # type: ignore[arg-type]
        (lambda: get_method("gpt"), "unknown method 'gpt'; use one of sedd, sedds"),
        (lambda: cedd.loss(MODEL, cedd.uniform(V), TOKENS, method="dfm"), r"use absorb\(V, Polynomial\(power=k\)\)"),
        (lambda: cedd.loss(MODEL, cedd.roulette(V), TOKENS, method="dfm"), "dfm runs from a mask source"),
        (lambda: cedd.loss(MODEL, cedd.absorb(V), TOKENS[0], method="cedd"), r"a batch of sequences \[B, L\]"),
        (lambda: cedd.loss(MODEL, cedd.absorb(V), TOKENS[:0], method="cedd"), r"a batch of sequences \[B, L\]"),
        (lambda: cedd.loss(MODEL, cedd.absorb(V), TOKENS + V, method="cedd"), "token ids must be in 0..3"),
        (lambda: cedd.loss(MODEL, cedd.absorb(V), TOKENS, method="cedd", t=1.5), "time t must be in"),
        (
            lambda: cedd.loss(MODEL, cedd.absorb(V), TOKENS, method="cedd", t=torch.ones(2, 1)),
            r"one per sequence or one per position: x0 is \[2, 3\], t is \[2, 1\]",
        ),
        (
            lambda: cedd.loss(
                lambda x, s: torch.zeros(2, 3, V),
                cedd.uniform(V),
                TOKENS,
                method=Method("wrong", Score(), CrossEntropy()),
            ),
            "Score gives ratios; use Denoiser or Bayes",
        ),
        (
            lambda: cedd.log_scores(torch.zeros(1, 1, V), cedd.absorb(V), torch.zeros(1, 1).long(), 0.5, method="ar"),
            "ar is autoregressive and has no noise process",
        ),
    ],
)
def test_invalid_arguments_are_rejected(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_tokens_must_be_tensor() -> None:
    for wrong in (TOKENS.numpy(), TOKENS.tolist()):
        said = f"token ids must be a tensor of integers \\(got {type(wrong).__name__}"
        with pytest.raises(TypeError, match=said):
            cedd.loss(MODEL, cedd.absorb(V), wrong, method="cedd")  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match=said):
            cedd.estimate_bound(MODEL, cedd.absorb(V), wrong, method="cedd")  # pyright: ignore[reportArgumentType]


def test_log_scores_by_method_name() -> None:
    x_t, outputs = torch.tensor([[0, V], [1, 2]]), torch.randn(2, 2, V)
    scores = cedd.log_scores(outputs, cedd.absorb(V), x_t, torch.tensor([0.5, 0.9]), method="cedd*")
    assert scores[0, 0].tolist() == [0.0] + [-math.inf] * 3
    alpha = cedd.absorb(V).alpha(0.5)
    expected = torch.log_softmax(outputs[0, 1], -1) - torch.log(torch.expm1(alpha)).float()
    torch.testing.assert_close(scores[0, 1], expected)


@pytest.mark.parametrize(
    ("outputs", "x_t", "t", "message"),
    [
        ((2, 3, 6), torch.zeros(2, 3, dtype=torch.long), 0.5, "none for the mask"),
        ((2, 3, 5), torch.full((2, 3), 9), 0.5, "noisy tokens"),
        ((2, 3, 5), torch.zeros(2, 3), 0.5, "int32 or int64"),
        ((2, 3, 5), torch.zeros(2, 3, dtype=torch.long), torch.rand(3), r"x_t is \[2, 3\], t is \[3\]"),
    ],
)
def test_log_scores_rejects_mismatched_arguments(outputs, x_t, t, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cedd.log_scores(torch.zeros(outputs), cedd.absorb(5), x_t, t, method="cedd")


@pytest.mark.parametrize(
    ("call", "usage"),
    [
        (lambda: cedd.loss("cedd", cedd.absorb(V), MODEL, TOKENS), "cedd.loss(model, process, x0, method=...)"),  # pyright: ignore
        (
            lambda: cedd.loss(cedd.absorb(V), MODEL, TOKENS, method="cedd"),  # pyright: ignore
            "cedd.loss(model, process, x0, method=...)",
        ),
        (
            lambda: cedd.log_scores("cedd", cedd.absorb(V), torch.zeros(2, 3, V), TOKENS, 0.5),  # pyright: ignore
            "cedd.log_scores(outputs, process, x_t, t, method=...)",
        ),
        (
            lambda: cedd.estimate_bound(MODEL, TOKENS, cedd.absorb(V), method="cedd"),  # pyright: ignore
            "cedd.estimate_bound(model, process, data, method=...)",
        ),
    ],
)
def test_wrong_argument_order_raises_with_correct_usage(call, usage):
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).endswith(f"call {usage}")


# ---- a time per token, and positions that count -------------------------------------------------------------------


def own(x_t: Tensor, sigma: Tensor) -> Tensor:
    """A plain function of a token and its own noise level, [B] or [B, L]."""
    level = sigma[:, None].expand(x_t.shape) if sigma.dim() == 1 else sigma
    return torch.sin(x_t[..., None] + torch.arange(V) * (1 + level[..., None].double()))


@pytest.mark.parametrize("kind", PROCESSES)
@pytest.mark.parametrize("name", ["sedd", "sedds", "cedd-star", "ceddt", "bayes"])
def test_equal_token_times_match_sequence_time(name: str, kind: str) -> None:
    x0 = torch.randint(V, (B, L), generator=torch.Generator().manual_seed(1))

    def found(t: Tensor, where: Tensor | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        return cedd.loss(own, PROCESSES[kind], x0, method=name, t=t, where=where, generator=generator)

    per_token = TIMES[:, None].expand(B, L)
    assert torch.equal(found(per_token), found(TIMES))
    assert torch.equal(found(per_token, torch.ones(B, L, dtype=torch.bool)), found(TIMES))
    x_t = PROCESSES[kind].sample(x0, per_token, generator=torch.Generator().manual_seed(2))
    outputs = own(x_t, PROCESSES[kind].sigma(TIMES))
    scores = [cedd.log_scores(outputs, PROCESSES[kind], x_t, t, method=name) for t in (TIMES, per_token)]
    assert torch.equal(*scores)


def test_log_scores_with_token_times_match_single_positions() -> None:
    for process in PROCESSES.values():
        x_t = torch.arange(B * L).reshape(B, L) % process.num_states
        outputs = own(x_t, process.sigma(TOKEN_TIMES))
        together = cedd.log_scores(outputs, process, x_t, TOKEN_TIMES, method="bayes")
        for i in range(B):
            for j in range(L):
                here = outputs[i : i + 1, j : j + 1], process, x_t[i : i + 1, j : j + 1], TOKEN_TIMES[i, j]
                torch.testing.assert_close(together[i, j], cedd.log_scores(*here, method="bayes")[0, 0])


def test_clean_prompt_is_unchanged_and_excluded_from_loss() -> None:
    """t = 0 keeps a prompt clean; with `where` the loss is the mean over the remaining positions."""
    x0 = torch.randint(V, (B, L), generator=torch.Generator().manual_seed(1))
    seen: list[Tensor] = []

    def model(x_t: Tensor, sigma: Tensor) -> Tensor:
        seen.extend((x_t, sigma))
        return own(x_t, sigma)

    prompt = torch.arange(L) < 2
    t = torch.where(prompt, 0.0, 0.9).expand(B, L)
    where = (~prompt).expand(B, L)

    def found(where: Tensor | None) -> float:
        generator = torch.Generator().manual_seed(2)
        return float(cedd.loss(model, PROCESSES["roulette"], x0, method="bayes", t=t, where=where, generator=generator))

    alone = found(where)
    assert torch.equal(seen[0][:, :2], x0[:, :2])
    assert not torch.equal(seen[0], x0)
    assert seen[1].shape == (B, L)
    assert float(seen[1][:, :2].max()) == 0
    assert alone == pytest.approx(found(None) * L / (L - 2))  # a position at t = 0 has no loss


def test_token_times_require_network_capability() -> None:
    x0 = torch.zeros(B, L, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"takes one noise level per sequence; .* Capabilities\(token_times=True\)"):
        cedd.loss(WithHead(), PROCESSES["absorb"], x0, method="cedd", t=TOKEN_TIMES)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (torch.ones(B, L), r"where must be a Boolean tensor of x0's shape \[3, 5\] \(got \[3, 5\] torch.float32"),
        (torch.ones(B, dtype=torch.bool), r"got \[3\] torch.bool"),
        ([True], "got list"),
        (torch.zeros(B, L, dtype=torch.bool), "where selects no position"),
    ],
)
def test_invalid_where_is_rejected(where, message: str) -> None:
    x0 = torch.zeros(B, L, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        cedd.loss(own, PROCESSES["absorb"], x0, method="cedd", where=where)
