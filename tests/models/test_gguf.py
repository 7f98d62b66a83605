"""GGUF files: equality with the original safetensors, quantized types, and the tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import cedd
from cedd.data.tokenizers import JSONTokenizer
from tests.models import plain_llama
from tests.models.test_published_llama import ids_of

gguf = pytest.importorskip("gguf", reason="needs pip install 'cedd[hub]'")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """As llama.cpp stores q and k of LLaMA: rows (j, j + W/2) next to each other."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write(
    path: Path, kind: str, config: dict[str, Any], weights: dict[str, Tensor], types: dict[str, str], **more: Any
) -> Path:
    """Write a GGUF file; types: tensor types by suffix of the name in the file, F32 by default."""
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    for name, weight in weights.items():
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            weight = interleaved(weight, heads if "q_proj" in name else keys)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        type_ = next((value for end, value in types.items() if name.endswith(end)), "F32")
        stored: Any = weight.numpy()
        if type_ in ("Q8_0", "Q4_0", "Q4_1"):
            stored = gguf.quants.quantize(stored, gguf.GGMLQuantizationType[type_])
        elif type_ == "F16":
            stored = stored.astype(np.float16)
        writer.add_tensor(name, stored, raw_dtype=None if type_ in ("F32", "F16") else gguf.GGMLQuantizationType[type_])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_gguf_network_matches_safetensors(tmp_path: Path, kind: str) -> None:
    config, weights = plain_llama.CONFIGS[kind], plain_llama.random_weights(kind)
    path = write(tmp_path / "net.gguf", kind, config, weights, {})
    model = cedd.import_model(path, "none", device="cpu")
    expected = cedd.import_model(plain_llama.write(tmp_path / kind, kind), device="cpu")
    assert torch.equal(model.original_logits(ids_of()), expected.original_logits(ids_of()))
    assert model.folder.config["imported"] == {"family": kind.capitalize(), "source": "net.gguf"}
    alone = tmp_path / "alone"
    alone.mkdir()
    path.rename(alone / "net.gguf")
    assert torch.equal(
        cedd.import_model(alone, "none", device="cpu").original_logits(ids_of()), expected.original_logits(ids_of())
    )


WIDE = {**plain_llama.CONFIGS["qwen3"], "hidden_size": 64, "intermediate_size": 256, "head_dim": 16}


