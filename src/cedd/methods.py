"""The methods of the paper, each a row of parts: what the outputs mean, what is minimised, what is run backwards."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import ParamSpec, TypeVar

from torch import Tensor, nn

from cedd.block_layout import blocks_of, check_block
from cedd.dynamics import BOUNDS, Causal, Dynamics, Flow, Reversal
from cedd.names import ALIASES, suggestion
from cedd.network import has_head
from cedd.objectives.cross_entropy import CrossEntropy, constant, likelihood, star
from cedd.objectives.objective import Objective
from cedd.objectives.score_entropy import ScoreEntropy
from cedd.parameterization import Bayes, Denoiser, Parameterization, ScaledScore, Score
from cedd.parts import Table
from cedd.process import TokenProcess
from cedd.schedules import Time, check_times
from cedd.storage import JSONMapping, JSONObject


@dataclass(frozen=True)
class Method:
    """A training method: parameterization, objective and dynamics. Invalid combinations raise a ValueError.

    Args:
        name: the name in tables and messages.
        parameterization: what the outputs mean.
        objective: the training loss of a row of outputs.
        dynamics: the process that the model runs backwards; time reversal by default.
        block: tokens per block, for block diffusion: each block is a separate diffusion given the blocks before it. By
            default the whole text is one block.
    """

    name: str
    parameterization: Parameterization
    objective: Objective
    dynamics: Dynamics = field(default_factory=Reversal)
    block: int | None = None

    def __post_init__(self) -> None:
        kinds = {"parameterization": Parameterization, "objective": Objective, "dynamics": Dynamics}
        for part, kind in kinds.items():
            if not isinstance(getattr(self, part), kind):
                raise TypeError(
                    f"the {part} of a method must be an instance of {kind.__name__} (got {getattr(self, part)!r})"
                )
        self.objective.check(self.parameterization)
        self.dynamics.check_parts(self.parameterization, self.objective)
        if self.block is not None and check_block(self.block) and not self.dynamics.noisy:
            raise ValueError(
                f"{self.name} is autoregressive and has no blocks (got block={self.block}); leave block "
                "out, or use a diffusion method"
            )

    def check(self, process: TokenProcess) -> None:
        """Raise a ValueError for an unsupported process; the message names an alternative."""
        if not isinstance(process, TokenProcess):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "a process is a TokenProcess: absorb(), uniform(), roulette(), eroulette(), hybrid(), or "
                f"TokenProcess(vocab_size, has_mask, clocks) with clocks of your own (got {type(process).__name__})"
            )
        self.dynamics.check_process(process)

    def check_bound(self, bound: str, time_floor: float | None = None) -> None:
        """Raise a ValueError for a bound that the method does not have, or an invalid end of the path."""
        if bound not in BOUNDS:
            raise ValueError(f"unknown bound {bound!r}{suggestion(bound, BOUNDS)}")
        if bound not in self.dynamics.bounds:
            own = "its own bound" if self.dynamics.noisy else "an exact likelihood"
            raise ValueError(f"{self.name} has {own} and no {bound}; use bound='tight'")
        if time_floor is not None and not 0 <= time_floor < 1:
            raise ValueError(f"the earliest time must be in [0, 1) (got {time_floor!r})")

    @property
    def meaning(self) -> str:
        """What the network's outputs are, in words."""
        return self.parameterization.meaning if self.dynamics.noisy else "probabilities of the next token"

    def require_scores(self) -> Parameterization:
        """The parameterization of a method that has a reverse process."""
        if not self.dynamics.noisy:
            raise ValueError(f"{self.name} is autoregressive and has no noise process; use a diffusion method")
        return self.parameterization

    def config(self) -> JSONObject:
        """A JSON record of the name and the parts, from which `method_from_config` makes this method again."""
        parts = {name: getattr(self, name).config() for name in _PARTS}
        return {"name": self.name, **parts, **({} if self.block is None else {"block": self.block})}

    def stops_short(self, process: TokenProcess) -> bool:
        """Whether the path ends before t = 0, at a time that can be chosen (`with_stop`)."""
        return self.dynamics.end(self.parameterization, process) > 0

    def with_stop(self, stop: float) -> Method:
        """The same method with another end of its path, if the path has to end before t = 0."""
        if not isinstance(self.dynamics, Reversal | Flow):
            return self
        if not 0 < stop < 1:
            raise ValueError(f"a path stops at a time between 0 and 1 (got {stop!r})")
        return replace(self, dynamics=replace(self.dynamics, stop=stop))

    def in_blocks(self, block: int | None) -> Method:
        """The method with blocks of `block` tokens; None leaves it unchanged. Raises a ValueError if it already has
        another block size."""
        if block is None or block == self.block:
            return self
        if self.block is not None:
            raise ValueError(f"the model is for blocks of {self.block} tokens (got block={block})")
        return replace(self, block=block)

    @property
    def of_one_block(self) -> Method:
        """The method that draws one block, given the blocks before it."""
        return replace(self, block=None)

    def check_whole(self, what: str) -> None:
        """Raise a ValueError for a use that reads a text from both sides, if texts are written block by block."""
        if self.block is not None:
            raise ValueError(f"{what} is not available for block diffusion models (blocks of {self.block} tokens)")

    def blocks_of(self, length: int) -> int:
        """The number of blocks in a text of this length, which must be a multiple of the block size."""
        return blocks_of(length, self.block)

    def with_sigma_floor(self, floor: float) -> Method:
        """The same method with another floor of sigma in a denoiser's ratios; other parameterizations are unchanged."""
        if not isinstance(self.parameterization, Denoiser):
            return self
        return replace(self, parameterization=replace(self.parameterization, sigma_floor=floor))


