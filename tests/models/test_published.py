"""Published networks, against a reference implementation and against outputs of the original code."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import cedd
from cedd.block_layout import BlockLayout, InBlocks
from cedd.cli import main
from cedd.data.folders import data_root
from cedd.data.tokenizers import load_tokenizer
from cedd.losses import NoiseDraws, batch_loss, noisy_batch
from cedd.models.transformer import Transformer
from tests.models import ddit

V = 17
TOLERANCE = 3e-5
HYDRA = {"hidden_size": ddit.D, "cond_dim": ddit.C, "length": ddit.LENGTH, "n_blocks": ddit.DEPTH, "dropout": 0.1}
HYDRA |= {"n_heads": ddit.HEADS}
FLAT = {"hidden_dim": ddit.D, "cond_dim": ddit.C, "model_length": ddit.LENGTH, "n_blocks": ddit.DEPTH}
FLAT |= {"n_heads": ddit.HEADS, "dropout": 0.1}
SEDD = {"tokens": V, "graph": {"type": "absorb"}, "noise": {"type": "loglinear", "sigma_min": 0.01, "sigma_max": 9}}
CONFIGS: dict[str, tuple[dict[str, Any], int, str]] = {
    "sedd": (SEDD | {"model": HYDRA | {"scale_by_sigma": True}}, V + 1, ""),
    "sedd uniform": (
        SEDD | {"graph": {"type": "uniform"}, "noise": SEDD["noise"] | {"type": "geometric"}, "model": HYDRA},
        V,
        "",
    ),
    "mdlm": ({"model_type": "mdlm", "vocab_size": V + 1, **FLAT, "time_conditioning": False}, V + 1, "backbone."),
    "mdlm, told sigma": ({"model_type": "mdlm", "vocab_size": V + 1, **FLAT, "time_conditioning": True}, V + 1, "b."),
    "bd3lm": (
        {"model_type": "bd3lm", "vocab_size": V + 1, **FLAT, "block_size": ddit.LENGTH, "cross_attn": False},
        V + 1,
        "backbone.",
    ),
    "bd3lm, blocks": (
        {"model_type": "bd3lm", "vocab_size": V + 1, **FLAT, "block_size": 4, "cross_attn": True, "var_min": True},
        V + 1,
        "backbone.",
    ),
    "sdtt": ({"parameterization": {"name": "multi-round-sdtt"}, "model": HYDRA}, V + 1, "backbone.backbone."),
    "duo": ({"model_type": "DUO", "vocab_size": V, **FLAT, "causal": False, "var_min": True}, V, "backbone."),
    "udlm": ({"model_type": "udlm", "vocab_size": V, **FLAT, "cfg": False, "time_conditioning": True}, V, "backbone."),
    "gidd": ({"vocab_size": V + 1, "p_uniform": 0.2, "t_eps": 1e-4, **HYDRA, "max_seq_len": ddit.LENGTH}, 128, ""),
    "gidd, by transformers": (
        {"model_type": "dit", "vocab_size": V + 1, "p_uniform": 0.0, "t_eps": 1e-4, "hidden_size": ddit.D}
        | {"timestep_cond_dim": ddit.C, "num_hidden_layers": ddit.DEPTH, "num_attention_heads": ddit.HEADS}
        | {"max_seq_len": ddit.LENGTH, "attention_dropout": 0.0},
        V + 1,
        "",
    ),
    "gidd, mask not counted": ({"vocab_size": V, "p_uniform": 0.1, **HYDRA}, V + 1, ""),
    "gidd, mask by its number": ({"vocab_size": V, "mask_token_id": V, "p_uniform": 0.1, **HYDRA}, 128, ""),
    "gidd, not rounded": ({"vocab_size": V + 1, "model": HYDRA | {"p_uniform": 0.1, "t_eps": 1e-4}}, V + 1, ""),
}
# Process and method of each family, and the network's time input at time t as a function of sigma.
TimeInput = Callable[[Tensor, Tensor], Tensor]
KINDS: dict[str, tuple[cedd.TokenProcess, str, TimeInput]] = {
    "sedd": (cedd.absorb(V), "sedds", lambda t, sigma: sigma),
    "sedd uniform": (cedd.uniform(V, cedd.Geometric(0.01, 9)), "sedd", lambda t, sigma: sigma),
    "mdlm": (cedd.absorb(V), "ceddt", lambda t, sigma: 0 * t),
    "mdlm, told sigma": (cedd.absorb(V), "ceddt", lambda t, sigma: sigma),
    "bd3lm": (cedd.absorb(V), "ceddt", lambda t, sigma: 0 * t),
    "bd3lm, blocks": (cedd.absorb(V), "ceddt", lambda t, sigma: 0 * t),
    "sdtt": (cedd.absorb(V), "ceddt", lambda t, sigma: 0 * t),
    "duo": (cedd.uniform(V), "bayes", lambda t, sigma: sigma),
    "udlm": (cedd.uniform(V), "bayes", lambda t, sigma: sigma),
    "gidd": (cedd.hybrid(V, 0.2), "bayes", lambda t, sigma: t),
    "gidd, by transformers": (cedd.hybrid(V, 0.0), "bayes", lambda t, sigma: t),
    "gidd, mask not counted": (cedd.hybrid(V, 0.1), "bayes", lambda t, sigma: t),
    "gidd, mask by its number": (cedd.hybrid(V, 0.1), "bayes", lambda t, sigma: t),
    "gidd, not rounded": (cedd.hybrid(V, 0.1), "bayes", lambda t, sigma: t),
}


def published(folder: Path, name: str) -> tuple[Path, ddit.Weights]:
    config, rows, prefix = CONFIGS[name]
    weights = ddit.random_weights(rows)
    buffers = {"logit_bias": torch.zeros(1, 1, 1)} if name == "gidd" else {}
    ddit.write(folder, config, weights | buffers, prefix)
    return folder, weights


def noisy(process: cedd.TokenProcess) -> tuple[Tensor, Tensor]:
    """Every state among the tokens, and times from early to late."""
    x = torch.randint(process.num_states, (5, ddit.LENGTH), generator=torch.Generator().manual_seed(1))
    x[0, 0], x[1, 1] = process.num_states - 1, 0
    return x, torch.tensor([0.003, 0.12, 0.45, 0.8, 0.995], dtype=torch.float64)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_matches_reference_outputs(tmp_path: Path, name: str) -> None:
    folder, weights = published(tmp_path / "theirs", name)
    model = cedd.import_model(folder, device="cpu")
    process, method, told = KINDS[name]
    assert model.process == process
    assert model.method.name == method
    assert (model.length, model.tokenizer.vocab_size) == (ddit.LENGTH, V)
    x, t = noisy(process)
    expected = ddit.outputs(weights, x, told(t, process.sigma(t)).float())[..., :V]
    found = model.model(x, process.sigma(t).float())
    assert float((found - expected).abs().max()) < TOLERANCE
    assert float(expected.std()) > 0.5  # so that the tolerance means something


@pytest.mark.parametrize("wrapper", ["", "_orig_mod.", "module."])
def test_buffers_outside_backbone_are_ignored(tmp_path: Path, wrapper: str) -> None:
    """The range of training times of BD3-LM, in a file of the network or of a compiled one."""
    folder, weights = published(tmp_path / "theirs", "bd3lm, blocks")
    whole = cedd.import_model(folder, device="cpu").model.state_dict()
    named = {f"{wrapper}backbone.{one}": value for one, value in weights.items()}
    named |= {f"{wrapper}sampling_eps_{end}": torch.tensor(0.5) for end in ("min", "max")}
    ddit.write(folder, CONFIGS["bd3lm, blocks"][0], named)
    found = cedd.import_model(folder, device="cpu").model.state_dict()
    assert all(torch.equal(found[one], whole[one]) for one in whole)


@pytest.mark.parametrize("name", ["sedd", "mdlm", "bd3lm, blocks"])
def test_sharded_weights_are_loaded(tmp_path: Path, name: str) -> None:
    folder, _ = published(tmp_path / "theirs", name)
    whole = cedd.import_model(folder, device="cpu").model.state_dict()
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {one: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, one in enumerate(sorted(weights))}
    for file in set(files.values()):
        save_file({one: weights[one] for one in files if files[one] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    found = cedd.import_model(folder, device="cpu").model.state_dict()
    assert all(torch.equal(found[one], whole[one]) for one in whole)
    index.write_text(json.dumps({"weight_map": {**files, "other": "model-00002-of-00003.safetensors"}}))
    with pytest.raises(
        ValueError, match=r"model-00002-of-00003.safetensors lacks other, which model.safetensors.index"
    ):
        cedd.import_model(folder, device="cpu")
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"model-00001-of-00003.safetensors is not a complete safetensors file"):
        cedd.import_model(folder, device="cpu")


@pytest.mark.parametrize("mistake", ddit.MISTAKES)
def test_any_wrong_convention_exceeds_tolerance(mistake: str) -> None:
    weights, process = ddit.random_weights(V + 1), cedd.absorb(V)
    x, t = noisy(process)
    sigma = process.sigma(t).float()
    wrong = (ddit.outputs(weights, x, sigma, mistake) - ddit.outputs(weights, x, sigma)).abs().max()
    assert float(wrong) > 5 * TOLERANCE


@pytest.mark.parametrize("name", ["mdlm", "gidd"])
def test_wrong_time_input_exceeds_tolerance(name: str) -> None:
    process, _, told = KINDS[name]
    weights = ddit.random_weights(V + 1)
    x, t = noisy(process)
    sigma = process.sigma(t)
    right = ddit.outputs(weights, x, told(t, sigma).float())
    for other in ({"t": t, "sigma": sigma, "nothing": 0 * t}[wrong] for wrong in ("t", "sigma", "nothing")):
        if not torch.equal(other, told(t, sigma)):
            assert float((ddit.outputs(weights, x, other.float()) - right).abs().max()) > 5 * TOLERANCE


# ---- what their own code computed -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["sedd", "mdlm"])
def fixture(request: pytest.FixtureRequest) -> tuple[str, cedd.LanguageModel, dict[str, Tensor]]:
    root = data_root()
    given = os.environ.get("CEDD_FIXTURES", str(root.parent / "fixtures") if root else "")
    folder = Path(given) / request.param
    if not given or not (folder / "io.npz").is_file():
        pytest.skip("needs outputs of the published code: set CEDD_FIXTURES to a folder with sedd/ and mdlm/")
    with np.load(folder / "io.npz", allow_pickle=False) as stored:
        return request.param, cedd.import_model(folder, device="cpu"), {k: torch.from_numpy(stored[k]) for k in stored}


def test_outputs_match_original_code(fixture) -> None:
    name, model, io = fixture
    found, size = model.model(io["x_t"], io["sigma"]), model.process.vocab_size
    if name == "sedd":
        # Theirs are scaled, and 0 at the input token.
        scaled = found - (torch.log(torch.expm1(io["sigma"])) + math.log(size))[:, None, None]
        known, there = io["log_score"][..., :size], io["x_t"][..., None] == torch.arange(size)
        assert float((scaled - known)[~there].abs().max()) < TOLERANCE
        scores = cedd.log_scores(found, model.process, io["x_t"], io["t"], method=model.method)
        masked = io["x_t"] == model.process.mask_id
        assert float((scores - known)[masked].abs().max()) < TOLERANCE
    else:
        assert float((found - io["logits"][..., :size]).abs().max()) < TOLERANCE
        noise = model.process.noise(io["t"]).like(io["x_t"])
        posterior = model.method.parameterization.log_posterior(found, io["x_t"], noise)
        assert float((posterior.gather(-1, io["x0"][..., None])[..., 0] - io["log_p_x0"]).abs().max()) < TOLERANCE


def test_losses_match_original_code(fixture) -> None:
    """MDLM's equals our loss of ceddt; SEDD's equals ours plus its constant at a mask, sigma' r (log r - 1)."""
    name, model, io = fixture
    masked = io["x_t"] == model.process.mask_id
    draws = NoiseDraws(torch.where(masked, 1 - 1e-9, 0.0).double(), torch.zeros_like(io["x0"]))
    for k in range(len(io["x0"])):
        one = NoiseDraws(draws.u[k : k + 1], draws.redraw[k : k + 1])
        batch = noisy_batch(model.method, model.process, io["x0"][k : k + 1], io["t"][k : k + 1].double(), one)
        assert torch.equal(batch.inputs, io["x_t"][k : k + 1])
        ours = float(batch_loss(model.method, model.model, batch)) * io["x0"].shape[1]
        if name == "mdlm":
            assert ours == pytest.approx(float(io["nll_64"][k].sum()), rel=1e-5)
        else:
            ratio = 1 / torch.expm1(model.process.sigma(io["t"][k]))
            constant = model.process.alpha_rate(io["t"][k]) * ratio * (torch.log(ratio) - 1) * masked[k].sum()
            assert ours + float(constant) == pytest.approx(float(io["loss_64"][k]), rel=1e-5)


