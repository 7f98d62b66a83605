"""Data tests never use the user's files; GPT-2's are used only if there is a folder of development data."""

from pathlib import Path

import pytest

from cedd.data.tokenizers import GPT2Tokenizer


@pytest.fixture(scope="session")
def gpt2(shared_data: Path) -> GPT2Tokenizer:
    if not (shared_data / "gpt2-bpe" / "vocab.json").is_file():
        pytest.skip("needs GPT-2's vocab.json and merges.txt in CEDD_DATA/gpt2-bpe")
    return GPT2Tokenizer.from_folder(shared_data / "gpt2-bpe")


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests neither read nor write the user's cache, nor find the user's data."""
    monkeypatch.setenv("CEDD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CEDD_DATA", raising=False)
