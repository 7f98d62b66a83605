"""Evaluation on sequences shorter than the context of a model."""

from pathlib import Path

import pytest
import torch

import cedd
from cedd.evaluation.evaluate import at_length
from cedd.models.mask_padding import MaskPadded
from tests.models import plain_llama

TEXT = " ".join(str(7 * i % plain_llama.V) for i in range(24))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def model_of(folder: Path, kind: str) -> cedd.LanguageModel:
    return cedd.import_model(plain_llama.write(folder / kind, kind), device="cpu")


def test_autoregressive_model_reads_every_sequence_from_start_token(tmp_path: Path, text: Path) -> None:
    model = model_of(tmp_path, "llama")
    found = cedd.evaluate(model, text, length=6, device="cpu")
    ids = torch.from_numpy(model.tokenizer.encode(TEXT)).view(4, 6)
    outputs = model.original_logits(torch.cat([torch.full((4, 1), 1), ids[:, :-1]], 1)).double()
    nats = -outputs.log_softmax(-1).gather(-1, ids[..., None]).mean()
    assert found.evaluations[0].bounds["tight"].nats_per_token == pytest.approx(float(nats), abs=1e-6)


def test_length_option_sets_length_of_sequences(tmp_path: Path, text: Path) -> None:
    found = cedd.evaluate(model_of(tmp_path, "sdar"), text, length=8, draws=2, device="cpu")
    assert found.record()["data"]["blocks"] == 3
    with pytest.raises(ValueError, match=r"--length must be a multiple of the block, 4 \(got 6\)"):
        cedd.evaluate(model_of(tmp_path, "sdar"), text, length=6, device="cpu")
    with pytest.raises(ValueError, match=r"--length must be at most 16, which .* reads at once \(got 17\)"):
        cedd.evaluate(model_of(tmp_path, "llada"), text, length=17, device="cpu")
    text.write_text("3 4 5")
    with pytest.raises(ValueError, match=r"fewer than one block of 16: give more text or a smaller --length"):
        cedd.evaluate(model_of(tmp_path, "llada"), text, device="cpu")


def test_shorter_text_is_padded_with_masks() -> None:
    """As when the model generates short texts."""
    model = cedd.load("english", device="cpu")
    shorter = at_length(model.folder, 4)
    assert isinstance(shorter.model, MaskPadded)
    assert shorter.length == 4
    assert at_length(model.folder, None) is model.folder
