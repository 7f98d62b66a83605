"""The models that come with the package: they are in what is built, small, described, and do what their card says."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import cedd
from cedd.cli.given import DEFAULT_MODEL
from cedd.data.corruption import corrupt_letters, swap_letters
from cedd.evaluation.spelling import outcomes
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


@pytest.fixture(scope="module")
def model():
    return cedd.load(DEFAULT_MODEL, device="cpu")


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
def test_the_model_mends_letters_and_leaves_the_rest(model):
    """37 mistakes in 746 letters that it cannot have seen; 75% and 0.3% are measured on books (`cedd spelling`)."""
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
def test_the_model_leaves_alone_what_is_no_mistake(model, text):
    assert len(model.correct(text).changes) <= 0.02 * sum(map(str.isalpha, text))


@shipped
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("It was a drak and stormy nihgt", "It was a dark and stormy night"),
        ("teh cat sat on teh mat", "the cat sat on the mat"),
        ("Recieve teh lettar", "Receive the lettar"),
        ("I recieved your letter from the freind of yours", "I received your letter from the friend of yours"),
        ("He came form London", "He came from London"),
        ("He had a form to fill", "He had a form to fill"),
    ],
)
def test_the_model_sees_letters_that_changed_places(model, typed, meant):
    """Except what it does not: "lettar" keeps its a, and of "teh cat", alone, it is not sure enough."""
    assert model.correct(typed) == meant


@shipped
def test_the_model_mends_exchanged_letters(model):
    """About 20 pairs; 19 in 20 are mended in a book (`cedd spelling --mistakes swaps --rate 0.02`)."""
    wrong = swap_letters(PROSE, 0.05, seed=1)
    seen = outcomes(PROSE, wrong.text, model.correct(wrong.text), span=2)
    unseen = outcomes(PROSE, wrong.text, model.correct(wrong.text, swaps=0), span=2)
    assert seen.fixed.total > 15
    assert seen.fixed.value >= 0.8 > unseen.fixed.value
    assert seen.broken.count <= 2


FOREIGN = {
    "German": """\
Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett zu einem ungeheueren
Ungeziefer verwandelt. Seine vielen, im Vergleich zu seinem sonstigen Umfang kläglich dünnen Beine flimmerten ihm
hilflos vor den Augen. Was ist mit mir geschehen, dachte er. Es war kein Traum.""",
    "French": """\
Longtemps, je me suis couché de bonne heure. Parfois, à peine ma bougie éteinte, mes yeux se fermaient si vite que je
n'avais pas le temps de me dire: Je m'endors. Le chat est sur la table, il dort.""",
    "Latin": """\
Gallia est omnis divisa in partes tres, quarum unam incolunt Belgae, aliam Aquitani, tertiam qui ipsorum lingua Celtae,
nostra Galli appellantur. Hi omnes lingua, institutis, legibus inter se differunt. Gallos ab Aquitanis Garumna flumen,
a Belgis Matrona et Sequana dividit.""",
    "names": """\
Siobhan O'Callaghan, Bjorn Halvorsen, Priya Venkataraman, Tadeusz Kowalczyk, Ngozi Okonkwo, Xiulan Zhang, Dmitri
Razumikhin, Kjetil Solbakken, Wanjiku Mwangi, Eszter Szabo, of Lviv, Ouagadougou, Oaxaca, Llandudno.""",
}


@shipped
@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN)
def test_what_the_model_cannot_foretell_it_leaves_alone(model, text):
    """Its limit of strangeness; without it, it would make "different" of "differunt"."""
    assert model.correct(text) == text


@shipped
def test_the_limit_takes_nothing_back_in_english(model):
    wrong = corrupt_letters(PROSE, 0.1, seed=2).text
    assert model.correct(wrong) == model.correct(wrong, strange=100.0)


@shipped
def test_a_line_of_another_language_is_mostly_left_alone(model):
    text = "Der Mensch ist frei geboren, und überall liegt er in Ketten."
    assert len(model.correct(text).changes) <= 1
