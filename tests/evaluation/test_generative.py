"""Generative perplexity: both definitions, their intervals, and samples that can be judged again."""

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
    Judged,
    Samples,
    distinct,
    generative_perplexity,
    load_samples,
    save_samples,
    token_entropy,
)


class Known:
    """A judge to whom every text costs a known amount a character."""

    name, precision = "known", "float64"

    def judge(self, texts):
        return [Judged(math.log(10.0 * (1 + (text[0] == "b"))) * (len(text) - 1), len(text) - 1) for text in texts]


def test_both_definitions():
    samples = Samples(["a" * 11, "b" * 31], [[1] * 11, [2] * 31], {"seed": 1})
    report = generative_perplexity(samples, Known())
    assert report.mean_of_sample_perplexities.value == pytest.approx((10 + 20) / 2)
    assert report.corpus_perplexity.value == pytest.approx(math.exp((10 * math.log(10) + 30 * math.log(20)) / 40))
    assert report.samples == 2
    assert report.judged_tokens == 40
    assert report.token_entropy == 0
    assert report.distinct["1"] == pytest.approx(2 / 42)
    json.dumps(asdict(report))


def test_the_interval_covers_the_mean():
    """95% intervals of 200 sets of 60 samples cover the true mean between 88% and 99% of the time (fixed seed)."""
    generator = np.random.default_rng(0)

    class Random:
        name, precision = "random", "float64"

        def judge(self, texts):
            return [Judged(50 * float(v), 50) for v in generator.normal(2.0, 0.3, len(texts))]

    truth = math.exp(2 + 0.3**2 / 2)
    covered = 0
    for _ in range(200):
        report = generative_perplexity(Samples(["xx"] * 60, [[0]] * 60, {}), Random(), resamples=200)
        interval = report.mean_of_sample_perplexities
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= truth <= interval.high
    assert 0.88 < covered / 200 < 0.99


def test_one_sample_has_no_interval():
    report = generative_perplexity(Samples(["a" * 11], [[1] * 11], {}), Known())
    assert report.corpus_perplexity.value == pytest.approx(10)
    assert report.corpus_perplexity.low is None


def test_a_judge_that_is_not_there_is_one_line(tmp_path):
    for name in (str(tmp_path / "nothing"), "nowhere.gguf"):
        with pytest.raises(ValueError, match=f"^there is no judge at {name}$"):
            HubJudge(name)


def test_diversity():
    assert token_entropy([1, 1, 2, 2]) == pytest.approx(math.log(2))
    assert token_entropy([]) == 0
    assert distinct([[1, 2, 1, 2]], 2) == pytest.approx(2 / 3)
    assert distinct([[1]], 2) == 0


def test_samples_are_saved_and_read_again(tmp_path):
    samples = Samples(["one\ntwo", "ü \u2028"], [[1, 2], [3]], {"steps": 4})
    save_samples(tmp_path / "s.jsonl", samples)
    assert load_samples(tmp_path / "s.jsonl") == samples
    (tmp_path / "plain.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert load_samples(tmp_path / "plain.jsonl").texts == ["a", "b"]
    (tmp_path / "theirs.jsonl").write_bytes('\ufeff{"text": "a\u2028b\x85"}\r\n{"text": "c"}\r\n'.encode())
    assert load_samples(tmp_path / "theirs.jsonl").texts == ["a\u2028b\x85", "c"]
    (tmp_path / "halves.jsonl").write_text('{"text": "a\\ud83d"}')
    assert load_samples(tmp_path / "halves.jsonl").texts == ["a\ufffd"]
    for content, message in [("nonsense", "line 1 .* not JSON"), ("[1]", "not a sample"), ("", "holds no samples")]:
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_samples(tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "\xff"}')
    with pytest.raises(ValueError, match=r"bad\.jsonl is not UTF-8 text"):
        load_samples(tmp_path / "bad.jsonl")
    with pytest.raises(ValueError, match="no samples at"):
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


def test_a_judge_of_the_hub(monkeypatch):
    """The arithmetic of `HubJudge`, with a library that is not there: padding, cutting and the first token."""
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


def test_without_the_library_the_judge_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'cedd\[hub\]'"):
        HubJudge("gpt2")
