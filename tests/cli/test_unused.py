"""Options that have no effect together with others are rejected in one line, for every command and mode."""

import pytest

from cedd.cli import main
from tests.tasks.models import save_random


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unused")
    save_random(folder / "roulette", "roulette", "bayes")
    save_random(folder / "absorb", "absorb", "cedd")
    save_random(folder / "causal", "absorb", "ar")
    (folder / "text.txt").write_text("the cat sat on the mat. " * 40)
    (folder / "samples.jsonl").write_text('{"text": "the cat sat"}\n')
    return folder


WITHOUT_FRONTIER = (
    "--samplers euler",
    "--step-counts 8",
    "--temperatures 1 0.5",
    "--top-ps 0.5",
    "--text text.txt",
    "--entropy 3",
    "--draw-only",
    "--plot curves.png",
)
SAMPLING = (
    "--n 3",
    "--length 8",
    "--seed 3",
    "--sampler euler",
    "--steps 4",
    "--grid jumps",
    "--temperature 0.5",
    "--top-p 0.5",
    "--batch 2",
    "--deterministic",
)
CASES = [
    *((f"genppl RUN/roulette {option}", "no effect without --frontier") for option in WITHOUT_FRONTIER),
    *((f"genppl --samples RUN/samples.jsonl {option}", "with --samples") for option in (*SAMPLING, "--out x.jsonl")),
    *(
        (f"genppl --frontier RUN/curves {option}", "no effect without a MODEL")
        for option in (*SAMPLING[:3], "--top-ps 1 0.5")
    ),
    ("genppl RUN/roulette --frontier RUN/curves --draw-only --plot x.png", "--plot has no effect with --draw-only"),
    ("genppl RUN/roulette --frontier RUN/curves --draw-only --entropy 3", "--entropy has no effect with --draw-only"),
    ("genppl RUN/roulette --judge RUN/causal --gguf-file x.gguf -n 1", "--gguf-file has no effect with the judge"),
    (
        "genppl RUN/causal --judge RUN/causal --steps 8 -n 1",
        "--steps has no effect with the sampler next-token (method ar)",
    ),
    *(
        (f"sample RUN/causal {option}", "has no effect with the sampler next-token (method ar)")
        for option in ("--steps 4", "--sampler euler", "--grid jumps")
    ),
    ("sample RUN/absorb --sampler next-token", "next-token is for autoregressive models, and cedd is not"),
    (
        "sample RUN/absorb --sampler first-hitting --steps 4",
        "--steps has no effect with the sampler first-hitting (method cedd)",
    ),
    (
        "sample RUN/absorb --sampler first-hitting --grid jumps",
        "--grid has no effect with the sampler first-hitting (method cedd)",
    ),
    ("sample RUN/absorb --sampler entropy --grid jumps", "--grid has no effect with the sampler entropy (method cedd)"),
    (
        "infill RUN/absorb a____ --sampler margin --grid jumps",
        "--grid has no effect with the sampler margin (method cedd)",
    ),
    *(
        (f"evaluate RUN/causal --data RUN/text.txt {option}", "has no effect on an autoregressive model")
        for option in ("--sampling independent", "--time-floor 0.1")
    ),
    ("evaluate RUN/absorb --data RUN/text.txt --split validation", "--split has no effect on a --data that is not"),
    ("evaluate RUN/absorb --data RUN/text.txt --data-root RUN", "--data-root has no effect on a --data that is not"),
    ("spelling RUN/roulette --data RUN/text.txt --protocol user --t 0.1", "--t has no effect with --protocol user"),
    ("spelling RUN/roulette --data RUN/text.txt --protocol paper --rate 0.1 --passes 1", "--rate and --passes have no"),
    ("correct RUN/roulette text --seed 3", "--seed has no effect without --steps 2 or more"),
    ("correct RUN/roulette text --steps 4 --swaps 0.1", "--swaps has no effect with --steps 4"),
    ("report RUN/roulette RUN/absorb --data RUN/text.txt --samples 3", "--samples has no effect on a comparison"),
    ("export RUN/roulette --out RUN/out --broken 0.1", "--broken has no effect without --calibrate"),
    ("bench train --samplers analytic", "--samplers has no effect on bench train"),
    ("bench sample --warmup 3", "--warmup has no effect on bench sample"),
    *(
        (f"train char --out RUN/run {option}", message)
        for option, message in (
            ("--process.p-u 0.5", "--process.p-u: roulette takes p_m, schedule (p_u is an argument of hybrid)"),
            (
                "--process uniform --process.p-m 0.5",
                "--process.p-m: uniform takes schedule (p_m is an argument of roulette",
            ),
            (
                "--process.schedule.power 3",
                "--process.schedule.power: log-linear takes eps (power is an argument of poly",
            ),
            ("--process hybrid --process.schedule cosine", "--process.schedule: hybrid takes p_u, rise, fall, eps ("),
            ("--method ar --batch.lowest-time 0.1", "--batch.lowest-time has no effect with the method ar"),
            ("--optimizer.momentum 0.9 --optimizer.matrices adamw", "without optimizer.matrices muon"),
            ("--optimizer.schedule constant --optimizer.final-share 0.1", "on a constant optimizer.schedule"),
            ("--optimizer.schedule cosine --optimizer.decay-share 0.1", "unless optimizer.schedule is linear"),
            ("--text.validation RUN/text.txt --text.holdout 0.2", "--text.holdout has no effect with text.validation"),
            ("--label-dropout 0.3", "--label-dropout has no effect without labels"),
            ("--text.gpt2-files RUN", "--text.gpt2-files has no effect with the tokenizer char"),
            ("--evaluation.samples 0 --evaluation.sample-steps 3", "without evaluation.samples"),
            ("--evaluation.every 0 --evaluation.draws 3", "without evaluation.every"),
        )
    ),
]


@pytest.mark.parametrize(("words", "message"), CASES, ids=[words.replace("RUN/", "") for words, _ in CASES])
def test_options_without_effect_are_rejected(words, message, place, capsys):
    before = sorted(file.name for file in place.rglob("*"))
    given = [word.replace("RUN", str(place)) for word in words.split()]
    cpu = [] if words.startswith("train") else ["--device", "cpu"]
    assert main([*given, *cpu]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert message in said.err
    assert said.out == ""
    assert sorted(file.name for file in place.rglob("*")) == before


def test_preset_may_contain_unused_settings(place, capsys):
    """Only changes on the command line are rejected: a preset's rate for Muon stays when AdamW is chosen."""
    words = ["train", "small-fast", "--out", str(place / "run"), "--data", str(place / "none.txt")]
    assert main([*words, "--optimizer.matrices", "adamw"]) == 2
    assert "none.txt" in capsys.readouterr().err
