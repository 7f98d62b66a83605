"""`LanguageModel`, the object that `cedd.load` returns."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args, overload

import torch
from torch import Tensor, nn

from cedd.bounds.estimate import BoundEstimate, combined_freedom, exp_or_inf, student_quantile
from cedd.bounds.estimator import estimate_bound
from cedd.bounds.exact_likelihood import MOST_POSITIONS, context_count, exact_likelihood
from cedd.bounds.importance import ORDERS
from cedd.constraints import Language
from cedd.data.text import MAX_UNKNOWN_SHARE, check_text, unknown_share
from cedd.data.tokenizers import Tokenizer
from cedd.device import model_device, pick_device
from cedd.evaluation.joined_calls import JoinedCalls
from cedd.evaluation.likelihood import TextLikelihoods
from cedd.evaluation.text_parts import text_parts
from cedd.methods import Method
from cedd.models.architectures import Architecture
from cedd.models.folder import (
    DESCRIPTION_KEYS,
    folder_of_network,
    load_folder,
    origin_of,
    read_description,
    replaced_model,
    save_folder,
)
from cedd.models.loaded_model import LoadedModel
from cedd.models.locate import CARD_FILE, CORRECTOR_FILES
from cedd.models.published import import_folder
from cedd.network import AnyModel
from cedd.process import TokenProcess, seeded_generator
from cedd.samplers import Constraint, SamplingOptions, SamplingSettings
from cedd.spelling.correct import Corrected
from cedd.spelling.options import CorrectionSettings
from cedd.storage import JSONMapping, atomic_write, expanded
from cedd.tasks.card import model_card
from cedd.tasks.classification import Classification, LogProbability, RankedText, classify, listed_texts, rank
from cedd.tasks.correct import correct
from cedd.tasks.generate import Messages, chat, generate, template_of
from cedd.tasks.infill import Constraints, infill
from cedd.tasks.particles import WeightedTexts, weighted_texts

if TYPE_CHECKING:
    from cedd.training.loop import TrainResult

Figure = Literal["exact", "tight", "importance"]
"""Kinds of perplexity: exact, or the estimate of a bound."""


class Perplexity(float):
    """A perplexity with its error: exp(nats_per_token), exact or the estimate of an upper bound."""

    nats_per_token: float
    stderr: float
    ci95: tuple[float, float]
    tokens: int
    unknown_share: float
    """Share of tokens that replace characters unknown to the tokenizer."""
    bound: str
    """exact, tight or importance."""

    def __new__(
        cls,
        nats: float,
        stderr: float,
        ci95: tuple[float, float],
        tokens: int,
        unknown_share: float = 0.0,
        bound: str = "tight",
    ) -> Perplexity:
        made = super().__new__(cls, exp_or_inf(nats))
        made.nats_per_token, made.stderr, made.ci95 = nats, stderr, ci95
        made.tokens, made.unknown_share, made.bound = tokens, unknown_share, bound
        return made

    @classmethod
    def exactly(cls, nats: float, tokens: int, unknown_share: float) -> Perplexity:
        """The perplexity for an exact -log p."""
        each = nats / tokens
        return cls(each, 0.0, (exp_or_inf(each), exp_or_inf(each)), tokens, unknown_share, "exact")


def weighted_mean(estimates: Sequence[BoundEstimate], shares: Sequence[float]) -> tuple[float, float, int]:
    """The mean of independent estimates, its Monte Carlo error, and the degrees of freedom of this error."""
    nats = sum(share * estimate.nats_per_token for share, estimate in zip(shares, estimates, strict=True))
    errors = [share * one.monte_carlo_stderr for share, one in zip(shares, estimates, strict=True)]
    freedom = combined_freedom(list(zip(errors, [one.monte_carlo_freedom for one in estimates], strict=True)))
    return nats, math.hypot(*errors), freedom


class LanguageModel(LoadedModel):
    """A trained network with its process, method and tokenizer; `cedd.load` makes one.

    Args:
        folder: the content of a model folder.
        device: the device to compute on.
    """

    training_result: TrainResult | None = None
    """The result of training, for a model that `cedd.train` returns."""

    def original_logits(self, ids: Tensor, **inputs: Any) -> Tensor:
        """The outputs [B, L, rows] of the original network of an imported model for its own ids [B, L], with a column
        for the mask and without a shift.

        Args:
            ids: as the original network takes them; the mask is a row of its embedding.
            inputs: Llama-type networks take attention_mask ([B, L], or [L, L] and [B, 1, L, L] in the place of their
                own, or "full") and position_ids; BD3-LM's take x0 [B, L] (or ids are [x_t, x0], [B, 2L], of which the
                first L are returned) and sample_mode; others take sigma [B].
        """
        with torch.no_grad():
            return self.folder.original(ids.to(self.device), **inputs)

    def generate(
        self,
        n: int = 1,
        length: int | None = None,
        prompt: str = "",
        until_end: bool = False,
        constraint: Constraint | Language | None = None,
        options: SamplingOptions | None = None,
        **settings: Unpack[SamplingSettings],
    ) -> list[str]:
        """Generate texts.

        Args:
            n: number of texts.
            length: tokens per text, with the prompt; by default the model's context length, but at most 256 tokens
                after the prompt. Beyond the context length, block diffusion models use a sliding window. Others
                write parts of at most half the context length, each given at least as many tokens before it.
            prompt: the text with which every sample begins.
            until_end: end each text before its first end-of-text token.
            constraint: a language of `cedd.constraints`, such as `regex(...)`, for the text after the prompt. The
                default length then has room for its longest text, or for twice the tokens of its shortest text plus
                16, up to the context length. Alternatively a constraint on the tokens [n, length]: a `Fixed`, or a
                callable x -> x that is applied after every step.
            options: the sampling options.
            settings: fields of `SamplingOptions` as keyword arguments: sampler, steps, temperature, top_p, exclude,
                batch, seed (text i depends only on the seed and i), seeds (one per text), callback, ...
        """
        chosen = (options or SamplingOptions()).changed(settings)
        how = {"until_end": until_end, "constraint": constraint, "options": chosen}
        return generate(self, n, length=length, prompt=prompt, **how)

    def chat(
        self,
        messages: str | Messages,
        n: int = 1,
        length: int | None = None,
        constraint: Language | None = None,
        options: SamplingOptions | None = None,
        **settings: Unpack[SamplingSettings],
    ) -> list[str]:
        """Answer messages with the model's chat template. An answer ends before the first end-of-text token.

        Args:
            messages: a list of {"role": "user", "content": "..."}, or the text of a single user message.
            n: number of answers.
            length: largest number of tokens per answer (default: 256, or as many as fit).
            constraint: a language of `cedd.constraints` for the answer.
            options: the sampling options.
            settings: fields of `SamplingOptions` as keyword arguments, as in `generate`.
        """
        chosen = (options or SamplingOptions()).changed(settings)
        return chat(self, messages, n, length=length, constraint=constraint, options=chosen)

    def particles(
        self,
        n: int = 1,
        count: int = 16,
        length: int | None = None,
        prompt: str = "",
        constraint: Language | None = None,
        options: SamplingOptions | None = None,
        **settings: Unpack[SamplingSettings],
    ) -> list[WeightedTexts]:
        """Generate weighted texts by sequential Monte Carlo, for models that only mask. As the number of particles
        grows, their distribution approaches that of the model's texts given a constraint, or tilted by a reward.

        Args:
            n: number of sets.
            count: weighted texts per set.
            length: as in `generate`.
            prompt: the text with which every sample begins.
            constraint: a language of `cedd.constraints` for the text after the prompt.
            options: the sampling options.
            settings: fields of `SamplingOptions` as keyword arguments: reward (a function from a list of texts to one
                number per text), strength, seed, temperature, ...
        """
        chosen = (options or SamplingOptions()).changed({**settings, "particles": count})
        template, _ = template_of(self, prompt, length, constraint)
        return weighted_texts(template, self, n, chosen)

    @overload
    def infill(
        self,
        text: str,
        n: Literal[1] = ...,
        constraint: Constraints | None = ...,
        options: SamplingOptions | None = ...,
        **settings: Unpack[SamplingSettings],
    ) -> str: ...

    @overload
    def infill(
        self,
        text: str,
        n: int,
        constraint: Constraints | None = ...,
        options: SamplingOptions | None = ...,
        **settings: Unpack[SamplingSettings],
    ) -> str | list[str]: ...

    def infill(
        self,
        text: str,
        n: int = 1,
        constraint: Constraints | None = None,
        options: SamplingOptions | None = None,
        **settings: Unpack[SamplingSettings],
    ) -> str | list[str]:
        """Fill the blanks of a text; a list of n texts if n is not 1.

        Args:
            text: a text of any length. ____ is a blank with one token per underscore (at least three), ____{12} one
                with 12 tokens.
            n: number of texts; one is returned as a str, several as a list.
            constraint: a language of `cedd.constraints` for every blank, or a list with one per blank (None: any
                text). For texts within the context length, alternatively a constraint on the tokens.
            options: the sampling options.
            settings: fields of `SamplingOptions` as keyword arguments, as in `generate`.
        """
        chosen = (options or SamplingOptions()).changed(settings)
        texts = infill(self, text, n, constraint=constraint, options=chosen)
        return texts[0] if n == 1 else texts

    def correct(
        self,
        text: str,
        *,
        engine: Literal["words", "letters"] | None = None,
        seed: int | None = None,
        **options: Unpack[CorrectionSettings],
    ) -> Corrected:
        """Correct a text; `.changes` of the result lists the corrections.

        Args:
            text: the text to correct.
            engine: "words" corrects English words with a lexicon, "letters" replaces characters by the model's
                posterior. The default is "words" if the model has a lexicon.
            seed: for letters with several steps, which are sampled.
            options: for words: threshold, ignored_words. For letters: the fields of `cedd.tasks.CorrectionOptions`
                (rate, threshold, change, passes, steps, ...). Defaults come from the model's folder.
        """
        return correct(self, text, engine=engine, seed=seed, **options)

    @overload
    def perplexity(
        self,
        text: str,
        *,
        bound: Figure | None = ...,
        draws: int = ...,
        orders: int = ...,
        seed: int = ...,
        max_unknown: float = ...,
        label: str | int | None = ...,
    ) -> Perplexity: ...

    @overload
    def perplexity(
        self,
        text: list[str] | tuple[str, ...],
        *,
        bound: Figure | None = ...,
        draws: int = ...,
        orders: int = ...,
        seed: int = ...,
        max_unknown: float = ...,
        label: str | int | None = ...,
    ) -> list[Perplexity]: ...

    def perplexity(
        self,
        text: str | list[str] | tuple[str, ...],
        *,
        bound: Figure | None = None,
        draws: int = 64,
        orders: int = ORDERS,
        seed: int = 0,
        max_unknown: float = MAX_UNKNOWN_SHARE,
        label: str | int | None = None,
    ) -> Perplexity | list[Perplexity]:
        """The perplexity per token of a text, or of each text of a list, whose network calls are joined into batches.
        The value of a text does not depend on the others, except for rounding. `Perplexity.bound` is one of:

        - exact: the exact likelihood, for autoregressive models and, for short texts, models that only mask: the sum
          over all orders in which the first-hitting sampler can write the text, in 2^n - 1 network evaluations for n
          tokens.
        - tight: an estimate of the negative ELBO, which is an upper bound in expectation. Its Monte Carlo error is
          that for exactly this text.
        - importance: the importance-weighted bound of the first-hitting sampler, tighter than `tight` and slower.

        A text shorter than the context length is padded as in `generate`.

        Args:
            text: a text, or a list of texts.
            bound: "exact", "tight" or "importance"; by default exact if it takes at most twice the evaluations of
                `tight`, otherwise tight.
            draws: noisy versions of each block of the text, for `tight`.
            orders: orders per block, for `importance`.
            seed: seed of times, noise and orders.
            max_unknown: refuse a text if a larger share of its characters is unknown to the tokenizer.
            label: the label that the texts are conditioned on, for models trained with labels.
        """
        if bound not in (None, *get_args(Figure)):
            raise ValueError(f"bound must be exact, tight or importance (got {bound!r})")
        if orders != ORDERS and bound != "importance":
            raise ValueError("orders has no effect without bound='importance'")
        texts = list(text) if isinstance(text, list | tuple) else [text]
        for one in texts:
            check_text(one, "the text to measure")
        encoded = [torch.from_numpy(self.tokenizer.encode(one)) for one in texts]
        if not all(map(len, encoded)):
            raise ValueError("an empty text has no perplexity")
        unknown = [unknown_share(self.tokenizer, ids.numpy(), max_unknown) for ids in encoded]
        exact = [bound == "exact" or (bound is None and self._is_short(len(ids), 2 * draws)) for ids in encoded]
        if bound == "exact" and (long := max((self._at_once(len(ids)) for ids in encoded), default=0)) > MOST_POSITIONS:
            what = "blocks of at most" if self.writes_blocks else "at most"
            raise ValueError(f"exact perplexity needs {what} {MOST_POSITIONS} tokens (got {long}); use importance")
        known = self._exact_nats([ids for ids, one in zip(encoded, exact, strict=True) if one], label)
        how: dict[str, Any] = {"draws": draws} if bound != "importance" else {"bound": bound, "orders": orders}
        how["label"] = label
        bounded = self._bounded([ids for ids, one in zip(encoded, exact, strict=True) if not one], seed, how)
        found = [
            Perplexity.exactly(next(known), len(ids), share)
            if one
            else Perplexity(*next(bounded), len(ids), share, bound or "tight")
            for ids, one, share in zip(encoded, exact, unknown, strict=True)
        ]
        return found if isinstance(text, list | tuple) else found[0]

    def _is_short(self, tokens: int, evaluations: int) -> bool:
        """Whether the exact likelihood takes at most this number of network evaluations."""
        dynamics = self.method.dynamics
        if not dynamics.noisy:
            return True
        together = self._at_once(tokens)
        few = together <= min(MOST_POSITIONS, self.length) and context_count(self.model, together) <= evaluations
        return few and dynamics.only_reveals(self.process)

    def _at_once(self, tokens: int) -> int:
        """The number of tokens whose orders are summed by the exact likelihood: those of a text, or of a block."""
        if not self.method.dynamics.noisy:
            return 0
        return min(tokens, self.method.block or tokens) if self.writes_blocks else tokens

    def _exact_nats(self, texts: Sequence[Tensor], label: str | int | None) -> Iterator[float]:
        """-log p of each text; texts of equal length are computed together."""
        found: dict[int, float] = {}
        for length in {len(ids) for ids in texts}:
            which = [number for number, ids in enumerate(texts) if len(ids) == length]
            together = torch.stack([texts[number] for number in which])
            found |= dict(zip(which, self._nats_of_equal_lengths(together, label), strict=True))
        return iter([found[number] for number in range(len(texts))])

    def _nats_of_equal_lengths(self, ids: Tensor, label: str | int | None) -> list[float]:
        """-log p of texts [B, n]."""
        conditions = self.conditions(label, len(ids))
        total = torch.zeros(len(ids), dtype=torch.float64)
        for part in text_parts(self, ids):
            length = part.ids.shape[1]
            how: dict[str, Any] = {"method": part.method, "device": self.device, **part.conditions, **conditions}
            if self.method.dynamics.noisy:
                total += exact_likelihood(part.model, self.process, part.ids, range(length), **how)
            else:
                total += estimate_bound(part.model, self.process, part.ids, **how).per_sequence * length
        return total.tolist()

    def _bounded(
        self, texts: Sequence[Tensor], seed: int, how: Mapping[str, Any]
    ) -> Iterator[tuple[float, float, tuple[float, float]]]:
        """Upper bounds on the perplexities of texts: nats per token, Monte Carlo error and interval of each text. Their
        network calls are joined; the draws of a text depend on the seed alone."""
        if len(texts) < 2:
            return iter([self._bound_of(self, ids, seed, how) for ids in texts])
        joined = JoinedCalls(self.model)
        loaded = LoadedModel(replace(self.folder, model=joined), self.device)
        return iter(joined.run([partial(self._bound_of, loaded, ids, seed, how) for ids in texts]))

    @staticmethod
    def _bound_of(
        loaded: LoadedModel, ids: Tensor, seed: int, how: Mapping[str, Any]
    ) -> tuple[float, float, tuple[float, float]]:
        if loaded.writes_blocks:
            parts = list(text_parts(loaded, ids[None]))
        else:  # whole pieces together
            whole = len(ids) // loaded.length * loaded.length
            pieces = (ids[:whole].view(-1, loaded.length), ids[whole:][None])
            parts = [part for piece in pieces if piece.numel() for part in text_parts(loaded, piece)]
        label, how = how["label"], {name: value for name, value in how.items() if name != "label"}
        generator = seeded_generator(seed)  # one for all parts, so that their errors are independent
        estimates = [
            estimate_bound(
                part.model,
                loaded.process,
                part.ids.to(loaded.device),
                method=part.method,
                generator=generator,
                fixed_set=True,
                **{**how, **part.conditions, **loaded.conditions(label, len(part.ids))},
            )
            for part in parts
        ]
        nats, error, freedom = weighted_mean(estimates, [part.ids.numel() / len(ids) for part in parts])
        half = student_quantile(freedom) * error if freedom else math.nan
        return nats, error, (exp_or_inf(nats - half), exp_or_inf(nats + half))

    def log_likelihood(
        self,
        prompt: str,
        answers: Sequence[str],
        *,
        draws: int | None = None,
        seed: int = 0,
        protocol: str | None = None,
        guidance: float = 0.0,
    ) -> list[LogProbability]:
        """log p(answer | prompt) of each answer in nats, for ranking.

        The values are exact for autoregressive models, and for models that only mask if all answers are short: all
        orders in which an answer can be written are summed. Otherwise they are Monte Carlo estimates of lower bounds,
        each with a standard error and a 95% interval, from the same noise for all answers. On processes that replace
        tokens they are lower bounds on log p(prompt, answer), which ranks answers in the same order.

        Args:
            prompt: the text before the answer; may be empty.
            answers: the answers.
            draws: noisy versions of each answer. Answers are short if the exact value takes at most twice as many
                evaluations: up to 4 tokens for the default of 8, or none for networks with a time input, which need at
                least 18 draws for one token. Protocols have their own default, 128.
            seed: seed of times and noise.
            protocol: the estimator of another project: llada, dream or dream-ar (`cedd.evaluation.protocols`).
            guidance: w of classifier-free guidance in a protocol: logits un + (w + 1) (c - un), where un has the prompt
                masked. The result is not a bound.
        """
        check_text(prompt, "prompt")
        answers = listed_texts(answers, "answers")
        found = TextLikelihoods(self, draws, seed, protocol, guidance).answers(prompt, answers)
        return [LogProbability.of(one) for one in found]

    def classify(
        self,
        text: str,
        labels: Sequence[str],
        template: str = "{text} {label}",
        *,
        draws: int | None = None,
        seed: int = 0,
    ) -> Classification:
        """Classify a text: the probability of each label, given that one of them is right.

        p(label | text) is proportional to p(label and the text after it | the text before it) from `log_likelihood`,
        which is exact for all labels or a bound for all labels. For bounds, `Classification.intervals` has the 95%
        interval of each probability.

        Args:
            text: the text to classify.
            labels: at least two labels.
            template: a template with {text} and {label}, in any order.
            draws: noisy versions, as in `log_likelihood`.
            seed: seed of times and noise.
        """
        return classify(TextLikelihoods(self, draws, seed), text, labels, template)

    def rank(
        self, texts: Sequence[str], *, per_token: bool = False, draws: int | None = None, seed: int = 0
    ) -> list[RankedText]:
        """Rank texts by their log-likelihood, the most probable first; see `log_likelihood`.

        Args:
            texts: the texts to rank.
            per_token: rank by the mean per token, so that long texts are not at a disadvantage.
            draws: noisy versions of each text.
            seed: seed of times and noise.
        """
        return rank(TextLikelihoods(self, draws, seed), texts, per_token=per_token)

    def save_pretrained(
        self, folder: str | Path, *, weights: str | None = None, extra: JSONMapping | None = None, force: bool = False
    ) -> None:
        """Write the model as a folder that `load` takes: config.json, model.safetensors, tokenizer, README.md.

        Args:
            folder: a new or empty folder, or the one that the model was loaded from. Old files are replaced when all
                new ones are complete.
            weights: float32, bf16, int8 or deflated; by default as in the folder that it was loaded from.
            extra: additional entries of config.json (see `cedd.tasks.card`).
            force: also write into a folder with other contents, over files of the same names.
        """
        kept = {name: value for name, value in self.folder.config.items() if name not in DESCRIPTION_KEYS}
        own = self.folder.path if self.folder.config else None
        if own is not None and expanded(folder).resolve() != own.resolve():
            kept["origin"] = origin_of(own)
        with replaced_model(folder, own, force) as made:
            given = replace(self.folder, model=self.folder.model.merged())
            save_folder(made, given, weights or self.folder.weights, {**kept, **(extra or {})})
            for file in CORRECTOR_FILES:
                if (self.folder.path / file).is_file():
                    shutil.copyfile(self.folder.path / file, made / file)
            card = model_card(read_description(made), self.model.num_parameters())
            atomic_write(made / CARD_FILE, card.encode())

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        *,
        device: str = "auto",
        architecture: Architecture | None = None,
        **download: Any,
    ) -> LanguageModel:
        """Load a model from a folder, by its name in the package, or from the hub.

        Args:
            path_or_name: as `load` takes it.
            device: "auto", "cpu", "cuda" or "mps".
            architecture: as `load` takes it.
            download: arguments of the hub's `snapshot_download`: revision, token, cache_dir, local_files_only, ...
        """
        place = pick_device(device)
        return cls(load_folder(path_or_name, place, architecture, **download), place)

    @classmethod
    def from_network(
        cls,
        network: nn.Module | AnyModel,
        process: TokenProcess,
        method: str | Method,
        tokenizer: Tokenizer,
        length: int | None = None,
    ) -> LanguageModel:
        """Wrap a network as a model, on the device of its parameters.

        Args:
            network: a `Backbone`, or any module or callable `(x_t [B, L], sigma [B]) -> [B, L, V]`.
            process: the process that it was trained to reverse.
            method: what its outputs mean: a name in `METHODS`, or a `Method`.
            tokenizer: a tokenizer with V tokens.
            length: context length; by default that which the network declares, or 1024.
        """
        return cls(folder_of_network(network, process, method, tokenizer, length), model_device(network))

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Upload the model to owner/name on the hub; options are those of huggingface_hub's `ModelHubMixin`."""
        from cedd.tasks.hub import upload  # slow to import, and few need it

        return upload(self.save_pretrained, name, **options)


