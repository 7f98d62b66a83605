"""The folder of a run: one process at a time, one configuration, one data set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cedd.data.training_data import TrainingData
from cedd.models.folder import read_description
from cedd.models.locate import CONFIG_FILE, TRAIN_FILE, WEIGHTS_FILE
from cedd.storage import expanded, is_temporary, locked, reading
from cedd.training.config import (
    NAMES_OF_FILES,
    TrainConfig,
    differing_settings,
    may_be_changed,
    read_config,
    settings_of_run,
)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, or raise an error if another process is training there."""
    with locked(folder, wait=False) as held:
        if held is False:
            raise ValueError(f"another process is training in {folder}; wait for it, or choose another --out")
        yield


def has_begun(folder: Path) -> bool:
    """Whether the folder contains a run's description."""
    return all((folder / name).is_file() for name in (TRAIN_FILE, CONFIG_FILE))  # which are written in this order


def refuse_other_run(config: TrainConfig) -> None:
    """Refuse a folder that contains another run, or something else."""
    out, path = config.out, config.out / TRAIN_FILE
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; choose another --out")
    if not path.is_file():
        if config.resume == "must":
            raise ValueError(f"no run to resume in {out}; check --out, or use --resume auto")
        if (out / WEIGHTS_FILE).exists():
            raise ValueError(f"{out} holds a model that was not trained here; choose another --out")
        if out.is_dir() and (others := [entry.name for entry in out.iterdir() if not is_temporary(entry)]):
            raise ValueError(f"{out} is not a run's folder: it contains {min(others)}; choose another --out")
        return
    if config.resume == "never":
        raise ValueError(f"{out} already holds a run; choose another --out, or --resume auto")
    different = changed_settings(config)
    refused = [name for name in different if not (config.allow_changes and may_be_changed(name))]
    if refused:
        what = "; ".join(f"{name} is {now}, not {before}" for name, (before, now) in list(different.items())[:3])
        how = f"choose another --out, or start a new run from its weights: --from {out} --out NEW"
        if all(map(may_be_changed, different)):
            how = f"add --allow-changes to change it from the last checkpoint on; otherwise {how}"
        raise ValueError(f"{out} holds another run ({what}); {how}")


def changed_settings(config: TrainConfig) -> dict[str, tuple[object, object]]:
    """The settings in which a configuration differs from the run in its folder, with both values."""
    saved = read_config(config.out / TRAIN_FILE)
    before, now = settings_of_run(saved), settings_of_run(config)
    different = {name: (before.get(name), now.get(name)) for name in differing_settings(saved, config)}
    return {name: values for name, values in different.items() if not _may_be_same(name, *values)}


def _may_be_same(name: str, before: object, now: object) -> bool:
    """Whether two settings may name the same files. The contents of data and tokenizers are compared in
    `refuse_other_data`."""
    if not (isinstance(before, str) and isinstance(now, str)):
        return False
    if name == "start":
        return expanded(before).resolve() == expanded(now).resolve()
    download = now.startswith("hf:")
    return name in NAMES_OF_FILES and not download and any(expanded(value).exists() for value in (before, now))


def refuse_other_data(config: TrainConfig, data: TrainingData) -> None:
    """Refuse to resume with another tokenizer, other training blocks, or other validation blocks."""
    if not has_begun(config.out):
        return
    named = {
        "tokenizer": config.text.tokenizer,
        "train": config.data,
        "validation": config.text.validation or config.data,
    }
    for part in changed_data(config.out, data):
        raise ValueError(
            f"the {_WORDS[part]} ({named[part]}) has changed since the run in {config.out} began; restore it, or "
            f"choose another --out (--from {config.out} starts a new run from its weights)"
        )


_WORDS = {"tokenizer": "tokenizer", "train": "data", "validation": "validation data"}


def changed_data(run: Path, data: TrainingData) -> list[str]:
    """Which of tokenizer, train and validation differ in content from those of the run."""
    description = read_description(run)
    with reading(run / CONFIG_FILE):
        before = description["data"]
        changed: list[str] = []
        if description["tokenizer"]["fingerprint"] != data.tokenizer.fingerprint:
            changed.append("tokenizer")
        for part, blocks in {"train": data.train, "validation": data.validation}.items():
            report = blocks.report()
            if any(before[part][name] != report[name] for name in ("tokens_sha256", "blocks")):
                changed.append(part)
        return changed
