"""What a network has read lately is not read again."""

from collections.abc import Sequence

import pytest
import torch

from cedd.models.arrays import ArrayNetwork, Floats, Passage, States
from cedd.samplers.memory import MOST_NUMBERS, Memory, Numbers
from cedd.serve.gathering import Gathering, Run
from cedd.serve.models import Shelf
from cedd.tasks import load
from cedd.tasks.correct import correct


class Reader:
    """Notes what it reads; its features are the tokens themselves."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def __call__(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        self.read += x_t.tolist()
        return (x_t + sigma[:, None])[..., None].float()


def test_only_new_sequences_are_read_and_each_has_its_own_answer():
    reader, memory = Reader(), Memory()
    sigma = torch.tensor([0.5, 0.5])
    first = memory.read("a", torch.tensor([[1, 2], [3, 4]]), sigma, reader)
    again = memory.read("a", torch.tensor([[3, 4], [5, 6], [5, 6]]), torch.full((3,), 0.5), reader)
    assert reader.read == [[1, 2], [3, 4], [5, 6]]
    assert first[..., 0].tolist() == [[1.5, 2.5], [3.5, 4.5]]
    assert again[..., 0].tolist() == [[3.5, 4.5], [5.5, 6.5], [5.5, 6.5]]
    memory.read("a", torch.tensor([[1, 2]]), torch.tensor([0.25]), reader)  # another time
    memory.read("b", torch.tensor([[1, 2]]), torch.tensor([0.5]), reader)  # another network
    assert reader.read[3:] == [[1, 2], [1, 2]]


def test_the_oldest_is_forgotten_beyond_the_size():
    reader, memory = Reader(), Memory(most_bytes=2 * 8)  # two rows of two numbers
    for token in (1, 2, 1, 3, 2):
        memory.read("a", torch.tensor([[token, 0]]), torch.zeros(1), reader)
    assert [row[0] for row in reader.read] == [1, 2, 3, 2]  # 1 was used again before 3 came
    assert memory.size == 16
    many = memory.read("a", torch.arange(8).view(4, 2), torch.zeros(4), reader)  # more than it keeps
    assert many[..., 0].tolist() == torch.arange(8).view(4, 2).tolist()


def test_a_text_that_is_corrected_again_is_not_read_again(shelf: Shelf):
    model, gathering, memory, found, calls = shelf["small"], Gathering(), Memory(), [], []

    def work(run: Run) -> None:
        found.append(correct(run.over(model, memory), "the cqt sat on"))

    for _ in range(2):
        gathering.begin(Run(work, lambda error: None))
        while gathering.ready:
            gathering.turn()
        calls.append(gathering.calls)
    assert calls[0] == calls[1] > 0
    assert found == [correct(model, "the cqt sat on")] * 2


def test_a_doubt_that_is_judged_again_is_not_read_again(monkeypatch: pytest.MonkeyPatch):
    model, gathering, memory, found, calls = load("english", "cpu"), Gathering(), Memory(), [], [0]
    read = ArrayNetwork.read

    def noted(network: ArrayNetwork, passages: Sequence[Passage]) -> list[tuple[Floats, States]]:
        calls[-1] += 1
        return read(network, passages)

    monkeypatch.setattr(ArrayNetwork, "read", noted)

    def work(run: Run) -> None:
        found.append(correct(run.over(model, memory), "He walked form the tabel"))

    for _ in range(2):
        gathering.begin(Run(work, lambda error: None))
        while not found[len(calls) - 1 :]:  # it is judged outside
            if gathering.ready:
                gathering.turn()
        calls.append(0)
    assert calls[0] > calls[1] == 0
    assert found == [correct(model, "He walked form the tabel")] * 2 == ["He walked from the table"] * 2


def test_the_oldest_numbers_are_forgotten():
    numbers = Numbers(dict.fromkeys(range(MOST_NUMBERS), 0.0))
    numbers["new"] = 1.0
    assert len(numbers) == MOST_NUMBERS
    assert 0 not in numbers
    assert numbers["new"] == 1.0