def wide_weights() -> dict[str, Tensor]:
    generator, D = torch.Generator().manual_seed(0), 64
    shapes = {"model.embed_tokens": (23, D), "lm_head": (23, D), "model.norm": (D,)}
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.q_proj": (64, D), f"{at}self_attn.o_proj": (D, 64)}
        shapes |= {f"{at}self_attn.{name}_proj": (32, D) for name in "kv"}
        shapes |= {f"{at}self_attn.{name}_norm": (16,) for name in "qk"}
        shapes |= {f"{at}mlp.{name}_proj": (256, D) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj": (D, 256)}
        shapes |= {f"{at}{name}": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {
        f"{name}.weight": torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()
    }


@pytest.mark.parametrize("type_", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantized_matrices_are_dequantized_correctly(tmp_path: Path, type_: str) -> None:
    """The values follow the definitions of llama.cpp's formats."""
    weights = wide_weights()
    types = {"ffn_up.weight": type_, "attn_q.weight": type_}
    path = write(tmp_path / "net.gguf", "qwen3", WIDE, weights, types)
    found = cedd.import_model(path, "none", device="cpu").model.state_dict()["backbone.layers.1.mlp.gate_up.weight"][
        256:
    ]
    exact = weights["model.layers.1.mlp.up_proj.weight"]
    step = {"F16": 1e-3, "Q8_0": 1 / 127, "Q4_0": 1 / 8, "Q4_1": 1 / 15}[type_]
    blocks, made = exact.unflatten(1, (-1, 32)), found.unflatten(1, (-1, 32))
    spread = blocks.amax(-1) - blocks.amin(-1) if type_ == "Q4_1" else blocks.abs().amax(-1)
    # The largest value of Q4_0 is -8 steps; the same magnitude with the other sign becomes 7.
    worst = 1.0 if type_ == "Q4_0" else 0.51
    assert bool(((made - blocks).abs().amax(-1) <= worst * step * spread + 1e-3).all())
    assert not torch.equal(made, blocks)
    kind_ = gguf.GGMLQuantizationType[type_]
    stored = exact.numpy().astype(np.float16) if type_ == "F16" else gguf.quants.quantize(exact.numpy(), kind_)
    assert torch.equal(found, torch.from_numpy(gguf.quants.dequantize(stored, kind_)).float())


def test_k_quant_matrices_are_dequantized_correctly(tmp_path: Path) -> None:
    """Q4_K: 256 values in 8 groups, each of 4-bit integers times a 6-bit scale, less a 6-bit minimum."""
    rng, weights = np.random.default_rng(0), wide_weights()
    path = tmp_path / "net.gguf"
    rows, blocks = 64, np.zeros((64, 144), np.uint8)
    scales, minima = rng.integers(0, 64, (rows, 8)), rng.integers(0, 64, (rows, 8))
    integers = rng.integers(0, 16, (rows, 8, 32))
    d, dmin = np.float16(0.01), np.float16(0.02)
    blocks[:, 0:4] = np.frombuffer(d.tobytes() + dmin.tobytes(), np.uint8)
    packed = blocks[:, 4:16]
    packed[:, 0:4] = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    packed[:, 4:8] = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    packed[:, 8:12] = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    pairs = integers.reshape(rows, 4, 2, 32)
    blocks[:, 16:] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(rows, 128)
    expected = float(d) * scales[..., None] * integers - float(dmin) * minima[..., None]
    weights["model.layers.0.mlp.down_proj.weight"] = torch.from_numpy(blocks)
    write(path, "qwen3", WIDE, weights, {"blk.0.ffn_down.weight": "Q4_K"})
    found = cedd.import_model(path, "none", device="cpu").model.state_dict()["backbone.layers.0.mlp.down.weight"]
    assert torch.allclose(found, torch.from_numpy(expected.reshape(rows, 256)).float(), atol=1e-6)
    theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_K)
    assert torch.equal(found, torch.from_numpy(theirs))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "none"])
