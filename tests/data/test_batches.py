from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cedd.data.batches import BatchSampler, Prefetcher
from cedd.data.packing import PackedDataset
from cedd.data.permutation import derive_key, permute, uniform_integers


def numbered_blocks(blocks: int, length: int = 2) -> PackedDataset:
    """Block i is [i, i, ...]."""
    header = {"length": length, "blocks": blocks}
    return PackedDataset(np.repeat(np.arange(blocks, dtype=np.uint32), length), header)


@given(size=st.integers(1, 500), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@given(size=st.integers(1, 500), key=st.integers(0, 2**64 - 1), data=st.data())
def test_permute_of_some_indices_matches_full_permutation(size: int, key: int, data: st.DataObject) -> None:
    whole = permute(np.arange(size), size, key)
    some = data.draw(st.lists(st.integers(0, size - 1), max_size=10))
    assert permute(np.array(some, dtype=np.int64), size, key).tolist() == whole[some].tolist()


def test_permutations_are_uniform() -> None:
    """Each of the 24 orders of 4 elements equally often over 1,200 keys, each image of an index in 0..99 too:
    chi-squared tests, false alarm 1e-4 each; the keys are fixed, so this either always passes or never."""
    orders = Counter(tuple(permute(np.arange(4), 4, derive_key(1, k)).tolist()) for k in range(1200))
    assert len(orders) == 24
    assert stats.chisquare(list(orders.values())).pvalue > 1e-4
    images = np.array([permute(np.array([0, 50, 99]), 100, derive_key(2, k)) for k in range(2500)])
    for column in images.T:
        assert stats.chisquare(np.bincount(column, minlength=100)).pvalue > 1e-4
    draws = uniform_integers(np.arange(50_000), 25, derive_key(3, 0))
    assert stats.chisquare(np.bincount(draws, minlength=25)).pvalue > 1e-4


def test_order_is_pinned_across_machines() -> None:
    """Pinned values: a change here would silently change every resumed run."""
    assert permute(np.arange(10), 10, derive_key(0, 0)).tolist() == [9, 6, 7, 2, 0, 5, 1, 8, 3, 4]
    assert derive_key(1, 2) != derive_key(2, 1)


def test_permute_rejects_out_of_range_input() -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.3"):
        permute(np.array([4]), 4, 0)
    with pytest.raises(ValueError, match="at least one"):
        permute(np.array([0]), 0, 0)


@settings(max_examples=50)
@given(blocks=st.integers(1, 40), batch=st.integers(1, 17), seed=st.integers(0, 1000))
def test_every_epoch_has_each_block_once(blocks: int, batch: int, seed: int) -> None:
    sampler = BatchSampler(numbered_blocks(blocks), batch, seed=seed)
    stream = np.concatenate([next(sampler)[:, 0].numpy() for _ in range(3 * blocks // batch + 1)])
    for epoch in range(len(stream) // blocks):
        assert sorted(stream[epoch * blocks : (epoch + 1) * blocks].tolist()) == list(range(blocks))


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    data = numbered_blocks(100)
    orders = [BatchSampler(data, 100, seed=seed).global_starts(step).tolist() for seed in (0, 1) for step in (0, 1)]
    assert len({tuple(order) for order in [*orders, list(range(0, 200, 2))]}) == 5


def numbered_tokens(blocks: int, length: int) -> PackedDataset:
    """Token i is i."""
    header = {"length": length, "blocks": blocks}
    return PackedDataset(np.arange(blocks * length, dtype=np.uint32), header)


@settings(max_examples=50)
@given(blocks=st.integers(2, 20), length=st.integers(1, 9), seed=st.integers(0, 1000))
def test_recut_epochs_have_each_token_once(blocks: int, length: int, seed: int) -> None:
    """All tokens, in runs of L that start at a common offset from multiples of L; it is 0 in the first epoch."""
    sampler = BatchSampler(numbered_tokens(blocks, length), blocks, seed=seed, cut_anew=True)
    for epoch in range(4):
        rows = next(sampler)
        assert sorted(rows.flatten().tolist()) == list(range(blocks * length))
        assert ((rows.diff(dim=1) == 1) | (rows[:, 1:] == 0)).all()
        first = {int(start) % length for start in rows[:, 0]}
        assert len(first) == 1
        assert epoch > 0 or first == {0}


def test_recut_offsets_are_uniform() -> None:
    """The offsets of 2,000 epochs: a chi-squared test with 8 cells, false-alarm rate 1e-4; the seed is fixed."""
    sampler = BatchSampler(numbered_tokens(1, 8), 1, seed=2, cut_anew=True)
    begun = [int(sampler.global_starts(epoch)[0]) for epoch in range(1, 2001)]
    assert stats.chisquare(np.bincount(begun, minlength=8)).pvalue > 1e-4


def test_first_epoch_does_not_depend_on_recutting() -> None:
    data = numbered_tokens(12, 4)
    for step in range(3):
        assert torch.equal(*(BatchSampler(data, 4, cut_anew=anew).batch(step) for anew in (False, True)))


def test_recutting_a_split_stays_within_it() -> None:
    training, _ = numbered_tokens(10, 4).split_tail(0.3)
    sampler = BatchSampler(training, 7, cut_anew=True)
    assert {int(token) for _ in range(5) for token in next(sampler).flatten()} == set(range(28))


@given(position=st.integers(0, 50), batch=st.integers(1, 9), anew=st.booleans())
@settings(max_examples=30)
def test_position_is_the_complete_state(position: int, batch: int, anew: bool) -> None:
    data = numbered_tokens(23, 3)
    running = BatchSampler(data, batch, seed=3, cut_anew=anew)
    for _ in range(position):
        next(running)
    resumed = BatchSampler(data, batch, seed=3, position=running.position, cut_anew=anew)
    assert resumed.epoch == position * batch / 23
    for _ in range(5):
        assert torch.equal(next(running), next(resumed))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_global_batch_does_not_depend_on_ranks(world_size: int) -> None:
    data = numbered_blocks(31)
    alone = BatchSampler(data, 12, seed=5)
    ranks = [BatchSampler(data, 12, seed=5, rank=rank, world_size=world_size) for rank in range(world_size)]
    for _ in range(8):
        assert torch.equal(torch.cat([next(rank) for rank in ranks]), next(alone))


def test_invalid_batch_sizes_and_ranks_are_rejected() -> None:
    data = numbered_blocks(5)
    with pytest.raises(ValueError, match="use a multiple of 3"):
        BatchSampler(data, 4, world_size=3)
    with pytest.raises(ValueError, match="cannot be shared"):
        BatchSampler(data, 0)
    with pytest.raises(ValueError, match="rank 2 is outside"):
        BatchSampler(data, 4, rank=2, world_size=2)
    with pytest.raises(ValueError, match="no block"):
        BatchSampler(numbered_blocks(0), 4)


def test_prefetching_does_not_change_batches() -> None:
    data = numbered_blocks(17)
    plain = BatchSampler(data, 4, seed=1, position=3)
    with Prefetcher(BatchSampler(data, 4, seed=1, position=3), depth=3) as ahead:
        for step in range(10):
            assert torch.equal(next(ahead), next(plain))
            assert ahead.position == plain.position == 4 + step
    with pytest.raises(ValueError, match="closed"):
        next(ahead)
    assert not ahead._thread.is_alive()
    with pytest.raises(ValueError, match="depth"):
        Prefetcher(plain, depth=0)


def test_prefetching_error_reaches_the_caller() -> None:
    class Broken(BatchSampler):
        def batch(self, step: int) -> torch.Tensor:
            if step == 1:
                raise OSError("the disk went away")
            return super().batch(step)

    ahead = Prefetcher(Broken(numbered_blocks(5), 2))
    next(ahead)
    with pytest.raises(OSError, match="went away"):
        next(ahead)
    assert ahead.position == 1


@pytest.mark.gpu
def test_prefetched_batches_are_on_the_gpu() -> None:
    data = numbered_blocks(1000, length=64)
    plain = BatchSampler(data, 32)
    with Prefetcher(BatchSampler(data, 32), device="cuda") as ahead:
        for _ in range(50):
            batch = next(ahead)
            assert batch.device.type == "cuda"
            assert torch.equal(batch.cpu(), next(plain))
