"""`cedd export`: a run as a model to give away."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from cedd.cli import UserError
from cedd.data.corruption import MISTAKES
from cedd.tasks import load
from cedd.tasks.calibrate import calibrate
from cedd.tasks.setting import Setting
from cedd.training.config import read_config
from cedd.training.locate import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE
from cedd.training.records import LOG_FILE, read_log

CALIBRATION_CHARACTERS = 30_000
"""Enough for a share of 0.25% to be known to within a tenth of a percent; minutes on two cores."""


@dataclass(frozen=True)
class Arguments:
    """example: cedd export runs/quickstart --out my-model --weights int8 --calibrate runs/quickstart/held-out.txt

    Write a run as a folder to give away: config.json, weights, tokenizer, and a card (README.md) made from config.json
    (the example: after cedd quickstart). The result is a model like any other (cedd correct my-model "teh cat") and can
    be exported again, for example once it has been measured: cedd spelling my-model --data book.txt --json > book.json,
    and then
    cedd export my-model --out my-model --results book.json
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    out: Path
    """The folder to write; it may be the RUN itself if that was exported before."""
    weights: Literal["float32", "bf16", "int8"] | None = None
    """How weights are stored: 4, 2 or 1 bytes each (float32 for a run; else as they are)."""
    title: str | None = None
    """The model's name on its card; by default the folder's."""
    about: str | None = None
    """What it was trained on, in words, for the card."""
    results: tuple[Path, ...] = ()
    """JSON files with figures, as the commands print them with --json; they go on the card by their files' names."""
    calibrate: Path | None = None
    """A text that it was not trained on, on which the defaults of correction are found."""
    broken: float = 0.0025
    """The share of right letters that calibration may break."""
    device: str = "auto"
    json: bool = False


def run(arguments: Arguments) -> int:
    """Write the folder and say what is in it."""
    model = load(arguments.run, arguments.device)
    source = model.folder.path
    if arguments.out.resolve() == source.resolve() and (source / "train.json").is_file():
        raise UserError(f"{source} is a run that may still be trained; export it to another folder")
    extra: dict[str, Any] = {"title": arguments.title or model.folder.config.get("title") or arguments.out.name}
    extra |= {"training": training_facts(source, model.folder.config, extra["title"], arguments.about)}
    extra |= {"results": {**model.folder.config.get("results", {}), **read_results(arguments.results)}}
    if arguments.calibrate is not None:
        extra["correction"] = calibrated(model.setting, arguments.calibrate, arguments.broken)
    model.save_pretrained(arguments.out, weights=arguments.weights, extra=extra)
    size = sum(file.stat().st_size for file in arguments.out.iterdir() if file.is_file())
    record = {"out": str(arguments.out), "bytes": size, "weights": arguments.weights or model.folder.weights}
    record |= {"correction": extra.get("correction", model.folder.config.get("correction", {}))}
    print(json.dumps(record) if arguments.json else _said(record))
    return 0


def _said(record: dict[str, Any]) -> str:
    files = ", ".join((CONFIG_FILE, WEIGHTS_FILE, CARD_FILE))
    options = ", ".join(f"{name} {value}" for name, value in record["correction"].items())
    lines = [f"{record['out']}: {record['bytes'] / 1e6:.1f} MB with weights in {record['weights']} ({files})"]
    return "\n".join([*lines, *([f"correction: {options}"] if options else [])])


def training_facts(source: Path, config: Any, title: str, about: str | None) -> dict[str, Any]:
    """How the model was trained, with the names of files but not of the folders they were in."""
    facts = dict(config.get("training", {}))
    if (source / "train.json").is_file():
        from cedd.cli.report import train_command

        trained = read_config(source / "train.json")
        text = replace(trained.text, cache=None, gpt2_files=None, validation=_name(trained.text.validation))
        public = replace(trained, data=_name(trained.data), out=Path("runs") / title, text=text, device="auto")
        steps = max((line["step"] for line in read_log(source / LOG_FILE)), default=trained.steps)
        facts |= {"command": train_command(public), "steps": steps}
    return facts | ({"data": about} if about else {})


def _name(data: Any) -> Any:
    """A path without its folders; the name of a data set as it is."""
    return Path(data).name if isinstance(data, str) and not data.startswith("hf:") else data


def read_results(files: tuple[Path, ...]) -> dict[str, Any]:
    """Figures by the names of their files."""
    found: dict[str, Any] = {}
    for file in files:
        try:
            found[file.stem] = digest(json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise UserError(f"{file} is not JSON ({error}); results are what a command prints with --json") from None
    return found


def digest(record: Any) -> Any:
    """What a card says of a command's figures: without the folders of files, and of all ways to correct that
    `cedd spelling` compares only the model's own."""
    if isinstance(record, dict) and isinstance(record.get("user"), dict):
        own = {
            name: value for name, value in record["user"]["corrections"][0].items() if name not in ("way", "options")
        }
        kind = MISTAKES[record["user"].get("mistakes", "letters")].kind
        return digest({"book": record["data"]["name"], kind: record["user"]["rate"], **own})
    if isinstance(record, dict):
        return {name: digest(value) for name, value in record.items()}
    if isinstance(record, list):
        return [digest(value) for value in record]
    return Path(record).name if isinstance(record, str) and Path(record).is_absolute() else record


def calibrated(setting: Setting, file: Path, broken: float) -> dict[str, Any]:
    """Correction's options by the beginning of a text."""
    found = calibrate(setting, file.read_text(encoding="utf-8")[:CALIBRATION_CHARACTERS], broken=broken)
    return found.options
