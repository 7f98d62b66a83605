"""Every public name and each of its arguments is documented."""

import dataclasses
import inspect
import re
from collections.abc import Iterator

import pytest

import cedd

ARGUMENTS = "Arguments that mean the same everywhere"


def signatures(name: str) -> Iterator[tuple[str, list[str], str]]:
    """A public name and the public methods of its class: their names, arguments and docstrings."""
    thing = getattr(cedd, name)
    if not callable(thing):
        return
    if not inspect.isclass(thing):
        yield name, arguments_of(thing), inspect.getdoc(thing) or ""
        return
    constructor = [] if inspect.isabstract(thing) else arguments_of(thing)
    yield name, constructor, (thing.__doc__ or "") + field_docstrings(thing)
    for method, function in vars(thing).items():
        if inspect.isfunction(function) and not method.startswith("_") and name == "LanguageModel":
            yield f"{name}.{method}", arguments_of(function), inspect.getdoc(function) or ""


def arguments_of(function: object) -> list[str]:
    assert callable(function)
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def field_docstrings(kind: type) -> str:
    """The names of dataclass fields with a docstring below them, which count as described."""
    if not dataclasses.is_dataclass(kind):
        return ""
    described = re.findall(r'^    (\w+): [^\n]+\n    """', inspect.getsource(kind), re.MULTILINE)
    return " " + " ".join(described)


def missing(name: str) -> list[str]:
    """The arguments described neither in a name's own docstring nor in the package's."""
    shared = (cedd.__doc__ or "").partition(ARGUMENTS)[2]
    return [
        f"{where}({argument})"
        for where, arguments, text in signatures(name)
        for argument in arguments
        if not re.search(rf"\b{argument}\b", text) and f"- `{argument}`: " not in shared
    ]


@pytest.mark.parametrize("name", cedd.__all__)
def test_public_names_and_arguments_are_documented(name: str):
    thing = getattr(cedd, name)
    if callable(thing):
        text = inspect.getdoc(thing)
        assert text
        assert len(text.split()) >= 3
        assert not text.startswith(f"{name}("), "the docstring that a dataclass makes for itself"
    assert missing(name) == []


def test_undocumented_argument_is_detected(monkeypatch: pytest.MonkeyPatch):
    def absorb(vocab_size: int, speed: float) -> None:
        """Tokens are masked."""

    monkeypatch.setattr(cedd, "absorb", absorb)
    assert missing("absorb") == ["absorb(speed)"]
