"""Speed, start and memory of `cedd.WordCorrector`, each measurement in a process of its own.

    python benchmarks/corrector_speed.py
    python benchmarks/corrector_speed.py --sources src ../before/src

The texts are paragraphs of ten error-free sentences of the development part, and the same paragraphs with a misspelling
of another word in every third or every 25th place (`correctors.every_nth_wrong`). Each process imports cedd, corrects a
sentence that needs the network, and then each text once, paragraph by paragraph. Figures are CPU time of the whole
process in one thread, the median of --repeat processes. With several --sources, versions of the package are measured in
turns, and what they correct differently is counted. Prints a table, and writes all figures with --out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from correctors import every_nth_wrong, test_set
from helps import parser_of

from cedd.data.folders import data_folder
from cedd.storage import write_json

TEXTS = {"without errors": 0, "an error in every 25th word": 25, "an error in every third word": 3}
"""Texts by name: every nth word is wrong."""
SENTENCES_PER_LIST, CLEAN = 300, 500
ONCE = """
import json, resource, sys, time
from pathlib import Path
def peak():
    if (status := Path("/proc/self/status")).exists():  # its ru_maxrss has that of the process that started it
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from cedd import WordCorrector
imported = time.process_time()
corrector = WordCorrector()
loaded = time.process_time()
corrector.correct("He walked form the tabel")
started = time.process_time()
result = {"import_s": imported, "load_s": loaded - imported, "first_s": started - loaded, "start_s": started}
result |= {"start_mb": peak() / 1e6, "torch": "torch" in sys.modules, "speed": {}, "changes": {}}
for name, paragraphs in json.load(open(sys.argv[1], encoding="utf-8")).items():
    begin = time.process_time()
    found = [corrector.correct(paragraph) for paragraph in paragraphs]
    seconds = time.process_time() - begin
    result["speed"][name] = sum(map(len, paragraphs)) / seconds
    result["changes"][name] = [[(*c.span, c.after) for c in one.changes] for one in found]
print(json.dumps(result | {"peak_mb": peak() / 1e6}))
"""


def measured(source: Path, texts: Path) -> dict[str, Any]:
    """The figures of one process with the package in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ONCE, str(texts)]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median of each figure, by name."""
    flat = [{**run["speed"], **{k: v for k, v in run.items() if isinstance(v, float)}} for run in runs]
    return {name: median(run[name] for run in flat) for name in flat[0]}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """The number of changes that only one of two versions makes."""
    found = 0
    for name, paragraphs in one["changes"].items():
        for ours, theirs in zip(paragraphs, other["changes"][name], strict=True):
            found += len(set(map(tuple, ours)) ^ set(map(tuple, theirs)))
    return found


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """The results as a Markdown table, with ratios to the first source."""
    first, *_ = results.values()
    lines = ["| figure | " + " | ".join(results) + " |", "|---|" + "--:|" * len(results)]
    for name, reference in first.items():
        unit, digits = ("characters per CPU second, ", 0) if name in TEXTS else ("", 2)
        ratios = ["", *(f" ({figures[name] / reference:.2f})" for figures in list(results.values())[1:])]
        cells = [f"{figures[name]:,.{digits}f}{ratio}" for figures, ratio in zip(results.values(), ratios, strict=True)]
        lines.append(f"| {unit}{name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure the sources in turns."""
    parser = parser_of(__doc__)
    parser.add_argument("--sources", type=Path, nargs="+", default=[Path("src")], help="folders with the package cedd")
    parser.add_argument("--sentences", type=int, default=200, help="sentences per text")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="processes per source")
    parser.add_argument("--out", type=Path, help="write all figures to this .json")
    arguments = parser.parse_args()
    counts = (SENTENCES_PER_LIST, CLEAN, 0)
    given = test_set(data_folder("corpus"), data_folder("misspellings"), "dev", counts, False)
    texts = {name: every_nth_wrong(given, arguments.sentences, n) for name, n in TEXTS.items()}
    runs: dict[str, list[dict[str, Any]]] = {str(source): [] for source in arguments.sources}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(texts), encoding="utf-8")
        for _ in range(arguments.repeat):
            for source in arguments.sources:
                runs[str(source)].append(measured(source, file))
    results = {source: medians(of_source) for source, of_source in runs.items()}
    print(table(results))
    first, *others = runs
    for source in others:
        count = differing(runs[first][0], runs[source][0])
        total = sum(len(one) for paragraphs in runs[first][0]["changes"].values() for one in paragraphs)
        print(f"{count} changes differ between {first}, which makes {total}, and {source}")
    if arguments.out is not None:
        write_json(arguments.out, {"sentences": arguments.sentences, "repeat": arguments.repeat, "sources": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
