"""The forward pass in NumPy equals the one in torch."""

from typing import Any

import numpy as np
import pytest
import torch

from cedd.apps.correct.numpy_network import Inside, NumpyNetwork, Passage
from cedd.models.transformer import Transformer, config_from_preset

V, LENGTH = 11, 32


def networks(sigma=0.0, **changes):
    """The same network in torch and NumPy, with random weights, since new blocks are the identity."""
    torch.manual_seed(0)
    model = Transformer(config_from_preset("tiny", vocab_size=V, has_mask=True, **changes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return model, NumpyNetwork(model.options, tensors, sigma)


def passage(*sequences, moved: Any = 0):
    """A passage of (ids, the wanted token); shorter sequences are padded on both sides."""
    L = max(len(ids) for ids, _ in sequences) + 1
    rows, wanted = np.full((len(sequences), L), -1), []
    for number, (ids, place) in enumerate(sequences):
        start = (L - len(ids)) // 2
        rows[number, start : start + len(ids)] = ids
        wanted.append(number * L + start + place)
    places = np.tile(np.arange(L), (len(rows), 1)) + moved
    return Passage(rows, places, np.minimum(rows, 0), np.array(wanted))


def inside(text, first, last, ids=None, shift=0):
    """Tokens first..last-1 of a passage, inside the rest of it; the middle one is wanted."""
    ids = text.ids[:, first:last] if ids is None else ids
    L = ids.shape[1]
    places, wanted = np.tile(first + np.arange(L), (len(ids), 1)), L // 2 + L * np.arange(len(ids))
    return Inside(ids, places, np.minimum(ids, 0), wanted, first, last, np.full(ids.shape, shift))


@torch.no_grad()
def expected(model, ids, wanted, sigma=0.0):
    outputs = model(torch.from_numpy(ids), torch.full((len(ids),), sigma))
    return outputs[torch.arange(len(ids)), torch.as_tensor(wanted)].log_softmax(-1).numpy()


def sequences(count, length, seed=0):
    return np.random.default_rng(seed).integers(0, V + 1, (count, length))


@pytest.mark.parametrize(
    "changes",
    [
        {"time_input": "none", "largest_score": 12.0},
        {"time_input": "sigma", "mlp_bias": True},
        {"time_conditioning": False, "mlp_bias": True, "depth": 1},
    ],
)
def test_outputs_match_torch(changes):
    """The batch contains sequences of different lengths."""
    sigma = 0.3
    model, arrays = networks(sigma if changes.get("time_input") == "sigma" else 0.0, **changes)
    given = [(sequences(1, length, length)[0], wanted) for length, wanted in ((9, 0), (9, 4), (9, 8), (20, 7), (1, 0))]
    found = arrays.read(passage(*given))
    assert found.dtype == np.float32
    for row, (ids, wanted) in zip(found, given, strict=True):
        np.testing.assert_allclose(row, expected(model, ids[None], [wanted], sigma)[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("largest_score", [None, 12.0])
def test_reading_part_inside_text_gives_same_outputs(largest_score):
    """If the part is unchanged; also next to other versions of it, which form separate groups."""
    _, arrays = networks(largest_score=largest_score)
    text = passage(*((ids, 6) for ids in sequences(4, 15)))
    part = inside(text, 5, 8)
    whole, again = np.split(arrays.read(text, part), 2)
    np.testing.assert_allclose(again, whole, atol=1e-4)
    others = np.concatenate([sequences(4, 3, seed=1), part.ids], 1)
    groups = np.repeat([[0, 0, 0, 1, 1, 1]], 4, 0)
    both = Inside(others, np.tile(part.places, 2), groups, np.arange(4) * 6 + 4, 5, 8, np.zeros_like(others))
    np.testing.assert_allclose(arrays.read(text, both)[4:], whole, atol=1e-4)


def test_outputs_depend_only_on_relative_positions():
    _, arrays = networks()
    given = [(row, 3) for row in sequences(2, 8)]
    there = arrays.read(passage(*given, moved=np.array([[5], [20]])))
    np.testing.assert_allclose(there, arrays.read(passage(*given)), atol=1e-4)


def test_shift_moves_text_after_part():
    """With one block, whose keys and values do not depend on positions, this equals reading the text further apart."""
    _, arrays = networks(depth=1)
    text = passage(*((row, 3) for row in sequences(2, 8)))
    apart = Passage(text.ids, text.places + 2 * (text.places > 3), text.groups, text.wanted)
    shifted, exact, not_shifted = (
        arrays.read(one, inside(one, 3, 4, shift=shift))[2:] for one, shift in ((text, 2), (apart, 0), (text, 0))
    )
    np.testing.assert_allclose(shifted, exact, atol=1e-4)
    assert not np.allclose(not_shifted, exact, atol=1e-3)


def test_text_does_not_attend_to_part_inside_it():
    _, arrays = networks()
    ids = sequences(1, 8)
    text, other = passage((ids[0], 3)), ids.copy()
    other[0, 3] = (ids[0, 3] + 1) % V
    alone = arrays.read(text)
    both = arrays.read(text, inside(text, 3, 4, other[:, 3:4]))
    np.testing.assert_allclose(both[:1], alone, atol=1e-5)
    exact = arrays.read(passage((other[0], 3)))
    assert not np.allclose(both[1:], exact, atol=1e-4)
    assert np.abs(both[1:] - exact).max() < np.abs(alone - exact).max()  # yet closer than the original


def test_causal_network_is_rejected():
    with pytest.raises(ValueError, match="does not read the text after a word"):
        networks(causal=True, time_conditioning=False)
