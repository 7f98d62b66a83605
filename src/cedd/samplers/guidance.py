"""Guidance: a network whose probabilities are moved towards a condition, used in place of the network itself.

Shapes: B batch, L positions, V vocabulary, D width, N rows.

Classifier-free: let f_c and f_u be the probabilities of the clean token at a position with a condition c and without
one. The guided probabilities are

    f_w(v) = f_c(v)^w f_u(v)^(1 - w) / Z,        Z the sum over v.

At w = 1 this is the conditional model, at w = 0 the unconditional one, and above 1 it overstates the condition. Without
the division by Z, the rates of unmasking are multiplied by it, and masks are revealed too early (arXiv 2507.08965). For
w other than 1 a guided sampler does *not* draw from p(x) p(c | x)^w: its law is that of the process whose beliefs are
f_w. On a process that shuffles, f_c and f_u are the beliefs about x_0 from which each step is made.

In block diffusion, f_c and f_u are given the text before a block. Without a label, the condition is the blocks with
given tokens: f_u is the model of a text that begins after them. Where such a block is completed, f_u has masks in place
of its given tokens.

Networks that give ratios: their sum S is mixed as S_c^w S_u^(1 - w), and their shares of it as above. At masks both
sums are the known one. This needs a process that only masks, since a token's own entry has no meaning.

By a classifier p(c | x_t) of noisy texts, f_w(v) is proportional to f_u(v) p(c | x_t with v at i)^w. With exact
probabilities, w = 1 and one position at a time, that is Bayes' rule, and the law is p(x | c).

Both are wrappers of the network, so that every sampler works with them unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from cedd.block_layout import FinishedText
from cedd.device import model_device
from cedd.methods import Method
from cedd.network import UNKNOWN_LABEL, AnyModel, Capabilities, HasHead, Network, capabilities_of, has_head
from cedd.parameterization import Affine
from cedd.process import TokenProcess


def check_guidance(method: Method, process: TokenProcess) -> None:
    """Refuse methods that cannot be guided."""
    if not method.dynamics.noisy:
        raise ValueError(f"guidance needs a diffusion method, and {method.name} is not one")
    if process.can_shuffle and not isinstance(method.parameterization, Affine):
        raise ValueError(
            f"guidance on a process that shuffles needs probabilities, and {method.name} gives ratios; use bayes"
        )


def mixed(conditional: Tensor, unconditional: Tensor, guidance: float) -> Tensor:
    """Outputs [N, V] of the law in the module's head."""
    total, other = (outputs.logsumexp(-1, keepdim=True) for outputs in (conditional, unconditional))
    logits = guidance * (conditional - total) + (1 - guidance) * (unconditional - other)
    return torch.log_softmax(logits, -1) + guidance * total + (1 - guidance) * other


