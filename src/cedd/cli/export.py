"""`cedd export`: write a run as a model folder to share."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cedd.apps.report.commands import train_command
from cedd.cli import UserError
from cedd.cli.arguments import Export
from cedd.cli.unused import refuse_unused
from cedd.models.folder import refuse_occupied
from cedd.models.loaded_model import LoadedModel
from cedd.models.locate import CARD_FILE, CONFIG_FILE, TRAIN_FILE, WEIGHTS_FILE
from cedd.names import printable
from cedd.samplers.choice import Sharpening
from cedd.spelling.calibrate import calibrate
from cedd.spelling.corruption import MISTAKES
from cedd.spelling.options import CorrectionOptions
from cedd.storage import JSONObject, read_json, reading
from cedd.tasks import load
from cedd.tasks.card import is_spelling
from cedd.training.config import read_config
from cedd.training.run_log import LOG_FILE, read_log

CALIBRATION_CHARACTERS = 30_000
"""Characters to calibrate on: enough to estimate a share of 0.25% to a tenth of a percent, in minutes on two cores."""


def run(arguments: Export) -> int:
    """Write the folder and print a summary."""
    if arguments.calibrate is None:
        refuse_unused(arguments, ("broken", "seed"), "without --calibrate")
    model = load(arguments.run, arguments.device)
    source = model.folder.path
    refuse_occupied(arguments.out, source, arguments.force)  # before minutes of calibration
    extra: JSONObject = {"title": arguments.title or model.folder.config.get("title") or arguments.out.name}
    extra |= {"training": training_facts(source, model.folder.config, extra["title"], arguments)}
    extra |= correction_facts(model, arguments)
    extra |= {"sampling": sampling_defaults(arguments.sampling)} if arguments.sampling else {}
    extra |= {"words": arguments.words} if arguments.words else {}
    model.save_pretrained(arguments.out, weights=arguments.weights, extra=extra, force=arguments.force)
    size = sum(file.stat().st_size for file in arguments.out.iterdir() if file.is_file())
    record = {"out": str(arguments.out), "bytes": size, "weights": arguments.weights or model.folder.weights}
    gone = sorted(model.folder.config.get("results", {}).keys() - extra["results"].keys())
    record |= {"correction": extra.get("correction", {}), "results_left_out": gone}
    print(json.dumps(record) if arguments.json else printable(_said(record)))
    return 0


def correction_facts(loaded: LoadedModel, arguments: Export) -> JSONObject:
    """Defaults of correction, how they were chosen, and results; of existing results, those that still hold."""
    before = loaded.folder.config
    own, chosen = before.get("correction", {}), before.get("chosen", "")
    given, results = read_options(arguments.correction), read_results(arguments.results)
    found: JSONObject = {}
    if arguments.calibrate is not None:
        found, chosen = calibrated(loaded, arguments.calibrate, arguments.broken, arguments.seed)
    correction = {**own, **found, **given}
    same = correction == own
    held = {name: one for name, one in before.get("results", {}).items() if same or not is_spelling(one)}
    if given and not same:
        chosen = ""
    facts = {"correction": correction, "chosen": arguments.chosen or chosen}
    return {name: one for name, one in facts.items() if one or name in before} | {"results": {**held, **results}}


def read_options(words: tuple[str, ...]) -> JSONObject:
    """Options of correction from NAME=VALUE, checked."""
    usual = {field.name: field.default for field in fields(CorrectionOptions)}
    found: JSONObject = {}
    for word in words:
        name, _, value = word.partition("=")
        kind = str if name == "change" else int if isinstance(usual.get(name), int) else float
        try:
            found[name] = kind(value)
        except ValueError:
            raise UserError(f"--correction must be NAME=NUMBER, such as threshold=0.3 (got {word!r})") from None
    try:
        CorrectionOptions().changed(found).check()
    except ValueError as error:
        raise UserError(f"--correction: {error}") from None
    return found


def sampling_defaults(words: tuple[str, ...]) -> dict[str, float]:
    """Defaults of sampling from NAME=VALUE, checked."""
    found: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            found[name] = {"steps": _steps, "temperature": float, "top_p": float}[name](value)
            Sharpening(found.get("temperature", 1.0), found.get("top_p", 1.0))
        except (KeyError, ValueError):
            takes = "steps=NUMBER (1 or more), temperature=NUMBER (0 or more) or top_p=NUMBER (up to 1)"
            raise UserError(f"--sampling must be {takes} (got {word!r})") from None
    return found


def _steps(value: str) -> int:
    if (steps := int(value)) < 1:
        raise ValueError(f"steps must be at least 1 (got {steps})")
    return steps


def _said(record: JSONObject) -> str:
    files = ", ".join((CONFIG_FILE, WEIGHTS_FILE, CARD_FILE))
    options = ", ".join(f"{name} {value}" for name, value in record["correction"].items())
    lines = [f"{record['out']}: {record['bytes'] / 1e6:.1f} MB with weights in {record['weights']} ({files})"]
    lines += [f"correction: {options}"] if options else []
    gone = ", ".join(record["results_left_out"])
    lines += (
        [f"removed results, since they were measured with other defaults: {gone}; measure them again"] if gone else []
    )
    return "\n".join(lines)


def training_facts(source: Path, config: Any, title: str, arguments: Export) -> JSONObject:
    """How the model was trained, with names of files but not of the folders they were in."""
    facts = dict(config.get("training", {}))
    if (source / TRAIN_FILE).is_file():
        trained = read_config(source / TRAIN_FILE)
        text = replace(trained.text, cache=None, gpt2_files=None, validation=_name(trained.text.validation))
        public = replace(trained, data=_name(trained.data), out=Path("runs") / title, text=text, device="auto")
        steps = max((line["step"] for line in read_log(source / LOG_FILE)), default=trained.steps)
        facts |= {"command": train_command(public), "steps": steps, "batch": trained.batch.size}
    said = {"data": arguments.about, "command": arguments.command}
    return facts | {name: words for name, words in said.items() if words}


def _name(data: object) -> Any:
    """A path without its folders; the name of a data set unchanged."""
    return Path(data).name if isinstance(data, str) and not data.startswith("hf:") else data


def read_results(files: tuple[Path, ...]) -> JSONObject:
    """Results by file name."""
    found: JSONObject = {}
    for file in files:
        record = read_json(file)
        with reading(file):
            found[file.stem] = digest(record)
    return found


def digest(record: object) -> Any:
    """The part of a command's results for a card: without folders of files, and without the variants that `cedd
    spelling` compares with the model's own correction."""
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


def calibrated(loaded: LoadedModel, file: Path, broken: float, seed: int) -> tuple[JSONObject, str]:
    """Options of correction chosen on the beginning of a text, and a description of the choice."""
    with reading(file), file.open(encoding="utf-8-sig") as opened:
        text = opened.read(CALIBRATION_CHARACTERS)
    found = calibrate(loaded, text, broken=broken, seed=seed)
    words = (
        f"Chosen on the first {len(text):,} characters of {file.name}, with 5% of the letters replaced: they fix the "
        f"most errors among the options that change at most {100 * broken:g}% of the correct letters."
    )
    return found.options, words
