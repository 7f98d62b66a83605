"""`cedd.load(path_or_name)`: a trained model as an object with verbs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cedd.bounds.estimate import BoundEstimate, exp_or_inf, student_quantile
from cedd.bounds.estimator import estimate_bound
from cedd.data.text import MOST_UNKNOWN, check_text, unknown_share
from cedd.device import pick_device
from cedd.models.folder import DESCRIPTION_KEYS, load_folder, origin_of, read_description, replaced_model, save_folder
from cedd.models.loaded import LoadedModel, SamplingOptions
from cedd.models.locate import CARD_FILE
from cedd.models.published import import_folder
from cedd.spelling.correct import Corrected
from cedd.spelling.lexicon import LEXICON_FILE, LEXICON_WEIGHTS_FILE
from cedd.storage import atomic_write, expanded
from cedd.tasks.card import model_card
from cedd.tasks.correct import correct
from cedd.tasks.generate import generate
from cedd.tasks.infill import infill


class Perplexity(float):
    """A perplexity with what is known of its error: exp of nats_per_token, the estimate of an upper bound (exact for
    autoregressive models)."""

    nats_per_token: float
    stderr: float
    ci95: tuple[float, float]
    tokens: int
    unknown_share: float
    """Of the tokens, those that stand for characters which the tokenizer does not know."""

    def __new__(
        cls, nats: float, stderr: float, ci95: tuple[float, float], tokens: int, unknown_share: float = 0.0
    ) -> Perplexity:
        made = super().__new__(cls, exp_or_inf(nats))
        made.nats_per_token, made.stderr, made.ci95 = nats, stderr, ci95
        made.tokens, made.unknown_share = tokens, unknown_share
        return made


def weighted_mean(estimates: Sequence[BoundEstimate], shares: Sequence[float]) -> tuple[float, float, int]:
    """The mean of independent estimates, its Monte Carlo error, and that one's degrees of freedom.

    error² = Σ v_i, v_i = (share_i error_i)²; by Welch and Satterthwaite (Σ v_i)² / Σ v_i² / freedom_i degrees.
    """
    nats = sum(share * estimate.nats_per_token for share, estimate in zip(shares, estimates, strict=True))
    freedoms = [estimate.monte_carlo_freedom for estimate in estimates]
    variances = [(share * one.monte_carlo_stderr) ** 2 for share, one in zip(shares, estimates, strict=True)]
    total = sum(variances)
    if min(freedoms) < 1 or not total > 0:
        return nats, math.sqrt(total), min(freedoms)
    return nats, math.sqrt(total), int(total**2 / sum(v**2 / f for v, f in zip(variances, freedoms, strict=True)))


class LanguageModel(LoadedModel):
    """A trained network with its process, method and tokenizer; `cedd.load` makes one.

    Args:
        folder: what was read from a run's folder.
        device: where it computes.
    """

    def generate(self, n: int = 1, *, length: int | None = None, prompt: str = "", **options: Any) -> list[str]:
        """Texts of the model's own.

        Args:
            n: how many.
            length: tokens of each; by default as many as the model reads.
            prompt: what each begins with.
            options: how to sample: sampler, steps, temperature, top_p, grid, corrector, batch, deterministic,
                seed (text i depends on it and on i alone), or seeds, one a text.
        """
        return generate(self, n, length=length, prompt=prompt, options=SamplingOptions.of(**options))

    def infill(self, text: str, **options: Any) -> str:
        """The text with its blanks filled.

        Args:
            text: of any length; ____ is a blank of as many tokens as it has underscores (three at least), ____{12} one
                of 12.
            options: how to sample: sampler, steps, temperature, top_p, grid, corrector, batch, deterministic, seed.
        """
        return infill(self, text, 1, options=SamplingOptions.of(**options))[0]

    def correct(self, text: str, **options: Any) -> Corrected:
        """The text with its mistakes put right; `.changes` says which.

        Args:
            text: what to correct.
            options: the fields of `cedd.tasks.CorrectionOptions` (rate, threshold, change, passes, steps, ...) and
                seed; what is not given, the model's own folder says.
        """
        return correct(self, text, **options)

    def perplexity(
        self, text: str, *, draws: int = 64, seed: int = 0, most_unknown: float = MOST_UNKNOWN
    ) -> Perplexity:
        """The perplexity of a text in tokens: the tight bound's estimate, with its Monte Carlo error: how far it may be
        from what endlessly many draws would give for this very text (an autoregressive model's is exact). A text that
        is shorter than the model reads is read as `generate` reads one of that length.

        Args:
            text: what to measure.
            draws: noisy versions of each block of the text that the network is shown.
            seed: of times and noise.
            most_unknown: refuse a text of which a larger share are characters that the tokenizer does not know.
        """
        check_text(text, "what is measured")
        encoded = self.tokenizer.encode(text)
        if not len(encoded):
            raise ValueError("an empty text has no perplexity")
        unknown = unknown_share(self.tokenizer, encoded, most_unknown)
        ids = torch.from_numpy(encoded)
        whole = len(ids) // self.length * self.length
        pieces = [part for part in (ids[:whole].view(-1, self.length), ids[whole:][None]) if part.numel()]
        generator = torch.Generator().manual_seed(seed)  # one for all pieces, so that their errors are independent
        estimates = [
            estimate_bound(
                self.reader(piece.shape[1]),
                self.process,
                piece.to(self.device),
                method=self.method,
                draws=draws,
                generator=generator,
                fixed_set=True,
            )
            for piece in pieces
        ]
        nats, error, freedom = weighted_mean(estimates, [piece.numel() / len(ids) for piece in pieces])
        half = student_quantile(freedom) * error if freedom else math.nan
        return Perplexity(nats, error, (exp_or_inf(nats - half), exp_or_inf(nats + half)), len(ids), unknown)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        weights: str | None = None,
        extra: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        """Write the model as a folder that `load` takes: config.json, model.safetensors, tokenizer, README.md.

        Args:
            folder: where to: a new or an empty folder, or the one that it was loaded from. Old files go when all new
                ones are complete.
            weights: float32, bf16, int8 or deflated; by default the form that it was loaded from.
            extra: what else config.json shall say, beside what it said (see `cedd.tasks.card`).
            force: write also into a folder that holds something else, over files of the same names.
        """
        kept = {name: value for name, value in self.folder.config.items() if name not in DESCRIPTION_KEYS}
        own = self.folder.path if self.folder.config else None
        if own is not None and expanded(folder).resolve() != own.resolve():
            kept["origin"] = origin_of(own)
        with replaced_model(folder, own, force) as made:
            save_folder(made, self.folder, weights or self.folder.weights, {**kept, **(extra or {})})
            for file in (LEXICON_FILE, LEXICON_WEIGHTS_FILE):
                if (self.folder.path / file).is_file():
                    shutil.copyfile(self.folder.path / file, made / file)
            card = model_card(read_description(made), self.model.num_parameters())
            atomic_write(made / CARD_FILE, card.encode())

    @classmethod
    def from_pretrained(cls, path_or_name: str | Path, *, device: str = "auto", **download: Any) -> LanguageModel:
        """A model from a folder, by its name in the package, or from the hub.

        Args:
            path_or_name: as `load` takes it.
            device: "auto", "cpu", "cuda" or "mps".
            download: how the hub is asked: revision, token, cache_dir, local_files_only, ... of `snapshot_download`.
        """
        place = pick_device(device)
        return cls(load_folder(path_or_name, place, **download), place)

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Upload the model to owner/name on the hub; options are those of huggingface_hub's `ModelHubMixin`."""
        from cedd.tasks.hub import upload  # slow to import, and few need it

        return upload(self.save_pretrained, name, **options)


def import_model(
    path_or_name: str | Path, tokenizer: str | Path | None = None, *, device: str = "auto", **download: Any
) -> LanguageModel:
    """A network that others have published, SEDD, MDLM, DUO, UDLM or GIDD, exactly as it computes in float32.

    Args:
        path_or_name: a folder with its config.json and model.safetensors, or owner/name on the hub.
        tokenizer: "gpt2", "bert", a folder that has one, or "none": texts are then numbers of tokens. By default the
            one of the released networks; none where this network has another number of tokens.
        device: "auto", "cpu", "cuda" or "mps".
        download: how the hub is asked: revision, token, cache_dir, local_files_only, ... of `snapshot_download`.
    """
    place = pick_device(device)
    folder = import_folder(path_or_name, tokenizer, **download)
    folder.model.to(place)
    return LanguageModel(folder, place)


def load(path_or_name: str | Path, device: str = "auto") -> LanguageModel:
    """A trained model.

    Args:
        path_or_name: a run's folder, a name of `cedd.PRETRAINED` (models of the package), or owner/name on the hub.
        device: "auto", "cpu", "cuda" or "mps".
    """
    return LanguageModel.from_pretrained(path_or_name, device=device)
