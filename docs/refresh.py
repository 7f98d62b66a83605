"""Run the commands that the pages show, and write their output below them.

    python docs/refresh.py                             # every page; it trains, so it takes some minutes
    python docs/refresh.py README.md --only correct    # only the commands that contain this text
    python docs/refresh.py --work DIR                  # in this folder, whose runs are kept
    python docs/refresh.py --code                      # only copy the code of docs/examples into the pages: at once

A `console` block contains commands, each after a dollar sign, followed by its output. The output of a `python` block is
in the `text` block right after it. The commands of all pages run in one folder, in order. Comments right before a block
change how it is treated:

    <!-- not run: REASON -->          only checked against the command line
    <!-- not tested: REASON -->       run here; the tests only check it against the command line
    <!-- tested with: OPTIONS -->     the tests add these to the block's `cedd` commands, to be done in seconds
    <!-- varies: REASON -->           the tests only check that something is printed
    <!-- within: 10% -->              the tests check that every figure is about the same
    <!-- shown: TEXT -->              the page shows only the lines of the output that contain this text
    <!-- needs: MODEL -->             left as it is, and not tested, where cedd cannot load this model
    <!-- picture: FILE -->            the block writes FILE, which is copied to docs/images
    <!-- code: FILE REGION -->        the block is a copy of this region of the file (of all of it, without REGION),
                                      which lies between the lines "# region REGION" and "# endregion"
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/start/tutorial.md", "docs/guides/extend.md")
"""The pages whose commands are run."""
PAGES_WITH_CODE = (*PAGES, "docs/guides/deploy.md")
"""The pages that show files of the folder docs."""
NOTES = ("not run", "not tested", "tested with", "varies", "within", "shown", "needs", "picture", "code")
HEAD, TAIL = 8, 14  # lines kept of a long output
ENVIRONMENT = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}

_FENCE = re.compile(r"^```\s*(\w*)(?:\{.*\})?\s*$")
_NOTE = re.compile(rf"^<!-- ({'|'.join(NOTES)}): (.+) -->$")


@dataclass(frozen=True)
class Command:
    """A shell command or a Python program of a page, and the lines of the page that hold its output."""

    code: str
    is_python: bool
    output: str
    lines: slice
    notes: Mapping[str, str]


@dataclass(frozen=True)
class Block:
    """The inside of a fence."""

    language: str
    start: int
    stop: int
    notes: Mapping[str, str]


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, with the notes right before them."""
    notes: dict[str, str] = {}
    start, language = None, ""
    for number, line in enumerate(page.splitlines()):
        fence, note = _FENCE.match(line), _NOTE.match(line)
        if start is not None:
            if line.startswith("```"):
                yield Block(language, start, number, notes)
                start, notes = None, {}
        elif fence:
            start, language = number + 1, fence[1]
        elif note:
            notes[note[1]] = note[2]
        elif line.strip():
            notes = {}


def commands(page: str) -> list[Command]:
    """What a page runs, in order."""
    found: list[Command] = []
    lines, all_blocks = page.splitlines(), list(blocks(page))
    for block, following in pairwise([*all_blocks, None]):
        if block is None:  # only the last of a pair can be, and only the type does not say so
            continue
        if block.language == "console":
            found += _console(lines, block)
        elif block.language == "python" and following is not None and following.language == "text":
            code, output = lines[block.start : block.stop], slice(following.start, following.stop)
            found.append(Command("\n".join(code), True, "\n".join(lines[output]), output, block.notes))
    return found


def _console(lines: Sequence[str], block: Block) -> Iterator[Command]:
    number = block.start
    while number < block.stop:
        if not lines[number].startswith("$ "):
            raise ValueError(f"line {number + 1}: a console block begins with a command after a dollar sign")
        code = lines[number][2:]
        while lines[number].endswith("\\"):
            number += 1
            code += "\n" + lines[number]
        start = number = number + 1
        while number < block.stop and not lines[number].startswith("$ "):
            number += 1
        yield Command(code, False, "\n".join(lines[start:number]), slice(start, number), block.notes)


def example(place: str) -> list[str]:
    """The lines of an example that a page shows: of a file in docs/, or of one of its regions."""
    name, _, region = place.partition(" ")
    lines = (ROOT / "docs" / name).read_text("utf-8").splitlines()
    if region:
        start = lines.index(f"# region {region}") + 1
        lines = lines[start : lines.index("# endregion", start)]
    return "\n".join(lines).strip("\n").splitlines()


def with_code(page: str) -> str:
    """The page with the examples' code as it is now."""
    lines = page.splitlines()
    for block in reversed(list(blocks(page))):
        if "code" in block.notes:
            lines[block.start : block.stop] = example(block.notes["code"])
    return "\n".join(lines) + "\n"


def tidied(output: str) -> list[str]:
    """The lines of an output for a page: nothing at the ends of lines, and the middle of a long one left out."""
    lines = [line.rstrip() for line in output.replace("\r", "\n").strip("\n").splitlines()]
    if len(lines) <= HEAD + TAIL:
        return lines
    return [*lines[:HEAD], "...", *lines[-TAIL:]]


@cache
def is_there(model: str) -> bool:
    """Whether cedd can load a model of this name without a network."""
    import cedd

    try:
        cedd.load(model, device="cpu")
    except (ValueError, OSError):
        return False
    return True


def prepare(folder: Path) -> None:
    """The files of the repository that commands name."""
    for name in ("docs", "benchmarks"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)


def run(command: Command, folder: Path) -> tuple[int, str]:
    """Exit code and what a terminal would show."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    words = [sys.executable, "-c", command.code] if command.is_python else ["bash", "-euc", command.code]
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def refresh(path: Path, folder: Path, only: str) -> list[str]:
    """Run the commands of a page and rewrite it; the commands that failed, whose output stays as it was."""
    page = with_code(path.read_text("utf-8"))
    lines, failed = page.splitlines(), []
    new: list[tuple[slice, list[str]]] = []
    for command in commands(page):
        if only not in command.code or "not run" in command.notes or not is_there_if_needed(command):
            continue
        print(f"{path.name}: {command.code.splitlines()[0]}", flush=True)
        code, output = run(command, folder)
        if code:
            failed.append(command.code)
            print(output, file=sys.stderr)
            continue
        shown = (line for line in output.replace("\r", "\n").splitlines() if command.notes.get("shown", "") in line)
        new.append((command.lines, tidied("\n".join(shown))))
        if "picture" in command.notes and (folder / command.notes["picture"]).exists():
            shutil.copy(folder / command.notes["picture"], ROOT / "docs" / "images")
    for place, output in reversed(new):
        lines[place] = output
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return failed


def is_there_if_needed(command: Command) -> bool:
    """Whether a command has the model that it needs."""
    return "needs" not in command.notes or is_there(command.notes["needs"])


def main() -> int:
    """Refresh the pages named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--only", default="")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--code", action="store_true")
    arguments = parser.parse_args()
    if arguments.code:
        for page in arguments.pages or PAGES_WITH_CODE:
            (ROOT / page).write_text(with_code((ROOT / page).read_text("utf-8")), "utf-8")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
        failed = [line for page in arguments.pages or PAGES for line in refresh(ROOT / page, folder, arguments.only)]
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
