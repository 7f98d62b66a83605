"""Runs with different tokenizers on the same text: common segments, figures, and the table."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import cedd
from cedd.bounds.estimate import mean_interval
from cedd.cli import main
from cedd.data.evaluation_sets import EvaluationData
from cedd.data.tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer, IdTokenizer, PaddedTokenizer, Tokenizer
from cedd.evaluation.comparison import BLOCKS_PER_SEGMENT, MAX_SEGMENTS, TextUnits, block_edges, common_units
from cedd.evaluation.perplexity import load_data
from cedd.models.folder import ModelFolder, load_folder
from tests.tasks.models import save_random

WORDS = tuple(word * n for word in ("the", "cat", "sat", "mat", "dogs", "saw", "birds", "old") for n in (1, 2, 3))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    picked = np.random.default_rng(0).choice(WORDS, 1300)
    text = "\n".join(" ".join(line) for line in np.array_split(picked, 100))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    pieces = BPETokenizer.train([text], 300)
    save_random(folder / "bytes", "uniform", "bayes", tokenizer=ByteTokenizer())
    save_random(folder / "pieces", "absorb", "cedd", tokenizer=pieces)
    save_random(folder / "roulette", "roulette", "bayes", tokenizer=pieces)
    save_random(folder / "causal", "absorb", "ar", tokenizer=pieces)
    return folder


@pytest.fixture(autouse=True)
def cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEDD_CACHE", str(place / "cache"))


@dataclass(frozen=True)
class Reading:
    """A model and the blocks that it reads."""

    folder: ModelFolder
    data: EvaluationData

    @property
    def edges(self) -> np.ndarray:
        return block_edges(self.data, self.folder.tokenizer)


def units_of(pair: list[Reading], max_sequences: int | None) -> TextUnits:
    return common_units([one.data for one in pair], [one.folder.tokenizer for one in pair], max_sequences)


def readings(place: Path, *names: str, wrap: bool = False) -> list[Reading]:
    def of(folder: ModelFolder) -> Reading:
        wrapped = wrap and folder.tokenizer.eos_id is not None
        return Reading(folder, load_data(str(place / "text.txt"), folder.tokenizer, folder.length, wrap=wrapped))

    return [of(load_folder(place / name)) for name in names]


def evaluate(capsys: pytest.CaptureFixture[str], place: Path, *words: str) -> dict:
    runs = [str(place / word) if (place / word).is_dir() else word for word in words]
    code = main(["evaluate", *runs, "--data", str(place / "text.txt"), "--device", "cpu", "--json"])
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out)


# ---- where the blocks are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [False, True])
def test_block_edges_match_decoded_text(place: Path, wrap: bool) -> None:
    """The boundaries are the byte counts of the decoded text before each block, without end tokens and leftovers."""
    for reading in readings(place, "bytes", "pieces", wrap=wrap):
        tokens, length = reading.data.packed.blocks, reading.data.packed.length
        assert length == reading.folder.length - (2 if wrap and reading.folder.tokenizer.eos_id is not None else 0)
        for k in (1, 5, len(tokens) - 1):
            before = reading.folder.tokenizer.decode(tokens[:k].reshape(-1).astype(np.int64))
            assert reading.edges[k] == pytest.approx(len(before.encode()), rel=3e-3)


def test_segments_use_every_block_exactly_once(place: Path) -> None:
    """A run that costs one nat per byte costs one nat per byte in each segment, however it splits the text."""
    pair = readings(place, "bytes", "pieces")
    units = units_of(pair, None)
    assert units.name == "segments"
    assert units.shares is not None
    longest = max(np.diff(reading.edges).mean() for reading in pair)
    assert units.bytes >= BLOCKS_PER_SEGMENT * longest
    for run, reading in enumerate(pair):
        sizes = torch.from_numpy(np.diff(reading.edges)[units.blocks[run]])
        values = units.nats_per_byte(run, sizes / reading.folder.length, reading.folder.length)
        assert torch.allclose(values, torch.ones_like(values))
        # All blocks within the common text are used, each once.
        assert float(units.shares[run].sum()) == pytest.approx(len(sizes), abs=1)


def test_segment_has_nats_of_its_own_text(place: Path) -> None:
    """A cost at a single place of the text is in the segment of that place alone, for both runs."""
    pair = readings(place, "bytes", "pieces")
    units = units_of(pair, None)
    where = 3.5 * units.bytes
    for run, reading in enumerate(pair):
        here = int(np.searchsorted(reading.edges, where, side="right")) - 1
        nats = torch.zeros(len(units.blocks[run]), dtype=torch.float64)
        nats[list(units.blocks[run]).index(here)] = 1.0
        values = units.nats_per_byte(run, nats, 1)
        assert values.argmax() == 3
        assert float(values.sum() * units.bytes) == pytest.approx(1)


def test_few_sequences_form_segments_over_whole_text(place: Path) -> None:
    pair = readings(place, "bytes", "pieces")
    units = units_of(pair, 16)
    assert units.shares is not None
    assert len(units.shares[0]) == 2
    for run, reading in enumerate(pair):
        edges = reading.edges[units.blocks[run]]
        assert edges[0] == 0
        assert edges[-1] > 0.9 * min(r.edges[-1] for r in pair)
        assert len(edges) < 0.5 * len(reading.data.packed)
    assert len(units_of(pair, None).shares[0]) <= MAX_SEGMENTS  # pyright: ignore[reportOptionalSubscript]


# ---- figures --------------------------------------------------------------------------------------------------------


def test_runs_with_same_tokenizer_are_paired_by_sequence(place: Path, capsys) -> None:
    record = evaluate(capsys, place, "pieces", "roulette", "causal", "--draws", "4")
    assert [found["paired_over"] for found in record["comparisons"]] == ["sequences", "sequences"]
    for run, found in zip(record["runs"][1:], record["comparisons"], strict=True):
        less = run["bounds"]["tight"]["bits_per_byte"] - record["runs"][0]["bounds"]["tight"]["bits_per_byte"]
        assert found["bounds"]["tight"]["bits_per_byte"] == pytest.approx(less, abs=1e-9)
        low, high = found["bounds"]["tight"]["bits_per_byte_ci95"]
        assert low < less < high


def test_runs_with_different_tokenizers_are_paired_by_segment(place: Path, capsys) -> None:
    record = evaluate(capsys, place, "pieces", "bytes", "causal", "--draws", "4")
    first, second, third = (run["in_common"]["tight"] for run in record["runs"])
    for run, found in zip((second, third), record["comparisons"], strict=True):
        assert found["paired_over"] == "segments"
        assert found["pairs"] > 5
        difference = run["bits_per_byte"] - first["bits_per_byte"]
        assert found["bounds"]["tight"]["bits_per_byte"] == pytest.approx(difference, abs=1e-9)
        ratio = run["perplexity_per_word"] / first["perplexity_per_word"]
        assert found["bounds"]["tight"]["perplexity_per_word_ratio"] == pytest.approx(ratio)
    # On nearly all of the text, the figures in common are those of each run alone.
    for run, common in zip(record["runs"][:1], (first,), strict=True):
        alone = evaluate(capsys, place, run["run"], "--draws", "4")["runs"][0]["bounds"]["tight"]
        assert common["bits_per_byte"] == pytest.approx(alone["bits_per_byte"], rel=0.02)
        low, high = common["bits_per_byte_ci95"]
        assert low < common["bits_per_byte"] < high


def test_pairing_removes_shared_difficulty_from_interval(place: Path) -> None:
    """Both runs cost as much as their text is hard, one of them a tenth more: the difference has almost no error."""
    pair = readings(place, "bytes", "pieces")
    units = units_of(pair, None)
    hard = np.random.default_rng(1).exponential(size=50)  # of each fiftieth of the text

    def values(run: int, more: float) -> torch.Tensor:
        edges = pair[run].edges
        total = np.interp(edges, np.linspace(0, edges[-1], 51), np.concatenate([[0], np.cumsum(hard)]))
        nats = np.diff(total)[units.blocks[run]] + more * np.diff(edges)[units.blocks[run]]
        return units.nats_per_byte(run, torch.from_numpy(nats), 1)

    alone, together = mean_interval(values(0, 0.0)), mean_interval(values(1, 0.1) - values(0, 0.0))
    assert together[0] == pytest.approx(0.1, abs=1e-3)
    assert together[1] - together[0] < 0.2 * (alone[1] - alone[0])


def test_runs_are_shown_in_one_table(place: Path, capsys) -> None:
    words = ["evaluate", *(str(place / name) for name in ("pieces", "bytes", "causal"))]
    words += ["--data", str(place / "text.txt"), "--draws", "2", "--device", "cpu"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.count("┏") == 1
    assert re.search(r"paired over the same \d+ segments of [\d,]+ bytes", " ".join(said.split()))
    assert main([*words, "--per-sequence", str(place / "values.npy")]) == 2
    assert "read different sequences" in capsys.readouterr().err


# ---- wrapped blocks -------------------------------------------------------------------------------------------------


def test_wrapped_blocks_are_enclosed_in_end_tokens(place: Path, capsys) -> None:
    (reading,) = readings(place, "pieces", wrap=True)
    blocks, end = reading.data.blocks(np.arange(3)), reading.folder.tokenizer.eos_id
    assert blocks.shape == (3, reading.folder.length)
    assert (blocks[:, 0] == end).all()
    assert (blocks[:, -1] == end).all()
    (plain,) = readings(place, "pieces")
    assert blocks[:, 1:-1].reshape(-1).tolist() == plain.data.packed.blocks.reshape(-1)[: blocks[:, 1:-1].size].tolist()
    wrapped = evaluate(capsys, place, "causal", "--wrap", "bos-eos")
    data, bound = wrapped["data"], wrapped["runs"][0]["bounds"]["tight"]
    assert (data["wrap"], data["length"]) == ("bos-eos", reading.folder.length)
    assert data["blocks"] * data["length"] + data["remainder_tokens"] == data["tokens"]
    # The nats of the end tokens count, but they have no bytes.
    text = reading.folder.tokenizer.decode(reading.data.packed.blocks.reshape(-1).astype(np.int64))
    assert end is not None
    text = text.replace(reading.folder.tokenizer.decode([end]), "")
    bits = bound["nats_per_token"] * reading.data.blocks(np.arange(data["blocks"])).size / len(text) / math.log(2)
    assert bound["bits_per_byte"] == pytest.approx(bits)
    model = cedd.load(place / "causal", device="cpu")
    direct = cedd.estimate_bound(
        model.model, model.process, torch.from_numpy(reading.data.blocks(np.arange(data["blocks"]))), method="ar"
    )
    assert bound["nats_per_token"] == pytest.approx(direct.nats_per_token)


def test_wrap_trained_applies_only_to_networks_trained_that_way(place: Path, capsys) -> None:
    pieces = load_folder(place / "pieces").tokenizer
    save_random(place / "imported", "absorb", "cedd", {"imported": {"family": "MDLM", "wrap": "bos-eos"}}, pieces)
    record = evaluate(capsys, place, "pieces", "imported", "--wrap", "trained", "--draws", "2")
    assert [run["data"].get("wrap") for run in record["runs"]] == [None, "bos-eos"]
    assert main(["evaluate", str(place / "bytes"), "--data", str(place / "text.txt"), "--wrap", "bos-eos"]) == 2
    assert "cannot be wrapped: that takes a token" in capsys.readouterr().err


# ---- bytes per token ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界 🙂"])
def test_token_widths_sum_to_text_size(text: str) -> None:
    kinds: list[Tokenizer] = [ByteTokenizer(), BPETokenizer.train([text], 270)]
    kinds += [CharTokenizer(text), PaddedTokenizer(kinds[1])]
    assert PaddedTokenizer(kinds[1]).words_begin_with_spaces  # as for the tokenizer without padding
    for tokenizer in kinds:
        assert tokenizer.widths[tokenizer.encode(text)].sum() == len(text.encode())
    numbers = IdTokenizer(20)
    assert numbers.widths[numbers.encode("3 14 15")].sum() == len("3 14 15 ")
