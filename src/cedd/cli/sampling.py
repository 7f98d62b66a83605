"""Shared parts of the commands that sample: printing texts, and the live view."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from rich.live import Live
from rich.text import Text
from torch import Tensor

from cedd.cli import UserError, with_current_folder
from cedd.cli.arguments import PAGE_SUFFIXES, ConstraintOptions, SamplingArguments, ViewOptions
from cedd.cli.console import PlainConsole
from cedd.cli.correct import for_terminal, write_output
from cedd.cli.progress import progress_bar
from cedd.cli.unused import refuse_unused
from cedd.constraints import Language, choice, json_schema, regex
from cedd.data.tokenizers import MASK_CHARACTER
from cedd.models.loaded_model import LoadedModel
from cedd.names import suggestion
from cedd.samplers import GRIDS, Callback, SamplingOptions, get_sampler
from cedd.samplers.particle_set import ParticleSet
from cedd.samplers.random_numbers import check_count
from cedd.samplers.registry import named_sampler
from cedd.samplers.sampler import OWN_OPTIONS
from cedd.storage import check_writable, read_text
from cedd.tasks.template import Template
from cedd.tasks.trajectory import Trajectory

MOST_SEEN = 1 << 12
"""Largest number of tokens of a text whose states are recorded; each step that changes the text stores all tokens."""


def check_names(options: SamplingOptions) -> None:
    """Refuse a sampler or a time grid that does not exist, before a model is loaded; package:NAME is imported."""
    if isinstance(options.sampler, str):
        with_current_folder(options.sampler)
        named_sampler(options.sampler)
    if isinstance(options.grid, str) and options.grid not in GRIDS:
        raise UserError(f"--grid: invalid choice: {options.grid!r}{suggestion(options.grid, GRIDS)}")


def refuse_unused_sampling(model: LoadedModel, options: SamplingOptions, usual: SamplingOptions) -> None:
    """Refuse options that have no effect on this model's texts."""
    sampler = get_sampler(options.sampler, model.method)
    later = "sampler" if options.sampler == sampler.name else "", "corrector"  # refused later, with a reason
    unused = [name for name in sampler.unused if name not in later]
    unused += [name for name in OWN_OPTIONS if name not in sampler.own_options]
    refuse_unused(options, unused, f"with the sampler {sampler.name} (method {model.method.name})", usual)


def check(arguments: SamplingArguments) -> None:
    """Refuse invalid options, and files that cannot be written, before the model is loaded."""
    check_names(arguments.options)
    check_count(arguments.n)
    check_writable(arguments.view.html, PAGE_SUFFIXES)
    check_writable(arguments.view.gif, (".gif",))


def constraints_of(options: ConstraintOptions) -> list[Language]:
    """The languages of the options, compiled for texts before a model is loaded."""
    given = {
        "--regex": options.regex is not None,
        "--json-schema": options.json_schema is not None,
        "--choices": options.choices is not None,
    }
    names = [name for name, there in given.items() if there]
    if len(names) > 1:
        raise UserError(f"{names[1]} and {names[0]} cannot be combined; use one of them")
    made = [regex(pattern) for pattern in options.regex or ()]
    if options.json_schema is not None:
        made = [json_schema(read_text(options.json_schema).strip())]
    if options.choices is not None:
        if not options.choices:
            raise UserError("--choices needs at least one text")
        made = [choice(options.choices)]
    for language in made:
        _ = language.automaton  # raises a ValueError if no text satisfies it
    return made


