"""Weights files: exact, written atomically, and rejected in one line if they do not fit."""

import json
import math
import os
import zlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from cedd.models.numpy_weights import CHECKSUM, PackedArrays, read_metadata
from cedd.models.numpy_weights import FORMS as ARRAY_FORMS
from cedd.models.transformer import Transformer, config_from_preset
from cedd.models.weights import FORMS, SkipInitialization, load_weights, read_weights, save_weights


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
    save_weights(tmp_path / "half", state, form="bf16")
    assert (tmp_path / "half").stat().st_size < 0.55 * (tmp_path / "full").stat().st_size
    other = network()
    load_weights(other, tmp_path / "half")
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a.bfloat16(), b.bfloat16())


@given(
    rows=st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=1, max_size=5),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e30]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_int8_error_is_at_most_half_a_row_step(tmp_path, rows, scale):
    matrix, bias = torch.tensor(rows) * scale, torch.tensor([math.pi, -1e-9])
    save_weights(tmp_path / "file", {"w": matrix, "b": bias}, form="int8")
    found = read_weights(tmp_path / "file", form="int8")
    assert found["w"].dtype == torch.float32
    assert torch.equal(found["b"], bias)
    step = matrix.abs().amax(1, keepdim=True) / 127
    assert ((found["w"] - matrix).abs() <= step * 0.5001 + 1e-40).all()
    save_weights(tmp_path / "again", found, form="int8")
    assert torch.allclose(read_weights(tmp_path / "again", form="int8")["w"], found["w"], rtol=1e-6, atol=0)


def test_int8_file_is_a_quarter_of_full_size(tmp_path):
    state = {"w": torch.randn(256, 512), "b": torch.randn(256)}
    save_weights(tmp_path / "full", state)
    save_weights(tmp_path / "small", state, form="int8")
    assert (tmp_path / "small").stat().st_size < 0.27 * (tmp_path / "full").stat().st_size


def test_bfloat16_values_round_trip_exactly(tmp_path):
    state = {"w": torch.randn(8, 8).bfloat16().float()}
    save_weights(tmp_path / "file", state, form="bf16")
    module = nn.Linear(8, 8, bias=False)
    state["weight"] = state.pop("w")
    save_weights(tmp_path / "file", state, form="bf16")
    load_weights(module, tmp_path / "file", form="bf16")
    assert torch.equal(module.weight, state["weight"])


@pytest.mark.parametrize("form", FORMS)
def test_every_flipped_bit_is_detected(tmp_path, form):
    """Every bit of the numbers; a flipped bit of the header may go unnoticed, but then changes no number."""
    path, state = tmp_path / "file", {"w": torch.randn(2, 3), "b": torch.randn(2), "n": torch.tensor(7)}
    save_weights(path, state, form=form)
    whole = path.read_bytes()
    expected = read_weights(path, form=form)
    numbers = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(0, 8 * numbers, 31), *range(8 * numbers, 8 * len(whole))]:
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            found = read_weights(path, form=form)
        except ValueError:
            continue
        assert place // 8 < numbers
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def relabel(path, name, **changes):
    """Change the header entry of a tensor, but none of the numbers."""
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    header[name] |= changes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[size:])


@pytest.mark.parametrize(
    ("form", "name", "changes"),
    [
        ("float32", "w", {"dtype": "I32"}),
        ("float32", "w", {"shape": [5, 3]}),
        ("float32", "n", {"dtype": "F64"}),
        ("bf16", "w", {"dtype": "F16"}),
        ("int8", "w", {"dtype": "U8"}),
        ("deflated", "w", {"dtype": "I8"}),
    ],
)
def test_changed_dtype_or_shape_of_same_bytes_is_detected(tmp_path, form, name, changes):
    path = tmp_path / "file"
    save_weights(path, {"w": torch.randn(3, 5), "n": torch.tensor(7)}, form=form)
    relabel(path, name, **changes)
    with pytest.raises(ValueError, match="file is damaged: its tensors do not match their checksum"):
        read_weights(path, form=form)
    if form in ARRAY_FORMS:
        with pytest.raises(ValueError, match="file is damaged: its tensors do not match their checksum"):
            PackedArrays(path, form=form)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_unsupported_dtype_is_named_in_error(tmp_path, dtype):
    tensors = {"w": torch.zeros(2, 2, dtype=dtype)}
    with pytest.raises(ValueError, match=r"w has the unsupported dtype torch\.float8"):
        save_weights(tmp_path / "file", tensors)
    save_file(tensors, tmp_path / "file")
    for form in ("float32", "int8"):
        for read in (read_weights, PackedArrays):
            with pytest.raises(ValueError, match=r"file: w has the unsupported dtype F8_E\d") as error:
                read(tmp_path / "file", form=form)
            assert "\n" not in str(error.value)
    save_weights(tmp_path / "file", {"w": torch.zeros(2, 2)}, form="bf16")
    with pytest.raises(ValueError, match="unsupported dtype BF16; use BOOL, F64, F32"):
        PackedArrays(tmp_path / "file", form="float32")


