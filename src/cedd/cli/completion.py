"""`cedd completion`: a script with which a shell completes commands, options, their choices and file names.

The script is made from what every command says in its --help, so it knows neither more nor less. It holds all words
itself: completing runs no Python.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from cedd.cli import COMMANDS, main
from cedd.data.corpora import PYTHON_MANUAL
from cedd.objectives.methods import METHODS

_OPTION = re.compile(r"(--?[a-z][\w.-]*)(?: ((?:\{[^}]*\}|[^-\s,{])[^\s,]*))?")
_CHOICES = re.compile(r"\{([^{}]+)\}")
_WIDE = "400"  # columns: no line of a help is broken

ALSO = {"--data": (PYTHON_MANUAL,), "--device": ("auto", "cpu", "cuda"), "--method": tuple(METHODS)}
"""Words for options that take other values too, which no help lists as choices."""


@dataclass(frozen=True)
class Arguments:
    """example: cedd completion bash

    Print a script that completes cedd's commands, options, choices and file names. To install it:

    bash: cedd completion bash > ~/.local/share/bash-completion/completions/cedd
    zsh:  cedd completion zsh > ~/.cedd.zsh, and the line: source ~/.cedd.zsh in ~/.zshrc
    fish: cedd completion fish > ~/.config/fish/completions/cedd.fish
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]


def run(arguments: Arguments) -> int:
    """Print the script."""
    scripts = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
    print(scripts[arguments.shell]([read_usage(name) for name in COMMANDS]))
    return 0


# ----------------------------------------------------------------------------------------------------------------
# What the commands say of themselves


@dataclass(frozen=True)
class Usage:
    """A command's words: what may stand first, and its options with the values that are known of each."""

    command: str
    first: Sequence[str]
    options: Mapping[str, Sequence[str]]
    flags: frozenset[str]
    """Options that take no value."""


def help_text(*words: str) -> str:
    """What `cedd WORDS --help` prints, in lines that are not broken."""
    printed, before = io.BytesIO(), os.environ.get("COLUMNS")
    stream = io.TextIOWrapper(printed, encoding="utf-8", write_through=True)
    os.environ["COLUMNS"] = _WIDE
    try:
        with contextlib.redirect_stdout(stream), contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return printed.getvalue().decode()


def read_usage(command: str) -> Usage:
    """The words of a command; where only what stands first has options, all of these have the same."""
    text = help_text(command)
    usage = next(line for line in text.splitlines() if line.startswith("usage:"))
    first = found[1].split(",") if (found := _CHOICES.search(usage)) else []
    options = read_options(text) or read_options(help_text(command, first[0]))
    values = {
        name: [word for word in choices[1].split(",") if word != "None"] if choices else ALSO.get(name, ())
        for name, value in options.items()
        for choices in [_CHOICES.search(value)]
    }
    return Usage(command, first, values, frozenset(name for name, value in options.items() if not value))


def read_options(text: str) -> dict[str, str]:
    """The options of a help, each with what it says of the value, such as INT or {auto,off}; "" for a flag."""
    parts = (part.strip() for line in text.splitlines() if "│" in line for part in line.split("│"))
    heads = (re.split(r"\s{2,}", part)[0] for part in parts if part.startswith("-"))
    return {name: value for head in heads for name, value in _OPTION.findall(head)}


# ----------------------------------------------------------------------------------------------------------------
# Scripts

_BASH = """# bash completion of cedd, made by `cedd completion bash`
_cedd() {
  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="__COMMANDS__ --help --version"
  else
    case "$command $prev" in
__VALUES__
      *)
        case "$cur" in -*)
          case "$command" in
__OPTIONS__
          esac ;;
        esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  if [ "$prev" = --data ]; then COMPREPLY+=($(compgen -f -- "$cur")); fi
}
# Where none of its words fit, the shell completes file names.
complete -o default -F _cedd cedd"""


def bash_script(usages: Sequence[Usage]) -> str:
    """For bash, and for zsh, which can read it."""
    values = [f'      "{u.command} {u.command}") words="{" ".join(u.first)}" ;;' for u in usages if u.first]
    values += [
        f'      "{u.command} {name}") words="{" ".join(words)}" ;;'
        for u in usages
        for name, words in u.options.items()
        if words
    ]
    options = [f'            {u.command}) words="{" ".join(u.options)}" ;;' for u in usages]
    script = _BASH.replace("__COMMANDS__", " ".join(u.command for u in usages))
    return script.replace("__VALUES__", "\n".join(values)).replace("__OPTIONS__", "\n".join(options))


def zsh_script(usages: Sequence[Usage]) -> str:
    """Zsh runs bash's by a part that comes with it."""
    first, rest = bash_script(usages).split("\n", 1)
    loading = "autoload -U +X compinit bashcompinit\ncompinit\nbashcompinit"
    return f"{first.replace('bash', 'zsh')}\n{loading}\n{rest}"


def fish_script(usages: Sequence[Usage]) -> str:
    """A line an option."""
    lines = ["# fish completion of cedd, made by `cedd completion fish`"]
    lines += [
        f"complete -c cedd -f -n __fish_use_subcommand -a {name} -d {shlex.quote(summary)}"
        for name, summary in COMMANDS.items()
    ]
    for usage in usages:
        here = f"complete -c cedd -n '__fish_seen_subcommand_from {usage.command}'"
        if usage.first:
            lines.append(f"{here} -a '{' '.join(usage.first)}'")
        for name, words in usage.options.items():
            dashes, bare = ("-l", name[2:]) if name.startswith("--") else ("-s", name[1:])
            takes = "" if name in usage.flags else " -r"
            lines.append(f"{here} {dashes} {bare}{takes}" + (f" -a '{' '.join(words)}'" if words else ""))
    return "\n".join(lines)
