"""The arguments of the commands: one dataclass per command, whose docstring and fields are its --help.

This module imports neither torch nor NumPy, and no module that does, so that help and errors in a command line appear
at once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cedd.apps.report.records import ReportOptions
from cedd.apps.serve.limits import Limits
from cedd.cli import parser
from cedd.cli.parser import INLINE, argument
from cedd.evaluation.options import EvaluationOptions, Wrap
from cedd.names import suggestion
from cedd.samplers.options import SamplingOptions
from cedd.spelling.protocols import PaperOptions, UserOptions
from cedd.storage import read_json
from cedd.training.config import (
    PRESETS,
    TRANSFORMER,
    ProcessConfig,
    TrainConfig,
    flat,
    starting_from,
    unused_settings,
    with_alias,
)

PAGE_SUFFIXES = (".html", ".htm")
PLOT_SUFFIXES = (".png", ".pdf", ".svg")

# ----------------------------------------------------------------------------------------------------------------
# What several commands take


@dataclass(frozen=True, kw_only=True)
class CommonArguments:
    """Options of every command that runs a model."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True)
class ModelArguments(CommonArguments):
    """Options of every command that loads a model."""

    architecture: str | None = None
    """package:Class of your own network, for models that were trained with it."""


@dataclass(frozen=True)
class ViewOptions:
    """How to show the denoising of the first text."""

    watch: bool = False
    """Show the denoising of the first text in the terminal."""
    html: Path | None = None
    """Write the denoising of the first text as an HTML page."""
    gif: Path | None = None
    """Write the denoising of the first text as an animated GIF."""


@dataclass(frozen=True)
class ConstraintOptions:
    """What the texts that a model writes must be; at most one of these."""

    regex: str | None = None
    """Only texts that this regular expression matches from beginning to end, such as '\\d{4}-\\d\\d'."""
    json_schema: Path | None = None
    """Only JSON that is valid under the schema in this file."""
    choices: tuple[str, ...] = ()
    """Only one of these texts."""


@dataclass(frozen=True, kw_only=True)
class SamplingArguments(ModelArguments):
    """Options of the commands that print samples."""

    n: int = 1
    """Number of texts."""
    constraint: ConstraintOptions = field(default_factory=ConstraintOptions, metadata=INLINE)
    options: SamplingOptions = field(default_factory=SamplingOptions, metadata=INLINE)
    view: ViewOptions = field(default_factory=ViewOptions, metadata=INLINE)
    seed: int | None = None
    """Random seed. Text i depends on the seed and on i alone, not on how many texts are drawn."""


# ----------------------------------------------------------------------------------------------------------------
# The commands


@dataclass(frozen=True)
class Quickstart(CommonArguments):
    """example: cedd quickstart

    Train a small model on Python's own manual, bound its bits per character next to simple baselines, generate and
    infill text (and correct spelling, on a GPU), and write the results to OUT/report.html. The number of training steps
    follows from the speed of this machine and --minutes; --fast is a 30-second version. The same command continues an
    interrupted run.
    """

    fast: bool = False
    """A tiny network and a few steps, to check the installation."""
    out: Path | None = None
    """Folder of the run: runs/quickstart, or runs/quickstart-fast with --fast."""
    minutes: float | None = None
    """Time limit for everything, 4 by default. A GPU finishes sooner, after 1500 steps."""
    steps: int | None = None
    """Training steps, instead of --minutes; 60 with --fast."""
    seed: int = 0
    """Random seed."""


@dataclass(frozen=True)
class Train:
    """A training run: its configuration, and whether to print the result as JSON."""

    config: TrainConfig = field(metadata=INLINE)
    json: bool = False
    """Print the result as one JSON object."""


@dataclass(frozen=True)
class Adapt(Train):
    """The same, started from an autoregressive model."""


