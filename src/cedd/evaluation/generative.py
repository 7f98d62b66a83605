"""Generative perplexity: how likely another language model, the judge, finds the samples.

Two definitions are in use and differ; both are reported by name. With c_i tokens of sample i and l_i their summed
negative log-likelihood under the judge:

    mean_of_sample_perplexities = mean_i exp(l_i / c_i)              (the paper's)
    corpus_perplexity           = exp(sum_i l_i / sum_i c_i)         (most others')

A low value alone says little: repeating one word is cheap. So the samples' token entropy and their share of distinct
n-grams stand beside it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cedd.bounds.estimator import estimate_bound
from cedd.data.corpora import whole_characters
from cedd.data.text import encode_given, unknown_share
from cedd.data.tokenizers import Tokenizer
from cedd.device import pick_device
from cedd.models.folder import load_folder
from cedd.models.locate import CONFIG_FILE, WEIGHTS_FILE, is_model, packaged, pretrained_names
from cedd.network import Network, evaluating
from cedd.storage import atomic_write, expanded, file_sha256, read_json

Floats = NDArray[np.float64]

DEFAULT_JUDGE = "openai-community/gpt2-large"


@dataclass(frozen=True)
class Samples:
    """Texts with their token ids, and how they were made."""

    texts: list[str]
    ids: list[list[int]]
    made_by: Mapping[str, Any]


def save_samples(path: str | Path, samples: Samples) -> None:
    """One JSON object a line: first how the samples were made, then each sample."""
    lines = [json.dumps({"made_by": dict(samples.made_by)})]
    lines += [json.dumps({"text": t, "ids": i}) for t, i in zip(samples.texts, samples.ids, strict=True)]
    atomic_write(Path(path), ("\n".join(lines) + "\n").encode())


def load_samples(path: str | Path) -> Samples:
    """Samples written by `save_samples`, or any file with one {"text": ...} a line."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"there are no samples at {file}")
    made_by: Mapping[str, Any] = {}
    texts: list[str] = []
    ids: list[list[int]] = []
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text: convert it to UTF-8 first") from None
    for number, line in enumerate(lines, 1):
        try:
            entry: Any = json.loads(line) if line.strip() else {"made_by": made_by}
        except (ValueError, RecursionError):
            raise ValueError(f"line {number} of {file} is not JSON") from None
        if not _is_sample(entry):
            raise ValueError(f'line {number} of {file} is not a sample, {{"text": ...}}')
        if "text" in entry:
            texts.append(whole_characters(entry["text"]))
            ids.append(list(entry.get("ids", [])))
        else:
            made_by = entry["made_by"]
    if not texts:
        raise ValueError(f"{file} holds no samples")
    return Samples(texts, ids, made_by)


def _is_sample(entry: Any) -> bool:
    """Whether a line is a sample, or says how the samples were made."""
    if not isinstance(entry, dict):
        return False
    if "text" not in entry:
        return isinstance(entry.get("made_by"), dict)
    ids = entry.get("ids", [])
    return isinstance(entry["text"], str) and isinstance(ids, list) and all(isinstance(one, int) for one in ids)


# ----------------------------------------------------------------------------------------------------------------
# The judge


@dataclass(frozen=True)
class Judged:
    """Summed negative log-likelihood of a text and the number of tokens it is over."""

    nats: float
    tokens: int
    cut_off: int = 0
    """Tokens beyond the judge's context, which it did not read."""


class Judge(Protocol):
    """A language model that scores texts in its own tokens."""

    name: str
    precision: str

    def judge(self, texts: Sequence[str]) -> list[Judged]:
        """The first token of a text, which has no context, is not counted."""
        ...


def refuse_missing_judge(name: str) -> None:
    """Refuse a path at which there is no judge; a name that may be one of the hub's is left alone."""
    path = expanded(name)
    is_path = name.startswith(("/", ".", "~")) or (path.suffix == ".gguf" and path.parent.is_dir())
    if is_path and not path.exists():
        raise ValueError(f"there is no judge at {name}")


