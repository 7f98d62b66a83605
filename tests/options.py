"""Find command-line options without a description."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
from typing import cast, get_type_hints


def undescribed(kind: type) -> list[str]:
    """The fields of a dataclass, and of nested dataclasses, that have no docstring below them."""
    described, found = set[str](), list[str]()
    for source in (inspect.getsource(one) for one in kind.__mro__ if dataclasses.is_dataclass(one)):
        (definition,) = ast.parse(textwrap.dedent(source)).body
        for node, after in itertools.pairwise(cast(ast.ClassDef, definition).body):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                described.add(ast.unparse(node.target))
    for name, hint in get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            found += undescribed(cast(type, hint))
        elif name not in described:
            found.append(f"{kind.__name__}.{name}")
    return found
