"""Networks that others have published, as ours: SEDD, MDLM, DUO, UDLM and GIDD, from their safetensors.

Shapes: V tokens, R rows of the embedding and of the head, D width, C conditioning width.

They share one transformer (DDiT), which is ours but for its layout. Their names, and what is made of them:

    vocab_embed.embedding [R, D]                    embedding: the V tokens, and the mask where there is one
    sigma_map.mlp.0, .2                             conditioning.hidden, .output
    blocks.i.adaLN_modulation [6D, C]               conditioning.modulation, all blocks' stacked, and the last norm's:
    output_layer.adaLN_modulation [2D, C]               shift, scale and gate of attention, then of the MLP
    blocks.i.norm1, norm2, output_layer.norm_final  folded into the scales: w (1 + scale) = 1 + (w scale + w - 1)
    blocks.i.attn_qkv, attn_out, mlp.0, mlp.2       attention.qkv, .output, mlp.hidden, .output (with biases)
    output_layer.linear [R, D]                      head: the V tokens

A family (a row of `FAMILIES`) says how its config.json is recognised, which rows are tokens, what the network is told
of the noise, and which process and method its outputs belong to. Nothing is unpickled, and none of their code is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from cedd.data.tokenizers import GPT2_VOCAB_SIZE, Tokenizer, fitting_tokenizer
from cedd.methods import get_method
from cedd.models.folder import ModelFolder
from cedd.models.locate import CONFIG_FILE, WEIGHTS_FILE, download_model
from cedd.models.stored import reading_tensors
from cedd.models.transformer import Transformer, TransformerConfig
from cedd.models.weights import SkipInitialization
from cedd.process import TokenProcess, absorb, hybrid, uniform
from cedd.schedules import Geometric, LogLinear, Schedule
from cedd.storage import expanded, read_json, reading

SIZES = {
    "width": ("hidden_size", "hidden_dim"),
    "depth": ("n_blocks", "num_hidden_layers"),
    "heads": ("n_heads", "num_attention_heads"),
    "conditioning_width": ("cond_dim", "timestep_cond_dim"),
    "length": ("length", "model_length", "max_seq_len"),
}
"""What configurations call the network's sizes."""
MOST_LENGTH = 65_536
"""Beyond it a configuration is taken for damaged: the angles of its positions alone would fill the memory."""
PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
_EMBEDDING = "vocab_embed.embedding"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DROPPED = re.compile(r"rotary_emb\..*|sampling_eps_(min|max)|logit_bias")
"""Buffers: the angles of the positions, which we compute, the range of times of DUO's training, and GIDD's bias."""


# ----------------------------------------------------------------------------------------------------------------
# Their configurations


