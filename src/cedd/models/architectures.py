"""The registry of architectures: classes of networks by their name in config.json.

A class is a `Backbone`, or any `nn.Module` that is constructed as `Network(vocab_size=V, has_mask=True, **arguments)`
and has `forward(x_t [B, L], sigma [B]) -> [B, L, V]`. Code outside this package is imported only for a name that the
user gives (`import_architecture`); the name in a model folder is looked up here and never imported.
"""

from __future__ import annotations

from torch import nn

from cedd.models.backbone import Backbone, ModuleBackbone
from cedd.models.gpt2 import GPT2
from cedd.models.llama import Llama
from cedd.models.transformer import Transformer
from cedd.names import suggestion
from cedd.parts import import_named
from cedd.storage import JSONMapping

ARCHITECTURES: dict[str, type[nn.Module]] = {"transformer": Transformer, "llama": Llama, "gpt2": GPT2}
"""Classes by name, looked up when a network is built; add your own."""
Architecture = str | type[nn.Module]
"""What a user may give: a registered name, package:Class, or a class."""


def import_architecture(name: str) -> type[nn.Module]:
    """The class package:Class, imported and added to the registry under that name."""
    if ":" not in name:
        raise ValueError(
            f"invalid architecture {name!r}: use {', '.join(ARCHITECTURES)}, or package:Class for your own"
        )
    ARCHITECTURES[name] = import_named(name, "subclass of torch.nn.Module", _is_network)
    return ARCHITECTURES[name]


def _is_network(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def get_architecture(name: str, given: Architecture | None = None) -> type[nn.Module]:
    """The class of a name in config.json: the registered one, or the one that the user names.

    given: package:Class, which is imported if it is the name, or the class itself.
    """
    if isinstance(given, type) and (":" in name or name not in ARCHITECTURES):
        return given
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if ":" not in name:
        raise ValueError(f"unknown architecture {name!r}{suggestion(name, ARCHITECTURES)}")
    if given == name:
        return import_architecture(name)
    got = "" if given is None else f" (got {given})"
    raise ValueError(
        f"the architecture {name} is not part of cedd, and a model folder alone imports no other code: add "
        f"--architecture {name} (in Python: architecture={name!r}, or the class){got}"
    )


def build_network(architecture: str, config: JSONMapping, given: Architecture | None = None) -> Backbone:
    """A network with new weights.

    Args:
        architecture: its name, as in config.json.
        config: its arguments; for a plain module vocab_size, has_mask and its own.
        given: the architecture that the user names, where it is not registered (see `get_architecture`).
    """
    kind = get_architecture(architecture, given)
    try:
        if issubclass(kind, Backbone):
            made = kind.from_config(config)
        else:
            own = {name: value for name, value in config.items() if name not in ("vocab_size", "has_mask")}
            made = ModuleBackbone(kind(**config), config["vocab_size"], config["has_mask"], own)
    except TypeError as error:  # an unexpected or missing argument
        raise ValueError(f"the architecture {architecture} cannot be built: {error}") from error
    made.architecture = architecture
    return made
