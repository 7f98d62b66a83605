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
from cedd.cli.parser import INLINE, REPEATED, CommandOption, argument
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
    begun_from,
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
    """auto, cpu, cuda, or one GPU such as cuda:1."""
    json: bool = False
    """Print one JSON object on standard output."""


@dataclass(frozen=True, kw_only=True)
class ModelArguments(CommonArguments):
    """Options of every command that loads a model."""

    architecture: str | None = None
    """package:Class of your own network, if the model was trained with one."""


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
    """Constraints on the text after the prompt, or in each blank; at most one of these."""

    regex: tuple[str, ...] | None = field(default=None, metadata=REPEATED)
    """Regular expression that the text must match completely, such as '\\d{4}-\\d\\d'; for infill, repeat the option
    to give each blank its own."""
    json_schema: Path | None = None
    """File with a JSON schema under which the text must be valid."""
    choices: tuple[str, ...] | None = None
    """Allowed texts; the text is one of these."""


@dataclass(frozen=True, kw_only=True)
class SamplingArguments(ModelArguments):
    """Options of the commands that print samples."""

    n: int = 1
    """Number of texts."""
    constraint: ConstraintOptions = field(default_factory=ConstraintOptions, metadata=INLINE)
    options: SamplingOptions = field(default_factory=SamplingOptions, metadata=INLINE)
    view: ViewOptions = field(default_factory=ViewOptions, metadata=INLINE)
    seed: int | None = None
    """Random seed; by default a new one. Text i depends only on the seed and i, not on the number of texts."""


# ----------------------------------------------------------------------------------------------------------------
# The commands