@dataclass(frozen=True)
class Description:
    """What config.json says; the sizes of a Hydra configuration are under `model`."""

    values: Mapping[str, Any]
    source: str
    rows: int
    """R, by the weights."""
    inside: str = ""
    """What stands before its settings' names, of a part of a configuration."""

    def find(self, *names: str) -> tuple[str, Any]:
        """The first of these settings that it has, whatever family calls it so, with its name; else all names."""
        inner = self.values.get("model")
        for part in (inner if isinstance(inner, Mapping) else {}, self.values):
            for name in names:
                if part.get(name) is not None:
                    return self.inside + name, part[name]
        return self.inside + " or ".join(names), None

    def get(self, *names: str, default: Any = None) -> Any:
        """Its value, or the default where it is not there."""
        value = self.find(*names)[1]
        return default if value is None else value

    def part(self, name: str) -> Description:
        """The settings that stand under a name."""
        if not isinstance(self.values.get(name), Mapping):
            raise ValueError(f"{self.source}: {name} is {self.values.get(name)!r}, but must hold settings")
        return Description(self.values[name], self.source, self.rows, f"{name}.")

    def whole(self, *names: str, least: int = 1, most: int | None = None, default: int | None = None) -> int:
        """A setting that is a whole number."""
        name, value = self.find(*names)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{self.source} gives no whole number as {name}; got {value!r}")
        if value < least or (most is not None and value > most):
            raise ValueError(f"{self.source}: {name} must be {_range(least, most)}; got {value}")
        return value

    def share(self, *names: str, zero: bool = True, below: float = 1.0, default: float | None = None) -> float:
        """A setting that is a number from 0, or above it, to below another."""
        name, value = self.find(*names)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.source} gives no number as {name}; got {value!r}")
        if not 0 <= value < below or (value == 0 and not zero):
            least = "at least 0" if zero else "above 0"
            raise ValueError(f"{self.source}: {name} must be {least} and below {below:g}; got {value}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A setting that is true or false."""
        name, value = self.find(name)
        if value not in (None, True, False):
            raise ValueError(f"{self.source}: {name} must be true or false; got {value!r}")
        return default if value is None else bool(value)

    @property
    def kind(self) -> str:
        """Its model_type, in small letters; empty where it has none."""
        return str(self.values.get("model_type", "")).lower()

    def refuse(self, name: str, wanted: Any, why: str) -> None:
        """Refuse a setting of another value, if it is there."""
        value = self.get(name, default=wanted)
        if value != wanted:
            raise ValueError(f"{self.source}: {name} is {value!r}; {why}")


@dataclass(frozen=True)
class Family:
    """The conventions of one project's networks.

    Args:
        name: what the project is called.
        recognises: whether a config.json is one of its own.
        tokens: V, of the R rows the first; what can be read from them but not imported is refused here.
        process: the forward process over V tokens.
        method: what the outputs mean.
        told: what the network is told of the noise (see `NetworkOptions.told`).
        tokenizer: the tokenizer that its released networks were trained with.
        counted: what its configurations call the number of tokens.
        rows_in: the number that the rows may be rounded up to a multiple of.
        wrapped: whether its blocks stood between the tokens that begin and end a document.
    """

    name: str
    recognises: Callable[[Description], bool]
    tokens: Callable[[Description], int]
    process: Callable[[int, Description], TokenProcess]
    method: Callable[[Description], str]
    told: Callable[[Description], str]
    tokenizer: str
    counted: str = "vocab_size"
    rows_in: int = 1
    wrapped: Callable[[Description], bool] = lambda _: False


def _range(least: int, most: int | None) -> str:
    return f"at least {least}" if most is None else f"from {least} to {most}"


def _sedd_process(vocab_size: int, config: Description) -> TokenProcess:
    noise, graph = config.part("noise"), config.part("graph")
    schedules: dict[str, Callable[[], Schedule]] = {
        "loglinear": lambda: LogLinear(1e-3),
        "geometric": lambda: _geometric(noise),
    }
    kinds = {"absorb": absorb, "uniform": uniform}
    for part, table in ((noise, schedules), (graph, kinds)):
        if str(part.get("type")) not in table:
            raise ValueError(
                f"{config.source}: {part.inside}type is {part.get('type')!r}; it must be {' or '.join(table)}"
            )
    return kinds[graph.get("type")](vocab_size, schedules[noise.get("type")]())


def _sedd_method(config: Description) -> str:
    """Scaled scores are those of masks: theirs at other tokens are not defined."""
    scaled, graph = config.flag("scale_by_sigma", default=False), config.part("graph").get("type")
    if scaled and graph != "absorb":
        raise ValueError(
            f"{config.source}: scale_by_sigma is true, which SEDD's networks are on absorb only, not {graph}"
        )
    return "sedds" if scaled else "sedd"


def _geometric(noise: Description) -> Schedule:
    ends = [noise.get(name) for name in ("sigma_min", "sigma_max")]
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends) or not 0 < ends[0] < ends[1]:
        raise ValueError(
            f"{noise.source}: noise.sigma_min and noise.sigma_max must be numbers, 0 < min < max; got {ends}"
        )
    return Geometric(*ends)


