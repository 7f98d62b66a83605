"""The one loop that every step rule runs in, and `sample`, which chooses what to run.

Shapes: B batch, L positions, V vocabulary, K steps; R candidate rows.

    x ~ prior, constrained
    for each step from t to s:    x <- a draw from the rule's law of x_s given x_t;    x <- constraint(x)

Jump-first: where the network gives probabilities and the rule declares that it can be known who may jump, that is
decided before a row of the vocabulary is computed, so the head runs on a handful of rows (see `plan`). Networks that
give ratios need all their rows to know whether anything jumps, and so do other rules: the dense path, a chunk of rows
at a time. Both draw from the same law.

Jump-first, texts do not wait for each other's steps: a call of the network is for the next event of each. Where
somebody looks at x between the steps, a callback or a constraint of which nothing is known, all take them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from cedd.dynamics import Corrector, StepRule
from cedd.dynamics.dynamics import Callback, Drawing, Dynamics
from cedd.dynamics.reverse import RULES
from cedd.methods import Method, get_method
from cedd.network import AnyModel, Network, Only, Places, evaluating, flat_places, put_at
from cedd.parameterization import Affine, Parameterization, can_jump, shifted_outputs, step_law
from cedd.process import Noise, TokenProcess
from cedd.samplers.choice import Reveal, Sharpening, inverse_cdf, is_surely_mask, jump_weights, leap_of, may_move
from cedd.samplers.constraints import Constraint, Fixed
from cedd.samplers.draws import Draws, Use, one_for_each, text_seeds
from cedd.samplers.first_hitting import check_reveals, first_hitting
from cedd.samplers.grids import LAST_TIME, time_grid
from cedd.samplers.memory import remembering
from cedd.samplers.orders import ORDERS, Order, reveal_in_order
from cedd.samplers.plan import BLOCK_STEPS, Candidates, Chances, Plan, blocks, chances
from cedd.samplers.steppers import STEPPERS, Scene, Stepper, check_reversal

WITHOUT_RULES = ("first-hitting", *ORDERS)
"""Samplers that reveal masks without a time grid."""

SAMPLERS = (*RULES, *STEPPERS, *WITHOUT_RULES)

FEW_OUTPUTS = 1 << 16
"""Entries of [R, V] ratios below which all positions are drawn from their laws."""
_SUMMED_BY = 1e-4
"""More than a sum of ratios in float32 is off, in shares of it."""


def steps_taken(sampler: str, steps: int, length: int) -> int:
    """The steps in which a sampler draws a text of `length` tokens if it is asked for `steps`."""
    if sampler == "first-hitting":
        return length
    return min(steps, length) if sampler in ORDERS else steps


States = tuple[int, bool]
"""V, and whether there is a mask."""


def _ends(states: States, levels: Tensor) -> tuple[Noise, Noise]:
    """The noise of a step's two ends, from levels [*S, 2, F] (see `Kernel.stacked`)."""
    noise, earlier = levels.unbind(-2)
    return Noise.of_stacked(*states, noise), Noise.of_stacked(*states, earlier)


