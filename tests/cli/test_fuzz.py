"""Invalid input gives a one-line error: damaged and newer folders, damaged data, and meaningless arguments.

Every input is invalid by construction. It must end with exit code 2 (or 1, if the machine is at fault), a one-line
error and no traceback, and must leave every file unchanged. Inputs are drawn with a fixed seed; three sixteenths are
in the default run, and all of them in the slow one.

`tests/cli/messages.txt` lists all error messages that the inputs cause, with names and numbers left out, so that they
can be read in one place. `python -m tests.cli.test_fuzz` writes it.
"""

import contextlib
import gzip
import importlib.util
import io
import json
import lzma
import os
import random
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cedd.cli import COMMANDS, main
from cedd.cli.arguments import ARGUMENTS
from cedd.cli.parser import options_of
from tests.tasks.models import save_random

PARTS, DEFAULT = 16, 3
"""The number of parts that the inputs are divided into, and the number of parts in the default run."""

# ----------------------------------------------------------------------------------------------------------------
# The folder in which everything happens


def make_world(folder: Path) -> None:
    """A model, a run of two steps, data and figures: everything that a command may be given."""
    save_random(folder / "model")
    save_random(folder / "absorb", "absorb", "cedd")
    save_random(folder / "parent", "absorb", "ar")
    (folder / "book.txt").write_text("It was a dark and stormy night, and the rain fell in torrents. " * 40)
    words = "train tiny --steps 2 --batch.size 2 --data book.txt --out run --evaluation.sequences 2 --log-every 1"
    words += " --model.width 32 --model.depth 1 --model.heads 2"
    with contextlib.redirect_stderr(io.StringIO()):
        assert main([*words.split(), "--evaluation.every", "1", "--device", "cpu"]) == 0
    (folder / "samples.jsonl").write_text('{"made_by": {}}\n{"text": "a text", "ids": [1, 2]}\n')
    (folder / "figures.json").write_text('{"bits": 1.5}')
    (folder / "foreign").mkdir()
    (folder / "foreign" / "config.json").write_text('{"model_type": "mdlm"}')
    shutil.copy(folder / "model" / "model.safetensors", folder / "foreign")


def tree(folder: Path) -> dict[str, str]:
    """Every file with a checksum of its bytes, every folder and every other thing by its kind."""

    def content(path: Path) -> str:
        if path.is_dir():
            return "folder"
        return f"{zlib.crc32(path.read_bytes()):08x}" if path.is_file() else "something else"

    return {str(path.relative_to(folder)): content(path) for path in sorted(folder.rglob("*"))}


def restore(folder: Path, original: Path, clean: dict[str, str], found: dict[str, str]) -> None:
    """Restore a folder, rewriting only what has changed."""
    for name in sorted(found, reverse=True):  # the contents of a folder before the folder
        if found[name] != clean.get(name):
            path = folder / name
            path.rmdir() if found[name] == "folder" else path.unlink()
    for name, content in clean.items():
        if content != found.get(name):
            path = folder / name
            path.mkdir() if content == "folder" else shutil.copyfile(original / name, path)


def nothing() -> None:
    """No damage."""


@dataclass(frozen=True)
class Input:
    """The words of a command line, and the damage done to the folder before."""

    words: tuple[str, ...]
    damage: Callable[[], None] = nothing
    about: str = ""

    def __str__(self) -> str:
        return f"{' '.join(map(repr, self.words))} {self.about}"


# ----------------------------------------------------------------------------------------------------------------
# Words

ON_A_MODEL = {
    "sample": "sample model --steps 1 --length 4",
    "infill": "infill model a____b --steps 1",
    "correct": "correct model text",
    "evaluate": "evaluate model --data book.txt --draws 1 --max-sequences 2",
    "spelling": "spelling model --data book.txt --blocks 1 --passes 1 --thresholds 0.5",
    "export": "export model --out exported",
    "report": "report run --sequences 2 --draws 1 --samples 0",
    "import": "import foreign --out imported",
    "genppl": "genppl --samples samples.jsonl --judge ./nowhere",
    "train": "train tiny --data book.txt --out trained --steps 1",
    "adapt": "adapt parent --data book.txt --out trained --steps 1 --batch.size 2",
    "quickstart": "quickstart --fast --steps 1 --out quick",
    "bench": "bench train --preset tiny --vocab 8 --shapes 1x4 --steps 1 --warmup 0",
    "theory": "theory --vocab 2 --length 1",
    "serve": "serve model --port 0 --lookup-processes 0",
    "completion": "completion bash",
}
"""A valid command line for each command."""

