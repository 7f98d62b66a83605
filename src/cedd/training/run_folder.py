"""The folder of a run: one writer at a time, one configuration, one data set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cedd.data.training_data import TrainingData
from cedd.models.folder import read_description
from cedd.models.locate import CONFIG_FILE, TRAIN_FILE, WEIGHTS_FILE
from cedd.storage import is_temporary, locked, reading
from cedd.training.config import TrainConfig, read_config, same_run


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Be the only process that trains in the folder, or refuse."""
    with locked(folder, wait=False) as held:
        if held is False:
            raise ValueError(f"another process is training in {folder}; wait for it, or choose another --out")
        yield


def has_begun(folder: Path) -> bool:
    """Whether a run has described itself in its folder."""
    return all((folder / name).is_file() for name in (TRAIN_FILE, CONFIG_FILE))  # which are written in this order


def refuse_other_run(config: TrainConfig) -> None:
    """A folder that holds another run, or something else, is left alone."""
    out, path = config.out, config.out / TRAIN_FILE
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; choose another --out")
    if not path.is_file():
        if config.resume == "must":
            raise ValueError(f"there is no run to resume in {out}; check --out, or use --resume auto")
        if (out / WEIGHTS_FILE).exists():
            raise ValueError(f"{out} holds a model that is no run of this command; choose another --out")
        if out.is_dir() and (others := [entry.name for entry in out.iterdir() if not is_temporary(entry)]):
            raise ValueError(f"{out} is no run's folder: it holds {min(others)}; choose another --out")
        return
    if config.resume == "never":
        raise ValueError(f"{out} holds a run already; choose another --out, or --resume auto")
    different = same_run(read_config(path), config)
    if different:
        what = f"{', '.join(different)} differ{'s' * (len(different) == 1)}"
        raise ValueError(f"{out} holds another run ({what}); choose another --out")


def refuse_other_data(config: TrainConfig, data: TrainingData) -> None:
    """A run continues with the blocks and the tokenizer that it began with, or not at all."""
    if has_begun(config.out) and has_other_data(config.out, data):
        raise ValueError(
            f"the data ({config.data}) has changed since the run in {config.out} began; "
            "restore it, or choose another --out"
        )


def has_other_data(run: Path, data: TrainingData) -> bool:
    """Whether these are other blocks to learn from than those of the run, or of another tokenizer."""
    description, now = read_description(run), data.train.report()
    with reading(run / CONFIG_FILE):
        before = description["data"]["train"]
        return any(before[name] != now[name] for name in ("tokens_sha256", "tokenizer_fingerprint", "blocks"))
