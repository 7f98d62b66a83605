"""Generative perplexity: the perplexity of samples under another language model, the judge.

Two definitions are in use and differ; both are reported by name. With c_i tokens of sample i and l_i their summed
negative log-likelihood under the judge:

    mean_of_sample_perplexities = mean_i exp(l_i / c_i)              (the paper's)
    corpus_perplexity           = exp(sum_i l_i / sum_i c_i)         (most others')

A diffusion model as judge estimates l_i with a Monte Carlo error, independent between samples. The variation of the
samples' values includes it, so the intervals do too. In the first definition an error of variance v_i in l_i / c_i
would raise the mean of exp; exp(l_i / c_i - v_i / 2) removes this bias (to first order, exactly for normal errors).

A low value alone means little, since repeated words are likely. The report therefore includes the token entropy of the
samples and their share of distinct n-grams.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from cedd.bounds.estimator import estimate_bound
from cedd.data.corpora import whole_characters
from cedd.data.text import encode_verbatim, unknown_share
from cedd.data.tokenizers import Tokenizer
from cedd.device import pick_device
from cedd.evaluation.intervals import Floats, IntervalEstimate, jackknife, leave_one_out_sums
from cedd.evaluation.text_parts import text_parts
from cedd.models.folder import load_folder
from cedd.models.loaded_model import LoadedModel
from cedd.models.locate import CONFIG_FILE, WEIGHTS_FILE, is_model, packaged, pretrained_names
from cedd.network import Network, evaluating
from cedd.storage import JSONMapping, atomic_write, expanded, file_sha256, read_json, read_text


@dataclass(frozen=True)
class Samples:
    """Texts with their token ids, and how they were made."""

    texts: list[str]
    ids: list[list[int]]
    made_by: JSONMapping


def save_samples(path: str | Path, samples: Samples) -> None:
    """One JSON object per line: first how the samples were made, then each sample."""
    lines = [json.dumps({"made_by": dict(samples.made_by)})]
    lines += [json.dumps({"text": t, "ids": i}) for t, i in zip(samples.texts, samples.ids, strict=True)]
    atomic_write(Path(path), ("\n".join(lines) + "\n").encode())


def load_samples(path: str | Path) -> Samples:
    """Samples written by `save_samples`, or any file with one {"text": ...} per line."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"file not found: {file}")
    made_by: JSONMapping = {}
    texts: list[str] = []
    ids: list[list[int]] = []
    for number, line in enumerate(read_text(file).split("\n"), 1):
        try:
            entry: Any = json.loads(line) if line.strip() else {"made_by": made_by}
        except (ValueError, RecursionError):
            raise ValueError(f"{file}, line {number} is not JSON") from None
        if not _is_sample(entry):
            raise ValueError(f'{file}, line {number} is not a sample, {{"text": ...}}')
        if "text" in entry:
            texts.append(whole_characters(entry["text"]))
            ids.append(list(entry.get("ids", [])))
        else:
            made_by = entry["made_by"]
    if not texts:
        raise ValueError(f"{file} contains no samples")
    return Samples(texts, ids, made_by)


def _is_sample(entry: object) -> bool:
    """Whether a line is a sample, or describes how the samples were made."""
    if not isinstance(entry, dict):
        return False
    if "text" not in entry:
        return isinstance(entry.get("made_by"), dict)
    ids = entry.get("ids", [])
    return isinstance(entry["text"], str) and isinstance(ids, list) and all(isinstance(one, int) for one in ids)


# ----------------------------------------------------------------------------------------------------------------
# The judge


@dataclass(frozen=True)
class JudgedText:
    """Summed negative log-likelihood of a text, and the number of tokens in the sum."""

    nats: float
    tokens: int
    cut_off: int = 0
    """Tokens beyond the judge's context, which it did not read."""
    stderr: float = 0.0
    """Monte Carlo standard error of `nats`: 0 for a judge that computes the likelihood exactly."""


class Judge(Protocol):
    """A language model that scores texts in its own tokens."""

    name: str
    precision: str

    def judge(self, texts: Sequence[str]) -> list[JudgedText]:
        """Score texts. The first token of a text, which has no context, is not counted."""
        ...