def _masked_tokens(config: Description) -> int:
    """All rows but the mask's, which is the last; of block diffusion only what has a single block."""
    config.refuse("causal", False, "an autoregressive network is not imported")
    config.refuse("adaln", True, "a network without adaptive norms is not imported")
    length = config.whole(*SIZES["length"])
    if config.kind == "bd3lm" and (block := config.whole("block_size", default=length)) < length:
        raise ValueError(
            f"{config.source}: block_size is {block}; block diffusion is imported only where one "
            f"block is the whole length, {length}"
        )
    return config.whole("vocab_size", least=3, default=config.rows) - 1


def _mdlm_tokens(config: Description) -> int:
    """The same; the configuration of a training run, as SDTT's, says whether its outputs are a denoiser's."""
    value = config.get("parameterization", default="subs")
    name = value.get("name") if isinstance(value, Mapping) else value
    if name not in ("subs", "sdtt", "multi-round-sdtt"):
        raise ValueError(f"{config.source}: parameterization is {name!r}; it must be subs or multi-round-sdtt")
    return _masked_tokens(config)


def _hybrid_tokens(config: Description) -> int:
    """The same, unless vocab_size does not count the mask: where mask_token_id says so, where there is one row more, or
    where it is the number of GPT-2's tokens with [PAD], which all of GIDD's networks have."""
    counting, size = _masked_tokens(config), config.get("vocab_size")
    uncounted = size is not None and (config.rows == size + 1 or (config.rows > size == GPT2_VOCAB_SIZE + 1))
    return config.whole("mask_token_id", least=2, default=counting + int(uncounted))


def _unmasked_tokens(config: Description) -> int:
    """All rows."""
    config.refuse("causal", False, "an autoregressive network is not imported")
    config.refuse("cfg", False, "a network that is conditioned on labels is not imported")
    return config.whole("vocab_size", least=2, default=config.rows)


def _told_sigma(config: Description) -> str:
    return "sigma" if config.flag("time_conditioning", default=True) else "nothing"


FAMILIES: tuple[Family, ...] = (
    Family(
        "SEDD",
        lambda config: not config.kind and {"graph", "noise", "tokens", "model"} <= config.values.keys(),
        tokens=lambda config: config.whole("tokens", least=2),
        process=_sedd_process,
        method=_sedd_method,
        told=lambda _: "sigma",
        tokenizer="gpt2",
        counted="tokens",
    ),
    Family(
        "MDLM",  # and what was made of it: bd3lms' without EOS, and SDTT's students, which have Hydra's configuration
        lambda config: config.kind in ("mdlm", "bd3lm") or {"parameterization", "model"} <= config.values.keys(),
        tokens=_mdlm_tokens,
        process=lambda vocab_size, _: absorb(vocab_size),
        method=lambda _: "ceddt",
        told=lambda config: "sigma" if config.flag("time_conditioning", default=False) else "nothing",
        tokenizer="gpt2",
        wrapped=lambda config: config.kind != "bd3lm",
    ),
    Family(
        "DUO",
        lambda config: config.kind == "duo",
        tokens=_unmasked_tokens,
        process=lambda vocab_size, _: uniform(vocab_size),
        method=lambda _: "bayes",
        told=_told_sigma,
        tokenizer="gpt2",
        wrapped=lambda _: True,
    ),
    Family(
        "UDLM",
        lambda config: config.kind == "udlm",
        tokens=_unmasked_tokens,
        process=lambda vocab_size, _: uniform(vocab_size),
        method=lambda _: "bayes",
        told=_told_sigma,
        tokenizer="bert",
    ),
    Family(
        "GIDD",
        lambda config: config.get("p_uniform") is not None,
        tokens=_hybrid_tokens,
        process=lambda vocab_size, config: hybrid(
            vocab_size, config.share("p_uniform"), eps=config.share("t_eps", zero=False, below=0.5, default=1e-4)
        ),
        method=lambda _: "bayes",
        told=lambda config: f"hybrid-time:{config.share('p_uniform')}",
        tokenizer="gpt2",
        rows_in=128,
    ),
)