@dataclass(frozen=True)
class Run:
    """Everything the loop needs besides x."""

    network: Network
    process: TokenProcess
    parameterization: Parameterization
    rule: StepRule
    last_rule: StepRule
    """For the step to t = 0, which denoises whatever the rule."""
    times: Tensor
    sharpening: Sharpening
    constraint: Constraint | None
    draws: Draws
    callback: Callback | None
    stepper: Stepper | None = None
    """Steps in the rule's place, except to t = 0."""

    def rule_of(self, k: int) -> StepRule:
        return self.last_rule if float(self.times[k + 1]) == 0 else self.rule

    @property
    def knows_chances(self) -> bool:
        """Whether the rules say who may jump without the network."""
        return isinstance(self.parameterization, Affine) and self.rule.jump_first and self.last_rule.jump_first

    @property
    def dense(self) -> bool:
        """Whether all positions take their steps together, each drawn from its whole law."""
        return self.stepper is not None or not self.knows_chances

    def chances(self, noise: Noise, earlier: Noise) -> Chances:
        """Those of the steps from noise [K] to earlier [K]."""
        assert isinstance(self.parameterization, Affine)
        steps = chances(self.rule, self.parameterization, noise, earlier)
        if self.last_rule is self.rule:
            return steps
        return steps.where(earlier.t > 0, chances(self.last_rule, self.parameterization, noise, earlier))

    def stretches(self) -> Iterator[tuple[StepRule, int, int]]:
        """The steps of one rule after the other: (rule, first step, the step after the last)."""
        for rule, steps in groupby(range(len(self.times) - 1), self.rule_of):
            first, *others = steps
            yield rule, first, first + 1 + len(others)

    @property
    def has_opaque_constraint(self) -> bool:
        """Whether a constraint of which nothing is known may change x after every step."""
        return not (self.constraint is None or isinstance(self.constraint, Fixed))

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks at x between the steps."""
        return self.callback is not None or self.has_opaque_constraint

    def jump(self, rule: StepRule) -> Jump:
        assert isinstance(self.parameterization, Affine)
        return Jump(rule, self.parameterization, self.sharpening, self.states)

    @property
    def states(self) -> States:
        return self.process.vocab_size, self.process.has_mask


def denoise(run: Run, x: Tensor) -> Tensor:
    """x [B, L] from the first time of the grid to the last."""
    noise, earlier = run.process.noise(run.times[:-1]), run.process.noise(run.times[1:])
    levels = torch.stack([noise.stacked(), earlier.stacked()], 1).to(x.device)
    sigma = noise.sigma.to(device=x.device, dtype=torch.float32)
    held = _held(run.constraint, x.shape)
    x = run.constraint(x) if run.constraint is not None else x.clone()
    if run.callback is not None:
        run.callback(0, float(run.times[0]), x)
    plan = None if run.dense else _plan(run, x, held, noise, earlier)
    if plan is None or run.is_watched:
        return _in_step(run, x, plan, held, levels, sigma)
    for rule, first, last in run.stretches():
        for candidates in plan.calls(first, last, x.device):
            x = _jump_step(run, rule, x, candidates, levels, sigma)
    return _possible(run, x)


def _in_step(run: Run, x: Tensor, plan: Plan | None, held: Tensor, levels: Tensor, sigma: Tensor) -> Tensor:
    """All texts take a step before any takes the next."""
    free, stay, stepping = ~held.to(x.device), _mask_stays(run, levels), None

    def dense_step(x: Tensor, k: int) -> Tensor:
        return _dense_step(run, k, x, free, levels[k], sigma[k], stay[k])

    if run.stepper is not None:
        assert isinstance(run.parameterization, Affine)
        how = (run.network, run.process, run.parameterization, run.sharpening, run.draws)
        stepping = run.stepper.start(Scene(*how, free, plain=dense_step), x)
    for start, stop in blocks(len(run.times) - 1, 1 if run.has_opaque_constraint else BLOCK_STEPS):
        planned = list(plan.block(start, stop, x.device)) if plan is not None else [None] * (stop - start)
        for k, candidates in zip(range(start, stop), planned, strict=True):
            if stepping is not None and float(run.times[k + 1]) > 0:
                x = stepping(x, k, *_ends(run.states, levels[k]))
            elif candidates is None:
                x = dense_step(x, k)
            else:
                x = _jump_step(run, run.rule_of(k), x, candidates, levels, sigma)
            if run.constraint is not None:
                x = run.constraint(x)
            if k + 2 == len(run.times):
                x = _possible(run, x)
            if plan is not None and run.has_opaque_constraint:
                plan.observe(x == run.process.vocab_size)
            if run.callback is not None:
                run.callback(k + 1, float(run.times[k + 1]), x)
    return x


def _possible(run: Run, x: Tensor) -> Tensor:
    """Data x [B, L] without noise that is not possible where it is.

    A network's belief excludes it, but ratios that are tamed near t = 0 may leave some: that is drawn from the belief.
    """
    only, parameterization = run.network.only, run.parameterization
    if only is None or not run.process.can_shuffle or float(run.times[-1]) > 0:
        return x
    rows = flat_places(only.where & ~only.tokens[x])
    if not len(rows) or not isinstance(parameterization, Affine):  # other networks' noise is never such
        return x
    noise, here = run.process.noise(run.times[-2]), x.flatten()[rows]
    v = run.draws.uniform(Use.REDRAW, -1).to(x.device).flatten()[rows]

    def drawn(outputs: Tensor, part: slice) -> Tensor:
        now = noise.like(here[part])
        return run.sharpening.draw(parameterization.posterior_logits(outputs.double(), here[part], now), v[part])

    outputs = run.network.rows(x, noise.sigma.to(x.device, torch.float32), Places(rows), full_precision=True)
    return put_at(x, rows, outputs.map(drawn))


def _mask_stays(run: Run, levels: Tensor) -> Tensor:
    """The probability with which a mask stays in each step, [K]; 0 where it is not known without the network."""
    noise, earlier = _ends(run.states, levels)
    return 1 - run.chances(noise, earlier).reveal if run.knows_chances else torch.zeros_like(noise.t)


def _held(constraint: Constraint | None, shape: tuple[int, ...]) -> Tensor:
    """Which positions never change, [B, L] bool on the host."""
    if isinstance(constraint, Fixed):
        return constraint.where.cpu().expand(shape)
    return torch.zeros(shape, dtype=torch.bool)


def _plan(run: Run, x: Tensor, held: Tensor, noise: Noise, earlier: Noise) -> Plan:
    masked = x == run.process.vocab_size
    return Plan(run.chances(noise, earlier), masked, held, run.draws, run.network.in_halves)


# ----------------------------------------------------------------------------------------------------------------
# One step, jump-first


def _jump_step(run: Run, rule: StepRule, x: Tensor, candidates: Candidates, levels: Tensor, sigma: Tensor) -> Tensor:
    """One call of the network; levels [K, 2, F] and sigma [K] are those of all steps."""
    flat = x.flatten()
    if len(candidates.places):
        rows, u, v = candidates.places.rows, candidates.u, candidates.v
        own_sigma = sigma.index_select(0, candidates.steps)
        outputs = run.network.rows(x, own_sigma, candidates.places, full_precision=True)
        if candidates.only_reveals:
            drawn = outputs.apply(Reveal(run.sharpening), (v,))
        else:
            own_levels = levels.index_select(0, candidates.of_rows)
            drawn = outputs.apply(run.jump(rule), (flat.index_select(0, rows), u, v, own_levels))
        flat = flat.index_copy(0, rows, drawn)
    if len(candidates.masked_again):
        flat = flat.index_fill(0, candidates.masked_again, run.process.vocab_size)
    return flat.view(x.shape)


@dataclass(frozen=True)
class Jump:
    """Candidates x [R] with outputs [R, V]: each jumps if u < 1 - stay, to where v says.

    levels: the noise of the two ends of each one's step, [R, 2, F] (see `Kernel.stacked`).
    """

    rule: StepRule
    parameterization: Affine
    sharpening: Sharpening
    states: States

    @property
    def of_tensors(self) -> bool:
        return self.rule.of_tensors and not self.sharpening.active

    def __call__(self, outputs: Tensor, x: Tensor, u: Tensor, v: Tensor, levels: Tensor) -> Tensor:
        now, next_ = _ends(self.states, levels)
        leap, probs = leap_of(self.rule, self.parameterization, self.sharpening, outputs.double(), x, now, next_)
        weights = jump_weights(leap, probs, x, now, self.sharpening)
        # A mask that is here has been decided to be revealed; a token jumps if its number is below its own chance.
        moves = now.is_mask(x) | (u < 1 - leap.stay)
        return torch.where(moves & (weights.sum(-1) > 0), inverse_cdf(weights, v), x)


# ----------------------------------------------------------------------------------------------------------------
# One step, dense


def _dense_step(run: Run, k: int, x: Tensor, free: Tensor, levels: Tensor, sigma: Tensor, stay: Tensor) -> Tensor:
    """Every position that can move is drawn from its whole law over the n states.

    stay: a probability with which masks stay at least; those that do by their numbers alone are not asked for.
    """
    flat, rule = x.flatten(), run.rule_of(k)
    noise, earlier = _ends(run.states, levels)
    numbers = run.draws.uniform(Use.TARGET, k).to(x.device)
    moves = free & ~(noise.is_mask(x) & is_surely_mask(numbers, stay))
    if rule.only_reverses:
        moves = moves & can_jump(x, noise.like(x))
    rows = flat_places(moves)
    if not len(rows):
        return x
    v = numbers.flatten()[rows]

    def drawn(outputs: Tensor, part: slice) -> Tensor:
        here, u = flat[rows[part]], v[part]
        moving = _moving(rule, run, k, outputs, here, noise, earlier, u)
        if moving is None or 2 * len(moving) > len(here):
            return _draw_dense(rule, run, outputs.double(), here, noise, earlier, u)
        if not len(moving):
            return here
        few = _draw_dense(rule, run, outputs[moving].double(), here[moving], noise, earlier, u[moving])
        return here.index_copy(0, moving, few)

    outputs = run.network.rows(x, sigma, Places(rows), full_precision=True)
    return put_at(x, rows, outputs.map(drawn))


def _moving(
    rule: StepRule, run: Run, k: int, outputs: Tensor, x: Tensor, noise: Noise, earlier: Noise, v: Tensor
) -> Tensor | None:
    """Which of the positions x [R] with ratios [R, V] may move by their numbers v, without a law; None if unknown.

    What is excluded may be what is there, and at t = 0 no mask is left: then all have to be asked. Of few outputs the
    laws take no longer than to find out.
    """
    meaning = shifted_outputs(run.parameterization)
    if rule.stay is None or meaning is None or run.sharpening.excluded:
        return None
    if float(run.times[k + 1]) == 0 or outputs.numel() < FEW_OUTPUTS:
        return None
    now, next_ = noise.like(x), earlier.like(x)
    # The larger the ratios, the less likely a position stays: so no rounding of their sum hides one that moves.
    stay = rule.stay(meaning.others(outputs, x, now) * (1 + _SUMMED_BY), x, now, next_)
    return flat_places(may_move(v, stay, now.is_mask(x)))


def _draw_dense(
    rule: StepRule, run: Run, outputs: Tensor, x: Tensor, noise: Noise, earlier: Noise, v: Tensor
) -> Tensor:
    parameterization, now, next_ = run.parameterization, noise.like(x), earlier.like(x)
    believes = isinstance(parameterization, Affine)
    if believes:
        leap, probs = leap_of(rule, parameterization, run.sharpening, outputs, x, now, next_)
        law = step_law(leap.stay, leap.remask, jump_weights(leap, probs, x, now, run.sharpening), x, now)
    else:
        law = rule.law(parameterization, run.sharpening.ratios(outputs, now.is_mask(x)), x, now, next_)
    if rule is run.last_rule and noise.has_mask:
        law[:, -1] = torch.where(earlier.t == 0, 0.0, law[:, -1])  # clean data have no masks
    if not believes:
        law = run.sharpening.jumps(law, x)
    return torch.where(law.sum(-1) > 0, inverse_cdf(law, v), x)


# ----------------------------------------------------------------------------------------------------------------
# The public function


Sampler = str | StepRule | Stepper | Order
"""A row of one of the tables, by its name or itself."""


def _rule_of(sampler: Sampler, dynamics: Dynamics) -> StepRule:
    """The step rule by its name; a sampler that is no rule (first-hitting) ends with a step of the analytic one."""
    rules = dynamics.rules()
    return sampler if isinstance(sampler, StepRule) else rules.get(str(sampler), rules["analytic"])


def sample(
    model: AnyModel,
    process: TokenProcess,
    shape: tuple[int, int],
    *,
    method: str | Method,
    sampler: Sampler = "analytic",
    steps: int = 256,
    constraint: Constraint | None = None,
    generator: torch.Generator | None = None,
    seeds: Sequence[int] | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    exclude: Sequence[int] = (),
    grid: str | Tensor = "uniform",
    final_denoise: bool = True,
    t_start: float = 1.0,
    x_start: Tensor | None = None,
    corrector: Corrector | None = None,
    callback: Callback | None = None,
    device: torch.device | str | None = None,
    batch: int | None = None,
    deterministic: bool | None = None,
    **extras: Tensor,
) -> Tensor:
    """Draw sequences [B, L] = `shape` from a model(x_t [B, L], sigma [B]) -> [B, L, V].

    Sequence i depends on its own seed alone, not on the others, nor on how many are drawn at once; see `deterministic`.

    Args:
        model: any callable `(x_t [B, L], sigma [B]) -> [B, L, V]`.
        process: the process that the network was trained to undo.
        shape: how many sequences of how many tokens.
        method: what its outputs mean, a name of `METHODS` or a row of your own.
        sampler: a rule of the method's dynamics ("analytic", "euler", "tau-leaping") or a `StepRule` of your own; or
            "first-hitting" (absorb, and flow matching's masks: at most L network calls and no discretization; `steps`
            and `grid` then say nothing); or a confidence order, "probability", "margin", "entropy" or an `Order` of
            your own (absorb: the surest masks first, all in `steps` calls of the network); or "remask-confidence",
            "gibbs", "stratified" or a `Stepper` of your own, whose steps are more than a rule. Autoregressive methods
            are sampled token by token, whatever it says.
        steps: steps from noise to data.
        constraint: applied to the start and after every step; `Fixed` holds positions, `prompt` the first ones.
        generator: gives the seed of the run, from which `text_seeds` makes one for each sequence.
        seeds: the seeds of the sequences themselves, B integers, in the place of a generator.
        temperature: sharpens what the network believes (for networks that give ratios: where jumps go).
        top_p: the same, by leaving out the least likely tokens.
        exclude: tokens that are never drawn, neither as noise nor as what the network believes.
        grid: "uniform", "jumps" (equally many tokens jump in each step), or the times themselves.
        final_denoise: end with a step to clean data; without it a few masks may be left.
        t_start: begin at an earlier time than 1.
        x_start: begin from these tokens instead of noise.
        corrector: flow matching's corrector.
        callback: called with the step's number, the time reached and x, before the first step and after each.
        device: where to sample; by default where the network's parameters are.
        batch: sequences at once; by default all, and half as many whenever the device's memory does not suffice.
        deterministic: the network reads one sequence at a time, so that no bit of it depends on the others: products
            of matrices are rounded otherwise for other numbers of rows. By default for modules on a CPU, where it
            costs little.
        extras: what the network takes besides, with one entry a sequence [B, ...]; handed to it by name.
    """
    chosen = get_method(method)
    chosen.check(process)
    _check(chosen, process, shape, sampler, corrector, constraint, x_start)
    dynamics = chosen.dynamics if corrector is None else chosen.dynamics.with_corrector(corrector)
    network = Network.of(model, process.vocab_size, device, extras, shape[0]).reading(deterministic)
    if isinstance(constraint, Fixed) and (only := constraint.only) is not None:
        where = (only.where & ~constraint.where).expand(shape)
        network = replace(network, only=Only(where.to(network.device), only.tokens.to(network.device)))
    own_seeds = _checked_seeds(seeds, generator, shape[0])
    order = sampler if isinstance(sampler, Order) else ORDERS.get(sampler) if isinstance(sampler, str) else None
    stepper = _stepper_of(sampler)
    sharpening = Sharpening(temperature, top_p, _checked_exclusion(exclude, process.vocab_size, constraint))
    end = max(dynamics.end(chosen.parameterization, process), LAST_TIME)
    times = time_grid(process, steps, grid, start=t_start, end=end, final_denoise=final_denoise)

    def draw_tokens(start: int, stop: int) -> Tensor:
        part = _part(constraint, start, stop)
        held = _held(part, (stop - start, shape[1]))
        numbers = Draws(own_seeds[start:stop], shape[1]).uniform(Use.TARGET)

        how = Drawing(held, sharpening.draw, part or _unconstrained, numbers, callback)
        return dynamics.draw(network.of_sequences(slice(start, stop)), process, how)

    def denoise_noise(start: int, stop: int) -> Tensor:
        rule, last_rule = _rule_of(sampler, dynamics), dynamics.last_rule(chosen.parameterization, process)
        run = Run(
            network=network.of_sequences(slice(start, stop)),
            process=process,
            parameterization=chosen.parameterization,
            rule=rule,
            last_rule=last_rule,
            times=times,
            sharpening=sharpening,
            constraint=_part(constraint, start, stop),
            draws=Draws(own_seeds[start:stop], shape[1]),
            callback=callback,
            stepper=stepper,
        )
        if run.network.extras is None and (run.dense or not dynamics.only_reveals(process)):
            # Texts are read again in which nothing changed, unlike where each call reveals a token of each text.
            run = replace(run, network=replace(run.network, model=remembering(run.network.model)))
        place = network.device
        if x_start is not None:
            x = x_start[start:stop].to(place, torch.int64)
        elif order is not None:  # it knows no time, at which the prior would have left some tokens
            x = torch.full((stop - start, shape[1]), process.vocab_size, device=place)
        else:
            x = _prior(run, place)
        if sampler == "first-hitting":
            return first_hitting(run.network, process, x, sharpening, run.constraint, run.draws, callback, t_start)
        if order is not None:
            how = (steps, sharpening, run.constraint, run.draws, callback)
            return reveal_in_order(run.network, process, x, order, *how)
        return denoise(run, x)

    with evaluating(model):
        draw = denoise_noise if dynamics.noisy else draw_tokens
        at_once = shape[0] if batch is None else batch
        # Where there is no noise the network's memory of what it has read is of a whole batch.
        drawn = _in_parts(draw, shape[0], min(at_once, 1) if network.one_by_one and not dynamics.noisy else at_once)
    network.check_outputs()
    return drawn


def _stepper_of(sampler: Sampler) -> Stepper | None:
    return sampler if isinstance(sampler, Stepper) else STEPPERS.get(sampler) if isinstance(sampler, str) else None


def check_sampler(
    sampler: Sampler, method: Method, process: TokenProcess, constraint: Constraint | None = None
) -> None:
    """Refuse a sampler that makes no sense with a method and a process, saying what to use instead."""
    known = (*(method.dynamics.rules() if method.dynamics.noisy else RULES), *STEPPERS, *WITHOUT_RULES)
    if isinstance(sampler, str) and sampler not in known:
        if sampler in RULES:
            check_reversal(sampler, method)
        raise ValueError(f"unknown sampler {sampler!r}; use one of {', '.join(known)}, or a StepRule")
    if not method.dynamics.noisy:
        return  # token by token, whatever the sampler
    rule = _rule_of(sampler, method.dynamics)
    rule.check(process)
    rule.check_method(method.parameterization)
    if (stepper := _stepper_of(sampler)) is not None:
        stepper.check(method, process)
    if isinstance(sampler, Order) or sampler in WITHOUT_RULES:
        check_reveals(sampler if isinstance(sampler, str) else sampler.name, method, process, constraint)


def _check(
    method: Method,
    process: TokenProcess,
    shape: tuple[int, int],
    sampler: Sampler,
    corrector: Corrector | None,
    constraint: Constraint | None,
    x_start: Tensor | None,
) -> None:
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"samples need a shape (number, length) of at least (1, 1); got {tuple(shape)}")
    check_sampler(sampler, method, process, constraint)
    if corrector is not None and (isinstance(sampler, Order) or sampler in WITHOUT_RULES):
        raise ValueError("the corrector masks tokens again, which this sampler cannot; use sampler='analytic'")
    if corrector is not None and isinstance(sampler, StepRule | Stepper):
        raise ValueError(f"the corrector belongs to flow matching's own rules, not to {sampler.name!r}; leave it out")
    if isinstance(constraint, Fixed):
        constraint.check(shape, process.vocab_size)
    if x_start is not None:
        if x_start.shape != torch.Size(shape):
            raise ValueError(f"x_start must have the shape of the samples, {tuple(shape)}; got {tuple(x_start.shape)}")
        if x_start.is_floating_point() or not bool(((x_start >= 0) & (x_start < process.num_states)).all()):
            raise ValueError(f"x_start must be states of the process, whole numbers in 0..{process.num_states - 1}")
        if not method.dynamics.noisy:
            raise ValueError(f"{method.name} is autoregressive and starts from nothing; give a prompt instead")


def _checked_exclusion(exclude: Sequence[int], vocab_size: int, constraint: Constraint | None) -> tuple[int, ...]:
    tokens = tuple(sorted(set(exclude)))
    if tokens and not (tokens[0] >= 0 and tokens[-1] < vocab_size and len(tokens) < vocab_size):
        raise ValueError(f"the tokens to exclude must lie in 0..{vocab_size - 1} and leave one to draw; got {tokens}")
    if isinstance(constraint, Fixed) and (only := constraint.only) is not None:
        allowed = only.tokens.cpu().index_fill(0, torch.tensor(tokens, dtype=torch.int64), False)
        if not allowed.any():
            raise ValueError(f"all tokens that alone may be drawn at some positions are excluded: {tokens}")
    return tokens


def _prior(run: Run, device: torch.device) -> Tensor:
    """Noise at t = 1: uniform among the tokens that may be drawn, run through the masking of the whole time."""
    allowed = torch.arange(run.process.vocab_size)
    if run.sharpening.excluded:
        allowed = allowed[~torch.isin(allowed, torch.tensor(run.sharpening.excluded))]
    u, only = run.draws.uniform(Use.TOKEN), run.network.only
    tokens = allowed[(u * len(allowed)).long()]
    if only is not None:
        possible = allowed[only.tokens.cpu()[allowed]]
        tokens = torch.where(only.where.cpu(), possible[(u * len(possible)).long()], tokens)
    masked = run.draws.uniform(Use.MASK) < run.process.kernel(1.0).a
    return tokens.masked_fill_(masked, run.process.vocab_size).to(device)


def _checked_seeds(seeds: Sequence[int] | None, generator: torch.Generator | None, n: int) -> Sequence[int]:
    """A seed for each of n sequences: those given, or by one number of the generator (or of the global one)."""
    if seeds is None:
        place = generator.device if generator is not None else torch.device("cpu")
        return text_seeds(int(torch.randint(2**62, (1,), generator=generator, device=place)), n)
    if generator is not None:
        raise ValueError("give the seeds of the sequences or a generator, not both")
    return one_for_each(seeds, n)


def _unconstrained(x: Tensor) -> Tensor:
    return x


def _part(constraint: Constraint | None, start: int, stop: int) -> Constraint | None:
    return constraint.part(start, stop) if isinstance(constraint, Fixed) else constraint


def _in_parts(draw: Callable[[int, int], Tensor], total: int, batch: int) -> Tensor:
    """Sequences 0..total-1, `batch` at a time; half as many when the device's memory is exhausted."""
    if batch < 1:
        raise ValueError(f"batch must be at least 1; got {batch}")
    done: list[Tensor] = []
    start = 0
    while start < total:
        stop = min(start + batch, total)
        try:
            done.append(draw(start, stop))
            start = stop
        except torch.OutOfMemoryError:
            if stop - start == 1:
                raise
            batch = (stop - start + 1) // 2
            torch.cuda.empty_cache()
    return torch.cat(done)
