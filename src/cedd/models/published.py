"""Import published networks from safetensors: SEDD, MDLM, BD3-LM, DUO, UDLM and GIDD.

Shapes: V tokens, R rows of the embedding and of the head, D width, C conditioning width.

They share one transformer (DDiT), which is that of cedd with another layout. Their tensors, and those of cedd:

    vocab_embed.embedding [R, D]                    embedding: the V tokens, and the mask where there is one
    sigma_map.mlp.0, .2                             conditioning.hidden, .output
    blocks.i.adaLN_modulation [6D, C]               conditioning.modulation, stacked over blocks and the last norm:
    output_layer.adaLN_modulation [2D, C]               shift, scale and gate of attention, then of the MLP
    blocks.i.norm1, norm2, output_layer.norm_final  folded into the scales: w (1 + scale) = 1 + (w scale + w - 1)
    blocks.i.attn_qkv, attn_out, mlp.0, mlp.2       attention.qkv, .output, mlp.hidden, .output (with biases)
    output_layer.linear [R, D]                      head: the V tokens

A family (a row of `FAMILIES`) defines how its config.json is recognised, which rows are tokens, the time input, and
the process and method that its outputs belong to. Nothing is unpickled, and no foreign code is run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from cedd.block_layout import InBlocks, earlier_blocks
from cedd.data.tokenizers import BERT_VOCAB_SIZE, GPT2_VOCAB_SIZE, Tokenizer, fitting_tokenizer
from cedd.methods import get_method
from cedd.models.folder import ModelFolder
from cedd.models.import_config import Description
from cedd.models.locate import CONFIG_FILE, WEIGHTS_FILE, download_model
from cedd.models.numpy_weights import reading_tensors
from cedd.models.published_llama import LLAMA_FAMILIES, LlamaFamily, import_gguf, import_llama, llama_family_of
from cedd.models.tensor_files import INDEX_FILE, check_shard, shards_of
from cedd.models.transformer import Transformer, TransformerConfig
from cedd.models.weights import SkipInitialization
from cedd.process import TokenProcess, absorb, hybrid, uniform
from cedd.schedules import Geometric, LogLinear, Schedule
from cedd.storage import JSONObject, expanded, read_json, reading

SIZES = {
    "width": ("hidden_size", "hidden_dim"),
    "depth": ("n_blocks", "num_hidden_layers"),
    "heads": ("n_heads", "num_attention_heads"),
    "conditioning_width": ("cond_dim", "timestep_cond_dim"),
    "length": ("length", "model_length", "max_seq_len"),
}
"""The names of the network's sizes in configurations."""
MOST_LENGTH = 65_536
"""Longer contexts are rejected as damaged: the rotary angles alone would fill the memory."""
GGUF = ".gguf"
_ON_THE_HUB = [
    *(CONFIG_FILE, "generation_config.json", "model*.safetensors", INDEX_FILE),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "added_tokens.json"),
]
PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
_EMBEDDING = "vocab_embed.embedding"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DROPPED = re.compile(r"rotary_emb\..*|(.*\.)?sampling_eps_(min|max)|logit_bias")
"""Buffers that are not imported: rotary angles (computed here), DUO's range of training times, and GIDD's bias."""


# ----------------------------------------------------------------------------------------------------------------
# Their configurations


