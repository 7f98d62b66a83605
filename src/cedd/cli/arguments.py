"""What the commands take: a dataclass each, whose docstring and fields are its --help.

Neither torch nor numpy is imported here, nor by what is imported here: a help, and a mistake in a command line, appear
at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from cedd.cli.parsing import parse_arguments
from cedd.names import suggestion
from cedd.report.records import Effort
from cedd.serve.limits import Limits
from cedd.spelling.protocols import PaperOptions, UserOptions
from cedd.training.config import PRESETS, TrainConfig, starting_from

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


Wrap = Literal["none", "bos-eos", "trained"]


@dataclass(frozen=True)
class SamplerOptions:
    """How to sample."""

    sampler: str = "analytic"
    """analytic, euler, tau-leaping, remask-capped, remask-rescaled, remask-confidence, gibbs, stratified,
    first-hitting, the surest first by probability, margin or entropy, or one that you added to RULES."""
    steps: int | None = None
    """Steps from noise to data. None: the model's own, or one for four tokens, from 64 to 256. First-hitting takes one
    a token, whatever stands here."""
    grid: str = "uniform"
    """Where the steps lie: uniform, evenly in time, or jumps, evenly in jumps."""
    temperature: float | None = None
    """Below 1 likely tokens are drawn more often than the network says; 0: always the likeliest. None: the model's own,
    or 1."""
    top_p: float | None = None
    """Draw only the likeliest tokens, which together have this probability. None: the model's own, or 1, which is all
    of them."""
    corrector: float | None = None
    """Strength of flow matching's corrector (dfm only; the paper's is 1)."""
    batch: int | None = None
    """Sequences at once; by default all, and fewer when the memory does not suffice."""
    deterministic: bool = False
    """Run the network on one text at a time, so that no bit of a text depends on the others; on a CPU it always is."""


@dataclass(frozen=True)
class ViewOptions:
    """How to see the first text being denoised."""

    watch: bool = False
    """Show the first text in the terminal while it is denoised."""
    html: Path | None = None
    """Write its way from noise to text as a page."""
    gif: Path | None = None
    """The same as a moving picture."""


@dataclass(frozen=True, kw_only=True)
class SamplingArguments(CommonArguments):
    """Options of the commands that print samples."""

    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Number of texts."""
    options: Annotated[SamplerOptions, tyro.conf.arg(name="")] = field(default_factory=SamplerOptions)
    view: Annotated[ViewOptions, tyro.conf.arg(name="")] = field(default_factory=ViewOptions)
    seed: int | None = None
    """Text i depends on the seed and on i alone, not on how many are drawn."""


# ----------------------------------------------------------------------------------------------------------------
# The commands


@dataclass(frozen=True)
class Quickstart(CommonArguments):
    """example: cedd quickstart

    Train a small model on Python's own manual, bound its bits per character beside simple models, let it write and fill
    in (and correct, on a GPU), and write it all to OUT/report.html. It measures how fast this machine is and trains for
    as many steps as fit into --minutes; --fast is a 30-second version. The same command goes on where it was
    interrupted.
    """

    fast: bool = False
    """A tiny network and a few steps: to see that everything works."""
    out: Path | None = None
    """The run's folder: runs/quickstart, or runs/quickstart-fast with --fast."""
    minutes: float | None = None
    """How long all of it may take, 4 unless given; a GPU is done sooner, after 1500 steps."""
    steps: int | None = None
    """Training steps, instead of --minutes; 60 with --fast."""
    seed: int = 0
    """Of everything random."""