def paired_mask(length: int, block: int) -> Tensor:
    """The attention mask of [x_t, x_0], from the description of BD3-LM."""
    visible = torch.zeros(2 * length, 2 * length, dtype=torch.bool)
    for query in range(2 * length):
        for key in range(2 * length):
            own, other = query % length // block, key % length // block
            if query < length:
                visible[query, key] = own == other if key < length else own > other
            else:
                visible[query, key] = key >= length and own >= other
    return visible


def test_block_network_takes_noisy_and_clean_text(tmp_path: Path) -> None:
    folder, weights = published(tmp_path / "theirs", "bd3lm, blocks")
    model = cedd.import_model(folder, device="cpu")
    assert (model.method.name, model.method.block) == ("ceddt", 4)
    x_t, _ = noisy(model.process)
    x0 = torch.randint(V, x_t.shape, generator=torch.Generator().manual_seed(2))
    length, told = ddit.LENGTH, torch.zeros(len(x_t))
    both, twice = torch.cat([x_t, x0], 1), torch.arange(length).repeat(2)
    expected = ddit.outputs(weights, both, told, visible=paired_mask(length, 4), positions=twice)[:, :length]
    for found in (
        model.original_logits(x_t, x0=x0),
        model.original_logits(both),
        model.original_logits(both, sigma=told, sample_mode=False),
    ):
        assert float((found - expected).abs().max()) < TOLERANCE
    number = torch.arange(length) // 4
    alone = ddit.outputs(weights, x_t, told, visible=number[:, None] >= number)
    assert float((model.original_logits(x_t) - alone).abs().max()) < TOLERANCE
    assert float((alone - expected).abs().max()) > 100 * TOLERANCE
    with pytest.raises(ValueError, match=r"has an even number of tokens \(got 13\)"):
        model.original_logits(both[:, :13])
    # Saved and loaded as a cedd model, it is evaluated in its blocks.
    model.save_pretrained(tmp_path / "ours")
    ours = cedd.load(tmp_path / "ours", device="cpu")
    assert ours.method.block == 4
    how: dict[str, Any] = {"method": ours.method, "bound": "exact"}
    exact = cedd.estimate_bound(ours.model, ours.process, x0, **how)
    other = cedd.estimate_bound(model.model, model.process, x0, method="ceddt", block=4, bound="exact")
    torch.testing.assert_close(exact.per_sequence, other.per_sequence)


