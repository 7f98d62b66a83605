"""Sampling block by block: the law of every sampler within a block, exact caches, windows, prompts, stop tokens."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import cedd
from cedd.block_layout import FinishedText, GivenPast, InBlocks, first_of_window
from cedd.constraints import TokenLanguage, compile_tokens, regex
from cedd.data.tokenizers import CharTokenizer
from cedd.models.llama import Llama
from cedd.models.llama_config import LlamaConfig
from cedd.models.transformer import Transformer, config_from_preset
from cedd.network import AllowedTokens, Network, evaluating
from cedd.process import TokenProcess
from cedd.samplers import (
    SAMPLERS,
    Fixed,
    JointConstraint,
    get_sampler,
    grid_sampler,
    prompt,
    sample,
    text_seeds,
    time_grid,
)
from cedd.samplers.graphs import GraphedBlocks, _capture_stream, _NextBlock, _Recording, _Reveals, capture
from cedd.samplers.guidance import mixed
from cedd.samplers.languages import LanguageConstraint, Span
from cedd.samplers.options import default_steps
from tests.combinations import covering
from tests.networks import BlockNetwork, every_process
from tests.samplers import languages
from tests.samplers.chains import ERROR_RATE, all_sequences, p_value, sampler_law

V, L, BLOCK = 3, 4, 2
PROCESSES = every_process(V)
TEXTS = list(itertools.product(range(V), repeat=L))
NOISY = [name for name in SAMPLERS if name != "next-token"]


def is_possible(sampler: str, process: TokenProcess) -> bool:
    try:
        get_sampler(sampler, cedd.METHODS["bayes"]).check(cedd.METHODS["bayes"], process)
    except ValueError:
        return False
    return True


PAIRS = [(name, kind) for name in NOISY for kind, process in PROCESSES.items() if is_possible(name, process)]


@dataclass(frozen=True)
class AfterText:
    """The network of a block after a text, in the form that `sampler_law` takes."""

    outputs: Callable[[Tensor, Tensor], Tensor]
    length: int = BLOCK


def combined_law(model: BlockNetwork, law_of_block: Any) -> np.ndarray:
    """The law of a text [V^L], from the law of each block [V^b] given the text before it."""
    first = law_of_block(AfterText(model.after(())))
    second = [law_of_block(AfterText(model.after(past))) for past in itertools.product(range(V), repeat=BLOCK)]
    return (first[:, None] * np.stack(second)).reshape(-1)


def counts(texts: Tensor) -> np.ndarray:
    return np.bincount((texts * V ** torch.arange(L - 1, -1, -1)).sum(1).numpy(), minlength=V**L)


# ---- laws -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["roulette", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("absorb", "hybrid"))]
)
def test_texts_follow_sampler_law_in_each_block(kind: str) -> None:
    """By enumerating the states of a block: a chi-square test with the false-alarm rate of all sampler tests."""
    process, method, steps, copies = PROCESSES[kind], "bayes", 3, 20_000
    model = BlockNetwork(process, L, BLOCK, seed=1)
    times = time_grid(process, steps)

    def law_of_block(after: Any) -> np.ndarray:
        of_states = sampler_law(after, method, "analytic", process, times)
        clean = (all_sequences(process, BLOCK) < V).all(1).numpy()
        assert of_states[~clean].sum() < 1e-12
        return of_states[clean]

    drawn = sample(model, process, (copies, L), method=cedd.METHODS[method].in_blocks(BLOCK), steps=steps, seed=2)
    assert p_value(counts(drawn), combined_law(model, law_of_block)) > ERROR_RATE


@pytest.mark.parametrize("time_free", [pytest.param(True, marks=pytest.mark.slow), False])
def test_first_hitting_samples_follow_exact_likelihood(time_free: bool) -> None:
    process = cedd.absorb(V)
    model = BlockNetwork(process, L, BLOCK, seed=3, time_free=time_free)
    method = cedd.METHODS["cedd"].in_blocks(BLOCK)
    drawn = sample(model, process, (20_000, L), method=method, sampler="first-hitting", seed=4)
    nats = cedd.exact_likelihood(model, process, torch.tensor(TEXTS), range(L), method=method)
    assert p_value(counts(drawn), nats.neg().exp().numpy()) > ERROR_RATE


@pytest.mark.parametrize(("sampler", "kind"), covering(PAIRS))
def test_every_sampler_draws_blocks_like_whole_texts(sampler: str, kind: str) -> None:
    """Block k of text i has its own seed and is drawn from the network given the text before it."""
    process, method = PROCESSES[kind], cedd.METHODS["bayes"]
    model = BlockNetwork(process, L, BLOCK, seed=5)
    seeds = text_seeds(6, 3)
    found = sample(model, process, (3, L), method=method.in_blocks(BLOCK), sampler=sampler, seeds=seeds, steps=4)
    for row, seed in zip(found, seeds, strict=True):
        text: list[int] = []
        for own in text_seeds(seed, L // BLOCK):
            after = model.after(text)
            text += sample(after, process, (1, BLOCK), method=method, sampler=sampler, seeds=[own], steps=4)[0].tolist()
        assert row.tolist() == text


def test_single_block_matches_plain_sampling() -> None:
    process, method = PROCESSES["roulette"], cedd.METHODS["bayes"]
    model = BlockNetwork(process, L, L, seed=5)
    whole = sample(model.after(()), process, (4, L), method=method, steps=8, seed=7)
    assert torch.equal(sample(model.after(()), process, (4, L), method=method.in_blocks(L), steps=8, seed=7), whole)


# ---- caches -----------------------------------------------------------------------------------------------------

VOCABULARY, LENGTH, WIDTH = 11, 16, 4
MASKS = cedd.absorb(VOCABULARY)
IN_BLOCKS = cedd.METHODS["cedd"].in_blocks(WIDTH)


def network(seed: int = 0, **changes: Any) -> Transformer:
    """A tiny network whose parameters are all random."""
    torch.manual_seed(seed)
    config = config_from_preset("tiny", vocab_size=VOCABULARY, has_mask=True, length=LENGTH, **changes)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


class AttentionOnly(torch.nn.Module):
    """The same network without cache support."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model, self.head = model, model.head

    @property
    def capabilities(self) -> cedd.Capabilities:
        return cedd.Capabilities(
            features=True, attention=True, token_times=True, time_conditioned=self.model.options.time_conditioned
        )

    def features(self, x_t: Tensor, sigma: Tensor, **options: Any) -> Tensor:
        return self.model.features(x_t, sigma, **options)