@dataclass(frozen=True)
class Family:
    """The conventions of one project's networks.

    Args:
        name: name of the project.
        recognises: whether a config.json belongs to this family.
        tokens: V, the number of rows that are tokens (the first of R); raises an error for unsupported configurations.
        process: the forward process over V tokens.
        method: what the outputs mean.
        time_input: see `NetworkOptions.time_input`.
        tokenizer: the tokenizer that its released networks were trained with.
        counted: name of the number of tokens in its configurations.
        finish: the last operation of the original network on its outputs [B, L, R], given its ids and sigma.
        block: the number of tokens of a block, for block diffusion.
        rows_in: the number of rows may be rounded up to a multiple of this.
        wrapped: whether training sequences were put between the tokens that begin and end a document.
    """

    name: str
    recognises: Callable[[Description], bool]
    tokens: Callable[[Description], int]
    process: Callable[[int, Description], TokenProcess]
    method: Callable[[Description], str]
    time_input: Callable[[Description], str]
    tokenizer: str
    finish: Callable[[Tensor, Tensor, Tensor, Description], Tensor] = lambda outputs, *_: outputs
    counted: str = "vocab_size"
    block: Callable[[Description], int | None] = lambda _: None
    rows_in: int = 1
    wrapped: Callable[[Description], bool] = lambda _: False


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
    """Scaled scores, which are defined at masks only."""
    scaled, graph = config.flag("scale_by_sigma", default=False), config.part("graph").get("type")
    if scaled and graph != "absorb":
        raise ValueError(
            f"{config.source}: scale_by_sigma is true, which SEDD's networks are on absorb only, not {graph}"
        )
    return "sedds" if scaled else "sedd"


def _sedd_scores(outputs: Tensor, ids: Tensor, sigma: Tensor, config: Description) -> Tensor:
    """Log scores, 0 at the current token; scaled ones are divided by V (e^sigma - 1)."""
    if config.flag("scale_by_sigma", default=False):
        scale = torch.log(torch.expm1(sigma)) + math.log(outputs.shape[-1] - 1)
        outputs = outputs - scale[:, None, None]
    return outputs.scatter(-1, ids[..., None], 0.0)


def _geometric(noise: Description) -> Schedule:
    ends = [noise.get(name) for name in ("sigma_min", "sigma_max")]
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends) or not 0 < ends[0] < ends[1]:
        raise ValueError(
            f"{noise.source}: noise.sigma_min and noise.sigma_max must be numbers, 0 < min < max (got {ends})"
        )
    return Geometric(*ends)


def _masked_tokens(config: Description) -> int:
    """All rows but the last, which is the mask."""
    config.refuse("causal", False, "an autoregressive network is not imported")
    config.refuse("adaln", True, "a network without adaptive norms is not imported")
    return config.whole("vocab_size", least=3, default=config.rows) - 1


def _mdlm_tokens(config: Description) -> int:
    """The same; configurations of training runs (SDTT) state whether the outputs are those of a denoiser."""
    value = config.get("parameterization", default="subs")
    name = value.get("name") if isinstance(value, Mapping) else value
    if name not in ("subs", "sdtt", "multi-round-sdtt"):
        raise ValueError(f"{config.source}: parameterization is {name!r}; it must be subs or multi-round-sdtt")
    if config.get("vocab_size", default=config.rows) == BERT_VOCAB_SIZE:
        raise ValueError(f"{config.source}: networks of BERT's tokens, among which is the mask, are not imported")
    return _masked_tokens(config)


def _block_size(config: Description) -> int | None:
    """The block length of BD3-LM; None if a block is the whole sequence, as in MDLM."""
    length = config.whole(*SIZES["length"])
    block = config.whole("block_size", most=length, default=length) if config.kind == "bd3lm" else length
    if block == length:
        return None
    if length % block:
        raise ValueError(f"{config.source}: block_size {block} does not divide the length, {length}")
    config.refuse("cross_attn", True, "blocks are imported only if they attend to the clean text before them")
    config.refuse("time_conditioning", False, "networks of blocks are imported only without time conditioning")
    return block


def _hybrid_tokens(config: Description) -> int:
    """The same, unless vocab_size does not count the mask: where mask_token_id says so, where there is one row more, or
    where it is the number of GPT-2's tokens with [PAD], which all of GIDD's networks have."""
    counting, size = _masked_tokens(config), config.get("vocab_size")
    uncounted = size is not None and (config.rows == size + 1 or (config.rows > size == GPT2_VOCAB_SIZE + 1))
    return config.whole("mask_token_id", least=2, default=counting + int(uncounted))


def _unmasked_tokens(config: Description) -> int:
    """The number of all rows."""
    config.refuse("causal", False, "an autoregressive network is not imported")
    config.refuse("cfg", False, "a network that is conditioned on labels is not imported")
    return config.whole("vocab_size", least=2, default=config.rows)