def import_model(
    path_or_name: str | Path,
    tokenizer: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    mask_id: int | None = None,
    **download: Any,
) -> LanguageModel:
    """Import a published network: SEDD, MDLM, BD3-LM, DUO, UDLM, GIDD, LLaDA, Dream, SDAR, DiffuGPT or
    DiffuLLaMA, or an autoregressive one (Llama, SmolLM2, Qwen2, Qwen3).

    Args:
        path_or_name: a folder with its config.json and safetensors, one file or shards; a GGUF file; or owner/name on
            the hub.
        tokenizer: "gpt2", "bert", a folder with a tokenizer, or "none" (texts are then token ids). By default the
            tokenizer in the folder, or that of the released networks if its vocabulary size is the network's.
        device: "auto", "cpu", "cuda" or "mps".
        dtype: dtype of the parameters of Llama-type networks; by default that of the file (float32 for quantized
            files). A CPU always computes in float32.
        mask_id: the id of the mask in the original network, if neither its config.json nor its tokenizer has it.
        download: arguments of the hub's `snapshot_download`: revision, token, cache_dir, local_files_only, ...
    """
    place = pick_device(device)
    folder = import_folder(path_or_name, tokenizer, device=place, dtype=dtype, mask_id=mask_id, **download)
    folder.model.to(place)
    return LanguageModel(folder, place)


def load(path_or_name: str | Path, device: str = "auto", architecture: Architecture | None = None) -> LanguageModel:
    """Load a trained model.

    Args:
        path_or_name: a run folder, a name in `cedd.PRETRAINED` (packaged models), or owner/name on the hub.
        device: "auto", "cpu", "cuda" or "mps".
        architecture: the class of the network, or "package:Class", if it is your own. Otherwise no code from outside
            cedd is imported.
    """
    return LanguageModel.from_pretrained(path_or_name, device=device, architecture=architecture)
