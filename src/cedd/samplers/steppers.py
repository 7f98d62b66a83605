"""Steps that are more than a rule: they remember something of each text, or ask the network again.

Shapes: B batch, L positions, V vocabulary, n states; R rows.

    remask-confidence   ReMDM's confidence schedule (Wang et al. 2025): the less sure the network was of a token when it
                        was drawn, the likelier it is masked again
    gibbs               after each step some positions are redrawn given all others, at the same time
    stratified          stratified hazard sampling (Jang and Han, arXiv 2601.02799): a token changes when its summed
                        chances cross a threshold, not by a coin in each step

Each is a row of `STEPPERS`. What a row keeps of the texts of a run is made by its `start`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.dynamics.reverse import RULES, Reversal
from cedd.dynamics.rules import StepRule, believing
from cedd.methods import Method
from cedd.network import Network, Places, flat_places, put_at
from cedd.parameterization import Affine, Bayes, at_token
from cedd.process import Noise, TokenProcess
from cedd.samplers.choice import Sharpening, beliefs, inverse_cdf, is_surely_mask, jump_weights, leap_of
from cedd.samplers.draws import Draws, Use

Stepping = Callable[[Tensor, int, Noise, Noise], Tensor]
"""(x [B, L], number of the step, noise at t, noise at s) -> x at s."""


@dataclass(frozen=True)
class Scene:
    """What a stepper steps in.

    Args:
        free: which positions may change, [B, L] bool.
        plain: (x, number of the step) -> x, a step of the analytic rule.
    """

    network: Network
    process: TokenProcess
    parameterization: Affine
    sharpening: Sharpening
    draws: Draws
    free: Tensor
    plain: Callable[[Tensor, int], Tensor]

    def numbers(self, use: Use, step: int) -> Tensor:
        """Uniform numbers [B, L] on the device."""
        return self.draws.uniform(use, step).to(self.free.device)

    def drawn(
        self, x: Tensor, where: Tensor, noise: Noise, choose: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The flat rows [R] of `where` [B, L], and what choose(outputs [R, V] float64, x [R], rows [R]) says there."""
        rows = flat_places(where)
        if not len(rows):
            return rows, rows
        flat = x.flatten()
        outputs = self.network.rows(x, noise.sigma.to(torch.float32), Places(rows), full_precision=True)
        return rows, outputs.map(lambda part, at: choose(part.double(), flat[rows[at]], rows[at]))


@dataclass(frozen=True)
class Stepper:
    """A sampler over a time grid whose step is no `StepRule`.

    Args:
        name: what the table and error messages call it.
        start: from what it steps in, and the noise x [B, L], to the function that steps.
        check: raises a ValueError for methods and processes on which it makes no sense.
    """

    name: str
    start: Callable[[Scene, Tensor], Stepping]
    check: Callable[[Method, TokenProcess], None]


def check_reversal(name: str, method: Method) -> None:
    """Refuse methods that do not run a process backwards by probabilities."""
    believing(name, method.parameterization)
    if not isinstance(method.dynamics, Reversal):
        raise ValueError(f"{name} runs a process backwards, which {method.name} does not; use sampler='analytic'")


# ----------------------------------------------------------------------------------------------------------------
# Remasking by confidence