NOT_NUMBERS = ("x", "", "1e", "--", "[/red]", "\x1b[31m", "½", "0x10", "1,5", "None?")
INVALID_PATHS = (
    "nowhere/x.png",
    "nowhere/x.html",
    "nowhere/[/red].gif",
    "model",
    "~nosuchuser/x.png",
    "\x1b]0;x\x07/x.svg",
)


def usage_inputs() -> Iterator[Input]:
    """Unknown options, invalid values, and misplaced words."""
    for command, line in ON_A_MODEL.items():
        words = line.split()
        taken = [one for one in options_of(ARGUMENTS[command]) if not one.positional]
        options, numeric = [one.name for one in taken], [one.name for one in taken if one.kind in (int, float)]
        for wrong in ("--no-such-option", "--zzz=3", "-q", "--[/red]", "--\x1b[31m"):
            yield Input((*words, wrong))
        for name in numeric:
            for value in random.Random(name).sample(NOT_NUMBERS, 2):
                yield Input((*words, f"{name}={value}"))
        for name in set(options) & {"--seed"}:
            yield Input((*words, name, "-1"))
            yield Input((*words, name, str(2**64)))
        for name in set(options) & {"--device"}:
            for value in ("meta", "gpu", "cuda:99", "", "[/red]", "\x1b[31m", "cpu:7", "xpu", "mps:-1"):
                yield Input((*words, name, value))
        for name in sorted(set(options) & {"--plot", "--html", "--gif", "--per-sequence"}):
            for value in INVALID_PATHS:
                yield Input((*words, name, value))


RANGES = {
    "sample": """
        --steps 0 | --steps -3 | --length 0 | -n -1 | --temperature nan | --top-p 2 | --batch 0 |
        --sampler eulr | --grid x | --steps 99999999999999999999 | --length 99999999999999999999
    """,
    "infill": """
        --steps 0 | -n -1 | --temperature -1 | --top-p nan | --corrector nan
    """,
    "correct": """
        --rate 2 | --t 0 | --threshold nan | --passes 0 | --reach -1 | --swaps 1 | --steps 0 | --file nowhere.txt |
        --file model | --temperature inf | --change some | --max-surprise nan
    """,
    "evaluate": """
        --draws 0 | --batch 0 | --tolerance 0 | --tolerance x% | --bound tihgt | --max-sequences 0 |
        --data nowhere.txt | --data ~nosuchuser/x | --data model/model.safetensors | --workers 0 | --split x\x1b |
        --max-unknown nan | --time-floor 2 | --draws 99999999999999999999
    """,
    "spelling": """
        --rate 0 | --rate nan | --blocks -1 | --batch 0 | --t 7 | --passes 0 | --thresholds nan | --data '' |
        --protocol none | --mistakes all | --swaps 3 | --steps -1
    """,
    "export": """
        --weights int4 | --correction threshold | --correction threshold=x | --correction rate=7 |
        --results nowhere.json | --calibrate nowhere.txt | --out book.txt
    """,
    "report": """
        --sequences 0 | --draws 0 | --samples -1 | --out nowhere/x.html | --out x.txt | model | nowhere
    """,
    "genppl": """
        model | --samples nowhere.jsonl | -n x | --steps x | --out nowhere/x | --judge ~nosuchuser/x |
        --frontier curves | --step-counts x | --temperatures ½ | --entropy x
    """,
    "train": """
        --steps 0 | --batch.size 0 | --optimizer.rate nan | --method x | --process x | --length 0 |
        --data nowhere | --process.p-m 7 | --model.width 3 | --text.holdout 7 | --text.tokenizer x | --keep 0 |
        --process.settings a | --process.schedule x | --process.schedule.eps x |
        --out book.txt | --resume x | --batch.accumulate 0
    """,
    "import": """
        --weights int4 | --tokenizer ~nosuchuser/x | --tokenizer nowhere | --out model | --out nowhere/x | more
    """,
    "quickstart": """
        --steps 0 | --out book.txt | --device meta
    """,
    "bench": """
        --shapes 3 | --shapes 0x3 | --shapes axb | --methods x/absorb | --methods cedd/x | --steps 0
    """,
    "theory": """
        --vocab 1 | --vocab 99 | --length 0 | --length 9 | 5
    """,
    "completion": """
        tcsh
    """,
}
"""Invalid options of each command, separated by bars."""


