"""`cedd.sample`: sequences from a model, by any sampler.

Shapes: B batch, L positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from types import EllipsisType

import torch
from torch import Tensor

from cedd.dynamics import Corrector
from cedd.methods import Method, get_method, model_first
from cedd.names import nearest
from cedd.network import AllowedTokens, AnyModel, Network, evaluating
from cedd.process import TokenProcess
from cedd.samplers.blocks import is_one_block, sample_in_blocks
from cedd.samplers.choice import Sharpening, check_excluded
from cedd.samplers.constraints import Constraint, Fixed, check_callable, held_positions
from cedd.samplers.guidance import check_guidance, guided
from cedd.samplers.options import NamedSampler, SamplingOptions
from cedd.samplers.particles import Particles
from cedd.samplers.random_numbers import check_shape, text_seeds
from cedd.samplers.registry import get_sampler
from cedd.samplers.sampler import Sampler, SamplingRun, sample_at_once

TOKENS_AT_ONCE = 1 << 24
"""Tokens per batch by default; the host needs about 100 bytes for each."""


@model_first("cedd.sample(model, process, shape, method=...)")
def sample(
    model: AnyModel,
    process: TokenProcess,
    shape: tuple[int, int],
    *,
    method: str | Method,
    sampler: str | NamedSampler | EllipsisType = ...,
    steps: int | None = None,
    constraint: Constraint | None = None,
    generator: torch.Generator | None = None,
    options: SamplingOptions | None = None,
    **others: object,
) -> Tensor:
    """Draw sequences [B, L] = `shape` from a model(x_t [B, L], sigma [B]) -> [B, L, V].

    Sequence i depends only on its own seed, not on the other sequences or the batch size; see
    `SamplingOptions.deterministic`.

    Args:
        model: any callable `(x_t [B, L], sigma [B]) -> [B, L, V]`.
        process: the process that the network was trained to reverse.
        shape: the number of sequences B and of tokens L.
        method: what the outputs mean: a name in `METHODS`, or a `Method`.
        sampler: a name in `SAMPLERS`, a `Sampler` or a `StepRule`; by default that of the options, "analytic".
            Autoregressive methods are always sampled token by token.
        steps: steps from noise to data, 256 by default.
        constraint: applied to the start and after every step. `Fixed` holds positions, `prompt` the first ones.
        generator: draws the seed of the run, from which `text_seeds` makes one per sequence; torch's default one unless
            given.
        options: the sampling options.
        others: fields of `SamplingOptions` as keyword arguments, such as temperature=0.8. All others are inputs of the
            network, tensors with one entry per sequence [B, ...], passed by name.
    """
    chosen = get_method(method)
    chosen.check(process)
    given = {name for name, value in others.items() if not (name == "label" and isinstance(value, Tensor))}
    settings = {one.name: others.pop(one.name) for one in fields(SamplingOptions) if one.name in given}
    conditions = {name: value for name, value in others.items() if isinstance(value, Tensor)}
    for name in others:
        if name not in conditions:
            near = nearest(name, [one.name for one in fields(SamplingOptions)])
            meant = "conditions of the network must be tensors" if near is None else f"did you mean {near!r}?"
            raise TypeError(f"unexpected argument {name!r}; {meant}")
    if sampler is not ...:
        settings["sampler"] = sampler
    options = (options or SamplingOptions()).changed({"steps": steps, **settings})
    if options.label is not None:
        raise ValueError("names of labels belong to trained models; pass label=, a tensor with an index per sequence")
    check_shape(shape)
    found = _with_particles(get_sampler(options.sampler, chosen), options)
    found.check(chosen, process, constraint)
    chosen = _with_corrector(chosen, options.corrector, found)
    if isinstance(constraint, Fixed):
        constraint.check(shape, process.vocab_size)
    elif constraint is not None:
        check_callable(constraint)
    _check_start(options.x_start, process, shape)
    network = Network.of(model, process.vocab_size, options.device, conditions, shape[0]).reading(options.deterministic)
    if isinstance(constraint, Fixed) and (only := constraint.only) is not None:
        where = (only.where & ~constraint.where).expand(shape)
        network = replace(network, only=AllowedTokens(where.to(network.device), only.tokens.to(network.device)))
    in_blocks = chosen.block is not None and not is_one_block(chosen.block, shape[1], model, options.context)
    if options.guidance is not None:
        check_guidance(chosen, process)
    if options.guidance is not None and not in_blocks:  # blocks are guided where they are written
        network = guided(network, options.guidance, held_positions(constraint, shape), process.mask_id)
    temperature = 1.0 if options.temperature is None else options.temperature
    top_p = 1.0 if options.top_p is None else options.top_p
    run = SamplingRun(
        network=network,
        process=process,
        method=chosen,
        length=shape[1],
        seeds=_seeds(options, generator, shape[0]),
        options=options,
        sharpening=Sharpening(temperature, top_p, _excluded(options.exclude, process.vocab_size, constraint)),
        constraint=constraint,
    )
    at_once = options.batch or max(1, TOKENS_AT_ONCE // shape[1])
    by_prompt = options.guidance is not None and "label" not in conditions
    if in_blocks and (network.one_by_one or (by_prompt and bool((run.held != run.held[:1]).any()))):
        at_once = 1  # so that the blocks of a text are read in the same pieces whatever the prompts of the other texts
    write = sample_in_blocks if in_blocks else sample_at_once
    with evaluating(model):
        drawn = _in_parts(lambda start, stop: found.texts(run.of_sequences(start, stop), write), shape[0], at_once)
    network.check_outputs()
    return drawn


def _with_corrector(method: Method, corrector: float | Corrector | None, sampler: Sampler) -> Method:
    """The method with flow matching's corrector."""
    if corrector is None:
        return method
    made = corrector if isinstance(corrector, Corrector) else Corrector(corrector)
    method = replace(method, dynamics=method.dynamics.with_corrector(made))
    if "corrector" in sampler.unused:
        raise ValueError(
            f"the corrector belongs to flow matching's own rules, not to {sampler.name!r}; use sampler='analytic'"
        )
    return method


