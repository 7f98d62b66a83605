"""The paper's language tables at the scale of minutes on one GPU: equal training for every row, bounds with intervals.

    python benchmarks/language.py --cache /tmp/cedd --workers 16
    python benchmarks/language.py --only cedd-star/absorb sedds/absorb@1024 --budget 560
    python benchmarks/language.py --only cedd-star/absorb/4 cedd-star/absorb/16 --minutes 8
    python benchmarks/language.py --only --judge smollm2 SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/language.py --table benchmarks/results/language.json --page docs/results/language.md
    python benchmarks/language.py --seed 1 --orders 64 --results seed1.json --out runs/seed1 --only cedd-star/absorb
    python benchmarks/language.py --table benchmarks/results/language.json seed1.json

A cell is METHOD/PROCESS[/BLOCK][@LENGTH][+RECIPE] (language_cells.py); how cells are scheduled, resumed and recorded is
in cells.py. All are trained by the package's trainer on the same text, for the same number of steps of the same number
of tokens, with one recipe; what differs in a row stands in its record. (With complementary masks a block is in its
batch twice, so that `ar`, which has no masks, reads twice as much text.) The first cells are `ar`, which judges the
samples of the others, and the paper's order on absorb.

cedd-star/absorb/16 is block diffusion with b = 16. Cells in blocks also have the exact likelihood for b <= 8, samples
of one network call per token, and the speed and memory of sampling. To train and judge all of them (repeat the command
until they are done):

    python benchmarks/language.py --minutes 8 --judge smollm2 SmolLM2-135M-Instruct.Q4_1.gguf --only \\
        cedd-star/absorb/{4,16,1,128} bayes-star/roulette/16 cedd-star/absorb/16@1024
    python benchmarks/result_tables.py   # writes the rows that there are into docs/results/blocks.md

In the end a cell is measured once: the bounds `tight`, `j1` and `j2` on five test sets and on the held-out documents of
each file of the corpus, and samples at several numbers of steps. The bound of every block and the sampled tokens are
kept in RESULTS/CELL.npz (RESULTS without its .json), so that rows can be compared block by block, and samples judged,
later and elsewhere. A judge that is missing leaves its column empty; the same command fills it when the judge is there.

The results file has a protocol: corpus, tokenizer, test sets, recipe, steps, how much is measured. A file with another
one is refused. Rows may come from any number of machines on any number of days; paths of a machine are no part of them,
the version and the commit of the code are (of older rows the version only). A judgement by `ar` has the hash of its
weights: another `ar` is another judge.

How a row was sized. 5000 steps of 32,768 tokens, 164 million, take `small` 262 s on an H200 with cedd-star on absorb,
300 s where every position counts (roulette, uniform), and 291 s with ar. At 1024 tokens training takes 338 to 355 s.
Bounds on up to 4096 blocks of each of 7 texts, 4 draws, took 14 to 28 s in the latest eight rows (ar exactly: 4 s),
and samples 5 to 33 s (ar at 1024 tokens: 62 s); in the rows before, of earlier kernels or beside another's
training, up to 276 and 132 s. Starting and compiling takes about 40 s, and overlaps with the cell before.

On a machine that is lent for minutes (one GPU, nothing installed, few megabytes a visit):

1. The corpus travels in parts: `split -b 28M wikipedia.txt.xz wikipedia.part.`, and there, part by part in as many
   visits as it takes, `cat wikipedia.part.* >> /tmp/data/corpus/wikipedia.txt.xz`; likewise books. eval/ and gpt2-bpe/
   go beside corpus/. Tokens are made once, in --cache.
2. `PYTHONPATH=src:LIBRARIES python benchmarks/language.py --data /tmp/data --cache /tmp/cedd --out /tmp/runs
   --workers 16 --budget SECONDS`, with the results file and its folder where they come back from. A cell that would not
   be done within --budget is not begun; while one is trained, the next is compiled.
3. Bring back the results file and its folder, and commit both. Models stay there: `ar` must be trained in the same
   visit as it judges in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import Benchmark, Results, Turn, main, make_writable
from language_cells import USUAL, Arguments, common_settings, configuration, read_cell
from language_measure import LanguageHooks, judge_rows, judge_texts
from language_seeds import check_orders, over_seeds
from language_tables import Rows, draw, tables
from language_text import Texts

from cedd.data.training_data import TrainingData
from cedd.training.config import TrainConfig

EXPECTED_SECONDS = 420.0
"""Of a cell on an H200, before one has been timed."""
RENAMED = {"model.told": "model.time_input"}
"""Settings by their names in the protocols of earlier results."""


class Language(Benchmark):
    """The paper's language tables."""

    name = "language"
    script = Path(__file__).resolve()
    Arguments = Arguments
    arguments: Arguments

    @property
    def texts(self) -> Texts:
        return Texts(self.arguments)

    def named(self, cell: str) -> str:
        return read_cell(cell).name

    def configuration(self, cell: str) -> TrainConfig:
        return configuration(self.arguments, cell)

    def data(self, cell: str) -> TrainingData:
        config = self.configuration(cell)
        return self.texts.training(config.length, config.batch.size)

    def prepare(self, cells: Sequence[str]) -> None:
        for cell in cells:
            make_writable(self.arguments.extras(cell))
        for length in dict.fromkeys(self.configuration(cell).length for cell in cells):
            largest = max(config.batch.size for config in map(self.configuration, cells) if config.length == length)
            self.texts.training(length, largest)
            self.texts.held_out(length)
            self.texts.test_sets(length)

    def hooks(self, cell: str, turn: Turn, stop_at: float | None) -> LanguageHooks:
        return LanguageHooks(turn, stop_at, cell, self.arguments)

    @property
    def protocol(self) -> Mapping[str, Any] | None:
        if not self.arguments.only:
            return None
        names = ("size", "steps", "length", "tokens", "blocks", "draws", "sampled_tokens", "holdout")
        measured = {name: getattr(self.arguments, name) for name in names}
        steps = list(self.arguments.sampler_steps)
        return {**self.texts.protocol(), **measured, "sampler_steps": steps, "recipe": common_settings(self.arguments)}

    def as_now(self, protocol: Mapping[str, Any]) -> Mapping[str, Any]:
        added = {name: USUAL[name] for name in common_settings(self.arguments)}
        recipe = {RENAMED.get(name, name): value for name, value in protocol.get("recipe", {}).items()}
        return {**protocol, "recipe": added | recipe}

    def check_rows(self, content: Mapping[str, Any]) -> None:
        if self.arguments.orders:
            check_orders(Rows(content, self.arguments))

    def seconds(self, cell: str, content: Mapping[str, Any]) -> float:
        timed = any(record["finished"] for record in content["cells"].values())
        return super().seconds(cell, content) if timed else EXPECTED_SECONDS

    def complete(self, results: Results) -> None:
        for judge in (judge_rows, judge_texts):
            for _ in judge(self.arguments, results.content):
                results.save()

    def is_measured(self, record: Mapping[str, Any]) -> bool:
        return "final" in record

    def is_point(self, point: Mapping[str, Any]) -> bool:
        found = point["held_out"].values()
        return bool(found) and all("nats_per_token" in record for record in found)

    def is_whole(self, content: Mapping[str, Any]) -> bool:
        return bool(tables(content, self.arguments))

    def scores(self, event: Mapping[str, Any]) -> str:
        if "rows" in event:
            texts = {title: record["tight"] for title, record in event["rows"][""]["texts"].items()}
        else:
            texts = event.get("held_out", {})
        nats = {name: record["nats_per_token"] for name, record in texts.items()}
        return "  ".join(f"{name} {'infinite' if value is None else f'{value:.4f}'}" for name, value in nats.items())

    def tables(self, content: Mapping[str, Any]) -> Mapping[str, str]:
        return tables(content, self.arguments)

    def over_seeds(self, contents: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> str:
        now = [{**content, "protocol": self.as_now(content.get("protocol", {}))} for content in contents]
        files = zip(now, paths, strict=True)
        return over_seeds([Rows(content, replace(self.arguments, results=path)) for content, path in files])

    def draw(self, content: Mapping[str, Any], path: Path) -> None:
        draw(content, path)


if __name__ == "__main__":
    sys.exit(main(Language))
