"""The methods of the paper, each a row of parts: what the outputs mean, what is minimised, what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from cedd.names import suggestion
from cedd.objectives.autoregressive import Autoregressive
from cedd.objectives.cross_entropy import CrossEntropy, constant, likelihood, star
from cedd.objectives.flow_matching import FlowMatching
from cedd.objectives.objective import Objective
from cedd.objectives.score_entropy import ScoreEntropy
from cedd.parameterization import Bayes, Denoiser, Parameterization, ScaledScore, Score
from cedd.process import TokenProcess
from cedd.schedules import Time, check_time


@dataclass(frozen=True)
class Method:
    """A method is a parameterization and an objective; `causal` methods have no reverse process."""

    name: str
    parameterization: Parameterization
    objective: Objective
    causal: bool = False

    def check(self, process: TokenProcess) -> None:
        """Refuse a combination that makes no sense, saying what to use instead."""
        self.objective.check(process)

    def require_scores(self) -> Parameterization:
        """The parameterization of a method that has a reverse process."""
        if self.causal:
            raise ValueError(f"{self.name} is autoregressive and has no noise process; use a diffusion method")
        return self.parameterization


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("sedd", Score(), ScoreEntropy()),
        Method("sedds", ScaledScore(), ScoreEntropy()),
        Method("cedd", Denoiser(), CrossEntropy(constant)),
        Method("cedd-star", Denoiser(), CrossEntropy(star)),
        Method("ceddt", Denoiser(), CrossEntropy(likelihood)),
        Method("bayes", Bayes(), CrossEntropy(constant)),
        Method("bayes-star", Bayes(), CrossEntropy(star)),
        Method("dfm", Denoiser(rescale=False), FlowMatching(constant)),
        Method("ar", Denoiser(rescale=False), Autoregressive(constant), causal=True),
    )
}


def get_method(method: str | Method) -> Method:
    """A method by name ("cedd*" is "cedd-star"), or as it is."""
    if isinstance(method, Method):
        return method
    name = method.replace("*", "-star").lower()
    if name not in METHODS:
        raise ValueError(f"unknown method {method!r}{suggestion(method, METHODS)}")
    return METHODS[name]


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
    time = check_time(t)
    if time.dim() > 0 and time.shape != x_t.shape[: time.dim()]:
        raise ValueError(f"t needs one time per sequence: x_t is {list(x_t.shape)}, t is {list(time.shape)}")
    noise = process.noise(time).to(x_t.device).like(x_t)
    return chosen.require_scores().log_scores(outputs, x_t, noise)