def _sigma_input(config: Description) -> str:
    return "sigma" if config.flag("time_conditioning", default=True) else "none"


FAMILIES: tuple[Family, ...] = (
    Family(
        "SEDD",
        lambda config: not config.kind and {"graph", "noise", "tokens", "model"} <= config.values.keys(),
        tokens=lambda config: config.whole("tokens", least=2),
        process=_sedd_process,
        method=_sedd_method,
        time_input=lambda _: "sigma",
        tokenizer="gpt2",
        finish=_sedd_scores,
        counted="tokens",
    ),
    Family(
        "MDLM",  # and what was made of it: BD3-LM, and SDTT's students, which have Hydra's configuration
        lambda config: config.kind in ("mdlm", "bd3lm") or {"parameterization", "model"} <= config.values.keys(),
        tokens=_mdlm_tokens,
        process=lambda vocab_size, _: absorb(vocab_size),
        method=lambda _: "ceddt",
        time_input=lambda config: "sigma" if config.flag("time_conditioning", default=False) else "none",
        tokenizer="gpt2",
        block=_block_size,
        wrapped=lambda config: config.kind != "bd3lm",
    ),
    Family(
        "DUO",
        lambda config: config.kind == "duo",
        tokens=_unmasked_tokens,
        process=lambda vocab_size, _: uniform(vocab_size),
        method=lambda _: "bayes",
        time_input=_sigma_input,
        tokenizer="gpt2",
        wrapped=lambda _: True,
    ),
    Family(
        "UDLM",
        lambda config: config.kind == "udlm",
        tokens=_unmasked_tokens,
        process=lambda vocab_size, _: uniform(vocab_size),
        method=lambda _: "bayes",
        time_input=_sigma_input,
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
        time_input=lambda config: f"hybrid-time:{config.share('p_uniform')}",
        tokenizer="gpt2",
        rows_in=128,
    ),
)


def family_of(config: Description) -> Family:
    """The family that recognises a configuration."""
    for family in FAMILIES:
        if family.recognises(config):
            return family
    known = ", ".join(family.name for family in (*FAMILIES, *LLAMA_FAMILIES))
    if code := config.values.get("auto_map"):
        name = sorted(str(place) for place in code.values())[0] if isinstance(code, Mapping) else code
        raise ValueError(
            f"{config.source}: its network is remote code ({name}), which is never run; cedd imports {known}"
        )
    if {"format", "method", "process"} <= config.values.keys():
        raise ValueError(f"{config.source} describes a model of cedd, which commands take without an import")
    kind = config.values.get("model_type")
    what = "model_type is missing" if kind is None else f"unsupported model_type {kind!r}"
    raise ValueError(f"{config.source}: {what}; cedd imports {known}")


# ----------------------------------------------------------------------------------------------------------------
# Their tensors


