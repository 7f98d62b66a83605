"""Spelling: shares with valid intervals, the paper's protocol against dense matrices, and per-letter outcomes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cedd
from cedd.network import Capabilities
from cedd.spelling.paper_protocol import restore
from cedd.spelling.protocols import PaperOptions
from cedd.spelling.shares import Share
from cedd.spelling.user_protocol import CorrectionResult, outcomes, save_plot
from tests.networks import random_network

# ----------------------------------------------------------------------------------------------------------------
# Shares


def make_share(hits, totals):
    return Share(torch.tensor(hits), torch.tensor(totals))


def test_share_is_ratio_of_sums():
    share = make_share([1, 0, 3], [2, 4, 4])
    assert share.value == 0.4
    residuals = [1 - 0.8, 0 - 1.6, 3 - 1.6]
    assert share.stderr == pytest.approx(math.sqrt(3 / 2 * sum(r * r for r in residuals)) / 10)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=8))
def test_interval_is_within_bounds_and_contains_share(pairs):
    share = make_share([a for a, _ in pairs], [a + b for a, b in pairs])
    low, high = share.ci95
    if not share.total:
        assert math.isnan(low)
        assert share.record()["share"] is None
        return
    assert 0 <= low <= share.value + 1e-12
    assert share.value - 1e-12 <= high <= 1
    assert low < high


def test_zero_hits_give_wilson_interval():
    """With no hit among 300 the interval is Wilson's, which reaches to about 3.7 in 300."""
    low, high = make_share([0] * 100, [3] * 100).ci95
    assert low < 1e-12
    assert 3.0 < 300 * high < 4.5


def test_intervals_cover_clustered_mistakes():
    """Blocks differ in how hard they are (standard deviation 0.2). 600 intervals of 95% cover in 95%, give or take
    0.9%: outside of 92% to 98% a right interval falls once in a thousand. Taken as independent they cover less."""
    generator = torch.Generator().manual_seed(1)
    truth, covered, naive = 0.7, 0, 0
    for _ in range(600):
        hard = (truth + 0.2 * torch.randn(80, generator=generator).clamp(-1.5, 1.5)).clamp(0, 1)
        totals = torch.randint(2, 12, (80,), generator=generator)
        share = Share(torch.binomial(totals.float(), hard, generator=generator).long(), totals)
        low, high = share.ci95
        covered += low <= truth <= high
        naive += abs(share.value - truth) <= 1.96 * math.sqrt(share.value * (1 - share.value) / share.total)
    assert 0.92 < covered / 600 < 0.98
    assert naive < covered


# ----------------------------------------------------------------------------------------------------------------
# The paper's protocol

V, LENGTH = 4, 3
BLOCKS = torch.randint(V, (400, LENGTH), generator=torch.Generator().manual_seed(0))


def dense_guesses(method, process, outputs, x, t):
    """argmax of p(x_0 | x_t = x) at each of N positions x [N] by whole matrices, from outputs [N, V]."""
    matrix = process.transition_matrix(t)
    if method in ("cedd", "cedd-star"):
        return outputs.argmax(-1)
    if method == "bayes":
        return (outputs.softmax(-1) * matrix[x, :V]).argmax(-1)
    scores = torch.zeros(len(x), process.num_states, dtype=torch.float64)
    times = torch.full((len(x),), t, dtype=torch.float64)
    scores[:, :V] = cedd.log_scores(outputs[:, None], process, x[:, None], times, method=method)[:, 0].exp()
    scores[x == V, -1] = 1.0
    posterior = torch.linalg.solve(matrix, scores.T).T * matrix[x]  # (K^-1 s)(z) K(x|z)
    return posterior[:, :V].argmax(-1)


@pytest.mark.parametrize("name", ["uniform", "roulette", "absorb"])
@pytest.mark.parametrize("method", ["sedd", "sedds", "cedd", "bayes"])
def test_restore_matches_argmax_of_dense_posterior(name, method):
    t = 0.4
    process = cedd.roulette(V, p_m=0.5) if name == "roulette" else getattr(cedd, name)(V)
    model = random_network(process, LENGTH, seed=3)
    measured = restore(model, process, cedd.get_method(method), BLOCKS, PaperOptions(t=t, batch=64), seed=5)
    x_t = process.noise(t).sample(BLOCKS, torch.Generator().manual_seed(5))
    outputs = model(x_t, process.sigma(torch.full((len(x_t),), t)))
    touched = x_t != BLOCKS
    x = x_t[touched]
    right = dense_guesses(method, process, outputs[touched], x, t) == BLOCKS[touched]
    for kind, there in (("masked", x == V), ("shuffled", x < V)):
        share = getattr(measured, kind)
        assert (share.count, share.total) == (int(right[there].sum()), int(there.sum()))
    assert measured.all.total == int((x_t != BLOCKS).sum()) > 100
    assert measured.masked.total == 0 if name == "uniform" else measured.masked.total > 50
    assert measured.shuffled.total == 0 if name == "absorb" else measured.shuffled.total > 50


class SplitNetwork(nn.Module):
    """A network with backbone and head whose prediction depends only on the current token."""

    capabilities = Capabilities(features=True)

    def __init__(self, states: int) -> None:
        super().__init__()
        self.table = nn.Embedding(states, 5)
        self.head = nn.Linear(5, V)
        self.rows_seen = 0
        self.head.register_forward_hook(lambda _module, inputs, _output: self.count(len(inputs[0])))

    def count(self, rows: int) -> None:
        self.rows_seen += rows

    def features(self, x_t, sigma):
        return self.table(x_t)