def family_of(config: Description) -> Family:
    """The family that recognises a configuration."""
    for family in FAMILIES:
        if family.recognises(config):
            return family
    known = ", ".join(family.name for family in FAMILIES)
    if code := config.values.get("auto_map"):
        name = sorted(str(place) for place in code.values())[0] if isinstance(code, Mapping) else code
        raise ValueError(f"{config.source}: its network is remote code ({name}), which is never run; known are {known}")
    kind = config.values.get("model_type")
    what = "has no model_type" if kind is None else f"describes a model of type {kind!r}"
    raise ValueError(f"{config.source} {what} and is of no family that is imported: {known}")


# ----------------------------------------------------------------------------------------------------------------
# Their tensors


class Checkpoint:
    """The tensors of a safetensors file by their names without the prefix, read one at a time, in float32."""

    def __init__(self, file: Any, source: Path) -> None:
        self.file, self.source = file, source
        names = list(file.keys())
        found = [name for name in names if name == _EMBEDDING or name.endswith(f".{_EMBEDDING}")]
        if len(found) != 1:
            raise ValueError(f"{source} is not one of these networks: it has {len(found)} tensors {_EMBEDDING}")
        prefix = found[0].removesuffix(_EMBEDDING)
        self.names = {name.removeprefix(prefix): name for name in names}
        self.unread = {name for name in self.names if not _DROPPED.fullmatch(name)}
        self._check_buffers()

    def shape(self, name: str) -> list[int]:
        return self.file.get_slice(self.names[name]).get_shape()

    def take(self, name: str, *shape: int, first: int | None = None) -> Tensor:
        """A tensor that must be there in this shape, of finite floating-point numbers; or the first of its rows."""
        if name not in self.names:
            raise ValueError(f"{self.source} lacks {name}")
        if self.shape(name) != list(shape):
            raise ValueError(f"{self.source}: {name} is {self.shape(name)}, but config.json asks for {list(shape)}")
        self.unread.discard(name)
        stored = self.file.get_tensor(self.names[name])
        if stored.dtype not in _FLOATS:
            kinds = ", ".join(map(_dtype_name, _FLOATS))
            raise ValueError(f"{self.source}: {name} is of {_dtype_name(stored.dtype)}; weights are of {kinds}")
        taken = stored[:first].float()
        if not all(end.isfinite() for end in torch.aminmax(taken)):  # which pass on nan
            raise ValueError(f"{self.source}: {name} holds numbers that are not finite")
        return taken

    def check_size(self, network: TransformerConfig, config: Description) -> None:
        """Refuse sizes that the tensors have not, before a network of them is built."""
        for name, size in (
            (_EMBEDDING, "width"),
            ("sigma_map.mlp.2.weight", "conditioning_width"),
            (f"blocks.{network.depth - 1}.attn_out.weight", "width"),
        ):
            if name not in self.names:
                depth = f"{config.find(*SIZES['depth'])[0]} is {network.depth}"
                raise ValueError(f"{self.source} lacks {name}" + f"; {depth}" * name.startswith("blocks."))
            setting, wanted = config.find(*SIZES[size])
            if self.shape(name)[-1:] != [wanted]:
                raise ValueError(
                    f"{self.source}: {name} is {self.shape(name)}, but config.json asks for {wanted} columns, "
                    f"its {setting}"
                )
        turns, name = network.width // network.heads // 2, "rotary_emb.inv_freq"
        if name in self.names and self.shape(name) != [turns]:
            raise ValueError(f"{self.source}: {name} is {self.shape(name)}, but {network.heads} heads need {[turns]}")

    def _check_buffers(self) -> None:
        """Refuse turns by other angles than ours, and a bias that our network has not."""
        if "rotary_emb.inv_freq" in self.names:
            found = self.file.get_tensor(self.names["rotary_emb.inv_freq"]).double()
            ours = 10_000.0 ** -(torch.arange(len(found), dtype=torch.float64) / len(found))
            if not torch.allclose(found, ours, rtol=5e-3, atol=0):  # bfloat16 rounds by 4e-3
                raise ValueError(f"{self.source}: rotary_emb.inv_freq has other frequencies than 10000^(-2j/W)")
        if "logit_bias" in self.names and bool(self.file.get_tensor(self.names["logit_bias"]).any()):
            raise ValueError(f"{self.source}: logit_bias is not 0, as it is in all released networks")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """The checkpoint in a file, memory-mapped."""
    with reading_tensors(path), safe_open(path, "pt") as file:
        yield Checkpoint(file, path)


