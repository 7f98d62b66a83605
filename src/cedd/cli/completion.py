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

from cedd.cli import COMMANDS, main
from cedd.cli.arguments import Completion
from cedd.data.corpora import PYTHON_MANUAL
from cedd.methods import METHODS
from cedd.models.locate import pretrained_names
from cedd.process import PROCESSES
from cedd.samplers import GRIDS, SAMPLERS
from cedd.schedules import SCHEDULES

_OPTION = re.compile(r"(--?[a-z][\w.-]*)(?: ((?:\{[^}]*\}|[^-\s,{])[^\s,]*))?")
_CHOICES = re.compile(r"\{([^{}]+)\}")
_RUN = re.compile(r"\bRUN\b")
_WIDE = "400"  # columns: no line of a help is broken

ALSO = {
    "--data": (PYTHON_MANUAL,),
    "--device": ("auto", "cpu", "cuda"),
    "--method": tuple(METHODS),
    "--process.name": tuple(PROCESSES),
    "--process.schedule.name": tuple(SCHEDULES),
    "--sampler": SAMPLERS,
    "--grid": tuple(GRIDS),
}
"""Words for options that no help lists as choices: there may be others, or they are rows of a table."""


def run(arguments: Completion) -> int:
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
    takes_runs: bool
    """What stands first is a model: a folder too, and where there may be several, each of them."""
    options: Mapping[str, Sequence[str]]
    flags: frozenset[str]
    """Options that take no value."""
    files: frozenset[str]
    """Options whose value may be the name of a file."""


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
    runs = _RUN.search(usage) is not None
    first = _choices(usage) or (pretrained_names() if runs else ())
    options = read_options(text) or read_options(help_text(command, *first[:1]))
    values = {name: _choices(value) or ALSO.get(name, ()) for name, value in options.items()}
    flags = frozenset(name for name, value in options.items() if not value)
    files = frozenset(
        name for name, value in options.items() if "PATH" in value or ("STR" in value and not values[name])
    )
    return Usage(command, first, runs, values, flags, files | ({"--data"} & options.keys()))


def _choices(text: str) -> list[str]:
    """The words of the first {braces}."""
    found = _CHOICES.search(text)
    return [word for word in found[1].split(",") if word != "None"] if found else []


def read_options(text: str) -> dict[str, str]:
    """The options of a help, each with what it says of the value, such as INT or {auto,off}; "" for a flag."""
    parts = (part.strip() for line in text.splitlines() if "│" in line for part in line.split("│"))
    heads = (re.split(r"\s{2,}", part)[0] for part in parts if part.startswith("-"))
    return {name: value for head in heads for name, value in _OPTION.findall(head)}


# ----------------------------------------------------------------------------------------------------------------
# Scripts

_BASH = """# bash completion of cedd, made by `cedd completion bash`
_cedd() {
  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}"
  local words="" files=""
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
        *)
          case "$command $prev" in
__FIRST__
          esac ;;
        esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  if [ -n "$files" ]; then
    compopt -o filenames 2>/dev/null
    COMPREPLY+=($(compgen -f -- "$cur"))
  fi
}
# Where none of its words fit, the shell completes file names.
complete -o default -F _cedd cedd"""


def bash_script(usages: Sequence[Usage]) -> str:
    """For bash, and for zsh, which can read it."""

    def case(usage: Usage, previous: str, words: Sequence[str], files: bool) -> str:
        return f'            "{usage.command} {previous}") words="{" ".join(words)}"{" files=yes" * files} ;;'

    first = [case(u, u.command, u.first, u.takes_runs) for u in usages if u.first]
    values = [case(u, name, words, name in u.files) for u in usages for name, words in u.options.items() if words]
    options = [f'            {u.command}) words="{" ".join(u.options)}" ;;' for u in usages]
    script = _BASH.replace("__COMMANDS__", " ".join(u.command for u in usages))
    for place, cases in (("__FIRST__", first), ("__VALUES__", values), ("__OPTIONS__", options)):
        script = script.replace(place, "\n".join(cases))
    return script


def zsh_script(usages: Sequence[Usage]) -> str:
    """Zsh runs bash's by a part that comes with it."""
    first, rest = bash_script(usages).split("\n", 1)
    loading = "autoload -U +X compinit bashcompinit\ncompinit\nbashcompinit"
    return f"{first.replace('bash', 'zsh')}\n{loading}\n{rest}"


_FISH = """# fish completion of cedd, made by `cedd completion fish`
function __cedd_on -d "Whether the command is this one"
    set -l words (commandline -opc)
    test (count $words) -ge 2; and test "$words[2]" = $argv[1]
end
function __cedd_first -d "Whether the word after this command is being written"
    __cedd_on $argv[1]; and test (count (commandline -opc)) -eq 2
end
function __cedd_command -d "Whether the command is being written"
    test (count (commandline -opc)) -eq 1
end
complete -c cedd -f
complete -c cedd -n __cedd_command -l help
complete -c cedd -n __cedd_command -l version"""


def fish_script(usages: Sequence[Usage]) -> str:
    """A line a command and a line an option; file names where there may be any, and only there."""
    named = "complete -c cedd -n __cedd_command -a"
    lines = [_FISH, *(f"{named} {usage.command} -d {shlex.quote(COMMANDS[usage.command])}" for usage in usages)]
    for usage in usages:
        here = f"complete -c cedd -n '__cedd_on {usage.command}'"
        if usage.takes_runs:
            lines.append(f"{here} -F -a '{' '.join(usage.first)}'")
        elif usage.first:
            lines.append(f"complete -c cedd -n '__cedd_first {usage.command}' -a '{' '.join(usage.first)}'")
        lines += [f"{here} {_fish_option(usage, name)}" for name in usage.options]
    return "\n".join(lines)


def _fish_option(usage: Usage, name: str) -> str:
    """-l or -s: how the option is written; -r: it takes a value, or a file's name; -x: a value that is no file."""
    dashes, bare = ("-l", name[2:]) if name.startswith("--") else ("-s", name[1:])
    takes = "" if name in usage.flags else " -r -F" if name in usage.files else " -x"
    words = usage.options[name]
    return f"{dashes} {bare}{takes}" + (f" -a '{' '.join(words)}'" if words else "")
