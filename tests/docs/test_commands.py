"""Every command that a page shows is one that the command line takes: no flag that was renamed, no file that moved."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from cedd.cli import COMMANDS, main
from cedd.cli.arguments import parse
from docs.refresh import ROOT, blocks, commands

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/results/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PROGRAMS = ("cedd", "torchrun", "make", "python")
_SPAN = re.compile(r"(?<!`)`((?:cedd|torchrun|make|python) [^`]*)`")


def shown(text: str) -> Iterator[str]:
    """Commands of a page: after a dollar sign, alone in an indented block, or in the text between backquotes."""
    yield from (command.code.replace("\\\n", " ") for command in commands(text) if not command.is_python)
    whole = re.sub(r"\\\n\s*", "", text)  # a command may go on in the next line
    indented = (line.strip() for line in whole.splitlines() if line.startswith("    "))
    yield from (line for line in indented if line.startswith(tuple(f"{name} " for name in PROGRAMS)))
    yield from _SPAN.findall(re.sub(r"\s+", " ", text))


def calls() -> list[tuple[str, str]]:
    found = {(path.name, " ".join(line.split())) for path in PAGES for line in shown(path.read_text("utf-8"))}
    return sorted((page, line) for page, line in found if "..." not in line)


def words_of(line: str) -> list[str]:
    """The first command of a line, without what the shell does with its output."""
    words = shlex.split(line, comments=True)
    for sign in ("|", ">", "&&", ";", "2>&1"):
        words = words[: words.index(sign)] if sign in words else words
    return words


def complaint(line: str) -> str | None:
    """What is wrong with a command, if anything."""
    program, *rest = words_of(line)
    if program == "torchrun":
        assert "-m" in rest, line
        program, *rest = rest[rest.index("-m") + 1 :]
    if program == "cedd":
        return parsed(rest)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        return None if {word for word in rest if "=" not in word} <= set(targets) else f"no such target: {line}"
    if program == "python" and rest[0].endswith(".py"):
        return None if (ROOT / rest[0]).is_file() else f"no such file: {rest[0]}"
    return None


def parsed(words: list[str]) -> str | None:
    """The command line's own complaint."""
    name, *rest = words
    if name in ("--help", "--version"):
        return None
    if name not in COMMANDS:
        return f"no command {name}"
    if "--help" in rest or not rest:  # a command by its name
        return None
    try:
        parse(name, rest)
    except ValueError as error:
        return None if "english is not autoregressive" in str(error) else str(error)  # a model put in its place below
    return None


def test_every_command_on_every_page_parses():
    found = calls()
    assert len(found) > 50
    made = {out[1] for _, line in found if (out := re.search(r"--out (\S+)", line))}
    for run in made:  # a run that another command makes; to parse the command, any model will do
        found = [(page, re.sub(f"(--from|adapt) {re.escape(run)} ", r"\1 english ", line)) for page, line in found]
    wrong = {f"{page}: {line}": why for page, line in found if (why := complaint(line)) is not None}
    assert not wrong


@pytest.mark.parametrize(
    "line",
    [
        "cedd train char --out runs/first --no-such-flag 1",
        "cedd trian char --out runs/first",
        "cedd evaluate runs/first --bound tightest",
        "make quickest",
        "python benchmarks/nothing.py",
        "torchrun --nproc-per-node 8 -m cedd train small --data x --out y --stratgy fsdp",
    ],
)
def test_a_stale_command_is_found(line: str):
    assert complaint(line) is not None


def test_every_command_of_the_command_line_is_on_a_page():
    text = "\n".join(path.read_text("utf-8") for path in PAGES)
    assert not [name for name in COMMANDS if f"cedd {name}" not in text]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_example_of_help_parses(name: str, capsys: pytest.CaptureFixture[str]):
    """Each command's --help has an example, which the command takes."""
    with pytest.raises(SystemExit):
        main([name, "--help"])
    example = re.search(r"example: (cedd .*)", capsys.readouterr().out)
    assert example is not None
    assert complaint(example[1].replace("smollm2", "english")) is None


def names_used(code: str) -> set[str]:
    """The dotted names that begin with cedd, each with all that it begins with."""
    nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute))
    return {name for node in nodes if (name := ast.unparse(node)).startswith("cedd.") and "(" not in name}


def test_programs_on_pages_use_names_that_are_there():
    """What is not run is at least Python, and what it takes from cedd exists."""
    used: set[str] = set()
    for path in PAGES:
        text = path.read_text("utf-8")
        lines = text.splitlines()
        for block in blocks(text):
            if block.language == "python":
                used |= names_used("\n".join(lines[block.start : block.stop]))
    assert {"cedd.load", "cedd.sample", "cedd.estimate_bound"} <= used
    for name in used:
        found = importlib.import_module("cedd")
        for part in name.split(".")[1:]:
            assert hasattr(found, part), name
            found = getattr(found, part)


def test_pages_have_no_machine_of_their_own():
    for path in PAGES:
        assert not re.search(r"(?<![\w.])/(work|home|root|tmp)/", path.read_text("utf-8")), Path(path).name


def test_lines_of_prose_can_be_read_in_a_terminal():
    """What cannot be broken may be longer: tables, code, comments, pictures, lists of links."""
    for path in (ROOT / "CHANGELOG.md", *PAGES):
        prose = re.sub(r"^( *)```.*?^\1```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for line in prose.splitlines():
            unbroken = line.startswith(("    ", "|", "<!--", "![")) or " · [" in line
            assert len(line) <= 140 or unbroken, f"{path.name}: {line}"


def test_links_between_files_lead_somewhere():
    """Those of the site's own pages are checked when it is built."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text("utf-8")):
            assert target.startswith("https://") or (ROOT / target).exists(), f"{path.name}: {target}"


def test_files_that_pages_name_are_there():
    """As a path in the repository, or within src/cedd."""
    roots = (ROOT, ROOT / "src" / "cedd")
    for path in PAGES:
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text("utf-8")):
            assert any((root / name).is_file() for root in roots), f"{path.name}: {name}"


def test_a_name_that_is_gone_is_noticed():
    assert names_used("cedd.nothing(cedd.samplers.RULES['euler'])") == {
        "cedd.nothing",
        "cedd.samplers",
        "cedd.samplers.RULES",
    }