def _parts(config: TransformerConfig, rows: int) -> Iterator[tuple[str, Callable[[Checkpoint], Tensor]]]:
    """The name of each of our tensors, and how it is made of theirs."""
    D, C, V, inner = config.width, config.conditioning_width, config.vocab_size, config.mlp_ratio * config.width

    def plain(name: str, *shape: int) -> Callable[[Checkpoint], Tensor]:
        return lambda file: file.take(name, *shape)

    states = V + int(config.has_mask)
    yield "backbone.embedding.weight", lambda file: file.take(_EMBEDDING, rows, D, first=states)
    for ours, theirs, width in (("hidden", 0, 256), ("output", 2, C)):
        yield f"backbone.conditioning.{ours}.weight", plain(f"sigma_map.mlp.{theirs}.weight", C, width)
        yield f"backbone.conditioning.{ours}.bias", plain(f"sigma_map.mlp.{theirs}.bias", C)
    for leaf, columns in (("weight", (C,)), ("bias", ())):
        yield f"backbone.conditioning.modulation.{leaf}", lambda f, k=leaf, c=columns: _modulation(f, config, k, c)
    for i in range(config.depth):
        for ours, theirs, shape in (("qkv", "attn_qkv", (3 * D, D)), ("output", "attn_out", (D, D))):
            yield f"backbone.blocks.{i}.attention.{ours}.weight", plain(f"blocks.{i}.{theirs}.weight", *shape)
        for ours, theirs, shape in (("hidden", 0, (inner, D)), ("output", 2, (D, inner))):
            yield f"backbone.blocks.{i}.mlp.{ours}.weight", plain(f"blocks.{i}.mlp.{theirs}.weight", *shape)
            yield f"backbone.blocks.{i}.mlp.{ours}.bias", plain(f"blocks.{i}.mlp.{theirs}.bias", shape[0])
    yield "head.weight", lambda file: file.take("output_layer.linear.weight", rows, D, first=V)
    yield "head.bias", lambda file: file.take("output_layer.linear.bias", rows, first=V)


def _modulation(file: Checkpoint, config: TransformerConfig, leaf: str, columns: Sequence[int]) -> Tensor:
    """The modulations of all branches and of the last norm, with the norms' weights w folded into the scales:

    w (1 + scale) = 1 + scale',    scale' = w scale + w - 1: the last two are the bias's.
    """
    D, stacked = config.width, list[Tensor]()
    branches = [(f"blocks.{i}", ("norm1", "norm2"), 3) for i in range(config.depth)]
    for place, norms, each in [*branches, ("output_layer", ("norm_final",), 2)]:
        linear = file.take(f"{place}.adaLN_modulation.{leaf}", each * len(norms) * D, *columns).clone()
        parts = linear.unflatten(0, (len(norms), each, D))
        for norm, branch in zip(norms, parts, strict=True):
            weight = file.take(f"{place}.{norm}.weight", D).view(D, *(1 for _ in columns))
            branch[1] = weight * branch[1] + (weight - 1 if leaf == "bias" else 0)
        stacked.append(linear)
    return torch.cat(stacked)


# ----------------------------------------------------------------------------------------------------------------
# The whole