@dataclass(frozen=True)
class Evaluate(ModelArguments):
    """example: cedd evaluate runs/quickstart --data runs/quickstart/held-out.txt

    Bound the perplexity of a model on text, with a 95% interval (the example: after cedd quickstart).
    Until the interval is narrow enough:           cedd evaluate runs/first --data wikitext2 --tolerance 0.5%
    A tighter bound, from 64 orders per sequence:  cedd evaluate runs/first --bound importance --max-sequences 64
    Several in one table, with differences:        cedd evaluate runs/first runs/second --data book.txt
    """

    models: tuple[Path, ...] = field(metadata=argument("MODEL..."))
    """Runs' folders, or models by name. Each is compared with the first; tokenizers may differ."""
    data: str = "python-manual"
    """A text file, folder or .jsonl; wikitext2, wikitext103, ptb, lambada, lm1b; hf:NAME; or python-manual."""
    options: EvaluationOptions = field(default_factory=EvaluationOptions, metadata=INLINE)
    tolerance: str | None = None
    """Add draws (or orders) until the 95% interval of the perplexity is this narrow on either side: 0.5% or 0.005."""
    per_sequence: Path | None = None
    """Write one value per sequence to this .npy or .jsonl file."""
    tokens: Path | None = None
    """Write the cost of each token in nats, averaged over orders, to this .jsonl file; needs --bound importance."""
    plot: Path | None = None
    """Plot the running estimate with its confidence band to this .png, .pdf or .svg file."""


@dataclass(frozen=True)
class Sample(SamplingArguments):
    """example: cedd sample -n 3 --prompt "The " --watch

    Generate texts with a trained model, by default with the pretrained model english. For your own: cedd sample
    runs/first
    What follows the prompt in a given form:  cedd sample --prompt "Born in " --regex "1[89][0-9][0-9]"
    An answer by a model with a chat template:  cedd sample llada --chat "What is a prime number?"
    """

    model: str | None = field(default=None, metadata=argument("[MODEL]"))
    """A run's folder, a name on the hub, or a pretrained model (default: english)."""
    length: int | None = None
    """Tokens per text, any number; by default the model's context length. With --chat, tokens of the answer; by default
    256, or as many as fit."""
    prompt: str = ""
    """The beginning of every text."""
    chat: str | None = None
    """A message to answer, by the model's chat template. The answer ends at its end-of-text token."""
    until_end: bool = False
    """End each text before its first end-of-text token."""


@dataclass(frozen=True)
class Infill(SamplingArguments):
    """example: cedd infill "The ____{5} sat on the ____." -n 3

    Fill the blanks of a text of any length. ____ has one token per underscore (at least three underscores), ____{12}
    has 12 tokens. The text may also be in a file (cedd infill page.txt) or on standard input (-, or no TEXT). Given
    text is preserved byte for byte. Without a MODEL, the pretrained model english is used.
    """

    words: tuple[str, ...] = field(default=(), metadata=argument("[MODEL] TEXT|FILE"))
    """The text with blanks. A MODEL before it is a run's folder or a model by name."""
    file: Path | None = None
    """Read the text from this file."""


@dataclass(frozen=True)
class Correct(ModelArguments):
    """example: cedd correct "I hav a speling mistke"

    Correct the spelling of a text, or of files: cedd correct letter.txt --diff. With the model that comes with cedd,
    english, words are corrected (letters replaced, swapped, missing, extra; words joined or split); with a RUN of
    yours on a process that shuffles (uniform, roulette), letters are replaced and swapped:
    cedd correct runs/first "teh cat sat on teh mat". TEXT - reads standard input, and so does no text at all; what is
    not changed comes out byte for byte. Options that are not given are the model's own.
    """

    words: tuple[str, ...] = field(default=(), metadata=argument("[MODEL] TEXT|FILE..."))
    """What is corrected. A RUN before it is a run's folder, or a model by its name."""
    file: Path | None = None
    """Read the text from a file."""
    diff: bool = False
    """Print what would change as a unified diff."""
    in_place: bool = False
    """Write the corrected text back to the files; FILE.bak keeps what was there."""
    check: bool = False
    """Print each change as FILE:LINE:COLUMN, and exit with 1 if there is any."""
    ignore_words: Path | None = None
    """A file of words, one a line, that are right."""
    suggest: int | None = None
    """List so many candidates with their probabilities for each doubtful word, instead of the text."""
    engine: Literal["words", "letters"] | None = None
    """words: correct English words with the model's lexicon, the default if it has one. letters: replace letters by the
    model's posterior. The options below, except --threshold, are of the engine letters."""
    rate: float | None = None
    """The share of wrong letters that is expected (0.05, unless the model has its own)."""
    t: float | None = None
    """The time that the network is told (the one at which its process has this rate)."""
    threshold: float | None = None
    """A word or letter is replaced if own / (own + best) is below this: own is its probability, best that of the
    likeliest other (0.5 or more: the argmax)."""
    change: Literal["letters", "all"] | None = None
    """letters: plain letters become others of their case, except in addresses, names with digits and the like; accents,
    spaces, digits and punctuation stay. all: anything may change."""
    passes: int | None = None
    """How often the text is read at most; later passes see earlier changes."""
    reach: int | None = None
    """Of changes within so many tokens a pass makes only the strongest (3); 0 makes all at once."""
    max_surprise: float | None = None
    """Undo changes where the text around them surprises the model more than this, in nats a letter."""
    swaps: float | None = None
    """The share of neighbouring letters that is expected to be transposed (0.002); 0 looks for none. Only one step
    looks for them."""
    steps: int | None = None
    """1: the likeliest token everywhere. More: sample the reverse process, without transpositions."""
    temperature: float | None = None
    """Of several steps: 0 writes the likeliest token wherever it writes."""
    seed: int | None = None
    """Of several steps."""


