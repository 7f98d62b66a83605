"""The evaluation protocol on human misspellings."""

import pytest
import torch

from tests.benchmarks.scripts import definitions


@pytest.fixture(scope="module")
def protocol():
    return definitions("word_protocol")


def test_kinds_of_errors(protocol):
    kinds = {
        ("recieve", "receive"): "swapped",
        ("hav", "have"): "missing",
        ("havve", "have"): "extra",
        ("hove", "have"): "replaced",
        ("cat", "car"): "real word",
        ("alot", "a lot"): "joined",
        ("to gether", "together"): "split",
        ("fisix", "physics"): "several",
    }
    assert {pair: protocol.kind_of(protocol.Pair(*pair), {"cat"}) for pair in kinds} == kinds


def test_part_of_word_does_not_depend_on_case(protocol):
    words = [f"word{i}" for i in range(1000)]
    assert [protocol.part_of(word) for word in words] == [protocol.part_of(word.upper()) for word in words]
    shares = {part: sum(protocol.part_of(word) == part for word in words) for part in ("train", "dev", "test")}
    assert 550 < shares["train"] < 650
    assert 150 < shares["dev"] < 250


def test_errors_are_inserted_into_sentences(protocol):
    pairs = {"list": [protocol.Pair("leter", "letter"), protocol.Pair("hoem", "home")]}
    (one,) = protocol.placed(pairs, ["The Letter came to us."], 5)
    assert (one.written, one.meant) == ("The Leter came to us.", "The Letter came to us.")


def test_shortened_sentence_keeps_its_error(protocol):
    for name in ("came", "went", "stood"):
        meant = f"The man {name} home."
        short = protocol.shortened(protocol.Misspelt(meant, meant.replace("home", "hoem")), 2)
        assert (short.meant, short.written) == (f"{name} home", f"{name} hoem")
    assert protocol.shortened(protocol.Misspelt("I have a lot.", "I have alot."), 2) is None
    assert protocol.shortened(protocol.Misspelt("I have.", "I have."), 3) is None


def test_paired_difference_of_shares(protocol):
    """With 2 discordant pairs of 355: 2 / 357 -+ 1.96 sqrt(3 - 4 / 357) / 357."""

    def share(hits):
        return protocol.Share(torch.tensor(hits), torch.ones(355, dtype=torch.int64))

    found = protocol.paired_difference(share([1] * 231 + [0] * 124), share([1] * 229 + [0] * 126))
    assert found == pytest.approx((2 / 355, 2 / 357 - 0.0094913, 2 / 357 + 0.0094913, 2, 0), abs=1e-6)
    same = protocol.paired_difference(share([1] * 355), share([1] * 355))
    assert -0.006 < same.low < 0 < same.high < 0.006


@pytest.mark.parametrize(
    ("corrected", "expected"),
    [
        ("I have a lot.", (1, 1, 0, 2, 0)),
        ("I have alot!", (1, 0, 0, 2, 0)),
        ("I have a slot.", (1, 0, 1, 2, 0)),
        ("i had a lot", (1, 1, 0, 2, 1)),
    ],
)
def test_outcomes_are_counted_in_words(protocol, corrected, expected):
    assert (
        tuple(
            protocol.outcome(
                protocol.Misspelt("I have a lot.", "I have alot.", protocol.Pair("alot", "a lot")), corrected
            )
        )
        == expected
    )
