r"""Whether constrained samples are valid, and what a constraint costs.

    python benchmarks/constraints.py english --out benchmarks/results/constraints-gpu.json
    OMP_NUM_THREADS=1 python benchmarks/constraints.py english -n 18 --temperatures 0.3 0.8 1.5 --texts 6 --steps 4 \
        --length 16 --pairs 5 --device cpu --out benchmarks/results/constraints.json

20 regular expressions and 10 JSON schemas, in two phases (`--phase`). Both write their results after each language.
Run again with the same settings, the program continues where it stopped.

cost: at temperature 1, texts are drawn with and without the constraint, one after the other, `--pairs` times. The cost
is the ratio of the CPU times (on a GPU, of the times): the geometric mean over the pairs, with a 95% interval. What is
compiled or recorded once is done before. How much a constraint costs depends on how long the network takes. On a GPU
the cost is also measured with a large network: of random weights, with the model's tokenizer and process.

validity: `-n` samples of each language, over all temperatures. Every sample is checked without the code that drew it:
by `re.fullmatch`, or by `json.loads` and the validator below.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from command_line import command

from cedd.bounds.estimate import student_quantile
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


Constraint = str | Mapping[str, Any]


@dataclass(frozen=True)
class Arguments:
    """example: python benchmarks/constraints.py english -n 1000 --out constraints.json

    Whether constrained samples are valid, and what a constraint costs.
    """

    model: str = field(metadata=argument("MODEL"))
    """A model on a process that only masks."""
    phase: str = "both"
    """cost, validity or both."""
    n: int = 1000
    """Samples per language whose validity is checked, over all temperatures."""
    temperatures: tuple[float, ...] = (0.3, 0.6, 0.9, 1.2, 1.5)
    """Temperatures of these."""
    texts: int = 40
    """Texts that are drawn at once to measure the cost."""
    large_texts: int = 64
    """The same with the large network."""
    pairs: int = 12
    """Pairs of runs with and without each constraint."""
    steps: int = 16
    """Network calls per sample to measure the cost."""
    check_steps: int = 8
    """Network calls per sample whose validity is checked."""
    length: int = 32
    """Tokens per sample, at most."""
    languages: int = 30
    """Number of languages."""
    layers: int | None = None
    """Layers of the large network; 0: none (default: 24 on a GPU, otherwise none)."""
    width: int = 2048
    """Width of the large network."""
    seconds: float = math.inf
    """Start no language after this many seconds."""
    device: str = "auto"
    """auto, cpu or cuda."""
    out: Path | None = None
    """Write the results to this JSON file, and continue from those in it."""

    @property
    def each(self) -> int:
        """Samples per language and temperature."""
        return -(-self.n // len(self.temperatures))


def is_valid(text: str, constraint: Constraint) -> bool:
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


def language_of(constraint: Constraint) -> Language:
    """The language of an entry of `REGEXES` or `SCHEMAS`."""
    return regex(constraint) if isinstance(constraint, str) else json_schema(constraint)


def validity(model: LanguageModel, constraint: Constraint, arguments: Arguments) -> dict[str, Any]:
    """The valid samples of a language."""
    language, start = language_of(constraint), time.perf_counter()
    length = width_of(model, language, arguments.length)
    compiled, invalid = time.perf_counter() - start, list[str]()
    how: dict[str, Any] = {"length": length, "steps": arguments.check_steps, "top_p": 1.0, "constraint": language}
    for number, temperature in enumerate(arguments.temperatures):
        texts = model.generate(arguments.each, temperature=temperature, seed=number, **how)
        invalid += [text for text in texts if not is_valid(text, constraint)]
    samples = arguments.each * len(arguments.temperatures)
    return {
        "constraint": constraint,
        "states": states_of(model, language, length),
        "tokens": length,
        "compile_seconds": compiled,
        "samples": samples,
        "valid": samples - len(invalid),
        "invalid": invalid[:3],
        "seconds": time.perf_counter() - start,
    }


def cost(model: LanguageModel, constraint: Constraint, texts: int, arguments: Arguments) -> dict[str, Any]:
    """The cost of a constraint: the ratio of times, with its interval."""
    language, steps = language_of(constraint), arguments.steps
    length = width_of(model, language, arguments.length)
    how: dict[str, Any] = {"length": length, "steps": steps, "top_p": 1.0, "temperature": 1.0, "seed": 0}
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(-3 if model.device.type == "cuda" else -1, arguments.pairs):
        for constrained in (True, False) if number % 2 else (False, True):
            seconds = drawn(model, texts, constraint=language if constrained else None, **how)
            if number >= 0:
                times[constrained].append(seconds)
    logs = [math.log(one / other) for one, other in zip(times[True], times[False], strict=True)]
    seconds, free = (statistics.median(times[one]) for one in (True, False))
    return {
        "constraint": constraint,
        "states": states_of(model, language, length),
        "tokens": length,
        "ms_per_step": 1000 * seconds / steps,
        "ms_per_step_free": 1000 * free / steps,
        **geometric_mean(logs),
        "logs": logs,
    }


def geometric_mean(logs: Sequence[float]) -> dict[str, Any]:
    """The geometric mean of numbers with these logarithms, and its 95% interval."""
    mean, half = statistics.fmean(logs), 0.0
    if len(logs) > 1:
        half = student_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return {"cost": math.exp(mean), "interval": [math.exp(mean - half), math.exp(mean + half)]}


def states_of(model: LanguageModel, language: Language, length: int) -> int:
    """|Q|"""
    template, _ = template_of(model, "", length, language)
    return template.spans[0].language.automaton.num_states


def width_of(model: LanguageModel, language: Language, most: int) -> int:
    """The largest length in tokens, at most `most`, for which the language is not empty."""
    template, _ = template_of(model, "", most, language)
    return template.spans[0].language.automaton.lengths(most)[-1]


def drawn(model: LanguageModel, n: int, **options: Any) -> float:
    """Seconds to draw n texts."""
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    model.generate(n, **options)
    return clock() - start


def random_network(model: LanguageModel, layers: int, width: int) -> LanguageModel:
    """A model whose network has this size and random weights; the rest is the model's."""
    sizes = {"depth": layers, "width": width, "heads": width // 64, "length": model.length, "dropout": 0.0}
    torch.manual_seed(0)
    with model.device:
        config = TransformerConfig(vocab_size=model.tokenizer.vocab_size, has_mask=True, **sizes)
        network = Transformer(config).eval()
        torch.nn.init.normal_(network.head.weight, std=0.02)
    return LanguageModel.from_network(network, model.process, model.method, model.tokenizer)


class Results:
    """The results of a file, to which each new one is written at once.

    Args:
        arguments: the settings; results of other settings are dropped.
        device: where the model is.
    """

    def __init__(self, arguments: Arguments, device: torch.device) -> None:
        names = (
            "model",
            "n",
            "temperatures",
            "texts",
            "large_texts",
            "pairs",
            "steps",
            "check_steps",
            "length",
            "width",
        )
        settings = {name: getattr(arguments, name) for name in names}
        self._out, self._stop = arguments.out, time.monotonic() + arguments.seconds
        head = {"settings": settings, "device": str(device), "threads": torch.get_num_threads()}
        self.record: dict[str, Any] = json.loads(json.dumps(head))
        if self._out is not None and self._out.exists():
            found = json.loads(self._out.read_text("utf-8"))
            if all(found.get(name) == value for name, value in self.record.items()):
                self.record = found

    def all_of(self, part: str, wanted: Sequence[Constraint], make: Callable[[Constraint], Any]) -> list[Any]:
        """The results of a part of the file for these languages, made where they are missing and there is time."""
        rows = self.record.setdefault(part, {"languages": []})["languages"]
        known = [row["constraint"] for row in rows]
        for constraint in wanted:
            if constraint not in known and time.monotonic() < self._stop:
                rows.append(row := make(constraint))
                self.write()
                print(line_of(row), flush=True)
        if len(rows) < len(wanted):
            print(f"{len(rows)} of {len(wanted)} languages are done; run again to continue", flush=True)
        return rows

    def write(self) -> None:
        """Write the file."""
        if self._out is not None:
            write_json(self._out, self.record, indent=2)


def line_of(row: Mapping[str, Any]) -> str:
    """A language's results."""
    constraint = row["constraint"]
    shown = repr((constraint if isinstance(constraint, str) else json.dumps(constraint))[:50])
    if "valid" in row:
        found = f"[{row['valid']} of {row['samples']} valid]  {row['seconds']:5.1f} s"
    else:
        low, high = row["interval"]
        both = f"{row['ms_per_step']:.2f} and {row['ms_per_step_free']:.2f} ms per step"
        found = f"cost {row['cost']:.3f} [{low:.3f}, {high:.3f}]  {both}"
    return f"{found}  |Q| {row['states']:4}  {shown}"


def measure_costs(
    results: Results, part: str, model: LanguageModel, wanted: Sequence[Constraint], texts: int, arguments: Arguments
) -> None:
    """The cost of languages with a network; prints a line for each, and the mean over those of at most 500 states."""
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    print(f"cost: {parameters / 1e6:,.0f} million parameters on {model.device}, {texts} texts at once", flush=True)
    rows = results.all_of(part, wanted, lambda one: cost(model, one, texts, arguments))
    few = [row for row in rows if row["states"] <= 500]
    if few:
        found = geometric_mean([log for row in few for log in row["logs"]])
        median, most = statistics.median(row["cost"] for row in few), max(row["cost"] for row in few)
        results.record[part] |= {"parameters": parameters, **found, "median_cost": median, "largest_cost": most}
        results.write()
        low, high = found["interval"]
        print(
            f"cost at up to 500 states: {found['cost']:.3f} [{low:.3f}, {high:.3f}] (median of languages {median:.3f}, "
            f"largest {most:.3f})"
        )


def run(arguments: Arguments) -> int:
    """Measure the costs, also with the large network, and check samples."""
    if arguments.phase not in ("cost", "validity", "both"):
        raise ValueError(f"--phase: invalid choice: {arguments.phase!r}; use cost, validity or both")
    model = load(arguments.model, arguments.device)
    results, wanted = Results(arguments, model.device), [*REGEXES, *SCHEMAS][: arguments.languages]
    if arguments.phase != "validity":
        measure_costs(results, "cost", model, wanted, arguments.texts, arguments)
        layers = arguments.layers if arguments.layers is not None else 24 * (model.device.type == "cuda")
        if layers:
            large = random_network(model, layers, arguments.width)
            measure_costs(results, "large_cost", large, wanted[::4], arguments.large_texts, arguments)
    if arguments.phase == "cost":
        return 0
    rows = results.all_of("validity", wanted, lambda one: validity(model, one, arguments))
    samples, valid = (sum(row[name] for row in rows) for name in ("samples", "valid"))
    results.record["validity"] |= {"samples": samples, "valid": valid}
    results.write()
    print(f"[{valid} of {samples} valid] samples of {len(rows)} languages")
    return 0 if valid == samples else 1


if __name__ == "__main__":
    sys.exit(command(__file__, Arguments, run))
