"""Recently computed features and scores are cached."""

import pytest
import torch

from cedd.apps.correct.numpy_network import Floats, Inside, NumpyNetwork, Passage
from cedd.apps.serve.batcher import Batcher, Fiber
from cedd.apps.serve.correction import CorrectionTask
from cedd.apps.serve.registry import ModelRegistry
from cedd.samplers.feature_cache import MOST_NUMBERS, FeatureCache, NumberCache
from cedd.tasks import load
from cedd.tasks.correct import correct


class Reader:
    """Records its inputs; its features are the tokens themselves."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def __call__(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        self.read += x_t.tolist()
        return (x_t + sigma[:, None])[..., None].float()


def test_only_new_sequences_are_computed():
    reader, memory = Reader(), FeatureCache()
    sigma = torch.tensor([0.5, 0.5])
    first = memory.read("a", torch.tensor([[1, 2], [3, 4]]), sigma, reader)
    again = memory.read("a", torch.tensor([[3, 4], [5, 6], [5, 6]]), torch.full((3,), 0.5), reader)
    assert reader.read == [[1, 2], [3, 4], [5, 6]]
    assert first[..., 0].tolist() == [[1.5, 2.5], [3.5, 4.5]]
    assert again[..., 0].tolist() == [[3.5, 4.5], [5.5, 6.5], [5.5, 6.5]]
    memory.read("a", torch.tensor([[1, 2]]), torch.tensor([0.25]), reader)  # another time
    memory.read("b", torch.tensor([[1, 2]]), torch.tensor([0.5]), reader)  # another network
    assert reader.read[3:] == [[1, 2], [1, 2]]


def test_least_recently_used_features_are_evicted():
    reader, memory = Reader(), FeatureCache(most_bytes=2 * 8)  # two rows of two numbers
    for token in (1, 2, 1, 3, 2):
        memory.read("a", torch.tensor([[token, 0]]), torch.zeros(1), reader)
    assert [row[0] for row in reader.read] == [1, 2, 3, 2]  # 1 was used again before 3 came
    assert memory.size == 16
    many = memory.read("a", torch.arange(8).view(4, 2), torch.zeros(4), reader)  # more than the cache holds
    assert many[..., 0].tolist() == torch.arange(8).view(4, 2).tolist()


def test_repeated_letter_correction_uses_cached_features(registry: ModelRegistry):
    model, batcher, memory, found, calls = registry["small"], Batcher(), FeatureCache(), [], []

    def work(fiber: Fiber) -> None:
        found.append(correct(fiber.batched(model, memory), "the cqt sat on"))

    ended = list[BaseException | None]()
    for count in (1, 2):
        batcher.start(Fiber(work, ended.append))
        while len(ended) < count:  # on a slow machine the fiber yields, and is not ready until it has left `blocking`
            if batcher.ready:
                batcher.step()
        calls.append(batcher.calls)
    assert ended == [None, None]
    assert calls[0] == calls[1] > 0
    assert found == [correct(model, "the cqt sat on")] * 2


def test_repeated_word_correction_uses_cached_scores(monkeypatch: pytest.MonkeyPatch):
    model, batcher, memory, found, calls = load("english", "cpu"), Batcher(), FeatureCache(), [], [0]
    read = NumpyNetwork.read

    def noted(network: NumpyNetwork, text: Passage, inside: Inside | None = None) -> Floats:
        calls[-1] += 1
        return read(network, text, inside)

    monkeypatch.setattr(NumpyNetwork, "read", noted)

    text, ended = "He walked form the tabel", list[BaseException | None]()
    asked = CorrectionTask(model, text, "words", {}, memory=memory)

    def work(fiber: Fiber) -> None:
        found.append(correct(model, text, scores=asked.scores(fiber, model, lambda share: None)))

    for _ in range(2):
        batcher.start(Fiber(work, ended.append))
        while not ended[len(calls) - 1 :]:  # the network runs in Fiber.blocking
            if batcher.ready:
                batcher.step()
        calls.append(0)
    assert ended == [None, None]
    assert calls[0] > calls[1] == 0
    assert found == [correct(model, text)] * 2 == ["He walked from the table"] * 2


def test_oldest_numbers_are_evicted():
    numbers = NumberCache(dict.fromkeys(range(MOST_NUMBERS), 0.0))
    numbers["new"] = 1.0
    assert len(numbers) == MOST_NUMBERS
    assert 0 not in numbers
    assert numbers["new"] == 1.0
