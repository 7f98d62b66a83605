"""Generative perplexity: both definitions, their intervals, and saved samples."""

import json
import math
import sys
from dataclasses import asdict
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from cedd.evaluation.generative import (
    HubJudge,
    JudgedText,
    Samples,
    distinct,
    generative_perplexity,
    load_samples,
    save_samples,
    token_entropy,
)


class Known:
    """A judge that assigns every text a known cost per character."""

    name, precision = "known", "float64"

    def judge(self, texts):
        return [JudgedText(math.log(10.0 * (1 + (text[0] == "b"))) * (len(text) - 1), len(text) - 1) for text in texts]


def test_both_definitions_of_generative_perplexity():
    samples = Samples(["a" * 11, "b" * 31], [[1] * 11, [2] * 31], {"seed": 1})
    report = generative_perplexity(samples, Known())
    assert report.mean_of_sample_perplexities.value == pytest.approx((10 + 20) / 2)
    assert report.corpus_perplexity.value == pytest.approx(math.exp((10 * math.log(10) + 30 * math.log(20)) / 40))
    assert report.samples == 2
    assert report.judged_tokens == 40
    assert report.token_entropy == 0
    assert report.distinct["1"] == pytest.approx(2 / 42)
    json.dumps(asdict(report))


class Lognormal:
    """A judge of random texts of 50 tokens: nats per token ~ N(2, spread^2), with a Monte Carlo error."""

    name, precision = "lognormal", "float64"

    def __init__(self, spread=0.4, error=0.0, seed=0):
        self.spread, self.error, self.generator = spread, error, np.random.default_rng(seed)

    def judge(self, texts):
        nats = self.generator.normal(2.0, self.spread, len(texts)) + self.generator.normal(0, self.error, len(texts))
        return [JudgedText(50 * float(v), 50, stderr=50 * self.error) for v in nats]

    def covered(self, texts, sets):
        """The number of 95% intervals of the mean perplexity and of the corpus perplexity that contain the truth."""
        samples, found = Samples(["xx"] * texts, [[0]] * texts, {}), [0, 0]
        for _ in range(sets):
            report = generative_perplexity(samples, self)
            both = (report.mean_of_sample_perplexities, 2 + self.spread**2 / 2), (report.corpus_perplexity, 2.0)
            for place, (interval, log_truth) in enumerate(both):
                assert interval.low is not None
                assert interval.high is not None
                found[place] += interval.low <= math.exp(log_truth) <= interval.high
        return found


@pytest.mark.parametrize("texts", [8, pytest.param(24, marks=pytest.mark.slow)])
def test_intervals_have_nominal_coverage_with_few_texts(texts):
    """Of 1,000 intervals 930 to 970 hold the truth: with a coverage of 95% one seed in 250 would leave this range.

    The coverage of the percentile bootstrap is 86% with 8 texts.
    """
    mean, corpus = Lognormal().covered(texts, 1000)
    assert 930 <= mean <= 970
    assert 930 <= corpus <= 970


def test_intervals_include_monte_carlo_error_of_judge():
    """Errors of 0.3 nats per token on texts that vary by 0.2: of 300 intervals 273 to 297 hold the truth (with a
    coverage of 95%, one seed in 500 would leave this range). The mean of exp, uncorrected, is 4.6% too high."""
    mean, corpus = Lognormal(0.2, 0.3, seed=1).covered(150, 300)
    assert 273 <= mean <= 297
    assert 273 <= corpus <= 297


def test_single_sample_has_no_interval():
    report = generative_perplexity(Samples(["a" * 11], [[1] * 11], {}), Known())
    assert report.corpus_perplexity.value == pytest.approx(10)
    assert report.corpus_perplexity.low is None


def test_missing_judge_gives_one_line_error(tmp_path):
    for name in (str(tmp_path / "nothing"), "nowhere.gguf"):
        with pytest.raises(ValueError, match=f"^judge not found: {name}$"):
            HubJudge(name)


def test_token_entropy_and_distinct():
    assert token_entropy([1, 1, 2, 2]) == pytest.approx(math.log(2))
    assert token_entropy([]) == 0
    assert distinct([[1, 2, 1, 2]], 2) == pytest.approx(2 / 3)
    assert distinct([[1]], 2) == 0


def test_samples_round_trip_through_file(tmp_path):
    samples = Samples(["one\ntwo", "ü \u2028"], [[1, 2], [3]], {"steps": 4})
    save_samples(tmp_path / "s.jsonl", samples)
    assert load_samples(tmp_path / "s.jsonl") == samples
    (tmp_path / "plain.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert load_samples(tmp_path / "plain.jsonl").texts == ["a", "b"]
    (tmp_path / "theirs.jsonl").write_bytes('\ufeff{"text": "a\u2028b\x85"}\r\n{"text": "c"}\r\n'.encode())
    assert load_samples(tmp_path / "theirs.jsonl").texts == ["a\u2028b\x85", "c"]
    (tmp_path / "halves.jsonl").write_text('{"text": "a\\ud83d"}')
    assert load_samples(tmp_path / "halves.jsonl").texts == ["a\ufffd"]
    for content, message in [("nonsense", "line 1 .* not JSON"), ("[1]", "not a sample"), ("", "contains no samples")]:
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_samples(tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "\xff"}')
    with pytest.raises(ValueError, match=r"bad\.jsonl is not UTF-8 text"):
        load_samples(tmp_path / "bad.jsonl")
    with pytest.raises(ValueError, match="file not found:"):
        load_samples(tmp_path / "missing.jsonl")


class Bigram(torch.nn.Module):
    """A causal model whose logits depend on the last token only."""

    def __init__(self):
        super().__init__()
        table = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
        self.table = torch.nn.Parameter(table.bfloat16().float())  # a judge may be stored in half precision
        self.config = SimpleNamespace(max_position_embeddings=20)

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.table[input_ids])


def test_hub_judge_with_fake_library(monkeypatch):
    """The arithmetic of `HubJudge` with a fake library: padding, truncation and the first token."""
    model, seen = Bigram(), {}
    library = ModuleType("transformers")

    def tokenizer(name, **options):
        seen.update(options)
        return lambda texts, add_special_tokens: {"input_ids": [list(text.encode()) for text in texts]}

    monkeypatch.setattr(library, "AutoTokenizer", SimpleNamespace(from_pretrained=tokenizer), raising=False)
    causal = SimpleNamespace(from_pretrained=lambda name, **options: model.bfloat16())
    monkeypatch.setattr(library, "AutoModelForCausalLM", causal, raising=False)
    quiet = SimpleNamespace(logging=SimpleNamespace(disable_progress_bar=lambda: None))
    monkeypatch.setattr(library, "utils", quiet, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", library)
    judge = HubJudge("folder/model.gguf", batch=2)
    assert seen == {"gguf_file": "model.gguf"}
    texts = ["abc", "a", "a longer text, which is cut off", ""]
    expected = torch.log_softmax(model.table.detach(), -1).double()
    for text, result in zip(texts, judge.judge(texts), strict=True):
        ids = list(text.encode())[:20]
        assert result.tokens == max(0, len(ids) - 1)
        assert result.cut_off == len(text) - len(ids)
        assert result.nats == pytest.approx(-sum(float(expected[a, b]) for a, b in pairwise(ids)))


def test_missing_library_error_names_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'cedd\[hub\]'"):
        HubJudge("gpt2")
