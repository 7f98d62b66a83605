"""The registry of architectures, and custom networks as backbones."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import cedd
from cedd.apps.correct.likelihood import numpy_network
from cedd.data.tokenizers import CharTokenizer
from cedd.models.architectures import ARCHITECTURES, build_network, get_architecture, import_architecture
from cedd.models.backbone import Backbone, ModuleBackbone, persistent_buffers, stored_tensors
from cedd.models.folder import ModelFolder, load_folder, save_folder
from cedd.models.head import VocabularyHead
from cedd.models.transformer import Transformer, config_from_preset
from cedd.network import Capabilities, Network, Places, has_head, trains_on_rows
from cedd.training.config import OptimizerConfig
from cedd.training.update import make_optimizers
from docs.examples.add_architecture import Convolutions

NAME = "docs.examples.add_architecture:Convolutions"
LETTERS = CharTokenizer("abcdefgh")
V = LETTERS.vocab_size


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the architectures that other tests have registered."""
    for name in [name for name in ARCHITECTURES if ":" in name]:
        monkeypatch.delitem(ARCHITECTURES, name)


class TiedNormed(nn.Module):
    """A network with a tied head and running statistics."""

    def __init__(self, vocab_size: int, has_mask: bool, width: int = 8) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocab_size + has_mask, width), nn.BatchNorm1d(width)
        self.output = nn.Linear(width, vocab_size + has_mask, bias=False)
        self.output.weight, self.vocab_size = self.embedding.weight, vocab_size

    def forward(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        x = self.norm(self.embedding(x_t).mT).mT + sigma[:, None, None]
        return self.output(x)[..., : self.vocab_size]


class Declared(Backbone):
    """A network that declares what makes training and sampling fast."""

    capabilities = Capabilities(features=True, selected_rows=True, head_losses=True, time_conditioned=False)

    def __init__(self, vocab_size: int, has_mask: bool, width: int = 8) -> None:
        super().__init__()
        self.vocab_size, self.has_mask, self.width = vocab_size, has_mask, width
        self.embedding, self.hidden = nn.Embedding(vocab_size + has_mask, width), nn.Linear(width, width)
        self.head = VocabularyHead(width, vocab_size)
        nn.init.normal_(self.head.weight)

    def config(self) -> dict[str, object]:
        return {"vocab_size": self.vocab_size, "has_mask": self.has_mask, "width": self.width}

    def features(self, x_t: Tensor, sigma: Tensor | None = None, **_: object) -> Tensor:
        x = self.embedding(x_t)
        return torch.tanh(self.hidden(x + x.mean(1, keepdim=True)))


def folder_of(network: Backbone, path: Path) -> Path:
    process = cedd.absorb(V)
    save_folder(path, ModelFolder(network, process, cedd.get_method("cedd"), LETTERS, 12))
    return path


def custom(kind: type[nn.Module], name: str | None = None, **arguments: int) -> Backbone:
    torch.manual_seed(0)
    return build_network(
        name or f"{kind.__module__}:{kind.__name__}", {"vocab_size": V, "has_mask": True, **arguments}, kind
    )


def test_loading_a_folder_imports_no_outside_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the stored name nor by a name given for another network."""
    folder = folder_of(custom(Convolutions, width=8, depth=1), tmp_path / "mine")
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    for name, given in ((NAME, None), (NAME, "trap:Net"), ("trap:Net", None), ("trap:Net", NAME)):
        (folder / "config.json").write_text(
            json.dumps({**config, "architecture": name, "config_sha256": None}), "utf-8"
        )
        with pytest.raises(ValueError, match=f"add --architecture {name}"):
            load_folder(folder, architecture=given)
    assert "trap" not in sys.modules


@pytest.mark.parametrize("given", [NAME, Convolutions])
def test_folder_is_loaded_with_given_architecture(given: str | type, tmp_path: Path) -> None:
    network = custom(Convolutions, NAME, width=8, depth=1)
    loaded = cedd.load(folder_of(network, tmp_path / "mine"), device="cpu", architecture=given)
    x_t, sigma = torch.randint(V + 1, (3, 12)), torch.rand(3)
    assert torch.equal(loaded.model(x_t, sigma), network.eval()(x_t, sigma))
    assert loaded.model.config() == {"vocab_size": V, "has_mask": True, "width": 8, "depth": 1}
    again = folder_of(loaded.model, tmp_path / "again")
    assert json.loads((again / "config.json").read_text("utf-8"))["architecture"] == NAME
    with pytest.raises(ValueError, match="needs the architecture transformer"):
        numpy_network(loaded, 0.1)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("convolutions", "use transformer, llama, gpt2, or package:Class"),
        ("cedd.nowhere:Net", "could not import cedd.nowhere"),
        ("docs.examples.add_architecture:Convolution", "did you mean 'Convolutions'"),
        ("docs.examples.add_architecture:torch", "add_architecture:torch is not a subclass of torch.nn.Module"),
    ],
)
def test_invalid_architecture_names_are_rejected(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        import_architecture(name)


def test_unknown_names_and_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="unknown architecture 'transfomer'; did you mean 'transformer'"):
        get_architecture("transfomer")
    with pytest.raises(ValueError, match=r"cannot be built: .*unexpected keyword argument 'widht'"):
        custom(Convolutions, widht=8)


def test_architecture_can_be_registered_under_custom_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ARCHITECTURES, "declared", Declared)
    network = build_network("declared", {"vocab_size": V, "has_mask": True})
    assert cedd.load(folder_of(network, tmp_path / "mine"), device="cpu").model.architecture == "declared"


def test_tied_parameters_are_stored_once_with_running_statistics(tmp_path: Path) -> None:
    network = custom(TiedNormed)
    network.train()(torch.randint(V, (4, 12)), torch.rand(4))
    assert set(persistent_buffers(network)) == {
        f"network.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert "network.output.weight" not in stored_tensors(network)
    loaded = load_folder(folder_of(network, tmp_path / "mine"), architecture=TiedNormed).model
    x_t, sigma = torch.randint(V, (3, 12)), torch.rand(3)
    assert torch.equal(loaded(x_t, sigma), network.eval()(x_t, sigma))
    assert loaded.network.output.weight is loaded.network.embedding.weight  # pyright: ignore


@pytest.mark.parametrize("method", ["cedd", "sedd"])
def test_declared_capabilities_do_not_change_loss(method: str) -> None:
    """The head on selected rows and dense outputs give the same loss and gradient."""
    network, process, found = custom(Declared), cedd.roulette(V), []
    assert network.capabilities.head_losses
    x0, t = torch.randint(V, (4, 12)), torch.linspace(0.1, 0.9, 4, dtype=torch.float64)
    for model in (network, lambda x_t, sigma: network(x_t, sigma)):
        network.zero_grad()
        loss = cedd.loss(model, process, x0, method=method, t=t, generator=torch.Generator().manual_seed(0))
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in network.parameters())])
    for fast, dense in zip(*found, strict=True):
        torch.testing.assert_close(fast, dense, check_dtype=False)


def test_plain_module_has_features_and_head() -> None:
    network = custom(Convolutions, width=8, depth=1).eval()
    assert has_head(network)
    assert not trains_on_rows(network)
    assert network.mask_id == V
    x_t, sigma = torch.randint(V + 1, (3, 12)), torch.rand(3)
    rows = Network.of(network, V).rows(x_t, sigma, Places(torch.tensor([3, 20]))).map(lambda outputs, _: outputs)
    torch.testing.assert_close(rows, network(x_t, sigma).flatten(0, 1)[[3, 20]])


def test_parameter_groups_cover_every_parameter_once() -> None:
    for network in (custom(Convolutions), custom(TiedNormed), custom(Declared), transformer()):
        groups = network.parameter_groups()
        names = [name for group in vars(groups).values() for name in group]
        assert sorted(names) == sorted(dict(network.named_parameters()))
        assert all("embedding" in name for name in groups.embeddings)
        assert groups.embeddings
    assert set(custom(Declared).parameter_groups().head) == {"head.weight", "head.bias"}
    matrices = transformer().parameter_groups().matrices
    assert len(matrices) == 2 * 4
    assert all(".blocks." in name for name in matrices)


def test_rates_for_missing_parameter_groups_are_rejected() -> None:
    network = custom(Convolutions)
    for config in (OptimizerConfig(matrices="muon"), OptimizerConfig(head_rate=1e-3)):
        with pytest.raises(ValueError, match="does not have"):
            make_optimizers(network, config)
    assert len(make_optimizers(network, OptimizerConfig(embedding_rate=1e-3))) == 2


def transformer() -> Transformer:
    return Transformer(config_from_preset("tiny", vocab_size=V, has_mask=True))


def test_noise_levels_per_token_need_token_times_capability() -> None:
    x_t, sigma = torch.randint(V + 1, (2, 12)), torch.rand(2, 12)
    places = Places(torch.arange(24))
    with pytest.raises(ValueError, match=r"Capabilities\(token_times=True\)"):
        Network.of(ModuleBackbone(Convolutions(V, True), V, True), V).rows(x_t, sigma, places)
    assert Network.of(transformer(), V).rows(x_t, sigma, places).map(lambda outputs, _: outputs).shape == (24, V)