@dataclass(frozen=True)
class Quickstart(CommonArguments):
    """example: cedd quickstart

    Train a small model on Python's own manual, compare its bits per character with simple baselines, generate and
    infill text (and correct spelling, on a GPU), and write a report to OUT/report.html. The number of training steps is
    chosen to fit into --minutes on this machine; --fast is a 30-second version. The same command resumes an interrupted
    run.
    """

    fast: bool = False
    """A tiny network and a few steps, to check the installation."""
    out: Path | None = None
    """Folder of the run (default: runs/quickstart, or runs/quickstart-fast with --fast)."""
    minutes: float | None = None
    """Time limit in minutes for the whole command (default: 4). On a GPU, training ends after 1500 steps."""
    steps: int | None = None
    """Training steps, instead of --minutes (default with --fast: 60)."""
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

    Compute an upper bound on the perplexity of a model on text, with a 95% interval. Several models are compared in one
    table with paired differences. (The example works after cedd quickstart.)

      cedd evaluate runs/first --data wikitext2 --tolerance 0.5%            until the interval is ± 0.5%
      cedd evaluate runs/first --bound importance --max-sequences 64        a tighter bound
      cedd evaluate runs/first runs/second --data book.txt                  a comparison
    """

    models: tuple[Path, ...] = field(metadata=argument("MODEL..."))
    """Run folders or names of models. Each is compared with the first; tokenizers may differ."""
    data: str = "python-manual"
    """A text file, folder or .jsonl; wikitext2, wikitext103, ptb, lambada, lm1b; hf:NAME; or python-manual."""
    options: EvaluationOptions = field(default_factory=EvaluationOptions, metadata=INLINE)
    tolerance: str | None = None
    """Add draws (or orders) until the half-width of the 95% interval is at most this share of the perplexity: 0.5% or
    0.005."""
    per_sequence: Path | None = None
    """Write one value per sequence to this .npy or .jsonl file."""
    tokens: Path | None = None
    """Write the cost of each token in nats, averaged over orders, to this .jsonl file; needs --bound importance."""
    plot: Path | None = None
    """Plot the running estimate with its confidence band to this .png, .pdf or .svg file."""


@dataclass(frozen=True)
class Sample(SamplingArguments):
    """example: cedd sample -n 3 --prompt "The " --watch

    Generate texts with a trained model.

      cedd sample runs/first --length 200                                   with your own model
      cedd sample --prompt "Born in " --regex "1[89][0-9][0-9]"             in a required format
      cedd sample llada --chat "What is a prime number?"                    the answer of a chat model
    """

    model: str | None = field(default=None, metadata=argument("[MODEL]"))
    """A run folder or the name of a model (default: english)."""
    length: int | None = None
    """Tokens per text, with the prompt; may exceed the model's context length. By default the context length, but at
    most 256 tokens after the prompt. With --chat: tokens of the answer, by default 256 or as many as fit."""
    prompt: str = ""
    """Text with which every sample begins."""
    chat: str | None = None
    """Message to answer, for models with a chat template. The answer ends at the end-of-text token."""
    until_end: bool = False
    """End each text before its first end-of-text token."""


@dataclass(frozen=True)
class Infill(SamplingArguments):
    """example: cedd infill "The ____{5} sat on the ____." -n 3

    Fill the blanks of a text of any length. ____ has one token per underscore (at least three underscores), and
    ____{12} has 12 tokens. Given text is preserved byte for byte.

      cedd infill page.txt > filled.txt                                     the blanks of a file
      cedd infill runs/first "The ____{8} was built in 1850."               with your own model
    """

    words: tuple[str, ...] = field(default=(), metadata=argument("[MODEL] TEXT"))
    """TEXT is a text with blanks, a file, or - for standard input (default: -). MODEL is a run folder or the name of a
    model (default: english)."""
    file: Path | None = None
    """Read TEXT from this file."""


@dataclass(frozen=True)
class Correct(ModelArguments):
    """example: cedd correct "I hav a speling mistke"

    Correct the spelling of a text, of files, or of the text and source files in folders. The packaged model english
    corrects words (letters replaced, swapped, missing or extra; words joined or split). Your own model, on a process
    that replaces letters (uniform, roulette), corrects letters that are replaced or swapped. In source code only
    comments and strings are corrected, and a line with "cedd: ignore" is left alone. Everything else is preserved byte
    for byte.
    [tool.cedd.correct] in pyproject.toml sets defaults for a project.

      cedd correct letter.txt --diff                                        what would change
      cedd correct docs src --check                                         the changes in two folders
      cedd correct runs/first "teh cat sat on teh mat"                      with your own model
    """

    words: tuple[str, ...] = field(default=(), metadata=argument("[MODEL] TEXT..."))
    """TEXT is the text to correct, one or more files or folders, or - for standard input (default: -). MODEL is a run
    folder or the name of a model (default: english)."""
    file: Path | None = None
    """Read TEXT from this file."""
    diff: bool = False
    """Print the changes as a unified diff, and exit with code 1 if there are any."""
    in_place: bool = False
    """Write the corrected text back to the files; FILE.bak keeps the original."""
    check: bool = False
    """Print each change as FILE:LINE:COLUMN (with --diff, the diff), and exit with code 1 if there are any."""
    format: Literal["text", "github", "sarif"] | None = None
    """Format of --check: lines, annotations of GitHub Actions, or SARIF 2.1.0."""
    lsp: bool = False
    """Run a language server on standard input and output."""
    ignore_words: Path | None = None
    """File of correct words, one per line."""
    suggest: int | None = None
    """Instead of the text, list each suspicious word with this many candidates and their probabilities."""
    engine: Literal["words", "letters"] | None = None
    """words: correct English words with the model's lexicon (the default if it has one). letters: replace letters
    according to the model's posterior. The options below apply to letters only, except --threshold."""
    rate: float | None = None
    """Expected share of wrong letters (default: the model's own, or 0.05)."""
    t: float | None = None
    """Diffusion time at which the network reads the text (default: the time at which its process has this rate)."""
    threshold: float | None = None
    """Replace a word or letter if p_keep / (p_keep + p_best) is below this, where p_keep is the probability that it is
    correct and p_best that of the most probable replacement; lower values change less. For letters, 0.5 and above
    choose the more probable of the two (default: the model's own; 0.9 for english, 0.3 for english-char)."""
    change: Literal["letters", "all"] | None = None
    """letters: a letter without accent may become another letter of the same case, except in addresses, names with
    digits and code. all: anything may change (default: letters)."""
    passes: int | None = None
    """Largest number of passes over the text; each reads the changes of the previous one (default: the model's own)."""
    reach: int | None = None
    """In each pass, make only the most confident change within this many letters; 0 makes all changes (default: 3)."""
    max_surprise: float | None = None
    """Undo changes where the surrounding text has more than this many nats per letter under the model."""
    swaps: float | None = None
    """Expected share of transposed neighbouring letters; 0 turns the search off (default: 0.002)."""
    steps: int | None = None
    """1: take the most probable token everywhere. Above 1: sample the reverse process in this many steps, without
    transpositions (default: 1)."""
    temperature: float | None = None
    """Sampling temperature with several --steps; 0 takes the most probable token."""
    seed: int | None = None
    """Random seed with several --steps."""