@dataclass(frozen=True)
class Train:
    """A run, as its preset and the command line have it, and what is printed when it has ended."""

    config: Annotated[TrainConfig, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    json: bool = False
    """Print how it ended as one JSON object."""


@dataclass(frozen=True)
class Evaluate(CommonArguments):
    """example: cedd evaluate runs/quickstart --data runs/quickstart/held-out.txt

    Bound the perplexity of a run on text, with a 95% interval (the example: after cedd quickstart).
    Until the interval is narrow enough:           cedd evaluate runs/first --data wikitext2 --tolerance 0.5%
    Several in one table, with differences:        cedd evaluate runs/first runs/second --data book.txt
    """

    models: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Runs' folders, or models by their names; each is compared with the first, whatever its tokenizer."""
    data: str = "python-manual"
    """A text file, folder or .jsonl; wikitext2, wikitext103, ptb, lambada, lm1b; hf:NAME; or python-manual."""
    bound: Literal["tight", "j1", "j2", "all"] = "tight"
    """tight is a true bound; j1 and j2 are the paper's, cut at t = 1e-4; all is the three."""
    order: Literal["probability", "margin", "entropy"] | None = None
    """Beside the bound, the exact likelihood of the sampler that reveals the surest masks first (absorb only)."""
    steps: int | None = None
    """Of the sampler of --order, in which it reveals a text. None: one a token."""
    draws: int = 16
    """Noisy versions of each sequence (of each round, with --tolerance)."""
    tolerance: str | None = None
    """Go on until the 95% interval of the perplexity is this narrow on either side: 0.5% or 0.005."""
    fixed_set: bool = False
    """The interval for these very sequences (times and noise only), not for the population they come from."""
    sampling: Literal["stratified", "independent"] | None = None
    """independent is the paper's; stratified, the default, has a smaller error, and an interval."""
    time_floor: float | None = None
    """Where tight stops and counts its last step, and where j1 and j2 are cut (default: the model's own, and 1e-4)."""
    corrector: float | None = None
    """Strength of flow matching's corrector (dfm only; the paper's is 1)."""
    max_sequences: int | None = None
    """Evaluate so many, evenly spaced over the set (with several tokenizers: stretches of about as much text)."""
    wrap: Wrap = "none"
    """Put each block between the tokens that begin and end a document: bos-eos for all runs, trained for imported
    networks that were trained so (MDLM, DUO)."""
    most_unknown: float = 0.01
    """Refuse a text of which a larger share are characters that the tokenizer does not know."""
    split: str = "test"
    """Of an evaluation set."""
    data_root: Path | None = None
    """Folder of the evaluation sets' files (default: CEDD_DATA, then the hub)."""
    workers: int = 1
    """Processes that tokenize; they do not change a token."""
    per_sequence: Path | None = None
    """Write one value a sequence to this .npy or .jsonl."""
    plot: Path | None = None
    """Draw the running estimate with its band to this .png, .pdf or .svg."""
    batch: int = 32
    """Noisy sequences shown to the network at once."""
    seed: int = 0
    """Of times and noise."""


@dataclass(frozen=True)
class Sample(SamplingArguments):
    """example: cedd sample -n 3 --prompt "The " --watch

    Sample texts from a trained model: a run's folder, a name on the hub, or by default the model that comes with cedd,
    english. Your own: cedd sample runs/first
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """A run's folder or a name; without it english of the package."""
    length: int | None = None
    """Tokens of a sample; by default as many as the model reads."""
    prompt: str = ""
    """What every sample begins with."""


@dataclass(frozen=True)
class Infill(SamplingArguments):
    """example: cedd infill "The ____{5} sat on the ____." -n 3

    Fill the blanks of a text of any length: ____ has as many tokens as underscores (three at least), ____{12} has 12.
    cedd infill page.txt fills those of a file; TEXT - reads standard input, and so does no text at all. What is given
    comes out byte for byte.
    Without a RUN (a folder, or a name on the hub) the model that comes with cedd does it, english.
    """

    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN] TEXT|FILE")] = ()
    """What has the blanks. A RUN before it is a run's folder, or a model by its name."""
    file: Path | None = None
    """Read the text from a file."""


