"""The network: shapes, initialization, attention patterns, and equivalence with the cache and the compiler."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cedd.models.kernels.gelu import CHUNK, gelu, product_with_gelu
from cedd.models.kernels.rotation import project_and_rotate, rotary_tables, rotate
from cedd.models.transformer import SIZES, Transformer, TransformerConfig, config_from_preset
from cedd.network import AttentionPattern, with_rounded

VOCABULARY = 11


def tiny(seed=0, **changes):
    """A tiny network in float64 whose parameters are all random: zero initialization makes most tests trivial."""
    torch.manual_seed(seed)
    model = Transformer(config_from_preset("tiny", vocab_size=VOCABULARY, has_mask=True, **changes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def causal(**changes):
    return tiny(causal=True, time_conditioning=False, **changes)


def tokens(batch=3, length=16, seed=1):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


SIGMA = torch.tensor([0.01, 0.7, 5.0], dtype=torch.float64)


@pytest.mark.parametrize("conditioned", [True, False])
def test_output_shapes_and_uniform_initial_predictions(conditioned):
    config = config_from_preset("tiny", vocab_size=VOCABULARY, has_mask=True, time_conditioning=conditioned)
    model = Transformer(config).eval()
    x_t = torch.full((3, 16), VOCABULARY)  # the mask is a legal input
    outputs = model(x_t, SIGMA.float() if conditioned else None)
    assert outputs.shape == (3, 16, VOCABULARY)
    assert torch.equal(outputs.softmax(-1), torch.full_like(outputs, 1 / VOCABULARY))
    assert model.features(x_t, SIGMA.float()).shape == (3, 16, config.width)


def test_conditioned_blocks_start_as_identity():
    config = config_from_preset("tiny", vocab_size=VOCABULARY, has_mask=False)
    model = Transformer(config).eval()
    x_t = tokens()
    normed = F.layer_norm(model.backbone.embedding(x_t), (config.width,))
    torch.testing.assert_close(model.features(x_t, SIGMA.float()), normed)


def test_no_mask_row_without_a_mask():
    model = Transformer(config_from_preset("tiny", vocab_size=VOCABULARY, has_mask=False))
    assert model.backbone.embedding.num_embeddings == VOCABULARY
    with pytest.raises(IndexError):
        model(torch.full((1, 4), VOCABULARY), SIGMA[:1])


def test_sigma_matters_and_may_be_float64_or_float32():
    model, x_t = tiny().float(), tokens()
    outputs = model(x_t, SIGMA)
    assert torch.equal(outputs, model(x_t, SIGMA.float()))
    changed = model(x_t, SIGMA + torch.tensor([0.0, 1.0, 0.0]))
    same = [torch.allclose(outputs[i], changed[i], atol=1e-5) for i in range(3)]
    assert same == [True, False, True]
    with pytest.raises(ValueError, match="pass sigma"):
        model(x_t)


def test_without_time_conditioning_sigma_is_ignored_and_has_no_parameters():
    model, x_t = tiny(time_conditioning=False), tokens()
    assert torch.equal(model(x_t), model(x_t, SIGMA))
    assert not any("conditioning" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("stretches", [1, 4])
def test_modulation_is_computed_once_without_time_input(stretches):
    """It equals that of sigma = 0, including gradients."""
    free, conditioned, x_t = tiny(time_input="none"), tiny(), tokens()
    sigma, rows = torch.rand(len(x_t), stretches), []
    conditioning = free.backbone.conditioning
    assert conditioning is not None
    conditioning.modulation.register_forward_hook(lambda _module, inputs, _output: rows.append(len(inputs[0])))
    outputs, expected = free(x_t, sigma), conditioned(x_t, torch.zeros_like(sigma))
    assert rows == [1]
    torch.testing.assert_close(outputs, expected)
    gradients = [
        torch.autograd.grad(y.cos().sum(), [*m.parameters()]) for y, m in ((outputs, free), (expected, conditioned))
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_every_parameter_gets_a_gradient():
    for model in (tiny(), causal()):
        F.cross_entropy(model(tokens(), SIGMA).flatten(0, 1), tokens(seed=2).flatten()).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


def test_rotations_depend_only_on_distance_and_keep_values():
    cosine, sine = (table.double() for table in rotary_tables(40, 8))
    query, key, value = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    qkv = torch.stack((query, key, value)).view(1, 1, 3, 1, 8)

    def turned(position):
        here = slice(position, position + 1)
        return rotate(qkv, cosine[here], sine[here]).view(3, 8)

    def product(i, j):
        return turned(i)[0] @ turned(j)[1]

    torch.testing.assert_close(product(3, 7), product(23, 27), rtol=1e-6, atol=1e-6)  # the tables are float32
    assert (product(3, 7) - product(3, 8)).abs() > 1e-4
    torch.testing.assert_close(turned(5)[:2].norm(dim=1), qkv.view(3, 8)[:2].norm(dim=1), rtol=1e-6, atol=1e-6)
    assert torch.equal(turned(5)[2], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_complex_rotation_matches_rotation_by_halves(dtype):
    generator = torch.Generator().manual_seed(0)
    cosine, sine = rotary_tables(10, 8)
    projection = torch.nn.Linear(24, 72, bias=False, dtype=dtype)
    x = torch.randn(2, 10, 24, generator=generator, dtype=dtype).requires_grad_()
    upstream = torch.randn(2, 3, 10, 8, generator=generator, dtype=dtype)

    def attention_and_gradients(heads):
        mixed = F.scaled_dot_product_attention(*heads)
        return mixed.detach(), *torch.autograd.grad(mixed, (x, projection.weight), upstream)

    by_halves = rotate(projection(x).unflatten(-1, (3, 3, -1)), cosine, sine).transpose(1, 3).unbind(2)
    by_pairs = project_and_rotate(x, projection, 3, cosine, sine)
    assert "ProjectAndRotate" in type(by_pairs.queries.grad_fn).__name__
    assert torch.equal(by_pairs.values, by_halves[2])
    with torch.no_grad():  # few positions: the entries are put in order, not the weight
        few = project_and_rotate(x[:1, :4], projection, 3, cosine[:4], sine[:4])
    for got, expected in zip(few, by_pairs, strict=True):
        torch.testing.assert_close(got, expected[:1, :, :4])
    for got, expected in zip(attention_and_gradients(by_pairs), attention_and_gradients(by_halves), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 4, 8), (5, 8)])
def test_product_with_gelu_matches_separate_operations(shape, bias):
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(8, 6, bias=bias), torch.randn(shape)
    # A CPU takes the exact form here, which is not in use; the two are within 5e-4.
    assert (product_with_gelu(x, linear.weight, linear.bias) - gelu(linear(x))).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunked_gelu_matches_torch_with_gradient(dtype):
    count = 2 * CHUNK * torch.get_num_threads() + 7  # three chunks, the last of them short
    x = torch.linspace(-30, 30, count, dtype=dtype).requires_grad_()
    upstream = torch.linspace(1, 2, count, dtype=dtype)
    expected = F.gelu(x, approximate="tanh")
    (gradient,) = torch.autograd.grad(gelu(x), x, upstream)
    (expected_gradient,) = torch.autograd.grad(expected, x, upstream)
    torch.testing.assert_close(gelu(x), expected)
    torch.testing.assert_close(gelu(x.detach()), expected)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_equal_sigma_per_token_matches_sigma_per_sequence(checkpointed):
    """Outputs and gradients, with the same dropout, and with features at selected places only."""
    x_t, places, found = tokens(), torch.tensor([1, 20, 46]), []
    for sigma in (SIGMA, SIGMA[:, None].expand(3, 16)):
        model = tiny(dropout=0.2, checkpoint_blocks=checkpointed).train()
        torch.manual_seed(2)
        everywhere = model(x_t, sigma)
        somewhere = model.rows(model.features(x_t, sigma, where=places), places)
        (everywhere.square().mean() + somewhere.sin().mean()).backward()
        found.append([everywhere.detach(), somewhere.detach(), *(one.grad for one in model.parameters())])
    for by_sequence, by_token in zip(*found, strict=True):
        torch.testing.assert_close(by_token, by_sequence, rtol=1e-9, atol=1e-11)


def test_self_only_attention_matches_sequences_of_length_one():
    model, x_t = tiny(), tokens()
    sigma = torch.rand(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    alone = AttentionPattern(torch.eye(16, dtype=torch.bool))
    features = model.features(x_t, sigma, attention=alone).flatten(0, 1)
    torch.testing.assert_close(features, model.features(x_t.view(-1, 1), sigma.flatten())[:, 0])
    assert (features - model.features(x_t, sigma.mean(1), attention=alone).flatten(0, 1)).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("largest_score", [None, 8.0])
def test_attention_pattern_controls_visibility(largest_score):
    """A lower triangle gives the causal network; two texts that do not see each other give each text alone."""
    model = tiny(time_conditioning=False, largest_score=largest_score)
    twin = causal(largest_score=largest_score)
    twin.load_state_dict(model.state_dict())
    first, second = tokens(), tokens(seed=2)
    earlier = AttentionPattern(torch.ones(16, 16, dtype=torch.bool).tril())
    torch.testing.assert_close(model.features(first, attention=earlier), twin.features(first))
    text = torch.arange(32) // 16
    apart = AttentionPattern(text[:, None] == text, positions=torch.arange(32) % 16)
    both = model.features(torch.cat([first, second], 1), attention=apart)
    torch.testing.assert_close(both, torch.cat([model.features(first), model.features(second)], 1))
    batch = AttentionPattern(torch.stack([earlier.visible, *torch.ones(2, 16, 16, dtype=torch.bool)]))
    expected = torch.cat([twin.features(first[:1]), model.features(first[1:])])
    torch.testing.assert_close(model.features(first, attention=batch), expected)


def test_positions_matter():
    """Attention alone is permutation-equivariant; with the rotations it is not."""
    model, x_t = tiny(), tokens()
    permutation = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(model(x_t, SIGMA)[:, permutation], model(x_t[:, permutation], SIGMA), atol=1e-3)


def test_only_causal_network_ignores_the_future():
    x, changed = tokens(), tokens()
    changed[:, 10] = (changed[:, 10] + 1) % VOCABULARY
    model = causal()
    assert torch.equal(model(x)[:, :10], model(changed)[:, :10])
    assert ((model(x) - model(changed))[:, 10:].abs().amax(-1) > 1e-9).all()
    model = tiny()
    assert ((model(x, SIGMA) - model(changed, SIGMA)).abs().amax(-1) > 1e-9).all()


@pytest.mark.parametrize("largest_score", [None, 12.0])
@pytest.mark.parametrize("pieces", [[1] * 16, [5] + [1] * 11, [16], [4, 7, 5]])
def test_cache_matches_full_forward_pass(pieces, largest_score):
    model, x = causal(largest_score=largest_score), tokens()
    cache = model.new_cache(3, length=16)
    outputs = [model.head(model.features(piece, cache=cache)) for piece in x.split(pieces, dim=1)]
    torch.testing.assert_close(torch.cat(outputs, 1), model(x), rtol=1e-10, atol=1e-10)
    assert cache.length == 16


@pytest.mark.parametrize("pieces", [[4] * 4, [8, 4, 4], [12, 4], [16]])
@pytest.mark.parametrize("conditioned", [True, False])
def test_block_cache_matches_attention_to_earlier_blocks(pieces, conditioned):
    """Several blocks at once, with a pattern, match one after another; discarded noisy blocks leave no trace."""
    model, x = tiny(time_conditioning=conditioned), tokens()
    block = torch.arange(16) // 4
    pattern = AttentionPattern(block[:, None] >= block)
    whole = model.features(x, 0 * SIGMA, attention=pattern)
    cache, found = model.new_cache(3, length=16), []
    for piece in x.split(pieces, dim=1):
        past, new = cache.length, piece.shape[1]
        model.features((piece + 1) % VOCABULARY, SIGMA, cache=cache)  # a noisy version, which is not kept
        cache.length = past
        here = AttentionPattern(pattern.visible[past : past + new, : past + new])
        found.append(model.features(piece, 0 * SIGMA, cache=cache, attention=here if new > 4 else None))
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-10, atol=1e-10)


def test_too_long_sequence_is_rejected():
    with pytest.raises(ValueError, match="do not fit"):
        tiny()(tokens(length=33), SIGMA)
    with pytest.raises(ValueError, match="do not fit"):
        tiny().features(tokens(length=33), SIGMA, cache=tiny().new_cache(3, length=40))


@pytest.mark.parametrize("stretches", [1, 2, 4, 16])
def test_sigma_per_stretch_matches_sigma_per_token(stretches):
    model, x_t = tiny().train(), tokens()
    sigma = torch.rand(3, stretches, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = []
    for levels in (sigma, sigma.repeat_interleave(16 // stretches, 1)):
        model.zero_grad()
        torch.manual_seed(1)
        features = model.features(x_t, levels)
        features.square().sum().backward()
        found.append([features.detach(), *(parameter.grad for parameter in model.backbone.parameters())])
    for by_stretch, by_token in zip(*found, strict=True):
        torch.testing.assert_close(by_stretch, by_token, rtol=1e-9, atol=1e-11)


def test_dropout_only_in_training():
    model, x_t = tiny(), tokens()
    assert torch.equal(model(x_t, SIGMA), model(x_t, SIGMA))
    model.train()
    assert not torch.equal(model(x_t, SIGMA), model(x_t, SIGMA))


@pytest.mark.parametrize("conditioned", [True, False])
def test_checkpointing_does_not_change_gradients(conditioned):
    gradients = []
    for flag in (False, True):
        model = tiny(checkpoint_blocks=flag, time_conditioning=conditioned).train()
        torch.manual_seed(5)
        model(tokens(), SIGMA).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize("conditioned", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_features_at_selected_places_match_all(conditioned, checkpointed):
    """The last MLP run at some places only: the same features and gradients there."""
    model = tiny(time_conditioning=conditioned, checkpoint_blocks=checkpointed, dropout=0.0).train()
    x, where = tokens(), torch.tensor([7, 0, 3, 11])
    results = []
    for chosen in (None, where):
        model.zero_grad()
        features = model.rows(model.features(x, SIGMA, where=chosen), where)
        features.cos().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append([features.detach(), *gradients])
    for everywhere, somewhere in zip(*results, strict=True):
        torch.testing.assert_close(everywhere, somewhere)


@pytest.mark.parametrize("float32_residual", [False, True])
def test_autocast_gives_expected_dtype_and_close_results(float32_residual):
    model = tiny(float32_residual=float32_residual).float()
    exact = model(tokens(), SIGMA.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = model.features(tokens(), SIGMA.float())
        outputs = model.head(features)
    assert features.dtype == (torch.float32 if float32_residual else torch.bfloat16)
    assert (outputs.float() - exact).norm() / exact.norm() < 0.05


def test_whole_model_in_bfloat16_runs():
    assert tiny().bfloat16()(tokens(), SIGMA).dtype == torch.bfloat16


def test_parameter_and_flop_counts():
    config = config_from_preset("small", vocab_size=50257, has_mask=True)
    with torch.device("meta"):
        model = Transformer(config)
    blocks = 12 * (4 * 768**2 + 8 * 768**2)
    conditioning = 257 * 128 + 129 * 128 + 129 * (12 * 6 + 2) * 768
    assert model.num_parameters() == blocks + conditioning + 50258 * 768 + 50257 * 769
    # 6 x parameters, the usual estimate, misses the attention's own products and counts the embedding.
    without_attention = 6 * (12 * 12 * 768**2 + 768 * 50257)
    assert model.flops_per_token(128) == pytest.approx(without_attention + 12 * 12 * 128 * 768, rel=0.003)


def test_presets_build_and_unknown_names_are_rejected():
    for name in SIZES:
        config = config_from_preset(name, vocab_size=5, has_mask=True, dropout=0.0)
        assert TransformerConfig(**dataclasses.asdict(config)) == config
        assert config.dropout == 0.0
    with pytest.raises(ValueError, match="tiny, char, english-char, small, medium"):
        config_from_preset("huge", vocab_size=5, has_mask=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "multiple of 10"),
        ({"depth": 0}, "depth"),
        ({"dropout": 1.0}, "dropout"),
        ({"largest_score": 0.0}, "largest_score"),
    ],
)
def test_invalid_sizes_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_preset("tiny", vocab_size=5, has_mask=True, **changes)


@pytest.mark.slow
def test_dynamo_traces_network_as_one_graph():
    """Checked with the compiler's front end alone, which takes a second."""
    torch.compiler.reset()
    model = tiny(dropout=0.0).float().train()
    wanted = model(tokens(), SIGMA.float())
    rounded = with_rounded(model, model.rounded_parameters(), torch.bfloat16)
    for network, autocast, error in ((model, False, 1e-5), (rounded, True, 0.1)):
        network.compile(backend="eager")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = network(tokens(), SIGMA.float())
        found.float().square().mean().backward()
        torch.testing.assert_close(found.float(), wanted, rtol=error, atol=error)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("conditioned", [False, True])