@pytest.mark.parametrize(
    ("kind", "conditioned"), [("absorb", False), pytest.param("roulette", True, marks=pytest.mark.slow)]
)
def test_cache_does_not_change_samples(kind: str, conditioned: bool) -> None:
    """Exact in float32 on a CPU: the same operations in the same order, also beyond the context."""
    process = every_process(VOCABULARY)[kind]
    model, method = network(time_conditioning=conditioned), cedd.METHODS["bayes"].in_blocks(WIDTH)
    how: dict[str, Any] = {"method": method, "steps": 3, "seed": 1, "context": LENGTH}
    texts = [sample(model, process, (2, 24), cache=cache, **how) for cache in (True, False)]
    assert torch.equal(*texts)
    assert torch.equal(texts[0], sample(AttentionOnly(model), process, (2, 24), **how))
    assert len(texts[0].unique()) > 5


@pytest.mark.parametrize("conditioned", [True, False])
def test_cached_features_match_recomputed_ones(conditioned: bool) -> None:
    """Bit-identical to recomputed keys and values, and equal up to rounding to one pass over the whole text."""
    model = network(time_conditioning=conditioned)
    runs = [FinishedText.of(Network.of(model, VOCABULARY), WIDTH, 2, LENGTH, kept=kept) for kept in (True, False)]
    text = torch.randint(VOCABULARY, (2, LENGTH))
    block, sigma = torch.full((2, WIDTH), VOCABULARY), torch.tensor([0.3, 2.0])
    with evaluating(model):
        for known, pieces in ((0, []), (4, [4]), (12, [4, 4]), (12, [12])):
            for run in runs:
                run.forget()
                for piece in text[:, : sum(pieces)].split(pieces, 1) if pieces else ():
                    run.read(piece)
            known = sum(pieces)
            kept, again = (run(block, sigma, **run.conditions) for run in runs)
            assert torch.equal(kept, again)
            plain = GivenPast(model, WIDTH)(block, sigma, past=text[:, :known])
            torch.testing.assert_close(kept, plain, rtol=1e-5, atol=2e-6)
            for row in (0, 1):  # for one text alone
                one = runs[0](block[row : row + 1], sigma[row : row + 1], text=torch.tensor([row]))
                torch.testing.assert_close(one[0], kept[row], rtol=1e-5, atol=2e-6)