@dataclass(frozen=True)
class Correct(CommonArguments):
    """example: cedd correct "I hav a speling mistke"

    Correct the spelling of a text, or of files: cedd correct letter.txt --diff. With the model that comes with cedd,
    english, words are corrected (letters replaced, swapped, missing, extra; words joined or split); with a RUN of
    yours on a process that shuffles (uniform, roulette), letters are replaced and swapped:
    cedd correct runs/first "teh cat sat on teh mat". TEXT - reads standard input, and so does no text at all; what is
    not changed comes out byte for byte. Options that are not given are the model's own.
    """

    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN] TEXT|FILE...")] = ()
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
    rate: float | None = None
    """The share of wrong letters that is expected (0.05, unless the model has its own)."""
    t: float | None = None
    """The time that the network is told (the one at which its process has this rate)."""
    threshold: float | None = None
    """A word or letter is replaced if own / (own + best) is below this: own is its probability, best that of the
    likeliest other (0.5 or more: the argmax)."""
    change: Literal["words", "letters", "all"] | None = None
    """words: with the lexicon beside the model, the default where there is one. letters: plain letters become others of
    their case, except in addresses, names with digits and the like; accents, spaces, digits and punctuation stay. all:
    anything may change."""
    passes: int | None = None
    """Of letters, as all that follows: how often the text is read at most; later passes see earlier changes."""
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
class Spelling(CommonArguments):
    """example: cedd spelling english-char --data python-manual --blocks 4 --plot fixed.png

    Share of mistakes that a model puts right in a book, with 95% intervals. The paper's protocol: noise of the model's
    own process at t = 0.05, the likeliest token at each corrupted place. The user's: 5% of the letters replaced by
    other letters at unknown places (or neighbours exchanged, --mistakes swaps --rate 0.02); what is fixed, missed and
    broken, over the threshold of correction. The model that comes with cedd takes about two minutes on two cores; a
    whole book (--blocks 0), with thousands of blocks, hours.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run's folder, or a model by its name."""
    data: str
    """A text file, a folder of them, a .jsonl, hf:NAME, or python-manual."""
    protocol: Literal["paper", "user", "both"] = "both"
    """both: each that the model allows (user's: a character tokenizer, and a process that shuffles)."""
    blocks: int = 50
    """Test on so many consecutive blocks from the middle of the book; 0: all of it."""
    paper: Annotated[PaperOptions, tyro.conf.arg(name="")] = field(default_factory=PaperOptions)
    user: Annotated[UserOptions, tyro.conf.arg(name="")] = field(default_factory=UserOptions)
    plot: Path | None = None
    """User's: draw fixed over broken to this .png, .pdf or .svg."""
    seed: int = 0
    """Seed of the random mistakes and of sampling."""


@dataclass(frozen=True)
class FrontierOptions:
    """What --frontier sweeps; a cell is one combination."""

    frontier: Path | None = None
    """Sweep these, and compare at equal entropy. The folder keeps texts and judgements: the same command goes on where
    it was stopped, and without a RUN the texts that are there are judged."""
    samplers: tuple[str, ...] = ("analytic",)
    """Names of --sampler; a run that a sampler makes no sense for is left out there."""
    step_counts: tuple[int, ...] = (8, 16, 32, 64, 128, 1024)
    """Numbers of steps, each a curve."""
    temperatures: tuple[float, ...] = (1.0, 0.9, 0.8)
    """The points of a curve."""
    top_ps: tuple[float, ...] = (1.0,)
    """The same by top-p, with a single temperature."""
    text: str | None = None
    """Judge stretches of this text too: a file, folder or .jsonl, or python-manual."""
    entropy: float | None = None
    """Where curves are compared, in nats; by default the entropy of --text, or the middle of what all curves reach."""
    draw_only: bool = False
    """Draw the texts, and leave judging to another call or machine."""
    plot: Path | None = None
    """Draw the curves to this .png, .pdf or .svg."""


