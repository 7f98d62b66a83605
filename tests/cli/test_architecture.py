"""A custom network in every command: docs/examples/add_architecture.py."""

import json
import os
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import cedd
from cedd.apps.report.commands import train_command
from cedd.cli import main
from cedd.cli.arguments import parse
from cedd.models.architectures import ARCHITECTURES
from tests.training.runs import assert_same_run, write_corpus

NAME = "docs.examples.add_architecture:Convolutions"
OWN = ["--architecture", NAME]


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command starts without the architectures of earlier ones, as in a new process."""
    for name in [name for name in ARCHITECTURES if ":" in name]:
        monkeypatch.delitem(ARCHITECTURES, name)


def forget() -> None:
    ARCHITECTURES.pop(NAME, None)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_corpus(folder / "words.txt", 2000)
    return folder


def train(texts: Path, out: Path, *words: str) -> int:
    small = "--length 12 --batch.size 8 --evaluation.every 0 --checkpoint-every 2 --log-every 1 --device cpu"
    cache = ["--text.cache", str(texts / "cache")]
    return main(
        ["train", "tiny", "--data", str(texts / "words.txt"), "--out", str(out), *cache, *small.split(), *words]
    )


@pytest.fixture(scope="module")
def run(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "mine"
    assert train(texts, out, *OWN, "--architecture.width", "16", "--architecture.depth=2", "--steps", "4") == 0
    forget()
    return out


def test_custom_network_is_trained_with_its_arguments(run: Path) -> None:
    config = json.loads((run / "config.json").read_text("utf-8"))
    assert config["architecture"] == NAME
    assert config["network"].items() >= {"width": 16, "depth": 2, "has_mask": True}.items()


def test_stopped_run_resumes_bit_exactly(run: Path, texts: Path, tmp_path: Path) -> None:
    arguments = tmp_path / "arguments.json"
    arguments.write_text('{"width": 16, "depth": 2}', "utf-8")
    words = [*OWN, "--architecture-arguments", str(arguments)]
    assert train(texts, tmp_path / "part", *words, "--steps", "2") == 0
    assert train(texts, tmp_path / "part", *words, "--steps", "4", "--resume", "must") == 0
    assert_same_run(run, tmp_path / "part")


def test_every_command_accepts_custom_network(
    run: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tmp_path / "exported"
    file = tmp_path / "few.txt"
    file.write_text((texts / "words.txt").read_text("utf-8")[:240], "utf-8")
    commands = {
        "evaluate": [str(run), "--data", str(file), "--draws", "2"],
        "sample": [str(run), "--steps", "4", "--seed", "1"],
        "infill": [str(run), "one ___ two", "--steps", "4"],
        "correct": [str(run), "one twp", "--engine", "letters", "--threshold", "0.9"],
        "export": [str(run), "--out", str(exported), "--weights", "int8"],
    }
    for name, words in commands.items():
        assert main([name, *words, "--device", "cpu", "--json"]) == 2, name
        assert f"add --architecture {NAME}" in capsys.readouterr().err
        assert main([name, *words, "--device", "cpu", "--json", *OWN]) == 0, name
        assert json.loads(capsys.readouterr().out.splitlines()[-1])
        forget()
    assert f'architecture="{NAME}"' in (exported / "README.md").read_text("utf-8")
    assert main(["sample", str(exported), "--steps", "2", "--device", "cpu", *OWN]) == 0


def test_folder_is_evaluated_from_python_without_side_effects(run: Path, texts: Path) -> None:
    """The caller's random state, warning filters, environment and thread count stay unchanged."""
    data, options = texts / "words.txt", dict[str, Any](draws=2, max_sequences=4)
    before = torch.get_rng_state(), list(warnings.filters), dict(os.environ), torch.get_num_threads()
    with pytest.raises(ValueError, match="architecture='docs"):
        cedd.evaluate(run, data, device="cpu", **options)
    result = cedd.evaluate(run, data, device="cpu", architecture=NAME, **options)
    assert repr(result).startswith(f"EvaluationResult(perplexity per token, {run}: tight {result.perplexity:.4g} [")
    model = cedd.load(run, "cpu", NAME)
    with pytest.raises(TypeError, match="a LanguageModel; give its network"):
        cedd.loss(cast(Any, model), model.process, torch.zeros(2, 12, dtype=torch.int64), method=model.method)
    after = torch.get_rng_state(), list(warnings.filters), dict(os.environ), torch.get_num_threads()
    assert torch.equal(after[0], before[0])
    assert after[1:] == before[1:]


def test_custom_network_is_served(run: Path) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("httpx")
    from cedd.apps.serve.registry import ModelRegistry
    from cedd.tasks import load
    from tests.apps.serve.servers import LOCAL_CLIENT, httpx, served

    with served(ModelRegistry({"mine": load(run, "cpu", NAME)})) as (address, _):
        wanted = {"model": "mine", "prompt": "one ", "max_tokens": 4, "seed": 1}
        answer = httpx.post(f"{address.rstrip('/')}/v1/completions", json=wanted, timeout=30, **LOCAL_CLIENT)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"]


def test_run_starts_from_custom_network(
    run: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from_it = ["--from", str(run), "--steps", "1"]
    assert train(texts, tmp_path / "a", *from_it) == 2
    assert f"add --architecture {NAME}" in capsys.readouterr().err
    assert train(texts, tmp_path / "b", *from_it, *OWN) == 0
    assert train(texts, tmp_path / "c", *from_it, *OWN, "--architecture.width", "8") == 2
    assert "has other sizes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([*OWN, "--architecture.heigth", "3"], "unexpected keyword argument 'heigth'"),
        ([*OWN, "--model.width", "8"], "--model.width has no effect on the architecture"),
        (["--architecture.width", "8"], "need --architecture"),
        ([*OWN, "--architecture.width"], "--architecture.width needs a value"),
        (["--architecture", "nowhere:Net"], "could not import nowhere"),
        ([*OWN, "--method", "ar"], "ar needs a causal network"),
        ([*OWN, "--optimizer.matrices", "muon"], "does not have"),
    ],
)
def test_invalid_options_give_one_line_errors(
    words: list[str], problem: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(texts, tmp_path / "run", *words, "--steps", "1") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert problem in line


def test_train_command_includes_architecture_options() -> None:
    words = [*OWN, "--architecture.width", "16", "--architecture.kind", "deep", "--out", "runs/mine"]
    config = parse("train", ["tiny", *words]).config
    assert config.architecture_arguments == {"width": 16, "kind": "deep"}
    shown = train_command(config)
    assert "--architecture.width 16 --architecture.kind deep" in shown
    assert parse("train", shown.split()[2:]).config == config
