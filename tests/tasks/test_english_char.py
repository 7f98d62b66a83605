"""What the corrector in the box makes of what people write: accents, addresses, line ends, another language."""

import pytest

import cedd

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
    return cedd.load("english-char", device="cpu")


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
def test_what_is_spelled_right_stays(model, text):
    assert model.correct(text) == text
    assert model.correct(f"{text} It was a drak and stormy nihgt.") == f"{text} It was a dark and stormy night."


def test_an_emphasis_is_a_word(model):
    typed, meant = "It was _teh_ most beautiful thnig in the wolrd.", "It was _the_ most beautiful thing in the world."
    assert model.correct(typed) == meant


def test_line_ends_make_no_difference(model):
    unix, dos = model.correct(LINES), model.correct(LINES.replace("\n", "\r\n"))
    assert len(unix.changes) >= 4
    assert dos == unix.replace("\n", "\r\n")


def test_another_language_is_left_alone_in_several_steps_too(model):
    assert model.correct(LATIN, steps=8, seed=0, max_surprise=100).changes
    assert not model.correct(LATIN, steps=8, seed=0).changes