@dataclass(frozen=True)
class Genppl(CommonArguments):
    """example: cedd genppl runs/quickstart -n 64 --out samples.jsonl

    Judge a model's samples by another language model, both ways the literature defines it (the example: after
    cedd quickstart; the judge, gpt2-large, is downloaded once).
    Judge the same samples again: cedd genppl --samples samples.jsonl --judge path/to/another
    Perplexity against entropy, swept over temperature, steps, samplers and runs:
    cedd genppl runs/first runs/second --frontier curves --samplers analytic first-hitting -n 64 --plot curves.png
    """

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN ...]")] = ()
    """A run's folder, or a model by its name, several with --frontier; not needed with --samples."""
    judge: str = "openai-community/gpt2-large"
    """A causal model (a name on the hub, a folder, or a .gguf file: needs pip install 'cedd[hub]'), or a run."""
    gguf_file: str | None = None
    """The file inside the judge's folder or repository, where that holds GGUF files."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 256
    """Number of samples (the paper: 3840)."""
    length: int | None = None
    """Tokens of a sample; by default as many as the model reads."""
    options: Annotated[SamplerOptions, tyro.conf.arg(name="")] = field(
        default_factory=lambda: SamplerOptions(steps=1024)
    )
    sweep: Annotated[FrontierOptions, tyro.conf.arg(name="")] = field(default_factory=FrontierOptions)
    samples: Path | None = None
    """Judge these samples instead of drawing new ones."""
    out: Path | None = None
    """Where the samples are saved; by default samples.jsonl in the run's folder, or NAME-samples.jsonl here for a model
    that comes with the package."""
    judge_batch: int = 8
    """Samples judged at once."""
    seed: int = 0
    """Seed of the samples and of the resampling for intervals."""


@dataclass(frozen=True)
class Import(CommonArguments):
    """example: cedd import kuleshov-group/mdlm-owt --out mdlm-owt

    Take over a network that others have published: SEDD, MDLM (also those of bd3lms and SDTT), DUO, UDLM or GIDD, by
    its config.json and model.safetensors. The result is a model folder like any other: cedd evaluate mdlm-owt ...
    Pickles are not read, and none of their code is run.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME_OR_FOLDER")]
    """owner/name on the hub, or a folder."""
    out: Path
    """The folder to write, which must not be there yet."""
    tokenizer: str | None = None
    """gpt2, bert, a folder that has one, or none (texts are then numbers of tokens). By default the one of the released
    networks; none where this network has another number of tokens."""
    revision: str | None = None
    """The hub's branch, tag or commit (SDTT's students are branches)."""
    weights: Literal["float32", "bf16", "int8", "deflated"] = "float32"
    """How weights are stored; only float32 is exact."""
    device: str = field(default="cpu", kw_only=True)
    """Where the weights are while they are read: auto, cpu, cuda or cuda:1."""
    seed: int = 0
    """Taken as by every command; nothing is drawn here."""


@dataclass(frozen=True)
class Export(CommonArguments):
    """example: cedd export runs/quickstart --out my-model --weights int8 --calibrate runs/quickstart/held-out.txt

    Write a run as a folder to give away: config.json, weights, tokenizer, and a card (README.md) made from config.json
    (the example: after cedd quickstart). The result is a model like any other (cedd correct my-model "teh cat") and can
    be exported again, for example once it has been measured: cedd spelling my-model --data book.txt --json > book.json,
    and then
    cedd export my-model --out my-model --results book.json
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run's folder, or a model by its name."""
    out: Path
    """The folder to write, a new or an empty one; it may be the RUN itself if that was exported before."""
    force: bool = False
    """Write also into a folder that holds something else, over the files of a model there; a run there ends."""
    weights: Literal["float32", "bf16", "int8", "deflated"] | None = None
    """How weights are stored: 4, 2, 1 or 0.8 bytes each (float32 for a run; else as they are)."""
    title: str | None = None
    """The model's name on its card; by default the folder's."""
    about: str | None = None
    """What it was trained on, in words, for the card."""
    command: str | None = None
    """The command that made it, for the card; by default the cedd train of the run."""
    results: tuple[Path, ...] = ()
    """JSON files with figures, as the commands print them with --json; they go on the card by their files' names."""
    calibrate: Path | None = None
    """A text that it was not trained on, on which the defaults of correction are found."""
    broken: float = 0.0025
    """The share of right letters that calibration may break."""
    seed: int = 0
    """Seed of the letters that calibration replaces."""
    correction: tuple[str, ...] = ()
    """Defaults of correction as NAME=VALUE (threshold=0.3 passes=2): options of cedd correct. They stand before what
    calibration finds, and that before what the RUN has. Figures of other defaults leave the card."""
    words: str | None = None
    """The model of the package that corrects words in the place of this one."""
    sampling: tuple[str, ...] = ()
    """Defaults of sampling as NAME=VALUE: steps, temperature, top_p."""
    chosen: str | None = None
    """How they were chosen, in words, for the card; of calibration it says so by itself."""


