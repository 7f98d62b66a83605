"""`cedd genppl`: generative perplexity under a judge."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from cedd.cli import UserError
from cedd.cli.arguments import Genppl
from cedd.cli.console import PlainConsole
from cedd.cli.sampling import sampling_options
from cedd.device import pick_device
from cedd.evaluation.generative import (
    BootstrapInterval,
    GenerativePerplexity,
    HubJudge,
    Samples,
    generative_perplexity,
    load_samples,
    save_samples,
)
from cedd.models.locate import locate
from cedd.storage import check_writable
from cedd.tasks import load
from cedd.tasks.generate import generate_ids


def run(arguments: Genppl) -> int:
    """Draw or read samples, judge them, print the table or JSON."""
    sampling_options(arguments.options, arguments.seed)
    if (arguments.model is None) == (arguments.samples is None):
        raise UserError("give either a RUN to sample from or --samples FILE to judge again")
    device = str(pick_device(arguments.device))
    given = load_samples(arguments.samples) if arguments.samples is not None else None
    out = None if arguments.model is None else arguments.out or locate(arguments.model) / "samples.jsonl"
    check_writable(out)
    # The judge before the samples are drawn: it is what fails, and they take long.
    judge = HubJudge(arguments.judge, device, arguments.judge_batch, arguments.gguf_file)
    samples = draw(arguments, out) if given is None else given
    report = generative_perplexity(samples, judge, seed=arguments.seed)
    if arguments.json:
        print(json.dumps(asdict(report) | {"made_by": dict(samples.made_by)}))
    else:
        PlainConsole().print(table(report))
    return 0


def draw(arguments: Genppl, out: Path | None) -> Samples:
    """Samples of the model, saved."""
    assert arguments.model is not None
    assert out is not None
    model = load(arguments.model, arguments.device)
    options = sampling_options(arguments.options, arguments.seed)
    options = model.settled(options, arguments.length or model.length)
    ids = generate_ids(model, arguments.n, arguments.length, options)
    texts = [model.tokenizer.decode(row.numpy()) for row in ids]
    made_by = {"model": arguments.model, "length": ids.shape[1], **asdict(options)}
    samples = Samples(texts, ids.tolist(), made_by)
    save_samples(out, samples)
    PlainConsole(stderr=True).print(f"samples: {out}", soft_wrap=True)
    return samples


def table(report: GenerativePerplexity) -> Table:
    """The report to read."""

    def shown(interval: BootstrapInterval) -> str:
        if interval.low is None or interval.high is None:
            return f"{interval.value:.2f}  [one sample]"
        return f"{interval.value:.2f}  [{interval.low:.2f}, {interval.high:.2f}]"

    made = Table(title=f"{report.samples} samples judged by {report.judge} ({report.judge_precision})")
    made.add_column("measure")
    made.add_column("value  [95% interval]", justify="right")
    made.add_row("mean of the samples' perplexities (the paper's)", shown(report.mean_of_sample_perplexities))
    made.add_row("perplexity of the corpus of samples", shown(report.corpus_perplexity))
    made.add_row("token entropy of a sample, nats", f"{report.token_entropy:.3f}")
    for n, share in report.distinct.items():
        made.add_row(f"distinct {n}-grams", f"{share:.3f}")
    made.add_row("judged tokens", f"{report.judged_tokens:,}")
    if report.cut_off_tokens:
        made.add_row("tokens beyond the judge's context", f"{report.cut_off_tokens:,}")
    return made
