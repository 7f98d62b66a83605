"""Finding a model: a folder, a model in the package, or one on the hub. Models in the package are the folders of
`cedd/pretrained`; their names are those of the folders.
"""

from __future__ import annotations

import errno
import textwrap
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from cedd.names import hub_failure, nearest

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
TRAIN_FILE = "train.json"
"""The file that makes a model folder that of a run, which can be resumed."""
LEXICON_FILE, LEXICON_WEIGHTS_FILE, KNOWN_WORDS_FILE = "words.safetensors", "words.json", "known_words.txt.gz"
CORRECTOR_FILES = (LEXICON_FILE, LEXICON_WEIGHTS_FILE, KNOWN_WORDS_FILE, "known_words.LICENSE.txt")
"""The files of the word corrector (`cedd.apps.correct`), which belong to the model's folder."""
_ON_THE_HUB = [CONFIG_FILE, WEIGHTS_FILE, CARD_FILE, "*.json", "merges.txt"]


def pretrained_root() -> Path:
    """The folder of the models in the package."""
    return Path(str(resources.files("cedd"))) / "pretrained"


def pretrained_names() -> tuple[str, ...]:
    """The names of the models in the package."""
    return tuple(_models_in(pretrained_root()))


def locate(path_or_name: str | Path, **download: Any) -> Path:
    """The folder of a model: one that exists, one in the package by its name, or a download of the hub's owner/name.

    download: options of huggingface_hub's `snapshot_download` (revision, token, cache_dir, ...).
    """
    path, name = _as_path(path_or_name), str(path_or_name)
    if path is None:
        raise ValueError(f"no run or model at {textwrap.shorten(name, 60, placeholder=' …')}")
    if is_model(path):
        return path
    if name in pretrained_names():
        return packaged(name)
    if name.count("/") == 1 and not name.startswith((".", "~", "/")) and not path.parent.exists():
        return download_model(name, _ON_THE_HUB, download)
    raise ValueError(f"no run or model at {name or repr(name)}{_hint(path)}")


def packaged(name: str) -> Path:
    """The folder of the model of this name in the package, even if another folder has this name."""
    return pretrained_root() / name


def is_model(path_or_name: str | Path) -> bool:
    """Whether this is a model folder; False for what cannot be a path, such as a long text."""
    path = _as_path(path_or_name)
    return path is not None and (path / CONFIG_FILE).is_file()


def _as_path(path_or_name: str | Path) -> Path | None:
    """The path; None where it cannot exist: too long, or in the home of an unknown user."""
    try:
        path = Path(path_or_name).expanduser()
        (path / CONFIG_FILE).exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return None
    except RuntimeError:  # ~ and an unknown user
        return None
    return path


def _models_in(folder: Path) -> dict[str, Path]:
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return {entry.name: entry for entry in found if is_model(entry)}


def _hint(path: Path) -> str:
    """A suggestion: a model next to that path, or one of the package."""
    siblings = {name: str(found) for name, found in _models_in(path.parent).items()}
    known = {name: name for name in pretrained_names()} | siblings
    near = nearest(path.name, known, cutoff=0.5)
    return "" if near is None else f"; did you mean {known[near]}?"


def download_model(name: str, files: Sequence[str], options: Mapping[str, Any]) -> Path:
    """The folder of some files of owner/name on the hub; options are those of `snapshot_download`."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=list(files), **options))
    except Exception as error:  # noqa: BLE001 - no network, no such name: each is another exception
        raise ValueError(f"no run or model at {name}; {hub_failure(error)}{_hint(Path(name))}") from None
