"""`cedd theory` passes, reports it in JSON, and fails if a formula is broken."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from cedd import theory as claims
from cedd.cli import main
from cedd.cli import theory as command
from cedd.cli.theory import _plain
from cedd.parameterization import AffineScore
from cedd.process import Kernel, TokenProcess
from cedd.theory import CLAIMS, Finding, ToyProblem

SMALL = ["theory", "--vocab", "2", "--length", "1"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    code = main([*SMALL, "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_every_claim_holds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check_all, found = command._check_all, []

    def once(problem: ToyProblem) -> dict[str, list[Finding]]:
        """Computed once for both output formats."""
        found.extend([] if found else [check_all(problem)])
        return found[0]

    monkeypatch.setattr(command, "_check_all", once)
    code, record = run(capsys, "--seed", "3")
    assert code == 0
    assert record["passed"]
    assert (record["vocab"], record["length"], record["seed"]) == (2, 1, 3)
    assert {row["claim"] for row in record["claims"]} == set(CLAIMS)
    assert all(row["holds"] and row["statement"] for row in record["claims"])
    wrong = [row for row in record["claims"] if row["relation"] == "erratum"]
    assert all(row["left"] > 1e-4 for row in wrong)
    assert main([*SMALL, "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CLAIMS)
    assert "comparisons hold" in out
    assert "FAILS" not in out


def test_every_seed_gives_different_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "CLAIMS", {"Proposition 5": CLAIMS["Proposition 5"]})
    code, record = run(capsys, "--seed", str(2**63 - 1))
    assert (code, record["passed"]) == (0, True)
    first = [ToyProblem(seed=seed).data() for seed in (0, 1, 2**61, 2**62, 2**63 - 1)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(first, 2))


def failing(*names: str) -> list[str]:
    """The claims among `names` that do not hold now."""
    problem = ToyProblem(vocab_size=2, length=1)
    return [name for name in names if not all(f.holds for f in CLAIMS[name].check(problem))]


def assert_broken(*names: str) -> None:
    assert failing(*names) == list(names)


def test_broken_kernel_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Kernel, "b", property(lambda self: self.shuffled / (self.vocab_size + 1)))
    broken = {"Proposition 5", "Proposition 7", "ratios of a posterior"}
    tried = {name: claim for name, claim in CLAIMS.items() if name in broken | {"erratum 4"}}
    monkeypatch.setattr(command, "CLAIMS", tried)
    code, record = run(capsys)
    assert code == 1
    assert not record["passed"]
    assert {row["claim"] for row in record["claims"] if not row["holds"]} == broken


def test_broken_terminal_term_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = TokenProcess.terminal
    monkeypatch.setattr(TokenProcess, "terminal", lambda self: replace(terminal(self), cross_entropy=0.0))
    assert_broken("Theorem 4", "Proposition 6", "J1 = J2", "no bound as printed")


def test_broken_out_rate_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TokenProcess.integrated_out_rate
    monkeypatch.setattr(TokenProcess, "integrated_out_rate", lambda self, since=0.0: whole(self, since) + 1e-6)
    assert_broken("Theorem 4", "Proposition 6", "J1 = J2", "the paper's J1 - J2")


def test_broken_loss_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    from cedd.dynamics import reverse

    right = reverse.score_entropy
    monkeypatch.setattr(reverse, "score_entropy", lambda *arguments: 1.001 * right(*arguments))
    assert_broken("Theorem 4")


def test_broken_denoiser_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    from cedd.parameterization import Denoiser

    right = Denoiser.coefficients

    def wrong(self: Denoiser, *arguments: torch.Tensor) -> AffineScore:
        score = right(self, *arguments)  # type: ignore[arg-type]
        return replace(score, log_gain=score.log_gain + 0.01)

    monkeypatch.setattr(Denoiser, "coefficients", wrong)
    assert_broken("ratios of a posterior", "erratum 1")


def test_eroulette_without_validation_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    from cedd import clocks

    monkeypatch.setattr(clocks, "first_negative", lambda rate: None)
    monkeypatch.setattr(clocks, "first_decrease", lambda clock: None)
    assert_broken("erratum 6")
    finding = next(f for f in CLAIMS["erratum 6"].check(ToyProblem(2, 1)) if not f.holds)
    assert '"left": null' in json.dumps(_plain(finding), allow_nan=False)


def test_broken_corrected_probability_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenProcess, "corrected_probability", lambda self: 0.2)
    assert_broken("erratum 8")


def test_learned_law_worse_than_its_bound_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learned law worse than its bound would break the inequalities; a better one would not."""
    problem = ToyProblem(vocab_size=2, length=1)
    monkeypatch.setattr(claims, "learned_distribution", lambda *_, **__: 1e6 * problem.data())
    assert failing("Theorem 1", "Theorem 3", "Theorem 4") == []
    monkeypatch.setattr(claims, "learned_distribution", lambda *_, **__: 1e-30 * problem.data())
    assert_broken("Theorem 1", "Theorem 3", "Theorem 4")


def test_finding_verdicts() -> None:
    assert Finding("", 1.0, 2.0, relation="at most").holds
    assert not Finding("", 2.0, 1.0, relation="at most").holds
    assert not Finding("", 1.0, 1.0 + 1e-6, relation="equals").holds
    assert not Finding("", float("nan"), 1.0, relation="equals").holds
    assert Finding("", 0.1, 0.0, relation="erratum").holds
    assert not Finding("", 0.0, 0.0, relation="erratum").holds
    assert not Finding("", 0.1, 0.01, relation="erratum").holds


@pytest.mark.parametrize("words", [["--vocab", "1"], ["--length", "0"], ["--vocab", "40", "--length", "3"]])
def test_invalid_state_space_gives_one_line_error(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["theory", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("cedd: error: the vocabulary size V must be from 2 to 10")
    assert error.count("\n") == 1
