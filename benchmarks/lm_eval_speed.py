"""How long questions with four answers take: 100 of them, of at most 128 tokens, with the default number of draws.

    python benchmarks/lm_eval_speed.py                      # english-char, a packaged model
    python benchmarks/lm_eval_speed.py runs/first --questions 20

The likelihoods are those of the adapter for lm-evaluation-harness (`cedd.evaluation.harness`); the harness itself is
not needed. Prints one JSON object: seconds, the kind of likelihood, and the mean Monte Carlo standard error of an
answer.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

import torch
from helps import parser_of

from cedd.cli import run_command
from cedd.evaluation.likelihood import DRAWS, TextLikelihoods
from cedd.models.folder import load_folder
from cedd.models.loaded_model import LoadedModel

TEXT = "the of and to in that was his it with he as for not her by be she him which had but from this there said when"


def question(number: int, most: int) -> tuple[str, list[str]]:
    """A context and four answers, of `most` characters together at most."""
    chosen, words = random.Random(number), TEXT.split()
    answers = [" " + " ".join(chosen.choices(words, k=chosen.randint(2, 6))) + "." for _ in range(4)]
    room = most - max(map(len, answers))
    context = " ".join(chosen.choices(words, k=most))[: chosen.randint(room // 2, room)].rstrip()
    return context, answers


def main() -> None:
    """Score the questions and print one line of JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?", default="english-char", help="a run's folder, or a model by its name")
    parser.add_argument("--questions", type=int, default=100, help="with four answers each")
    parser.add_argument("--length", type=int, default=128, help="the most tokens of a question with an answer")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of each likelihood")
    options = parser.parse_args()
    loaded = LoadedModel(load_folder(options.model))
    likelihoods = TextLikelihoods(loaded, options.draws)
    asked = [question(number, min(options.length, loaded.length)) for number in range(options.questions)]
    started, cpu = time.perf_counter(), time.process_time()
    found = [
        likelihoods.answer(context, answer, number)
        for number, (context, answers) in enumerate(asked)
        for answer in answers
    ]
    record = {
        "model": options.model,
        "likelihood": likelihoods.kind,
        "questions": options.questions,
        "draws": options.draws,
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "mean_stderr": round(sum(one.stderr for one in found) / len(found), 3),
        "mean_tokens": round(sum(one.tokens for one in found) / len(found), 1),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    sys.exit(run_command("lm_eval_speed", main))
