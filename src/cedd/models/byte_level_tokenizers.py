"""The content of a tokenizer.json for tokenizers that come in another form: in a GGUF file, or as vocab.json and
merges.txt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cedd.models.tensor_files import GGUFFile
from cedd.storage import JSONObject, read_json

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens."""


def _byte_level(digits: bool = False) -> Any:
    from tokenizers import pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level]) if digits else level


def _split(numbers: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    words = pre_tokenizers.Split(Regex(_WORDS % numbers), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "gpt-2": _byte_level,
    "smollm": lambda: _byte_level(digits=True),
    "qwen2": lambda: _split(r"\p{N}"),
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
}
"""How text is cut into words, by the name in the file (tokenizer.ggml.pre)."""


def tokenizer_content(file: GGUFFile) -> JSONObject:
    """The content of a tokenizer.json; a tokenizer of another kind is refused."""
    kind, pre = file.value("tokenizer.ggml.model"), file.value("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{file.source}: its tokenizer is of the kind {kind} ({pre}), and {', '.join(PRE_TOKENIZERS)} are known; "
            "give the folder of its tokenizer.json (--tokenizer FOLDER)"
        )
    tokens = file.value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges") or []]
    if not tokens:
        raise ValueError(f"{file.source} has no tokens (tokenizer.ggml.tokens)")
    types = file.value("tokenizer.ggml.token_type") or [1] * len(tokens)
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ in (_CONTROL, _USER_DEFINED)]
    return _content({token: i for i, token in enumerate(tokens)}, merges, pre, special)


def content_of_merges(folder: Path, pre: str) -> JSONObject:
    """That of vocab.json and merges.txt, with the special tokens of tokenizer_config.json and added_tokens.json.

    pre: a name of `PRE_TOKENIZERS`.
    """
    vocab = dict(read_json(folder / "vocab.json"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    config, more = (
        read_json(folder / name) if (folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "added_tokens.json")
    )
    listed = {one["content"]: int(token) for token, one in config.get("added_tokens_decoder", {}).items()}
    added = dict(sorted({**more, **listed}.items(), key=lambda one: one[1]))
    return _content(vocab | added, merges, pre, added)


def _content(
    vocab: Mapping[str, int], merges: Iterable[tuple[str, ...]], pre: str, special: Iterable[str]
) -> JSONObject:
    import tokenizers

    merges = list(merges)
    for pair in merges:  # of which the library would panic
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise ValueError(f"the merges do not fit the vocabulary, first {' '.join(pair)!r}")
    made: Any = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(vocab), merges=merges))
    made.pre_tokenizer, made.decoder = PRE_TOKENIZERS[pre](), tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        made.normalizer = tokenizers.normalizers.NFC()
    made.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    return json.loads(made.to_str())
