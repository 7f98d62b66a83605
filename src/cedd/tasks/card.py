"""A model's card: README.md of its folder, generated from config.json alone, so that the two always agree.

Besides the model's shape, config.json may have these keys: `title` and `summary`; `imported` (`family`, `source`) for a
converted network; `training` (`data`, `command`, `steps`, `batch`); `results`, as printed by `cedd spelling --json` and
`cedd evaluate --json`; `correction` and `sampling`, the model's defaults, and `chosen`, how they were chosen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from cedd.storage import JSONMapping, JSONObject

_HEAD = """\
---
library_name: cedd
{license}
pipeline_tag: text-generation
tags: [discrete-diffusion, diffusion-language-model{more}]
---
"""

_CORRECTION = """\
- Correction substitutes tokens one for one and transposes neighbouring letters. It inserts and deletes letters only
  with a lexicon (`words.safetensors`) in the model's folder, as english has; without one "helo" stays four letters.
- The model knows only the language of its data. It may treat names, foreign words and quotations as mistakes; check
  its changes (`--json`, or the colours on a terminal) before you rely on them.
"""

_LIMITS = """\
- Generated text imitates the training data; it is not a source of facts.
- This is a small model for demonstrations and measurements. Do not use it to grade writing.
"""


def model_card(config: JSONMapping, parameters: int) -> str:
    """The card of the model described by config.json."""
    corrects = config["process"]["name"] != "absorb"
    parts = [
        _head(config.get("imported", {}), corrects),
        f"# {config.get('title', 'A discrete diffusion language model')}\n",
        *([f"{config['summary']}\n"] if config.get("summary") else []),
        _use(config),
        "## Model\n\n" + _table(_shape(config, parameters)),
        *_origin(config.get("imported", {})),
        *_training(config.get("training", {}), config.get("data", {})),
        *([f"## Defaults of {_chosen(config)}\n\n{config['chosen']}\n"] if config.get("chosen") else []),
        *_results(config.get("results", {})),
        "## Limitations\n\n" + (_CORRECTION if corrects else "") + _LIMITS,
    ]
    return "\n".join(parts)


def _head(imported: JSONMapping, corrects: bool) -> str:
    """Metadata for the hub. The licence of a converted network is determined by its authors."""
    source = str(imported.get("source", ""))
    base = f"\nbase_model: {source}" if source.count("/") == 1 else ""
    return _HEAD.format(
        license=f"license: other{base}" if imported else "license: apache-2.0",
        more=", spelling-correction" if corrects else "",
    )


def _origin(imported: JSONMapping) -> Iterator[str]:
    if imported:
        yield (
            f"## Source\n\nA network of the family {imported['family']}, trained and released by its authors as "
            f"`{imported['source']}`, and converted by `cedd import`. Its weights are under their licence.\n"
        )


def _chosen(config: JSONMapping) -> str:
    return "sampling" if config.get("sampling") and not config.get("correction") else "correction"


def _method(config: JSONMapping) -> str:
    """The name of the method, which is saved with its parts or alone."""
    method = config["method"]
    return method if isinstance(method, str) else method["name"]


def _use(config: JSONMapping) -> str:
    name = config.get("title", "FOLDER")
    own = f', architecture="{config["architecture"]}"' if ":" in config["architecture"] else ""
    lines = ["import cedd", "", f'model = cedd.load("{name}"{own})', "model.generate()"]
    if _method(config) != "ar":
        lines.append('model.infill("The ____ sat on the ____.")')
    if config["process"]["name"] != "absorb":
        lines.append('model.correct("It was a drak and stormy nihgt")')
    return "\n".join(["```python", *lines, "```\n"])


def constant_shares(process: JSONMapping) -> str:
    """The constant share of masks or shuffles of a process, in brackets, if it has one."""
    shares = {name: process[name] for name in ("p_m", "p_u") if isinstance(process.get(name), float)}
    return f" ({', '.join(f'{name} = {share:g}' for name, share in shares.items())})" if shares else ""


def _shape(config: JSONMapping, parameters: int) -> JSONObject:
    network, process = config["network"], config["process"]
    return {
        "method": f"`{_method(config)}`",
        "process": f"`{process['name']}`{constant_shares(process)}",
        "schedule": _schedule(process.get("schedule", {})),
        "network": f"{_size(config)}, {parameters:,} parameters",
        "tokens": f"`{config['tokenizer']['name']}`, vocabulary of {network['vocab_size']:,}",
        "context": f"{config['length']} tokens",
        "weights": f"{config.get('weights', 'float32')} on disk, float32 in memory",
        **{
            f"defaults of {kind}": ", ".join(f"{k} {v}" for k, v in config.get(kind, {}).items()) or None
            for kind in ("correction", "sampling")
        },
    }


def _size(config: JSONMapping) -> str:
    network = config["network"]
    if config["architecture"] == "transformer":
        return f"{network['depth']} blocks of width {network['width']}"
    return f"`{config['architecture']}`"


def _schedule(schedule: JSONMapping) -> str | None:
    numbers = ", ".join(f"{name} {value:g}" for name, value in schedule.items() if isinstance(value, float | int))
    return f"{schedule['name']}{f' ({numbers})' * bool(numbers)}" if schedule else None


def _training(training: JSONMapping, data: JSONMapping) -> Iterator[str]:
    if not training and not data:
        return
    yield "## Training\n"
    if training.get("data"):
        yield f"{training['data']}\n"
    rows = {kind: f"{part['blocks'] * part['length']:,} tokens" for kind, part in data.items()}
    rows |= {"steps": f"{training['steps']:,}"} if training.get("steps") else {}
    rows |= {"batch": f"{training['batch']} sequences"} if training.get("batch") else {}
    bound = training.get("bound", {})
    if bound.get("nats_per_token") is not None:  # not where it was infinite
        low, high = bound["ci95"]
        interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
        where = f"{bound['sequences']} held-out blocks, step {bound['step']:,}"
        rows["bound during training"] = f"{bound['nats_per_token']:.3f} nats per token{interval}, {where}"
    if rows:
        yield _table(rows)
    if training.get("command"):
        yield f"```console\n$ {training['command']}\n```\n"


_COLUMNS = """\
Measured by `cedd spelling MODEL --data BOOK --protocol user --blocks BLOCKS --seed SEED` on the middle of a text, with
95% intervals. *fixed*, *missed* and *altered* (into another mistake) are shares of the mistakes, *broken* of the
correct letters, *broken_others* of the spaces, digits and punctuation. *before* and *after* are the shares of wrong
characters before and after correction.
"""


def _results(results: JSONMapping) -> Iterator[str]:
    if results:
        yield "## Results\n"
    if any(is_spelling(figures) for figures in results.values()):
        yield _COLUMNS
    for name, figures in results.items():
        rows = _evaluated(figures) if is_evaluation(figures) else _flat(figures)
        yield f"{name}:\n\n" + _table(dict(rows))


def is_evaluation(figures: object) -> bool:
    """Whether these are results printed by `cedd evaluate --json`."""
    return isinstance(figures, Mapping) and "runs" in figures and "protocol_sha256" in figures.get("data", {})


def _evaluated(figures: JSONMapping) -> Iterator[tuple[str, str]]:
    """Perplexities with their intervals, and the data they were measured on."""
    data, runs = figures["data"], figures["runs"]
    yield "text", f"{data['set']}, {data.get('evaluated_sequences', '')} sequences of {data.get('length', '')} tokens"
    yield "protocol", data["protocol_sha256"][:12]
    for run in runs:
        whose = f"{run['run']}: " if len(runs) > 1 else ""
        for bound, found in run["bounds"].items():
            ends = [f"{end:.4g}" if end is not None else "?" for end in found["perplexity_ci95"]]
            yield f"{whose}perplexity per token ({bound})", f"{found['perplexity']:.4g} ({' to '.join(ends)})"
            for unit in ("bits_per_byte", "perplexity_per_word"):
                if found.get(unit) is not None:
                    yield f"{whose}{unit.replace('_', ' ')} ({bound})", f"{found[unit]:.4g}"


def is_spelling(figures: object) -> bool:
    """Whether these are results of correction, which depend on its options."""
    return isinstance(figures, Mapping) and "fixed" in figures


def _table(rows: JSONMapping) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *lines]) + "\n"


def _flat(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Results by name, joined by points; a share with its interval, or a short list, is one result."""
    if isinstance(value, Mapping) and value.get("share") is not None:
        ends = [f"{100 * value[key]:.3g}" for key in ("low", "high") if value.get(key) is not None]
        interval = f" ({' to '.join(ends)})" if ends else ""
        yield name, f"{100 * value['share']:.3g}%{interval}" + (f" of {value['total']:,}" if "total" in value else "")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{name}.{number}")
    else:
        shown = f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
        yield name, shown.replace("|", "\\|").replace("\n", " ")
