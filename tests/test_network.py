"""The one way to run a network: what is handed to it, what is checked, and conditions that reach it."""

import pytest
import torch
from torch import Tensor, nn

import cedd
from cedd import network as network_module
from cedd.models.transformer import Transformer, TransformerConfig
from cedd.network import Network, Places, evaluating

V, L = 5, 4


class Halves(nn.Module):
    """Two halves, of which the features remember what they were shown."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Embedding(V + 1, 8), nn.Linear(8, V)
        self.seen: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []

    def features(self, x_t: Tensor, sigma: Tensor, **extras: Tensor) -> Tensor:
        self.seen.append((x_t, sigma, extras))
        hidden = self.body(x_t)
        return hidden + extras["label"][:, None, None] if "label" in extras else hidden

    def forward(self, x_t: Tensor, sigma: Tensor, **extras: Tensor) -> Tensor:
        return self.head(self.features(x_t, sigma, **extras))


@pytest.fixture
def halves() -> Halves:
    torch.manual_seed(0)
    return Halves()


def test_rows_are_those_of_all_outputs(halves: Halves, monkeypatch: pytest.MonkeyPatch) -> None:
    x, sigma = torch.randint(V, (3, L), generator=torch.Generator().manual_seed(1)), torch.rand(3)
    run, rows = Network.of(halves, V), torch.tensor([1, 6, 7, 11])
    whole = run.outputs(x, sigma).flatten(0, 1)[rows]
    monkeypatch.setitem(network_module._ENTRIES_AT_ONCE, "cpu", 2 * V)  # two rows at a time
    parts = [(len(outputs), part) for outputs, part in run.rows(x, sigma, Places(rows)).chunks()]
    assert parts == [(2, slice(0, 2)), (2, slice(2, 4))]
    for model in (halves, lambda x, sigma: halves(x, sigma)):
        torch.testing.assert_close(Network.of(model, V).rows(x, sigma, Places(rows)).map(lambda o, _: o), whole)


def test_only_the_chosen_sequences_are_run(halves: Halves) -> None:
    x, sigma = torch.arange(12).reshape(3, L) % V, torch.tensor([0.1, 0.2, 0.3])
    extras = {"label": torch.tensor([1.0, 2.0, 3.0])}
    places = Places(torch.tensor([4, 9]), torch.tensor([1, 2]), torch.tensor([0, 5]))
    found = Network.of(halves, V, extras=extras, sequences=3).rows(x, sigma, places).map(lambda o, _: o)
    shown, told, given = halves.seen[-1]
    assert torch.equal(shown, x[1:])
    assert torch.equal(told, sigma[1:])
    assert given["label"].tolist() == [2.0, 3.0]
    torch.testing.assert_close(found, halves(x, sigma, label=extras["label"]).flatten(0, 1)[[4, 9]])


@pytest.mark.parametrize("wrong", [(2, L, V + 1), (2, V, L), (L, 2, V)])
def test_outputs_of_a_wrong_shape_are_refused_everywhere(wrong: tuple[int, ...]) -> None:
    process, x0 = cedd.absorb(V), torch.zeros(2, L, dtype=torch.int64)

    def model(x_t: Tensor, sigma: Tensor) -> Tensor:
        return torch.zeros(wrong, requires_grad=True)

    for call in (
        lambda: cedd.loss("cedd", process, model, x0),
        lambda: cedd.estimate_bound(model, process, x0, method="cedd", draws=2, batch=2),
        lambda: cedd.sample(model, process, (2, L), method="cedd", steps=2),
    ):
        with pytest.raises(ValueError, match=r"must return \[B, L, V\] = \[2, 4, 5\], without a mask column"):
            call()


def test_a_head_of_a_wrong_width_is_refused(halves: Halves) -> None:
    halves.head = nn.Linear(8, V + 1)
    with pytest.raises(ValueError, match=r"\[N, V\]"):
        cedd.sample(halves, cedd.absorb(V), (2, L), method="cedd", steps=2)


# ---- conditions -------------------------------------------------------------------------------------------------


def labelled(x_t: Tensor, sigma: Tensor, *, label: Tensor) -> Tensor:
    """All of its belief is in the token `label` [B]."""
    return 60.0 * nn.functional.one_hot(label, V).double()[:, None].expand(*x_t.shape, V)


@pytest.mark.parametrize("process", [cedd.absorb(V), cedd.roulette(V, 0.6), cedd.uniform(V)])
@pytest.mark.parametrize("batch", [None, 3])
def test_a_condition_reaches_the_network_of_a_sampler(process: cedd.TokenProcess, batch: int | None) -> None:
    label = torch.arange(7) % V
    drawn = cedd.sample(labelled, process, (7, L), method="bayes", steps=40, batch=batch, label=label)
    assert torch.equal(drawn, label[:, None].expand(7, L))


def test_a_condition_reaches_the_networks_of_the_loss_and_of_the_bound() -> None:
    process, label = cedd.absorb(V), torch.arange(6) % V
    x0 = label[:, None].expand(6, L)
    for method in ("cedd", "ar"):
        assert float(cedd.loss(method, process, labelled, x0, label=label)) < 1e-9
        assert cedd.estimate_bound(labelled, process, x0, method=method, batch=4, label=label).nats_per_token < 0.01
    wrong = label.roll(1)
    assert float(cedd.loss("cedd", process, labelled, x0, t=0.9, label=wrong)) > 10
    assert cedd.estimate_bound(labelled, process, x0, method="cedd", label=wrong).nats_per_token > 10


def test_a_condition_reaches_first_hitting_and_a_causal_network() -> None:
    process, label = cedd.absorb(V), torch.tensor([3, 1, 4])
    for method, sampler in (("cedd", "first-hitting"), ("ar", "analytic")):
        drawn = cedd.sample(labelled, process, (3, L), method=method, sampler=sampler, label=label)
        assert torch.equal(drawn, label[:, None].expand(3, L))


def test_what_is_no_condition_is_refused() -> None:
    process = cedd.absorb(V)
    for wrong in (torch.zeros(1), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="one entry a sequence, 2"):
            cedd.loss("cedd", process, labelled, torch.zeros(2, L, dtype=torch.int64), label=wrong)
    with pytest.raises(TypeError, match="unknown argument 'stepps'"):
        cedd.sample(labelled, process, (2, L), method="cedd", stepps=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="one entry a sequence, 2"):
        cedd.sample(labelled, process, (2, L), method="cedd", label=torch.zeros(3))


# ---- modes ------------------------------------------------------------------------------------------------------


def test_evaluation_mode_ends_where_it_began(halves: Halves) -> None:
    halves.train()
    with evaluating(halves):
        assert not halves.training
        assert not torch.is_grad_enabled()
    assert halves.training
    halves.eval()
    with pytest.raises(RuntimeError), evaluating(halves):
        raise RuntimeError
    assert not halves.training


# ---- outputs that are no numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("method", "process"), [("cedd", cedd.absorb(V)), ("sedd", cedd.uniform(V)), ("ar", cedd.absorb(V))]
)
def test_outputs_that_are_no_numbers_are_refused(bad: float, method: str, process: cedd.TokenProcess) -> None:
    def model(x_t: Tensor, sigma: Tensor) -> Tensor:
        outputs = torch.zeros(*x_t.shape, V)
        outputs[-1, -1, 2] = bad
        return outputs

    for call in (
        lambda: cedd.sample(model, process, (2, L), method=method, steps=4),
        lambda: cedd.estimate_bound(model, process, torch.zeros(2, L, dtype=torch.int64), method=method, draws=4),
    ):
        with pytest.raises(ValueError, match="the network returned nan"):
            call()


def test_a_row_without_any_possible_token_is_refused() -> None:
    outputs = torch.zeros(2, 3, V)
    outputs[1, 2] = -torch.inf
    with pytest.raises(ValueError, match="rows without any possible token"):
        network_module.OutputCheck().look_at(outputs)
    outputs[1, 2, 0] = 0.0
    network_module.OutputCheck().look_at(outputs)


def test_on_a_device_the_check_waits_until_it_is_asked() -> None:
    check = network_module.OutputCheck()
    check._totals = [torch.tensor(1.0), torch.tensor(float("nan"))]
    with pytest.raises(ValueError, match="the network returned nan"):
        check.settle()
    check.settle()  # once is enough


@pytest.mark.parametrize(("tolerance", "sampling"), [(None, "stratified"), (0.01, "stratified"), (None, "independent")])
def test_a_text_without_a_chance_has_an_infinite_bound(tolerance: float | None, sampling) -> None:
    """f(x0) = 0: the bound is infinite, and no tolerance goes on to look for it."""

    def model(x_t: Tensor, sigma: Tensor) -> Tensor:
        outputs = torch.zeros(*x_t.shape, V)
        outputs[..., 0] = -torch.inf
        return outputs

    data = torch.tensor([[1, 2, 0, 3]] * 4)
    found = cedd.estimate_bound(
        model, cedd.absorb(V), data, method="cedd", draws=8, tolerance=tolerance, sampling=sampling, max_draws=64
    )
    assert found.nats_per_token == float("inf")
    assert found.perplexity == float("inf")
    assert found.evaluations <= 4 * 8 + 4


def test_a_causal_network_with_a_cache_is_checked_and_given_its_condition() -> None:
    shape = {"vocab_size": V, "has_mask": True, "length": L, "width": 16, "depth": 1, "heads": 2}
    model = Transformer(TransformerConfig(**shape, causal=True, time_conditioning=False)).eval()
    with pytest.raises(TypeError, match="label"):
        cedd.sample(model, cedd.absorb(V), (2, L), method="ar", label=torch.zeros(2))
    torch.nn.init.constant_(model.head.bias, float("nan"))
    with pytest.raises(ValueError, match="the network returned nan"):
        cedd.sample(model, cedd.absorb(V), (2, L), method="ar")