def refuse_missing_judge(name: str) -> None:
    """Refuse a path that does not exist; a name may be on the hub."""
    path = expanded(name)
    is_path = name.startswith(("/", ".", "~")) or (path.suffix == ".gguf" and path.parent.is_dir())
    if is_path and not path.exists():
        raise ValueError(f"judge not found: {name}")


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

    def judge(self, texts: Sequence[str]) -> list[JudgedText]:
        """Tokenize and score each text; tokens beyond the judge's context are cut off."""
        parts = (texts[start : start + self._batch] for start in range(0, len(texts), self._batch))
        return [judged for part in parts for judged in self._judge_batch(part)]

    def _judge_batch(self, texts: Sequence[str]) -> list[JudgedText]:
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
            JudgedText(total, max(0, len(row) - 1), len(tokens) - len(row))
            for total, row, tokens in zip(totals, rows, whole, strict=True)
        ]


class ModelJudge:
    """A cedd model as the judge, which reads texts in its own tokens.

    Autoregressive models give the exact likelihood of all tokens but the first. Other models give an estimate of the
    bound `tight` for all tokens, so the perplexity is an upper bound. They read a text as `LanguageModel.perplexity`
    does, with masks around a text that is shorter than a block. Tokens beyond the model's length are cut off.
    """

    precision = "float32"

    def __init__(self, name: str | Path, device: str = "auto", batch: int = 8, draws: int = 64) -> None:
        place = pick_device(device)
        self._batch, self._draws = batch, draws
        self._model = LoadedModel(load_folder(name, place), place)
        self.name = self._model.folder.path.name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    def judge(self, texts: Sequence[str]) -> list[JudgedText]:
        """Tokenize and score each text; texts with too many unknown characters are refused.

        Times and noise come from one generator, so the errors of different texts are independent.
        """
        encoded = [encode_verbatim(self.tokenizer, text).astype(np.int64) for text in texts]
        unknown_share(self.tokenizer, np.concatenate([*encoded, np.zeros(0, np.int64)]), unless=", or another judge")
        whole = [torch.from_numpy(ids) for ids in encoded]
        if self._model.method.dynamics.noisy:
            generator = torch.Generator().manual_seed(0)
            return [self._bounded(ids, generator) for ids in whole]
        parts = (whole[start : start + self._batch] for start in range(0, len(whole), self._batch))
        return [judged for part in parts for judged in self._exact(part)]

    def _exact(self, whole: Sequence[torch.Tensor]) -> list[JudgedText]:
        model = self._model
        rows = [ids[: model.length] for ids in whole]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
        network = Network.of(model.model, model.process.vocab_size, model.device, {}, len(ids))
        with torch.no_grad(), evaluating(model.model):
            nats = model.method.dynamics.token_nats(network, model.process, ids).cpu() if ids.numel() else ids.cpu()
        return [
            JudgedText(float(values[1 : len(row)].sum()), max(0, len(row) - 1), len(given) - len(row))
            for row, values, given in zip(rows, nats, whole, strict=True)
        ]

    def _bounded(self, given: torch.Tensor, generator: torch.Generator) -> JudgedText:
        model = self._model
        ids = given[: model.length]
        if not len(ids):
            return JudgedText(0.0, 0)
        nats = variance = 0.0
        for part in text_parts(model, ids[None]):
            found = estimate_bound(
                part.model,
                model.process,
                part.ids.to(model.device),
                method=part.method,
                draws=self._draws,
                generator=generator,
                fixed_set=True,
                **part.conditions,
            )
            nats += found.nats_per_token * part.ids.shape[1]
            variance += (found.stderr * part.ids.shape[1]) ** 2 if math.isfinite(found.stderr) else 0.0  # of infinity
        return JudgedText(nats, len(ids), len(given) - len(ids), math.sqrt(variance))


def open_judge(name: str, device: str = "cpu", batch: int = 8, gguf_file: str | None = None) -> Judge:
    """The judge of this name: a cedd model, from a folder or the package, or a model of the `transformers` library."""
    if batch < 1:
        raise ValueError(f"--judge-batch must be at least 1 (got {batch})")
    if _is_ours(name):
        if gguf_file is not None:
            raise ValueError(f"--gguf-file has no effect with the judge {name}, which is a cedd model")
        return ModelJudge(name, device, batch)
    return HubJudge(name, device, batch, gguf_file)


