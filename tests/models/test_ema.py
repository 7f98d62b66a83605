"""The averaged weights: arithmetic, warmup, precision and stored state."""

import pytest
import torch
from torch import nn

from cedd.models.ema import EMA, UPDATES
from cedd.models.weights import read_weights, save_weights


def model_with(value, dtype=torch.float32):
    model = nn.Linear(2, 2).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def test_update_follows_decay_formula():
    model, values = model_with(1.0), [4.0, -2.0, 0.5]
    ema, expected = EMA(model, decay=0.9), 1.0
    for value in values:
        ema.update(model_with(value))
        expected = 0.9 * expected + 0.1 * value
    for average in ema.shadow.values():
        torch.testing.assert_close(average, torch.full_like(average, expected))
    assert model.weight[0, 0] == 1.0  # the average is a copy


def test_interval_of_three_matches_three_single_updates():
    model = model_with(1.0)
    every, third, still = EMA(model, decay=0.9), EMA(model, decay=0.9, every=3), 1.0
    for value in [4.0] * 3 + [-2.0] * 3:
        every.update(model_with(value))
        third.update(model_with(value))
        if third.updates % 3 == 0:
            torch.testing.assert_close(third.shadow, every.shadow)
            still = third.shadow["weight"][0, 0].item()
        assert third.shadow["weight"][0, 0] == still
    with pytest.raises(ValueError, match="not every 0"):
        EMA(model, every=0)


def test_warmup_decay():
    ema = EMA(model_with(0.0), decay=0.5, warmup=True)
    assert ema.current_decay() == 0.1
    ema.update(model_with(1.0))
    assert ema.current_decay() == 2 / 11
    torch.testing.assert_close(ema.shadow["weight"], torch.full((2, 2), 0.9))
    ema.updates = 1000
    assert ema.current_decay() == 0.5
    assert EMA(model_with(0.0), decay=0.5).current_decay() == 0.5


def test_update_keeps_its_tensors():
    model = model_with(1.0)
    ema = EMA(model)
    addresses = [average.data_ptr() for average in ema.shadow.values()]
    ema.update(model)
    assert [average.data_ptr() for average in ema.shadow.values()] == addresses


def test_small_changes_survive_bfloat16_parameters():
    """1 + 1e-4 is 1 in bfloat16: only a float32 average moves at all."""
    ema = EMA(model_with(1.0, torch.bfloat16), decay=0.9999)
    ema.update(model_with(2.0, torch.bfloat16))
    torch.testing.assert_close(ema.shadow["weight"], torch.full((2, 2), 1.0001))


def test_state_round_trips_through_file(tmp_path):
    ema = EMA(model_with(1.0), decay=0.9)
    ema.update(model_with(2.0))
    save_weights(tmp_path / "ema.safetensors", ema.state_dict())
    other = EMA(model_with(0.0), decay=0.9)
    other.load_state_dict(read_weights(tmp_path / "ema.safetensors"))
    assert other.updates == 1
    assert all(torch.equal(other.shadow[name], average) for name, average in ema.shadow.items())


def test_mismatched_states_are_rejected():
    ema = EMA(model_with(1.0))
    with pytest.raises(ValueError, match="extra"):
        ema.load_state_dict({**ema.state_dict(), "extra": torch.zeros(1)})
    with pytest.raises(ValueError, match="weight is 3, not 2x2"):
        ema.load_state_dict({"weight": torch.zeros(3), "bias": torch.zeros(2), UPDATES: torch.tensor(0)})
    with pytest.raises(ValueError, match="decay"):
        EMA(model_with(1.0), decay=1.0)
