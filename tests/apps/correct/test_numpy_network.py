"""The forward pass in NumPy equals the one in torch."""

import numpy as np
import pytest
import torch

from cedd.apps.correct.numpy_network import NumpyNetwork, Passage
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


def passage(ids, wanted, around=None, places=None):
    places = np.tile(np.arange(ids.shape[1]), (len(ids), 1)) if places is None else places
    return Passage(ids, places, np.asarray(wanted), around)


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
def test_outputs_equal_those_of_torch(changes):
    """For passages of several lengths that are read together, to 1e-4."""
    sigma = 0.3
    model, arrays = networks(sigma if changes.get("time_input") == "sigma" else 0.0, **changes)
    given = [(sequences(3, 9), [0, 4, 8]), (sequences(1, 20), [7]), (sequences(2, 1), [0, 0])]
    for (ids, wanted), (said, states) in zip(given, arrays.read([passage(*one) for one in given]), strict=True):
        np.testing.assert_allclose(said, expected(model, ids, wanted, sigma), atol=1e-4)
        assert said.dtype == states.keys.dtype == np.float32


def test_reading_a_part_inside_the_cached_rest_gives_the_same_outputs():
    """If the part is unchanged, the cached keys and values are those of the whole."""
    _, arrays = networks(largest_score=12.0)
    ids = sequences(4, 16)
    ((said, states),) = arrays.read([passage(ids, [6] * 4)])
    inside, rest = np.arange(5, 8), np.delete(np.arange(16), np.arange(5, 8))
    for chosen in ([0, 1, 2, 3], [3, 1]):
        around = states.of(chosen, rest.tolist(), np.tile(rest, (len(chosen), 1)))
        again = passage(ids[chosen][:, inside], [1] * len(chosen), around, np.tile(inside, (len(chosen), 1)))
        np.testing.assert_allclose(arrays.read([again])[0][0], said[chosen], atol=1e-4)


def test_outputs_depend_on_relative_positions_only():
    _, arrays = networks()
    ids = sequences(2, 8)
    ((here, states),) = arrays.read([passage(ids, [3, 3])])
    moved = np.tile(np.arange(8), (2, 1)) + np.array([[5], [20]])
    np.testing.assert_allclose(arrays.read([passage(ids, [3, 3], places=moved)])[0][0], here, atol=1e-4)
    around = states.of([0, 1], [0, 1, 2, 4, 5, 6, 7], np.delete(moved, 3, 1))
    amid = passage(ids[:, 3:4], [0, 0], around, moved[:, 3:4])
    np.testing.assert_allclose(arrays.read([amid])[0][0], here, atol=1e-4)


def test_the_cached_text_does_not_attend_to_the_passage():
    """Compared with the definition: keys and values of the rest come from a separate call."""
    _, arrays = networks()
    ids = sequences(1, 8)
    other = ids.copy()
    other[0, 3] = (ids[0, 3] + 1) % V
    ((_, states),) = arrays.read([passage(ids, [3])])
    ((exact, _),) = arrays.read([passage(other, [3])])
    places = np.arange(8)[None]
    around = states.of([0], [0, 1, 2, 4, 5, 6, 7], np.delete(places, 3, 1))
    ((about, _),) = arrays.read([passage(other[:, 3:4], [0], around, places[:, 3:4])])
    assert not np.allclose(about, exact, atol=1e-4)
    ((first, _),) = arrays.read([passage(ids, [3])])
    assert np.abs(about - exact).max() < np.abs(first - exact).max()  # and yet it is nearer than what stood there


def test_a_causal_network_is_refused():
    with pytest.raises(ValueError, match="does not read the text after a word"):
        networks(causal=True, time_conditioning=False)
