"""Products run in one thread, and the setting is restored."""

import subprocess
import sys

import pytest

CODE = """
from threading import Barrier, Thread

from cedd.apps.correct import numpy_network
from cedd.apps.correct.blas_threads import one_blas_thread, thread_setting
import cedd

setting = thread_setting()
if setting is None:
    print("none")
    raise SystemExit
setting.set(2)
seen, gelu = set(), numpy_network.gelu
numpy_network.gelu = lambda x: seen.add(setting.get()) or gelu(x)
assert cedd.WordCorrector().correct("He walked form the tabel") == "He walked from the table"
assert (seen, setting.get()) == ({1}, 2), (seen, setting.get())
with one_blas_thread():
    try:
        with one_blas_thread():
            raise ValueError
    except ValueError:
        pass
    assert setting.get() == 1
assert setting.get() == 2
both, one = Barrier(2), Barrier(2)


def first():
    with one_blas_thread():
        both.wait()
    one.wait()


thread = Thread(target=first)
thread.start()
with one_blas_thread():
    both.wait()
    one.wait()
    assert setting.get() == 1
thread.join()
assert setting.get() == 2
print("restored")
"""


def output_of_code(monkeypatch, **variables):
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout.strip()


def test_network_runs_in_one_thread_and_setting_is_restored(monkeypatch):
    if (found := output_of_code(monkeypatch)) == "none":
        pytest.skip("NumPy has no OpenBLAS of its own here")
    assert found == "restored"


@pytest.mark.parametrize("name", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"])
def test_thread_environment_variables_take_precedence(monkeypatch, name):
    assert output_of_code(monkeypatch, **{name: "2"}) == "none"
