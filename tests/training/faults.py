"""Fault injection: kills, a full disk, flipped bits, truncated files and swapped folders, counted by outcome.

    python -m tests.training.faults --size 40 --seed 0      (docs/reliability.md cites --size 120)

`size` is the number of kills per target; cheaper faults are repeated more often, expensive ones less often. An outcome
that begins with LOST is a failure: the tests require that there are none.
"""

import argparse
import contextlib
import io
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch

from cedd.cli import main
from cedd.data.corpora import open_corpus
from cedd.data.packing import HEADER_FILE, TOKENS_FILE, PackedDataset, open_packed, pack
from cedd.data.tokenizers import ByteTokenizer
from cedd.storage import is_temporary
from cedd.tasks import load
from cedd.training.checkpoints import Checkpoints, RunIdentity, read_checkpoint
from cedd.training.config import TrainConfig
from tests.limits import limited_file_size
from tests.tasks.models import save_random
from tests.training.processes import PATIENCE, command, start, start_server, start_training, wait
from tests.training.runs import ALONE, assert_same_run, run, tiny_config, write_corpus

INSIDE, BETWEEN = "kill inside a write", "kill before or between writes"
SAME, FOUND, NOTHING, LOST = "went on to the same result", "found", "changed nothing", "LOST"
ROOM = "had room enough"


@dataclass
class Campaign:
    """The faults of one seed, in a separate folder."""

    folder: Path
    size: int
    seed: int = 0
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.corpus = write_corpus(self.folder / "words.txt")
        self.cache = self.folder / "cache"

    def note(self, where: str, fault: str, outcome: str, count: int = 1) -> None:
        self.counts[where, fault, outcome] += count

    @property
    def lost(self) -> list[tuple[str, str, str]]:
        return [outcome for outcome in self.counts if outcome[2].startswith(LOST)]

    def table(self) -> str:
        lines = ["| where | fault | outcome | count |", "|---|---|---|---:|"]
        lines += [f"| {' | '.join(names)} | {count} |" for names, count in sorted(self.counts.items())]
        return "\n".join(lines)

    def config(self, name: str, **changes: object) -> TrainConfig:
        often = {"steps": 60, "checkpoint_every": 2, "keep": 2, "log_every": 1, **changes}
        return tiny_config(self.corpus, self.cache, self.folder / name, often)

    def never_killed(self) -> Path:
        """An undisturbed run, the reference for the others."""
        config = self.config("whole", checkpoint_every=60)
        if not config.out.exists():
            run(config)
        return config.out


def temporaries(folder: Path) -> list[Path]:
    """Temporary files and folders that a writer, possibly killed, left anywhere in a folder."""
    found = [Path(root) / name for root, folders, _ in os.walk(folder) for name in folders]
    return [path for path in found if is_temporary(path) or path.name.startswith(".step-")]


def kill(child: BaseProcess) -> bool:
    """Send SIGKILL; return whether the child was still running."""
    assert child.pid is not None
    if child.exitcode is None:
        with contextlib.suppress(ProcessLookupError):  # it has already exited
            os.kill(child.pid, signal.SIGKILL)
    return wait(child) == -signal.SIGKILL


def kill_once(child: BaseProcess, ready: Callable[[], object], delay: float) -> bool:
    """Kill the child a moment after it is ready, if it has not ended by then."""
    deadline = time.monotonic() + PATIENCE
    while not ready() and child.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.0005)
    time.sleep(delay)
    return kill(child)


def outcome(verdict: Callable[[], str | None]) -> str:
    """The result of the verdict (SAME if it returns None), or the error."""
    try:
        return verdict() or SAME
    except (AssertionError, ValueError, OSError) as error:
        return f"{LOST}: {' '.join(str(error).split())[:100]}"


# ----------------------------------------------------------------------------------------------------------------
# Kills


def kills_in_training(campaign: Campaign) -> None:
    """Kill a run that saves every other step until it completes, then compare it with an undisturbed run."""
    whole, config = campaign.never_killed(), campaign.config("killed")
    log = config.out / "log.jsonl"
    pending: Counter[str] = Counter()
    left = campaign.size
    while left or pending:
        opened = log.stat().st_mtime_ns if log.exists() else 0
        child = start_training(config)

        def trains(opened: int = opened) -> bool:
            return log.exists() and log.stat().st_mtime_ns > opened

        if left and kill_once(child, trains, campaign.chance.uniform(0, 0.4)):
            pending[INSIDE if temporaries(config.out) else BETWEEN] += 1
            left -= 1
            continue
        assert wait(child) == 0
        verdict = outcome(lambda: assert_same_run(whole, config.out))
        for fault, count in pending.items():
            campaign.note("training", fault, verdict, count)
        pending.clear()
        shutil.rmtree(config.out)