def _with_particles(sampler: Sampler, options: SamplingOptions) -> Sampler:
    """The sampler, or particles if the options ask for them."""
    if options.particles is None:
        return sampler
    if not sampler.noisy:
        raise ValueError("particles need a model that only masks (process absorb); this one is autoregressive")
    if sampler.name not in ("analytic", "first-hitting"):
        raise ValueError(f"particles reveal masks in random order, not as {sampler.name} does; omit the sampler")
    return Particles(options.particles, options.reward, options.strength, report=options.on_particles)


def _check_start(x_start: Tensor | None, process: TokenProcess, shape: tuple[int, int]) -> None:
    if x_start is None:
        return
    if x_start.shape != torch.Size(shape):
        raise ValueError(f"x_start must have the shape of the samples, {tuple(shape)} (got {tuple(x_start.shape)})")
    if x_start.is_floating_point() or not bool(((x_start >= 0) & (x_start < process.num_states)).all()):
        raise ValueError(f"x_start must be states of the process, integers in 0..{process.num_states - 1}")


def _excluded(exclude: Sequence[int], vocab_size: int, constraint: Constraint | None) -> tuple[int, ...]:
    tokens = check_excluded(exclude, vocab_size)
    if isinstance(constraint, Fixed) and (only := constraint.only) is not None:
        allowed = only.tokens.cpu().index_fill(0, torch.tensor(tokens, dtype=torch.int64), False)
        if not allowed.any():
            raise ValueError(f"at some positions, all allowed tokens are excluded: {tokens}")
    return tokens


def _seeds(options: SamplingOptions, generator: torch.Generator | None, n: int) -> Sequence[int]:
    """A seed for each of n sequences: those of the options, or made from one number of the generator (by default
    torch's)."""
    if options.seed is None and options.seeds is None:
        place = generator.device if generator is not None else torch.device("cpu")
        return text_seeds(int(torch.randint(2**62, (1,), generator=generator, device=place)), n)
    if generator is not None:
        raise ValueError("give the seeds of the sequences or a generator, not both")
    return options.seeds_of(n)


def _in_parts(draw: Callable[[int, int], Tensor], total: int, batch: int) -> Tensor:
    """Sequences 0..total-1, `batch` at a time; half as many when the device's memory is exhausted."""
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