def show(
    arguments: SamplingArguments,
    loaded: LoadedModel,
    template: Template,
    title: str,
    named: str,
    between: str,
    end: str = "\n",
    **facts: object,
) -> None:
    """Fill the template n times with the requested live view, print the texts or JSON, and write the files."""
    refuse_unused_sampling(loaded, arguments.options, SamplingOptions())
    if arguments.options.particles is not None and not template.spans:
        raise UserError("--particles needs a constraint: --regex, --json-schema or --choices")
    view, seen = arguments.view, is_seen(arguments.view)
    if seen and template.width > MOST_SEEN:
        raise UserError(f"--watch, --html and --gif show at most {MOST_SEEN:,} tokens; the text has {template.width:,}")
    trajectory = Trajectory(template.tokenizer, template.characters if seen else {})
    if view.gif is not None:
        trajectory.check_lines(template.ids.numpy(), template.given.numpy())
    with _watching(view, trajectory, arguments.n, loaded.length, quiet=arguments.json) as callback:
        particles = list[ParticleSet]()
        report = None if arguments.options.particles is None else particles.append
        options = replace(arguments.options, seed=arguments.seed, callback=callback, on_particles=report)
        texts = template.fill(loaded, arguments.n, options)
    if arguments.json:
        names = ("log_normalizer", "effective_sample_size")
        own = {"particles": [{name: getattr(one, name) for name in names} for one in particles]} if particles else {}
        print(json.dumps({named: texts, **facts, **own, "seed": arguments.seed}))
    else:
        write_output(for_terminal(between.join(texts)) + end)
        for one in particles:
            print(
                f"log p(constraint) = {one.log_normalizer:.2f}; effective sample size {one.effective_sample_size:.1f} "
                f"of {len(one.log_weights)}",
                file=sys.stderr,
            )
    if view.html is not None:
        trajectory.save_html(view.html, title)
    if view.gif is not None:
        trajectory.save_gif(view.gif)


def is_seen(view: ViewOptions) -> bool:
    """Whether the states between noise and text are shown or recorded."""
    return view.watch or view.html is not None or view.gif is not None


@contextmanager
def _watching(
    view: ViewOptions, trajectory: Trajectory, n: int, reach: int, *, quiet: bool
) -> Generator[Callback | None]:
    """A callback for a sampler of n texts: recording, the live view, or a progress bar without it; None if there is
    nothing to show."""
    callbacks = list[Callback]()
    with ExitStack() as opened:
        if is_seen(view):
            callbacks.append(trajectory)
        if view.watch and not quiet and (console := PlainConsole()).is_terminal:
            # Transient: the command prints the final text itself.
            live = Live(
                get_renderable=lambda: last_frame(trajectory, reach),
                console=console,
                auto_refresh=False,
                transient=True,
            )
            opened.enter_context(live)
            callbacks.append(lambda step, t, x: live.refresh())
        if not view.watch and not quiet and PlainConsole(stderr=True).is_terminal:
            callbacks.append(_moving(opened.enter_context(progress_bar("sampling, %", True)), n))

        def callback(step: int, t: float, x: Tensor) -> None:
            for one in callbacks:
                one(step, t, x)

        yield callback if callbacks else None


def _moving(progress: Callable[[float, float], None], n: int) -> Callback:
    """A callback that moves a progress bar by the elapsed share of the time of n sequences."""
    done = rows = 0

    def callback(step: int, t: float, x: Tensor) -> None:
        nonlocal done, rows
        if step == 0:  # a new part of the n begins
            done, rows = done + rows, len(x)
        progress(100 * min(1.0, (done + rows * (1 - t)) / n), 100)

    return callback


def last_frame(trajectory: Trajectory, reach: int) -> Text:
    """The latest state in colours: masks dim, changed tokens bright. Of a text with more than `reach` tokens, those
    within this distance of changed tokens."""
    text, last = Text(), len(trajectory.frames) - 1
    if last < 0:
        return text
    ids, changed = trajectory.frames[last], trajectory.changed(last)
    places = changed.nonzero()[0] if len(ids) > reach and changed.any() else [0]
    shown = slice(max(0, places[0] - reach), places[-1] + reach)
    for piece, new in zip(trajectory.pieces(ids)[shown], changed[shown], strict=True):
        text.append(piece, style="bright_black" if piece == MASK_CHARACTER else "bold black on yellow" if new else "")
    text.append(f"\n\nt = {trajectory.times[last]:.3f}\n", style="bright_black")
    return text
