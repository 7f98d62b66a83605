"""`cedd export`: a run as a model to give away."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cedd.cli import UserError
from cedd.cli.arguments import Export
from cedd.models.folder import refuse_occupied
from cedd.models.loaded import LoadedModel
from cedd.models.locate import CARD_FILE, CONFIG_FILE, TRAIN_FILE, WEIGHTS_FILE
from cedd.report.commands import train_command
from cedd.samplers.choice import Sharpening
from cedd.spelling.calibrate import calibrate
from cedd.spelling.corruption import MISTAKES
from cedd.spelling.options import RENAMED, CorrectionOptions, current_names
from cedd.storage import read_json, reading
from cedd.tasks import load
from cedd.tasks.card import is_spelling
from cedd.training.config import read_config
from cedd.training.records import LOG_FILE, read_log

CALIBRATION_CHARACTERS = 30_000
"""Enough for a share of 0.25% to be known to within a tenth of a percent; minutes on two cores."""


def run(arguments: Export) -> int:
    """Write the folder and say what is in it."""
    model = load(arguments.run, arguments.device)
    source = model.folder.path
    refuse_occupied(arguments.out, source, arguments.force)  # before minutes of calibration
    extra: dict[str, Any] = {"title": arguments.title or model.folder.config.get("title") or arguments.out.name}
    extra |= {"training": training_facts(source, model.folder.config, extra["title"], arguments)}
    extra |= correction_facts(model, arguments)
    extra |= {"sampling": sampling_defaults(arguments.sampling)} if arguments.sampling else {}
    extra |= {"words": arguments.words} if arguments.words else {}
    model.save_pretrained(arguments.out, weights=arguments.weights, extra=extra, force=arguments.force)
    size = sum(file.stat().st_size for file in arguments.out.iterdir() if file.is_file())
    record = {"out": str(arguments.out), "bytes": size, "weights": arguments.weights or model.folder.weights}
    gone = sorted(model.folder.config.get("results", {}).keys() - extra["results"].keys())
    record |= {"correction": extra.get("correction", {}), "results_left_out": gone}
    print(json.dumps(record) if arguments.json else _said(record))
    return 0


def correction_facts(loaded: LoadedModel, arguments: Export) -> dict[str, Any]:
    """Defaults of correction, how they were chosen, and figures: of earlier ones those that still hold."""
    before = loaded.folder.config
    own, chosen = current_names(before.get("correction", {})), before.get("chosen", "")
    given, results = read_options(arguments.correction), read_results(arguments.results)
    found: dict[str, Any] = {}
    if arguments.calibrate is not None:
        found, chosen = calibrated(loaded, arguments.calibrate, arguments.broken, arguments.seed)
    correction = {**own, **found, **given}
    same = correction == own
    held = {name: one for name, one in before.get("results", {}).items() if same or not is_spelling(one)}
    if given and not same:
        chosen = ""
    facts = {"correction": correction, "chosen": arguments.chosen or chosen}
    return {name: one for name, one in facts.items() if one or name in before} | {"results": {**held, **results}}


def read_options(words: tuple[str, ...]) -> dict[str, Any]:
    """Options of correction from NAME=VALUE, checked."""
    usual = {field.name: field.default for field in fields(CorrectionOptions)}
    found: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name in RENAMED:
            print(f"cedd export: {name} is now called {RENAMED[name]}", file=sys.stderr)
        kind = str if name == "change" else int if isinstance(usual.get(name), int) else float
        try:
            found[name] = kind(value)
        except ValueError:
            raise UserError(f"--correction takes NAME=NUMBER, such as threshold=0.3; got {word!r}") from None
    CorrectionOptions().changed(found).check()
    return current_names(found)


def sampling_defaults(words: tuple[str, ...]) -> dict[str, float]:
    """Defaults of sampling from NAME=VALUE, checked."""
    found: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            found[name] = {"steps": _steps, "temperature": float, "top_p": float}[name](value)
            Sharpening(found.get("temperature", 1.0), found.get("top_p", 1.0))
        except (KeyError, ValueError):
            takes = "steps=NUMBER (1 or more), temperature=NUMBER (0 or more) and top_p=NUMBER (up to 1)"
            raise UserError(f"--sampling takes {takes}; got {word!r}") from None
    return found


def _steps(value: str) -> int:
    if (steps := int(value)) < 1:
        raise ValueError(f"there must be steps; got {steps}")
    return steps


def _said(record: dict[str, Any]) -> str:
    files = ", ".join((CONFIG_FILE, WEIGHTS_FILE, CARD_FILE))
    options = ", ".join(f"{name} {value}" for name, value in record["correction"].items())
    lines = [f"{record['out']}: {record['bytes'] / 1e6:.1f} MB with weights in {record['weights']} ({files})"]
    lines += [f"correction: {options}"] if options else []
    gone = ", ".join(record["results_left_out"])
    lines += [f"left out, for they are figures of other defaults: {gone}; measure them again"] if gone else []
    return "\n".join(lines)


def training_facts(source: Path, config: Any, title: str, arguments: Export) -> dict[str, Any]:
    """How the model was trained, with the names of files but not of the folders they were in."""
    facts = dict(config.get("training", {}))
    if (source / TRAIN_FILE).is_file():
        trained = read_config(source / TRAIN_FILE)
        text = replace(trained.text, cache=None, gpt2_files=None, validation=_name(trained.text.validation))
        public = replace(trained, data=_name(trained.data), out=Path("runs") / title, text=text, device="auto")
        steps = max((line["step"] for line in read_log(source / LOG_FILE)), default=trained.steps)
        facts |= {"command": train_command(public), "steps": steps, "batch": trained.batch.size}
    said = {"data": arguments.about, "command": arguments.command}
    return facts | {name: words for name, words in said.items() if words}


def _name(data: Any) -> Any:
    """A path without its folders; the name of a data set as it is."""
    return Path(data).name if isinstance(data, str) and not data.startswith("hf:") else data


def read_results(files: tuple[Path, ...]) -> dict[str, Any]:
    """Figures by the names of their files."""
    found: dict[str, Any] = {}
    for file in files:
        with reading(f"{file}, which should be what a command printed with --json,"):
            found[file.stem] = digest(read_json(file))
    return found


def digest(record: Any) -> Any:
    """What a card says of a command's figures: without the folders of files, and of all ways to correct that
    `cedd spelling` compares only the model's own."""
    if isinstance(record, dict) and isinstance(record.get("user"), dict):
        own = {
            name: value for name, value in record["user"]["corrections"][0].items() if name not in ("way", "options")
        }
        kind = MISTAKES[record["user"].get("mistakes", "letters")].kind
        data = record["data"]
        part = f"{-(-data['characters'] // data['length'])} of {data['length']} characters"
        facts = {"book": data["name"], "blocks": part, kind: record["user"]["rate"], "seed": record["seed"]}
        return digest({**facts, **own})
    if isinstance(record, dict):
        return {name: digest(value) for name, value in record.items()}
    if isinstance(record, list):
        return [digest(value) for value in record]
    return Path(record).name if isinstance(record, str) and Path(record).is_absolute() else record


def calibrated(loaded: LoadedModel, file: Path, broken: float, seed: int) -> tuple[dict[str, Any], str]:
    """Options of correction found on the beginning of a text, and that in words."""
    with reading(file):
        text = file.read_text(encoding="utf-8-sig")[:CALIBRATION_CHARACTERS]
    found = calibrate(loaded, text, broken=broken, seed=seed)
    words = (
        f"On the first {len(text):,} characters of {file.name}, 5% of whose letters were replaced: the most fixed with "
        f"at most {100 * broken:g}% of the right letters broken."
    )
    return found.options, words
