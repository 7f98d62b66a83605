"""Weights files: exact, whole or absent, and refused in one line if they do not fit."""

import os

import pytest
import torch
from torch import nn

from cedd.models.transformer import Transformer, config_from_preset
from cedd.models.weights import load_weights, read_weights, save_weights


def network(**changes):
    torch.manual_seed(0)
    return Transformer(config_from_preset("tiny", vocab_size=7, has_mask=True, **changes))


def test_round_trip_is_exact(tmp_path):
    path, model = tmp_path / "model.safetensors", network()
    with torch.no_grad():
        model.head.weight.normal_()
    save_weights(path, model.state_dict(), metadata={"step": "3"})
    other = network()
    load_weights(other, path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_bfloat16_halves_the_file_and_loads_into_float32(tmp_path):
    model = network()
    state = {**model.state_dict()}
    save_weights(tmp_path / "full", state)
    save_weights(tmp_path / "half", state, dtype=torch.bfloat16)
    assert (tmp_path / "half").stat().st_size < 0.55 * (tmp_path / "full").stat().st_size
    other = network()
    load_weights(other, tmp_path / "half")
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a.bfloat16(), b.bfloat16())


def test_integers_keep_their_type(tmp_path):
    save_weights(tmp_path / "file", {"step": torch.tensor(2**40 + 1)}, dtype=torch.bfloat16)
    assert read_weights(tmp_path / "file")["step"] == 2**40 + 1


def test_strided_tensors_are_stored_by_value(tmp_path):
    tensor = torch.arange(6.0).view(2, 3)
    save_weights(tmp_path / "file", {"turned": tensor.T})
    assert torch.equal(read_weights(tmp_path / "file")["turned"], tensor.T)


def test_a_crash_before_the_rename_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_weights(path, {"x": torch.zeros(3)})

    def crash(*_):
        raise OSError("the power failed")

    for function in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, crash)
            with pytest.raises(OSError, match="power"):
                save_weights(path, {"x": torch.ones(3)})
        assert torch.equal(read_weights(path)["x"], torch.zeros(3))
        assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_bytes_reach_the_disk_before_the_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda *a: (order.append("fsync"), fsync(*a))[1])
    monkeypatch.setattr(os, "replace", lambda *a: (order.append("replace"), replace(*a))[1])
    save_weights(tmp_path / "file", {"x": torch.zeros(3)})
    assert order == ["fsync", "replace", "fsync"]  # the bytes, the name, the folder


def test_wrong_files_are_refused(tmp_path):
    model, path = network(), tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="no weights file"):
        load_weights(model, path)
    path.write_bytes(b"\x80\x04 not a safetensors file")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_weights(model, path)
    save_weights(path, model.state_dict())
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_weights(model, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 3}, "lacks"),
        ({"depth": 1}, "that the model has not"),
        ({"mlp_ratio": 2}, r"blocks.0.mlp.hidden.weight is \[256, 64\], but the model's is \[128, 64\]"),
    ],
)
def test_another_shape_is_refused_in_one_line(tmp_path, changes, message):
    save_weights(tmp_path / "file", network(time_conditioning=False).state_dict())
    other = network(time_conditioning=False, **changes)
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(ValueError, match=message) as error:
        load_weights(other, tmp_path / "file")
    assert "\n" not in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def test_any_module_can_be_stored(tmp_path):
    module = nn.BatchNorm1d(3)
    save_weights(tmp_path / "file", module.state_dict())
    load_weights(nn.BatchNorm1d(3), tmp_path / "file")
