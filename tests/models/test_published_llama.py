"""Published Llama networks, against reference implementations and against outputs of the original code."""

import gc
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import cedd
from cedd.cli import main
from cedd.data.folders import data_root
from cedd.data.tokenizers import IdTokenizer
from cedd.models.import_config import Description
from cedd.models.llama import Llama
from cedd.models.published_llama import LLAMA_FAMILIES
from tests.models import plain_llama
from tests.models.plain_llama import CONFIGS, V

TOLERANCE = 3e-5
ATTENTION = {"llama": "causal", "qwen2": "causal", "qwen3": "causal", "sdar": "block"}
SHIFTED = ("diffullama", "dream", "diffugpt")


def ids_of(batch: int = 3, length: int = 11, seed: int = 1) -> Tensor:
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(seed))


def network_of(model: cedd.LanguageModel) -> Llama:
    assert isinstance(model.model, Llama)
    return model.model


def expected_of(kind: str, ids: Tensor, attention: str | None = None) -> Tensor:
    visible = plain_llama.visible_of(attention or ATTENTION.get(kind, "full"), ids.shape[1])
    return plain_llama.outputs(kind, plain_llama.random_weights(kind), ids, visible)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_matches_reference_outputs(tmp_path: Path, kind: str) -> None:
    model = cedd.import_model(plain_llama.write(tmp_path / kind, kind), device="cpu")
    ids = ids_of()
    expected = expected_of(kind, ids)
    assert float((model.original_logits(ids) - expected).abs().max()) < TOLERANCE
    assert float(expected.std()) > 0.5  # so that the tolerance means something
    other = "full" if ATTENTION.get(kind) else "causal"
    assert float((expected_of(kind, ids, other) - expected).abs().max()) > 1.0
    assert model.length == plain_llama.LENGTH
    assert model.process == cedd.absorb(V)
    assert model.method.name == ("ar" if ATTENTION.get(kind) == "causal" else "ceddt")


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if "mask_token_id" in CONFIGS[kind]])
def test_outputs_are_aligned_and_mask_uses_its_row(tmp_path: Path, kind: str) -> None:
    model = cedd.import_model(plain_llama.write(tmp_path / kind, kind), device="cpu")
    ids = ids_of()
    x_t = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.5, V)
    rows = x_t.masked_fill(x_t == V, CONFIGS[kind]["mask_token_id"])
    expected = expected_of(kind, rows)
    if kind in SHIFTED:
        expected = torch.cat([expected[:, :1], expected[:, :-1]], 1)
    assert float((model.model(x_t) - expected).abs().max()) < TOLERANCE


FORMS = {
    "bool": lambda seen: seen,
    "zeros and ones": lambda seen: seen[None].float(),
    "integers": lambda seen: seen[None, None].long(),
    "added to the scores": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None],
}


@pytest.mark.parametrize("form", FORMS)
def test_attention_mask_is_accepted_in_every_form(tmp_path: Path, form: str) -> None:
    model = cedd.import_model(plain_llama.write(tmp_path / "dream", "dream"), device="cpu")
    ids = ids_of()
    seen = plain_llama.visible_of("block", ids.shape[1])
    found = model.original_logits(ids, attention_mask=FORMS[form](seen))
    assert float((found - expected_of("dream", ids, "block")).abs().max()) < TOLERANCE


@pytest.mark.parametrize(("kind", "attention"), [("llama", "causal"), ("dream", "full"), ("llada", "full")])
def test_padding_is_attended_to_as_in_the_original(tmp_path: Path, kind: str, attention: str) -> None:
    """By nothing; Dream's padding attends to nothing itself, and LLaMA's on the left only to padding."""
    model, ids = cedd.import_model(plain_llama.write(tmp_path / kind, kind), device="cpu"), ids_of()
    padded = torch.ones_like(ids)
    padded[0, :3] = padded[1, -4:] = 0
    seen = plain_llama.visible_of(attention, ids.shape[1]) & padded.bool()[:, None]
    for hides in [True, False] if kind == "dream" else [False]:
        assert network_of(model).options.masks_padded_queries == hides
        seen_by = seen & padded.bool()[..., None] if hides else seen
        expected = plain_llama.outputs(kind, plain_llama.random_weights(kind), ids, seen_by)
        assert float((model.original_logits(ids, attention_mask=padded) - expected).abs().max()) < TOLERANCE
        # As an adapted Qwen2, which has the same biases and shift.
        network_of(model).options = replace(network_of(model).options, masks_padded_queries=False)


