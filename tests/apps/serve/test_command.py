"""`cedd serve` as a process: it prints its address, answers, and stops cleanly on a signal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cedd.apps.correct.lexicon import LEXICON_FILE
from cedd.apps.serve.registry import ModelRegistry
from cedd.cli import main
from tests.apps.serve.servers import LOCAL_CLIENT, Server, bind_socket, httpx, make_app, site
from tests.tasks.models import save_random


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_serve_prints_address_answers_and_stops_on_signal(tmp_path: Path, number: signal.Signals):
    run = save_random(tmp_path / "run")
    words = [sys.executable, "-m", "cedd", "serve", str(run), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("serving run at http://127.0.0.1:")
        address = said.split()[3]
        guide = Path(__file__).parents[3].joinpath("docs/guides/serve.md").read_text("utf-8")
        shown = said.replace("serving run", "serving english, english-char").replace(address, "http://127.0.0.1:8008/")
        assert f"\n{shown}```" in guide
        assert httpx.post(f"{address}correct", json={"text": "a cqt"}, **LOCAL_CLIENT, timeout=20).status_code == 200
        process.send_signal(number)
        out, log = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "stopped\n")
    assert "Traceback" not in log
    assert "POST /correct 200" in log


def test_second_ctrl_c_does_not_wait_for_running_requests(registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch):
    made, hurried = site(registry), list[float]()
    monkeypatch.setattr(made.scheduler, "shorten_deadlines", hurried.append)
    server = Server(make_app(made), made.scheduler, lambda: None)
    with server.capture_signals():
        signal.raise_signal(signal.SIGINT)
        assert (server.should_exit, server.force_exit, hurried) == (True, False, [])
        signal.raise_signal(signal.SIGINT)
        assert (server.force_exit, hurried) == (True, [0.0])


def test_unusable_port_or_model_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with bind_socket("127.0.0.1", 0) as taken:
        taken.listen()
        assert main(["serve", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on" in capsys.readouterr().err
    assert main(["serve", "--port", "70000"]) == 2
    assert "between 0 and 65535" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "nothing"), "--port", "0"]) == 2
    assert "no run or model" in capsys.readouterr().err


def test_damaged_lexicon_gives_one_line_error_at_startup(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = save_random(tmp_path / "run")
    (run / LEXICON_FILE).write_bytes(b"half a lexi")
    assert main(["serve", str(run), "--port", "0", "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is not a lexicon, or is damaged" in line


def test_missing_starlette_gives_install_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve"]) == 2
    assert "pip install 'cedd[serve]'" in capsys.readouterr().err


def test_models_with_same_name_get_different_ids(tmp_path: Path):
    runs = [str(save_random(tmp_path / place / "run")) for place in ("a", "b")]
    assert list(ModelRegistry.load(runs, "cpu")) == ["run", "run#2"]