class HubJudge:
    """A causal model of the `transformers` library: a name on the hub, a folder, or a GGUF file."""

    def __init__(self, name: str, device: str = "cpu", batch: int = 8, gguf_file: str | None = None) -> None:
        path, label = expanded(name), name if gguf_file is None else f"{name}/{gguf_file}"
        refuse_missing_judge(name)
        try:
            import transformers  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError("a judge needs the transformers library: pip install 'cedd[hub]'") from None
        transformers.utils.logging.disable_progress_bar()
        if path.suffix == ".gguf" and gguf_file is None:
            name, gguf_file = str(path.parent), path.name
        options: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name, **options)
            # Weights of other kinds are unpickled, and may run anything.
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(name, use_safetensors=True, **options)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"the judge {label!r} could not be loaded: {error}") from None
        # The plain method of modules: the library's own refuses a model from a GGUF file, though it is unpacked by now,
        # and the option for it has another name in each generation of the library.
        self._model: Any = torch.nn.Module.float(model.eval()).to(device)
        self._device, self._batch = device, batch
        self._limit: int | None = getattr(model.config, "max_position_embeddings", None)
        self.name = name if gguf_file is None else f"{name}/{gguf_file}"
        self.precision = "float32"

    def judge(self, texts: Sequence[str]) -> list[Judged]:
        """Each text is tokenised anew; what exceeds the judge's context is cut off."""
        parts = (texts[start : start + self._batch] for start in range(0, len(texts), self._batch))
        return [judged for part in parts for judged in self._judge_batch(part)]

    def _judge_batch(self, texts: Sequence[str]) -> list[Judged]:
        whole = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        rows = [tokens[: self._limit] for tokens in whole]
        longest = max(2, *map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        lengths = torch.tensor([len(tokens) for tokens in rows])
        ids, mask = (part.to(self._device) for part in (ids, torch.arange(longest) < lengths[:, None]))
        with torch.no_grad():
            logits = self._model(input_ids=ids, attention_mask=mask.to(torch.int64)).logits
        # The logits stay as they lie, and the last of a text, of no token, is left out.
        following = ids.roll(-1, 1).flatten()
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), following, reduction="none")
        totals: list[float] = (nats.view_as(ids)[:, :-1].double() * mask[:, 1:]).sum(1).tolist()
        return [
            Judged(total, max(0, len(row) - 1), len(tokens) - len(row))
            for total, row, tokens in zip(totals, rows, whole, strict=True)
        ]


class ModelJudge:
    """A model of ours, which reads texts in its own tokens.

    Autoregressive: exact, without the first token; what exceeds its length is cut off. Others: the bound `tight`, of
    all tokens, so that a perplexity by it is an upper bound.
    """

    precision = "float32"

    def __init__(self, name: str | Path, device: str = "auto", batch: int = 8, draws: int = 16) -> None:
        self._device, self._batch, self._draws = pick_device(device), batch, draws
        self._folder = load_folder(name, self._device)
        self.name = self._folder.path.name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._folder.tokenizer

    def judge(self, texts: Sequence[str]) -> list[Judged]:
        """Each text is tokenised anew; refused where the judge cannot read them."""
        encoded = [encode_given(self.tokenizer, text).astype(np.int64) for text in texts]
        unknown_share(self.tokenizer, np.concatenate([*encoded, np.zeros(0, np.int64)]), unless=", or another judge")
        whole = [torch.from_numpy(ids) for ids in encoded]
        parts = (whole[start : start + self._batch] for start in range(0, len(whole), self._batch))
        some = self._bounded if self._folder.method.dynamics.noisy else self._exact
        return [judged for part in parts for judged in some(part)]

    def _exact(self, whole: Sequence[torch.Tensor]) -> list[Judged]:
        folder = self._folder
        rows = [ids[: folder.length] for ids in whole]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)
        network = Network.of(folder.model, folder.process.vocab_size, self._device, {}, len(ids))
        with torch.no_grad(), evaluating(folder.model):
            nats = folder.method.dynamics.token_nats(network, folder.process, ids).cpu() if ids.numel() else ids.cpu()
        return [
            Judged(float(values[1 : len(row)].sum()), max(0, len(row) - 1), len(given) - len(row))
            for row, values, given in zip(rows, nats, whole, strict=True)
        ]

    def _bounded(self, whole: Sequence[torch.Tensor]) -> list[Judged]:
        folder, judged = self._folder, list[Judged]()
        for given in whole:
            ids, total = given[: folder.length], 0.0
            if len(ids):
                found = estimate_bound(
                    folder.model,
                    folder.process,
                    ids[None].to(self._device),
                    method=folder.method,
                    draws=self._draws,
                    generator=torch.Generator().manual_seed(0),
                    fixed_set=True,
                )
                total = found.nats_per_token * len(ids)
            judged.append(Judged(total, len(ids), len(given) - len(ids)))
        return judged


def open_judge(name: str, device: str = "cpu", batch: int = 8, gguf_file: str | None = None) -> Judge:
    """The judge of this name: a model of ours, a folder or one of the package, or one of the `transformers` library."""
    if batch < 1:
        raise ValueError(f"a batch has at least one text; got {batch}")
    if _is_ours(name):
        return ModelJudge(name, device, batch)
    return HubJudge(name, device, batch, gguf_file)