class Checkpoint:
    """The tensors of safetensors files by name without the prefix, read one at a time, in float32."""

    def __init__(self, files: Mapping[str, Any], source: Path) -> None:
        self.files, self.source = files, source
        """The opened file of each tensor, and the name in messages."""
        names = list(files)
        found = [name for name in names if name == _EMBEDDING or name.endswith(f".{_EMBEDDING}")]
        if len(found) != 1:
            raise ValueError(
                f"{source} is not an SEDD, MDLM, DUO, UDLM or GIDD network: it has {len(found)} tensors {_EMBEDDING}"
            )
        prefix = found[0].removesuffix(_EMBEDDING)
        self.names = {name.removeprefix(prefix): name for name in names}
        self.unread = {name for name in self.names if not _DROPPED.fullmatch(name)}
        self._check_buffers()

    def shape(self, name: str) -> list[int]:
        return self.slice(name).get_shape()

    def slice(self, name: str) -> Any:
        """A tensor whose rows are read when they are indexed."""
        return self.files[self.names[name]].get_slice(self.names[name])

    def whole(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        return self.files[self.names[name]].get_tensor(self.names[name])

    def take(self, name: str, *shape: int, first: int | None = None) -> Tensor:
        """A tensor that must be there in this shape, of finite floating-point numbers; or the first of its rows."""
        if name not in self.names:
            raise ValueError(f"{self.source} lacks {name}")
        if self.shape(name) != list(shape):
            raise ValueError(f"{self.source}: {name} is {self.shape(name)}, but config.json requires {list(shape)}")
        self.unread.discard(name)
        stored = self.whole(name)
        if stored.dtype not in _FLOATS:
            kinds = ", ".join(map(_dtype_name, _FLOATS))
            raise ValueError(f"{self.source}: {name} is of {_dtype_name(stored.dtype)}; weights are of {kinds}")
        taken = stored[:first].float()
        if not all(end.isfinite() for end in torch.aminmax(taken)):  # aminmax propagates nan
            raise ValueError(f"{self.source}: {name} holds numbers that are not finite")
        return taken

    def check_size(self, network: TransformerConfig, config: Description) -> None:
        """Raise an error if sizes in the configuration differ from those of the tensors."""
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
                    f"{self.source}: {name} is {self.shape(name)}, but config.json requires {wanted} columns, "
                    f"its {setting}"
                )
        turns, name = network.width // network.heads // 2, "rotary_emb.inv_freq"
        if name in self.names and self.shape(name) != [turns]:
            raise ValueError(f"{self.source}: {name} is {self.shape(name)}, but {network.heads} heads need {[turns]}")

    def _check_buffers(self) -> None:
        """Raise an error for other rotary angles, and for a bias that cedd's network does not have."""
        if "rotary_emb.inv_freq" in self.names:
            found = self.whole("rotary_emb.inv_freq").double()
            ours = 10_000.0 ** -(torch.arange(len(found), dtype=torch.float64) / len(found))
            if not torch.allclose(found, ours, rtol=5e-3, atol=0):  # bfloat16 rounds by 4e-3
                raise ValueError(f"{self.source}: rotary_emb.inv_freq has other frequencies than 10000^(-2j/W)")
        if "logit_bias" in self.names and bool(self.whole("logit_bias").any()):
            raise ValueError(f"{self.source}: logit_bias is not 0, as it is in all released networks")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """The checkpoint in a folder, of one file or several shards, memory-mapped."""
    shards, files = shards_of(folder), dict[str, Any]()
    with ExitStack() as opened:
        for path, listed in shards.items():
            opened.enter_context(reading_tensors(path))
            file = opened.enter_context(safe_open(path, "pt"))
            found = check_shard(path, listed, list(file.keys()), files)
            files |= dict.fromkeys(found, file)
        yield Checkpoint(files, next(iter(shards)) if len(shards) == 1 else folder / INDEX_FILE)


def _parts(config: TransformerConfig, rows: int) -> Iterator[tuple[str, Callable[[Checkpoint], Tensor]]]:
    """The name of each tensor of cedd, with its source in the checkpoint."""
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


def import_folder(
    path_or_name: str | Path,
    tokenizer: str | Path | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    mask_id: int | None = None,
    **options: Any,
) -> ModelFolder:
    """Read a published network as the content of a model folder, in evaluation mode.

    Args:
        path_or_name: a folder with config.json and safetensors (one file or shards), a GGUF file, or owner/name on the
            hub.
        tokenizer: gpt2, bert, a folder with a tokenizer, or none (texts are token ids). The default is the tokenizer of
            the released networks, or none if the network has another number of tokens.
        device: where the parameters of Llama-type networks are created.
        dtype: dtype of the parameters of Llama-type networks; by default that of the file.
        mask_id: the id of the mask, if neither config.json nor the tokenizer contains it.
        options: arguments of the download (`snapshot_download`): revision, token, cache_dir, ...
    """
    local = expanded(path_or_name)
    if local.suffix == GGUF and local.is_file():
        return _described(*import_gguf(local, tokenizer, device=torch.device(device), dtype=dtype), local.name)
    folder = _folder(path_or_name, options)
    # only the name of a folder: its path is private
    source = folder.resolve().name if local == folder else str(path_or_name)
    config_file = folder / CONFIG_FILE
    if not config_file.is_file():
        return _from_gguf_in(folder, tokenizer, torch.device(device), dtype)
    description = Description(read_json(config_file), str(config_file), 0)
    llama = llama_family_of(description, source)
    if llama is not None:
        _refuse_pickles(folder)
        chosen = {"device": torch.device(device), "dtype": dtype, "mask_id": mask_id}
        with reading(folder):
            return _described(*import_llama(llama, folder, description, tokenizer, **chosen), source)
    return _import_ddit(folder, description, tokenizer, source)