@dataclass(frozen=True)
class Spelling(ModelArguments):
    """example: cedd spelling english-char --data python-manual --blocks 4 --plot fixed.png

    Measure the share of errors that a model fixes in a book, with 95% intervals. The paper's protocol corrupts text by
    the model's own process at t = 0.05 and takes the most probable token at each corrupted position. The user's
    protocol replaces 5% of the letters at unknown positions (or swaps neighbours: --mistakes swaps --rate 0.02) and
    counts what is fixed, missed and broken, by threshold. The example takes about two minutes on two cores; a whole
    book (--blocks 0) takes hours.
    """

    model: str = field(metadata=argument("MODEL"))
    """A run folder or the name of a model."""
    data: str
    """A text file, folder or .jsonl; hf:NAME; or python-manual."""
    protocol: Literal["paper", "user", "both"] = "both"
    """both: those that the model supports (the user's requires a character tokenizer and a process that shuffles)."""
    blocks: int = 50
    """Number of consecutive sequences to test, from the middle of the book; 0 tests the whole book."""
    paper: PaperOptions = field(default_factory=PaperOptions, metadata=INLINE)
    user: UserOptions = field(default_factory=UserOptions, metadata=INLINE)
    plot: Path | None = None
    """Plot letters fixed against letters broken (user's protocol) to this .png, .pdf or .svg file."""
    seed: int = 0
    """Seed of the errors and of sampling."""


@dataclass(frozen=True)
class FrontierOptions:
    """The sweep of --frontier, one cell per combination."""

    frontier: Path | None = None
    """Sweep the options below and compare the results at equal entropy. Texts and scores are kept in this folder: the
    same command resumes an interrupted sweep, and without a MODEL the existing texts are scored."""
    samplers: tuple[str, ...] = ("analytic",)
    """Samplers to compare, by the names of --sampler. Invalid combinations of model and sampler are left out."""
    step_counts: tuple[int, ...] = (8, 16, 32, 64, 128, 1024)
    """Numbers of steps, one curve each."""
    temperatures: tuple[float, ...] = (1.0, 0.9, 0.8)
    """Temperatures, the points of a curve."""
    top_ps: tuple[float, ...] = (1.0,)
    """Values of top-p, the points of a curve, instead of temperatures."""
    text: str | None = None
    """Also score passages of this text: a file, folder or .jsonl, or python-manual."""
    entropy: float | None = None
    """Entropy in nats at which curves are compared; by default that of --text, or the middle of the range that all
    curves reach."""
    draw_only: bool = False
    """Generate the texts without scoring them; another command can score them later."""
    plot: Path | None = None
    """Plot the curves to this .png, .pdf or .svg file."""


