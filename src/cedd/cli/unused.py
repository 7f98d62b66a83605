"""Refusing options that have no effect together with the others, instead of ignoring them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from cedd.cli import UserError


def refuse_unused(given: Any, names: Iterable[str], reason: str, defaults: Any = None) -> None:
    """Raise an error if any of these options differs from its default.

    Args:
        given: the options, a dataclass.
        names: the fields that have no effect.
        reason: why, such as "without --frontier".
        defaults: the options when none is given; by default those of the dataclass.
    """
    usual = {one.name: one.default for one in fields(given)} if defaults is None else vars(defaults)
    changed = [name for name in names if getattr(given, name) != usual[name]]
    if changed:
        shown = " and ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise UserError(f"{shown} {'has' if len(changed) == 1 else 'have'} no effect {reason}")