def remask_by_confidence(tokens: float = 1.0) -> Stepper:
    """Masks tokens of an absorb process again, the least sure ones first.

    With psi_i the probability with which token i was drawn, and r_max = min(1, a_s / alive_t) as in `remask_capped`,

        r_i = r_max min(1, tokens exp(-psi_i) / sum_j exp(-psi_j)),        the sum over the tokens of the text,

    so that about `tokens` of a text are masked again in a step. Masks are revealed so much the sooner that as many are
    expected to be left as the process has: p(stays) = (a_s - alive_t mean_i r_i) / a_t. Tokens that were given count as
    certain.

    Args:
        tokens: how many of a text are masked again in a step, at most.
    """
    name = "remask-confidence"
    if not tokens >= 0:
        raise ValueError(f"{name}: the number of tokens to mask again must not be negative; got {tokens}")

    def check(method: Method, process: TokenProcess) -> None:
        check_reversal(name, method)
        if not process.has_mask:
            raise ValueError(f"{name} masks tokens again, and this process has no masks; use sampler='analytic'")
        if process.can_shuffle:
            raise ValueError(f"{name} is for absorb; on a process that shuffles tokens change anyway: use 'analytic'")

    def start(scene: Scene, x: Tensor) -> Stepping:
        sureness = torch.ones_like(x, dtype=torch.float64)
        mask = scene.process.vocab_size

        def step(x: Tensor, k: int, noise: Noise, earlier: Noise) -> Tensor:
            masked = x == mask
            stay, again = confidence_chances(sureness, masked, scene.free, noise, earlier, tokens)
            u, v = scene.numbers(Use.JUMP, k), scene.numbers(Use.TARGET, k).flatten()

            def chosen(outputs: Tensor, here: Tensor, rows: Tensor) -> Tensor:
                log_probs = scene.sharpening.log_probs(outputs)
                token = inverse_cdf(log_probs, v[rows], log=True)
                return torch.stack([token.double(), at_token(log_probs, token).exp()], 1)

            rows, found = scene.drawn(x, masked & scene.free & (u >= stay), noise, chosen)
            x = x.masked_fill(~masked & scene.free & (u < again), mask)
            if len(rows):
                sureness.view(-1).index_copy_(0, rows, found[:, 1])
                x = put_at(x, rows, found[:, 0])
            return x

        return step

    return Stepper(name, start, check)


def confidence_chances(
    sureness: Tensor, masked: Tensor, free: Tensor, noise: Noise, earlier: Noise, tokens: float
) -> tuple[Tensor, Tensor]:
    """The probability that a mask stays [B, 1], and that a token is masked again [B, L]; see
    `remask_by_confidence`."""
    possible = (earlier.a / noise.alive).clamp_max(1.0)
    shares = torch.softmax((-sureness).masked_fill(masked | ~free, -torch.inf), 1).nan_to_num(0.0)
    again = possible * (tokens * shares).clamp_max(1.0)
    count = (~masked & free).sum(1, keepdim=True).clamp_min(1)
    return (earlier.a - noise.alive * again.sum(1, keepdim=True) / count) / noise.a, again


# ----------------------------------------------------------------------------------------------------------------
# The Gibbs corrector


def gibbs(share: float = 0.125, sweeps: int = 1, start: float = 1.0, stop: float = 0.0) -> Stepper:
    """After an analytic step to s, redraws positions from their law given all others at s,

        p(x_i = y | others) = b + keep g_y,      p(x_i = mask | others) = a,

    with g the network's belief before it looks at position i: what `bayes` gives. On absorb a network has no belief
    about a token that it sees, so the positions are masked first, whatever the method. Of a perfect network x_s keeps
    its distribution if one position is redrawn at a time; several at once do not see each other.

    Args:
        share: of the positions that are redrawn at once, one at least.
        sweeps: how often after each step; each is a call of the network.
        start: the latest time after which it is done, where 1 is noise.
        stop: the earliest.
    """
    name = "gibbs"
    if not (0 < share <= 1 and sweeps >= 1 and 0 <= stop <= start <= 1):
        raise ValueError(
            f"{name} needs a share in (0, 1], a sweep at least, and times 0 <= stop <= start <= 1; "
            f"got {share}, {sweeps} and {stop}, {start}"
        )

    def check(method: Method, process: TokenProcess) -> None:
        check_reversal(name, method)
        if process.can_shuffle and not isinstance(method.parameterization, Bayes):
            raise ValueError(
                f"{name} redraws a token from what the network believes before it looks at it, but {method.name} has "
                "looked; use bayes, or sampler='analytic'"
            )

    def begin(scene: Scene, x: Tensor) -> Stepping:
        number = max(1, round(share * x.shape[1]))

        def step(x: Tensor, k: int, noise: Noise, earlier: Noise) -> Tensor:
            x = scene.plain(x, k)
            if stop <= float(earlier.t) <= start:
                for sweep in range(sweeps):
                    x = redrawn(scene, x, earlier, number, k * sweeps + sweep)
            return x

        return step

    return Stepper(name, begin, check)