@dataclass(frozen=True)
class Genppl(ModelArguments):
    """example: cedd genppl runs/quickstart -n 64 --out samples.jsonl

    Compute generative perplexity, the perplexity of a model's samples under another language model, by both common
    definitions. The default judge, gpt2-large, is downloaded once. (The example works after cedd quickstart.)

      cedd genppl --samples samples.jsonl --judge path/to/another           score the same samples again
      cedd genppl runs/first runs/second --frontier curves --samplers analytic first-hitting -n 64 --plot curves.png
                                                                            perplexity against entropy
    """

    models: tuple[str, ...] = field(default=(), metadata=argument("[MODEL...]"))
    """A run folder or the name of a model; several with --frontier, none with --samples."""
    judge: str = "openai-community/gpt2-large"
    """The judge: a causal model (a name on the hub, a folder or a .gguf file; requires pip install 'cedd[hub]') or a
    run folder."""
    gguf_file: str | None = None
    """File to read, if the judge's folder or repository contains several GGUF files."""
    n: int = 256
    """Number of samples; the paper draws 3840."""
    length: int | None = None
    """Tokens per sample; by default the model's context length."""
    options: SamplingOptions = field(default_factory=lambda: SamplingOptions(steps=1024), metadata=INLINE)
    sweep: FrontierOptions = field(default_factory=FrontierOptions, metadata=INLINE)
    samples: Path | None = None
    """Score these samples instead of drawing new ones."""
    out: Path | None = None
    """File for the samples; by default samples.jsonl in the run's folder, or NAME-samples.jsonl in the current folder
    for a packaged model."""
    judge_batch: int = 8
    """Samples per batch of the judge."""
    seed: int = 0
    """Seed of the samples."""


@dataclass(frozen=True)
class Import(CommonArguments):
    """example: cedd import kuleshov-group/mdlm-owt --out mdlm-owt

    Convert a published network: SEDD, MDLM, SDTT, BD3-LM, DUO, UDLM, GIDD, LLaDA, Dream, SDAR, DiffuGPT or
    DiffuLLaMA, or an autoregressive one (Llama, SmolLM2, Qwen2, Qwen3), from its config.json and safetensors, or
    from a GGUF file. Every command accepts the resulting model folder. Pickles are errors, and no code from the
    repository is run.
    """

    name: str = field(metadata=argument("MODEL"))
    """owner/name on the hub, a folder, or a GGUF file."""
    out: Path
    """The folder to write; it must not exist."""
    tokenizer: str | None = None
    """gpt2, bert, a folder with a tokenizer, or none (texts are then token ids). By default the tokenizer in the
    folder; without one, that of the published networks if the vocabulary sizes agree."""
    mask_id: int | None = None
    """The id of the mask in the original network, if neither its config.json nor its tokenizer has it."""
    revision: str | None = None
    """Branch, tag or commit on the hub (SDTT's students are branches)."""
    weights: Literal["float32", "bf16", "int8", "deflated"] = "float32"
    """Storage of weights. Only float32 is exact; it keeps bfloat16 and float16 weights as they are."""
    device: str = field(default="cpu", kw_only=True)
    """Device on which weights are read: auto, cpu, cuda or cuda:1."""
    seed: int = 0
    """Has no effect; accepted by every command."""


