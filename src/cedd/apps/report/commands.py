"""The commands that reproduce the parts of a report."""

from __future__ import annotations

import errno
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cedd.apps.report.records import CorrectionFigures, Infilling, ReportOptions
from cedd.apps.report.runs import Opened, OpenedRun
from cedd.storage import JSONObject, atomic_write
from cedd.training.config import PRESETS, TrainConfig, dotted, flat, starting_from

HELD_OUT_TEXT, HELD_OUT_DOCUMENTS = "held-out.txt", "held-out.jsonl"
"""Files with the held-out text: as plain text, or with one document per line if end tokens separate documents."""


def run_commands(
    opened: Opened,
    effort: ReportOptions,
    seed: int,
    blocks: np.ndarray,
    filling: Infilling | None,
    correction: CorrectionFigures | None,
) -> dict[str, str]:
    """A command for each part of a page."""
    run, chosen = str(opened.path), {"draws": effort.draws, "seed": seed}
    named = opened.model.model.architecture
    own = {"architecture": named} if ":" in named else {}
    commands: dict[str, str] = {}
    if isinstance(opened, OpenedRun):
        commands["train"] = train_command(opened.config)
        if (file := save_held_out(opened, blocks)) is not None:
            wrap = {} if opened.data.validation.ends is None else {"wrap": "bos-eos"}
            commands["evaluate"] = command("evaluate", run, data=file, **wrap, **chosen, **own)
    else:
        commands["evaluate"] = command("evaluate", run, **opened.asked, **chosen, max_sequences=effort.sequences, **own)
    if effort.samples:
        commands["sample"] = command("sample", run, "-n", str(effort.samples), seed=seed, **own)
    if filling is not None:
        commands["infill"] = command("infill", run, filling.template, "-n", "3", seed=seed, **own)
    if correction is not None:
        told = {"rate": f"{correction.rate:g}", "threshold": f"{correction.threshold:g}", "change": "letters"}
        corrupted = correction.examples[0].corrupted
        commands["correct"] = command("correct", run, corrupted, engine="letters", **told, **own)
    much = {"sequences": effort.sequences, "samples": effort.samples}
    commands["this page"] = command("report", run, **opened.asked, **chosen, **much, **own)
    return commands


def comparison_command(opened: Sequence[Opened], out: Path, effort: ReportOptions, seed: int) -> str:
    """The command for the page of several runs."""
    runs, much = [str(one.path) for one in opened], {"sequences": effort.sequences, "draws": effort.draws}
    return command("report", *runs, **opened[0].asked, out=out, **much, seed=seed)


def command(*words: str, **options: object) -> str:
    """A shell command."""
    named = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return f"cedd {shlex.join([*words, *named])}"


def save_held_out(opened: OpenedRun, blocks: np.ndarray) -> Path | None:
    """Save the held-out text; returns the file that is read as the same blocks, or None if no file is, or if the run's
    folder is read-only."""
    try:
        return _saved_held_out(opened, blocks)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return None


def _saved_held_out(opened: OpenedRun, blocks: np.ndarray) -> Path | None:
    blocks = blocks if opened.data.validation.ends is None else blocks[:, 1:-1]
    tokenizer, documents = opened.model.tokenizer, opened.documents(blocks)
    path = opened.path / HELD_OUT_TEXT
    atomic_write(path, "".join(documents).encode())
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    if end:
        path = opened.path / HELD_OUT_DOCUMENTS
        atomic_write(path, "".join(f"{json.dumps({'text': document})}\n" for document in documents).encode())
    read = np.concatenate([np.append(tokenizer.encode(document), end) for document in documents])
    full = read.size // blocks.shape[1] == len(blocks)  # the last document may have an additional end token
    same = full and np.array_equal(read[: blocks.size], blocks.ravel())
    return path if same and not any("\r" in document for document in documents) else None


def train_command(config: TrainConfig) -> str:
    """`cedd train` with the nearest preset and the settings that differ from it."""
    asked = flat(config)
    changes: dict[str, JSONObject] = {}
    for name, (_, preset) in PRESETS.items():
        usual = flat(_said_by(preset, config)) | {"start": None}
        changes[name] = {key: value for key, value in asked.items() if value != usual[key]}
    nearest = min(changes, key=lambda name: len(changes[name]))
    words = ["train", nearest]
    if {"process.name", "process.arguments"} & changes[nearest].keys():
        words += ["--process", config.process.name]
        for name, argument in dotted(config.process.arguments).items():
            words += [f"--process.{name.replace('_', '-')}", str(argument)]
    for key, value in changes[nearest].items():
        if key in ("process.name", "process.arguments"):
            continue
        if key == "architecture_arguments":
            for name, argument in value.items():
                words += [f"--architecture.{name}", argument if isinstance(argument, str) else json.dumps(argument)]
            continue
        option = "from" if key == "start" else key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
            continue
        values = [part for pair in value.items() for part in pair] if isinstance(value, dict) else [value]
        words += [f"--{option}", *map(str, values)]
    return command(*words)


def _said_by(preset: TrainConfig, config: TrainConfig) -> TrainConfig:
    """What a command line has before its own settings: the preset's and, in their places, those of the model that the
    run started from, as long as there is one."""
    if config.start is None:
        return preset
    try:
        return starting_from(preset, config.start, str(config.out))
    except ValueError:
        return preset