def range_inputs() -> Iterator[Input]:
    for command, wrong in RANGES.items():
        words = ON_A_MODEL[command].split()
        for one in wrong.split("|"):
            yield Input((*words, *("" if part == "''" else part for part in one.split())))


# ----------------------------------------------------------------------------------------------------------------
# Damaged and newer folders

READ_BY = {
    "train.json": ["report run --sequences 2 --draws 1 --samples 0", "export run --out exported"],
    "model": ["sample model --steps 1 --length 4", "correct model text", "evaluate model --data book.txt --draws 1"],
    "run": ["report run --sequences 2 --draws 1 --samples 0", "export run --out exported", "sample run --steps 1"],
}
WRONG_VALUES = (None, [], {}, "x", -1, 2**70, 1.5, True, [[]], {"name": {}}, "[/red]", "\x1b[31m")
NESTED = "[" * 100_000


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value of a JSON object, and every object in it, by its keys."""
    yield path, value
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, (*path, key))


def changed(value: Any, path: tuple[str, ...], new: Any) -> Any:
    """The JSON object with another value at one place; ... removes it."""
    if not path:
        return new
    copy = dict(value)
    inner = changed(copy[path[0]], path[1:], new) if path[1:] or new is not ... else ...
    copy.pop(path[0]) if inner is ... else copy.update({path[0]: inner})
    return copy


def is_wrong(old: Any, new: Any, counts: bool) -> bool:
    """Whether a value is an invalid replacement: of another type, or a number that cannot be a network size."""
    if old is None:
        return False  # the types that it may have instead are not known here
    if isinstance(old, bool) or isinstance(new, bool):
        return type(old) is not type(new)
    if isinstance(old, int | float) and isinstance(new, int | float):
        return (counts and new in (-1, 2**70)) or (isinstance(old, int) and isinstance(new, float))
    return type(old) is not type(new)


DESCRIBED = ("method", "process", "network", "length", "tokenizer", "format")


def record_inputs(world: Path) -> Iterator[Input]:
    """config.json, tokenizer.json and train.json with other values, without keys, with newer ones."""
    for folder, name in (("model", "config.json"), ("model", "tokenizer.json"), ("run", "train.json")):
        file = world / folder / name
        if not file.is_file():
            continue
        record = json.loads(file.read_text())
        for path, old in leaves(record):
            if name == "config.json" and path and (path[0] not in DESCRIBED or path == ("tokenizer", "name")):
                continue
            draw = random.Random(".".join(path))
            wrong = [one for one in WRONG_VALUES if is_wrong(old, one, counts=name != "train.json")]
            for new in [*draw.sample(wrong, min(4, len(wrong))), *([...] if path and is_needed(name, path) else [])]:
                text = json.dumps(changed(record, path, new))
                words = draw.choice(READ_BY["train.json" if name == "train.json" else folder]).split()
                yield Input(tuple(words), writing(file, text), f"{name}: {'.'.join(path)} = {new!r:.30}")
        for part in (
            ("network",) if name == "config.json" else ("", "optimizer", "text") if name == "train.json" else ()
        ):
            newer = {**record, part: {**record[part], "qk_norm": True}} if part else {**record, "qk_norm": True}
            for line in READ_BY["train.json" if name == "train.json" else folder]:
                yield Input(tuple(line.split()), writing(file, json.dumps(newer)), f"{name}: newer {part}")


def is_needed(name: str, path: tuple[str, ...]) -> bool:
    """Whether the removed entry is required."""
    if name == "train.json":
        return path in (("data",), ("out",))
    optional = ("dropout", "time_conditioning", "checkpoint_blocks", "float32_residual", "causal", "mlp_ratio")
    optional += ("conditioning_width", "eps", "schedule", "p_m", "largest_score", "activation", "unknown", "power")
    return path[-1] not in optional


def writing(file: Path, content: str | bytes) -> Callable[[], None]:
    return lambda: (file.write_text(content) if isinstance(content, str) else file.write_bytes(content), None)[1]


FOREIGN = (
    *({}, {"model_type": 3}, {"model_type": []}, {"model_type": "gpt2"}, {"model_type": "mdlm", "hidden_dim": "x"}),
    *({"model_type": "mdlm", "vocab_size": -1}, {"model": 3}, {"ngpus": 1, "graph": [], "model": {}}, {"model": []}),
    *({"model_type": "mdlm", "n_blocks": 2**70}, {"model_type": "duo"}, {"model_type": "gidd"}, {"graph": {"type": 3}}),
)


def foreign_inputs(world: Path) -> Iterator[Input]:
    """Invalid networks in the formats of other projects."""
    file, words = world / "foreign" / "config.json", tuple(ON_A_MODEL["import"].split())
    for text in (*map(json.dumps, FOREIGN), NESTED, "[]", "3", "", "\x1b[31m", '{"model_type": '):
        yield Input(words, writing(file, text), f"config.json: {text[:60]}")
    for content in (b"", b"x" * 100, NESTED.encode()):
        yield Input(words, writing(file.with_name("model.safetensors"), content), "damaged weights")
    yield Input(words, file.unlink, "no config.json")


def file_inputs(world: Path) -> Iterator[Input]:
    """Files that are truncated, have flipped bits, are empty, or contain something else."""
    draw = random.Random(19)
    needed = {"model": ["config.json", "model.safetensors"], "run": ["config.json", "model.safetensors", "train.json"]}
    for folder, names in needed.items():
        names = [*names, *(p.name for p in (world / folder).glob("*tokenizer*.json"))]
        for name in dict.fromkeys(names):
            file = world / folder / name
            content = file.read_bytes()
            damaged = {
                "empty": b"",
                "cut": content[: len(content) // 2],
                "garbage": bytes(draw.randrange(256) for _ in range(200)),
                "nested": NESTED.encode(),
                "a list": b"[]",
                "a number": b"3",
                "not UTF-8": b"\xff\xfe" + content[:100],
                "null": b"null",
            }
            for place in range(6):
                head = bytearray(content)
                head[8 * (name == "model.safetensors") + place] ^= 1 << draw.randrange(7)
                damaged[f"bit {place}"] = bytes(head)
            for kind, bytes_ in damaged.items():
                words = draw.choice(READ_BY["train.json" if name == "train.json" else folder])
                yield Input(tuple(words.split()), writing(file, bytes_), f"{folder}/{name}: {kind}")
            yield Input(tuple(READ_BY[folder][0].split()), file.unlink, f"{folder}/{name}: missing")
            yield Input(
                tuple(READ_BY[folder][0].split()), lambda f=file: (f.unlink(), f.mkdir(), None)[2], f"{name}: folder"
            )


def data_inputs(world: Path) -> Iterator[Input]:
    """Data that cannot be read, for every command that reads any."""
    text = (world / "book.txt").read_bytes()
    packed = {"gz": gzip.compress(text * 50), "xz": lzma.compress(text * 50)}
    contents: dict[str, bytes] = {
        "empty.txt": b"",
        "binary.txt": b"\0\1\2" * 50,
        "latin.txt": "é".encode("latin-1") * 500,
        "late.txt": b"a" * 100_000 + b"\xff" * 10,
        "rows.jsonl": b'{"text": "fine"}\n{"text": 3}\n',
        "broken.jsonl": b'{"text": "fine"}\n{"text": \n',
        "numbers.jsonl": b"3\n4\n",
        "nested.jsonl": NESTED.encode() + b"\n",
        "fieldless.jsonl": b'{"body": "x"}\n',
        **{f"cut.txt.{kind}": content[: len(content) // 2] for kind, content in packed.items()},
        **{f"flipped.txt.{kind}": content[:40] + b"\x55\xaa" + content[42:] for kind, content in packed.items()},
        **{f"plain.txt.{kind}": text for kind in packed},
    }
    readers = ["evaluate model --data", "spelling model --data", "train tiny --out trained --steps 1 --data"]
    for name, content in contents.items():
        for line in readers:
            yield Input((*line.split(), name), writing(world / name, content))
    for line in readers:
        yield Input((*line.split(), "pipe"), lambda: os.mkfifo(world / "pipe"))
        yield Input((*line.split(), "/dev/stdin"))
        yield Input((*line.split(), "/dev/null"))
        yield Input((*line.split(), "empty-folder"), (world / "empty-folder").mkdir)
        yield Input((*line.split(), "loop"), lambda: (world / "loop").symlink_to("loop"))
        yield Input((*line.split(), "x" * 300))
        yield Input((*line.split(), "null\0byte"))
    for name, content in {
        "s1.jsonl": b"3\n",
        "s2.jsonl": b'{"text": 3}\n',
        "s3.jsonl": NESTED.encode(),
        "s4.jsonl": b"",
        "s5.jsonl": b'{"text": "x", "ids": 3}\n',
        "s6.jsonl": b'{"made_by": []}\n',
        "s7.jsonl": b"\xff\n",
    }.items():
        yield Input(("genppl", "--samples", name), writing(world / name, content))
    for name, content in {
        "r1.json": b"{",
        "r2.json": NESTED.encode(),
        "r3.json": b'{"user": {}}',
        "r4.json": b'{"user": {"corrections": []}}',
        "r5.json": b"\xff",
        "r6.json": b'{"user": {"corrections": [3], "mistakes": []}}',
    }.items():
        words = ("export", "model", "--out", "exported", "--results", name)
        yield Input(words, writing(world / name, content), f"{content[:40]!r}")


def serve_inputs() -> Iterator[Input]:
    """Command lines with which no server may start."""
    for words in (
        "nowhere",
        "model nowhere",
        "foreign",
        "model --port 70000",
        "model --port -1",
        "model --port 0 --host 999.1.1.1",
        "model --port 0 --host [/red]",
        "model --port 0 --lookup-processes -1",
        "model --port 0 --lookup-processes 1000",
        "model --port 0 --device meta",
    ):
        yield Input(("serve", *words.split()))


# ----------------------------------------------------------------------------------------------------------------
# The test


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder, before = tmp_path_factory.mktemp("fuzz"), Path.cwd()
    os.environ["CEDD_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.chdir(folder)
    make_world(folder)
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("starlette") and importlib.util.find_spec("uvicorn"):
            patch.setattr("cedd.apps.serve.server.Server.run", fail_on_start)
        yield folder
    os.chdir(before)
    del os.environ["CEDD_CACHE"]


def fail_on_start(*_: object) -> None:
    raise AssertionError("a server has started")


def inputs(world: Path) -> list[Input]:
    found = [*usage_inputs(), *range_inputs(), *record_inputs(world), *file_inputs(world), *data_inputs(world)]
    found += [*foreign_inputs(world), *serve_inputs()]
    random.Random(0).shuffle(found)
    return found


def fault_of(given: Input, world: Path, original: Path, clean: dict[str, str], messages: set[str]) -> str | None:
    """The fault in how a command reacted to invalid input, or None."""
    given.damage()
    before, said = tree(world) if given.damage is not nothing else clean, io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = main(given.words)
    except SystemExit as error:
        code = f"SystemExit({error.code})"
    except Exception as error:  # noqa: BLE001 - this is what the test looks for
        code = f"{type(error).__name__}: {error}"[:300]
    after, lines = tree(world), said.getvalue().splitlines()
    restore(world, original, clean, after)
    if code not in (1, 2):
        return f"{code}"
    if not lines or not lines[-1].startswith("cedd: error: ") or "\x1b" in lines[-1] or "Traceback" in said.getvalue():
        return f"said {lines[-1:]!r}"
    messages.add(generic(lines[-1]))
    if before != after:
        return f"left {sorted(set(after.items()) ^ set(before.items()))[:3]}"
    return None


def survey(world: Path, tmp_path: Path, chosen: list[Input], messages: set[str]) -> dict[str, str]:
    """The faults of the commands, by input; error messages are added to the set."""
    original = tmp_path / "original"
    shutil.copytree(world, original)
    clean = tree(world)
    found = {str(given): fault_of(given, world, original, clean, messages) for given in chosen}
    return {name: wrong for name, wrong in found.items() if wrong is not None}


MESSAGES = Path(__file__).with_name("messages.txt")


OF_LIBRARIES = (
    r"it is not JSON \(",
    "version of cedd: ",
    "safetensors file: ",
    "is not JSON: ",
    "invalid arguments of [^:]*: ",
    "invalid (?:parameterization|objective|dynamics|weight|schedule) [^:]*: ",
    r"cannot be read: ",
    r"cannot listen on ",
    "UTF-8 text",
)
"""Prefixes of messages that end with the text of a library."""
OF_THE_MACHINE = re.compile("device|listen|File name too long")
"""Messages that depend on the machine."""


def generic(line: str) -> str:
    """An error message without names, values, numbers, and the texts of Python and its libraries."""
    line = line.removeprefix("cedd: error: ").replace(str(Path.cwd()), "")
    line = re.sub(rf"({'|'.join(OF_LIBRARIES)}).*", r"\1…", line)
    line = re.sub(r"(?<=: )(TrainConfig|network)[\w.]* (?=cannot be|must be|is missing|has the)", "ENTRY ", line)
    line = re.sub(r"(cannot be|unknown \w+) [^;]+", r"\1 …", line)
    line = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "'…'", line)
    line = re.sub(r"(?: \((?:got|see) [^()]*(?:\([^()]*\)[^()]*)*\))+", " (got …)", line)
    line = re.sub(
        r"(?<!\w)(?:[\w.~-]*/)+[\w.\[\]-]*|[\w-]+\.(?:json|jsonl|txt|safetensors|png|html|gif|svg|xz|gz)\b",
        "FILE",
        line,
    )
    return re.sub(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?", "N", re.sub(r"--[a-z][\w.-]*", "--OPTION", line)).strip()


@pytest.mark.parametrize("part", range(DEFAULT))
def test_invalid_input_gives_one_line_error_and_changes_no_files(part: int, world: Path, tmp_path: Path):
    every = inputs(world)
    assert len(every) * DEFAULT >= 250 * PARTS
    messages = set[str]()
    assert survey(world, tmp_path, every[part::PARTS], messages) == {}
    unknown = {line for line in messages - known_messages() if not OF_THE_MACHINE.search(line)}
    assert unknown == set(), "run python -m tests.cli.test_fuzz, and read the new messages"


@pytest.mark.slow
def test_all_invalid_input_gives_one_line_error_and_changes_no_files(world: Path, tmp_path: Path):
    every = inputs(world)
    assert len(every) >= 1000
    assert {given.words[0] for given in every} == set(COMMANDS)
    messages = set[str]()
    assert survey(world, tmp_path, every, messages) == {}
    different = {line for line in messages ^ known_messages() if not OF_THE_MACHINE.search(line)}
    assert different == set(), "run python -m tests.cli.test_fuzz, and read the new messages"


def known_messages() -> set[str]:
    return set(MESSAGES.read_text("utf-8").splitlines())


def write_messages() -> None:
    """Run all inputs and write the list of messages."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache, contextlib.chdir(folder):
        os.environ["CEDD_CACHE"] = cache
        world, messages = Path(folder) / "world", set[str]()
        world.mkdir()
        os.chdir(world)
        make_world(world)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cedd.apps.serve.server.Server.run", fail_on_start)
            survey(world, Path(folder), inputs(world), messages)
        MESSAGES.write_text("\n".join(sorted(messages)) + "\n", "utf-8")


if __name__ == "__main__":
    write_messages()
