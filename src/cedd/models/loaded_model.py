"""A loaded model: the content of its folder on a device, and how it is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Self

import torch
from torch import Tensor

from cedd.data.text import never_written
from cedd.data.tokenizers import Tokenizer
from cedd.device import pick_device
from cedd.methods import Method
from cedd.models.backbone import Backbone
from cedd.models.folder import ModelFolder
from cedd.models.mask_padding import MaskPadded
from cedd.names import suggestion
from cedd.network import AnyModel, capabilities_of
from cedd.process import TokenProcess
from cedd.samplers import Constraint, GraphedBlocks, GraphedNetwork, SamplingOptions, sample


class LoadedModel:
    """A trained network with its process, method and tokenizer, on a device.

    On CUDA, sampling uses recorded graphs of the network, in bfloat16 except for the head.

    Args:
        folder: the content of the model's folder.
        device: where it computes.
    """

    def __init__(self, folder: ModelFolder, device: torch.device | str = "cpu") -> None:
        self.folder, self.device = folder, torch.device(device)
        self._graphs: dict[tuple[int, int], GraphedNetwork] = {}
        self._blocks: GraphedBlocks | None = None

    @property
    def model(self) -> Backbone:
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
        """The largest number of tokens that the model reads at once."""
        return self.folder.length

    @property
    def name(self) -> str:
        """Its method and process, and its blocks."""
        blocks = "" if self.method.block is None else f" in blocks of {self.method.block}"
        return f"{self.method.name} on {(self.process.spec or {}).get('name', 'a process')}{blocks}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, V={self.process.vocab_size}, length={self.length})"

    def to(self, device: torch.device | str) -> Self:
        """Move the network to a device (auto, cpu, cuda, cuda:1, mps); returns the model itself."""
        self.device = pick_device(device)
        self.model.to(self.device)
        self._graphs.clear()
        self._blocks = None
        return self

    @property
    def writes_blocks(self) -> bool:
        """Whether texts are written block by block, and may have any length."""
        return self.method.block is not None and self.method.block < self.length

    def with_defaults(self, options: SamplingOptions, length: int) -> SamplingOptions:
        """The options with this model's defaults, `sampling` of its config.json, where none are given."""
        own = self.folder.config.get("sampling", {})
        return options.with_defaults(length, own, self.method.block if self.writes_blocks else None)

    def check_length(self, length: int) -> None:
        """Refuse a length that the network cannot read at once, unless it writes blocks."""
        if not (isinstance(length, Integral) and length >= 1 and (length <= self.length or self.writes_blocks)):
            raise ValueError(f"the model reads 1 to {self.length} tokens (got a length of {length})")

    @property
    def reads_passages(self) -> bool:
        """Whether a short text can be padded with masks: the network treats any number of masks as unknown tokens."""
        dynamics, declared = self.method.dynamics, capabilities_of(self.model)
        padded = not (declared.time_conditioned or declared.any_length)
        return dynamics.noisy and dynamics.only_reveals(self.process) and padded

    def reader(self, length: int) -> Backbone:
        """The network for texts of `length` tokens, padded with masks if it reads passages: to twice the length, and at
        least to a quarter of what it reads at once.

        More masks cost more and help no further: `english` gives sentences of 6 to 18 tokens as much probability among
        32 or 64 positions as among its 128.
        """
        self._check_mask()
        if length >= self.length or not self.reads_passages:
            return self.model
        return MaskPadded(self.model, min(self.length, max(2 * length, self.length // 4)))

    def _check_mask(self) -> None:
        if self.process.has_mask and not self.model.has_mask:
            raise ValueError("the id of this network's mask is not known; import it with --mask-id ID (mask_id=)")

    def network(self, batch: int, length: int) -> AnyModel:
        """The same network, recorded as CUDA graphs where that is possible."""
        if self.writes_blocks:
            self._check_mask()
            declared = self.model.capabilities
            if self.device.type != "cuda" or not (declared.cuda_graphs and declared.static_cache):
                return self.model
            if self._blocks is None:
                self._blocks = GraphedBlocks(self.model)
            return self._blocks
        model = self.reader(length)
        if self.device.type != "cuda" or not (self.method.dynamics.noisy and model.capabilities.cuda_graphs):
            return model
        if (batch, length) not in self._graphs:
            self._graphs.clear()  # graphs hold memory: one shape at a time
            self._graphs[batch, length] = GraphedNetwork(model, batch, length)
        return self._graphs[batch, length]

    @property
    def labels(self) -> Sequence[str]:
        """The labels of the training data."""
        return self.folder.config.get("labels", ())

    @property
    def trained_labels(self) -> Sequence[str]:
        """The same; raises a ValueError if there are none."""
        if not self.labels:
            raise ValueError("this model was not trained with labels; train one with cedd train --labels FIELD")
        return self.labels

    def conditions(self, label: str | int | None, count: int) -> dict[str, Tensor]:
        """A label as a condition of the network for each of `count` texts."""
        if label is None:
            return {}
        labels, name = self.trained_labels, str(label)
        if name not in labels:
            raise ValueError(f"label: invalid choice: {label!r}{suggestion(name, labels)}")
        return {"label": torch.full((count,), labels.index(name), device=self.device)}

    def draw(
        self,
        shape: tuple[int, int],
        options: SamplingOptions,
        constraint: Constraint | None = None,
        method: Method | None = None,
    ) -> Tensor:
        """Samples [B, L] on the host; tokens that do not decode to text appear only where the constraint fixes them."""
        if options.device is not None:
            raise ValueError("device has no effect on a loaded model; use model.to(device)")
        conditions = self.conditions(options.label, shape[0])
        together = 1 if options.deterministic else min(shape[0], options.batch or shape[0])
        options = replace(
            self.with_defaults(options, shape[1]),
            seed=None,
            seeds=options.seeds_of(shape[0]),
            exclude=(*options.exclude, *(one for one in never_written(self.tokenizer) if one not in options.stop)),
            context=self.length,
            device=self.device,
            label=None,
        )
        autocast = self.device.type == "cuda" and (self.writes_blocks or not self.method.dynamics.noisy)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=autocast):
            network, chosen = self.network(together, shape[1]), method or self.method
            how: dict[str, Any] = {"method": chosen, "constraint": constraint, "options": options, **conditions}
            drawn = sample(network, self.process, shape, **how)
        return drawn.cpu()