def test_a_mask_of_zeros_is_added_to_the_scores(tmp_path: Path) -> None:
    """As in DiffuGPT's code, in which it means full attention."""
    model, ids = cedd.import_model(plain_llama.write(tmp_path / "diffugpt", "diffugpt"), device="cpu"), ids_of()
    found = model.original_logits(ids, attention_mask=torch.zeros(len(ids), 1, ids.shape[1], ids.shape[1]))
    assert float((found - expected_of("diffugpt", ids)).abs().max()) < TOLERANCE


@pytest.mark.parametrize("ids", [[[V]], [[-1]], [[0.0]], [0]])
def test_ids_outside_embedding_are_rejected(tmp_path: Path, ids: list[Any]) -> None:
    model = cedd.import_model(plain_llama.write(tmp_path / "dream", "dream"), device="cpu")
    with pytest.raises(ValueError, match=r"ids must be (0 to 22 \(got|integers \[B, L\] \(got)"):
        model.original_logits(torch.tensor(ids))


def test_full_attention_can_be_requested_by_name(tmp_path: Path) -> None:
    model, ids = cedd.import_model(plain_llama.write(tmp_path / "sdar", "sdar"), device="cpu"), ids_of()
    found = model.original_logits(ids, attention_mask="full")
    assert float((found - expected_of("sdar", ids, "full")).abs().max()) < TOLERANCE
    with pytest.raises(ValueError, match="attention_mask must be a tensor or 'full'"):
        model.original_logits(ids, attention_mask="causal")


RENAMED = {
    "llama": ("", "base_model.", "base_model.model."),
    "diffullama": ("denoise_model.",),
    "llada": ("", "model.model."),
    "diffugpt": ("",),
}
STACK = {"llada": "model.", "diffugpt": "denoise_model."}


@pytest.mark.parametrize(("kind", "prefix"), [(kind, one) for kind, all_ in RENAMED.items() for one in all_])
def test_tensors_may_have_different_prefix(tmp_path: Path, kind: str, prefix: str) -> None:
    """As in files of wrapped networks or of their inner module; the embedding and the head may have none."""
    stack = STACK.get(kind, "model.")
    weights = {name.replace(stack, prefix, 1): value for name, value in plain_llama.random_weights(kind).items()}
    if kind == "diffullama":
        weights["embed_tokens.weight"] = weights.pop(f"{prefix}embed_tokens.weight")
    model, ids = cedd.import_model(plain_llama.write(tmp_path / kind, kind, weights), device="cpu"), ids_of()
    assert float((model.original_logits(ids) - expected_of(kind, ids)).abs().max()) < TOLERANCE


def test_diffugpt_with_gpt2_tensor_names(tmp_path: Path) -> None:
    """Its mask distinguishes it from GPT-2."""
    weights = {
        f"transformer.{name.removeprefix('denoise_model.').replace('embed_tokens', 'wte')}": value
        for name, value in plain_llama.random_weights("diffugpt").items()
    }
    model, ids = cedd.import_model(plain_llama.write(tmp_path / "a", "diffugpt", weights), device="cpu"), ids_of()
    assert float((model.original_logits(ids) - expected_of("diffugpt", ids)).abs().max()) < TOLERANCE
    plain = plain_llama.write(tmp_path / "b", "diffugpt", weights, mask_token_id="absent")
    with pytest.raises(ValueError, match="GPT-2 itself is not imported; for DiffuGPT with its tensor names"):
        cedd.import_model(plain, device="cpu")
    named = cedd.import_model(plain, device="cpu", mask_id=7)
    assert torch.equal(named.original_logits(ids), model.original_logits(ids))


def test_diffullama_with_llama_config(tmp_path: Path) -> None:
    """It is recognized by the tensor prefix of the denoising network."""
    weights = {
        name.replace("model.", "denoise_model.", 1): value
        for name, value in plain_llama.random_weights("diffullama").items()
    }
    folder = plain_llama.write(tmp_path / "net", "diffullama", weights, mask_token_id="absent")
    model, ids = cedd.import_model(folder, device="cpu", mask_id=7), ids_of()
    assert float((model.original_logits(ids) - expected_of("diffullama", ids)).abs().max()) < TOLERANCE
    assert network_of(model).options.shift


