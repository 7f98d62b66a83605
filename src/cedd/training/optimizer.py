"""AdamW with warm-up, and the one step that it takes: clip, update, average; never on a gradient that is not finite.

The matrices of the blocks may be Muon's instead (`cedd.training.muon`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from cedd.models.ema import EMA
from cedd.models.kernels import has_triton
from cedd.training.config import OptimizerConfig
from cedd.training.distributed import gather_full
from cedd.training.muon import Muon, is_muons, step_size

if TYPE_CHECKING:
    from cedd.training.update_triton import MatrixTable, TensorTable


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of step 0, 1, ...: a linear warm-up, then constant, or a cosine down to `final_share` of it."""
    warm = min(1.0, (step + 1) / max(config.warmup, 1))
    if config.schedule == "constant":
        return config.rate * warm
    progress = min(max(step - config.warmup, 0) / max(steps - config.warmup, 1), 1.0)
    share = config.final_share + (1 - config.final_share) * (1 + math.cos(math.pi * progress)) / 2
    return config.rate * warm * share


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW whose moments exist from the start, so that a checkpoint can be read into them.

    Its state has an entry for Muon's matrices too, without the second moment, but they are in none of its groups: it
    does not step them, and its `state_dict` cannot name them (`TrainingState.tensors` does).
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    on_mps = any(parameter.device.type == "mps" for parameter in parameters.values())
    matrices = {name for name in parameters if config.matrices == "muon" and is_muons(name, parameters[name])}
    optimizer = AdamW(
        [parameter for name, parameter in parameters.items() if name not in matrices],
        lr=config.rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=not on_mps,
    )
    for name, parameter in parameters.items():
        moments = ("exp_avg",) if name in matrices else ("exp_avg", "exp_avg_sq")
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device="cpu" if on_mps else parameter.device),
            **{moment: torch.zeros_like(parameter, memory_format=torch.preserve_format) for moment in moments},
        }
    return optimizer


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients, on the device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return gather_full(nn.utils.get_total_norm(gradients, foreach=True))


def excess_of(norm: Tensor, clip: float) -> Tensor:
    """What gradients are divided by, [] float32. The same as clip_grad_norm_: times min(1, clip / (norm + 1e-6))."""
    excess = (norm.float() + 1e-6) / clip if clip > 0 else torch.zeros_like(norm, dtype=torch.float32)
    return excess.clamp_min(1.0)