# ---- seeds, prompts, windows ------------------------------------------------------------------------------------


def test_text_depends_only_on_its_seed_and_prompt() -> None:
    model, seeds = network(), text_seeds(3, 3)
    held = [0, 4, 11]  # prompts of three lengths
    tokens = torch.randint(VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(1))
    where = torch.arange(24) < torch.tensor(held)[:, None]
    how: dict[str, Any] = {"method": IN_BLOCKS, "sampler": "first-hitting", "context": LENGTH}
    together = sample(model, MASKS, (3, 24), seeds=seeds, constraint=Fixed(tokens, where), **how)
    assert torch.equal(together[where], tokens[where])
    for row in range(3):
        one = Fixed(tokens[row : row + 1], where[row : row + 1])
        alone = sample(model, MASKS, (1, 24), seeds=seeds[row : row + 1], constraint=one, **how)
        assert torch.equal(alone[0], together[row])
    order = [2, 0, 1]
    other = Fixed(tokens[order], where[order])
    swapped = sample(model, MASKS, (3, 24), seeds=[seeds[i] for i in order], constraint=other, batch=2, **how)
    assert torch.equal(swapped, together[order])
    longer = sample(
        model,
        MASKS,
        (3, 31),
        seeds=seeds,
        constraint=Fixed(torch.nn.functional.pad(tokens, (0, 7)), torch.nn.functional.pad(where, (0, 7))),
        **how,
    )
    assert torch.equal(longer[:, :24], together)


@pytest.mark.slow
def test_batched_sampling_matches_single_texts() -> None:
    """Up to rounding in matrix products, which does not affect the drawn tokens here."""
    model, seeds = network(), text_seeds(3, 6)
    where = torch.arange(20) < torch.tensor([0, 2, 4, 6, 8, 9])[:, None]
    tokens = torch.randint(VOCABULARY, (6, 20), generator=torch.Generator().manual_seed(1))
    for sampler in ("first-hitting", "analytic"):
        how: dict[str, Any] = {"method": IN_BLOCKS, "sampler": sampler, "context": LENGTH, "seeds": seeds}
        alone, together = (
            sample(model, MASKS, (6, 20), constraint=Fixed(tokens, where), deterministic=one_by_one, **how)
            for one_by_one in (True, False)
        )
        assert torch.equal(alone, together)


@pytest.mark.parametrize("most", range(1, 9))
def test_window_slides_by_half_and_keeps_at_least_half(most: int) -> None:
    firsts = [first_of_window(number, most) for number in range(60)]
    assert firsts[:most] == [0] * most
    for number, first in enumerate(firsts):
        assert 0 < number - first + 1 <= most
        assert number < most or number - first >= most // 2
    assert firsts == sorted(firsts)
    assert len(set(firsts)) <= 2 + 60 // max(1, most - most // 2)