def redrawn(scene: Scene, x: Tensor, noise: Noise, number: int, step: int) -> Tensor:
    """x [B, L] with so many positions of each text drawn anew, at the time of `noise`."""
    order = scene.numbers(Use.PLACE, step).masked_fill(~scene.free, 2.0)
    chosen = scene.free & (order.argsort(1).argsort(1) < number)
    if not scene.process.can_shuffle:
        x = x.masked_fill(chosen, scene.process.vocab_size)
    v = scene.numbers(Use.REDRAW, step)

    def choose(outputs: Tensor, here: Tensor, rows: Tensor) -> Tensor:
        at = noise.like(here)
        log_probs = beliefs(scene.parameterization, scene.sharpening, outputs, here, at)
        return inverse_cdf(redrawing_law(log_probs.exp_(), at, scene.sharpening), v.flatten()[rows])

    rows, tokens = scene.drawn(x, chosen & ~is_surely_mask(v, noise.a), noise, choose)
    if noise.has_mask:
        x = x.masked_fill(chosen, scene.process.vocab_size)
    return put_at(x, rows, tokens)


def redrawing_law(probs: Tensor, noise: Noise, sharpening: Sharpening | None = None) -> Tensor:
    """The law [R, n] of positions at the time of noise [R], given beliefs g [R, V] about them."""
    law = noise.b[:, None] + noise.keep[:, None] * probs
    if sharpening is not None and sharpening.excluded:  # the other tokens share what is theirs, and the mask none of it
        law = sharpening.without(law, 0.0)
        law = law * (noise.alive[:, None] / law.sum(-1, keepdim=True))
    return torch.cat([law, noise.a[:, None]], 1) if noise.has_mask else law


# ----------------------------------------------------------------------------------------------------------------
# Stratified hazards


def stratified(rule: StepRule | None = None) -> Stepper:
    """A token changes in the steps in which its summed chances cross a threshold.

    With p_k the chance of a change in step k by the rule, and one phase u ~ U(0, 1) a position, the token of a position
    changes in step k if an integer lies in (u + p_1 + ... + p_{k-1}, u + p_1 + ... + p_k]. Where to is drawn as ever.
    In each step the chance is p_k on average over u, but how often a token changes varies as little as it can: neither
    much more nor much less than it should.

    Args:
        rule: whose chances; by default analytic.
    """
    name = "stratified"

    def check(method: Method, process: TokenProcess) -> None:
        check_reversal(name, method)
        if process.has_mask:
            raise ValueError(
                f"{name} spaces out the changes of a token, but a mask is revealed once, and would be too soon; use it "
                "on uniform, or sampler='analytic'"
            )

    def start(scene: Scene, x: Tensor) -> Stepping:
        law, phase = rule or RULES["analytic"], scene.numbers(Use.JUMP, 0)
        reached = phase.flatten()

        def step(x: Tensor, k: int, noise: Noise, earlier: Noise) -> Tensor:
            nonlocal reached
            v = scene.numbers(Use.TARGET, k).flatten()

            def chosen(outputs: Tensor, here: Tensor, rows: Tensor) -> Tensor:
                now, next_ = noise.like(here), earlier.like(here)
                leap, probs = leap_of(law, scene.parameterization, scene.sharpening, outputs, here, now, next_)
                after = reached[rows] + (1 - leap.stay)
                # Few change: only they need to know where to.
                few = flat_places(after.floor() > reached[rows].floor())
                from_ = here[few]
                weights = jump_weights(leap.at(few), probs[few], from_, noise.like(from_), scene.sharpening)
                to = torch.where(weights.sum(-1) > 0, inverse_cdf(weights, v[rows[few]]), from_)
                return torch.stack([here.index_copy(0, few, to).double(), after], 1)

            rows, found = scene.drawn(x, scene.free, noise, chosen)
            if len(rows):
                reached = reached.index_copy(0, rows, found[:, 1])
                x = put_at(x, rows, found[:, 0])
            return x

        return step

    return Stepper(name, start, check)


STEPPERS: Mapping[str, Stepper] = {stepper.name: stepper for stepper in (remask_by_confidence(), gibbs(), stratified())}
