"""A step's noisy batch depends on (seed, step) alone: ranks and micro-batches only partition it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cedd.data.batches import BatchSampler
from cedd.data.corpora import TextCorpus
from cedd.data.packing import PackedDataset, pack
from cedd.data.tokenizers import CharTokenizer
from cedd.losses import NoiseDraws, batch_loss, noisy_batch, pad_rows
from cedd.methods import get_method
from cedd.models.transformer import Transformer, config_from_preset
from cedd.process import TokenProcess, absorb, roulette, uniform
from cedd.training.config import BatchConfig
from cedd.training.noising import NoisingSampler

B, L = 16, 8
TEXT = "the quick brown fox jumps over the lazy dog " * 40


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    corpus = TextCorpus([TEXT])
    return pack(corpus, CharTokenizer.from_texts(corpus.texts()), L, cache=tmp_path_factory.mktemp("cache"))


def cut(
    dataset: PackedDataset,
    method: str,
    process: TokenProcess,
    step: int,
    world_size: int,
    config: BatchConfig,
    block: int | None = None,
) -> dict[str, Tensor]:
    """The global batch, reassembled from all ranks and micro-batches."""
    joined: dict[str, list[Tensor]] = {}
    tokens, shown = 0, B // (1 + config.complementary)
    for rank in range(world_size):
        sampler = BatchSampler(dataset, shown, seed=3, rank=rank, world_size=world_size)
        noising = NoisingSampler(sampler, get_method(method).in_blocks(block), process, config)
        for part in noising.batch(step).parts:
            assert part.inputs.shape == (B // world_size // config.accumulate, L)
            noise = part.rows.noise
            number = len(part.places) if part.counts is None else int(part.counts.sum())
            tensors = {"places": part.places + tokens, "x0": part.rows.x0, "x_t": part.rows.x_t}
            tensors |= {"t": noise.t, "alpha": noise.alpha}
            tensors = {name: tensor[:number] for name, tensor in tensors.items()}
            tensors |= {"inputs": part.inputs, "sigma": part.sigma}
            assert (part.clean is None) == (block in (None, L))
            if part.clean is not None:
                tensors["clean"] = part.clean.repeat_interleave(len(part.inputs) // len(part.clean), 0)
            for name, tensor in tensors.items():
                joined.setdefault(name, []).append(tensor)
            tokens += part.tokens
    return {name: torch.cat(tensors) for name, tensors in joined.items()}


@pytest.mark.parametrize(
    ("method", "kind", "block", "changes"),
    [
        *(
            (*case, None, {"times": times})
            for times in ("stratified", "independent")
            for case in (("cedd-star", absorb), ("bayes", roulette), ("sedd", uniform), ("ar", absorb))
        ),
        ("cedd-star", absorb, 2, {}),
        ("cedd-star", absorb, 2, {"complementary": True}),
        ("cedd-star", absorb, L, {}),
    ],
)
def test_batch_is_independent_of_ranks_and_micro_batches(dataset: PackedDataset, method: str, kind, block, changes):
    process = kind(dataset.vocab_size)
    expected = cut(dataset, method, process, 5, 1, BatchConfig(B, **changes), block)
    assert expected["sigma"].shape == ((B,) if block in (None, L) else (B, L // block))
    if "clean" in expected:
        masked = expected["inputs"] == dataset.vocab_size
        assert torch.equal(expected["inputs"][~masked], expected["clean"][~masked])
    for world_size in (1, 2, 4):
        for accumulate in (1, 2, 4):
            found = cut(dataset, method, process, 5, world_size, BatchConfig(B, accumulate, **changes), block)
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), (name, world_size, accumulate)


def times_of(sigma: Tensor) -> Tensor:
    """Times from the time inputs of the network: alive = 1 - (1-eps) t."""
    return -torch.expm1(-sigma.double()) / (1 - 1e-3)


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("block", [None, 2])
def test_each_stratum_of_global_batch_has_one_time(dataset: PackedDataset, world_size: int, block: int | None):
    """Every block has a stratum of its own."""
    low, high = 0.25, 0.75
    config = BatchConfig(B, 2, lowest_time=low, highest_time=high)
    for step in range(5):
        t = times_of(cut(dataset, "cedd", absorb(dataset.vocab_size), step, world_size, config, block)["sigma"])
        strata = ((t - low) / (high - low) * t.numel()).floor().long()
        assert sorted(strata.flatten().tolist()) == list(range(t.numel()))


def test_highest_time_moves_to_last_highest_time(dataset: PackedDataset):
    """Stratified times fill [low, high], so the last of B strata shows the highest time of a step."""
    process, config = roulette(dataset.vocab_size), BatchConfig(B, highest_time=0.5, last_highest_time=0.1)
    noising = NoisingSampler(BatchSampler(dataset, B), get_method("bayes"), process, config, steps=11)
    assert [round(noising.highest_time(step), 9) for step in (0, 5, 10, 20)] == [0.5, 0.3, 0.1, 0.1]
    for step in range(11):
        high = noising.highest_time(step)
        reach = [float(part.sigma.max()) for part in noising.batch(step).parts]
        low, top = (float(process.noise(t).sigma) for t in (high * (1 - 1 / B), high))
        assert low <= max(reach) <= top
    flat = NoisingSampler(BatchSampler(dataset, B), get_method("bayes"), process, BatchConfig(B, highest_time=0.5))
    assert torch.equal(flat.batch(0).parts[0].sigma, noising.batch(0).parts[0].sigma)
    assert not torch.equal(flat.batch(5).parts[0].sigma, noising.batch(5).parts[0].sigma)


@pytest.mark.parametrize(("first", "last"), [(0.2, 0.6), (0.6, 0.2)])
def test_capacity_suffices_when_highest_time_moves(dataset: PackedDataset, first, last):
    config = BatchConfig(256, highest_time=first, last_highest_time=last)
    sampler = BatchSampler(dataset, 256, seed=3)
    noising = NoisingSampler(sampler, get_method("cedd-star"), absorb(dataset.vocab_size), config, steps=40)
    assert {len(part.places) for step in range(40) for part in noising.batch(step).parts} == {noising.capacity}


@pytest.mark.parametrize(("accumulate", "block"), [(1, None), (2, None), (1, 2)])
def test_complementary_masks_show_every_token_once(dataset: PackedDataset, accumulate: int, block: int | None):
    config = BatchConfig(B, accumulate, complementary=True)
    for step in range(3):
        found = cut(dataset, "cedd-star", absorb(dataset.vocab_size), step, 1, config, block)
        masked, times = found["inputs"] == dataset.vocab_size, times_of(found["sigma"])
        assert (masked[::2] ^ masked[1::2]).float().mean() > 0.98  # except for the eps of the schedule
        sums = times[::2] + times[1::2]
        torch.testing.assert_close(sums, torch.full_like(sums, 1.001), rtol=0, atol=1e-5)
        assert block is None or torch.equal(found["clean"][::2], found["clean"][1::2])


def test_independent_times_are_not_stratified(dataset: PackedDataset):
    # Sixteen independent times fall into sixteen different strata once in a million.
    config = BatchConfig(B, 1, "independent")
    t = times_of(cut(dataset, "cedd", absorb(dataset.vocab_size), 0, 1, config)["sigma"])
    assert len(set((t * B).floor().tolist())) < B


def test_steps_and_seeds_give_different_noise(dataset: PackedDataset):
    process, config = roulette(dataset.vocab_size), BatchConfig(B)
    batches = [cut(dataset, "bayes", process, step, 1, config)["sigma"] for step in range(3)]
    other = NoisingSampler(BatchSampler(dataset, B, seed=4), get_method("bayes"), process, config).batch(0)
    assert not any(torch.equal(a, b) for a, b in zip(batches, [*batches[1:], other.parts[0].sigma], strict=True))


def test_indivisible_share_is_rejected(dataset: PackedDataset, tmp_path: Path):
    sampler = BatchSampler(dataset, 12, rank=1, world_size=2)
    with pytest.raises(ValueError, match=r"share of 6 sequences cannot be cut into 4 .* multiple of 8"):
        NoisingSampler(sampler, get_method("cedd"), absorb(dataset.vocab_size), BatchConfig(12, 4))


@pytest.mark.parametrize("times", ["stratified", "independent"])
@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (2, 2)])
def test_rows_are_padded_to_capacity(dataset: PackedDataset, times, world_size, accumulate):
    """The capacity leaves five standard deviations: a batch exceeds it with probability of about 1e-6."""
    sampler = BatchSampler(dataset, 256, seed=3, world_size=world_size)
    config = BatchConfig(256, accumulate, times)
    noising = NoisingSampler(sampler, get_method("cedd-star"), absorb(dataset.vocab_size), config)
    tokens = 256 * L // world_size // accumulate
    assert noising.capacity is not None
    assert noising.capacity < tokens
    for step in range(60 // accumulate):
        for part in noising.batch(step).parts:
            assert part.counts is not None
            assert len(part.counts) == noising.capacity == len(part.places.unique())
            masked = (part.inputs.reshape(-1) == dataset.vocab_size).nonzero().squeeze(1)
            assert torch.equal(part.places[part.counts > 0], masked)


def test_capacity_accounts_for_wrapped_ends(dataset: PackedDataset):
    noising = NoisingSampler(
        BatchSampler(dataset.wrapped(0, 1), 256), get_method("cedd-star"), absorb(dataset.vocab_size), BatchConfig(256)
    )
    assert {len(part.places) for step in range(20) for part in noising.batch(step).parts} == {noising.capacity}


@pytest.mark.parametrize(("method", "kind"), [("bayes", roulette), ("cedd", uniform), ("ar", absorb)])
def test_no_padding_when_all_positions_count(dataset: PackedDataset, method: str, kind):
    noising = NoisingSampler(BatchSampler(dataset, B), get_method(method), kind(dataset.vocab_size), BatchConfig(B))
    assert noising.capacity is None
    assert noising.batch(0).parts[0].counts is None


def test_pad_rows():
    chosen = torch.tensor([True, False, True, True, False])
    for capacity in (None, 2, 5):  # too few, or no gain
        assert torch.equal(pad_rows(chosen, capacity).places, torch.tensor([0, 2, 3]))
        assert pad_rows(chosen, capacity).counts is None
    assert len(pad_rows(torch.zeros(5, dtype=torch.bool), 2).places) == 0
    places, counts = pad_rows(chosen, 4)
    assert places.tolist() == [0, 2, 3, 1]
    assert counts is not None
    assert counts.tolist() == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("method", ["cedd-star", "bayes", "sedd", "sedds"])
@pytest.mark.parametrize("rows", [True, False])
def test_padding_rows_change_neither_loss_nor_gradient(method: str, rows: bool):
    """With a network whose head runs on rows, and with a plain one."""
    process = absorb(7)
    config = config_from_preset("tiny", vocab_size=7, has_mask=True, dropout=0.0)
    torch.manual_seed(0)
    model = Transformer(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    called = model if rows else lambda x, sigma: model(x, sigma)
    x0, t = torch.randint(7, (4, 16)), torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
    draws = NoiseDraws.make((4, 16), 7, x0.device, torch.Generator().manual_seed(1))
    results: list[list[Tensor]] = []
    for capacity in (None, 48):
        batch = noisy_batch(get_method(method), process, x0, t, draws, capacity)
        assert (batch.counts is None) == (capacity is None)
        model.zero_grad()
        loss = batch_loss(get_method(method), called, batch)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for plain, filled in zip(*results, strict=True):
        torch.testing.assert_close(plain, filled)


@pytest.mark.parametrize("method", ["cedd-star", "sedd"])
@pytest.mark.parametrize("capacity", [None, 48])
def test_loss_with_per_token_times(method: str, capacity: int | None):
    """Equal times give the loss with one time per sequence; only selected positions contribute, padded or not."""
    process, chosen = absorb(7), get_method(method)
    torch.manual_seed(0)
    model = Transformer(config_from_preset("tiny", vocab_size=7, has_mask=True, dropout=0.0)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x0, t = torch.randint(7, (4, 16)), torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
    draws, where = NoiseDraws.make((4, 16), 7, x0.device, torch.Generator().manual_seed(1)), torch.rand(4, 16) < 0.5

    def loss(t: Tensor, where: Tensor | None = None) -> Tensor:
        return batch_loss(chosen, model, noisy_batch(chosen, process, x0, t, draws, capacity, where)).detach()

    per_token = t[:, None].expand(4, 16)
    torch.testing.assert_close(loss(per_token), loss(t), rtol=1e-12, atol=0)
    assert not torch.equal(loss(per_token.flip(0)), loss(t))
    parts = loss(t, where) * where.sum() + loss(t, ~where) * (~where).sum()
    torch.testing.assert_close(parts / 64, loss(t), rtol=1e-12, atol=0)