@dataclass(frozen=True)
class Spelling(ModelArguments):
    """example: cedd spelling english-char --data python-manual --blocks 4 --plot fixed.png

    Measure the share of mistakes that a model fixes in a book, with 95% intervals. The paper's protocol corrupts text
    by the model's own process at t = 0.05 and takes the likeliest token at each corrupted position. The user's protocol
    replaces 5% of the letters at unknown positions (or swaps neighbours: --mistakes swaps --rate 0.02) and counts what
    is fixed, missed and broken, by threshold. The pretrained model takes about two minutes on two cores for the
    example; a whole book (--blocks 0) has thousands of blocks and takes hours.
    """

    model: str = field(metadata=argument("MODEL"))
    """A run's folder, or a model by name."""
    data: str
    """A text file, a folder of them, a .jsonl, hf:NAME, or python-manual."""
    protocol: Literal["paper", "user", "both"] = "both"
    """both: those that the model supports (the user's needs a character tokenizer and a process that shuffles)."""
    blocks: int = 50
    """Number of consecutive blocks to test, from the middle of the book; 0: all of it."""
    paper: PaperOptions = field(default_factory=PaperOptions, metadata=INLINE)
    user: UserOptions = field(default_factory=UserOptions, metadata=INLINE)
    plot: Path | None = None
    """Plot fixed over broken (user's protocol) to this .png, .pdf or .svg file."""
    seed: int = 0
    """Seed of the mistakes and of sampling."""


@dataclass(frozen=True)
class FrontierOptions:
    """The sweep of --frontier, one cell per combination."""

    frontier: Path | None = None
    """Sweep the options below and compare the results at equal entropy. This folder keeps texts and scores: the same
    command continues an interrupted sweep, and without a MODEL existing texts are scored."""
    samplers: tuple[str, ...] = ("analytic",)
    """Names of --sampler. Combinations of model and sampler that are invalid are left out."""
    step_counts: tuple[int, ...] = (8, 16, 32, 64, 128, 1024)
    """Numbers of steps, one curve each."""
    temperatures: tuple[float, ...] = (1.0, 0.9, 0.8)
    """Temperatures, the points of a curve."""
    top_ps: tuple[float, ...] = (1.0,)
    """The same by top-p, with a single temperature."""
    text: str | None = None
    """Score passages of this text too: a file, folder or .jsonl, or python-manual."""
    entropy: float | None = None
    """Entropy in nats at which curves are compared; by default that of --text, or the middle of the range that all
    curves reach."""
    draw_only: bool = False
    """Generate the texts without scoring them, which another call or machine can do."""
    plot: Path | None = None
    """Plot the curves to this .png, .pdf or .svg file."""