@pytest.fixture(scope="module")
def bd3lm() -> tuple[cedd.LanguageModel, dict[str, Tensor]]:
    root = data_root()
    given = os.environ.get("CEDD_FIXTURES", str(root.parent / "fixtures") if root else "")
    folder = Path(given) / "bd3lm"
    if not given or not (folder / "io.safetensors").is_file():
        pytest.skip("needs outputs of the published code: set CEDD_FIXTURES to a folder with bd3lm/")
    return cedd.import_model(folder, device="cpu"), load_file(folder / "io.safetensors")


def test_block_outputs_match_original_code(bd3lm: tuple[cedd.LanguageModel, dict[str, Tensor]]) -> None:
    model, io = bd3lm
    x_t, x0, V = io["x_t"], io["x0"], model.process.vocab_size
    found = model.original_logits(x_t, x0=x0)
    assert found.shape == io["logits"].shape
    assert float((found - io["logits"]).abs().max()) < TOLERANCE
    assert float((model.original_logits(torch.cat([x_t, x0], 1)) - io["logits"]).abs().max()) < TOLERANCE
    before = torch.cat([x0[:, :12], x_t[:, 12:]], 1)
    assert float((model.original_logits(before, sample_mode=True) - io["logits_prefix"]).abs().max()) < TOLERANCE
    layout = BlockLayout(model.length, 4)
    assert torch.equal(layout.pattern("cpu").visible, io["mask"].bool())
    outputs = InBlocks(model.model, 4)(x_t, torch.zeros(4, 4), clean=x0)
    assert float((outputs - io["logits"][..., :V]).abs().max()) < TOLERANCE
    rows = torch.log_softmax(outputs, -1).gather(-1, x0[..., None])[..., 0]
    masked = x_t == model.process.mask_id
    assert float((rows - io["log_p_x0"])[masked].abs().max()) < TOLERANCE
    # One block after another, with a cache of the finished ones.
    assert isinstance(model.model, Transformer)
    cache, parts = model.model.new_cache(len(x0), model.length), list[Tensor]()
    for number, (noisy_block, clean) in enumerate(zip(x_t.split(4, 1), x0.split(4, 1), strict=True)):
        parts.append(model.model.head(model.model.features(noisy_block, torch.zeros(4), cache=cache)))
        cache.length = 4 * number
        model.model.features(clean, torch.zeros(4), cache=cache)
    # All three are equal in exact arithmetic; the two of the original code differ from it by up to 2.3e-5.
    exact = io["logits_64"][..., :V]
    for found in (torch.cat(parts, 1), io["logits_cached"][..., :V], io["logits_blocks"][..., :V]):
        assert float((found - exact).abs().max()) < TOLERANCE


