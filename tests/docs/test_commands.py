"""Every command on a page is valid: no renamed options, no moved files."""

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
    whole = re.sub(r"\\\n\s*", "", text)  # a command may continue on the next line
    indented = (line.strip() for line in whole.splitlines() if line.startswith("    "))
    yield from (line for line in indented if line.startswith(tuple(f"{name} " for name in PROGRAMS)))
    yield from _SPAN.findall(re.sub(r"\s+", " ", text))


def calls() -> list[tuple[str, str]]:
    found = {(path.name, " ".join(line.split())) for path in PAGES for line in shown(path.read_text("utf-8"))}
    return sorted((page, line) for page, line in found if "..." not in line)


def words_of(line: str) -> list[str]:
    """The first command of a line, without pipes and redirections."""
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
    """The error message of the command line, if any."""
    name, *rest = words
    if name in ("--help", "--version"):
        return None
    if name not in COMMANDS:
        return f"no command {name}"
    if "--help" in rest or not rest:  # a command name alone
        return None
    try:
        parse(name, rest)
    except ValueError as error:
        return None if "english is not autoregressive" in str(error) else str(error)  # from the substitute model below
    return None


def test_commands_on_pages_parse():
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
def test_stale_command_is_detected(line: str):
    assert complaint(line) is not None


def test_every_command_is_documented():
    text = "\n".join(path.read_text("utf-8") for path in PAGES)
    assert not [name for name in COMMANDS if f"cedd {name}" not in text]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_example_in_help_parses(name: str, capsys: pytest.CaptureFixture[str]):
    """Each command's --help has an example that the command accepts."""
    with pytest.raises(SystemExit):
        main([name, "--help"])
    example = re.search(r"example: (cedd .*)", capsys.readouterr().out)
    assert example is not None
    assert complaint(example[1].replace("smollm2", "english")) is None


def names_used(code: str) -> set[str]:
    """The dotted names that begin with cedd, each with its prefixes."""
    nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute))
    return {name for node in nodes if (name := ast.unparse(node)).startswith("cedd.") and "(" not in name}


def test_programs_on_pages_use_existing_names():
    """Programs that are not run are at least valid Python, and the names they use from cedd exist."""
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


def test_pages_have_no_absolute_local_paths():
    for path in PAGES:
        assert not re.search(r"(?<![\w.])/(work|home|root|tmp)/", path.read_text("utf-8")), Path(path).name


def test_lines_of_prose_are_at_most_140_characters():
    """Lines that cannot be wrapped may be longer: tables, code, comments, images, lists of links."""
    for path in (ROOT / "CHANGELOG.md", *PAGES):
        prose = re.sub(r"^( *)```.*?^\1```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for line in prose.splitlines():
            unbroken = line.startswith(("    ", "|", "<!--", "![")) or " · [" in line
            assert len(line) <= 140 or unbroken, f"{path.name}: {line}"


def test_links_between_files_have_targets():
    """Links between pages of the site are checked when it is built."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text("utf-8")):
            assert target.startswith("https://") or (ROOT / target).exists(), f"{path.name}: {target}"


def test_files_named_on_pages_exist():
    """As a path in the repository, or within src/cedd."""
    roots = (ROOT, ROOT / "src" / "cedd")
    for path in PAGES:
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text("utf-8")):
            assert any((root / name).is_file() for root in roots), f"{path.name}: {name}"


def test_names_used_finds_dotted_names():
    assert names_used("cedd.nothing(cedd.samplers.RULES['euler'])") == {
        "cedd.nothing",
        "cedd.samplers",
        "cedd.samplers.RULES",
    }