@dataclass(frozen=True)
class Genppl(ModelArguments):
    """example: cedd genppl runs/quickstart -n 64 --out samples.jsonl

    Generative perplexity: score a model's samples by another language model, in both ways the literature defines it
    (the example: after cedd quickstart; the judge, gpt2-large, is downloaded once).
    Score the same samples again: cedd genppl --samples samples.jsonl --judge path/to/another
    Perplexity against entropy, swept over temperature, steps, samplers and models:
    cedd genppl runs/first runs/second --frontier curves --samplers analytic first-hitting -n 64 --plot curves.png
    """

    models: tuple[str, ...] = field(default=(), metadata=argument("[MODEL...]"))
    """A run's folder, or a model by name; several with --frontier, none with --samples."""
    judge: str = "openai-community/gpt2-large"
    """The judge: a causal model (a name on the hub, a folder, or a .gguf file; needs pip install 'cedd[hub]'), or a
    run."""
    gguf_file: str | None = None
    """The file in the judge's folder or repository, if that contains GGUF files."""
    n: int = 256
    """Number of samples (3840 in the paper)."""
    length: int | None = None
    """Tokens per sample; by default the model's context length."""
    options: SamplingOptions = field(default_factory=lambda: SamplingOptions(steps=1024), metadata=INLINE)
    sweep: FrontierOptions = field(default_factory=FrontierOptions, metadata=INLINE)
    samples: Path | None = None
    """Score these samples instead of drawing new ones."""
    out: Path | None = None
    """File for the samples; by default samples.jsonl in the run's folder, or NAME-samples.jsonl here for a pretrained
    model."""
    judge_batch: int = 8
    """Samples per batch of the judge."""
    seed: int = 0
    """Seed of the samples."""


@dataclass(frozen=True)
class Import(CommonArguments):
    """example: cedd import kuleshov-group/mdlm-owt --out mdlm-owt

    Convert a published network: SEDD, MDLM (also of SDTT), BD3-LM, DUO, UDLM, GIDD, LLaDA, Dream, SDAR, DiffuGPT or
    DiffuLLaMA, or an autoregressive one (Llama, SmolLM2, Qwen2, Qwen3), from its config.json and safetensors, or
    from a GGUF file. The result is a model folder like any other: cedd evaluate mdlm-owt ... Pickles are not read, and
    no code from the repository is run.
    """

    name: str = field(metadata=argument("MODEL"))
    """owner/name on the hub, a folder, or a GGUF file."""
    out: Path
    """The folder to write; it must not exist."""
    tokenizer: str | None = None
    """gpt2, bert, a folder with a tokenizer, or none (texts are then token ids). By default the tokenizer in the
    folder, or that of the released networks; none if its vocabulary size differs from the network's."""
    mask_id: int | None = None
    """The id of the mask in the original network, if neither its config.json nor its tokenizer has it."""
    revision: str | None = None
    """Branch, tag or commit on the hub (SDTT's students are branches)."""
    weights: Literal["float32", "bf16", "int8", "deflated"] = "float32"
    """How weights are stored; only float32, which keeps those of two bytes as they are, is exact."""
    device: str = field(default="cpu", kw_only=True)
    """Device on which weights are read: auto, cpu, cuda or cuda:1."""
    seed: int = 0
    """Accepted as by every command; nothing is random here."""


@dataclass(frozen=True)
class Export(ModelArguments):
    """example: cedd export runs/quickstart --out my-model --weights int8 --calibrate runs/quickstart/held-out.txt

    Write a run as a model folder to share: config.json, weights, tokenizer, and a model card (README.md) made from
    config.json (the example: after cedd quickstart). The result is a model like any other (cedd correct my-model "teh
    cat") and can be exported again, for example with measured results: cedd spelling my-model --data book.txt --json >
    book.json cedd export my-model --out my-model --results book.json
    """

    run: str = field(metadata=argument("MODEL"))
    """A run's folder, or a model by name."""
    out: Path
    """The folder to write, new or empty; it may be MODEL itself if that was exported before."""
    force: bool = False
    """Also write into a folder with other contents, replacing the files of a model there and ending a run."""
    weights: Literal["float32", "bf16", "int8", "deflated"] | None = None
    """Storage of weights: 4, 2, 1 or 0.8 bytes each (default: float32 for a run, otherwise unchanged)."""
    title: str | None = None
    """The model's name on its card; by default the folder's name."""
    about: str | None = None
    """What it was trained on, in words, for the card."""
    command: str | None = None
    """The command that made it, for the card; by default the run's cedd train command."""
    results: tuple[Path, ...] = ()
    """JSON files of results, as printed by the commands with --json; they appear on the card under their file names."""
    calibrate: Path | None = None
    """A text that it was not trained on, used to choose the defaults of correction."""
    broken: float = 0.0025
    """Share of correct letters that calibration may break."""
    seed: int = 0
    """Seed of the letters that calibration replaces."""
    correction: tuple[str, ...] = ()
    """Defaults of correction as NAME=VALUE (threshold=0.3 passes=2), for options of cedd correct. They take precedence
    over calibration, and calibration over MODEL's own. Results with other defaults are removed from the card."""
    words: str | None = None
    """The pretrained model that corrects words in place of this one."""
    sampling: tuple[str, ...] = ()
    """Defaults of sampling as NAME=VALUE: steps, temperature, top_p."""
    chosen: str | None = None
    """How the defaults were chosen, in words, for the card; by default this describes the calibration."""