def test_only_the_window_matters_beyond_context() -> None:
    """Dropped text has no effect, and the window starts at position 0."""
    model, seed = network(), 5
    how: dict[str, Any] = {"method": IN_BLOCKS, "sampler": "first-hitting", "context": LENGTH, "seed": seed}
    text = sample(model, MASKS, (1, 40), **how)
    for number in range(10):
        first = first_of_window(number, LENGTH // WIDTH)
        here = slice(number * WIDTH, (number + 1) * WIDTH)
        (own,) = text_seeds(text_seeds(seed, 1)[0], 10)[number : number + 1]
        past = text[:, first * WIDTH : here.start]
        conditional = GivenPast(model, WIDTH)
        again = sample(conditional, MASKS, (1, WIDTH), method="cedd", sampler="first-hitting", seeds=[own], past=past)
        assert torch.equal(again, text[:, here]), number
    changed = sample(model, MASKS, (1, 40), constraint=prompt((text[0, :8] + 1) % VOCABULARY, 40), **how)
    held = prompt(torch.cat([(text[0, :8] + 1) % VOCABULARY, text[0, 8:16]]), 40)
    assert torch.equal(sample(model, MASKS, (1, 40), constraint=held, **how)[:, 16:], text[:, 16:])
    assert not torch.equal(changed[:, 8:16], text[:, 8:16])


@pytest.mark.slow
def test_texts_of_any_length() -> None:
    """The last block is drawn in full and truncated, so a longer text starts with the shorter one."""
    model = network()
    how: dict[str, Any] = {"method": IN_BLOCKS, "sampler": "first-hitting", "context": LENGTH, "seed": 2}
    longest = sample(model, MASKS, (2, 32), **how)
    for length in (1, 4, 5, 30):
        assert torch.equal(sample(model, MASKS, (2, length), **how), longest[:, :length])


def test_prompt_may_be_longer_than_context() -> None:
    model = network()
    tokens = torch.randint(VOCABULARY, (27,), generator=torch.Generator().manual_seed(1))
    how: dict[str, Any] = {"method": IN_BLOCKS, "sampler": "first-hitting", "context": LENGTH, "seed": 2}
    found = sample(model, MASKS, (2, 36), constraint=prompt(tokens, 36), **how)
    assert torch.equal(found[:, :27], tokens.expand(2, -1))
    assert not torch.equal(found[0], found[1])
    whole = sample(model, MASKS, (1, 27), constraint=prompt(tokens, 27), **how)
    assert torch.equal(whole[0], tokens)


def test_text_ends_at_stop_token() -> None:
    model, stop = network(), 4
    how: dict[str, Any] = {"method": IN_BLOCKS, "sampler": "first-hitting", "context": LENGTH, "seed": 2}
    held = prompt(torch.tensor([stop, stop, 1]), 22)  # stop tokens in a prompt have no effect
    for constraint in (None, held):
        endless = sample(model, MASKS, (5, 22), constraint=constraint, **how)
        ended = sample(model, MASKS, (5, 22), constraint=constraint, stop=[stop], **how)
        first = 0 if constraint is None else 3
        lengths = []
        for row, plain in zip(ended, endless, strict=True):
            ends = (plain[first:] == stop).nonzero()
            end = first + int(ends[0]) if len(ends) else 22
            assert torch.equal(row[:end], plain[:end])
            assert bool((row[end:] == stop).all())
            lengths.append(end)
        assert len(set(lengths)) > 1


def test_excluded_or_disallowed_tokens_are_not_generated() -> None:
    model = network()
    found = sample(model, MASKS, (4, 22), method=IN_BLOCKS, seed=1, exclude=[0, 1, 2], context=LENGTH)
    assert int(found.min()) > 2
    tokens = torch.zeros(VOCABULARY, dtype=torch.bool)
    tokens[5] = True
    where = torch.arange(22) == 13
    only = Fixed(torch.zeros(22).long(), torch.arange(22) < 2, AllowedTokens(where, tokens))
    found = sample(model, MASKS, (4, 22), method=IN_BLOCKS, seed=1, constraint=only, context=LENGTH)
    assert bool((found[:, 13] == 5).all())
    assert bool((found[:, :2] == 0).all())


def test_custom_constraint_receives_whole_texts() -> None:
    model, seen = network(), list[Tensor]()

    def constraint(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return torch.where(torch.arange(x.shape[1]) == 9, 7, x)

    found = sample(model, MASKS, (2, 18), method=IN_BLOCKS, steps=3, seed=1, constraint=constraint, deterministic=False)
    assert {tuple(x.shape) for x in seen} == {(2, 18)}
    assert bool((found[:, 9] == 7).all())
    assert bool((seen[0] == VOCABULARY).sum() > 20)


@pytest.mark.parametrize("deterministic", [True, False])
def test_callback_receives_growing_texts(deterministic: bool) -> None:
    model, seen = network(), list[tuple[int, float, Tensor]]()
    found = sample(
        model,
        MASKS,
        (2, 18),
        method=IN_BLOCKS,
        sampler="first-hitting",
        seed=1,
        deterministic=deterministic,
        callback=lambda step, t, x: seen.append((step, t, x.clone())),
    )
    parts = [seen] if not deterministic else [seen[: len(seen) // 2], seen[len(seen) // 2 :]]
    for number, part in enumerate(parts):
        assert [step for step, _, _ in part] == list(range(len(part)))
        times = [t for _, t, _ in part]
        assert times == sorted(times, reverse=True)
        assert times[0] == 1.0
        assert times[-1] < 1 / 5
        masks = [int((x == VOCABULARY).sum()) for _, _, x in part]
        assert masks == sorted(masks, reverse=True)
        assert torch.equal(part[-1][2], found[number : number + 1] if deterministic else found)


def replayed(function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], pool: Any) -> _Recording:
    """Like a CUDA graph: the same operations on the same tensors, overwriting the results."""
    del pool
    outputs = tuple(one.clone() for one in function(*inputs))

    def replay() -> None:
        for room, made in zip(outputs, function(*inputs), strict=True):
            room.copy_(made)

    return _Recording(replay, inputs, outputs)


def traced(function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], pool: Any) -> _Recording:
    """The same without the Python around the operations: numbers of the first call stay fixed; reading a tensor on the
    host is an error."""
    return replayed(make_fx(function)(*inputs), inputs, pool)


@pytest.mark.parametrize(
    ("sampler", "kind"), [("first-hitting", "absorb"), pytest.param("analytic", "roulette", marks=pytest.mark.slow)]
)
def test_recorded_blocks_match_network(sampler: str, kind: str) -> None:
    """With prompts of several lengths, texts that end, several blocks per prompt, and a window that slides."""
    process, where = every_process(VOCABULARY)[kind], torch.arange(22) < torch.tensor([[0], [9], [3]])
    model, recordings = network(), list[Any]()
    how: dict[str, Any] = {"method": IN_BLOCKS, "sampler": sampler, "seed": 1, "deterministic": False, "context": 12}
    how |= {"constraint": Fixed((torch.arange(22) % 5).expand(3, -1), where), "stop": (7,)}

    def capture(function: Any, *inputs: Any) -> _Recording:
        recordings.append(function)
        return (traced if isinstance(function, (_NextBlock, _Reveals)) else replayed)(function, *inputs)

    graphed: Any = GraphedBlocks(model, torch.float32, capture)
    plain = sample(model, process, (3, 22), **how)
    assert bool((plain == 7).any())
    with torch.inference_mode():  # its tensors cannot be modified afterwards
        assert torch.equal(sample(graphed, process, (3, 22), **how), plain)
    assert torch.equal(sample(graphed, process, (3, 22), **how), plain)
    assert sum(isinstance(function, _NextBlock) for function in recordings) == 1  # one for all blocks and runs
    used = [graphed.new_cache(3, 12) for _ in range(3)]  # none of which shares its memory
    assert len({cache.keys.data_ptr() for cache in used}) == 3
    freed = weakref.ref(graphed)
    del graphed
    assert freed() is None  # with its recordings, before any garbage is collected


@pytest.mark.parametrize(
    ("sampler", "rows", "options", "together"),
    [
        ("first-hitting", 1, {}, True),
        ("analytic", 2, {"steps": 7}, True),
        ("analytic", 1, {"steps": 3, "exclude": (2,)}, True),
        ("first-hitting", 17, {}, False),  # too many positions
        ("first-hitting", 1, {"top_p": 0.9}, False),  # the number of tokens to sort is not known beforehand
        ("first-hitting", 1, {"callback": lambda *_: None}, False),
    ],
)
def test_calls_of_a_block_are_recorded_together(
    sampler: str, rows: int, options: dict[str, Any], together: bool
) -> None:
    model, sizes = network(time_input="sigma"), set[int]()

    def capture(function: Any, inputs: Any, pool: Any) -> _Recording:
        if isinstance(function, _Reveals):
            sizes.add(len(inputs[1]))
            return traced(function, inputs, pool)
        return replayed(function, inputs, pool)

    how: dict[str, Any] = {"method": IN_BLOCKS, "sampler": sampler, "seed": 1, "deterministic": False, **options}
    graphed: Any = GraphedBlocks(model, torch.float32, capture)
    plain = sample(model, MASKS, (rows, LENGTH), **how)
    for _ in range(2):
        assert torch.equal(sample(graphed, MASKS, (rows, LENGTH), **how), plain)
    assert bool(sizes) == together
    assert sizes <= {1, 2, 4}


@pytest.mark.parametrize("fails", [pytest.param("_NextBlock", marks=pytest.mark.slow), "_HeadAnd", "_Reveals"])
def test_sampling_continues_if_recording_fails(fails: str) -> None:
    """The second recording with guidance or a sampler step fails; the texts match the unrecorded network."""
    model, tried = network(labels=2), list[str]()
    how: dict[str, Any] = {"method": IN_BLOCKS, "sampler": "first-hitting", "seed": 1, "context": 12, "stop": (7,)}
    how |= {"deterministic": False}
    if fails != "_Reveals":  # with a label, calls are recorded one by one
        how |= {"label": torch.tensor([0, 1, 1])}

    def capture(function: Any, *inputs: Any) -> _Recording:
        tried.append(type(function).__name__)
        if tried.count(fails) > int(fails == "_NextBlock" and guidance is not None):
            raise RuntimeError("operation not permitted when stream is capturing\nThis is a long story.")
        return replayed(function, *inputs)

    for guidance in (None, 2.5) if fails == "_NextBlock" else (None,):  # guidance records no steps
        graphed: Any = GraphedBlocks(model, torch.float32, capture)
        tried.clear()
        plain = sample(model, MASKS, (3, 22), guidance=guidance, **how)
        with pytest.warns(UserWarning, match=r"slower \(operation not permitted when stream is capturing\)$"):
            found = sample(graphed, MASKS, (3, 22), guidance=guidance, **how)
        assert torch.equal(found, plain)
        count = len(tried)
        assert torch.equal(sample(graphed, MASKS, (3, 22), guidance=guidance, **how), plain)
        assert len(tried) == count  # neither retried nor warned about again


def test_network_error_is_not_treated_as_recording_failure() -> None:
    unlabelled = GraphedBlocks(network(), torch.float32, replayed)
    cache, one = unlabelled.new_cache(1, 12), torch.zeros(1)
    with pytest.raises(ValueError, match="not trained with labels"):
        unlabelled.next_block(cache, torch.zeros(1, 4).long(), one, label=one.long())


def test_recordings_use_device_of_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the current device; a failed recording restores the current stream."""
    current, entered = {"device": "cuda:0", "stream": "first"}, list[Any]()

    @contextmanager
    def change(name: str, value: Any) -> Iterator[None]:
        before = current[name]
        current[name] = value
        try:
            yield
        finally:
            current[name] = before

    @contextmanager
    def record(graph: Any, pool: Any, stream: Any) -> Iterator[None]:
        entered.append((current["device"], stream.device))
        current["stream"] = stream
        yield  # torch's returns to the stream that was current only if the recording succeeds

    class Stream(SimpleNamespace):
        def wait_stream(self, other: Any) -> None:
            assert other.device == self.device

    device = torch.device("cuda:1")
    own = Stream(device=device)
    monkeypatch.setattr(torch.cuda, "device", lambda device: change("device", str(device)))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: change("stream", stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: own)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(device=device))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", record)
    calls = list[str]()

    def failing(_input: Any) -> tuple[Tensor, ...]:
        calls.append(current["device"])
        if len(calls) == 3:
            raise RuntimeError("not permitted")
        return ()

    inputs: Any = (SimpleNamespace(device=device),)
    with pytest.raises(RuntimeError, match="not permitted"):
        capture(failing, inputs, None)
    assert current == {"device": "cuda:0", "stream": "first"}
    capture(failing, inputs, None)
    assert calls == ["cuda:1"] * 6
    assert entered == [("cuda:1", device)] * 2
    assert current == {"device": "cuda:0", "stream": "first"}
    _capture_stream.cache_clear()


@pytest.mark.parametrize("cache", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_guidance_mixes_laws_within_each_block(cache: bool) -> None:
    """Given the text before the block, with and without the label; the reference processes whole texts."""
    model, label = network(labels=2), torch.tensor([0, 1, 1])
    how: dict[str, Any] = {"method": IN_BLOCKS, "sampler": "first-hitting", "seed": 1, "label": label}

    def guided(x_t: Tensor, sigma: Tensor, *, clean: Tensor, label: Tensor) -> Tensor:
        levels = sigma[:, ::WIDTH]
        known, unknown = (InBlocks(model, WIDTH)(x_t, levels, clean=clean, label=one) for one in (label, 0 * label - 1))
        return mixed(known, unknown, 2.5)

    with evaluating(model):
        expected = sample(guided, MASKS, (3, LENGTH), **how)
    found = sample(model, MASKS, (3, LENGTH), guidance=2.5, cache=cache, **how)
    assert torch.equal(found, expected)
    assert torch.equal(found[:, :6], sample(model, MASKS, (3, 26), guidance=2.5, context=LENGTH, **how)[:, :6])
    plain = sample(model, MASKS, (3, LENGTH), **how)
    assert torch.equal(plain, sample(model, MASKS, (3, LENGTH), guidance=1.0, **how))
    assert not torch.equal(plain, found)
    recorded: Any = GraphedBlocks(model, torch.float32, replayed)
    assert torch.equal(found, sample(recorded, MASKS, (3, LENGTH), guidance=2.5, **how))
    with pytest.raises(ValueError, match="guidance needs a condition: a label, a prompt or other given text"):
        sample(network(), MASKS, (1, LENGTH), method=IN_BLOCKS, guidance=2.0)


def test_block_steps_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, check = list[str](), grid_sampler.check_leaps

    def counted(rule: cedd.samplers.StepRule, *others: Any) -> None:
        planned.append(rule.name)
        check(rule, *others)

    monkeypatch.setattr(grid_sampler, "check_leaps", counted)
    for process in (MASKS, cedd.roulette(VOCABULARY)):
        sample(network(), process, (2, 24), method=cedd.METHODS["bayes"].in_blocks(WIDTH), steps=3, seed=1)
    assert planned == ["analytic"] * 2  # once per run, for all texts


def test_steps_are_counted_per_block() -> None:
    assert [default_steps(1000, block) for block in (1, 4, 16, 64, 100, 512)] == [1, 4, 16, 64, 64, 128]
    model, calls = network(), list[float]()
    how: dict[str, Any] = {"method": IN_BLOCKS, "seed": 1, "callback": lambda step, t, x: calls.append(t)}
    sample(model, MASKS, (1, 12), **how)
    assert len(calls) == 3 * (2 + WIDTH)
    calls.clear()
    sample(model, MASKS, (1, 12), steps=2, **how)
    assert len(calls) == 3 * (2 + 2)


def test_language_across_blocks_follows_tilted_law_of_each_block() -> None:
    """Each block is drawn from its own tilted law, given that the text can be completed."""
    process, pattern = cedd.absorb(V), "(ab|c)*"
    model = BlockNetwork(process, L, BLOCK, seed=0, time_free=True)
    texts = languages.members(pattern, V, L)

    def law(past: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        after, start = model.after(past), len(past)
        here = sorted({text[start : start + BLOCK] for text in texts if text[:start] == past})

        def laws(seen: tuple[int, ...]) -> np.ndarray:
            outputs = after(torch.tensor([seen]), torch.ones(1))
            return torch.softmax(outputs[0], -1).numpy()

        return languages.tilted_law(laws, BLOCK, here, V)

    expected = np.zeros(V**L)
    for first, chance in law(()).items():
        for second, share in law(first).items():
            expected[TEXTS.index((*first, *second))] = chance * share
    assert expected.sum() == pytest.approx(1)
    constraint = languages.constraint(pattern, V, L)
    method = cedd.METHODS["cedd"].in_blocks(BLOCK)
    drawn = sample(model, process, (1500, L), method=method, sampler="first-hitting", constraint=constraint, seed=1)
    assert p_value(counts(drawn), expected) > ERROR_RATE


@pytest.mark.parametrize("sampler", [pytest.param("entropy", marks=pytest.mark.slow), "analytic", "first-hitting"])
def test_language_spans_may_start_and_end_within_blocks(sampler: str) -> None:
    model, tokenizer, spans = network(), CharTokenizer("abcdefghijk"), list[Span]()
    for pattern, start, stop in (("(ab|c)*", 3, 6), ("a*d[ab]+", 6, 11)):
        compiled = compile_tokens(regex(pattern).automaton, tokenizer.texts, may_end=False)
        spans.append(Span(start, stop, TokenLanguage(compiled)))
    constraint = LanguageConstraint(torch.tensor([6] * 12), torch.arange(12) < 2, None, tuple(spans))
    drawn = sample(model, MASKS, (4, 12), method=IN_BLOCKS, sampler=sampler, constraint=constraint, seed=0)
    assert bool((drawn[:, :2] == 6).all())
    for text in drawn.tolist():
        assert spans[0].language.automaton.matches(text[3:6])
        assert spans[1].language.automaton.matches(text[6:11])


def test_unsupported_options_are_rejected() -> None:
    model = network()
    where = torch.arange(12) == 9
    with pytest.raises(ValueError, match="text cannot be given in a later block than a blank"):
        sample(model, MASKS, (1, 12), method=IN_BLOCKS, constraint=Fixed(torch.zeros(12).long(), where))

    class Joint(JointConstraint):
        def draw(self, *_: Any, **__: Any) -> Tensor:
            raise AssertionError

    joint = Joint(torch.zeros(12).long(), torch.zeros(12).bool())
    with pytest.raises(ValueError, match=r"take languages and fixed tokens as constraints \(got a Joint\)"):
        sample(model, MASKS, (1, 12), method=IN_BLOCKS, sampler="first-hitting", constraint=joint)
    with pytest.raises(ValueError, match=r"x_start needs whole blocks of 4 tokens \(got 10\)"):
        sample(model, MASKS, (1, 10), method=IN_BLOCKS, x_start=torch.zeros(1, 10).long())
    with pytest.raises(ValueError, match="ar is autoregressive and has no blocks"):
        sample(model, MASKS, (1, 10), method=cedd.METHODS["ar"].in_blocks(4))


# ---- networks that were autoregressive --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causal_past", "shift", "start_row"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((True, False, None), (False, True, None), (False, False, None))
        ),
        (True, True, 3),
    ],
)
def test_llama_network_samples_blocks_with_exact_cache(causal_past: bool, shift: bool, start_row: int | None) -> None:
    """The cache agrees with one pass over the whole text, also with a shift and a start token."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"shift": shift, "start_row": start_row, "causal_past": causal_past}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        has_mask=True,
        length=LENGTH,
        width=32,
        depth=2,
        heads=4,
        **{"key_heads": 2, "head_width": 8, "mlp_width": 48, "attention": "block-causal", "block": WIDTH, **options},
    )
    model = Llama(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    text, block = torch.randint(VOCABULARY, (2, LENGTH)), torch.full((2, WIDTH), VOCABULARY)
    finished, sigma = FinishedText.of(Network.of(model, VOCABULARY), WIDTH, 2, LENGTH), torch.zeros(2)
    with evaluating(model):
        for known in range(0, LENGTH, WIDTH):
            found = finished(block, sigma, **finished.conditions)
            x_t = torch.cat([text[:, :known], block], 1)
            levels = torch.zeros(2, known // WIDTH + 1)
            whole = InBlocks(model, WIDTH)(x_t, levels, clean=text[:, : known + WIDTH])[:, known:]
            torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
            finished.read(text[:, known : known + WIDTH])
    how: dict[str, Any] = {"method": IN_BLOCKS, "sampler": "first-hitting", "seed": 1, "context": LENGTH}
    assert torch.equal(*(sample(model, MASKS, (2, 24), cache=cache, **how) for cache in (True, False)))
    how |= {"particles": 3, "reward": lambda x: (x == 5).double().mean(1), "strength": 60.0}
    assert torch.equal(*(sample(model, MASKS, (1, 24), cache=cache, **how) for cache in (True, False)))
