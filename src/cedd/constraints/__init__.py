"""Constraints: languages that samples stay in, as automata, and the law of tokens given a language.

Names are imported when first used: tokenizers and the command line need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cedd.constraints.byte_automaton import ByteAutomaton
    from cedd.constraints.language import Language, choice, intersect, json_schema, length, regex
    from cedd.constraints.product_law import ProductLaw, TokenLanguage
    from cedd.constraints.token_automaton import TokenAutomaton, TokenTexts, compile_tokens

__all__ = [
    "ByteAutomaton",
    "Language",
    "ProductLaw",
    "TokenAutomaton",
    "TokenLanguage",
    "TokenTexts",
    "choice",
    "compile_tokens",
    "intersect",
    "json_schema",
    "length",
    "regex",
]

_HOMES = {
    "byte_automaton": ("ByteAutomaton",),
    "language": ("Language", "choice", "intersect", "json_schema", "length", "regex"),
    "product_law": ("ProductLaw", "TokenLanguage"),
    "token_automaton": ("TokenAutomaton", "TokenTexts", "compile_tokens"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cedd.constraints' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"cedd.constraints.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