@dataclass(frozen=True)
class Report(ModelArguments):
    """example: cedd report runs/quickstart

    Write a run's learning curve, its bound next to simple baselines, samples and corrections as one page,
    RUN/report.html (the example: after cedd quickstart). A comparison of several runs with paired intervals: cedd
    report runs/first runs/second --out comparison.html Any other model, on a text of your choice:          cedd report
    mdlm-owt --data wikitext2 --wrap trained
    """

    runs: tuple[Path, ...] = field(metadata=argument("MODEL..."))
    """Folders of cedd train or cedd quickstart; with --data also those of cedd import and cedd export."""
    data: str | None = None
    """Measure on this text, in any form that cedd evaluate takes, instead of the run's held-out text; without a
    learning curve."""
    wrap: Wrap = "none"
    """How --data is wrapped, as for cedd evaluate."""
    out: Path | None = None
    """The page; by default report.html (with the figures in report.json), or comparison.html, in the first run's
    folder."""
    tokens: Path | None = None
    """Show the tokens in this file of cedd evaluate --tokens, coloured by cost."""
    effort: ReportOptions = field(default_factory=ReportOptions, metadata=INLINE)
    seed: int = 0
    """Random seed."""


@dataclass(frozen=True)
class Serve(ModelArguments):
    """example: cedd serve --open

    Serve a web page for generation, infilling and correction, and the same as an HTTP API: /v1/completions in OpenAI's
    form, /infill and /correct. Without a MODEL, serve the models that come with cedd. Only this machine can connect,
    unless --host says otherwise. Needs pip install 'cedd[serve]'. Ctrl-C stops the server.
    """

    runs: tuple[str, ...] = field(default=(), metadata=argument("[MODEL...]"))
    """Runs' folders, or models by their names."""
    port: int = 8008
    """Port; 0 picks a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts connections from other machines."""
    open: bool = False
    """Open the page in a browser."""
    allow_host: tuple[str, ...] = ()
    """Further host names by which the server may be called, behind a proxy or on a network."""
    json: bool = False
    """Print the address and the models as one JSON object."""
    log_texts: bool = False
    """Log the texts of requests too."""
    lookup_processes: int | None = None
    """Processes that look up words for corrections; by default one per core, up to 4. 0: the server looks them up."""
    seed: int | None = None
    """Seed of requests that set none; by default each of them has a random seed."""
    limits: Limits = field(default_factory=Limits, metadata=INLINE)


@dataclass(frozen=True)
class Bench(CommonArguments):
    """example: cedd bench train --preset char --vocab 100 --shapes 16x128 --steps 5

    Time training steps or sampling against a plain textbook implementation.
    """

    suite: Literal["train", "sample"] = field(metadata=argument("{train,sample}"))
    """What to time."""
    preset: Literal["tiny", "char", "english-char", "small", "medium"] = "small"
    """Size of the network."""
    shapes: tuple[str, ...] | None = None
    """Sequences x positions, one row each (default: 512x128 64x1024 32x128 for train, 64x128 for sample)."""
    vocab_size: int = field(default=50257, metadata={"option": "vocab"})
    """Vocabulary size V."""
    methods: tuple[str, ...] = ()
    """METHOD/PROCESS, one row each for every shape (default: cedd-star/absorb; sample: also bayes/roulette and
    bayes/uniform); for train also METHOD/PROCESS/BLOCK, in blocks of that many tokens."""
    samplers: tuple[Literal["analytic", "first-hitting"], ...] = ("analytic", "first-hitting")
    """Samplers to time (sample), one row each where supported."""
    textbook: bool = True
    """Also time the textbook implementation."""
    complementary: bool = False
    """Put every sequence into the batch twice, with complementary masks (train)."""
    steps: int | None = None
    """Steps to time (train: 20), or steps of the sampler (sample: 1024)."""
    warmup: int = 8
    """Training steps before timing starts."""
    compile: Literal["auto", "off", "on", "graphs"] = "auto"
    """torch.compile, optionally with CUDA graphs (auto: graphs on CUDA, off elsewhere)."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Precision of our matrix products in training (auto: bf16 if the hardware supports it; for the textbook: on
    CUDA)."""
    seed: int = 0
    """Seed of the random tokens and weights."""


