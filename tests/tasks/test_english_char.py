"""The packaged corrector on everyday text: accents, addresses, line endings, other languages."""

import ast
import importlib.util
from pathlib import Path

import pytest

import cedd
from cedd.apps.correct.engine import corrector_folder
from cedd.apps.correct.lexicon import LEXICON_FILE, load_lexicon
from cedd.apps.correct.suspects import FEATURES
from cedd.models.locate import pretrained_root
from tests.cached_features import with_cached_features

LATIN = """\
Gallia est omnis divisa in partes tres, quarum unam incolunt Belgae, aliam Aquitani, tertiam qui ipsorum lingua Celtae,
nostra Galli appellantur. Hi omnes lingua, institutis, legibus inter se differunt. Gallos ab Aquitanis Garumna flumen
dividit."""
LINES = """\
The baker had been up sinoe four, and his
whdle street knew it: the smoll of bread came
in through every wimdow, and with it the
sound of a man who snag at his work, badlv,
but as if nobody in the wprld were asleep.
"""


@pytest.fixture(scope="module")
def model():
    return with_cached_features(cedd.load("english-char", device="cpu"))


@pytest.mark.parametrize(
    "text",
    [
        "She sent me her résumé before the meeting on the next day.",
        "Then Sónya went to the window and looked out at the street.",
        "We had a crème brûlée after the dinner and it was very good.",
        "I wrote to jsmith42 about the meeting on the next day.",
        "He bought mp3s and put them on k8s in the evening.",
        "Please see tinyurl.com/ydgkzrt for the whole story of the man.",
        "The branch is called fix-utf8-decoder and it is ready.",
    ],
)
def test_correctly_spelled_text_is_unchanged(model, text):
    assert model.correct(text) == text
    assert model.correct(f"{text} It was a drak and stormy nihgt.") == f"{text} It was a dark and stormy night."


def test_word_with_emphasis_markers_is_corrected(model):
    typed, meant = "It was _teh_ most beautiful thnig in the wolrd.", "It was _the_ most beautiful thing in the world."
    assert model.correct(typed) == meant


def test_line_endings_do_not_affect_corrections(model):
    unix, dos = model.correct(LINES), model.correct(LINES.replace("\n", "\r\n"))
    assert len(unix.changes) >= 4
    assert dos == unix.replace("\n", "\r\n")


@pytest.mark.slow
def test_other_language_is_unchanged_in_several_steps(model):
    assert model.correct(LATIN, engine="letters", steps=8, seed=0, max_surprise=100).changes
    assert not model.correct(LATIN, engine="letters", steps=8, seed=0).changes


# ---- correction word by word ---------------------------------------------------------------------------------------

MISTAKES = """\
The comittee had recieved alot of letters from people who lived near the river, and all of them asked the goverment
to do something about the water. Nobody beleived that the two of them would find an anser, but they had worked to
gether\r\nfor many years. Teh first man came form London; his freind lived in the north of England. THE COMITTEE
RECIEVED A LETTER. See https://example.org/recieved, `recieve()` or ask Ngozi Szczepaniak at K8S.
""".replace("to\ngether", "to gether")


def test_change_spans_map_between_original_and_corrected_text(model):
    corrected = model.correct(MISTAKES)
    assert len(corrected.changes) >= 10
    forth, back = corrected.original, str(corrected)
    for change in reversed(corrected.changes):
        (start, stop), (new_start, new_stop) = change.span, change.corrected_span
        assert (MISTAKES[start:stop], corrected[new_start:new_stop]) == (change.before, change.after)
        forth = forth[:start] + change.after + forth[stop:]
        back = back[:new_start] + change.before + back[new_stop:]
    assert (forth, back) == (str(corrected), MISTAKES)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("waht aer you doing tongiht", "what are you doing tonight"),  # swapped letters, not another language
        ("the qiuck bronw fox jmups oevr the lzay dog", "the quick brown fox jumps over the lazy dog"),
        ("I think every thing in my bed room is too old.", "I think everything in my bedroom is too old."),
        ("Ich weiss nicht, was soll es bedeuten, dass ich so traurig bin.",) * 2,
        ("Det regner i dag, og jeg ved ikke hvad jeg skal lave hele dagen.",) * 2,
        ("The plaintiff's affidavit was notarised after the amortisation of the loan.",) * 2,
        ("The equation's solution and the method's name are in the manual.",) * 2,
    ],
)
def test_sentences_are_corrected_or_left_unchanged(model, written, meant):
    assert model.correct(written) == meant


