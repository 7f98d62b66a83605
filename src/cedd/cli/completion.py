"""`cedd completion`: a completion script for bash and zsh, with commands, options, choices and file names.

The script is made from the parsers and contains all words, so that completing does not start Python.
"""

from __future__ import annotations

from collections.abc import Sequence

from cedd.cli import COMMANDS
from cedd.cli.arguments import ARGUMENTS, Completion
from cedd.cli.parser import options_of
from cedd.data.corpora import PYTHON_MANUAL
from cedd.methods import METHODS
from cedd.models.locate import pretrained_names
from cedd.process import PROCESSES
from cedd.samplers import GRIDS, SAMPLERS
from cedd.schedules import SCHEDULES
from cedd.training.config import PRESETS

KNOWN = {
    "--data": (PYTHON_MANUAL,),
    "--device": ("auto", "cpu", "cuda"),
    "--method": tuple(METHODS),
    "--process": tuple(PROCESSES),
    "--process.schedule": tuple(SCHEDULES),
    "--sampler": tuple(SAMPLERS),
    "--grid": tuple(GRIDS),
}
"""Suggested values of options that also accept other values."""

SCRIPT = """# Completion of cedd for bash and zsh, made by `cedd completion`
[ -n "$ZSH_VERSION" ] && autoload -U +X compinit bashcompinit && compinit && bashcompinit
_cedd() {
  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="__COMMANDS__ --help --version"
  else
    case "$command $prev" in
__VALUES__
      *)
        case "$cur" in
          -*) case "$command" in
__OPTIONS__
          esac ;;
          *) case "$command $prev" in
__FIRST__
          esac ;;
        esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
# Where no word fits, the shell completes file names.
complete -o default -o bashdefault -F _cedd cedd"""


def run(arguments: Completion) -> int:
    """Print the script."""
    print(script())
    return 0


def script() -> str:
    """The completion script for all commands."""
    options, values, first = list[str](), list[str](), list[str]()
    for command, kind in ARGUMENTS.items():
        table = list(options_of(kind))
        named = {one.name: one.choices or KNOWN.get(one.name, ()) for one in table if not one.positional}
        options.append(_case(command, [*named, "--help"]))
        values += [_case(f"{command} {name}", words) for name, words in named.items() if words]
        models = () if command == "import" else pretrained_names()
        first += [_case(f"{command} {command}", one.choices or models) for one in table if one.positional]
    first.append(_case("train train", tuple(PRESETS)))
    parts = {"COMMANDS": [" ".join(COMMANDS)], "VALUES": values, "OPTIONS": options, "FIRST": first}
    found = SCRIPT
    for name, lines in parts.items():
        found = found.replace(f"__{name}__", "\n".join(lines))
    return found


def _case(pattern: str, words: Sequence[str]) -> str:
    return f'            "{pattern}") words="{" ".join(words)}" ;;'
