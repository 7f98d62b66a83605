"""The adapter for lm-evaluation-harness (pip install 'cedd[lm-eval]'): cedd models as its model `cedd`.

    python -m cedd.evaluation.harness run --model cedd --model_args pretrained=runs/first --tasks arc_easy

This is the harness's own command line with the model `cedd` registered. In Python, import this module.
`evaluation/likelihood.py` explains the likelihoods: conditional on a clean context, joint, or exact. The kind and the
Monte Carlo standard errors are in the `config` of the harness's results, and for each request in the file
`record=FILE.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from cedd.device import pick_device
from cedd.evaluation.likelihood import LogLikelihood, TextLikelihoods
from cedd.models.folder import load_folder
from cedd.models.loaded_model import LoadedModel
from cedd.samplers import SamplingOptions
from cedd.storage import JSONObject, atomic_write, finite

try:
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(f"lm-evaluation-harness could not be imported ({error}): pip install 'cedd[lm-eval]'") from None

DEFAULT_TOKENS = 128
"""Tokens to generate, if a task does not set a number."""


class Request(Protocol):
    """A request of the harness, `lm_eval.api.instance.Instance`."""

    @property
    def args(self) -> tuple[Any, ...]: ...


@register_model("cedd")
class HarnessModel(LM):
    """A model folder, or a model by name, for the harness.

    Args:
        pretrained: the folder or name.
        draws: noisy versions of each text; by default 8, or the protocol's own number.
        protocol: the likelihood estimator of another project, llada, dream or dream-ar; ours by default.
        guidance: w of classifier-free guidance in a protocol.
        seed: of times, noise and generated text.
        steps: of the sampler.
        record: a .jsonl file for one line per scored request.
        device: auto, cpu or cuda.
        architecture: package:Class of your own network.
        unused: arguments that the harness passes to every model.
    """

    def __init__(
        self,
        pretrained: str = "english-char",
        draws: int | None = None,
        seed: int = 0,
        steps: int | None = None,
        protocol: str | None = None,
        guidance: float = 0.0,
        record: str | None = None,
        device: str = "auto",
        architecture: str | None = None,
        **unused: object,
    ) -> None:
        super().__init__()
        if unknown := sorted(set(unused) - {"batch_size", "max_batch_size"}):
            raise ValueError(f"the model cedd has no argument {unknown[0]!r}")
        name = device.partition(":")[0]  # the harness says cuda:0 where its user has said nothing
        place = pick_device("auto" if name == "cuda" and not torch.cuda.is_available() else name)
        self.loaded = LoadedModel(load_folder(pretrained, place, architecture), place)
        self.likelihoods = TextLikelihoods(
            self.loaded, None if draws is None else int(draws), int(seed), protocol, float(guidance)
        )
        self.steps, self.record = steps, None if record is None else Path(record)
        self.scored: list[JSONObject] = []

    @property
    def tokenizer_name(self) -> str:
        return self.loaded.tokenizer.name

    def loglikelihood(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is greedy) of (context, answer)."""
        found: list[tuple[float, bool]] = []
        long = {_number_of(request) for request in requests if not self.likelihoods.is_short(*request.args)}
        for request in tqdm(requests, desc="answers", disable=len(requests) < 2):
            context, answer = request.args
            number = _number_of(request)
            score = self.likelihoods.answer(context, answer, number, exact=number not in long)
            found.append((score.value, score.greedy))
            self._note("loglikelihood", request, score, found[-1])
        self._write()
        return found

    def loglikelihood_rolling(self, requests: Sequence[Request]) -> list[float]:
        """The log-likelihood of whole texts."""
        found: list[float] = []
        for request in tqdm(requests, desc="texts", disable=len(requests) < 2):
            score = self.likelihoods.text(request.args[0], _number_of(request))
            found.append(score.value)
            self._note("loglikelihood_rolling", request, score, found[-1])
        self._write()
        return found

    def generate_until(self, requests: Sequence[Request]) -> list[str]:
        """Text after each context, up to a stop string; greedy unless sampling is requested."""
        found: list[str] = []
        for request in tqdm(requests, desc="samples", disable=len(requests) < 2):
            context, asked = request.args
            until = asked.get("until") or []
            temperature = asked.get("temperature") if asked.get("do_sample") else 0.0
            options = SamplingOptions(
                temperature=temperature,
                top_p=asked.get("top_p") if asked.get("do_sample") else None,
                steps=self.steps,
                seed=self.likelihoods.seed ^ _number_of(request),
            )
            most = int(asked.get("max_gen_toks", asked.get("max_tokens", DEFAULT_TOKENS)))
            ends = [until] if isinstance(until, str) else until
            found.append(self.likelihoods.continued(context, most, ends, options))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def get_model_info(self) -> JSONObject:
        """Information that the harness stores with its results."""
        errors = [score["stderr"] for score in self.scored]
        return finite(
            {
                "model_name": str(self.loaded.folder.name),
                "model_num_parameters": self.loaded.model.num_parameters(),
                "likelihood": self.likelihoods.kind,
                "likelihood_draws": self.likelihoods.draws,
                "likelihood_seed": self.likelihoods.seed,
                "monte_carlo_stderr_mean": sum(errors) / len(errors) if errors else 0.0,
                "monte_carlo_stderr_max": max(errors, default=0.0),
                "exact_likelihoods": sum(score["likelihood"] == "exact" for score in self.scored),
                **self._undecided(),
            }
        )

    def _undecided(self) -> dict[str, int]:
        """The number of questions whose two best answers are closer than twice their errors, taken as independent. With
        common random numbers the actual error of the difference is smaller."""
        questions: dict[tuple[object, object], list[tuple[float, float]]] = {}
        for score in self.scored:
            if score["request"] == "loglikelihood":
                answers = questions.setdefault((score["task"], score["doc"]), [])
                answers.append((score["log_likelihood"], score["stderr"]))
        best = [sorted(answers)[-2:] for answers in questions.values() if len(answers) > 1]
        close = [two for two in best if two[1][0] - two[0][0] < 2 * math.hypot(two[0][1], two[1][1])]
        return {"questions": len(best), "questions_within_two_errors": len(close)}

    def _note(self, name: str, request: Request, score: LogLikelihood, result: object) -> None:
        self.cache_hook.add_partial(name, request.args, result)
        self.scored.append(
            {
                "request": name,
                "task": getattr(request, "task_name", None),
                "doc": getattr(request, "doc_id", None),
                "answer": getattr(request, "idx", 0),
                "likelihood": "exact" if score.exact else self.likelihoods.kind,
                "log_likelihood": score.value,
                "stderr": score.stderr,
                "greedy": score.greedy,
                "tokens": score.tokens,
                "evaluations": score.evaluations,
            }
        )

    def _write(self) -> None:
        if self.record is not None:
            atomic_write(self.record, "".join(f"{json.dumps(finite(score))}\n" for score in self.scored).encode())


def _number_of(request: Request) -> int:
    """The same number for all answers to a question, in any order."""
    question = (getattr(request, "task_name", None), getattr(request, "doc_id", None))
    named = question if question[1] is not None else request.args[:1]
    return int.from_bytes(hashlib.sha256(repr(named).encode()).digest()[:4], "little")


def main() -> None:
    """The harness's own command line."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    sys.argv[0] = "lm_eval"
    cli_evaluate()


if __name__ == "__main__":
    main()