def test_scaled_rotary_positions(tmp_path: Path, kind: str) -> None:
    """llama.cpp's converter stores the scaling of Llama 3 as divisors of the frequencies."""
    config, weights = {**plain_llama.CONFIGS["llama"], "rope_theta": 5e5}, plain_llama.random_weights("llama")
    context = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaling = {"rope_type": kind, "factor": 4.0, **(context if kind in ("llama3", "yarn") else {})}
    changes = {"rope_theta": 5e5, "rope_scaling": None if kind == "none" else scaling}
    theirs = plain_llama.write(tmp_path / "theirs", "llama", **changes)
    more: dict[str, Any] = {}
    if kind == "linear":
        more = {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}
    elif kind == "yarn":
        more = {"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0}
        more["rope_scaling_orig_ctx_len"] = 8192
    else:
        width = config["hidden_size"] // config["num_attention_heads"]
        wavelengths = [2 * np.pi * config["rope_theta"] ** (j / width) for j in range(0, width, 2)]
        smooth = [min(1.0, max(0.0, (8192 / one - 1) / 3)) for one in wavelengths]
        divisors = [1 / ((1 - one) / 4 + one) for one in smooth]
        weights["rope_freqs.weight"] = torch.tensor(divisors) if kind == "llama3" else torch.ones(width // 2)
    path = write(tmp_path / "net.gguf", "llama", config, weights, {}, **more)
    found, expected = (cedd.import_model(one, "none", device="cpu") for one in (path, theirs))
    ids = ids_of()
    assert torch.allclose(found.original_logits(ids), expected.original_logits(ids), atol=1e-5)


def test_unsupported_or_damaged_files_are_rejected(tmp_path: Path) -> None:
    config, weights = plain_llama.CONFIGS["llama"], plain_llama.random_weights("llama")
    with pytest.raises(ValueError, match="has the architecture gemma; known are llama, qwen2, qwen3"):
        cedd.import_model(write(tmp_path / "a.gguf", "gemma", config, weights, {}), "none", device="cpu")
    scaled = write(tmp_path / "b.gguf", "llama", config, weights, {}, rope_scaling_type=gguf.RopeScalingType.LONGROPE)
    with pytest.raises(ValueError, match=r"rope_scaling is .*'longrope'.*; linear, llama3 and yarn are imported"):
        cedd.import_model(scaled, "none", device="cpu")
    experts = write(tmp_path / "c.gguf", "llama", config, weights, {}, expert_count=4)
    with pytest.raises(ValueError, match="expert_count is 4; mixtures of experts are not imported"):
        cedd.import_model(experts, "none", device="cpu")
    factors = {**weights, "rope_freqs.weight": torch.tensor([1.0, 2.0, 8.0])}
    with pytest.raises(ValueError, match=r"rope_freqs.weight is not the scaling of Llama 3.1"):
        cedd.import_model(write(tmp_path / "d.gguf", "llama", config, factors, {}), "none", device="cpu")
    less = {name: value for name, value in weights.items() if "layers.1.mlp.down" not in name}
    with pytest.raises(ValueError, match=r"lacks model.layers.1.mlp.down_proj.weight; num_hidden_layers is 2"):
        cedd.import_model(write(tmp_path / "e.gguf", "llama", config, less, {}), "none", device="cpu")
    none = {**config, "num_attention_heads": 1, "num_key_value_heads": 1}  # as whole matrices are stored
    path = write(tmp_path / "h.gguf", "llama", none, weights, {})
    count = path.read_bytes().index(b"llama.attention.head_count") + len("llama.attention.head_count") + 4
    content = bytearray(path.read_bytes())
    content[count] = 0
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"num_attention_heads must be at least 1 \(got 0\)"):
        cedd.import_model(path, "none", device="cpu")
    with pytest.raises(ValueError, match=r"file not found: .*absent.gguf"):
        cedd.import_model(tmp_path / "absent.gguf", device="cpu")
    (tmp_path / "f.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(ValueError, match=r"f.gguf is not a complete GGUF file"):
        cedd.import_model(tmp_path / "f.gguf", "none", device="cpu")
    odd = {**wide_weights(), "model.layers.0.mlp.down_proj.weight": torch.zeros(64, 84, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=r"blk.0.ffn_down.weight is of type Q2_K; supported are F32, F16"):
        cedd.import_model(
            write(tmp_path / "g.gguf", "qwen3", WIDE, odd, {"blk.0.ffn_down.weight": "Q2_K"}), device="cpu"
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_merges": ["a b"]}, "the merges do not fit the vocabulary, first 'a b'"),
        ({"token_merges": ["ab"]}, "the merges do not fit the vocabulary, first 'ab'"),
        ({"bos_token_id": 23}, "bos_token_id is 23, but there are 23 tokens"),
        ({"token_list": []}, "has no tokens"),
    ],
)
def test_damaged_tokenizer_is_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config, weights = plain_llama.CONFIGS["llama"], plain_llama.random_weights("llama")
    tokens = {"tokenizer_model": "gpt2", "token_list": [chr(97 + i) for i in range(23)], "bos_token_id": 1}
    path = write(tmp_path / "net.gguf", "llama", config, weights, {}, **tokens)
    assert cedd.import_model(path, device="cpu").tokenizer.encode("abc").tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=message):
        cedd.import_model(write(path, "llama", config, weights, {}, **{**tokens, **changes}), device="cpu")


# ---- tokenizers -------------------------------------------------------------------------------------------------

TEXT = "the cat sat on the mat and the rat ran at 2024"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def smollm_tokenizer() -> Any:
    """A byte-level BPE with SmolLM's pre-tokenization, and special tokens first."""
    import tokenizers

    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    made: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, level])
    made.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    return made