@dataclass(frozen=True)
class Export(ModelArguments):
    """example: cedd export runs/quickstart --out my-model --weights int8 --calibrate runs/quickstart/held-out.txt

    Write a run as a model folder to share: config.json, weights, tokenizer and a model card (README.md). The result is
    a model folder that every command accepts, and can be exported again. (The example works after cedd quickstart.)

      cedd spelling my-model --data book.txt --json > book.json             measure it, then
      cedd export my-model --out my-model --results book.json               add the results to its card
    """

    run: str = field(metadata=argument("MODEL"))
    """A run folder or the name of a model."""
    out: Path
    """The folder to write, new or empty; it may be MODEL itself if that was exported before."""
    force: bool = False
    """Also write into a folder with other contents. Model files in it are replaced, and a run in it cannot be
    resumed."""
    weights: Literal["float32", "bf16", "int8", "deflated"] | None = None
    """Storage of weights: 4, 2, 1 or 0.8 bytes each (default: float32 for a run, otherwise unchanged)."""
    title: str | None = None
    """The model's name on its card; by default the folder's name."""
    about: str | None = None
    """What it was trained on, in words, for the card."""
    command: str | None = None
    """Command that trained it, for the card; by default the run's cedd train command."""
    results: tuple[Path, ...] = ()
    """Files with results, as printed by commands with --json; they appear on the card under their file names."""
    calibrate: Path | None = None
    """Choose the defaults of correction on this text, which the model must not have been trained on."""
    broken: float = 0.0025
    """Largest share of correct letters that calibration may break."""
    seed: int = 0
    """Seed of the letters that calibration replaces."""
    correction: tuple[str, ...] = ()
    """Defaults of correction as NAME=VALUE (threshold=0.3 passes=2), for options of cedd correct. They take precedence
    over calibration, and calibration over MODEL's own. Results that were measured with other defaults are removed from
    the card."""
    words: str | None = None
    """Packaged model whose lexicon and network `cedd correct` uses for this model: english."""
    sampling: tuple[str, ...] = ()
    """Defaults of sampling as NAME=VALUE: steps, temperature, top_p."""
    chosen: str | None = None
    """How the defaults were chosen, in words, for the card; by default a description of the calibration."""


@dataclass(frozen=True)
class Report(ModelArguments):
    """example: cedd report runs/quickstart

    Write an HTML page about a run: learning curve, bound and simple baselines, samples and corrections. Several runs
    are compared with paired intervals. (The example works after cedd quickstart.)

      cedd report runs/first runs/second --out comparison.html              a comparison
      cedd report mdlm-owt --data wikitext2 --wrap trained                  any model, on a text of your choice
    """

    runs: tuple[Path, ...] = field(metadata=argument("MODEL..."))
    """Run folders; with --data also exported and imported models."""
    data: str | None = None
    """Text to measure on, in any form that cedd evaluate takes, instead of the run's held-out text. The page then has
    no learning curve."""
    wrap: Wrap = "none"
    """Wrapping of --data, as for cedd evaluate."""
    out: Path | None = None
    """File of the page (default: report.html, with the figures in report.json, or comparison.html, in the folder of
    the first MODEL)."""
    tokens: Path | None = None
    """File written by cedd evaluate --tokens; its tokens are shown coloured by cost."""
    effort: ReportOptions = field(default_factory=ReportOptions, metadata=INLINE)
    seed: int = 0
    """Random seed."""


@dataclass(frozen=True)
class Serve(ModelArguments):
    """example: cedd serve --open

    Serve a web page and an HTTP API for generation (/v1/completions, compatible with OpenAI's), infilling (/infill) and
    correction (/correct). By default only this machine can connect. Requires pip install 'cedd[serve]'. Ctrl-C stops
    the server.
    """

    runs: tuple[str, ...] = field(default=(), metadata=argument("[MODEL...]"))
    """Run folders or names of models (default: the packaged models)."""
    port: int = 8008
    """Port; 0 picks a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts connections from other machines."""
    open: bool = False
    """Open the page in a browser."""
    allow_host: tuple[str, ...] = ()
    """Further host names under which clients reach the server, for example through a proxy."""
    json: bool = False
    """Print the address and the models as one JSON object."""
    log_texts: bool = False
    """Also log the texts of requests."""
    lookup_processes: int | None = None
    """Processes that look up words for corrections (default: one per core, up to 4); 0: the server's own process."""
    seed: int | None = None
    """Seed of requests without one; by default each gets a random seed."""
    limits: Limits = field(default_factory=Limits, metadata=INLINE)


