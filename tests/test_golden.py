"""Losses, scores, bounds and samples of every method on every process, compared with the numbers of golden.json.

A refactoring does not change these numbers. If a test fails here, either the change has a mistake, or it is meant to
change what is computed: another estimator, another order of random draws. Then rewrite the file, and say in the commit
message which numbers changed and why:

    python -m tests.test_golden --write

Floats agree to 9 digits, since other chips and other libraries round differently. Tokens agree exactly: they are drawn
with float64 numbers of torch's CPU generator. null means that the combination is not supported.
"""

import json
import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cedd
from cedd.process import TokenProcess
from tests.combinations import covering
from tests.networks import every_process

FILE = Path(__file__).with_name("golden.json")
V = 3
PROCESSES = every_process(V)
CASES = [f"{method} on {process}" for method in cedd.METHODS for process in PROCESSES]


def network(x_t: Tensor, sigma: Tensor) -> Tensor:
    """A smooth float64 function of a token, its left neighbour and sigma."""
    token = torch.arange(V, dtype=torch.float64)
    position = torch.arange(x_t.shape[1], dtype=torch.float64)[:, None]
    here, left = x_t.double()[..., None], torch.nn.functional.pad(x_t.double(), (1, 0), value=-1.0)[:, :-1, None]
    level = (sigma.double() / (1 + sigma.double()))[:, None, None]
    return 1.3 * torch.sin(1 + 0.7 * here + 1.9 * token + 0.4 * position) + 0.8 * torch.cos(
        0.9 * left + 1.1 * token + level
    )


def tokens(sequences: int, length: int) -> Tensor:
    index = torch.arange(sequences * length)
    return ((7 * index * index + 3 * index + index // 5) % V).reshape(sequences, length)


def data_law(length: int) -> Tensor:
    weights = 0.2 + torch.arange(1, V**length + 1, dtype=torch.float64).sqrt().sin().abs()
    return (weights / weights.sum()).reshape((V,) * length)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def scores(method: str, process: TokenProcess) -> Tensor:
    """Log scores at every token and, if the process has one, the mask."""
    x_t, t = torch.arange(2 * process.num_states).reshape(2, -1) % process.num_states, torch.tensor([0.1, 0.8])
    return cedd.log_scores(network(x_t, process.sigma(t)), process, x_t, t, method=method)


def estimate(method: str, process: TokenProcess, bound: Any) -> list[float]:
    found = cedd.estimate_bound(network, process, tokens(6, 4), method=method, bound=bound, draws=4, generator=seeded())
    return [found.nats_per_token, found.stderr]


def samples(method: str, process: TokenProcess, sampler: str, corrector: cedd.Corrector | None = None) -> Tensor:
    return cedd.sample(
        network, process, (3, 6), method=method, sampler=sampler, steps=5, generator=seeded(), corrector=corrector
    )


def plain(value: Tensor | float | list[float]) -> Any:
    """A JSON value, with strings for infinity and NaN."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value if math.isfinite(value) else str(value)


def none_if_unsupported(compute: Callable[..., Tensor | float | list[float]], *arguments: Any, **named: Any) -> Any:
    try:
        return plain(compute(*arguments, **named))
    except ValueError:
        return None


@cache
def exact(parts: tuple[Any, ...], process: str, bound: str | None) -> Any:
    """A bound, or the cross entropy if `bound` is None, by enumeration. They depend on the parameterization and the
    dynamics (`parts`) but not on the loss, so several methods share them."""
    method = next(method for method in cedd.METHODS.values() if parts_of(method) == parts)
    known = {"method": method, "sigma_dtype": torch.float64, **({} if bound is None else {"bound": bound})}
    compute = cedd.exact_cross_entropy if bound is None else cedd.exact_bound
    return none_if_unsupported(compute, network, PROCESSES[process], data_law(2), **known)


def parts_of(method: cedd.Method) -> tuple[Any, ...]:
    return method.parameterization, method.dynamics


def numbers(case: str) -> dict[str, Any]:
    """All numbers stored for a method on a process."""
    method, name = case.split(" on ")
    parts = parts_of(cedd.METHODS[method])
    return {
        **estimates(case),
        "exact cross entropy": exact(parts, name, None),
        **{f"exact {bound}": exact(parts, name, bound) for bound in ("tight", "j1", "j2")},
    }


def estimates(case: str) -> dict[str, Any]:
    """The numbers that need no enumeration."""
    method, name = case.split(" on ")
    process = PROCESSES[name]
    found = {
        "loss": none_if_unsupported(cedd.loss, network, process, tokens(5, 4), method=method, generator=seeded()),
        "log_scores": none_if_unsupported(scores, method, process),
        "samples, corrected": none_if_unsupported(samples, method, process, "analytic", cedd.Corrector()),
    }
    for bound in ("tight", "j1", "j2"):
        found[f"estimated {bound}"] = none_if_unsupported(estimate, method, process, bound)
    for sampler in ("analytic", "euler", "tau-leaping", "first-hitting"):
        found[f"samples, {sampler}"] = none_if_unsupported(samples, method, process, sampler)
    return found


def assert_close(found: Any, known: Any) -> None:
    if isinstance(known, list):
        assert isinstance(found, list)
        assert len(found) == len(known)
        for one, other in zip(found, known, strict=True):
            assert_close(one, other)
    elif isinstance(known, float):
        assert found == pytest.approx(known, rel=1e-9, abs=1e-12)
    else:
        assert found == known


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(FILE.read_text("utf-8"))


def test_golden_file_has_every_method_and_process(golden: dict[str, Any]) -> None:
    assert golden.keys() == set(CASES)


@pytest.mark.parametrize(
    ("method", "process"),
    covering((method, process) for method in cedd.METHODS for process in PROCESSES if process != "roulette"),
)
def test_estimates_match_golden_values(method: str, process: str, golden: dict[str, Any]) -> None:
    """The next test covers roulette."""
    case = f"{method} on {process}"
    for name, found in estimates(case).items():
        assert_close(found, golden[case][name])


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case.endswith(" roulette") else pytest.mark.slow) for case in CASES]
)
def test_all_numbers_match_golden_values(case: str, golden: dict[str, Any]) -> None:
    """Includes the enumerated numbers, which tests/bounds/test_exact.py compares with integrals."""
    found = numbers(case)
    assert found.keys() == golden[case].keys()
    for name, known in golden[case].items():
        assert_close(found[name], known)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    cases = [f"{json.dumps(case)}: {json.dumps(numbers(case))}" for case in CASES]
    FILE.write_text("{\n" + ",\n".join(cases) + "\n}\n", encoding="utf-8")
