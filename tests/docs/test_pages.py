"""Commands and programs on the pages run, in one folder and in order, and print the shown output except for figures.
Training is shortened by the options that a page gives in `<!-- tested with: ... -->`."""

import contextlib
import io
import json
import math
import re
import runpy
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import cedd
from cedd.cli import main
from cedd.cli.inputs import DEFAULT_MODEL
from cedd.data.tokenizers import TOKENIZER_KINDS
from cedd.dynamics import DYNAMICS
from cedd.models.locate import CONFIG_FILE, WEIGHTS_FILE, packaged
from cedd.objectives import WEIGHTS
from cedd.process import PROCESSES
from cedd.storage import file_sha256
from docs.refresh import (
    ENVIRONMENT,
    PAGES,
    PAGES_WITH_CODE,
    ROOT,
    Command,
    commands,
    is_there_if_needed,
    prepare,
    tidied,
    with_code,
)

README = ROOT / "README.md"
METHODS_PAGE = ROOT / "docs" / "reference" / "methods.md"
_NUMBER = re.compile(r"\b[0-9a-f]{12}\b|[-+±]?\d[\d,]*\.?\d*(e[-+]?\d+)?%?")


def skeleton(output: str) -> set[str]:
    """The lines of an output without their figures and hashes, and without what depends on how long those are."""
    lines = (_NUMBER.sub("#", line) for line in tidied(output))
    return {" ".join(re.sub(r"[─━┏┓┳┡┩╇└┘┴]+", " ", line).split()) for line in lines} - {"", "..."}


def figures(output: str) -> list[float]:
    """The numbers of an output, in order."""
    found = (match[0].strip("±%").replace(",", "") for match in _NUMBER.finditer("\n".join(tidied(output))))
    return [float(number) for number in found]


def execute(command: Command) -> str:
    """Run a command, within this process if possible, and return its output on both streams."""
    printed = io.StringIO()
    words = [] if command.is_python else shlex.split(command.code.replace("\\\n", " "), comments=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if command.is_python:
            exec(compile(command.code, "<page>", "exec"), {"__name__": "__page__"})
        elif {"|", ">"} & set(words) or words[0] not in ("cedd", "python"):
            environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
            done = subprocess.run(
                ["bash", "-euc", command.code], env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            printed.write(done.stdout)
        else:
            words += shlex.split(command.notes.get("tested with", ""))
            run = run_program if words[0] == "python" else main
            assert run(words[1:]) == 0, printed.getvalue()
    return printed.getvalue()


def run_program(words: list[str]) -> int:
    """Run a Python program with its arguments in this process, and return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        for name in ("add_dynamics", "add_method", "add_tokenizer", "my_samplers", "toy"):  # as in a new process
            patch.delitem(sys.modules, name, raising=False)
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def complaint(command: Command, printed: str) -> str | None:
    """How an output differs from the one on the page."""
    if "varies" in command.notes:
        return None if bool(command.output.strip()) == bool(printed.strip()) else "one prints and the other does not"
    if skeleton(command.output) != skeleton(printed):
        return f"the page says {sorted(skeleton(command.output))}, and it prints {sorted(skeleton(printed))}"
    if "within" in command.notes:
        share = float(command.notes["within"].rstrip("%")) / 100
        pairs = zip(figures(command.output), figures(printed), strict=True)
        far = [(said, found) for said, found in pairs if abs(said - found) > share * max(abs(said), abs(found)) + 0.02]
        return f"the page says one thing, and it prints another: {far}" if far else None
    return None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder; table entries that examples add are removed after the test."""
    for table in (PROCESSES, cedd.METHODS, DYNAMICS, WEIGHTS, TOKENIZER_KINDS):
        for name in ("shuffle-first", "bayes-late", "sedds-early", "stops-early", "towards-data", "words"):
            monkeypatch.setitem(table, name, None)  # so that entries of the examples are removed afterwards
            del table[name]
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    for name, value in {**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page == "README.md" else pytest.mark.slow) for page in PAGES]
)
def test_commands_on_page_give_shown_output(page: str, folder: Path):
    wrong, ran = {}, 0
    for command in commands((ROOT / page).read_text("utf-8")):
        if {"not run", "not tested"} & set(command.notes) or not is_there_if_needed(command):
            continue
        why = complaint(command, execute(command))
        ran += 1
        if why is not None:
            wrong[command.code] = why
    assert ran >= 3
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add_process", "add_dynamics"])
def test_examples_without_page_run(name: str, folder: Path):
    """Its bound is at least the entropy of the data."""
    printed = execute(Command(f"python {folder}/docs/examples/{name}.py", False, "", slice(0), {}))
    (bound, entropy), *_ = re.findall(r"(\d\.\d+) ± .*entropy (\d\.\d+)", printed)
    assert float(bound) > float(entropy)


def test_stale_output_is_detected():
    page = "```console\n$ cedd --version\ncedd 0.1.0 from afar\n```\n"
    (command,) = commands(page)
    assert complaint(command, execute(command)) is not None
    (command,) = commands(page.replace(" from afar", ""))
    assert complaint(command, execute(command)) is None
    (command,) = commands("<!-- within: 10% -->\n```console\n$ python x.py\nloss 2.5\n```")
    assert complaint(command, "loss 2.6\n") is None
    assert complaint(command, "loss 2.9\n") is not None


@pytest.mark.parametrize("page", PAGES_WITH_CODE)
def test_code_on_page_matches_examples(page: str):
    """If it does not, run `python docs/refresh.py --code`."""
    text = (ROOT / page).read_text("utf-8")
    assert text == with_code(text)