def test_default_settings_may_be_absent(tmp_path: Path) -> None:
    absent = dict.fromkeys(("rope_theta", "rms_norm_eps", "max_position_embeddings", "hidden_act"), "absent")
    model, ids = cedd.import_model(plain_llama.write(tmp_path / "a", "llama", **absent), device="cpu"), ids_of()
    assert float((model.original_logits(ids) - expected_of("llama", ids)).abs().max()) < TOLERANCE
    assert model.length == 2048


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "dream", "sdar", "a2d"])
def test_a_window_has_no_effect_unless_it_is_switched_on(tmp_path: Path, kind: str) -> None:
    """Qwen's sliding_window is there in all files, use_sliding_window is not; it is off by default."""
    folder = plain_llama.write(tmp_path / kind, kind, sliding_window=8, use_sliding_window="absent")
    cedd.import_model(folder, device="cpu")


def test_autoregressive_network_uses_start_token(tmp_path: Path) -> None:
    model = cedd.import_model(plain_llama.write(tmp_path / "llama", "llama"), device="cpu")
    ids = ids_of()
    shown = torch.cat([torch.full_like(ids[:, :1], CONFIGS["llama"]["bos_token_id"]), ids[:, :-1]], 1)
    log_p = expected_of("llama", shown).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    found = cedd.estimate_bound(model.model, model.process, ids, method="ar")
    assert found.nats_per_token == pytest.approx(-float(log_p.mean()), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_16_bits_are_kept_and_computed_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = {name: value.to(dtype) for name, value in plain_llama.random_weights("qwen3").items()}
    model = cedd.import_model(plain_llama.write(tmp_path / "two", "qwen3", stored), device="cpu")
    assert {parameter.dtype for parameter in model.model.parameters()} == {dtype}
    ids = ids_of()
    expected = plain_llama.outputs("qwen3", stored, ids, plain_llama.visible_of("causal", ids.shape[1]))
    assert float((model.original_logits(ids) - expected).abs().max()) < TOLERANCE
    wide = cedd.import_model(tmp_path / "two", device="cpu", dtype=torch.float32)
    assert float((wide.original_logits(ids) - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("kind", ["llada", "dream", "diffugpt", "sdar", "qwen2"])
def test_imported_network_becomes_a_model_folder(tmp_path: Path, kind: str, capsys) -> None:
    theirs, ours = plain_llama.write(tmp_path / "theirs", kind), tmp_path / "ours"
    for command in (["sample"], ["adapt", "--data", "python-manual", "--out", str(tmp_path / "run")]):
        assert main([command[0], str(theirs), *command[1:]]) == 2
        assert "config.json describes a published network; import it with cedd import" in capsys.readouterr().err
    assert main(["import", str(theirs), "--out", str(ours), "--device", "cpu"]) == 0
    assert "23 tokens" in capsys.readouterr().out
    loaded, ids = cedd.load(ours, device="cpu"), ids_of()
    assert torch.equal(loaded.original_logits(ids), cedd.import_model(theirs, device="cpu").original_logits(ids))
    assert len(loaded.generate(1, length=6, seed=0)[0].split()) == 6
    assert loaded.method.block == (4 if kind == "sdar" else None)


@pytest.mark.parametrize("kind", ["dream", "diffugpt"])
def test_tokenizer_from_vocabulary_and_merges(tmp_path: Path, kind: str) -> None:
    """As published by Dream, SDAR and DiffuGPT, with special tokens in tokenizer_config.json."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "12", "34", "12" + "34", "th"])}
    weights, size = plain_llama.random_weights(kind), 264
    for name in ("model.embed_tokens.weight", "embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = torch.randn(size, plain_llama.D)
    changes = {"vocab_size": size, "mask_token_id": "absent"}
    folder = plain_llama.write(tmp_path / kind, kind, weights, **changes)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n1 2\n3 4\n12 34\nt h\n")
    special = {str(260 + i): {"content": one, "special": True} for i, one in enumerate(("<end>", "<mask>"))}
    settings = {"added_tokens_decoder": special, "mask_token": "<mask>", "eos_token": "<end>", "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = cedd.import_model(folder, device="cpu")
    digits = [vocab["1234"]] if kind == "diffugpt" else [vocab[one] for one in "1234"]
    assert model.tokenizer.encode("th 1234").tolist() == [vocab["th"], vocab["\u0120"], *digits]
    assert model.tokenizer.decode(model.tokenizer.encode("Straße 1234")) == "Straße 1234"
    assert (model.tokenizer.eos_id, network_of(model).options.mask_row) == (260, 261)


# ---- what their own code computed -------------------------------------------------------------------------------


def fixture_folder(name: str) -> Path:
    root = data_root()
    given = os.environ.get("CEDD_FIXTURES", str(root.parent / "fixtures") if root else "")
    if not given or not (Path(given) / name / "io.safetensors").is_file():
        pytest.skip(f"needs outputs of the published code: set CEDD_FIXTURES to a folder with {name}/")
    return Path(given) / name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_autoregressive_networks_match_original_code_for_every_mask(kind: str) -> None:
    folder = fixture_folder(f"llama/{kind}")
    io, model = load_file(folder / "io.safetensors"), cedd.import_model(folder, device="cpu")
    length = io["x_t"].shape[1]
    full, block = plain_llama.visible_of("full", length), plain_llama.visible_of("block", length)
    padded = io["attention_mask"].bool()[:, None, None] & full
    twice = torch.arange(length).repeat(2)
    both = torch.cat([io["x_t"], io["input_ids"]], 1)
    found = {
        "logits_causal": model.original_logits(io["input_ids"]),
        "logits_full_64": model.original_logits(io["x_t"], attention_mask=full),
        "logits_block_64": model.original_logits(io["x_t"], attention_mask=block),
        "logits_padded_64": model.original_logits(io["x_t"], attention_mask=padded),
        "logits_pair_64": model.original_logits(both, attention_mask=io["mask_pair"], position_ids=twice)[:, :length],
    }
    for name, outputs in found.items():
        assert float((outputs - io[name]).abs().max()) < TOLERANCE, name
    nats = -found["logits_causal"][:, :-1].log_softmax(-1).gather(-1, io["input_ids"][:, 1:, None])[..., 0]
    assert float((nats - io["nll_causal"]).abs().max()) < TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_greedy_text_with_cache_matches_original_code(kind: str) -> None:
    folder = fixture_folder(f"llama/{kind}")
    io, model = load_file(folder / "io.safetensors"), cedd.import_model(folder, device="cpu")
    x, network = io["greedy"][:, :6], network_of(model)
    cache = network.new_cache(1, io["greedy"].shape[1])
    new = x
    while x.shape[1] < io["greedy"].shape[1]:
        new = network.head(network.features(new, cache=cache)[:, -1:]).argmax(-1)
        x = torch.cat([x, new], 1)
    assert torch.equal(x, io["greedy"])


def test_llada_matches_original_code_with_and_without_padding() -> None:
    folder = fixture_folder("llada")
    io, model = load_file(folder / "io.safetensors"), cedd.import_model(folder, device="cpu")
    ids = io["input_ids"]
    assert float((model.original_logits(ids) - io["logits"]).abs().max()) < TOLERANCE
    padded = model.original_logits(ids, attention_mask=io["attention_mask"])
    assert float((padded - io["logits_attention_mask"]).abs().max()) < TOLERANCE
    exact = network_of(model).double().original_logits(ids)
    assert float((exact - io["logits_64"]).abs().max()) < 1e-12
    assert (model.process.vocab_size, network_of(model).options.mask_row) == (128, 120)


SCALINGS = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,  # one frequency is kept, one is mixed, and one is divided
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},  # one of each kind
    "yarn with limits": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 8.0,
        "attention_factor": 1.5,
    },
}


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        *((kind, None) for kind in ("llama", "qwen2", "qwen3")),
        *(("llama", one) for one in SCALINGS),
        ("qwen2", "yarn"),
        ("qwen3", "yarn"),
    ],
)
def test_parity_with_transformers(tmp_path: Path, kind: str, scaling: str | None) -> None:
    transformers = pytest.importorskip("transformers", reason="needs pip install 'cedd[hub]'")
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    sizes = {name: value for name, value in CONFIGS[kind].items() if name not in ("model_type", "torch_dtype")}
    if scaling is not None:
        sizes["rope_parameters"] = {**SCALINGS[scaling], "rope_theta": sizes.pop("rope_theta")}
    torch.manual_seed(3)
    theirs: Any = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    theirs.save_pretrained(tmp_path / kind)
    ids = ids_of()
    with torch.no_grad():
        expected = theirs(ids).logits
    found = cedd.import_model(tmp_path / kind, device="cpu").original_logits(ids)
    assert float((found - expected).abs().max()) < TOLERANCE
    assert float(expected.std()) > 0.5
    if scaling is not None:  # as named in an older config.json
        file = tmp_path / kind / "config.json"
        values = json.loads(file.read_text())
        values |= {"rope_scaling": SCALINGS[scaling], "rope_theta": values.pop("rope_parameters")["rope_theta"]}
        file.write_text(json.dumps(values))
        older = cedd.import_model(tmp_path / kind, device="cpu")
        assert torch.equal(older.original_logits(ids), found)
        older.save_pretrained(tmp_path / "ours")
        assert torch.equal(cedd.load(tmp_path / "ours", device="cpu").original_logits(ids), found)


# ---- files ------------------------------------------------------------------------------------------------------


def sharded(folder: Path, kind: str = "qwen3", parts: int = 3) -> Path:
    """The same network in several files."""
    plain_llama.write(folder, kind)
    (folder / "model.safetensors").unlink()
    weights = plain_llama.random_weights(kind)
    names = sorted(weights)
    files = {name: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_sharded_weights_are_loaded(tmp_path: Path) -> None:
    ids = ids_of()
    found = cedd.import_model(sharded(tmp_path / "shards"), device="cpu").original_logits(ids)
    assert torch.equal(
        found, cedd.import_model(plain_llama.write(tmp_path / "one", "qwen3"), device="cpu").original_logits(ids)
    )


def peak_memory() -> int:
    """The peak memory of this process, in bytes, since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def reset_peak() -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs Linux, to read and reset the peak memory of a process")
    Path("/proc/self/clear_refs").write_text("5")


def test_loading_memory_is_close_to_weight_size(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8000, "num_hidden_layers": 6, "head_dim": 64}
    config = {**CONFIGS["qwen3"], **sizes, "num_attention_heads": 8, "num_key_value_heads": 8}
    weights: dict[str, Tensor] = {
        "model.embed_tokens.weight": torch.ones(8000, 512),
        "model.norm.weight": torch.ones(512),
    }
    weights["lm_head.weight"] = torch.ones(8000, 512)
    for i in range(6):
        at = f"model.layers.{i}."
        weights |= {f"{at}self_attn.{name}_proj.weight": torch.ones(512, 512) for name in "qkvo"}
        weights |= {f"{at}self_attn.{name}_norm.weight": torch.ones(64) for name in "qk"}
        weights |= {f"{at}mlp.{name}_proj.weight": torch.ones(2048, 512) for name in ("gate", "up")}
        weights |= {f"{at}mlp.down_proj.weight": torch.ones(512, 2048)}
        weights |= {f"{at}{name}.weight": torch.ones(512) for name in ("input_layernorm", "post_attention_layernorm")}
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.bfloat16() for name, value in weights.items()}, folder / "model.safetensors")
    size = (folder / "model.safetensors").stat().st_size
    del weights
    gc.collect()
    reset_peak()
    before = peak_memory()
    model = cedd.import_model(folder, device="cpu")
    assert peak_memory() - before < 1.2 * size
    assert model.model.num_parameters() * 2 == pytest.approx(size, rel=0.01)


# ---- refusals ---------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "longrope": ("dream", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "; linear, llama3 and yarn are"),
    "yarn of DeepSeek": (
        "qwen3",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0}},
        "rope_scaling.mscale is 0.7; only yarn without it is imported",
    ),
    "yarn of one limit": (
        "qwen3",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 0.5}},
        r"rope_scaling.beta_fast must be above rope_scaling.beta_slow \(got 0.5 and 1\)",
    ),
    "llada's scaling": ("llada", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling is .*only unsc"),
    "llama3 without a length": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "rope_scaling.original_max_position_embeddings must be an integer",
    ),
    "llama3 the wrong way round": (
        "llama",
        {"rope_parameters": {**SCALINGS["llama3"], "low_freq_factor": 4, "high_freq_factor": 1}},
        r"rope_parameters.high_freq_factor must be above rope_parameters.low_freq_factor \(got 1 and 4\)",
    ),
    "no factor": ("qwen2", {"rope_scaling": {"type": "linear"}}, r"rope_scaling.factor must be a number"),
    "a word": ("qwen3", {"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    "biases": ("llama", {"attention_bias": True}, "attention_bias is True; only False is imported"),
    "biases of the MLP": ("llama", {"mlp_bias": True}, "mlp_bias is True"),
    "no biases": ("qwen2", {"attention_bias": False}, "attention_bias is False; only True"),
    "a window": ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
    "a window of LLaMA": ("llama", {"sliding_window": 8}, "sliding_window is 8"),
    "windows of layers": (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has 'sliding_at",
    ),
    "another activation": ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' or 'swish'"),
    "pairs of neighbours": ("llama", {"rope_interleaved": True}, "rope_interleaved is True"),
    "mrope": ("dream", {"use_mrope": True}, "use_mrope is True"),
    "quantized": ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is"),
    "unknown": ("llama", {"residual_scale": 2.0}, "unknown setting residual_scale = 2.0, which may change what"),
    "llada's block": ("llada", {"block_type": "sequential"}, "block_type is 'sequential'; only 'llama'"),
    "llada's alibi": ("llada", {"alibi": True}, "alibi is True"),
    "llada's rope": ("llada", {"rope": False}, "rope is False"),
    "llada's tying": ("llada", {"weight_tying": True}, "weight_tying is True"),
    "llada's scale": ("llada", {"scale_logits": True}, "scale_logits is True"),
    "llada's norms": ("llada", {"layer_norm_type": "low_precision"}, "layer_norm_type is 'low_precision'"),
    "llada's groups": ("llada", {"block_group_size": 2}, "block_group_size is 2"),
    "llada's embedding": ("llada", {"input_emb_norm": True}, "input_emb_norm is True"),
    "llada's biases": ("llada", {"include_qkv_bias": True}, "include_qkv_bias is True"),
    "llada's activation": ("llada", {"activation_type": "swiglu"}, "activation_type is 'swiglu'"),
    "gpt2's activation": ("diffugpt", {"activation_function": "relu"}, "activation_function is 'relu'"),
    "the mask's row": (
        "dream",
        {"mask_token_id": 23},
        r"mask_token_id must be a row of the embedding, 0 to 22 \(got 23\)",
    ),
    "experts": ("sdar", {"model_type": "sdar_moe"}, "sdar_moe is a mixture of experts"),
    "LLaDA-MoE": ("llada", {"num_experts": 64, "hidden_size": 24}, "num_experts is 64; mixtures of experts are not"),
    "blocks of Dream": ("dream", {"block_size": 32}, "unknown setting block_size = 32, which may change what"),
    "LLaDA2": ("sdar", {"model_type": "llada2_moe"}, "llada2_moe is a mixture of experts"),
    "rows": ("llama", {"vocab_size": 24}, r"model.embed_tokens.weight is \[23, 24\], but config.json requires 24 rows"),
    "depth": ("llama", {"num_hidden_layers": 3}, "lacks model.layers.2.input_layernorm.weight; num_hidden_layers is 3"),
    "absurd depth": ("llama", {"num_hidden_layers": 10**9}, "lacks model.layers.2"),
    "less depth": ("llama", {"num_hidden_layers": 1}, "tensors that have no place, first model.layers.1"),
    "heads": ("llama", {"num_attention_heads": 5}, "hidden_size 24 does not divide into 5 num_attention_heads"),
    "key heads": ("llama", {"num_key_value_heads": 3}, "heads 4 is not divisible by num_key_value_heads 3"),
    "rotated entries": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 rotates 3 of the 6"),
    "width": (
        "llama",
        {"intermediate_size": 21},
        r"mlp.gate_proj.weight is \[20, 24\], but config.json requires \[21, 24",
    ),
    "a text": ("llama", {"hidden_size": "wide"}, "hidden_size must be an integer \\(got 'wide'"),
    "a head": ("llama", {"tie_word_embeddings": False}, r"lacks lm_head.weight; tie_word_embeddings is false$"),
    "not causal": ("qwen2", {"is_causal": False}, "is_causal is False; only True is imported"),
    "unknown and like none": ("llama", {"zzz": 2.0}, "unknown setting zzz = 2.0, which may .* computes$"),
    "an end that is text": ("llama", {"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list .*'</s>'"),
    "ends that are text": ("llada", {"eos_token_id": [1, "x"]}, "eos_token_id must be a token id or a list"),
    "a start that is true": ("qwen2", {"bos_token_id": True}, r"bos_token_id must be a token id or a .* \(got True\)"),
    "base": ("llama", {"rope_theta": -1}, "rope_theta must be above 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_rejected_by_name(tmp_path: Path, name: str) -> None:
    kind, changes, message = REFUSED[name]
    folder = plain_llama.write(tmp_path / kind, kind, **changes)
    with pytest.raises(ValueError, match=message) as error:
        cedd.import_model(folder, device="cpu")
    assert "\n" not in str(error.value)


def test_damaged_files_are_rejected(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "shards")
    (folder / "model-00002-of-00003.safetensors").rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"file not found: .*model-00002-of-00003.safetensors, a shard that"):
        cedd.import_model(folder, device="cpu")
    content = (tmp_path / "away").read_bytes()
    (folder / "model-00002-of-00003.safetensors").write_bytes(content[:-8])
    with pytest.raises(ValueError, match=r"not a complete safetensors file: .* ends at byte"):
        cedd.import_model(folder, device="cpu")
    (folder / "model-00002-of-00003.safetensors").write_bytes(content[:6])
    with pytest.raises(ValueError, match=r"not a complete safetensors file: it has no header"):
        cedd.import_model(folder, device="cpu")
    with pytest.raises(
        ValueError, match=r"dtype must be torch.float32, torch.bfloat16, torch.float16 \(got torch.int8"
    ):
        cedd.import_model(plain_llama.write(tmp_path / "kind", "llama"), device="cpu", dtype=torch.int8)
    weights = plain_llama.random_weights("llama")
    integers = {**weights, "model.norm.weight": torch.ones(24, dtype=torch.int8)}
    with pytest.raises(ValueError, match=r"model.norm.weight is of I8; weights must be F64, F32, F16, BF16"):
        cedd.import_model(plain_llama.write(tmp_path / "int8", "llama", integers), device="cpu")
    broken = {**weights, "model.norm.weight": torch.full((24,), torch.nan)}
    with pytest.raises(ValueError, match=r"model.norm.weight holds numbers that are not finite"):
        cedd.import_model(plain_llama.write(tmp_path / "nan", "llama", broken), device="cpu")
    more = {**weights, "model.layers.0.self_attn.q_proj.bias": torch.ones(24)}
    with pytest.raises(ValueError, match=r"1 tensors that have no place, first model.layers.0.self_attn.q_proj.bias"):
        cedd.import_model(plain_llama.write(tmp_path / "more", "llama", more), device="cpu")


def test_buffers_of_old_files_are_ignored(tmp_path: Path) -> None:
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    weights = plain_llama.random_weights("llama") | buffers
    cedd.import_model(plain_llama.write(tmp_path / "old", "llama", weights), device="cpu")
    seen = {"denoise_model.h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.bool)}
    weights = plain_llama.random_weights("diffugpt") | seen
    weights["lm_head.weight"] = weights["embed_tokens.weight"].clone()
    cedd.import_model(plain_llama.write(tmp_path / "gpt", "diffugpt", weights), device="cpu")


@pytest.mark.parametrize(("width", "row"), [(768, 10541), (1024, 50257)])
def test_default_mask_rows_of_diffugpt(width: int, row: int) -> None:
    """For small and medium, if neither config.json nor the tokenizer defines it."""
    family = next(one for one in LLAMA_FAMILIES if one.name == "DiffuGPT")
    assert family._mask_row(Description({"n_embd": width}, "config.json", 0), IdTokenizer(50258), 50258, None) == row


def test_mask_id_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without one, only the raw outputs of the network are available."""
    folder = plain_llama.write(tmp_path / "dream", "dream", mask_token_id="absent")
    model, ids = cedd.import_model(folder, device="cpu"), ids_of()
    assert float((model.original_logits(ids) - expected_of("dream", ids)).abs().max()) < TOLERANCE
    for use in (lambda: model.generate(1, length=4), lambda: model.perplexity("3 4 5")):
        with pytest.raises(ValueError, match="the id of this network's mask is not known; import it with --mask-id"):
            use()
    assert main(["import", str(folder), "--out", str(tmp_path / "ours"), "--device", "cpu"]) == 2
    assert "import it with --mask-id" in capsys.readouterr().err
    assert network_of(cedd.import_model(folder, device="cpu", mask_id=5)).options.mask_row == 5
    with pytest.raises(ValueError, match="a Qwen2 network has no mask; remove --mask-id"):
        cedd.import_model(plain_llama.write(tmp_path / "qwen2", "qwen2"), device="cpu", mask_id=5)