def pack_bytes(corpus: Path, cache: Path, length: int = 16) -> PackedDataset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pack(open_corpus(corpus), ByteTokenizer(), length, cache=cache)


def long_text(campaign: Campaign) -> Path:
    """A few megabytes: long enough to kill the process while it packs."""
    path = campaign.folder / "long.txt"
    if not path.exists():
        write_corpus(path, words=600_000)
    return path


def kills_in_packing(campaign: Campaign) -> None:
    text, cache = long_text(campaign), campaign.folder / "killed-cache"
    right = pack_bytes(text, campaign.cache)[:]
    for _ in range(campaign.size):
        shutil.rmtree(cache, ignore_errors=True)
        child = start(pack_bytes, text, cache)
        landed = kill_once(child, lambda: temporaries(cache), campaign.chance.uniform(0, 0.3))

        def verdict() -> None:
            assert (pack_bytes(text, cache)[:] == right).all(), "other blocks"
            assert not temporaries(cache), "temporary folders were left"

        campaign.note("packing", INSIDE if landed and temporaries(cache) else BETWEEN, outcome(verdict))


def kills_in_export(campaign: Campaign) -> None:
    """A model exported over itself, alternating between weight formats."""
    model = campaign.folder / "killed-model"
    load(save_random(campaign.folder / "random"), device="cpu").save_pretrained(model)
    x = torch.zeros(1, 8, dtype=torch.int64)
    right = load(model, device="cpu").model(x, torch.ones(1))
    for number in range(campaign.size):
        form = ("float32", "bf16")[number % 2]
        words = ["export", str(model), "--out", str(model), "--device", "cpu", "--weights", form]
        child = command([*words, "--title", f"model {number}"], campaign.folder / "printed")
        landed = kill_once(child, lambda: temporaries(model), campaign.chance.uniform(0, 0.03))
        inside = landed and bool(temporaries(model))

        def verdict() -> None:
            loaded = load(model, device="cpu").model(x, torch.ones(1))
            assert (loaded - right).abs().max() < 0.05, "other weights"

        campaign.note("export", INSIDE if inside else BETWEEN, outcome(verdict))
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["export", str(model), "--out", str(model), "--device", "cpu"]) == 0
    campaign.note("export", "leftovers of all kills", LOST if temporaries(model) else "removed by the next export")