def test_changed_example_is_detected():
    page = "<!-- code: examples/my_cedd.py register -->\n```python\nimport os\n```\n"
    assert "PROCESSES[" in with_code(page)
    assert "import os\n" not in with_code(page)


def test_commands_that_are_not_run_give_reason():
    for page in PAGES:
        for command in commands((ROOT / page).read_text("utf-8")):
            reason = command.notes.get("not run") or command.notes.get("not tested")
            assert reason is None or len(reason.split()) >= 2


# ----------------------------------------------------------------------------------------------------------------
# Tables


def rows(page: Path, heading: str) -> list[dict[str, str]]:
    """The rows of the first table of a page that has this column."""
    lines = page.read_text("utf-8").splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("|") and f" {heading} " in f"{line} ")

    def cells(line: str) -> list[str]:
        return [cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line.strip("|"))]

    names, found = cells(lines[first]), []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            return found
        found.append(dict(zip(names, cells(line), strict=True)))
    return found


MAKERS = {
    "absorb": lambda: cedd.absorb(5),
    "uniform": lambda: cedd.uniform(5),
    "roulette": lambda: cedd.roulette(5),
    "eroulette": lambda: cedd.eroulette(5, mask_share=0.5),
    "hybrid": lambda: cedd.hybrid(5),
}


def is_allowed(method: str, process: str) -> bool:
    try:
        cedd.METHODS[method].check(MAKERS[process]())
    except ValueError:
        return False
    return True


def test_table_of_methods_matches_code():
    table = {row["method"]: row for row in rows(METHODS_PAGE, "method")}
    assert {*table, "ar"} == set(cedd.METHODS)
    for method, row in table.items():
        found = {process for process in MAKERS if is_allowed(method, process)}
        assert found == ({"absorb"} if "only on" in row["output of the network; loss"] else {*MAKERS})


def test_table_of_processes_matches_code():
    assert [row["process"] for row in rows(METHODS_PAGE, "process")] == list(PROCESSES) == list(MAKERS)
    for row in rows(METHODS_PAGE, "process"):
        process = MAKERS[row["process"]]()
        assert row["replaces tokens"] == ("✓" if process.can_shuffle else "–")


def test_readme_results_match_linked_pages():
    table = rows(README, "what")
    assert 1 <= len(table) <= 8
    for row in table:
        (link,) = re.findall(r"\]\(([^)]+)\)", row["what"])
        page = (ROOT / link).read_text("utf-8")
        for figure in re.findall(r"\d[\d.]*\d", row["cedd"] + " " + row["compared with"]):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", page), (row["what"], figure)


def test_readme_is_short():
    assert len(README.read_bytes()) <= 9 * 1024


def test_figures_on_card_of_english_match_results():
    """Infilled words as in docs/results/samplers.md; samples and corrected words as in benchmarks/results."""
    folder = packaged(DEFAULT_MODEL)
    results = json.loads((folder / CONFIG_FILE).read_text("utf-8"))["results"]
    (infilled,) = (found for name, found in results.items() if "benchmarks/infilling.py" in name)
    page = (ROOT / "docs" / "results" / "samplers.md").read_text("utf-8")
    for book, ways in infilled.items():
        title = book.replace("_", " ").title().replace(" And ", " and ")
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {title} |"))
        _, _, paragraph, _, passage, _ = line.split("|")
        for shown, way in ((paragraph, "paragraph"), (passage, "passage")):
            share, low, high = (100 * ways[way][name] for name in ("share", "low", "high"))
            assert figures(shown) == [pytest.approx(value, abs=0.051) for value in (share, low, high)], (book, way)

    kept = ROOT / "benchmarks" / "results"
    (corrected,) = (found for name, found in results.items() if "benchmarks/correctors.py" in name)
    groups = json.loads((kept / "correctors-1003.json").read_text())["tools"]["cedd correct"]["groups"]
    for name, found in (
        ("people's mistakes fixed", groups["real"]["fixed"]),
        ("people's mistakes altered", groups["real"]["altered"]),
        ("clean words broken", groups["clean"]["broken"]),
    ):
        assert corrected[name] == {part: found[part] for part in ("share", "low", "high", "total")}, name

    (written,) = (found for name, found in results.items() if name.startswith("generative_perplexity"))
    drawn = json.loads((kept / "frontier-english" / "frontier.json").read_text())
    assert drawn["runs"]["english"]["weights"] == file_sha256(folder / WEIGHTS_FILE)
    for name, found in written.items():
        chosen = name.replace("top_p ", "english.analytic.64.t1.p") if "top_p" in name else "real-text"
        cell = drawn["cells"][chosen]
        (judged,) = cell["judged"].values()
        each = [math.exp(nats / many) for nats, many in zip(judged["nats"], judged["tokens"], strict=True)]
        assert figures(found["perplexity"])[0] == pytest.approx(statistics.mean(each), abs=0.51)
        assert found["token_entropy"] == pytest.approx(statistics.mean(cell["entropies"]), abs=0.00051)
        assert found["texts"] == len(each)


def test_figures_of_constraints_match_result_files():
    page = " ".join((ROOT / "docs/guides/control.md").read_text("utf-8").split())
    for name, device in (("constraints", "a CPU core"), ("constraints-gpu", "an NVIDIA H200")):
        found = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text("utf-8"))
        cost, (low, high) = (found["cost"][part] for part in ("cost", "interval"))
        assert f"{cost - 1:.0%} slower [{100 * low - 100:.0f}, {100 * high - 100:.0f}] on {device}" in page
        rows = found["validity"]["languages"]
        assert all(row["valid"] == row["samples"] for row in rows)
    assert (
        f"for each of {len(rows)} expressions and schemas, {rows[0]['samples']:,} of {rows[0]['samples']:,} samples"
        in page
    )