@pytest.mark.parametrize("form", ARRAY_FORMS)
def test_rows_of_packed_matrix_match_unpacked_one(tmp_path, form):
    save_weights(tmp_path / "file", {"w": torch.randn(9, 5)}, form=form)
    packed, ids = PackedArrays(tmp_path / "file", form=form), np.array([8, 0, 3, 3])
    rows = packed.rows("w")(ids)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, packed["w"][ids])


def test_file_without_checksum_is_read(tmp_path):
    """As written by another program; a checksum from config.json is then verified."""
    state = {"w": torch.ones(2, 2)}
    save_weights(tmp_path / "own", state)
    save_file(state, tmp_path / "file")
    own = read_metadata(tmp_path / "own")[CHECKSUM]
    for checksum in (None, own):
        assert torch.equal(read_weights(tmp_path / "file", checksum=checksum)["w"], state["w"])
    for name in ("file", "own"):
        with pytest.raises(ValueError, match="is damaged: its tensors do not match their checksum"):
            read_weights(tmp_path / name, checksum="00000000")


def test_mismatched_forms_are_rejected(tmp_path):
    path, state = tmp_path / "file", {"w": torch.ones(2, 2)}
    with pytest.raises(ValueError, match="stored as float32, bf16, int8, deflated, not as 'int3'"):
        save_weights(path, state, form="int3")
    with pytest.raises(ValueError, match="w holds numbers that are not finite"):
        save_weights(path, {"w": torch.tensor([[1.0, math.nan]])}, form="int8")
    assert not list(tmp_path.iterdir())
    save_weights(path, state)
    with pytest.raises(ValueError, match=r"file is not stored as int8: the matrix w is float32"):
        read_weights(path, form="int8")
    save_weights(path, {"w": torch.ones(2, 2, dtype=torch.int8)})
    with pytest.raises(ValueError, match="w lacks its steps"):
        read_weights(path, form="int8")
    save_weights(path, {"weight": torch.ones(2, 2)}, form="int8")
    with pytest.raises(ValueError, match=r"1 tensors that the model does not have, first weight.step"):
        load_weights(nn.Linear(2, 2, bias=False), path)


def test_integers_keep_their_type(tmp_path):
    for form in FORMS:
        save_weights(tmp_path / "file", {"step": torch.tensor(2**40 + 1)}, form=form)
        assert read_weights(tmp_path / "file", form=form)["step"] == 2**40 + 1


def test_strided_tensors_are_stored_by_value(tmp_path):
    tensor = torch.arange(6.0).view(2, 3)
    save_weights(tmp_path / "file", {"turned": tensor.T})
    assert torch.equal(read_weights(tmp_path / "file")["turned"], tensor.T)


def test_crash_before_rename_leaves_old_file(tmp_path, monkeypatch):
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


def test_file_is_synced_before_rename(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda *a: (order.append("fsync"), fsync(*a))[1])
    monkeypatch.setattr(os, "replace", lambda *a: (order.append("replace"), replace(*a))[1])
    save_weights(tmp_path / "file", {"x": torch.zeros(3)})
    assert order == ["fsync", "replace", "fsync"]  # the bytes, the name, the folder


