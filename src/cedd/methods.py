"""The methods of the paper, each a row of parts: what the outputs mean, what is minimised, what is run backwards."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from cedd.dynamics import BOUNDS, Causal, Dynamics, Flow, Reversal
from cedd.names import suggestion
from cedd.objectives.cross_entropy import CrossEntropy, constant, likelihood, star
from cedd.objectives.objective import Objective
from cedd.objectives.score_entropy import ScoreEntropy
from cedd.parameterization import Bayes, Denoiser, Parameterization, ScaledScore, Score
from cedd.process import TokenProcess
from cedd.schedules import Time, check_times


@dataclass(frozen=True)
class Method:
    """A method is a parameterization, an objective and dynamics; parts that make no sense together are refused.

    Args:
        name: what a part is called, in its table and in messages.
        parameterization: what the outputs mean.
        objective: what a row of outputs costs in training.
        dynamics: what the model has learned to run backwards; time reversal unless given.
    """

    name: str
    parameterization: Parameterization
    objective: Objective
    dynamics: Dynamics = field(default_factory=Reversal)

    def __post_init__(self) -> None:
        kinds = {"parameterization": Parameterization, "objective": Objective, "dynamics": Dynamics}
        for part, kind in kinds.items():
            if not isinstance(getattr(self, part), kind):
                raise TypeError(
                    f"the {part} of a method must be an instance of {kind.__name__}; got {getattr(self, part)!r}"
                )
        self.objective.check(self.parameterization)
        self.dynamics.check_parts(self.parameterization, self.objective)

    def check(self, process: TokenProcess) -> None:
        """Refuse a process that makes no sense, saying what to use instead."""
        self.dynamics.check_process(process)

    def check_bound(self, bound: str, time_floor: float | None = None) -> None:
        """Refuse a bound that the method has not, and an end of the path that is none."""
        if bound not in BOUNDS:
            raise ValueError(f"unknown bound {bound!r}{suggestion(bound, BOUNDS)}")
        if bound not in self.dynamics.bounds:
            own = "its own bound" if self.dynamics.noisy else "an exact likelihood"
            raise ValueError(f"{self.name} has {own} and no {bound}; ask for the bound tight")
        if time_floor is not None and not 0 <= time_floor < 1:
            raise ValueError(f"the earliest time must lie in [0, 1); got {time_floor!r}")

    @property
    def meaning(self) -> str:
        """What the network's outputs are, in words."""
        return self.parameterization.meaning if self.dynamics.noisy else "probabilities of the next token"

    def require_scores(self) -> Parameterization:
        """The parameterization of a method that has a reverse process."""
        if not self.dynamics.noisy:
            raise ValueError(f"{self.name} is autoregressive and has no noise process; use a diffusion method")
        return self.parameterization

    def config(self) -> str | dict[str, Any]:
        """A JSON record of a method of the table, for `method_from_config`: its name, and what was changed of it, the
        floor of sigma and where its path stops."""
        usual = METHODS.get(self.name)
        if usual is None or self.with_sigma_floor(_SIGMA_FLOOR).with_stop(usual.dynamics.stop) != usual:
            raise ValueError(
                f"{self.name} cannot be saved: METHODS has no such method, or another one of this name; give it a name "
                "of its own there"
            )
        floor = getattr(self.parameterization, "sigma_floor", _SIGMA_FLOOR)
        changed = {} if floor == _SIGMA_FLOOR else {"sigma_floor": floor}
        if self.dynamics.stop != usual.dynamics.stop:
            changed["stop"] = self.dynamics.stop
        return {"name": self.name, **changed} if changed else self.name

    def stops_short(self, process: TokenProcess) -> bool:
        """Whether the path ends before t = 0, at a time that can be chosen (`with_stop`)."""
        return self.dynamics.end(self.parameterization, process) > 0

    def with_stop(self, stop: float) -> Method:
        """The same with another time at which a path that has to stop short of t = 0 does so."""
        if not isinstance(self.dynamics, Reversal | Flow):
            return self
        if not 0 < stop < 1:
            raise ValueError(f"a path stops at a time between 0 and 1; got {stop!r}")
        return replace(self, dynamics=replace(self.dynamics, stop=stop))

    def with_sigma_floor(self, floor: float) -> Method:
        """The same with another floor of sigma in the denoiser's ratios; as it is for other parameterizations."""
        if not isinstance(self.parameterization, Denoiser):
            return self
        return replace(self, parameterization=replace(self.parameterization, sigma_floor=floor))


_SIGMA_FLOOR = Denoiser().sigma_floor


class _ByName(UserDict[str, Method]):
    """Methods by name, as it is or as the paper writes it, in whatever case: "CEDD*" is "cedd-star"."""

    def __missing__(self, name: str) -> Method:
        if name not in self:
            raise KeyError(name)
        return self.data[_plain(name)]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self.data or _plain(name) in self.data)


def _plain(name: str) -> str:
    return name.replace("*", "-star").lower()


METHODS: Mapping[str, Method] = _ByName(
    (method.name, method)
    for method in (
        Method("sedd", Score(), ScoreEntropy()),
        Method("sedds", ScaledScore(), ScoreEntropy()),
        Method("cedd", Denoiser(), CrossEntropy(constant)),
        Method("cedd-star", Denoiser(), CrossEntropy(star)),
        Method("ceddt", Denoiser(), CrossEntropy(likelihood)),
        Method("bayes", Bayes(), CrossEntropy(constant)),
        Method("bayes-star", Bayes(), CrossEntropy(star)),
        Method("dfm", Denoiser(rescale=False), CrossEntropy(constant), Flow()),
        Method("ar", Denoiser(rescale=False), CrossEntropy(constant), Causal()),
    )
)


def get_method(method: str | Method) -> Method:
    """A method by its name in `METHODS` ("cedd*" is "cedd-star"), or as it is."""
    if isinstance(method, Method):
        return method
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}{suggestion(str(method), METHODS)}")
    return METHODS[method]


def method_from_config(record: str | Mapping[str, Any], sigma_floor: float | None = None) -> Method:
    """The method whose `config()` was this record, with the floor of sigma that is given if the record has none."""
    changed = {} if isinstance(record, str) else record
    sigma_floor, stop = changed.get("sigma_floor", sigma_floor), changed.get("stop")
    method = get_method(record if isinstance(record, str) else record["name"])
    method = method if sigma_floor is None else method.with_sigma_floor(float(sigma_floor))
    return method if stop is None else method.with_stop(float(stop))


def log_scores(method: str | Method, process: TokenProcess, outputs: Tensor, x_t: Tensor, t: Time) -> Tensor:
    """log p_t(y)/p_t(x_t) as the method's network gives it, for each token y: [B, L, V].

    0 at x_t itself; -inf where the process cannot jump back (absorb, unmasked).
    """
    chosen = get_method(method)
    chosen.check(process)
    process.check_states(x_t)
    if outputs.shape != (*x_t.shape, process.vocab_size):
        raise ValueError(
            f"outputs have one entry a token and none for the mask: {[*x_t.shape, process.vocab_size]} is wanted; "
            f"got {list(outputs.shape)}"
        )
    noise = process.noise(check_times(t, x_t, "x_t")).to(x_t.device).like(x_t)
    return chosen.require_scores().log_scores(outputs, x_t, noise)