@dataclass(frozen=True)
class Report(CommonArguments):
    """example: cedd report runs/quickstart

    Write a run's curves, its bound beside simple models, samples and corrections as one page, RUN/report.html (the
    example: after cedd quickstart).
    Of several runs, a comparison with paired intervals: cedd report runs/first runs/second --out comparison.html
    Of any other model, on a text that you name:         cedd report mdlm-owt --data wikitext2 --wrap trained
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Folders of cedd train or cedd quickstart; with --data also those of cedd import and cedd export."""
    data: str | None = None
    """Measure on this text, as cedd evaluate takes it, instead of what a run held out; without a learning curve."""
    wrap: Wrap = "none"
    """Of --data, as cedd evaluate takes it."""
    out: Path | None = None
    """The page; by default report.html (beside it the figures, report.json), or comparison.html, in the (first) run's
    folder."""
    effort: Annotated[Effort, tyro.conf.arg(name="")] = field(default_factory=Effort)
    seed: int = 0
    """Of everything random."""


@dataclass(frozen=True)
class Serve(CommonArguments):
    """example: cedd serve --open

    Serve a page on which you see texts being denoised, fill and correct them, and the same over HTTP, for programs:
    /v1/completions in OpenAI's form, /infill and /correct. Without a RUN, the models that come with cedd. Only this
    machine can reach it, unless --host says otherwise. Needs pip install 'cedd[serve]'. Ctrl-C ends it.
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN ...]")] = ()
    """Runs' folders, or models by their names."""
    port: int = 8008
    """0 takes one that is free."""
    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0 lets other machines in."""
    open: bool = False
    """Open the page in a browser."""
    allow_host: tuple[str, ...] = ()
    """Further names by which the server may be called (behind a proxy, or on a network)."""
    json: bool = False
    """Say where it listens, and with which models, as one JSON object."""
    log_texts: bool = False
    """Write also the texts of requests to the log."""
    readers: int | None = None
    """Processes that look up words for corrections; by default one a core, up to 4. 0: the server does it itself."""
    seed: int | None = None
    """Seed of the requests that name none; by default each of them has its own, by chance."""
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(default_factory=Limits)


@dataclass(frozen=True)
class Bench(CommonArguments):
    """example: cedd bench train --preset char --vocab 100 --shapes 16x128 --steps 5

    Time training steps or sampling against a plain textbook implementation.
    """

    suite: tyro.conf.Positional[Literal["train", "sample"]]
    """What is timed."""
    preset: Literal["tiny", "char", "english-char", "small", "medium"] = "small"
    """The size of the network."""
    shapes: tuple[str, ...] | None = None
    """Sequences x positions, each a row (train: 512x128 64x1024 32x128, sample: 64x128)."""
    vocab_size: Annotated[int, tyro.conf.arg(name="vocab")] = 50257
    """Tokens V."""
    methods: tuple[str, ...] = ()
    """METHOD/PROCESS, each a row for every shape (cedd-star/absorb; sample: also bayes/roulette and bayes/uniform)."""
    samplers: tuple[Literal["analytic", "first-hitting"], ...] = ("analytic", "first-hitting")
    """Those that are timed (sample), each a row where it can be used."""
    textbook: bool = True
    """Time the textbook's too."""
    steps: int | None = None
    """Steps timed (train: 20), or the sampler's steps (sample: 1024)."""
    warmup: int = 8
    """Training steps before the clock starts."""
    compile: Literal["auto", "off", "on", "graphs"] = "auto"
    """torch.compile, with CUDA graphs (auto: graphs on CUDA, off elsewhere)."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """What our training step multiplies in (auto: bf16 where the chip has units for it; the textbook's: on CUDA)."""
    seed: int = 0
    """Seed of the random tokens and weights."""


@dataclass(frozen=True)
class Theory:
    """example: cedd theory --vocab 3 --length 2

    Compute both sides of every claim of the paper on a space small enough to enumerate, with random networks. Exit
    code 1 if a claim fails.
    """

    vocab: int = 3
    """tokens V, from 2 to 10; (V+1)^L must not exceed 64"""
    length: int = 2
    """positions L"""
    seed: int = 0
    """seed of the random data and networks"""
    device: str = "auto"
    """taken as by every command; all of it is computed on the CPU, in float64"""
    json: bool = False
    """print one JSON object instead of the table"""


@dataclass(frozen=True)
class Completion:
    """example: cedd completion bash

    Print a script that completes cedd's commands, options, choices and file names. To install it:

    bash: cedd completion bash > ~/.local/share/bash-completion/completions/cedd
    zsh:  cedd completion zsh > ~/.cedd.zsh, and the line: source ~/.cedd.zsh in ~/.zshrc
    fish: cedd completion fish > ~/.config/fish/completions/cedd.fish
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """The shell that you use."""


# ----------------------------------------------------------------------------------------------------------------
# From words

ARGUMENTS: Mapping[str, type] = {
    kind.__name__.lower(): kind
    for kind in (
        *(Quickstart, Train, Evaluate, Sample, Infill, Correct, Spelling, Genppl, Import, Export, Report, Bench),
        *(Serve, Theory, Completion),
    )
}
"""The dataclass of each command."""

TRAIN_HELP = """example: cedd train char --data python-manual --out runs/first

usage: cedd train {__NAMES__} [OPTIONS]      (cedd train char --help lists them)

Train a network on a text file, a folder of them, a jsonl, a hub data set (hf:NAME) or python-manual.
Every setting of the preset can be changed: --method cedd --process.name uniform --batch.size 64 --steps 5000.
From another model's weights: --from RUN, first or after a preset. A run that was killed goes on with the same command.
As for every command: --seed 1, --device cpu, and --json, by which the end of it is printed as one JSON object.
Many GPUs: torchrun --nproc-per-node 8 -m cedd train ...

__PRESETS__"""


def parse(command: str, words: list[str]) -> Any:
    """The arguments of a command."""
    if command == "train":
        return _parse_train(words)
    kind = ARGUMENTS[command]
    return parse_arguments(kind, words, prog=f"cedd {command}", description=kind.__doc__ or "")


def _parse_train(words: list[str]) -> Train:
    """The preset's configuration with the command line's changes; unknown keys are refused."""
    if words[:1] in (["-h"], ["--help"]):
        width = max(map(len, PRESETS))
        presets = "\n".join(f"  {name:<{width}}  {summary}" for name, (summary, _) in PRESETS.items())
        print(TRAIN_HELP.replace("__NAMES__", ",".join(PRESETS)).replace("__PRESETS__", presets))
        raise SystemExit(0)
    name, rest = (words[0], words[1:]) if words else ("", [])
    if name.partition("=")[0] == "--from":  # what is continued says most of it
        name, rest = "char", words
    if not name or name.startswith("-"):
        raise ValueError(f"name a preset first, one of {', '.join(PRESETS)}: cedd train char --out runs/first")
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}{suggestion(name, PRESETS)}")
    summary, config = PRESETS[name]
    split = (word.split("=", 1) if word.startswith(("--from=", "--out=")) else [word] for word in rest)
    said = dict(itertools.pairwise(itertools.chain.from_iterable(split)))
    if "--from" in said:
        config = starting_from(config, said["--from"], said.get("--out"))
    description = f"example: cedd train {name} --data {config.data} --out runs/first\n\n{summary}"
    return parse_arguments(Train, rest, prog=f"cedd train {name}", description=description, default=Train(config))