def judge_label(name: str, gguf_file: str | None = None) -> str:
    """The judge's name in results, independent of its location: the name of its file or folder, or its name on the
    hub."""
    path = expanded(name)
    label = path.name if path.exists() or name.startswith(("/", ".", "~")) else name
    return label if gguf_file is None else f"{label}/{gguf_file}"


def judge_weights(name: str, gguf_file: str | None = None) -> str | None:
    """A hash of the judge's weights, which distinguishes judges of the same name; None if they are not on this
    machine."""
    folder = packaged(name) if _is_packaged(name) else expanded(name)
    file = folder if folder.is_file() else folder / (gguf_file or WEIGHTS_FILE)
    return file_sha256(file) if file.is_file() else None


def _is_packaged(name: str) -> bool:
    return name in pretrained_names() and not expanded(name).exists()


def _is_ours(name: str) -> bool:
    """Whether a folder contains a cedd model, whose config.json describes a process."""
    if _is_packaged(name):
        return True
    if not is_model(expanded(name)):
        return False
    return "process" in read_json(expanded(name) / CONFIG_FILE)


# ----------------------------------------------------------------------------------------------------------------
# The measure


@dataclass(frozen=True)
class GenerativePerplexity:
    """The report."""

    judge: str
    judge_precision: str
    samples: int
    judged_tokens: int
    cut_off_tokens: int
    """Tokens beyond the judge's context, not counted."""
    mean_of_sample_perplexities: IntervalEstimate
    corpus_perplexity: IntervalEstimate
    token_entropy: float
    """Mean over samples of the entropy of the sample's own token frequencies, in nats."""
    distinct: Mapping[str, float]
    """Distinct n-grams as a share of all n-grams, over all samples."""


def generative_perplexity(samples: Samples, judge: Judge) -> GenerativePerplexity:
    """Score the samples. Samples with fewer than two tokens of the judge have no likelihood and are not counted."""
    judged = [result for result in judge.judge(samples.texts) if result.tokens > 0]
    if not judged:
        raise ValueError("no sample has two tokens of the judge")
    units = [ids or list(text.encode()) for ids, text in zip(samples.ids, samples.texts, strict=True)]
    nats, tokens, stderr = np.array([(one.nats, one.tokens, one.stderr) for one in judged], dtype=np.float64).T
    return GenerativePerplexity(
        judge=judge.name,
        judge_precision=judge.precision,
        samples=len(judged),
        judged_tokens=int(tokens.sum()),
        cut_off_tokens=sum(result.cut_off for result in judged),
        mean_of_sample_perplexities=jackknife(mean_perplexity(nats, tokens, stderr, len(judged))),
        corpus_perplexity=jackknife(log_perplexity(nats, tokens, len(judged))).exp(),
        token_entropy=float(np.mean([token_entropy(unit) for unit in units])),
        distinct={str(n): distinct(units, n) for n in (1, 2, 3)},
    )


def log_perplexity(nats: Floats, tokens: Floats, texts: int) -> Floats:
    """The log of the corpus perplexity, over all texts and without each of them: [1 + texts]."""
    with np.errstate(invalid="ignore"):  # 0/0 without the only text
        return leave_one_out_sums(nats, texts) / leave_one_out_sums(tokens, texts)


def mean_perplexity(nats: Floats, tokens: Floats, stderr: Floats, texts: int) -> Floats:
    """The mean perplexity of the texts that have tokens, over all and without each of them: [1 + texts]."""
    each, read = np.zeros(len(tokens)), tokens > 0
    finite = read & np.isfinite(nats)
    each[read & ~finite] = math.inf
    with np.errstate(invalid="ignore", over="ignore"):  # 0/0 without the only text
        each[finite] = np.exp(nats[finite] / tokens[finite] - (stderr[finite] / tokens[finite]) ** 2 / 2)
        return leave_one_out_sums(each, texts) / leave_one_out_sums(read.astype(float), texts)


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
