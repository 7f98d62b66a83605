"""The examples of structured output and steering: they are short, and their results satisfy their constraints."""

import importlib
import re
import runpy
import string
from types import ModuleType

import pytest

import cedd
from cedd.data.tokenizers import CharTokenizer
from docs.refresh import ROOT
from tests.tasks.models import save_random

FOLDER = ROOT / "docs" / "examples"
EXAMPLES = ("extract_date", "fill_form", "choose_label", "rhyme", "steer_sentiment")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> cedd.LanguageModel:
    """A random, untrained model of printable characters."""
    path = tmp_path_factory.mktemp("models") / "random"
    tokenizer = CharTokenizer(string.printable[:95] + "\n")
    return cedd.load(save_random(path, "absorb", "cedd", tokenizer=tokenizer, length=400, time_input="none"), "cpu")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Imports an example by its name."""

    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(FOLDER))
        return importlib.import_module(name)

    return load


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 40


def test_extract_date_example(model: cedd.LanguageModel, example) -> None:
    found = example("extract_date").extract(model, "The school burned down on 9 August 1903.")
    assert re.fullmatch(r"1903-(0[1-9]|1[0-2])-09", found)


def test_fill_form_example(model: cedd.LanguageModel, example, monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("fill_form")
    # Characters instead of words: blanks of other widths.
    monkeypatch.setattr(module, "FORM", module.FORM.replace("{6}", "{9}").replace("{3}", "{6}"))
    forms = module.fill(model, 2, seed=0)
    for form in forms:
        name, year, occupation, *_ = (line.partition(": ")[2] for line in form.splitlines())
        assert re.fullmatch("[A-Z][a-z]+ [A-Z][a-z]+", name)
        assert re.fullmatch("1[89][0-9]{2}", year)
        assert occupation in ("doctor", "lawyer")
    assert len(set(forms)) == 2


def test_choose_label_example(model: cedd.LanguageModel, example) -> None:
    module = example("choose_label")
    found = module.label(model, "Rain")
    assert set(found) == set(module.LABELS)
    assert sum(found.values()) == pytest.approx(1)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_rhyme_example(model: cedd.LanguageModel, example) -> None:
    module = example("rhyme")
    (line,) = module.second_lines(model, "moon", 1, seed=0, length=70)
    *words, last = line.split(" ")
    assert "moon" in words
    assert last in module.RHYMES
    assert 6 <= len(words) + 1 <= 9


def test_steer_sentiment_example(model: cedd.LanguageModel, example) -> None:
    module = example("steer_sentiment")
    reward = module.NaiveBayes(module.GOOD, module.BAD)
    assert reward(["a lovely day", "a long day", "a sad day"]) == pytest.approx([0.6931, 0, -0.6931], abs=1e-3)
    text = model.infill(module.TEXT, reward=reward, strength=3.0, particles=2, seed=0)
    assert re.fullmatch(r"It was a .{2,} day, and the people were .{2,}\.", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert len(capsys.readouterr().out) > 10
