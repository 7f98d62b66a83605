import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cedd.data.detokenizers import DETOKENIZERS
from cedd.data.evaluation_sets import EVALUATION_SETS, find_evaluation_set, load_evaluation_set, open_evaluation_set
from cedd.data.tokenizers import ByteTokenizer, CharTokenizer, GPT2Tokenizer

EXAMPLES = {
    "wikitext": [
        (" = Robert Boulter = \n", " = Robert Boulter =\n"),
        (" = = = 2000 – 2005 = = = \n", " === 2000 – 2005 ===\n"),
        (" a guest @-@ starring role in 1 @,@ 000 plays at 2 @.@ 5 : good ; fine ! \n",
         " a guest-starring role in 1,000 plays at 2.5: good; fine!\n"),
        (' as " Craig " in ( the ) episode " Teddy \'s Story " , he said . \n',
         ' as "Craig" in (the) episode "Teddy\'s Story", he said.\n'),
        (" the boys ' toys [ sic ] at 20 ° C", " the boys' toys [sic] at 20°C"),
        ("", ""),
    ],
    "ptb": [
        ("no it was n't black monday", "no it wasn't black monday"),
        ("it fell N N N points to $ N billion # N in viewers ' homes and the world 's",
         "it fell 1 1 1 points to $1 billion #1 in viewers' homes and the world's"),
        ("<unk> and\\/or N", "? and/or N"),
    ],
    "lm1b": [
        ('Wal-Mart \'s founder said : " We let folks know we \'re here , " he said .',
         'Wal-Mart\'s founder said: "We let folks know we\'re here," he said.'),
        ("Really ? Yes ! It cost $ 50 ( or £ 40 ) ; see http : / / example.com / page ?",
         "Really? Yes! It cost $50 (or £40); see http://example.com/page?"),
        ("He left . She stayed [ there ] .", "He left. She stayed [there] ."),
    ],
    "lambada": [("  “Only one,” he said. \n", '\n"Only one," he said.')],
    "plain": [(" as it is . ", " as it is . ")],
}  # fmt: skip


@pytest.mark.parametrize("name", DETOKENIZERS)
def test_detokenizers_on_examples(name: str) -> None:
    for before, after in EXAMPLES[name]:
        assert DETOKENIZERS[name](before) == after


def test_detokenizers_have_distinct_hashes() -> None:
    assert len({detokenizer.sha256 for detokenizer in DETOKENIZERS.values()}) == len(DETOKENIZERS)


