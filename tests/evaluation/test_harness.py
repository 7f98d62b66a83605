"""Our models in the real lm-evaluation-harness, on small custom tasks."""

import json
import math
from pathlib import Path

import pytest

from cedd.data.tokenizers import CharTokenizer
from cedd.evaluation.likelihood import TextLikelihoods
from cedd.models.folder import load_folder
from cedd.models.loaded_model import LoadedModel
from tests.tasks.models import save_random

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the harness and its dependencies
lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'cedd[lm-eval]'")

LETTERS = CharTokenizer("abcdefghijklmnopqrstuvwxyz .?:\n")
QUESTIONS = [
    {"question": f"what does {animal} say?", "choices": ["woof", "meow", "moo", "tweet tweet"], "answer": place}
    for place, animal in enumerate(("a dog", "a cat", "a cow", "a bird"))
]
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
metadata:
  version: 1
"""
TASKS = {
    "cedd_choice": """
task: cedd_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
""",
    "cedd_text": """
task: cedd_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: bits_per_byte
""",
    "cedd_written": """
task: cedd_written
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["\\n", "."]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
""",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    (folder / "test.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS), encoding="utf-8")
    (folder / "tasks").mkdir()
    for name, text in TASKS.items():
        content = text + COMMON.format(file=folder / "test.jsonl")
        (folder / "tasks" / f"{name}.yaml").write_text(content, encoding="utf-8")
    for name, kind in {
        "absorb": ("absorb", "ceddt"),
        "roulette": ("roulette", "bayes"),
        "ar": ("absorb", "ar"),
    }.items():
        save_random(folder / name, *kind, tokenizer=LETTERS)
    return folder


def evaluate(place: Path, name: str, monkeypatch: pytest.MonkeyPatch, **options: object) -> dict:
    import cedd.evaluation.harness  # registers the model

    monkeypatch.setenv("HF_DATASETS_CACHE", str(place / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    del cedd
    return lm_eval.simple_evaluate(
        model="cedd",
        model_args={"pretrained": str(place / name), "steps": 4, **options},
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(place / "tasks")),
        device="cpu",
        batch_size=1,
        log_samples=True,
        bootstrap_iters=0,
    )


@pytest.mark.parametrize("name", ["absorb", "roulette", "ar"])
def test_harness_scores_model(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = place / f"{name}.jsonl"
    found = evaluate(place, name, monkeypatch, record=str(record))
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    answers = [line for line in lines if line["request"] == "loglikelihood"]
    assert len(answers) == 16
    kinds = {"absorb": "conditional", "roulette": "joint", "ar": "exact"}
    assert {line["likelihood"] for line in lines} == {kinds[name]}
    assert all((line["stderr"] == 0) == (name == "ar") for line in lines)
    # The configuration in the results describes the likelihood.
    config = found["config"]
    assert config["likelihood"] == kinds[name]
    mean = sum(line["stderr"] for line in lines) / len(lines)
    assert config["monte_carlo_stderr_mean"] == pytest.approx(mean)
    assert config["questions"] == 4
    # The likelihoods are ours, and the best answer is the one with the highest.
    model = TextLikelihoods(LoadedModel(load_folder(place / name)))
    right = 0
    for sample in found["samples"]["cedd_choice"]:
        values = [float(response[0][0]) for response in sample["resps"]]
        question = sample["doc"]
        right += max(range(4), key=values.__getitem__) == question["answer"]
        if name == "ar":
            for value, choice in zip(values, question["choices"], strict=True):
                assert value == pytest.approx(model.answer(question["question"], f" {choice}").value, abs=1e-6)
    assert found["results"]["cedd_choice"]["acc,none"] == right / 4
    assert math.isfinite(found["results"]["cedd_text"]["bits_per_byte,none"])
    for sample in found["samples"]["cedd_written"]:
        assert "." not in sample["resps"][0][0]
        assert len(sample["resps"][0][0]) <= 8


def test_harness_result_of_ar_model_is_exact_likelihood(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = evaluate(place, "ar", monkeypatch)
    model = LoadedModel(load_folder(place / "ar"))
    total = sum(TextLikelihoods(model).text(question["question"]).value for question in QUESTIONS)
    size = sum(len(question["question"].encode()) for question in QUESTIONS)
    assert found["results"]["cedd_text"]["bits_per_byte,none"] == pytest.approx(-total / size / math.log(2))


def test_answers_do_not_depend_on_request_order(place: Path) -> None:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

    from cedd.evaluation.harness import HarnessModel

    model = HarnessModel(str(place / "absorb"), draws=4, device="cpu")
    requests = [
        Instance("loglikelihood", {}, ("a dog", f" {choice}"), idx, ("task", doc, 1))
        for doc in range(2)
        for idx, choice in enumerate(QUESTIONS[0]["choices"])
    ]
    found = model.loglikelihood(requests)
    assert model.loglikelihood(requests[::-1]) == found[::-1]
    assert found[:4] != found[4:]  # another question has different noise
    with pytest.raises(ValueError, match="no argument 'drwas'"):
        HarnessModel(str(place / "absorb"), drwas=4)
