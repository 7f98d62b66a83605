"""Answers generated with a model's chat template."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import cedd
from cedd.cli import main
from cedd.constraints import regex
from cedd.data.tokenizers import JSONTokenizer
from cedd.tasks.generate import chat_template
from tests.models import plain_llama
from tests.models.plain_llama import V

BOS, END, OTHER_END = 1, 2, 3
TEMPLATE = "{{ bos_token }}{% for one in messages %} {{ one.role }} {{ one.content }} {% endfor %}"


def published(folder: Path, kind: str, template: str | None = TEMPLATE) -> Path:
    """A network whose tokens are words: w4 to w22, and those of a template."""
    plain_llama.write(folder, kind, bos_token_id=BOS, eos_token_id=[END, OTHER_END], mask_token_id="absent")
    words = ["<pad>", "<s>", "</s>", "<turn>", "user", "assistant", *(f"w{i}" for i in range(6, V))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<pad>", "<s>", "</s>", "<turn>"])
    made.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> cedd.LanguageModel:
    return cedd.import_model(published(tmp_path / "llama", "llama"), device="cpu")


def greedy(model: cedd.LanguageModel, ids: list[int], most: int) -> list[int]:
    """Greedy decoding, without tokens that have no text, up to the first token that ends a text."""
    written: list[int] = []
    for _ in range(most):
        outputs = model.original_logits(torch.tensor([[*ids, *written]]))[0, -1]
        outputs[[0, BOS]] = -torch.inf
        written.append(int(outputs.argmax()))
        if written[-1] in (END, OTHER_END):
            return written[:-1]
    return written


@pytest.mark.parametrize("seed", range(4))
def test_answer_continues_chat_template(tmp_path: Path, seed: int) -> None:
    folder = published(tmp_path / "llama", "llama")
    plain_llama.save_file(plain_llama.random_weights("llama", seed), folder / "model.safetensors")
    model = cedd.import_model(folder, device="cpu")
    messages = [{"role": "user", "content": "w7 w8"}]
    ids = model.tokenizer.encode_chat(messages).tolist()  # type: ignore[attr-defined]
    assert ids == [BOS, 4, 7, 8]
    expected = model.tokenizer.decode(greedy(model, ids, 10))
    assert model.chat(messages, length=10, temperature=0) == [expected]
    assert model.chat("w7 w8", length=10, temperature=0) == [expected]


def test_start_token_is_not_duplicated(model: cedd.LanguageModel, tmp_path: Path) -> None:
    assert chat_template(model, "w9").ids[:2].tolist() == [4, 9]  # the network reads the start token itself
    llada = cedd.import_model(published(tmp_path / "llada", "llada"), device="cpu", mask_id=20)
    assert chat_template(llada, "w9").ids[:3].tolist() == [BOS, 4, 9]
    assert chat_template(llada, "w9").width == llada.length
    assert chat_template(llada, "w9", 40).width == 43
    answer = llada.chat("w9", length=8, sampler="llada", steps=8, temperature=0, seed=1)[0]
    assert all(word.startswith("w") or word in ("user", "assistant") for word in answer.split())


def test_prompt_has_no_start_token_if_tokenizer_adds_none(tmp_path: Path) -> None:
    """As in the original: `add_bos_token` in tokenizer_config.json is false for Qwen."""
    folder = published(tmp_path / "qwen2", "qwen2", TEMPLATE.removeprefix("{{ bos_token }}"))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    plain_llama.save_file(plain_llama.random_weights("qwen2", 9), folder / "model.safetensors")
    cedd.import_model(folder, device="cpu").save_pretrained(tmp_path / "saved")
    model = cedd.load(tmp_path / "saved", device="cpu")
    expected = model.tokenizer.decode(greedy(model, [4, 7, 8], 10))
    assert expected != model.tokenizer.decode(greedy(model, [BOS, 4, 7, 8], 10))
    assert model.chat("w7 w8", length=10, temperature=0) == [expected]
    (found,) = model.log_likelihood("w7 w8", [" w9 w10"])
    logits = model.original_logits(torch.tensor([[7, 8, 9, 10]]))[0].double().log_softmax(-1)
    assert float(found) == pytest.approx(float(logits[1, 9] + logits[2, 10]), abs=1e-5)
    # Without a prompt the start token is read.
    texts = model.generate(4, length=3, temperature=0, seed=1)
    assert model.tokenizer.encode(texts[0])[0] == greedy(model, [BOS], 1)[0]
    spoken = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert spoken["add_bos_token"] is False


def test_answer_ends_at_end_token_of_template(tmp_path: Path) -> None:
    """Neither config.json nor the tokenizer lists this token as an end, as for LLaDA and Dream."""
    leave = "{% if tools is not none %}{% break %}{% endif %}"
    turns = "{% for one in messages %}<turn>{{ one.content | trim }} <pad> " + leave + "{% endfor %}"
    folder = published(tmp_path / "llada", "llada", turns)
    model = cedd.import_model(folder, device="cpu", mask_id=20)
    assert isinstance(model.tokenizer, JSONTokenizer)
    assert model.tokenizer.stops == (END, OTHER_END, 0)
    model.save_pretrained(tmp_path / "ours")
    assert cedd.load(tmp_path / "ours", device="cpu").tokenizer == model.tokenizer
    whole = model.generate(30, length=8, seed=1)
    assert any("<pad>" in text for text in whole)
    refusing = cedd.import_model(
        published(tmp_path / "plain", "llada", "{{ messages[3].x.y }}"), device="cpu", mask_id=20
    )
    assert refusing.tokenizer.ends == (END, OTHER_END)


def test_texts_of_batch_end_independently(model: cedd.LanguageModel) -> None:
    together = model.generate(12, length=14, until_end=True, seed=5)
    assert len({len(text.split()) for text in together}) > 1
    assert together[7] == model.generate(8, length=14, until_end=True, seed=5, batch=3)[7]
    whole = model.generate(12, length=14, seed=5)
    ends = [text.replace("</s>", "<turn>").partition("<turn>")[0].strip() for text in whole]
    assert [text.strip() for text in together] == ends


def test_word_after_prompt_is_separated_by_space(model: cedd.LanguageModel) -> None:
    """Word tokenizers write no space before the first word."""
    text = model.generate(1, length=5, prompt="w7 w8", seed=5)[0]
    assert text.startswith("w7 w8 ")
    assert len(text.split()) == 5


def test_chat_with_constraint(model: cedd.LanguageModel) -> None:
    found = model.chat("w7", 3, length=6, constraint=cedd.constraints.choice(["w10 w11", "w12"]), seed=1)
    assert set(found) <= {"w10 w11", "w12"}


def test_sample_command_prints_chat_answer(model: cedd.LanguageModel, tmp_path: Path, capsys) -> None:
    model.save_pretrained(tmp_path / "ours")
    words = ["sample", str(tmp_path / "ours"), "--chat", "w7 w8", "--length", "10", "--temperature", "0"]
    assert main([*words, "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == model.chat("w7 w8", length=10, temperature=0)
    assert main([*words, "--prompt", "w3"]) == 2
    assert capsys.readouterr().err == "cedd: error: --chat and --prompt cannot be combined; use one of them\n"


def test_block_model_chat_with_constraint(tmp_path: Path) -> None:
    folder = published(tmp_path / "sdar", "sdar")
    model = cedd.import_model(folder, device="cpu", mask_id=3)
    language = regex("(w7|w8)( w9)*")
    assert all(map(language.matches, model.chat("w7 w8", 3, length=6, steps=2, constraint=language)))
    with pytest.raises(ValueError, match="the id of this network's mask is not known"):
        cedd.import_model(folder, device="cpu").chat("w7 w8", length=6, constraint=language)


def test_invalid_chat_requests_are_rejected(model: cedd.LanguageModel, tmp_path: Path) -> None:
    plain = cedd.import_model(published(tmp_path / "plain", "llama", template=None), device="cpu")
    assert isinstance(plain.tokenizer, JSONTokenizer)
    with pytest.raises(ValueError, match="has no chat template; give the prompt as text"):
        plain.chat("w7")
    with pytest.raises(ValueError, match="has no chat template; give the prompt as text"):
        cedd.load("english", device="cpu").chat("Hello")
    with pytest.raises(ValueError, match="messages must be a list of at least one"):
        model.chat([{"role": "user"}])
    with pytest.raises(ValueError, match="the messages have 19 tokens, but the model reads 16; shorten them"):
        model.chat(" ".join(["w7"] * 18))
