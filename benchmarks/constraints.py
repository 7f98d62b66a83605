r"""Whether constrained samples are valid, and what a constraint costs.

    OMP_NUM_THREADS=1 python benchmarks/constraints.py english -n 18 --temperatures 0.3 0.8 1.5 --steps 4 --length 16 \
        --device cpu --out benchmarks/results/constraints.json

20 regular expressions and 10 JSON schemas, each at several temperatures. Every sample is checked without the code
that drew it: by `re.fullmatch`, or by `json.loads` and the validator below. The cost is the CPU time (on a GPU, the
time) of drawing with the constraint divided by that of drawing as many texts of as many tokens in as many steps without
it, at each temperature one after the other; the figure is the median over temperatures. The automaton is compiled
before, and on a GPU each language is drawn from once before it is timed.

How much a constraint costs depends on how long the network takes. On a GPU the cost is also measured with a large
network: of random weights, with the model's tokenizer and process, for 64 texts at each of two temperatures.
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from command_line import command

from cedd.cli.parser import argument
from cedd.constraints import Language, json_schema, regex
from cedd.models.transformer import Transformer
from cedd.models.transformer_config import TransformerConfig
from cedd.storage import write_json
from cedd.tasks import LanguageModel, load
from cedd.tasks.generate import template_of

REGEXES = (
    "yes|no|maybe",
    "[0-9]{4}-[0-9]{2}-[0-9]{2}",
    "(January|March|May|July) [1-3]?[0-9], 1[89][0-9]{2}",
    r"\+?[0-9]{1,3}( [0-9]{2,4}){2,3}",
    "[A-Z][a-z]+ [A-Z][a-z]+",
    "[a-z]{3,12}@[a-z]{3,8}\\.(com|org|net)",
    "https?://[a-z]{2,10}\\.org(/[a-z]{1,8}){0,2}",
    "#[0-9a-f]{6}",
    "(25[0-5]|1?[0-9]{1,2})(\\.(25[0-5]|1?[0-9]{1,2})){3}",
    "([a-z]+ ){4}[a-z]+\\.",
    ".* moon .*",
    ".*(light|night|bright)",
    "[^aeiou]{1,20}",
    "(a|ab|ba)*",
    "[A-Z][^.!?]{10,40}[.!?]",
    "-?(0|[1-9][0-9]{0,5})(\\.[0-9]{1,3})?",
    "(1[0-2]|0?[1-9]):[0-5][0-9] ?(am|pm)",
    "[ACGT]{8,24}",
    "\\((\\([a-z]{1,4}\\)|[a-z]){1,5}\\)",
    "(- [a-z ]{3,10}\n){2,3}",
)
TYPES = {"boolean": bool, "integer": int, "string": str, "array": list, "object": dict, "null": type(None)}
_CLOSED: Mapping[str, Any] = {"type": "object", "additionalProperties": False}
SCHEMAS: Sequence[Mapping[str, Any]] = (
    {"type": "boolean"},
    {"type": "integer", "minimum": -12, "maximum": 345},
    {"enum": ["red", "green", 3, None, ["a"]]},
    {"type": "string", "minLength": 2, "maxLength": 8},
    {"type": "string", "format": "date"},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3},
    {**_CLOSED, "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]},
    {
        **_CLOSED,
        "properties": {
            "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
            "month": {"enum": ["May", "June"]},
        },
        "required": ["year", "month"],
    },
    {
        **_CLOSED,
        "properties": {
            "a": {"type": "null"},
            "b": {"type": "boolean"},
            "c": {"type": "integer", "maximum": 9, "minimum": 0},
        },
    },
    {
        "anyOf": [
            {**_CLOSED, "properties": {"k": {"const": "x"}, "v": {"type": "boolean"}}, "required": ["k", "v"]},
            {"type": "array", "items": {"enum": ["p", "q"]}, "maxItems": 2},
        ]
    },
)


@dataclass(frozen=True)
class Arguments:
    """example: python benchmarks/constraints.py english -n 1000 --out constraints.json

    Whether constrained samples are valid, and what a constraint costs.
    """

    model: str = field(metadata=argument("MODEL"))
    """A model on a process that only masks."""
    n: int = 1000
    """Samples per language, over all temperatures."""
    temperatures: tuple[float, ...] = (0.3, 0.6, 0.9, 1.2, 1.5)
    """Temperatures."""
    steps: int = 16
    """Network calls per sample."""
    length: int = 32
    """Tokens per sample, at most."""
    languages: int = 30
    """How many of the languages."""
    layers: int | None = None
    """Layers of the large network; 0: none (default: 24 on a GPU, otherwise none)."""
    width: int = 2048
    """Width of the large network."""
    device: str = "auto"
    """auto, cpu or cuda."""
    out: Path | None = None
    """Write the results to this JSON file."""

    @property
    def each(self) -> int:
        """Samples per language and temperature."""
        return -(-self.n // len(self.temperatures))


def is_valid(text: str, constraint: str | Mapping[str, Any]) -> bool:
    """Whether a text satisfies its constraint, checked with `re` and `json` only."""
    if isinstance(constraint, str):
        return re.fullmatch(constraint, text) is not None
    try:
        return satisfies(json.loads(text), constraint)
    except ValueError:
        return False


def satisfies(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is valid under a schema, as far as `SCHEMAS` use them."""
    if "anyOf" in schema:
        return any(satisfies(value, one) for one in schema["anyOf"])
    if not isinstance(value, TYPES.get(schema.get("type", ""), object)):
        return False
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    low, high = (schema.get(name, value) for name in ("minimum", "maximum"))
    if isinstance(value, int) and not low <= value <= high:
        return False
    if isinstance(value, str):
        is_date = schema.get("format") != "date" or datetime.date.fromisoformat(value).isoformat() == value
        return is_date and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    if isinstance(value, list):
        sized = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return sized and all(satisfies(one, schema.get("items", {})) for one in value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        named = set(schema.get("required", ())) <= value.keys() <= known.keys()
        return named and all(satisfies(one, known[name]) for name, one in value.items())
    return True


def measure(model: LanguageModel, constraint: str | Mapping[str, Any], arguments: Arguments) -> dict[str, Any]:
    """The valid samples of a language, and its cost."""
    language = regex(constraint) if isinstance(constraint, str) else json_schema(constraint)
    start = time.perf_counter()
    length = width_of(model, language, arguments.length)
    compiled = time.perf_counter() - start
    each = arguments.each
    how: dict[str, Any] = {"length": length, "steps": arguments.steps, "top_p": 1.0}
    if model.device.type == "cuda":
        drawn(model, each, constraint=language, **how)
    valid, invalid, times = 0, list[str](), list[tuple[float, float]]()
    for number, temperature in enumerate(arguments.temperatures):
        runs = [drawn(model, each, temperature=temperature, seed=number, constraint=one, **how)
                for one in ((language, None) if number % 2 else (None, language))]  # fmt: skip
        (texts, seconds), (_, free) = runs if number % 2 else runs[::-1]
        wrong = [text for text in texts if not is_valid(text, constraint)]
        valid, invalid = valid + each - len(wrong), invalid + wrong
        times.append((seconds, free))
    template, _ = template_of(model, "", length, language)
    seconds, free = (statistics.median(one) for one in zip(*times, strict=True))
    return {
        "constraint": constraint,
        "states": template.spans[0].language.automaton.num_states,
        "tokens": length,
        "compile_seconds": compiled,
        "samples": each * len(arguments.temperatures),
        "valid": valid,
        "invalid": invalid[:3],
        "seconds": seconds,
        "seconds_free": free,
        "cost": statistics.median(one / other for one, other in times),
    }


def width_of(model: LanguageModel, language: Language, most: int) -> int:
    """The largest length in tokens, at most `most`, for which the language is not empty."""
    template, _ = template_of(model, "", most, language)
    return template.spans[0].language.automaton.lengths(most)[-1]


def drawn(model: LanguageModel, n: int, **options: Any) -> tuple[list[str], float]:
    """n texts, and how long drawing them took."""
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    texts = model.generate(n, **options)
    return texts, clock() - start


def random_network(model: LanguageModel, layers: int, width: int) -> LanguageModel:
    """A model whose network has this size and random weights; the rest is the model's."""
    sizes = {"depth": layers, "width": width, "heads": width // 64, "length": model.length, "dropout": 0.0}
    torch.manual_seed(0)
    with model.device:
        config = TransformerConfig(vocab_size=model.tokenizer.vocab_size, has_mask=True, **sizes)
        network = Transformer(config).eval()
        torch.nn.init.normal_(network.head.weight, std=0.02)
    return LanguageModel.from_network(network, model.process, model.method, model.tokenizer)


def measured(model: LanguageModel, arguments: Arguments) -> dict[str, Any]:
    """The languages with one network; prints a line per language and the totals."""
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    print(f"{parameters / 1e6:,.0f} million parameters on {model.device}, {arguments.each} texts at once", flush=True)
    if model.device.type == "cuda":
        drawn(model, arguments.each, length=arguments.length, steps=arguments.steps)
    rows = list[dict[str, Any]]()
    for constraint in [*REGEXES, *SCHEMAS][: arguments.languages]:
        rows.append(row := measure(model, constraint, arguments))
        shown = constraint if isinstance(constraint, str) else json.dumps(constraint)
        per_step = " and ".join(f"{1000 * row[name] / arguments.steps:.1f}" for name in ("seconds", "seconds_free"))
        print(
            f"{row['valid']:5} of {row['samples']:<5} |Q| {row['states']:4}  cost {row['cost']:5.2f} "
            f"({per_step} ms per step with and without it)  {shown[:60]!r}",
            flush=True,
        )
    samples, valid = (sum(row[name] for row in rows) for name in ("samples", "valid"))
    costs = [row["cost"] for row in rows if row["states"] <= 500]
    middle = statistics.median(costs) if costs else None
    print(f"{valid} of {samples} samples of {len(rows)} languages are valid")
    if costs:
        print(f"median cost at up to 500 states: {middle:.3f} (largest {max(costs):.3f})")
    totals = {"samples": samples, "valid": valid, "median_cost": middle}
    return {"parameters": parameters, "texts": arguments.each, **totals, "languages": rows}


def run(arguments: Arguments) -> int:
    """Measure the model, and the large network."""
    model = load(arguments.model, arguments.device)
    found = measured(model, arguments)
    layers = arguments.layers if arguments.layers is not None else 24 * (model.device.type == "cuda")
    large = dict[str, Any]()
    if layers:
        few = replace(arguments, n=min(arguments.n, 128), temperatures=arguments.temperatures[:2])
        large = {"large": measured(random_network(model, layers, arguments.width), few)}
    if arguments.out is not None:
        settings = {name: getattr(arguments, name) for name in ("model", "n", "temperatures", "steps", "length")}
        record = {"settings": settings, "device": str(model.device), "threads": torch.get_num_threads()}
        write_json(arguments.out, {**record, **found, **large}, indent=2)
    return 0 if found["valid"] == found["samples"] else 1


if __name__ == "__main__":
    sys.exit(command(__file__, Arguments, run))