def test_corrected_text_needs_no_further_changes(model):
    corrected = model.correct(MISTAKES)
    assert not model.correct(str(corrected)).changes
    assert [change.after for change in corrected.changes] == [
        *("committee", "received", "a lot", "government", "believed", "answer", "together"),
        *("The", "from", "friend", "COMMITTEE", "RECEIVED"),
    ]


LESSONS = """\
The teacher said that good {0} matters. In her first lesson she explained what {0} is and why people need it. Some
pupils found the {0} of English easy, others had never heard the word {0} before. A book about {0} lay on every desk.
When the bell rang, nobody had opened the book of {0}, and the teacher sighed. She knew that a lesson in {0} is never
loved, but she hoped that by the end of the year everybody would write letters with correct {0}. Then the summer came,
and with it a long holiday in which nobody thought of school at all, and the desks stood empty in the quiet rooms."""


def test_repeated_misspelling_is_corrected_and_repeated_name_kept(model):
    """The misspelling is not in the lists of remembered misspellings."""
    assert model.correct(LESSONS.format("grammer")).count("grammar") >= 6
    for name in ("kwargs", "Szczepaniak", "ormolu", "Grammarly"):
        assert model.correct(LESSONS.format(name)) == LESSONS.format(name)


def test_ignored_word_includes_its_possessive(model):
    text = "The goverment’s rule was just, and the people liked it."
    assert model.correct(text, ignored_words=["Goverment"]) == text
    assert model.correct(text) == text.replace("goverment", "government")


def test_lexicon_has_weight_for_every_feature():
    lexicon = load_lexicon(pretrained_root() / "english" / LEXICON_FILE)
    assert lexicon.weights.keys() == {"alone", "network"}
    assert all(weights.keys() == set(FEATURES) for weights in lexicon.weights.values())


def test_word_engine_uses_model_named_in_folder(model):
    """That model is english, which has the lexicon; the letter model need not be loaded."""
    letters, words = (pretrained_root() / name for name in ("english-char", "english"))
    text = "He came form London to recieve teh prise, and I hav a speling mistke."
    assert cedd.load(words, device="cpu").correct(text).changes == model.correct(text).changes
    assert corrector_folder(letters) == corrector_folder(letters, "words") == words
    assert corrector_folder(letters, "letters") == letters
    assert len(model.correct("It was a drak nihgt", engine="letters")) == len("It was a drak nihgt")


@pytest.mark.parametrize("option", [{"rate": 0.05}, {"passes": 2}, {"change": "letters"}, {"t": 0.1}])
def test_letter_engine_options_do_not_switch_engine(model, option):
    ((name, _),) = option.items()
    with pytest.raises(ValueError, match=f"{name} is an option of the engine 'letters'; use engine='letters'"):
        model.correct("It was a drak nihgt", **option)
    assert model.correct("It was a drak nihgt", engine="letters", **option)


def test_word_corrector_is_at_most_32_megabytes():
    assert sum(file.stat().st_size for file in (pretrained_root() / "english").iterdir()) <= 32_000_000


def docstrings(*modules):
    """The docstrings of modules of the standard library, and of their functions and classes."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for module in modules:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        tree = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
        found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
        yield "\n\n".join(text for text in found if text)


@pytest.mark.parametrize(
    ("modules", "share"),
    [
        (["textwrap"], 0.006),
        pytest.param(
            ["argparse", "logging", "pathlib", "subprocess", "tempfile", "zipfile"], 0.003, marks=pytest.mark.slow
        ),
    ],
    ids=["a module", "six modules"],
)
def test_technical_documentation_is_hardly_changed(model, modules, share):
    """Technical terms that books do not have: at most 3 changes per 1,000 words in six modules, 6 in one module."""
    text = "\n\n".join(docstrings(*modules))
    assert len(model.correct(text).changes) <= share * len(text.split())