def test_head_runs_only_on_corrupted_positions_for_any_batch():
    torch.manual_seed(0)
    process, method = cedd.roulette(V, p_m=0.5), cedd.get_method("bayes")
    model = SplitNetwork(V + 1)
    first = restore(model, process, method, BLOCKS, PaperOptions(t=0.3, batch=64))
    assert model.rows_seen == first.all.total < BLOCKS.numel() / 2
    second = restore(lambda x, sigma: model.head(model.table(x)), process, method, BLOCKS, PaperOptions(t=0.3, batch=7))
    assert torch.equal(first.all.hits, second.all.hits)
    assert 0 < first.all.value < 1
    other = restore(model, process, method, BLOCKS, PaperOptions(t=0.3), seed=1)
    assert not torch.equal(first.all.totals, other.all.totals)


def test_ideal_network_restores_everything():
    """Every block repeats one token, and the network takes the majority."""
    blocks = torch.arange(V).repeat_interleave(50)[:, None].expand(-1, 16)

    def model(x, sigma):
        votes = torch.nn.functional.one_hot(x, V + 1)[..., :V].sum(1, keepdim=True)
        return votes.double().expand(-1, 16, -1)

    share = restore(model, cedd.roulette(V, p_m=0.5), cedd.get_method("cedd"), blocks, PaperOptions(t=0.1)).all
    assert share.value == 1.0
    assert share.total > 100
    assert share.ci95[0] > 0.95


def test_invalid_restore_input_is_rejected():
    model, process = random_network(cedd.uniform(V), LENGTH, seed=0), cedd.uniform(V)
    method = cedd.get_method("cedd")
    with pytest.raises(ValueError, match="autoregressive"):
        restore(model, process, cedd.get_method("ar"), BLOCKS)
    with pytest.raises(ValueError, match="shorter than one block"):
        restore(model, process, method, BLOCKS[:0])
    with pytest.raises(ValueError, match="must be in"):
        restore(model, process, method, BLOCKS, PaperOptions(t=0.0))


# ----------------------------------------------------------------------------------------------------------------
# The user's protocol


def test_outcomes_of_a_known_text():
    #                    good  altered  missed  fixed
    original, corrupted = "the cat, sat.", "thx cqt, szt."
    corrected = "txx cbt, sat!"  # h broken; x missed; q altered; z fixed; the point broken
    seen = outcomes(original, corrupted, corrected, unit=4)
    counts = {name: (share["count"], share["total"]) for name, share in seen.record().items()}
    assert counts == {
        "fixed": (1, 3),
        "missed": (1, 3),
        "altered": (1, 3),
        "broken": (1, 6),
        "broken_others": (1, 4),
        "before": (3, 13),
        "after": (4, 13),
    }
    assert seen.after.totals.tolist() == [4, 4, 4, 1]


@given(st.data())
def test_outcomes_add_up(data):
    length = data.draw(st.integers(1, 40))
    words = st.text(alphabet="ab ,é", min_size=length, max_size=length)
    seen = outcomes(data.draw(words), data.draw(words), data.draw(words), unit=data.draw(st.integers(1, 50)))
    assert seen.fixed.count + seen.missed.count + seen.altered.count == seen.fixed.total == seen.before.count
    broken = seen.broken.count + seen.broken_others.count
    assert seen.after.count == seen.before.count - seen.fixed.count + broken
    assert seen.fixed.total + seen.broken.total + seen.broken_others.total == length


def test_accented_letters_are_letters():
    seen = outcomes("Zoë né 3.", "Zoë né 3.", "Zoe ne 3!", unit=3)
    assert (seen.broken.count, seen.broken.total) == (2, 5)
    assert (seen.broken_others.count, seen.broken_others.total) == (1, 4)


def test_inserted_error_share_has_no_interval():
    """The number of errors is fixed; only the outcomes vary."""
    record = outcomes("abcd" * 20, "abcx" * 20, "abcd" * 10 + "abxx" * 10, 8).record()
    assert record["before"] == {"share": 0.25, "count": 20, "total": 80}
    assert record["after"]["low"] < record["after"]["share"] < record["after"]["high"]


def test_transposed_letters_count_as_one_mistake():
    original, corrupted = "the cat sat on mats", "teh act ast on amts"
    corrected = "the act sst on maxs"  # fixed, missed, altered; half of the last is right, and what was right is broken
    seen = outcomes(original, corrupted, corrected, unit=8, span=2)
    counts = {name: (share["count"], share["total"]) for name, share in seen.record().items()}
    assert counts == {
        "fixed": (2, 4),
        "missed": (1, 4),
        "altered": (1, 4),
        "broken": (1, 7),
        "broken_others": (0, 4),
        "before": (8, 19),
        "after": (4, 19),
    }
    assert seen.fixed.hits.tolist() == [1, 1, 0]
    assert seen.fixed.totals.tolist() == [2, 2, 0]


def test_texts_of_different_or_zero_length_are_rejected():
    with pytest.raises(ValueError, match="same length"):
        outcomes("abc", "abc", "ab")
    with pytest.raises(ValueError, match="at least one character"):
        outcomes("", "", "")


def test_plot_is_written(tmp_path):
    made = [
        CorrectionResult(
            way, {"threshold": threshold}, outcomes("abcd" * 20, "abcx" * 20, "abcd" * 10 + "abxx" * 10, 8)
        )
        for way in ("1 step", "8 steps")
        for threshold in (0.1, 1.0)
    ]
    for name in ("fixed.png", "fixed.svg"):
        save_plot(tmp_path / name, made)
    assert (tmp_path / "fixed.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "fixed.svg").read_text()