def _described(family: LlamaFamily, made: ModelFolder, source: str) -> ModelFolder:
    """The same, with the origin that config.json stores."""
    return replace(made, config={"imported": {"family": family.name, "source": source}})


def _from_gguf_in(
    folder: Path, tokenizer: str | Path | None, device: torch.device, dtype: torch.dtype | None
) -> ModelFolder:
    """The network in the only GGUF file of a folder without a config.json."""
    found = sorted(folder.glob(f"*{GGUF}"))
    if len(found) > 1:
        raise ValueError(f"{folder} has {len(found)} GGUF files; name one of them, such as {found[0]}")
    if not found:
        raise ValueError(f"{folder} has no {CONFIG_FILE}, which describes the network")
    return _described(*import_gguf(found[0], tokenizer, device=device, dtype=dtype), found[0].name)


def _import_ddit(folder: Path, given: Description, tokenizer: str | Path | None, source: str) -> ModelFolder:
    """A network of the DDiT families."""
    config_file, values = given.source, given.values
    family = family_of(given)
    given.refuse("quantization_config", None, "quantized networks of this family are not imported")
    _refuse_pickles(folder)
    with open_checkpoint(folder) as checkpoint, reading(folder):
        rows = checkpoint.shape(_EMBEDDING)[0]
        description = Description(values, str(config_file), rows)
        vocab_size = family.tokens(description)
        process = family.process(vocab_size, description)
        wanted = process.num_states
        if rows != wanted and rows != -(-wanted // family.rows_in) * family.rows_in:
            raise ValueError(
                f"{checkpoint.source}: {_EMBEDDING} has {rows} rows, but {config_file} ({family.counted}) requires "
                f"{wanted}"
            )
        chosen = _tokenizer(tokenizer, family, vocab_size)
        network = TransformerConfig(
            **_sizes(description),
            dropout=description.share("dropout", "attention_dropout", default=0.1),
            vocab_size=vocab_size,
            has_mask=process.has_mask,
            float32_residual=True,
            mlp_bias=True,
            time_input=family.time_input(description),
        )
        checkpoint.check_size(network, description)
        with SkipInitialization():
            model = Transformer(network)
        _fill(model, checkpoint, network, rows)
        rest = [_rest_of(checkpoint, f"output_layer.linear.{leaf}", vocab_size) for leaf in ("weight", "bias")]
    origin = {"family": family.name, "source": source}
    origin |= {"wrap": "bos-eos"} if family.wrapped(description) and chosen.eos_id is not None else {}
    model = model.eval().requires_grad_(False)
    config = {"imported": origin}
    method = get_method(family.method(description)).in_blocks(family.block(description))
    columns = _Columns(model, rest)
    if method.block is not None:
        original = _OriginalInBlocks(columns, method.block)
    else:
        original = _Original(
            columns, process, lambda outputs, ids, level: family.finish(outputs, ids, level, description)
        )
    return ModelFolder(model, process, method, chosen, network.length, config, folder, original)


def _rest_of(checkpoint: Checkpoint, name: str, first: int) -> Tensor:
    """The rows of a tensor that are not tokens: the mask and padding."""
    return checkpoint.slice(name)[first:].float()


@dataclass(frozen=True)
class _Columns:
    """The head with columns for all R rows: features [B, L, D] -> [B, L, R]."""

    model: Transformer
    rest: Sequence[Tensor]
    """Weight and bias of the rows from V on."""

    def __call__(self, features: Tensor) -> Tensor:
        weight, bias = (part.to(features) for part in self.rest)
        return torch.cat([self.model.head(features), F.linear(features, weight, bias)], -1)


@dataclass(frozen=True)
class _Original:
    """What the original network returns for its ids [B, L]: columns for all R rows."""

    columns: _Columns
    process: TokenProcess
    finish: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __call__(self, ids: Tensor, *, sigma: Tensor | None = None, t: Tensor | None = None) -> Tensor:
        """sigma [B] or t [B]; neither for a network without time input."""
        if sigma is None and t is not None:
            sigma = self.process.sigma(t)
        if sigma is None:
            if self.columns.model.capabilities.time_conditioned:
                raise ValueError("this network is conditioned on time: pass sigma [B], or t [B]")
            sigma = torch.zeros(len(ids))
        level = sigma.to(ids.device, torch.float32)
        return self.finish(self.columns(self.columns.model.features(ids, level)), ids, level)


@dataclass(frozen=True)
class _OriginalInBlocks:
    """The same for block diffusion (BD3-LM): reads [x_t + x_0] and returns outputs for the noisy half."""

    columns: _Columns
    block: int

    def __call__(
        self,
        ids: Tensor,
        *,
        x0: Tensor | None = None,
        sample_mode: bool | None = None,
        sigma: Tensor | None = None,
    ) -> Tensor:
        """[B, L, R] for x_t [B, L] and x0 [B, L], or for their concatenation [B, 2L]. In `sample_mode`, ids are one
        text in which each block attends to itself and to earlier blocks; this is the default up to the model's length.

        sigma is not used: the network is not conditioned on it.
        """
        del sigma
        alone = ids.shape[1] <= self.columns.model.options.length if sample_mode is None else sample_mode
        if x0 is None and alone:
            pattern = earlier_blocks(ids.shape[1], self.block, ids.device)
            return self.columns(self.columns.model.features(ids, ids.new_zeros(len(ids)).float(), attention=pattern))
        if x0 is None:
            if ids.shape[1] % 2:
                raise ValueError(f"[x_t, x_0] has an even number of tokens (got {ids.shape[1]})")
            ids, x0 = ids.chunk(2, 1)
        levels = torch.zeros(len(ids), ids.shape[1] // self.block, device=ids.device)
        return self.columns(InBlocks(self.columns.model, self.block).features(ids, levels, clean=x0.to(ids.device)))


def _sizes(config: Description) -> JSONObject:
    """The sizes of the network, by cedd's names."""
    limits = {"length": MOST_LENGTH}
    found = {ours: config.whole(*theirs, most=limits.get(ours)) for ours, theirs in SIZES.items()}
    if found["width"] % (2 * found["heads"]):
        (width, wide), (heads, many) = (config.find(*SIZES[size]) for size in ("width", "heads"))
        raise ValueError(f"{config.source}: {width} {wide} does not divide into heads of an even size, {heads} {many}")
    return found


@torch.no_grad()
def _fill(model: Transformer, checkpoint: Checkpoint, network: TransformerConfig, rows: int) -> None:
    """Load every parameter of the model; every tensor of the checkpoint must be used."""
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
    if path.suffix == GGUF:
        raise ValueError(f"file not found: {path}")
    if path.is_file():
        raise ValueError(f"{path} is a file; name the folder that has {CONFIG_FILE} and {WEIGHTS_FILE}")
    if name.count("/") != 1 or name.startswith((".", "~", "/")) or path.parent.exists():
        raise ValueError(f"folder not found: {path}; names on the hub are owner/name")
    return download_model(name, _ON_THE_HUB, options)


def _refuse_pickles(folder: Path) -> None:
    """Raise an error for a folder whose only weights are pickles."""
    if any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
        return
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in PICKLES)
    if pickles:
        raise ValueError(
            f"{folder / pickles[0]} is a pickle, which can run code when it is read; only safetensors are imported"
        )


def _tokenizer(asked: str | Path | None, family: Family, vocab_size: int) -> Tokenizer:
    name = family.tokenizer if asked is None else str(asked)
    return fitting_tokenizer(name, vocab_size, required=asked is not None)
