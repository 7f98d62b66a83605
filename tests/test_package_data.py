"""The models that come with the package: they are in what is built, small, described, and do what their card says."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import cedd
from cedd.cli.given import DEFAULT_MODEL
from cedd.data.corruption import corrupt_letters
from cedd.training.locate import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, pretrained_root

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 25_000_000
shipped = pytest.mark.skipif(DEFAULT_MODEL not in cedd.PRETRAINED, reason=f"the model {DEFAULT_MODEL} is not here yet")

PROSE = """\
The ferry was late again that morning, and the people who waited for it had long since run out of things to say about
the weather. An old man in a grey coat walked up and down along the water, stopped at each of the wooden posts, and
counted them aloud, as if one of them might have been stolen in the night. Two girls sat on their trunk and shared an
apple. Nobody knew what the trouble was; the fog had lifted hours ago, and from the other shore, where the chimneys of
the mill stood clear against the hills, we could hear the bell that is rung whenever the boat is made ready to leave.
When it came at last it carried no passengers at all, only the captain, his dog, and a letter for my sister.
"""


def test_the_build_takes_the_models_along():
    """Hatch packs all of src/cedd that git does not ignore; nothing here may leave weights out."""
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["packages"] == ["src/cedd"]
    assert "src" in targets["sdist"]["include"]
    assert not any("exclude" in target for target in targets.values())
    if (ROOT / ".git").exists():
        weights = pretrained_root().relative_to(ROOT) / DEFAULT_MODEL / WEIGHTS_FILE
        for file in (weights, Path("src/cedd/evaluation/page.html")):
            assert subprocess.run(["git", "check-ignore", "-q", str(file)], cwd=ROOT).returncode == 1


def test_the_source_has_what_its_pages_speak_of():
    """Every entry of the list is there, and so is every file of the repository that README runs or links to."""
    target = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["sdist"]
    included = set(target["include"])
    assert all((ROOT / name).exists() for name in included)
    text = (ROOT / "README.md").read_text("utf-8")
    named = re.findall(r"\]\((?!http)([\w./-]+)", text) + re.findall(r"\bpython ([\w/]+\.py)", text)
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).exists(), name
        assert name.split("/")[0] in included, name


@shipped
def test_the_model_is_small_and_described():
    folder = pretrained_root() / DEFAULT_MODEL
    names = {file.name for file in folder.iterdir()}
    assert {CONFIG_FILE, WEIGHTS_FILE, CARD_FILE} <= names
    assert "train.json" not in names  # which names a machine's folders
    assert sum(file.stat().st_size for file in folder.iterdir()) <= LIMIT
    card = (folder / CARD_FILE).read_text("utf-8")
    for said in ("What it was trained on", "$ cedd train", "What it scores", "What it is not for"):
        assert said in card


@shipped
def test_the_model_mends_letters_and_leaves_the_rest():
    """37 mistakes in 746 letters that it cannot have seen; 75% and 0.3% are measured on books (`cedd spelling`)."""
    model = cedd.load(DEFAULT_MODEL, device="cpu")
    wrong = corrupt_letters(PROSE, 0.05, seed=1)
    now = model.correct(wrong.text)
    fixed = sum(now[place] == PROSE[place] for place in wrong.positions)
    broken = sum(a == b != c for a, b, c in zip(PROSE, wrong.text, now, strict=True))
    assert fixed >= 0.65 * len(wrong.positions)
    assert broken <= 4


@shipped
@pytest.mark.parametrize(
    "text",
    [
        "",
        "\r\n",
        "1234567890 + 0.5 = 3,14",
        "Mr. Darcy and Elizabeth Bennet met at Netherfield.",
        "日本語のテキスト 🙂",
        "Mr. Szczepaniak moved to Zywiec in 1987 with Ngozi Okafor.",
        "Tous les hommes naissent libres et égaux en dignité et en droits.",
        "Gallia est omnis divisa in partes tres, quarum unam incolunt Belgae.",
    ],
)
def test_the_model_leaves_alone_what_is_no_mistake(text):
    model = cedd.load(DEFAULT_MODEL, device="cpu")
    assert len(model.correct(text).changes) <= 0.02 * sum(map(str.isalpha, text))


@shipped
def test_another_language_is_mostly_left_alone():
    """Not wholly: "und" is one letter from "and"."""
    text = "Der Mensch ist frei geboren, und überall liegt er in Ketten."
    changes = cedd.load(DEFAULT_MODEL, device="cpu").correct(text).changes
    assert len(changes) <= 3