def import_folder(path_or_name: str | Path, tokenizer: str | Path | None = None, **options: Any) -> ModelFolder:
    """A published network as a model folder's content, in evaluation mode.

    Args:
        path_or_name: a folder with config.json and model.safetensors, or owner/name on the hub.
        tokenizer: gpt2, bert, a folder that has one, or none, for which texts are numbers of tokens. By default the one
            that the released networks were trained with, or none where the network has another number of tokens.
        options: how the hub is asked: revision, token, cache_dir, ... of `snapshot_download`.
    """
    folder = _folder(path_or_name, options)
    config_file, weights_file = folder / CONFIG_FILE, _weights(folder)
    if not config_file.is_file():
        raise ValueError(f"{folder} has no {CONFIG_FILE}, which says what network it is")
    values = read_json(config_file)
    with open_checkpoint(weights_file) as checkpoint, reading(folder):
        rows = checkpoint.shape(_EMBEDDING)[0]
        description = Description(values, str(config_file), rows)
        family = family_of(description)
        vocab_size = family.tokens(description)
        process = family.process(vocab_size, description)
        wanted = process.num_states
        if rows != wanted and rows != -(-wanted // family.rows_in) * family.rows_in:
            raise ValueError(
                f"{weights_file}: {_EMBEDDING} has {rows} rows, but {config_file} ({family.counted}) asks for {wanted}"
            )
        chosen = _tokenizer(tokenizer, family, vocab_size)
        network = TransformerConfig(
            **_sizes(description),
            dropout=description.share("dropout", "attention_dropout", default=0.1),
            vocab_size=vocab_size,
            has_mask=process.has_mask,
            float32_residual=True,
            mlp_bias=True,
            told=family.told(description),
        )
        checkpoint.check_size(network, description)
        with SkipInitialization():
            model = Transformer(network)
        _fill(model, checkpoint, network, rows)
    # of a folder the name is enough: where it was is nobody's business
    local = expanded(path_or_name) == folder
    origin = {"family": family.name, "source": folder.resolve().name if local else str(path_or_name)}
    origin |= {"wrap": "bos-eos"} if family.wrapped(description) and chosen.eos_id is not None else {}
    model = model.eval().requires_grad_(False)
    config = {"imported": origin}
    return ModelFolder(model, process, get_method(family.method(description)), chosen, network.length, config, folder)


def _sizes(config: Description) -> dict[str, Any]:
    """The network's sizes by our names."""
    limits = {"length": MOST_LENGTH}
    found = {ours: config.whole(*theirs, most=limits.get(ours)) for ours, theirs in SIZES.items()}
    if found["width"] % (2 * found["heads"]):
        (width, wide), (heads, many) = (config.find(*SIZES[size]) for size in ("width", "heads"))
        raise ValueError(f"{config.source}: {width} {wide} does not divide into heads of an even size, {heads} {many}")
    return found


@torch.no_grad()
def _fill(model: Transformer, checkpoint: Checkpoint, network: TransformerConfig, rows: int) -> None:
    """Every parameter of the model from the checkpoint, all of whose tensors must be used."""
    state = model.state_dict()
    for name, make in _parts(network, rows):
        state.pop(name).copy_(make(checkpoint))
    assert not state, f"no map for {sorted(state)}"
    if checkpoint.unread:
        first = min(checkpoint.unread)
        raise ValueError(
            f"{checkpoint.source} holds {len(checkpoint.unread)} tensors that have no place, first {first}"
        )


def _folder(path_or_name: str | Path, options: dict[str, Any]) -> Path:
    path, name = expanded(path_or_name), str(path_or_name)
    if path.is_dir():
        return path
    if path.suffix in PICKLES:
        raise ValueError(f"{path} is a pickle, which can run code when it is read; only safetensors are imported")
    if path.is_file():
        raise ValueError(f"{path} is a file; name the folder that has {CONFIG_FILE} and {WEIGHTS_FILE}")
    if name.count("/") != 1 or name.startswith((".", "~", "/")) or path.parent.exists():
        raise ValueError(f"there is no folder {path}; on the hub, names are owner/name")
    return download_model(name, [CONFIG_FILE, WEIGHTS_FILE], options)


def _weights(folder: Path) -> Path:
    """The safetensors of a folder; what else there is instead is named."""
    file = folder / WEIGHTS_FILE
    if file.is_file():
        return file
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in PICKLES)
    if pickles:
        raise ValueError(
            f"{folder / pickles[0]} is a pickle, which can run code when it is read; only safetensors are imported"
        )
    raise ValueError(f"{folder} has no {WEIGHTS_FILE}")


def _tokenizer(asked: str | Path | None, family: Family, vocab_size: int) -> Tokenizer:
    name = family.tokenizer if asked is None else str(asked)
    return fitting_tokenizer(name, vocab_size, required=asked is not None)