def apply_gradients(optimizer: AdamW, rate: float, norm: Tensor, clip: float, finite: Tensor) -> None:
    """One step with the gradients scaled to a norm of at most `clip` (0: as they are), unless `finite` [] is false.

    On CUDA both are left to the optimizer's kernel, which divides by the scale and skips its update: no sweep over the
    gradients for clipping, and nobody waits for the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if finite.is_cuda and not hasattr(parameters[0], "full_tensor"):
        optimizer.grad_scale = excess_of(norm, clip)  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.found_inf = (~finite).float()  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
    elif bool(finite):
        if clip > 0:
            nn.utils.clip_grads_with_norm_(parameters, clip, norm, foreach=True)
        optimizer.step()


class Update:
    """What follows a step's gradients: their norm, then clipping, AdamW and the moving average.

    One kernel for all parameters where Triton can reach them as they lie, else torch's own, in turn; Muon's matrices
    are stepped first, and apart, by two kernels and the products between them. `run` is the network that the gradients
    are of: the model itself, or its copy with rounded weights, which is kept up to date.
    """

    def __init__(
        self, model: nn.Module, optimizer: AdamW, ema: EMA, config: OptimizerConfig, run: nn.Module | None = None
    ) -> None:
        self.model, self.optimizer, self.ema, self.clip = model, optimizer, ema, config.clip
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parameters = list(named.values())
        self.states = [optimizer.state[parameter] for parameter in self.parameters]
        self.shadow = [ema.shadow[name] for name in named]
        source = model if run is None else run
        self.sources = [parameter for parameter in source.parameters() if parameter.requires_grad]
        self.copies = [
            None if source is parameter else source.detach()
            for source, parameter in zip(self.sources, self.parameters, strict=True)
        ]
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.swept = [i for i, parameter in enumerate(self.parameters) if id(parameter) in stepped]
        self.matrices = [i for i, parameter in enumerate(self.parameters) if id(parameter) not in stepped]
        matrices, states = [self.parameters[i] for i in self.matrices], [self.states[i] for i in self.matrices]
        self.muon = Muon(matrices, states, config.momentum, config.weight_decay) if matrices else None
        self.table: TensorTable | None = None
        self.matrix_table: MatrixTable | None = None
        self.found: TensorTable | None = None
        self._make_tables()

    def _make_tables(self) -> None:
        """Note where all is that the kernels need, if they can reach it."""
        moments = [moment for state in self.states for name, moment in state.items() if name != "step"]
        low = [copy for copy in self.copies if copy is not None]
        reached = all(map(_reachable, (*self.parameters, *self.shadow, *moments)))
        if not has_triton() or not reached or not all(_reachable(copy, torch.bfloat16) for copy in low):
            return
        room = [] if self.muon is None else self.muon.room()
        if not all(_reachable(place, torch.bfloat16) for place in room):
            return
        from cedd.training.update_triton import MatrixTable, TensorTable

        values, shadow = ([row[i] for i in self.swept] for row in (self.parameters, self.shadow))
        first, second = ([self.states[i][name] for i in self.swept] for name in ("exp_avg", "exp_avg_sq"))
        self.table = TensorTable(values, first, second, shadow, [self.copies[i] for i in self.swept])
        if self.muon is not None:
            lengths = [step_size(value) for value in self.muon.values]
            shadow, copies = [self.shadow[i] for i in self.matrices], [self.copies[i] for i in self.matrices]
            self.matrix_table = MatrixTable(self.muon.values, self.muon.momenta, room, shadow, copies, lengths)

    def norm(self) -> Tensor:
        """The norm of all gradients, []."""
        self.found = self._find_gradients()
        if self.found is not None:
            swept = self.found.norm()
            return swept if self.matrix_table is None else torch.hypot(swept, self.matrix_table.norm())
        for parameter, source, copy in zip(self.parameters, self.sources, self.copies, strict=True):
            if copy is not None:
                parameter.grad = None if source.grad is None else source.grad.to(parameter.dtype)
        return gradient_norm(self.parameters)

    def apply(self, rate: float, norm: Tensor, finite: Tensor) -> None:
        """One step with the gradients whose norm was asked for last; if finite [] is false, of the average alone."""
        excess = excess_of(norm, self.clip)
        if self.found is None:
            if self.muon is not None:
                self.muon.step(self._matrix_gradients(), excess, finite, rate)
            apply_gradients(self.optimizer, rate, norm, self.clip, finite)
            self.ema.update(self.model)
            self.refresh()
            return
        group, good, pace = self.optimizer.param_groups[0], finite.float(), self.ema.advance()
        decay = group["weight_decay"]
        if self.muon is not None and self.matrix_table is not None:
            self.matrix_table.look_ahead(excess, good, self.muon.momentum)
            self.muon.even_out()
            self.matrix_table.move(good, rate=rate, decay=self.muon.decay, pace=pace)
            self.muon.count(good)
        count, betas = self.states[self.swept[0]]["step"], group["betas"]
        self.found.update(count, excess, good, rate=rate, betas=betas, epsilon=group["eps"], decay=decay, pace=pace)
        # A list, one for each: a single tensor would be read by the host, which would wait for the device.
        counts = [self.states[i]["step"] for i in self.swept]
        torch._foreach_add_(counts, [good] * len(counts))  # type: ignore[attr-defined]

    def refresh(self) -> None:
        """Make the copies anew, after the parameters were changed by another than this."""
        values = [parameter.detach() for parameter in self.parameters]
        pairs = [(copy, value) for copy, value in zip(self.copies, values, strict=True) if copy is not None]
        if pairs:
            copies, values = zip(*pairs, strict=True)
            torch._foreach_copy_(copies, values)  # type: ignore[attr-defined]

    def forget_gradients(self) -> None:
        """Before the next step's are made."""
        for parameter in (*self.parameters, *self.sources):
            parameter.grad = None

    def _matrix_gradients(self) -> list[Tensor]:
        sources = [self.sources[i] for i in self.matrices]
        return [torch.zeros_like(source) if source.grad is None else source.grad for source in sources]

    def _find_gradients(self) -> TensorTable | None:
        """The table with the gradients entered, if all of them can be."""
        gradients = [source.grad for source in self.sources if source.grad is not None]
        if self.table is None or len(gradients) != len(self.sources):
            return None
        if not all(_reachable(g, source.dtype) for g, source in zip(gradients, self.sources, strict=True)):
            return None
        self.table.find([gradients[i] for i in self.swept])
        if self.matrix_table is not None:
            self.matrix_table.find([gradients[i] for i in self.matrices])
        return self.table


def _reachable(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a kernel can take a tensor by its address: of that type, dense, aligned, whole, on the device."""
    plain = tensor.is_cuda and tensor.dtype == dtype and tensor.is_contiguous()
    return plain and not hasattr(tensor, "full_tensor") and tensor.data_ptr() % 16 == 0