def test_missing_or_damaged_files_are_rejected(tmp_path):
    model, path = network(), tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="no weights file"):
        load_weights(model, path)
    path.write_bytes(b"\x80\x04 not a safetensors file")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_weights(model, path)
    save_weights(path, model.state_dict())
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_weights(model, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 3}, "lacks"),
        ({"depth": 1}, "that the model does not have"),
        ({"mlp_ratio": 2}, r"blocks.0.mlp.hidden.weight is \[256, 64\], but the model's is \[128, 64\]"),
    ],
)
def test_different_shape_gives_one_line_error(tmp_path, changes, message):
    save_weights(tmp_path / "file", network(time_conditioning=False).state_dict())
    other = network(time_conditioning=False, **changes)
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(ValueError, match=message) as error:
        load_weights(other, tmp_path / "file")
    assert "\n" not in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def test_any_module_can_be_stored(tmp_path):
    module, loaded = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    module(torch.randn(8, 3))  # moves the running mean and variance, which are buffers
    save_weights(tmp_path / "file", module.state_dict())
    load_weights(loaded, tmp_path / "file")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name]), name


def test_skip_initialization_draws_no_random_weights(tmp_path):
    trained = network()
    save_weights(tmp_path / "file", trained.state_dict())
    before = torch.get_rng_state()
    with SkipInitialization():
        empty = Transformer(trained.options)
    assert torch.equal(torch.get_rng_state(), before)
    load_weights(empty, tmp_path / "file")
    x_t = torch.arange(8)[None] % 7
    assert torch.equal(empty.eval()(x_t, torch.ones(1)), trained.eval()(x_t, torch.ones(1)))


def test_deflated_file_is_below_a_fifth_and_keeps_largest_entries(tmp_path):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(256, 512, generator=generator)
    matrix[3, 5], matrix[7] = 40.0, 0.0
    state = {"w": matrix, "b": torch.randn(256, generator=generator)}
    save_weights(tmp_path / "full", state)
    save_weights(tmp_path / "small", state, form="deflated")
    assert (tmp_path / "small").stat().st_size < 0.2 * (tmp_path / "full").stat().st_size
    found = read_weights(tmp_path / "small", form="deflated")
    assert torch.equal(found["b"], state["b"])
    step = torch.maximum(matrix.square().mean(1).sqrt() / 16, matrix.abs().amax(1) / 127)
    assert ((found["w"] - matrix).abs() <= 0.51 * step[:, None]).all()
    save_weights(tmp_path / "again", found, form="deflated")
    assert torch.allclose(read_weights(tmp_path / "again", form="deflated")["w"], found["w"], rtol=1e-6, atol=0)
    assert (found["w"] - matrix).norm() < 0.02 * matrix.norm()


@pytest.mark.parametrize("damage", ["cut", "changed", "rows", "bomb"])
def test_damaged_deflated_weights_are_rejected(tmp_path, damage):
    save_weights(tmp_path / "file", {"w": torch.randn(8, 64)}, form="deflated")
    stored = read_weights(tmp_path / "file")
    if damage == "cut":
        stored["w"] = stored["w"][:-9]
    elif damage == "changed":
        stored["w"] = torch.full_like(stored["w"], 255)
    elif damage == "rows":
        stored["w.step"] = torch.ones(7)
    else:
        coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
        stored["w"] = torch.frombuffer(bytearray(coder.compress(bytes(1 << 20)) + coder.flush()), dtype=torch.uint8)
    save_weights(tmp_path / "file", stored)
    with pytest.raises(ValueError, match="file is not stored as deflated: w"):
        read_weights(tmp_path / "file", form="deflated")


@pytest.mark.parametrize("form", ARRAY_FORMS)
def test_packed_arrays_match_tensors(tmp_path, form):
    model = network()
    with torch.no_grad():
        model.head.weight.normal_()
    save_weights(tmp_path / "file", {**model.state_dict(), "step": torch.tensor(3)}, form=form)
    tensors, arrays = read_weights(tmp_path / "file", form=form), PackedArrays(tmp_path / "file", form=form)
    assert tensors.keys() == arrays.keys()
    assert all(torch.equal(tensors[name], torch.from_numpy(arrays[name])) for name in tensors)
    content = bytearray((tmp_path / "file").read_bytes())
    content[-1] ^= 1
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        PackedArrays(tmp_path / "file", form=form)