@dataclass(frozen=True)
class Theory:
    """example: cedd theory --vocab 3 --length 2

    Compute both sides of every claim of the paper on a space small enough to enumerate, with random networks. Exit code
    1 if a claim fails.
    """

    vocab: int = 3
    """Vocabulary size V, from 2 to 10; (V+1)^L must not exceed 64."""
    length: int = 2
    """Sequence length L."""
    seed: int = 0
    """Seed of the random data and networks."""
    device: str = "auto"
    """Accepted as by every command; everything is computed on the CPU, in float64."""
    json: bool = False
    """Print one JSON object instead of the table."""


@dataclass(frozen=True)
class Completion:
    """example: cedd completion bash

    Print a script that completes cedd's commands, options, choices and file names. To install it:

    bash: cedd completion bash > ~/.local/share/bash-completion/completions/cedd
    zsh:  cedd completion zsh > ~/.cedd.zsh, and the line: source ~/.cedd.zsh in ~/.zshrc
    """

    shell: Literal["bash", "zsh"] = field(metadata=argument("{bash,zsh}"))
    """Your shell."""


# ----------------------------------------------------------------------------------------------------------------
# From words

ARGUMENTS: Mapping[str, type] = {
    kind.__name__.lower(): kind
    for kind in (
        *(Quickstart, Train, Adapt, Evaluate, Sample, Infill, Correct, Spelling, Genppl, Import, Export, Report),
        *(Bench, Serve, Theory, Completion),
    )
}
"""The dataclass of each command."""

TRAIN_HELP = """example: cedd train char --data python-manual --out runs/first

usage: cedd train {__NAMES__} [OPTIONS]      (cedd train char --help lists them)

Train a network on a text file, a folder of text files, a .jsonl, a hub data set (hf:NAME) or python-manual.
Options change any setting of the preset: --method cedd --process uniform --batch.size 64 --steps 5000.
Start from another model's weights: --from RUN, first or after a preset. The same command continues an interrupted run.
As for every command: --seed 1, --device cpu, and --json to print the result as one JSON object.
Many GPUs: torchrun --nproc-per-node 8 -m cedd train ...

__PRESETS__"""


def parse(command: str, words: list[str]) -> Any:
    """Parse the arguments of a command."""
    if command == "train":
        return _parse_train(words)
    if command == "adapt":
        return _parse_adapt(words)
    kind = ARGUMENTS[command]
    return parser.parse(kind, words, prog=f"cedd {command}")


def _parse_adapt(words: list[str]) -> Train:
    """`cedd adapt MODEL` is `cedd train adapt --from MODEL`."""
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        raise ValueError("the autoregressive model comes first: cedd adapt smollm2 --data corpus --out runs/first")
    start = [] if words[0] in ("-h", "--help") else ["--from"]
    return _parse_train(["adapt", *start, *words], "cedd adapt MODEL")