@dataclass(frozen=True)
class Bench(CommonArguments):
    """example: cedd bench train --preset char --vocab 100 --shapes 16x128 --steps 5

    Time training steps or sampling, compared with a plain textbook implementation.
    """

    suite: Literal["train", "sample"] = field(metadata=argument("{train,sample}"))
    """What to time."""
    preset: Literal["tiny", "char", "english-char", "small", "medium"] = "small"
    """Size of the network."""
    architecture: Literal["transformer", "llama"] = "transformer"
    """The network (train): the preset's transformer, or a Llama-type network as cedd adapt trains it (small: the sizes
    of SmolLM2-135M, whose vocabulary is 49152)."""
    shapes: tuple[str, ...] | None = None
    """Sequences x tokens, one row each (default: 512x128 64x1024 32x128 for train, 64x128 for sample)."""
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
    """train: steps to time (default: 20); sample: steps of the sampler (default: 1024)."""
    warmup: int = 8
    """Training steps before timing starts."""
    compile: Literal["auto", "off", "on", "graphs"] = "auto"
    """torch.compile, optionally with CUDA graphs (auto: graphs on CUDA, off elsewhere)."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Precision of matrix products in training (auto: bf16 if the hardware supports it; for the textbook
    implementation only on CUDA)."""
    seed: int = 0
    """Seed of the random tokens and weights."""


@dataclass(frozen=True)
class Theory:
    """example: cedd theory --vocab 3 --length 2

    Compute both sides of every claim of the paper by enumerating a small space, with random networks. The exit code is
    1 if a claim fails.
    """

    vocab: int = 3
    """Vocabulary size V, from 2 to 10; (V+1)^L must not exceed 64."""
    length: int = 2
    """Sequence length L."""
    seed: int = 0
    """Seed of the random data and networks."""
    device: str = "auto"
    """Has no effect; accepted by every command. Everything is computed on the CPU in float64."""
    json: bool = False
    """Print one JSON object instead of the table."""


@dataclass(frozen=True)
class Completion:
    """example: cedd completion bash

    Print a script that completes cedd's commands, options, choices and file names. For zsh, also add the line
    source ~/.cedd.zsh to ~/.zshrc.

      cedd completion bash > ~/.local/share/bash-completion/completions/cedd
      cedd completion zsh > ~/.cedd.zsh
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

TRAIN_HELP = """usage: cedd train [PRESET] [OPTIONS]

example: cedd train char --data python-manual --out runs/first

Train a network on a text file, a folder of text files, a .jsonl, a hub data set (hf:NAME) or python-manual (Python's
manual). Options override the settings of the preset; cedd train char --help lists them. With --from, PRESET
defaults to char. --seed, --device and --json work as for every command. The same command resumes an interrupted run.

  cedd train char --data book.txt --out runs/second --method cedd --process uniform --batch.size 64 --steps 5000
  cedd train --from english-char --data book.txt --out runs/third           start from another model's weights
  torchrun --nproc-per-node 8 -m cedd train small --out runs/fourth         on eight GPUs

presets:
__PRESETS__"""


ADAPT = "cedd adapt MODEL"
ADAPT_HELP = """Continue training an autoregressive model as a diffusion model, in minutes on one GPU. MODEL is a run
with the method ar, or a Llama, SmolLM2, Qwen2 or Qwen3 network from cedd import. The result keeps its network and
tokenizer. The same command resumes an interrupted run.

  cedd adapt smollm2 --data corpus --out runs/full --adapt.anneal 0.5          full attention, introduced gradually
  cedd adapt smollm2 --data corpus --out runs/blocks --block 4                 autoregressive over blocks of 4 tokens