def judge_label(name: str, gguf_file: str | None = None) -> str:
    """What figures call a judge, wherever it lies: its file's or folder's name, or its name on the hub."""
    path = expanded(name)
    label = path.name if path.exists() or name.startswith(("/", ".", "~")) else name
    return label if gguf_file is None else f"{label}/{gguf_file}"


def judge_weights(name: str, gguf_file: str | None = None) -> str | None:
    """The hash of a judge's weights, which tells it from another of its label; None where they do not lie here."""
    folder = packaged(name) if _is_packaged(name) else expanded(name)
    file = folder if folder.is_file() else folder / (gguf_file or WEIGHTS_FILE)
    return file_sha256(file) if file.is_file() else None


def _is_packaged(name: str) -> bool:
    return name in pretrained_names() and not expanded(name).exists()


def _is_ours(name: str) -> bool:
    """Whether a model's folder is one of ours: config.json of others says nothing of a process."""
    if _is_packaged(name):
        return True
    if not is_model(expanded(name)):
        return False
    return "process" in read_json(expanded(name) / CONFIG_FILE)


# ----------------------------------------------------------------------------------------------------------------
# The measure


@dataclass(frozen=True)
class BootstrapInterval:
    """A value and its 95% interval, by resampling the samples; a single sample has none."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class GenerativePerplexity:
    """The report."""

    judge: str
    judge_precision: str
    samples: int
    judged_tokens: int
    cut_off_tokens: int
    """Beyond the judge's context, and not counted."""
    mean_of_sample_perplexities: BootstrapInterval
    corpus_perplexity: BootstrapInterval
    token_entropy: float
    """Mean over samples of the entropy of the sample's own token frequencies, in nats."""
    distinct: Mapping[str, float]
    """Distinct n-grams as a share of all n-grams, over all samples."""


def generative_perplexity(
    samples: Samples, judge: Judge, *, resamples: int = 1000, seed: int = 0
) -> GenerativePerplexity:
    """Judge the samples. Those of fewer than two of the judge's tokens have no likelihood and are not counted."""
    judged = [result for result in judge.judge(samples.texts) if result.tokens > 0]
    if not judged:
        raise ValueError("no sample has two tokens of the judge; there is nothing to judge")
    nats = np.array([result.nats for result in judged])
    tokens = np.array([result.tokens for result in judged], dtype=np.float64)
    units = [ids or list(text.encode()) for ids, text in zip(samples.ids, samples.texts, strict=True)]
    return GenerativePerplexity(
        judge=judge.name,
        judge_precision=judge.precision,
        samples=len(judged),
        judged_tokens=int(tokens.sum()),
        cut_off_tokens=sum(result.cut_off for result in judged),
        mean_of_sample_perplexities=_interval(_sample_mean, nats, tokens, resamples, seed),
        corpus_perplexity=_interval(_corpus, nats, tokens, resamples, seed),
        token_entropy=float(np.mean([token_entropy(unit) for unit in units])),
        distinct={str(n): distinct(units, n) for n in (1, 2, 3)},
    )


def _sample_mean(nats: Floats, tokens: Floats) -> float:
    return float(np.exp(nats / tokens).mean())


def _corpus(nats: Floats, tokens: Floats) -> float:
    return float(math.exp(nats.sum() / tokens.sum()))


def _interval(
    statistic: Callable[[Floats, Floats], float], nats: Floats, tokens: Floats, resamples: int, seed: int
) -> BootstrapInterval:
    if len(nats) < 2:
        return BootstrapInterval(statistic(nats, tokens), None, None)
    generator = np.random.default_rng(seed)
    picks = (generator.integers(len(nats), size=len(nats)) for _ in range(resamples))
    values = [statistic(nats[pick], tokens[pick]) for pick in picks]
    with np.errstate(invalid="ignore"):  # a judge may find a text impossible
        low, high = np.quantile(values, (0.025, 0.975))
    return BootstrapInterval(statistic(nats, tokens), float(low), float(high))


def token_entropy(ids: Sequence[int]) -> float:
    """Entropy of the token frequencies within one sample, in nats: 0 for one token repeated."""
    if not ids:
        return 0.0
    shares = np.array(list(Counter(ids).values())) / len(ids)
    return float(-(shares * np.log(shares)).sum())


def distinct(samples: Sequence[Sequence[int]], n: int) -> float:
    """Distinct n-grams as a share of all n-grams."""
    counted = Counter(gram for ids in samples for gram in zip(*(ids[i:] for i in range(n)), strict=False))
    return len(counted) / max(1, counted.total())