def test_block_loss_matches_original_code(bd3lm: tuple[cedd.LanguageModel, dict[str, Tensor]]) -> None:
    """In validation the first token, which is never masked, is not counted; in training it is."""
    model, io = bd3lm
    masked = io["x_t"] == model.process.mask_id
    draws = NoiseDraws(torch.where(masked, 1 - 1e-9, 0.0).double(), torch.zeros_like(io["x0"]))
    first = torch.ones_like(masked)
    first[:, 0] = False
    for where, expected in ((first, io["nelbo_64"]), (None, io["loss_train"])):
        batch = noisy_batch(model.method, model.process, io["x0"], io["t"].double(), draws, where=where)
        assert torch.equal(batch.inputs, io["x_t"])
        loss = batch_loss(model.method, model.model, batch)
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)


# ---- refusals ---------------------------------------------------------------------------------------------------


def _with(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**config, **changes}


MDLM, UDLM = CONFIGS["mdlm"][0], CONFIGS["udlm"][0]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "of no family": (
        {"model_type": "t5"},
        "unsupported model_type 't5'; cedd imports SE",
    ),
    "a run": ({"format": 1, "method": {}, "process": {}}, "describes a model of cedd, which commands take without"),
    "no type": ({"hidden_size": 3}, "model_type is missing; cedd imports"),
    "remote code": (
        {"model_type": "other", "auto_map": {"AutoModel": "modeling_other.Other"}},
        r"its network is remote code \(modeling_other.Other\), which is never run",
    ),
    "labels": (_with(UDLM, cfg=True, cfg_num_classes=3), "cfg is True; a network that is conditioned on labels"),
    "quantized": (_with(MDLM, quantization_config={"quant_method": "gptq"}), "quantization_config is {'quant_method'"),
    "causal": (_with(MDLM, causal=True), "causal is True; an autoregressive network is not imported"),
    "blocks": (_with(CONFIGS["bd3lm, blocks"][0], block_size=5), "block_size 5 does not divide the length, 12"),
    "longer blocks": (_with(CONFIGS["bd3lm"][0], block_size=24), "block_size must be from 1 to 12 \\(got 24"),
    "blocks alone": (_with(CONFIGS["bd3lm, blocks"][0], cross_attn=False), "cross_attn is False; blocks are imported"),
    "blocks and time": (
        _with(CONFIGS["bd3lm, blocks"][0], time_conditioning=True),
        "time_conditioning is True; networks of blocks are imported only without",
    ),
    "no size": (
        {k: v for k, v in MDLM.items() if k != "cond_dim"},
        "cond_dim or timestep_cond_dim must be an integer \\(got None",
    ),
    "rows": (_with(MDLM, vocab_size=V + 2), f"vocab_embed.embedding has {V + 1} rows, but .* requires {V + 2}"),
    "width": (_with(MDLM, hidden_dim=30), r"is \[18, 24\], but config.json requires 30 columns"),
    "depth": (_with(MDLM, n_blocks=3), r"lacks blocks.2.attn_out.weight"),
    "fewer blocks": (
        _with(MDLM, n_blocks=1),
        "holds 10 tensors that have no place, first blocks.1.adaLN_modulation.bias",
    ),
    "noise": (
        _with(CONFIGS["sedd"][0], noise={"type": "cosine"}),
        "noise.type is 'cosine'; it must be loglinear or geo",
    ),
    "graph": (_with(CONFIGS["sedd"][0], graph={"type": "tree"}), "graph.type is 'tree'; it must be absorb or uniform"),
    "graph, no settings": (_with(CONFIGS["sedd"][0], graph="absorb"), "graph is 'absorb', but must hold settings"),
    "noise's ends": (
        _with(CONFIGS["sedd"][0], noise={"type": "geometric", "sigma_min": 9, "sigma_max": 1}),
        "noise.sigma_min and noise.sigma_max must be numbers, 0 < min < max",
    ),
    "scaled": (
        _with(CONFIGS["sedd uniform"][0], scale_by_sigma=True),
        "scale_by_sigma is true, which SEDD's networks are on absorb only, not uniform",
    ),
    "BERT's mask": (_with(MDLM, vocab_size=30522), "networks of BERT's tokens, among which is the mask, are not"),
    "vocabulary": (_with(MDLM, vocab_size="many"), "vocab_size must be an integer \\(got 'many'"),
    "no depth": (_with(MDLM, n_blocks=0), "n_blocks must be at least 1 \\(got 0"),
    "heads": (_with(MDLM, n_heads=5), f"hidden_dim {ddit.D} does not divide into heads of an even size, n_heads 5"),
    "dropout": (_with(MDLM, dropout="some"), "dropout must be a number \\(got 'some'"),
    "time": (_with(MDLM, time_conditioning="no"), "time_conditioning must be true or false \\(got 'no'"),
    "shuffles": (_with(CONFIGS["gidd"][0], p_uniform=1.5), "p_uniform must be at least 0 and below 1 \\(got 1.5"),
    "times": (_with(CONFIGS["gidd"][0], t_eps=0.5), "t_eps must be above 0 and below 0.5 \\(got 0.5"),
    "outputs": (_with(CONFIGS["sdtt"][0], parameterization="d3pm"), "parameterization is 'd3pm'; it must be subs or"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_networks_are_rejected(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, message = REFUSED[name]
    prefix = "" if "graph" in config else "backbone."
    rows = V if name in ("labels", "scaled") else V + 1
    folder, out = ddit.write(tmp_path / "theirs", config, ddit.random_weights(rows), prefix), tmp_path / "ours"
    with pytest.raises(ValueError, match=message):
        cedd.import_model(folder, device="cpu")
    assert main(["import", str(folder), "--out", str(out)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["theirs"]


def test_invalid_weight_files_are_rejected(tmp_path: Path) -> None:
    folder, weights = published(tmp_path / "theirs", "mdlm")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model.bin is a pickle, which can run code when it is read; only safe"
    ):
        cedd.import_model(folder)
    with pytest.raises(ValueError, match=r"pytorch_model.bin is a pickle"):
        cedd.import_model(folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    ddit.write(folder, {"model_type": "t5"}, {"other.weight": torch.ones(2)})
    with pytest.raises(ValueError, match="unsupported model_type 't5'"):
        cedd.import_model(folder)
    for name, value, message in (
        ("rotary_emb.inv_freq", weights["rotary_emb.inv_freq"] * 0.5, "other frequencies"),
        ("rotary_emb.inv_freq", torch.ones(1), "heads need"),
        ("logit_bias", torch.ones(1, 1, 1), "logit_bias is not 0"),
        ("extra.weight", torch.ones(2), "holds 1 tensors that have no place, first extra.weight"),
    ):
        ddit.write(folder, MDLM, weights | {name: value}, "backbone.")
        with pytest.raises(ValueError, match=message):
            cedd.import_model(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        cedd.import_model(folder)
    file.unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        cedd.import_model(folder)
    with pytest.raises(ValueError, match=r"folder not found: .*; names on the hub are owner/name"):
        cedd.import_model(tmp_path / "nothing" / "here")


def test_nonfinite_or_integer_weights_are_rejected(tmp_path: Path) -> None:
    folder, weights = published(tmp_path / "theirs", "mdlm")
    for name in ("vocab_embed.embedding", "blocks.1.norm2.weight", "output_layer.linear.bias"):
        for value in (math.nan, math.inf):
            broken = weights[name].clone()
            broken.view(-1)[3] = value
            ddit.write(folder, MDLM, weights | {name: broken}, "backbone.")
            with pytest.raises(ValueError, match=f"{name} holds numbers that are not finite"):
                cedd.import_model(folder)
        ddit.write(folder, MDLM, weights | {name: weights[name].to(torch.int8)}, "backbone.")
        with pytest.raises(ValueError, match=f"{name} is of int8; weights are of float64, float32, float16, bfloat16"):
            cedd.import_model(folder)
    # Unused rows may hold anything.
    folder, weights = published(tmp_path / "gidd", "gidd")
    weights["vocab_embed.embedding"][V + 1 :] = math.nan
    weights["output_layer.linear.bias"][V:] = -math.inf
    ddit.write(folder, CONFIGS["gidd"][0], weights)
    cedd.import_model(folder)


def test_vocab_size_may_exclude_the_mask(tmp_path: Path) -> None:
    """GPT-2's tokens with [PAD], and rounded rows: 50,258 are tokens, whether or not vocab_size counts the mask."""
    weights = ddit.random_weights(50304)
    for size in (50258, 50259):
        folder = ddit.write(tmp_path / str(size), CONFIGS["gidd"][0] | {"vocab_size": size}, weights)
        model = cedd.import_model(folder, "none", device="cpu")
        assert model.process == cedd.hybrid(50258, 0.2)
    ddit.write(folder, CONFIGS["gidd"][0] | {"mask_token_id": 1}, weights)
    with pytest.raises(ValueError, match="mask_token_id must be at least 2 \\(got 1"):
        cedd.import_model(folder)


def test_rounded_frequencies_are_accepted_and_length_is_limited(tmp_path: Path) -> None:
    folder, weights = published(tmp_path / "theirs", "mdlm")
    rounded = {name: value.bfloat16() if name.startswith("rotary") else value for name, value in weights.items()}
    ddit.write(folder, MDLM, rounded, "backbone.")
    cedd.import_model(folder)
    ddit.write(folder, {**MDLM, "model_length": 10**12}, weights, "backbone.")
    with pytest.raises(ValueError, match="model_length must be from 1 to 65536 \\(got 1000000000000"):
        cedd.import_model(folder)


def test_vocabulary_may_contain_unicode_line_separators(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes("[UNK]\n[SEP]\n\u2028\n\x85\nb\n".encode())
    assert load_tokenizer(tmp_path).encode("b").tolist() == [4]


def test_tokenizer_must_match_network(tmp_path: Path) -> None:
    folder, _ = published(tmp_path / "theirs", "duo")
    (tmp_path / "vocab.txt").write_text("[UNK]\n[SEP]\na\nb\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"the tokenizer .* has 4 tokens, and the network 17"):
        cedd.import_model(folder, tmp_path)
    with pytest.raises(ValueError, match="unknown tokenizer 'gtp2'; use gpt2, bert, none, or a folder"):
        cedd.import_model(folder, "gtp2")
    words = ["[UNK]", "[SEP]", *"abcdefghijklmn"]  # one fewer than the network has: the last is [PAD]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    model = cedd.import_model(folder, tmp_path, device="cpu")
    assert model.tokenizer.vocab_size == V
    assert model.tokenizer.encode("A b").tolist() == [2, 3]
    assert model.tokenizer.decode([2, V - 1, 3]) == "a b"
    drawn = " ".join(model.generate(4, steps=4, seed=0))
    assert "[PAD]" not in drawn
    # The report mentions that the tokenizer is lossy.
    model.save_pretrained(tmp_path / "ours")
    (tmp_path / "text.txt").write_text("A b C\nd e " * 40)
    words = ["--data", str(tmp_path / "text.txt"), "--wrap", "trained", "--samples", "0", "--device", "cpu"]
    assert main(["report", str(tmp_path / "ours"), *words]) == 0
    assert "drops capitals, accents and line breaks" in (tmp_path / "ours" / "report.html").read_text("utf-8")


@pytest.mark.parametrize("name", CONFIGS)
def test_only_mdlm_and_duo_families_wrap_blocks(tmp_path: Path, name: str) -> None:
    """BD3-LM's own MDLM was trained without end-of-document tokens. All have a float32 residual stream."""
    folder, _ = published(tmp_path / "theirs", name)
    (tmp_path / "vocab.txt").write_text("\n".join(["[UNK]", "[SEP]", *"abcdefghijklmno"]), encoding="utf-8")
    model = cedd.import_model(folder, tmp_path, device="cpu")
    assert model.folder.wrap == ("bos-eos" if name.startswith(("mdlm", "sdtt", "duo")) else "none")
    assert model.model.config()["float32_residual"]


# ---- a folder like any other ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mdlm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sedd", "duo", "gidd"))]
)
def test_imported_folder_is_a_usable_model(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = published(tmp_path / "theirs", name)
    out = tmp_path / "above" / "ours"  # parent folders are created, as by cedd train
    assert main(["import", str(folder), "--out", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokenizer"] == "ids"
    assert (facts["family"], facts["source"]) == (name.upper(), "theirs")
    model, theirs = cedd.load(out, device="cpu"), cedd.import_model(folder, device="cpu")
    x, t = noisy(model.process)
    sigma = model.process.sigma(t).float()
    assert torch.equal(model.model(x, sigma), theirs.model(x, sigma))
    assert model.process == theirs.process
    text = " ".join(str(k % V) for k in range(40))
    found = model.perplexity(text, draws=4)
    assert math.isfinite(found.nats_per_token)
    assert len(model.generate(seed=0, steps=4)[0].split()) == ddit.LENGTH
    assert model.infill("3 4 ____{2}", steps=4, seed=0).startswith("3 4 ")
    (tmp_path / "numbers.txt").write_text(text)
    measured = ["--data", str(tmp_path / "numbers.txt"), "--samples", "1", "--device", "cpu", "--json"]
    assert main(["report", str(out), *measured]) == 0
    page, shown = (out / "report.html").read_text("utf-8"), json.loads(capsys.readouterr().out)
    assert shown["facts"]["network"] == f"{name.upper()}, imported from theirs"
    assert shown["infilling"]["template"].count("____") == 2
    assert ("correction" in shown["notes"], "no learning curve" in page) == (True, True)
    assert main(["import", str(folder), "--out", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["import", str(folder), "--out", str(folder / "config.json" / "ours")]) == 2
    assert "config.json is not a folder that can be written" in capsys.readouterr().err