# ----------------------------------------------------------------------------------------------------------------
# A full disk


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(words: list[str], limit: int) -> bool:
    """Whether the command failed with a one-line error and exit code 1; False if it fit within the limit."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), limited_file_size(limit):
        code = main(words)
    if code == 0:
        return False
    assert code == 1, f"exit code {code}: {said.getvalue()}"
    assert said.getvalue().splitlines()[-1].endswith("File too large"), said.getvalue()
    return True


def full_disk(campaign: Campaign) -> None:
    """Limit file sizes at random, for packing and training in one command and for exporting a model over itself."""
    chance = campaign.chance
    model = save_random(campaign.folder / "full-model")
    small = "--length 12 --batch.size 8 --model.width 16 --model.depth 1 --steps 4 --evaluation.every 0 --device cpu"

    def words(name: str) -> list[str]:
        place = ["--out", str(campaign.folder / name), "--text.cache", str(campaign.folder / f"{name}-cache")]
        return ["train", "tiny", "--data", str(campaign.corpus), *place, *small.split(), "--checkpoint-every", "2"]

    def trained(name: str) -> str:
        limited = refused(words(name), chance.randrange(2_000, 120_000))
        left = [*temporaries(campaign.folder / name), *temporaries(campaign.folder / f"{name}-cache")]
        assert not left, "temporary folders were left"
        assert not limited or not refused(words(name), 1 << 30)
        assert_same_run(campaign.folder / "never-full", campaign.folder / name)
        return f"one line, exit code 1; with room, {SAME}" if limited else ROOM

    def exported() -> str:
        before = contents(model)
        again = ["export", str(model), "--out", str(model), "--device", "cpu", "--title", str(chance.random())]
        if limited := refused(again, chance.randrange(500, 2 * max(map(len, before.values())))):
            assert contents(model) == before, "the old model changed"
        load(model, device="cpu")
        return "one line, exit code 1; the old model as it was" if limited else ROOM

    assert not refused(words("never-full"), 1 << 30)
    for number in range(max(1, campaign.size // 2)):
        campaign.note("training", "full disk", outcome(lambda number=number: trained(f"full-{number}")))
        campaign.note("export", "full disk", outcome(exported))


# ----------------------------------------------------------------------------------------------------------------
# Damage


def damaged(chance: random.Random, content: bytes) -> tuple[str, bytes]:
    """A flipped bit, or a truncated end."""
    if chance.random() < 0.5:
        return "lost end", content[: chance.randrange(len(content))]
    place, changed = chance.randrange(len(content)), bytearray(content)
    changed[place] ^= 1 << chance.randrange(8)
    return "flipped bit", bytes(changed)


@contextlib.contextmanager
def one_file_damaged(chance: random.Random, files: list[Path]) -> Iterator[str]:
    file = chance.choice(files)
    content = file.read_bytes()
    fault, changed = damaged(chance, content)
    file.write_bytes(changed)
    try:
        yield f"{fault} in {'*.safetensors' if file.suffix == '.safetensors' else file.name}"
    finally:
        file.write_bytes(content)


def damage(campaign: Campaign) -> None:
    """Damage every file of a checkpoint and of a packed set; undetected damage must have no effect."""
    config = campaign.config("damaged", steps=4)
    run(config)
    newest = max((config.out / "checkpoints").glob("step-*"))
    state = read_checkpoint(newest)
    packed = pack_bytes(campaign.corpus, campaign.folder / "damaged-cache")
    (folder,) = (campaign.folder / "damaged-cache" / "packed").iterdir()
    header, blocks = dict(packed.header), np.array(packed[:])

    def checkpoint_is_right() -> bool:
        return read_checkpoint(newest) == state

    def packed_is_right() -> bool:
        found = open_packed(folder)
        return found.header == header and bool((found[:] == blocks).all())

    places = {
        "checkpoint": (sorted(newest.iterdir()), checkpoint_is_right),
        "packed set": ([folder / HEADER_FILE, folder / TOKENS_FILE], packed_is_right),
    }
    for where, (files, is_right) in places.items():
        for _ in range(10 * campaign.size):
            with one_file_damaged(campaign.chance, files) as fault:
                try:
                    verdict = NOTHING if is_right() else LOST
                except ValueError:
                    verdict = FOUND
                campaign.note(where, fault, verdict)


def exchanges(campaign: Campaign) -> None:
    """Complete checkpoints in the wrong place: swapped, renamed, or of another seed."""
    chance, folder = campaign.chance, campaign.folder / "exchanged"
    ours, theirs = RunIdentity({"seed": 0, "rate": 0.1}), RunIdentity({"seed": 1, "rate": 0.1})
    tensors = {"model/weight": torch.ones(3)}

    def swapped(own: Checkpoints) -> None:
        first, second = chance.sample(own.steps()[-2:], 2)
        own.path(first).rename(folder / "aside")
        own.path(second).rename(own.path(first))
        (folder / "aside").rename(own.path(second))

    def renamed(own: Checkpoints) -> None:
        own.path(own.steps()[-1]).rename(own.path(chance.randrange(10, 10**6)))

    def of_another_seed(own: Checkpoints) -> None:
        shutil.rmtree(own.path(own.steps()[-1]))
        Checkpoints(folder, 9, ALONE, theirs).save(3 + chance.randrange(5), tensors, {})

    for _ in range(campaign.size):
        for fault in (swapped, renamed, of_another_seed):
            shutil.rmtree(folder, ignore_errors=True)
            own = Checkpoints(folder, 9, ALONE, ours)
            for step in (1, 2, 3):
                own.save(step, tensors, {})
            fault(own)
            try:
                own.load_latest(tensors)
                verdict = LOST
            except ValueError:
                verdict = "refused by one line"
            campaign.note("checkpoint", fault.__name__.replace("_", " "), verdict)


def two_repairs_at_once(campaign: Campaign) -> None:
    """Two processes detect damage in the same packed set at once."""
    text, cache = campaign.corpus, campaign.folder / "shared-cache"
    right = pack_bytes(text, cache)[:]
    (folder,) = (cache / "packed").iterdir()
    for number in range(campaign.size):
        file = folder / (HEADER_FILE, TOKENS_FILE)[number % 2]
        file.write_bytes(file.read_bytes()[: campaign.chance.randrange(10)])
        children = [start(pack_bytes, text, cache) for _ in range(2)]

        def verdict(children: list[BaseProcess] = children) -> None:
            assert [wait(child) for child in children] == [0, 0], "a process failed"
            assert (pack_bytes(text, cache)[:] == right).all(), "other blocks"
            assert not temporaries(cache), "temporary folders were left"

        campaign.note("packing", "damaged set, two processes", outcome(verdict))


PARTS = (kills_in_training, kills_in_packing, kills_in_export, full_disk, damage, exchanges, two_repairs_at_once)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    start_server()
    with tempfile.TemporaryDirectory() as made:
        campaign = Campaign(Path(made), given.size, given.seed)
        for part in PARTS:
            part(campaign)
    print(campaign.table())  # noqa: T201
    raise SystemExit(1 if campaign.lost else 0)