class Guided:
    """Classifier-free guidance.

    The network is called twice, with and without the condition. Without it, `label` is `UNKNOWN_LABEL`, and the
    positions `hidden` are masks. Every network that fills masks can therefore be guided by a prompt.

    Args:
        model: the network.
        guidance: w.
        mask: the mask's id, to hide positions by.
    """

    def __init__(self, model: AnyModel, guidance: float, mask: int | None = None) -> None:
        self.model, self.guidance, self.mask = model, guidance, mask
        self.device = model_device(model)

    @property
    def capabilities(self) -> Capabilities:
        """A head if the network has one; those that describe its outputs."""
        declared = capabilities_of(self.model)
        if not declared.features:
            return declared
        return Capabilities(features=True, time_conditioned=declared.time_conditioned, token_times=declared.token_times)

    def _both(
        self, function: Callable[..., Tensor], x_t: Tensor, sigma: Tensor, conditions: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        hidden = conditions.pop("hidden", None)
        first = function(x_t, sigma, **conditions)
        first = first.clone() if first.is_cuda else first  # a recorded network overwrites what it returned
        other, others = _without(x_t, conditions, hidden, self.mask)
        return first, function(other, sigma, **others)

    def features(self, x_t: Tensor, sigma: Tensor, **conditions: Any) -> Tensor:
        """[B, L, 2 D]: those with the condition and those without."""
        assert has_head(self.model)
        return torch.cat(self._both(self.model.features, x_t, sigma, conditions), -1)

    def head(self, rows: Tensor) -> Tensor:
        """[N, 2 D] -> [N, V]."""
        assert has_head(self.model)
        with_it, without = rows.chunk(2, -1)
        return mixed(self.model.head(with_it), self.model.head(without), self.guidance)

    def __call__(self, x_t: Tensor, sigma: Tensor, **conditions: Any) -> Tensor:
        """Outputs [B, L, V]."""
        if has_head(self.model):
            return self.head(self.features(x_t, sigma, **conditions))
        return mixed(*self._both(self.model, x_t, sigma, conditions), self.guidance)


def _hides_given(network: Network, held: Tensor, mask: int | None) -> bool:
    """Whether the condition is what is given, not a label; without either, or without masks in its place, an error."""
    if "label" in (network.conditions or {}):
        return False
    if not bool(held.any()):
        raise ValueError("guidance needs a condition: a label, a prompt or other given text")
    if mask is None:
        raise ValueError("guidance without a label needs a process with masks; give a label")
    return True


def guided(network: Network, guidance: float, held: Tensor, mask: int | None) -> Network:
    """A network with classifier-free guidance by its label, or else by what is given.

    Args:
        network: the network, with `label` among its conditions if it has one.
        guidance: w.
        held: which positions are given, [B, L] bool.
        mask: the mask's id; None without one.
    """
    conditions = dict(network.conditions or {})
    if _hides_given(network, held, mask):
        conditions["hidden"] = held
    if guidance == 1:  # the model as it is
        return network
    return replace(network, model=Guided(network.model, guidance, mask), conditions=conditions)


_WITHOUT = "without_"
"""Begins the names of the conditions of the text without the condition."""


class _GuidedText(FinishedText):
    """Classifier-free guidance of texts that are written block by block: what was read is kept with and without the
    label, or the prompt."""

    def __init__(
        self,
        conditional: FinishedText,
        unconditional: FinishedText,
        guidance: float,
        held: Tensor | None = None,
        mask: int | None = None,
    ) -> None:
        super().__init__(conditional.block)
        self.texts, self.guidance, self.mask = (conditional, unconditional), guidance, mask
        self._held = self._hidden = held
        if held is not None:
            unconditional.begin = int(held.view(len(held), -1, self.block).any(2).sum(1).max())

    @property
    def capabilities(self) -> Capabilities:
        """Those of the network, without what it records and skips."""
        return replace(capabilities_of(self.texts[0]), recorder=False, selected_rows=False)

    @property
    def device(self) -> torch.device:
        return model_device(self.texts[0])

    @property
    def conditions(self) -> Mapping[str, Tensor]:
        """Those of both texts, and which tokens of the next block are given."""
        known, unknown = (text.conditions for text in self.texts)
        hidden = {} if self._hidden is None else {"hidden": self._hidden}
        return {**known, **{f"{_WITHOUT}{name}": value for name, value in unknown.items()}, **hidden}

    def read(self, tokens: Tensor) -> None:
        for text in self.texts:
            text.read(tokens)

    def forget(self) -> None:
        for text in self.texts:
            text.forget()

    def take(self, rows: Tensor) -> None:
        for text in self.texts:
            text.take(rows)

    def read_up_to(self, number: int, x: Tensor, most: int) -> None:
        for text in self.texts:
            text.read_up_to(number, x, most)
        self._hidden = None if self._held is None else self._held[:, number * self.block : (number + 1) * self.block]

    def _both(
        self, functions: Sequence[Callable[..., Tensor]], x_t: Tensor, sigma: Tensor, conditions: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        own = {name: conditions.pop(f"{_WITHOUT}{name}") for name in self.texts[1].conditions}
        hidden = conditions.pop("hidden", None)
        first = functions[0](x_t, sigma, **conditions)
        first = first.clone() if first.is_cuda else first  # a recorded network overwrites what it returned
        other, others = _without(x_t, conditions, hidden, self.mask)
        return first, functions[1](other, sigma, **{**others, **own})

    def features(self, x_t: Tensor, sigma: Tensor, **conditions: Any) -> Tensor:
        """[S, b, 2 D]: those with the condition and those without."""
        functions = [cast(HasHead, text).features for text in self.texts]
        return torch.cat(self._both(functions, x_t, sigma, conditions), -1)

    def head(self, rows: Tensor) -> Tensor:
        """[N, 2 D] -> [N, V]."""
        head = cast(HasHead, self.texts[0]).head
        with_it, without = rows.chunk(2, -1)
        return mixed(head(with_it), head(without), self.guidance)

    def __call__(self, x_t: Tensor, sigma: Tensor, **conditions: Any) -> Tensor:
        """Outputs [S, b, V]."""
        return mixed(*self._both(self.texts, x_t, sigma, conditions), self.guidance)


def _unknown(label: Tensor) -> Tensor:
    return torch.full_like(label, UNKNOWN_LABEL)


def _without(
    x_t: Tensor, conditions: dict[str, Any], hidden: Tensor | None, mask: int | None
) -> tuple[Tensor, dict[str, Any]]:
    """The input without the condition."""
    if "label" in conditions:
        conditions = conditions | {"label": _unknown(conditions["label"])}
    if hidden is not None:
        assert mask is not None
        x_t = x_t.masked_fill(hidden.to(x_t.device), mask)
    return x_t, conditions


def guided_text(
    network: Network, guidance: float | None, held: Tensor, mask: int | None, text_of: Callable[[Network], FinishedText]
) -> FinishedText:
    """The finished text of a network that writes blocks, with guidance by its label if it has one, or else by what is
    given.

    Args:
        network: the network, with `label` among its conditions if it has one.
        guidance: w; None for no guidance.
        held: which positions are given, [B, L] bool; without a label, in the same blocks of all texts.
        mask: the mask's id; None without one.
        text_of: makes the finished text of a network.
    """
    if guidance is None:
        return text_of(network)
    hides = _hides_given(network, held, mask)
    if guidance == 1:  # the model as it is
        return text_of(network)
    if hides:
        return _GuidedText(text_of(network), text_of(network), guidance, held, mask)
    conditions = dict(network.conditions or {})
    without = replace(network, conditions={**conditions, "label": _unknown(conditions["label"])})
    return _GuidedText(text_of(network), text_of(without), guidance)


Classifier = Callable[[Tensor, Tensor], Tensor]
"""(texts, sigma [B]) -> log p(c | text) [B]. By its gradient, texts are one-hot vectors [B, L, V + 1] (the mask last);
otherwise tokens [B, L]."""
AT_ONCE = 4096
"""Texts for which a classifier is called at once."""


class ClassifierGuided:
    """Guidance by a classifier of noisy texts.

    Args:
        model: the network.
        classifier: log p(c | x_t).
        guidance: w.
        exact: evaluate the classifier for every token at every position, V L texts per sequence. Otherwise, expand it
            to first order at the text itself, which takes one gradient and a classifier of one-hot vectors.
    """

    def __init__(self, model: AnyModel, classifier: Classifier, guidance: float = 1.0, *, exact: bool = False) -> None:
        if not callable(model):
            raise ValueError("guidance by a classifier needs a network that can be called for all its outputs")
        if not callable(classifier):
            raise ValueError(f"the classifier must be a function of texts and sigma (got {classifier!r:.60})")
        if not math.isfinite(guidance):
            raise ValueError(f"guidance must be a finite number (got {guidance})")
        self.model, self.classifier, self.guidance, self.exact = model, classifier, guidance, exact
        self.capabilities = Capabilities(time_conditioned=True)
        self.device = model_device(model)

    def __call__(self, x_t: Tensor, sigma: Tensor, **conditions: Any) -> Tensor:
        """Outputs [B, L, V]."""
        outputs = torch.log_softmax(self.model(x_t, sigma, **conditions), -1)
        found = self._exact if self.exact else self._by_gradient
        added = found(x_t, sigma, outputs.shape[-1]).to(outputs)
        if not torch.isfinite(added).all():
            raise ValueError("the classifier returned nan or infinity; its log-probabilities must be finite")
        return outputs + self.guidance * added

    def _log_probs(self, texts: Tensor, sigma: Tensor) -> Tensor:
        """log p(c | text), [B]."""
        found = self.classifier(texts, sigma)
        if found.shape != (len(texts),):
            raise ValueError(
                f"the classifier must return one log-probability for each of the {len(texts)} texts (got the shape "
                f"{tuple(found.shape)})"
            )
        return found

    def _exact(self, x_t: Tensor, sigma: Tensor, vocab_size: int) -> Tensor:
        """log p(c | x_t with v at i), [B, L, V]."""
        batch, length = x_t.shape
        found = torch.zeros(batch, length, vocab_size, dtype=torch.float64, device=x_t.device)
        tokens = torch.arange(vocab_size, device=x_t.device)
        for i in range(length):
            texts = x_t[:, None].repeat(1, vocab_size, 1)
            texts[:, :, i] = tokens
            levels = sigma.repeat_interleave(vocab_size)
            flat = texts.flatten(0, 1)
            parts = [slice(start, start + AT_ONCE) for start in range(0, len(flat), AT_ONCE)]
            found[:, i] = torch.cat([self._log_probs(flat[p], levels[p]) for p in parts]).view(batch, vocab_size)
        return found

    def _by_gradient(self, x_t: Tensor, sigma: Tensor, vocab_size: int) -> Tensor:
        """g_i(v) - g_i(x_i), g the gradient of log p(c | x_t) with respect to the one-hot vectors; [B, L, V]."""
        states = max(vocab_size + 1, int(x_t.max()) + 1)
        texts = torch.nn.functional.one_hot(x_t, states).to(torch.float32)
        with torch.enable_grad():
            texts.requires_grad_()
            found = self._log_probs(texts, sigma).sum()
            gradient = torch.autograd.grad(found, texts, allow_unused=True)[0] if found.requires_grad else None
        if gradient is None:
            raise ValueError("the classifier has no gradient with respect to the texts; use exact=True")
        return gradient[..., :vocab_size] - gradient.gather(-1, x_t[..., None])