These are the most useful options. cedd train adapt --help lists the others."""
_LISTED_BY_ADAPT = (
    *("data", "out", "method", "block", "length", "steps", "seed", "device", "json"),
    *("optimizer.rate", "batch.size"),
)


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
    return _parse_train(["adapt", *start, *words], ADAPT)


def _parse_train(words: list[str], prog: str | None = None) -> Train:
    """The preset's configuration with the changes of the command line."""
    if words[:1] in (["-h"], ["--help"]):
        width = max(map(len, PRESETS))
        presets = "\n".join(f"  {name:<{width}}  {summary}" for name, (summary, _) in PRESETS.items())
        print(TRAIN_HELP.replace("__PRESETS__", presets))
        raise SystemExit(0)
    name, rest = (words[0], words[1:]) if words else ("", [])
    if name.startswith("-") and any(word.partition("=")[0] == "--from" for word in words):
        # the model determines most settings
        name, rest = "char", words
    if not name or name.startswith("-"):
        raise ValueError(f"the preset is missing; use one of {', '.join(PRESETS)}, or --from MODEL")
    if name not in PRESETS:
        raise ValueError(f"invalid preset: {name!r}{suggestion(name, PRESETS)}")
    summary, config = PRESETS[name]
    split = (word.split("=", 1) if word.startswith(("--from=", "--out=")) else [word] for word in rest)
    said = dict(itertools.pairwise(itertools.chain.from_iterable(split)))
    if "--from" in said:
        config = starting_from(config, said["--from"], said.get("--out"))
    parent = config
    if (name == "adapt" and "--from" in said) or _asks_for_diffusion(config, rest):
        # the model determines all settings except its new method and process
        config = replace(config, method=PRESETS["adapt"][1].method, process=PRESETS["adapt"][1].process)
    names_process = any(word.startswith("--process") for word in rest)
    rest, config = _with_architecture(*_with_process(rest, config))
    called = f"cedd train {name}" if prog is None else prog
    start = " --from smollm2" if name == "adapt" and prog is None else ""
    example = f"{called.replace('MODEL', 'smollm2')}{start} --data {config.data} --out runs/first"
    description = f"example: {example}\n\n" + (ADAPT_HELP if called == ADAPT else f"Train {summary}.")

    def listed(option: CommandOption) -> bool:
        name = option.name.removeprefix("--")
        return called != ADAPT or name in _LISTED_BY_ADAPT or name.startswith("adapt.")

    default = Train(config)
    parsed = parser.parse(Train, rest, prog=called, description=description, default=default, is_listed=listed)
    if name == "adapt" and parsed.config.start is None:
        raise ValueError("cedd train adapt needs an autoregressive model: --from MODEL")
    if name == "adapt":
        _check_parent(parent, said.get("--out"))
    if not names_process:
        parsed = replace(parsed, config=with_alias(parsed.config))
    _refuse_unused_settings(parsed.config, config)
    return parsed


def _check_parent(parent: TrainConfig, out: str | None) -> None:
    """Refuse to adapt a model that is not autoregressive, unless the run in the folder `out` started from it."""
    assert parent.start is not None
    if not _is_autoregressive(parent) and begun_from(parent.start, out) is None:
        raise ValueError(
            f"{parent.start} is not autoregressive (its method is {parent.method}), so there is nothing to adapt; "
            f"continue its training with: cedd train --from {parent.start}"
        )


def _is_autoregressive(config: TrainConfig) -> bool:
    from cedd.methods import get_method  # imports torch

    return not get_method(config.method).dynamics.noisy


def _asks_for_diffusion(config: TrainConfig, words: list[str]) -> bool:
    """Whether a command line has a block or a process for a model that is autoregressive, which has neither."""
    asks = any(word.partition("=")[0] == "--block" or word.startswith("--process") for word in words)
    return asks and config.start is not None and _is_autoregressive(config)


def _refuse_unused_settings(config: TrainConfig, preset: TrainConfig) -> None:
    """Raise an error if a setting that the command line changes has no effect together with the others."""
    before = flat(preset)
    optional = [name for name in before if "." in name or name == "label_dropout"]
    changed = [name for name, value in flat(config).items() if name in optional and value != before[name]]
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
