"""The word corrector of the package, without its network, on modern, technical and foreign text."""

import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest

import cedd
from cedd.apps.correct.candidates import Neighbours
from cedd.apps.correct.known_words import KNOWN_WORDS_FILE, load_known_words
from cedd.apps.correct.word_by_word import reader_in, word_by_word
from cedd.models.locate import packaged

TEXTS = Path(__file__).parents[3] / "benchmarks" / "texts"


@pytest.fixture(scope="module")
def correct():
    reader = reader_in(packaged("english"))
    return lambda text: word_by_word(reader, text, None)


def changed(corrected):
    return [(change.before, change.after) for change in corrected.changes]


def test_technical_and_recent_words_are_rarely_changed(correct):
    """At most one word in 100 changes in the half of the modern text that constants were chosen on."""
    text = (TEXTS / "modern-dev.txt").read_text("utf-8")
    assert len(changed(correct(text))) <= len(text.split()) / 100


@pytest.mark.parametrize(
    "text",
    [
        "The symlinks in the navbar are upserted by systemd.",
        "Our devs will refactor the stylesheet, the hostname and the timesheet.",
        "A vlogger on an e-scooter bought shallots.",
        "We can not theorise about it, pls.",
        "He likes to theorise.",
        "Users can opt-in to the beta.",
        "Say hi to the user whose id is given.",
        "It logs at the expense of stack traces, and a cron job spawns a worker for each log message.",
        "The clunkiness of a microframework and the finickiest autoscaler.",
        "Bake for twenty minutes. Fork the project, then use git to append the ids.",
        "An ok result",
    ],
)
def test_correct_words_are_unchanged(correct, text):
    assert changed(correct(text)) == []


# Article 1 of the Universal Declaration of Human Rights, the beginning of Caesar's Gallic War, and everyday paragraphs.
LANGUAGES = Path(__file__).with_name("languages.txt").read_text("utf-8").splitlines()
FOREIGN = dict(line.split(": ", 1) for line in LANGUAGES)


@pytest.mark.parametrize("language", FOREIGN)
def test_other_languages_are_unchanged(language, correct):
    """Also a sentence alone, and without accents."""
    text = FOREIGN[language]
    plain = unicodedata.normalize("NFD", text).encode("ascii", "ignore").decode()
    for one in (text, *text.split(". "), plain, f"{text}\n\n" * 3):
        assert changed(correct(one)) == []


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("recieve, seperate, occured, untill", "receive, separate, occurred, until"),
        ("Recieved definately seperate accomodation", "Received definitely separate accommodation"),
        ("- seperate modules\n- recomended proccess\n", "- separate modules\n- recommended process\n"),
        ("Fix occurence of wich and teh adress", "Fix occurrence of which and the address"),
        ("Returns the lenght of the comon subsequence.", "Returns the length of the common subsequence."),
        ("publically avalible, succesful, begining", "publicly available, successful, beginning"),
        ("Raises an excepton if the arguement is out of rang", "Raises an exception if the argument is out of range"),
        ("Wensday: dentist. Saterday: birtday party.", "Wednesday: dentist. Saturday: birthday party."),
    ],
)
def test_short_notes_with_many_errors_are_corrected(text, meant, correct):
    assert correct(text) == meant


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Sorry im late, hes not here.", "Sorry I'm late, he's not here."),
        ("Ive seen it, theyre right and shes my friend.", "I've seen it, they're right and she's my friend."),
        ("Send me an IM when Mr Ive calls.", None),
        ("Its ill effects were its own; they could well shed hers.", None),
    ],
)
def test_missing_apostrophes_of_contractions_are_added(text, meant, correct):
    """Unless the word without the apostrophe is a name or another word."""
    assert correct(text) == (meant or text)


def test_joined_words_are_split_if_one_is_function_word(correct):
    text = "He looked at the skyeach morning, facingeach day, by the timesheet of the hostname."
    assert correct(text) == "He looked at the sky each morning, facing each day, by the timesheet of the hostname."


def test_known_words_exclude_misspellings_of_training_lists():
    known = load_known_words(packaged("english") / KNOWN_WORDS_FILE)
    assert len(known) > 90_000
    assert not {"recieve", "seperate", "occured", "untill", "goverment", "teh", "alot"} & known.keys()


@pytest.mark.parametrize(
    ("text", "meant"), [("teh", "the"), ("acheive", "achieve"), ("udpate", "update"), ("You can opt in to it.", None)]
)
def test_single_word_is_corrected_and_particle_is_kept(text, meant, correct):
    assert correct(text) == (meant or text)


def test_rare_word_close_to_very_frequent_one_is_corrected(correct):
    """Also if it is in dictionaries, unless it is a common word (bake)."""
    assert correct("He came back two years lated to thees people.") == "He came back two years later to these people."
    assert correct("They were wiling to help.") == "They were willing to help."


def test_corrector_without_torch_matches_model():
    text = "He walked form the tabel, `teh` first."
    corrected = cedd.WordCorrector().correct(text)
    assert corrected == "He walked from the table, `teh` first."
    model = cedd.load("english", device="cpu").correct(text)
    assert [(one.span, one.after) for one in model.changes] == [(one.span, one.after) for one in corrected.changes]
    assert [one.confidence for one in model.changes] == pytest.approx(
        [o.confidence for o in corrected.changes], abs=1e-3
    )


def test_stored_confused_words_match_computed_ones():
    lexicon = reader_in(packaged("english")).lexicon
    assert lexicon.confused is not None
    np.testing.assert_array_equal(lexicon.confused, Neighbours(lexicon).confused_pairs())


def test_plain_text_is_corrected_without_slow_imports():
    """Importing torch, masked arrays, logging and the markup patterns takes longer than correcting a sentence."""
    script = (
        "import sys, cedd\n"
        "print(cedd.WordCorrector().correct('He walked form the tabel'))\n"
        "print(*sorted({'torch', 'numpy.ma', 'logging', 'cedd.apps.correct.prose'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == "He walked from the table\n\n"


def test_corrector_without_torch_supports_syntax():
    corrector = cedd.WordCorrector()
    assert corrector.correct("recieve()  # not recieved", syntax="python") == "recieve()  # not received"
    with pytest.raises(ValueError, match="invalid syntax: 'pyton'"):
        corrector.correct("a", syntax="pyton")
    with pytest.raises(ValueError, match=r"threshold must be in \[0, 1\] \(got 3\)"):
        corrector.correct("a", threshold=3)
    with pytest.raises(ValueError, match="no run or model at englsh; did you mean english"):
        cedd.WordCorrector("englsh")
