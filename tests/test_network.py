"""Running a network: its inputs, the checks of its outputs, and conditions."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cedd
from cedd import network as network_module
from cedd.models.transformer import Transformer, TransformerConfig
from cedd.network import Capabilities, Network, Places, evaluating

V, L = 5, 4


class SplitNetwork(nn.Module):
    """A backbone that records its inputs, and a head."""

    capabilities = Capabilities(features=True)

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Embedding(V + 1, 8), nn.Linear(8, V)
        self.seen: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []

    def features(self, x_t: Tensor, sigma: Tensor, **conditions: Tensor) -> Tensor:
        self.seen.append((x_t, sigma, conditions))
        hidden = self.body(x_t)
        return hidden + conditions["label"][:, None, None] if "label" in conditions else hidden

    def forward(self, x_t: Tensor, sigma: Tensor, **conditions: Tensor) -> Tensor:
        return self.head(self.features(x_t, sigma, **conditions))


@pytest.fixture
def split_network() -> SplitNetwork:
    torch.manual_seed(0)
    return SplitNetwork()


def small_transformer(**settings: Any) -> Transformer:
    shape = {"vocab_size": V, "has_mask": True, "length": L, "width": 16, "depth": 1, "heads": 2}
    return Transformer(TransformerConfig(**shape, **settings))


def calls(model, process: cedd.TokenProcess, method: str) -> Iterator[Callable[[], object]]:
    """Calls of every function that runs a given network, on two sequences."""
    x0 = torch.zeros(2, L, dtype=torch.int64)
    yield lambda: cedd.loss(model, process, x0, method=method)
    yield lambda: cedd.estimate_bound(model, process, x0, method=method, draws=2, batch=2)
    yield lambda: cedd.sample(model, process, (2, L), method=method, steps=2)


def test_rows_match_full_outputs(split_network: SplitNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    x, sigma = torch.randint(V, (3, L), generator=torch.Generator().manual_seed(1)), torch.rand(3)
    run, rows = Network.of(split_network, V), torch.tensor([1, 6, 7, 11])
    whole = run.outputs(x, sigma).flatten(0, 1)[rows]
    monkeypatch.setitem(network_module._ENTRIES_AT_ONCE, "cpu", 2 * V)  # two rows at a time
    parts = [(len(outputs), part) for outputs, part in run.rows(x, sigma, Places(rows)).chunks()]
    assert parts == [(2, slice(0, 2)), (2, slice(2, 4))]
    for model in (split_network, lambda x, sigma: split_network(x, sigma)):
        torch.testing.assert_close(Network.of(model, V).rows(x, sigma, Places(rows)).map(lambda o, _: o), whole)


@pytest.mark.parametrize(("gibibytes", "entries"), [(141, 1 << 27), (80, 80 << 20), (6, 1 << 25)])
def test_entries_at_once_depend_on_gpu_memory(gibibytes: int, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=gibibytes << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert network_module.entries_at_once(torch.device("cuda", 0)) == entries
    assert network_module.entries_at_once(torch.device("cpu")) == 1 << 24


def test_only_selected_sequences_are_run(split_network: SplitNetwork) -> None:
    x, sigma = torch.arange(12).reshape(3, L) % V, torch.tensor([0.1, 0.2, 0.3])
    conditions = {"label": torch.tensor([1.0, 2.0, 3.0])}
    places = Places(torch.tensor([4, 9]), torch.tensor([1, 2]), torch.tensor([0, 5]))
    found = Network.of(split_network, V, conditions=conditions, sequences=3).rows(x, sigma, places).map(lambda o, _: o)
    shown, told, given = split_network.seen[-1]
    assert torch.equal(shown, x[1:])
    assert torch.equal(told, sigma[1:])
    assert given["label"].tolist() == [2.0, 3.0]
    torch.testing.assert_close(found, split_network(x, sigma, label=conditions["label"]).flatten(0, 1)[[4, 9]])


@pytest.mark.parametrize("wrong", [(2, L, V + 1), (2, V, L), (L, 2, V)])
def test_outputs_of_wrong_shape_are_rejected(wrong: tuple[int, ...]) -> None:
    process = cedd.absorb(V)

    def model(x_t: Tensor, sigma: Tensor) -> Tensor:
        return torch.zeros(wrong, requires_grad=True)

    for call in calls(model, process, "cedd"):
        with pytest.raises(ValueError, match=r"must return \[B, L, V\] = \[2, 4, 5\], without a mask column"):
            call()


def test_head_of_wrong_width_is_rejected(split_network: SplitNetwork) -> None:
    split_network.head = nn.Linear(8, V + 1)
    with pytest.raises(ValueError, match=r"\[N, V\]"):
        cedd.sample(split_network, cedd.absorb(V), (2, L), method="cedd", steps=2)


# ---- conditions -------------------------------------------------------------------------------------------------


def labelled(x_t: Tensor, sigma: Tensor, *, label: Tensor) -> Tensor:
    """Puts all probability on the token `label` [B]."""
    return 60.0 * nn.functional.one_hot(label, V).double()[:, None].expand(*x_t.shape, V)


@pytest.mark.parametrize("process", [cedd.absorb(V), cedd.roulette(V, 0.6), cedd.uniform(V)])
@pytest.mark.parametrize("batch", [None, 3])
def test_sampler_passes_condition_to_network(process: cedd.TokenProcess, batch: int | None) -> None:
    label = torch.arange(7) % V
    drawn = cedd.sample(labelled, process, (7, L), method="bayes", steps=40, batch=batch, label=label)
    assert torch.equal(drawn, label[:, None].expand(7, L))


def test_loss_and_bound_pass_condition_to_network() -> None:
    process, label = cedd.absorb(V), torch.arange(6) % V
    x0 = label[:, None].expand(6, L)
    for method in ("cedd", "ar"):
        assert float(cedd.loss(labelled, process, x0, method=method, label=label)) < 1e-9
        assert cedd.estimate_bound(labelled, process, x0, method=method, batch=4, label=label).nats_per_token < 0.01
    wrong = label.roll(1)
    assert float(cedd.loss(labelled, process, x0, method="cedd", t=0.9, label=wrong)) > 10
    assert cedd.estimate_bound(labelled, process, x0, method="cedd", label=wrong).nats_per_token > 10


def test_first_hitting_and_causal_sampling_pass_condition_to_network() -> None:
    process, label = cedd.absorb(V), torch.tensor([3, 1, 4])
    for method, sampler in (("cedd", "first-hitting"), ("ar", "analytic")):
        drawn = cedd.sample(labelled, process, (3, L), method=method, sampler=sampler, label=label)
        assert torch.equal(drawn, label[:, None].expand(3, L))


def test_invalid_conditions_are_rejected() -> None:
    process = cedd.absorb(V)
    for wrong in (torch.zeros(1), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="one entry per sequence, 2"):
            cedd.loss(labelled, process, torch.zeros(2, L, dtype=torch.int64), method="cedd", label=wrong)
    with pytest.raises(TypeError, match="unexpected argument 'stepps'"):
        cedd.sample(labelled, process, (2, L), method="cedd", stepps=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="one entry per sequence, 2"):
        cedd.sample(labelled, process, (2, L), method="cedd", label=torch.zeros(3))


# ---- modes ------------------------------------------------------------------------------------------------------


def test_evaluating_restores_training_mode(split_network: SplitNetwork) -> None:
    split_network.train()
    with evaluating(split_network):
        assert not split_network.training
        assert not torch.is_grad_enabled()
    assert split_network.training
    split_network.eval()
    with pytest.raises(RuntimeError), evaluating(split_network):
        raise RuntimeError
    assert not split_network.training


# ---- invalid outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("method", "process"), [("cedd", cedd.absorb(V)), ("sedd", cedd.uniform(V)), ("ar", cedd.absorb(V))]
)
def test_non_finite_outputs_are_rejected(bad: float, method: str, process: cedd.TokenProcess) -> None:
    def model(x_t: Tensor, sigma: Tensor) -> Tensor:
        outputs = torch.zeros(*x_t.shape, V)
        outputs[-1, -1, 2] = bad
        return outputs

    for call in calls(model, process, method):
        with pytest.raises(ValueError, match="the network returned nan"):
            call()


def test_non_finite_head_losses_are_rejected() -> None:
    """A network that computes the losses itself never passes its outputs to the loss."""
    model = small_transformer()
    torch.nn.init.constant_(model.head.bias, float("nan"))
    with pytest.raises(ValueError, match="the network returned nan"):
        cedd.loss(model, cedd.absorb(V), torch.zeros(2, L, dtype=torch.int64), method="cedd")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda outputs: None, "None"),
        (lambda outputs: (outputs, None), "tuple"),
        (lambda outputs: outputs.numpy(), "ndarray"),
        (lambda outputs: outputs.long(), r"torch\.int64"),
    ],
)
@pytest.mark.parametrize("method", ["cedd", "ar"])
def test_network_must_return_float_tensor(wrong, named: str, method: str) -> None:
    def model(x_t: Tensor, sigma: Tensor) -> Tensor:
        return wrong(torch.zeros(*x_t.shape, V))

    for call in calls(model, cedd.absorb(V), method):
        with pytest.raises(TypeError, match=f"must return a floating-point tensor.* \\(got .*{named}"):
            call()


@pytest.mark.parametrize("head", [lambda rows: None, lambda rows: torch.zeros(len(rows), V, dtype=torch.int64)])
def test_head_must_return_float_tensor(split_network: SplitNetwork, head, monkeypatch) -> None:
    monkeypatch.setattr(split_network.head, "forward", head)
    run, x_t = Network.of(split_network, V), torch.zeros(2, L, dtype=torch.int64)
    for network in (run, replace(run, double=True)):
        with pytest.raises(TypeError, match="must return a floating-point tensor"):
            network.rows(x_t, torch.rand(2), Places(torch.arange(3))).map(lambda o, _: o)


def test_features_of_wrong_shape_are_rejected(split_network: SplitNetwork, monkeypatch) -> None:
    monkeypatch.setattr(split_network, "features", lambda x_t, sigma: torch.zeros(len(x_t), 8))
    with pytest.raises(ValueError, match=r"features must be \[B, L, D\] with \[B, L\] = \[.*4\] \(got \[.*8\]"):
        cedd.sample(split_network, cedd.absorb(V), (2, L), method="cedd", steps=2)


def test_row_without_possible_tokens_is_rejected() -> None:
    outputs = torch.zeros(2, 3, V)
    outputs[1, 2] = -torch.inf
    with pytest.raises(ValueError, match="rows without any possible token"):
        network_module.OutputCheck().look_at(outputs)
    outputs[1, 2, 0] = 0.0
    network_module.OutputCheck().look_at(outputs)


def test_deferred_output_check_raises_once_when_settled() -> None:
    check = network_module.OutputCheck()
    check._totals = [(torch.tensor(number), network_module.invalid_outputs) for number in (1.0, float("nan"))]
    with pytest.raises(ValueError, match="the network returned nan"):
        check.settle()
    check.settle()  # only raises once


def without_zero(x_t: Tensor, sigma: Tensor) -> Tensor:
    """Token 0 has probability zero."""
    outputs = torch.zeros(*x_t.shape, V)
    outputs[..., 0] = -torch.inf
    return outputs


@pytest.mark.parametrize(("tolerance", "sampling"), [(None, "stratified"), (0.01, "stratified"), (None, "independent")])
@pytest.mark.parametrize(
    ("method", "process"),
    [
        *((method, cedd.absorb(V)) for method in ("cedd", "bayes", "sedd", "sedds", "dfm")),
        *(
            (method, process)
            for method in ("bayes", "sedd", "sedds")
            for process in (cedd.uniform(V), cedd.roulette(V))
        ),
    ],
)
def test_impossible_text_has_infinite_bound(method: str, process, tolerance, sampling) -> None:
    """f(x0) = 0: the bound is infinite, and a tolerance does not lead to further draws."""
    data = torch.tensor([[1, 2, 0, 3]] * 4)
    found = cedd.estimate_bound(
        without_zero, process, data, method=method, draws=8, tolerance=tolerance, sampling=sampling, max_draws=64
    )
    assert found.nats_per_token == float("inf")
    assert found.perplexity == float("inf")
    assert found.evaluations <= 4 * 16 + 4


@pytest.mark.parametrize("method", ["cedd", "sedd", "sedds", "dfm"])
def test_impossible_token_does_not_affect_other_texts(method: str) -> None:
    """On absorb only the probability of x0 matters: 0 log 0 is 0."""
    process, tokens = cedd.absorb(V), torch.tensor([[1, 2]])
    law = torch.zeros(V, V, dtype=torch.float64)
    law[1, 2] = 1.0
    exact = cedd.exact_bound(without_zero, process, law, method=method)
    assert exact < 50
    found = cedd.estimate_bound(without_zero, process, tokens, method=method, draws=512, fixed_set=True)
    assert abs(found.nats_per_token - exact) < 5 * found.stderr + 1e-6
    assert float(cedd.loss(without_zero, process, tokens, method=method)) < 50


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    ("size", "together", "sizes"),
    [
        (4, None, [4, 4, 1]),
        (4, [3, 0, 2, 4], [3, 2, 4]),
        (5, [3, 0, 2, 4], [5, 4]),
        (1, [3, 0, 2, 4], [3, 2, 4]),
        (9, [3, 0, 2, 4], [9]),
    ],
)
def test_chunks_keep_groups_of_rows_together(
    split_network: SplitNetwork, one_by_one: bool, size: int, together: list[int] | None, sizes: list[int], monkeypatch
) -> None:
    monkeypatch.setitem(network_module._ENTRIES_AT_ONCE, "cpu", size * V)
    x, rows = torch.arange(16).view(4, L) % V, torch.tensor([0, 1, 3, 9, 10, 12, 13, 14, 15])
    network = replace(Network.of(split_network, V), one_by_one=one_by_one)
    found = [*network.rows(x, torch.zeros(4), Places(rows)).chunks(together)]
    if not one_by_one:
        assert [len(outputs) for outputs, _ in found] == sizes
    elif together is not None:
        assert [len(outputs) for outputs, _ in found] == [3, 2, 4]
    for outputs, part in found:
        torch.testing.assert_close(outputs, split_network(x, torch.zeros(4)).flatten(0, 1)[rows[part]])
    assert [part.start for _, part in found] == [0, *(part.stop for _, part in found[:-1])]


@pytest.mark.parametrize("method", ["bayes", "sedd", "sedds"])
@pytest.mark.parametrize("process", [cedd.absorb(V), cedd.uniform(V), cedd.roulette(V)])
def test_impossible_text_has_infinite_exact_bound(method: str, process: cedd.TokenProcess) -> None:
    law = torch.zeros(V, V, dtype=torch.float64)
    law[0, 1] = 1.0
    assert cedd.exact_bound(without_zero, process, law, method=method) == float("inf")


def test_cached_causal_network_is_checked_for_conditions_and_outputs() -> None:
    model = small_transformer(causal=True, time_conditioning=False).eval()
    with pytest.raises(ValueError, match="not trained with labels"):
        cedd.sample(model, cedd.absorb(V), (2, L), method="ar", label=torch.zeros(2))
    torch.nn.init.constant_(model.head.bias, float("nan"))
    with pytest.raises(ValueError, match="the network returned nan"):
        cedd.sample(model, cedd.absorb(V), (2, L), method="ar")
