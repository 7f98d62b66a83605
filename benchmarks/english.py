"""Train the packaged model `english` on books and Wikipedia.

    python benchmarks/english.py --corpus corpus --prepare --workers 8
    python benchmarks/english.py --corpus corpus --seconds 470 --export english
    python benchmarks/english.py --corpus corpus --seconds 1100 --from english --block 8 --export writer

The corpus is a folder with `books.txt.xz` and `wikipedia.txt.xz`, or other texts. --prepare trains a byte-level BPE on
every eighth part of it, packs the text into tokens and ends; it needs no GPU. Then the network is trained for
--seconds: after the warm-up, the number of steps is chosen by the measured speed. The settings are those of the preset
`small-fast`, changed by `recipe`. The same command resumes a run. With --from, training starts from the network and
tokenizer of a model.

--export writes the model as it is packaged, by `cedd export`: weights deflated, with the text of the model card below.
At the end the bounds on held-out documents are printed, for the trained and for the exported weights.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from command_line import command
from language_text import ENDINGS, Documents, stem
from rich.console import Console

from cedd.cli import main as cedd
from cedd.data.corpora import Piece
from cedd.data.evaluation_sets import evaluation_data
from cedd.data.folders import data_folder
from cedd.data.packing import PackedDataset, pack, select_documents
from cedd.data.tokenizers import HEADER_FILE, BPETokenizer, Tokenizer, load_tokenizer
from cedd.data.training_data import TrainingData
from cedd.evaluation.options import EvaluationOptions
from cedd.evaluation.perplexity import compare, measure
from cedd.models.folder import load_folder
from cedd.models.locate import locate
from cedd.storage import json_sha256, write_json
from cedd.training.config import PRESETS, DataConfig, TrainConfig, starting_from
from cedd.training.distributed import joined_ranks
from cedd.training.loop import Trainer, switch_threads_often
from cedd.training.time_limit import ResumedTimeLimit, TimeLimit, begun

WRAPPED = ("books",)
"""Files whose paragraphs are broken into lines; their lines are joined, so that samples have none."""
LINE_END = re.compile(r"(?<!\n)\n(?!\n)")
ABOUT = """\
447 English books from Project Gutenberg, in the public domain, and a collection of English Wikipedia articles, under
CC BY-SA, which share no 13 words in a row with the usual evaluation sets; one document in 200 is held out. War and
Peace, Pride and Prejudice and Crime and Punishment are in neither. The licence named above, Apache 2.0, is that of the
weights. One NVIDIA H200, {minutes:.0f} minutes."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """example: python benchmarks/english.py --corpus corpus --seconds 470 --export english

    Train the model in the box that writes English.
    """

    corpus: Path | None = None
    """Folder of the texts; by default CEDD_DATA/corpus."""
    prepare: bool = False
    """Only make the tokenizer and the blocks of tokens."""
    seconds: float = 470.0
    """Training time in seconds, after the first steps."""
    out: Path = Path("runs/english")
    """The run's folder."""
    export: Path | None = None
    """Folder to write the model to, as it is shipped."""
    results: Path | None = None
    """Write the bounds here too."""
    tokens: int = 8192
    """Vocabulary size."""
    thinning: int = 8
    """The tokenizer is trained on every n-th piece of text, n being this number."""
    holdout: float = 0.005
    """Share of each file that is held out."""
    blocks: int = 1024
    """Held-out sequences per file for the bound."""
    length: int = 128
    """Tokens per sequence."""
    start: str | None = field(default=None, metadata={"option": "from", "metavar": "MODEL"})
    """Start from the weights of this model; give --prepare the same. Its network, length and tokenizer are used."""
    block: int | None = None
    """Tokens per block, in block diffusion. None: no blocks."""
    width: int = 512
    """Width of the network."""
    depth: int = 7
    """Number of blocks of the network."""
    heads: int = 8
    """Number of attention heads."""
    batch: int = 512
    """Sequences per step."""
    warmup: int = 300
    """Steps in which the rate rises."""
    workers: int = 1
    """Processes that tokenize."""
    cache: Path | None = None
    """Folder for the tokens. None: CEDD_CACHE, or ~/.cache/cedd."""
    seed: int = 0
    """Random seed."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""


@dataclass(eq=False)
class Passages(Documents):
    """Documents in which a line is a paragraph."""

    def content_sha256(self) -> str:
        return json_sha256({"documents": super().content_sha256(), "joined lines": WRAPPED})

    def pieces(self) -> Iterator[Piece]:
        part = "validation" if self.held_out else "train"
        for file, source in zip(self.files, self._sources, strict=True):
            for piece in select_documents(source, part, self.holdout):
                yield Piece(LINE_END.sub(" ", piece.text), piece.ends_document) if stem(file) in WRAPPED else piece


@dataclass(frozen=True)
class Text:
    """The corpus in tokens."""

    arguments: Arguments

    @property
    def files(self) -> list[Path]:
        folder = data_folder("corpus", self.arguments.corpus)
        found = sorted(path for path in folder.glob("*") if path.name.endswith(ENDINGS))
        if not found:
            raise ValueError(f"{folder} has no text to train on ({', '.join(ENDINGS)})")
        return found

    def tokenizer(self) -> Tokenizer:
        """That of the model that training starts from, or the one next to the run, which is trained on first use."""
        arguments = self.arguments
        if arguments.start is not None:
            return load_tokenizer(locate(arguments.start))
        folder = arguments.out.with_name(arguments.out.name + "-tokenizer")
        if not (folder / HEADER_FILE).is_file():
            texts = Passages(self.files, arguments.holdout, held_out=False).texts()
            folder.mkdir(parents=True, exist_ok=True)
            BPETokenizer.train(islice(texts, 0, None, arguments.thinning), arguments.tokens).save(folder)
        return load_tokenizer(folder)

    def packed(self, files: list[Path], tokenizer: Tokenizer, *, held_out: bool) -> PackedDataset:
        arguments = self.arguments
        documents = Passages(files, arguments.holdout, held_out)
        return pack(documents, tokenizer, arguments.length, cache=arguments.cache, workers=arguments.workers)

    def training(self) -> TrainingData:
        """Blocks to learn from, and the held-out ones of all files."""
        tokenizer = self.tokenizer()
        train, held_out = (self.packed(self.files, tokenizer, held_out=part) for part in (False, True))
        return TrainingData(tokenizer, train, held_out)

    def held_out(self) -> dict[str, PackedDataset]:
        """The held-out blocks of each file."""
        tokenizer = self.tokenizer()
        return {stem(file): self.packed([file], tokenizer, held_out=True) for file in self.files}


def recipe(arguments: Arguments) -> TrainConfig:
    """`small-fast` with a smaller network and more tokens per step.

    The network has no time input, so its prediction for a blank depends on the text alone, as infilling needs it.
    Times are nearly all of [0, 1] instead of those around 1/2, because samples begin with masks only.
    """
    usual = PRESETS["small-fast"][1]
    shape: dict[str, Any] = {"width": arguments.width, "depth": arguments.depth, "heads": arguments.heads}
    config = replace(
        usual,
        data="corpus",
        out=arguments.out,
        model=replace(usual.model, **shape, time_input="none", conditioning_width=8),
        length=arguments.length,
        block=arguments.block,
        text=DataConfig(tokenizer=f"bpe:{arguments.tokens}", holdout=arguments.holdout, holdout_by="documents"),
        optimizer=replace(usual.optimizer, warmup=arguments.warmup, ema=0.996),
        batch=replace(usual.batch, size=arguments.batch, lowest_time=0.05, highest_time=0.95, cut="anew"),
        evaluation=replace(usual.evaluation, every=0),
        steps=10_000,
        checkpoint_every=1_000_000,
        log_every=100,
        seed=arguments.seed,
        device=arguments.device,
    )
    if arguments.start is None:
        return config
    return replace(starting_from(config, arguments.start, str(arguments.out)), block=arguments.block)


def train(arguments: Arguments) -> int:
    """All steps, of which a run that goes on has chosen the number; 0, or the exit code of a run that was stopped."""
    config, hooks, console = recipe(arguments), TimeLimit(arguments.seconds), Console(stderr=True)
    if (again := begun(config, unchosen=config.steps)) is not None:
        config, hooks = again, ResumedTimeLimit()
    config.check()
    switch_threads_often()
    with joined_ranks(config.device) as ranks:
        return Trainer(config, ranks, console, hooks, Text(arguments).training()).run().exit_code


def export(arguments: Arguments, words: list[str]) -> int:
    """The model as it is shipped."""
    assert arguments.export is not None
    command = shlex.join(["python", "benchmarks/english.py", "--corpus", "corpus", *public(words)])
    about = ABOUT.format(minutes=arguments.seconds / 60)
    said = ["--title", arguments.export.name, "--about", about, "--command", command]
    return cedd(
        ["export", str(arguments.out), "--out", str(arguments.export), "--weights", "deflated", "--force", *said]
    )


def public(words: list[str]) -> list[str]:
    """The settings of a command line, without what is of one machine."""
    private = ("--corpus", "--out", "--export", "--results", "--workers", "--cache", "--device")
    kept = [(name, value) for name, value in zip(words[::2], words[1::2], strict=True) if name not in private]
    return [word for pair in kept for word in pair]


def bounds(arguments: Arguments) -> dict[str, Any]:
    """Bounds on the held-out documents of each file: of the trained weights, and the loss from exporting them."""
    text, device = Text(arguments), "cuda" if torch.cuda.is_available() and arguments.device != "cpu" else "cpu"
    models = {"trained": load_folder(arguments.out, device)}
    if arguments.export is not None:
        models["exported"] = load_folder(arguments.export, device)
    found: dict[str, Any] = {}
    for part, packed in text.held_out().items():
        chosen = packed.evenly_spaced(arguments.blocks)
        counts = evaluation_data(packed, {}).text_counts(text.tokenizer(), chosen)
        protocol = {"evaluated_tokens": chosen.size} | {f"evaluated_{unit}": count for unit, count in counts.items()}
        options = EvaluationOptions(draws=2, fixed_set=True, batch=256)
        blocks = torch.from_numpy(chosen)
        measured = {name: measure(model, blocks, protocol, options) for name, model in models.items()}
        found[part] = {name: record(one) for name, one in measured.items()}
        if "exported" in measured:
            other = compare(measured["trained"].main, measured["exported"].main)
            found[part]["exported less trained"] = {"nats_per_token": other.value, "ci95": other.ci95}
    return found


def record(one: Any) -> Mapping[str, Any]:
    """A bound in nats per token with its interval, and in bits per character."""
    estimate = one.main
    return {"nats_per_token": estimate.nats_per_token, "ci95": estimate.ci95, **one.per_unit(estimate)}


def run(arguments: Arguments) -> int:
    """Prepare, train, export, measure."""
    if arguments.prepare:
        data = {"train": Text(arguments).training().train, **Text(arguments).held_out()}
        print(json.dumps({part: packed.report() for part, packed in data.items()}))
        return 0
    stopped = train(arguments)
    if stopped or (arguments.export is not None and (stopped := export(arguments, sys.argv[1:]))):
        return stopped
    found = bounds(arguments)
    print(json.dumps(found))
    if arguments.results is not None:
        write_json(arguments.results, found)
    return 0


def main() -> int:
    """Run the command line."""
    return command(__file__, Arguments, run)


if __name__ == "__main__":
    sys.exit(main())