FILES = {
    "wikitext2.test.raw.txt": " \n = Title = \n \n Some text , here . \n",
    "wikitext103.test.txt": " \n = Title = \n \n Some <unk> , here . \n",
    "ptb.test.txt": " no it was n't \n it fell N points \n",
    "ptb.valid.txt": " consumers may want \n",
    "lambada.test.jsonl": "".join(json.dumps({"text": f"“Row {i}”"}) + "\n" for i in range(3)),
    "lm1b.heldout-00000-of-00050.txt": "Hello , world .\nBye .\n",
}
DOCUMENTS = {
    "wikitext2": ["", " = Title =\n", "", " Some text, here.\n"],
    "wikitext103": ["", " = Title =\n", "", " Some <unk>, here.\n"],
    "wikitext103-raw": ["", " = Title =\n", "", " Some text, here.\n"],
    "ptb": ["no it wasn't", "it fell 1 points"],
    "lambada": ['\n"Row 0"', '\n"Row 1"', '\n"Row 2"'],
    "lm1b": ["Hello, world.", "Bye ."],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "eval").mkdir()
    for name, text in FILES.items():
        (tmp_path / "eval" / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", EVALUATION_SETS)
def test_rows_become_documents(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(open_evaluation_set(name, root=root).documents()) == DOCUMENTS[name]
    monkeypatch.setenv("CEDD_DATA", str(root / "eval"))  # the folder that contains the files also works
    assert list(open_evaluation_set(name).documents()) == DOCUMENTS[name]


def test_protocol_is_named_hashed_and_complete(root: Path) -> None:
    data = load_evaluation_set("lm1b", ByteTokenizer(), 8, root=root)
    text = "Hello, world.\nBye ."
    assert bytes(data.packed[:].reshape(-1).tolist()).decode() == text[:16]
    protocol = data.protocol
    assert protocol["documents"] == 2
    assert (protocol["tokens"], protocol["blocks"], protocol["remainder_tokens"]) == (19, 2, 3)
    assert protocol["detokenizer"] == "lm1b"
    assert protocol["split"] == "test"
    assert protocol["source"] == "lm1b.heldout-00000-of-00050.txt"
    assert json.loads(json.dumps(protocol)) == protocol
    again = load_evaluation_set("1bw", ByteTokenizer(), 8, root=root).protocol
    assert again == protocol
    for change in ({"length": 4}, {"name": "ptb"}, {"tokenizer": CharTokenizer(text)}):
        options: dict[str, Any] = {"name": "lm1b", "tokenizer": ByteTokenizer(), "length": 8} | change
        assert load_evaluation_set(**options, root=root).protocol["protocol_sha256"] != protocol["protocol_sha256"]


def test_number_of_workers_does_not_change_tokens(root: Path) -> None:
    one, two = (
        load_evaluation_set("ptb", ByteTokenizer(), 4, root=root, workers=n, cache=root / str(n)) for n in (1, 2)
    )
    assert one.protocol == two.protocol
    every = np.arange(len(one.packed))
    assert np.array_equal(one.blocks(every), two.blocks(every))


def test_other_splits(root: Path) -> None:
    assert list(open_evaluation_set("ptb", "validation", root).documents()) == ["consumers may want"]
    with pytest.raises(ValueError, match="no file of its 'train' split is known"):
        open_evaluation_set("ptb", "train", root)


def test_invalid_input_gives_clear_errors(root: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'wikitext2'"):
        find_evaluation_set("wikitext_2")
    (root / "eval" / "lm1b.heldout-00000-of-00050.txt").unlink()
    with pytest.raises(ValueError, match=r"lm1b \(test\) is not under .* \(no eval/lm1b\.heldout.*\)$"):
        open_evaluation_set("lm1b", root=root)
    (root / "eval" / "ptb.test.txt").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        open_evaluation_set("ptb", root=root)
    (root / "eval" / "lambada.test.jsonl").write_text("[]\n")
    with pytest.raises(ValueError, match="line 1"):
        load_evaluation_set("lambada", ByteTokenizer(), 4, root=root)
    with pytest.raises(ValueError, match="fewer than one block"):
        load_evaluation_set("wikitext2", ByteTokenizer(), 4096, root=root)
    with pytest.raises(ValueError, match="character '='"):
        load_evaluation_set("wikitext2", CharTokenizer("abc \n"), 4, root=root)


def test_missing_data_root_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEDD_DATA", str(tmp_path / "dtaa"))
    with pytest.raises(ValueError, match=r"CEDD_DATA is not a folder: .*dtaa; correct it, or unset it"):
        open_evaluation_set("ptb")


def test_hub_is_used_without_a_data_root(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    module = types.ModuleType("datasets")
    asked = []

    def load_dataset(name, config, *, split, streaming, revision):
        asked.append((name, config, split, revision))
        return iter([{"sentence": "it was n't"}])

    module.__dict__["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    named = []

    def dataset_info(_, name, revision):
        named.append((name, revision))
        return types.SimpleNamespace(sha="1")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    assert list(open_evaluation_set("ptb").documents()) == ["it wasn't"]
    assert named == [("ptb-text-only/ptb_text_only", "refs/convert/parquet")]
    assert asked == [("ptb-text-only/ptb_text_only", None, "test", "1")]


# Counts on the published files, to catch a changed rule, row or separator.
COUNTS = {
    "wikitext2": (4358, 1239900, 274796),
    "wikitext103": (4358, 1230686, 273038),
    "ptb": (3761, 417604, 91135),
    "lambada": (5153, 1669012, 428743),
    "lm1b": (6075, 805048, 176267),
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_sets_have_expected_counts(name: str, shared_data: Path, gpt2: GPT2Tokenizer) -> None:
    if not (shared_data / "eval" / EVALUATION_SETS[name].files["test"]).is_file():
        pytest.skip(f"needs {EVALUATION_SETS[name].files['test']} in CEDD_DATA/eval")
    protocol = load_evaluation_set(name, gpt2, 128, root=shared_data).protocol
    assert (protocol["documents"], protocol["characters"], protocol["tokens"]) == COUNTS[name]
    assert protocol["blocks"] * 128 + protocol["remainder_tokens"] == protocol["tokens"]