def test_compiles_as_one_graph(autocast, conditioned):
    model = tiny(dropout=0.0, time_conditioning=conditioned).float().train()
    compiled = tiny(dropout=0.0, time_conditioning=conditioned).float().train()
    compiled.compile()
    assert compiled.state_dict().keys() == model.state_dict().keys()
    gradients = []
    for network in (model, compiled):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = network(tokens(), SIGMA.float())
        outputs.float().square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    tolerance = 0.03 if autocast else 1e-4
    assert (gradients[0] - gradients[1]).norm() / gradients[0].norm() < tolerance


@pytest.mark.slow
def test_compiled_blocks_keep_few_activations():
    """Tensors of [B, L, D] in bfloat16 that one more block saves for the backward pass: 22 by default."""

    def saved_bytes(depth):
        config = config_from_preset("tiny", vocab_size=VOCABULARY, has_mask=True, depth=depth)
        model = Transformer(config).train()
        model.compile(backend="aot_eager_decomp_partition")
        own = {parameter.data_ptr() for parameter in model.parameters()}
        saved = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.autocast("cpu", dtype=torch.bfloat16), hooks:
            features = model.features(tokens(64, 32), torch.rand(64))
        assert features.requires_grad
        return sum(saved.values())

    assert (saved_bytes(4) - saved_bytes(2)) / 2 < 17 * (64 * 32 * 64 * 2)


@pytest.mark.parametrize("record", [[[1, 2, 3]], "xx", None])
def test_network_config_that_is_not_an_object_is_rejected(record: Any):
    with pytest.raises(ValueError, match="network must be a JSON object"):
        Transformer.from_config(record)