def network_of(vocab_size: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, weights = {**plain_llama.CONFIGS["llama"]}, plain_llama.random_weights("llama")
    generator = torch.Generator().manual_seed(0)
    weights["model.embed_tokens.weight"] = torch.randn(vocab_size, plain_llama.D, generator=generator)
    return {**config, "vocab_size": vocab_size, "bos_token_id": 1, "eos_token_id": 2}, weights


def published(folder: Path, tokenizer: Any, vocab_size: int) -> Path:
    """The folder of a network with a tokenizer.json and a chat template."""
    folder.mkdir()
    config, weights = network_of(vocab_size)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_gguf_tokenizer_matches_tokenizer_json(tmp_path: Path) -> None:
    theirs = smollm_tokenizer()
    content = json.loads(theirs.to_str())["model"]
    vocab = sorted(content["vocab"], key=content["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    config, weights = network_of(len(vocab))
    tokens = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": vocab,
        "token_types": [3] * 3 + [1] * (len(vocab) - 3),
        "token_merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "chat_template": TEMPLATE,
    }
    path = write(tmp_path / "net.gguf", "llama", config, weights, {}, **tokens)
    found = cedd.import_model(path, device="cpu").tokenizer
    assert isinstance(found, JSONTokenizer)
    for text in (TEXT, "  Änderung\n\n12345 <|im_end|>\t🙂", ""):
        theirs.encode_special_tokens = True
        assert found.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert found.decode(found.encode(text)) == text
    messages = [{"role": "user", "content": "the cat <|im_end|>"}]
    theirs.encode_special_tokens = False
    shown = "<|im_start|>user\nthe cat <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert found.chat_text(messages) == shown
    assert found.encode_chat(messages).tolist() == theirs.encode(shown, add_special_tokens=False).ids
    tokens["tokenizer_pre"] = "tekken"
    with pytest.raises(ValueError, match=r"its tokenizer is of the kind gpt2 \(tekken\), and gpt-2, smollm"):
        cedd.import_model(write(tmp_path / "other.gguf", "llama", config, weights, {}, **tokens), device="cpu")


def test_tokenizer_json_is_saved_with_model(tmp_path: Path) -> None:
    theirs = smollm_tokenizer()
    size = theirs.get_vocab_size()
    model = cedd.import_model(published(tmp_path / "theirs", theirs, size + 6), device="cpu")
    tokenizer = model.tokenizer
    assert isinstance(tokenizer, JSONTokenizer)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.stops) == (size + 6, 1, 2, (2,))
    assert tokenizer.silent == (0, 1, *range(size, size + 6))  # not the end of a text, which is sampled
    assert tokenizer.lossless
    assert tokenizer.widths[tokenizer.encode("the")[0]] == 3
    model.save_pretrained(tmp_path / "ours")
    again = cedd.load(tmp_path / "ours", device="cpu").tokenizer
    assert again == tokenizer
    assert isinstance(again, JSONTokenizer)
    assert again.chat_template == TEMPLATE
    assert again.variables == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


def test_mismatched_or_damaged_tokenizer_json_is_rejected(tmp_path: Path) -> None:
    theirs = smollm_tokenizer()
    size = theirs.get_vocab_size()
    with pytest.raises(ValueError, match=f"has ids up to {size - 1}, and the network has {size - 1} tokens"):
        cedd.import_model(published(tmp_path / "small", theirs, size - 1), device="cpu")
    folder = published(tmp_path / "damaged", theirs, size)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read"):
        cedd.import_model(folder, device="cpu")
    (folder / "tokenizer.json").unlink()
    assert cedd.import_model(folder, device="cpu").tokenizer.kind == "ids"
    with pytest.raises(ValueError, match="unknown tokenizer 'nowhere'"):
        cedd.import_model(folder, "nowhere", device="cpu")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),  # templates run in a sandbox
        ("{{ bos_token }}\n{% for one in messages %}", "is invalid, line 2: Unexpected end of template"),
    ],
)
def test_chat_template_errors_are_reported(tmp_path: Path, template: str, message: str) -> None:
    folder = published(tmp_path / "theirs", smollm_tokenizer(), 300)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    tokenizer = cedd.import_model(folder, device="cpu").tokenizer
    assert isinstance(tokenizer, JSONTokenizer)
    with pytest.raises(ValueError, match=f"the chat template of theirs {message}"):
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])
