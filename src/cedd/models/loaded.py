"""A model that is loaded: its folder on a device, and how it is sampled."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from cedd.data.text import never_written
from cedd.data.tokenizers import Tokenizer
from cedd.methods import Method
from cedd.models.arrays import ArrayNetwork, ReadsPassages
from cedd.models.folder import ModelFolder
from cedd.models.surroundings import AmidMasks
from cedd.models.transformer import Transformer
from cedd.names import changed
from cedd.network import AnyModel, knows_time
from cedd.process import TokenProcess
from cedd.samplers import Corrector, Fixed, GraphedNetwork, default_steps, sample, text_seeds
from cedd.samplers.draws import one_for_each
from cedd.samplers.loop import Callback

TextReader = Transformer | AmidMasks
"""What reads a text: the network, shown it alone or amid masks."""


@dataclass(frozen=True)
class SamplingOptions:
    """How to sample; see `cedd.sample`. None: the model's own default, or the usual one."""

    sampler: str = "analytic"
    steps: int | None = None
    """Usually one for four tokens, from 64 to 256."""
    temperature: float | None = None
    top_p: float | None = None
    """Usually 1, both."""
    grid: str = "uniform"
    corrector: Corrector | None = None
    batch: int | None = None
    deterministic: bool | None = None
    seed: int | None = None
    """Text i depends on the seed and on i alone."""
    seeds: Sequence[int] | None = None
    """A seed for each text, in the place of one for all: `text_seeds(seed, n)` are those of n texts."""

    @classmethod
    def of(cls, **given: Any) -> SamplingOptions:
        """The defaults, with those given in their place."""
        return changed(cls(), given, "the options of sampling")

    def settled(self, length: int, own: Mapping[str, Any]) -> SamplingOptions:
        """With a model's `own` defaults, or the usual ones for texts of so many tokens, where None stands."""
        usual = {"steps": default_steps(length), "temperature": 1.0, "top_p": 1.0}
        for name, value in own.items():
            if name not in usual or not isinstance(value, int | float):
                known = ", ".join(usual)
                raise ValueError(f"the sampling of the model's folder has numbers for {known}; got {name}={value!r}")
        missing = {name: own.get(name, value) for name, value in usual.items() if getattr(self, name) is None}
        return replace(self, **missing)

    def seeds_of(self, n: int) -> Sequence[int]:
        """A seed for each of n texts: those given, or by one seed, or by chance."""
        if self.seeds is None:
            return text_seeds(secrets.randbits(64) if self.seed is None else self.seed, n)
        if self.seed is not None:
            raise ValueError("give a seed, or seeds for each of the texts, not both")
        return one_for_each(self.seeds, n)


class LoadedModel:
    """A trained network with its process, method and tokenizer, on a device.

    On CUDA the network is recorded as graphs to be sampled from, in bfloat16 except for the head.

    Args:
        folder: what was read from a model's folder.
        device: where it computes.
    """

    def __init__(self, folder: ModelFolder, device: torch.device | str = "cpu") -> None:
        self.folder, self.device = folder, torch.device(device)
        self._graphs: dict[tuple[int, int], GraphedNetwork] = {}
        self._arrays: dict[float, ArrayNetwork] = {}

    @property
    def model(self) -> Transformer:
        return self.folder.model

    @property
    def process(self) -> TokenProcess:
        return self.folder.process

    @property
    def method(self) -> Method:
        return self.folder.method

    @property
    def tokenizer(self) -> Tokenizer:
        return self.folder.tokenizer

    @property
    def length(self) -> int:
        """Tokens that it reads at once."""
        return self.folder.length

    @property
    def name(self) -> str:
        """Its method and process."""
        return f"{self.method.name} on {(self.process.spec or {}).get('name', 'a process')}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, V={self.process.vocab_size}, length={self.length})"

    def settled(self, options: SamplingOptions, length: int) -> SamplingOptions:
        """The options with this model's defaults, `sampling` of its config.json, where none are given."""
        return options.settled(length, self.folder.config.get("sampling", {}))

    def check_length(self, length: int) -> None:
        """Refuse what the network cannot read."""
        if not (isinstance(length, Integral) and 1 <= length <= self.length):
            raise ValueError(f"the model reads 1 to {self.length} tokens; got a length of {length}")

    @property
    def reads_passages(self) -> bool:
        """Whether a text can be read amid masks: where these are tokens not known yet, however many there are."""
        dynamics = self.method.dynamics
        return dynamics.noisy and dynamics.only_reveals(self.process) and not knows_time(self.model)

    def reader(self, length: int) -> TextReader:
        """The network for texts of so many tokens: one that reads passages is shown whole blocks."""
        return AmidMasks(self.model, self.length) if length < self.length and self.reads_passages else self.model

    def network(self, batch: int, length: int) -> AnyModel:
        """The same in the form that is fastest to sample from."""
        model = self.reader(length)
        if self.device.type != "cuda" or not self.method.dynamics.noisy:
            return model
        if (batch, length) not in self._graphs:
            self._graphs.clear()  # graphs hold memory: one shape at a time
            self._graphs[batch, length] = GraphedNetwork(model, batch, length)
        return self._graphs[batch, length]

    def on_arrays(self, t: float) -> ReadsPassages:
        """The network in numpy, told the time t."""
        if t not in self._arrays:
            conditioning, sigma = self.model.backbone.conditioning, self.process.noise(t).sigma.view(1)
            told = 0.0 if conditioning is None else float(conditioning.told(sigma))
            tensors = {name: tensor.float().cpu().numpy() for name, tensor in self.model.state_dict().items()}
            self._arrays[t] = ArrayNetwork(self.model.config, tensors, told)
        return self._arrays[t]

    @property
    def known(self) -> MutableMapping[Hashable, float] | None:
        """Numbers that were found with the network and need not be again; None: none are kept."""
        return None

    def draw(
        self,
        shape: tuple[int, int],
        options: SamplingOptions,
        constraint: Fixed | None = None,
        callback: Callback | None = None,
        method: Method | None = None,
        **start: Any,
    ) -> Tensor:
        """Samples [B, L] on the host; a token that stands for no text is only where the constraint holds it.

        start: x_start and t_start of `cedd.sample`.
        """
        settings = dict(vars(self.settled(options, shape[1])), seeds=options.seeds_of(shape[0]))
        del settings["seed"]
        autocast = self.device.type == "cuda" and not self.method.dynamics.noisy
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=autocast):
            drawn = sample(
                self.network(1 if options.deterministic else min(shape[0], options.batch or shape[0]), shape[1]),
                self.process,
                shape,
                method=method or self.method,
                constraint=constraint,
                exclude=never_written(self.tokenizer),
                callback=callback,
                device=self.device,
                **settings,
                **start,
            )
        return drawn.cpu()