_PARTS: Mapping[str, Table] = {kind.table.kind: kind.table for kind in (Parameterization, Objective, Dynamics)}


class _ByName(UserDict[str, Method]):
    """Methods by name, in any case, as the paper writes it ("CEDD*" is "cedd-star") or by a published name (`ALIASES`:
    "mdlm" is "ceddt")."""

    def __missing__(self, name: str) -> Method:
        if name not in self:
            raise KeyError(name)
        return self.data[_plain(name)]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self.data or _plain(name) in self.data)


def _plain(name: str) -> str:
    plain = name.replace("*", "-star").lower()
    return ALIASES[plain].method if plain in ALIASES else plain


METHODS: MutableMapping[str, Method] = _ByName(
    (method.name, method)
    for method in (
        Method("sedd", Score(), ScoreEntropy()),
        Method("sedds", ScaledScore(), ScoreEntropy()),
        Method("cedd", Denoiser(), CrossEntropy(constant)),
        Method("cedd-star", Denoiser(), CrossEntropy(star)),
        Method("ceddt", Denoiser(), CrossEntropy(likelihood)),
        Method("bayes", Bayes(), CrossEntropy(constant)),
        Method("bayes-star", Bayes(), CrossEntropy(star)),
        Method("bayes-elbo", Bayes(), ScoreEntropy()),
        Method("dfm", Denoiser(rescale=False), CrossEntropy(constant), Flow()),
        Method("ar", Denoiser(rescale=False), CrossEntropy(constant), Causal()),
    )
)
"""The methods by name; add your own."""


def get_method(method: str | Method) -> Method:
    """The method with a name in `METHODS` ("cedd*" is "cedd-star", "mdlm" is "ceddt"); a `Method` is returned
    unchanged."""
    if isinstance(method, Method):
        return method
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}{suggestion(str(method), (*METHODS, *ALIASES))}")
    return METHODS[method]


def method_from_config(record: str | JSONMapping) -> Method:
    """The method whose `config()` was this record; a name stands for the method of `METHODS`."""
    if isinstance(record, str):
        return get_method(record)
    if missing := [name for name in ("name", *_PARTS) if name not in record]:
        raise ValueError(f"a method needs {', '.join(('name', *_PARTS))}; {missing[0]} is missing")
    parts = {name: table.build(record[name]) for name, table in _PARTS.items()}
    return Method(record["name"], **parts, block=record.get("block"))


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def model_first(usage: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate a function (model or outputs, process, ..., *, method): arguments in the wrong order or number raise a
    TypeError that shows `usage`."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        signature = inspect.signature(function)

        @wraps(function)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if args and isinstance(args[0], (str, Method, TokenProcess)):
                raise TypeError(f"the first argument is a {type(args[0]).__name__}; call {usage}")
            if len(args) > 1 and not isinstance(args[1], TokenProcess):
                raise TypeError(f"the second argument must be a process (got {type(args[1]).__name__}); call {usage}")
            is_network = not args or isinstance(args[0], Tensor) or callable(args[0]) or has_head(args[0])
            if not is_network and isinstance(getattr(args[0], "model", None), nn.Module):
                raise TypeError(f"the first argument is a {type(args[0]).__name__}; give its network, `.model`")
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{error}; call {usage}") from None
            return function(*args, **kwargs)

        return checked

    return decorate


@model_first("cedd.log_scores(outputs, process, x_t, t, method=...)")
def log_scores(outputs: Tensor, process: TokenProcess, x_t: Tensor, t: Time, *, method: str | Method) -> Tensor:
    """The model's estimate of log p_t(y)/p_t(x_t) for each token y: [B, L, V].

    It is 0 at x_t itself, and -inf where the process cannot jump back (absorb, unmasked).
    """
    chosen = get_method(method)
    chosen.check(process)
    process.check_states(x_t)
    if outputs.shape != (*x_t.shape, process.vocab_size):
        raise ValueError(
            f"outputs must have one entry per token and none for the mask: expected the shape "
            f"{[*x_t.shape, process.vocab_size]}, got {list(outputs.shape)}"
        )
    noise = process.noise(check_times(t, x_t, "x_t")).to(x_t.device).like(x_t)
    return chosen.require_scores().log_scores(outputs, x_t, noise)