def _parse_train(words: list[str], prog: str | None = None) -> Train:
    """The preset's configuration with the changes of the command line."""
    if words[:1] in (["-h"], ["--help"]):
        width = max(map(len, PRESETS))
        presets = "\n".join(f"  {name:<{width}}  {summary}" for name, (summary, _) in PRESETS.items())
        print(TRAIN_HELP.replace("__NAMES__", ",".join(PRESETS)).replace("__PRESETS__", presets))
        raise SystemExit(0)
    name, rest = (words[0], words[1:]) if words else ("", [])
    if name.partition("=")[0] == "--from":  # what is continued says most of it
        name, rest = "char", words
    if not name or name.startswith("-"):
        raise ValueError(f"a preset comes first, one of {', '.join(PRESETS)}: cedd train char --out runs/first")
    if name not in PRESETS:
        raise ValueError(f"invalid preset: {name!r}{suggestion(name, PRESETS)}")
    summary, config = PRESETS[name]
    split = (word.split("=", 1) if word.startswith(("--from=", "--out=")) else [word] for word in rest)
    said = dict(itertools.pairwise(itertools.chain.from_iterable(split)))
    if "--from" in said:
        config = starting_from(config, said["--from"], said.get("--out"))
    if name == "adapt" and "--from" in said:  # the model says all but what it is to become
        config = replace(config, method=PRESETS[name][1].method, process=PRESETS[name][1].process)
    names_process = any(word.startswith("--process") for word in rest)
    rest, config = _with_architecture(*_with_process(rest, config))
    called = f"cedd train {name}" if prog is None else prog
    start = " --from smollm2" if name == "adapt" and prog is None else ""
    example = f"{called.replace('MODEL', 'smollm2')}{start} --data {config.data} --out runs/first"
    description = f"example: {example}\n\n{summary}"
    parsed = parser.parse(Train, rest, prog=called, description=description, default=Train(config))
    if name == "adapt" and parsed.config.start is None:
        raise ValueError("cedd train adapt needs an autoregressive model: --from MODEL")
    if not names_process:
        parsed = replace(parsed, config=with_alias(parsed.config))
    _refuse_unused_settings(parsed.config, config)
    return parsed


def _refuse_unused_settings(config: TrainConfig, preset: TrainConfig) -> None:
    """Raise an error if a setting that the command line changes has no effect together with the others."""
    before = flat(preset)
    changed = [name for name, value in flat(config).items() if value != before[name] and "." in name]
    if not changed:
        return
    config.check()
    unused = unused_settings(config)
    if wrong := [name for name in changed if name in unused]:
        raise ValueError(f"--{wrong[0].replace('_', '-')} has no effect {unused[wrong[0]]}")


def _with_process(words: list[str], config: TrainConfig) -> tuple[list[str], TrainConfig]:
    """The configuration with the process of a command line, and the remaining words.

    --process NAME, --process.ARGUMENT VALUE, --process.schedule NAME, --process.schedule.ARGUMENT VALUE. A name resets
    the process, or the schedule, to its default arguments.
    """
    others, given = _component("process", words)
    process = config.process
    for name in ("", "name"):
        process = ProcessConfig(given.pop(name)) if name in given else process
    for name in ("schedule", "schedule.name"):
        process = process.replaced(["schedule"], {"name": given.pop(name)}) if name in given else process
    for name, value in given.items():
        process = process.replaced(name.split("."), _json_or_text(value))
    return others, replace(config, process=process)


def _with_architecture(words: list[str], config: TrainConfig) -> tuple[list[str], TrainConfig]:
    """The configuration with the architecture of a command line, and the remaining words.

    --architecture NAME, --architecture.ARGUMENT VALUE (JSON or text), --architecture-arguments FILE.json
    """
    others, files = _component("architecture-arguments", words)
    others, given = _component("architecture", others)
    name = given.pop("", config.architecture)
    file = read_json(Path(files[""])) if "" in files else {}
    if name != config.architecture:
        config = replace(config, architecture=name, architecture_arguments={})
    if config.architecture == TRANSFORMER and (given or file):
        raise ValueError("arguments of an architecture need --architecture; the transformer's options are --model.*")
    own = {key: _json_or_text(value) for key, value in given.items()}
    return others, replace(config, architecture_arguments={**config.architecture_arguments, **file, **own})


def _component(option: str, words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split off --OPTION VALUE and --OPTION.ARGUMENT VALUE: the remaining words, and the values by argument ("" for the
    option itself)."""
    others, given, rest = list[str](), dict[str, str](), iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name != f"--{option}" and not name.startswith(f"--{option}."):
            others.append(word)
            continue
        if not equals and (value := next(rest, "--")).startswith("--"):
            raise ValueError(f"{name} needs a value")
        given[name.removeprefix(f"--{option}").lstrip(".").replace("-", "_")] = value
    return others, given


def _json_or_text(value: str) -> Any:
    try:
        return {"True": True, "False": False, "None": None}[value] if value[:1] in "TFN" else json.loads(value)
    except (KeyError, ValueError):
        return value
