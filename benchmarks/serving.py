"""The server under load: single requests, concurrent clients, and its memory over thousands of requests.

    python benchmarks/serving.py --page docs/results/speed.md

The server runs with `english` and a network of the preset `tiny` with random weights. For each kind of request, some
are sent one after the other for a while; then 200 concurrent clients send 5 different requests each. Every answer must
belong to its request, and an evenly spaced sample is compared with the results of the library. A 503 of the queue's
limit is retried. Then thousands of small requests are sent, and the memory of the server and its processes is read from
the system. This takes about four minutes on two idle cores.

The clients run on the same cores. They are therefore connections that write and read plain bytes, which costs a tenth
of the CPU time of an HTTP library with 200 connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from helps import parser_of
from pages import write_page
from torch import nn

import cedd
from cedd.data.tokenizers import CharTokenizer
from cedd.models.folder import ModelFolder, save_folder
from cedd.models.transformer import Transformer, config_from_preset
from cedd.spelling.corruption import swap_letters
from cedd.storage import write_json

CORRECTOR = "english"
"""The model that corrects."""
ALPHABET = "abcdefghijklmnopqrstuvwxyz .,\nABCDEFGHIJKLMNOPQRSTUVWXYZ"
SENTENCES = (
    "In {} she beleived every word of it.",
    "In {} we will recieve the leters tomorrow.",
    "In {} the goverment decided otherwise.",
    "In {} he went to the libary and read.",
    "In {} it was definately the last train.",
    "In {} they seperated after the dinner.",
    "In {} a new bycicle stood in the yard.",
    "In {} the wheather was fine all week.",
)
RIGHT = (
    "In {} she believed every word of it, and her brother wrote another letter to the family in the country.",
    "In {} the government decided otherwise, although nobody in the capital had expected such a result.",
    "In {} he went to the library and read about ancient bridges until the evening bell was ringing.",
    "In {} they separated after the dinner, since the last train would leave in a quarter of an hour.",
    "In {} a new bicycle stood in the yard, and the children were waiting for somebody to ride it.",
)
WARMING = 4
"""Requests before the clock starts."""
ALONE = 20.0
"""Seconds after which no more requests are made one at a time."""
Request = tuple[str, dict[str, Any]]
"""An address and a body."""


def save_tiny(folder: Path) -> Path:
    """A model folder with the network of the preset `tiny`, whose weights are by chance."""
    torch.manual_seed(0)
    tokenizer = CharTokenizer(ALPHABET)
    process = cedd.roulette(tokenizer.vocab_size)
    shape = config_from_preset("tiny", vocab_size=tokenizer.vocab_size, has_mask=True, dropout=0.0)
    model = Transformer(shape)
    nn.init.normal_(model.head.weight, std=0.3)
    save_folder(folder, ModelFolder(model, process, cedd.get_method("bayes-star"), tokenizer, shape.length))
    return folder


@contextlib.contextmanager
def running(models: list[str]) -> Iterator[tuple[str, int, float]]:
    """A server's address, its process, and the seconds until it answered."""
    words = [sys.executable, "-m", "cedd", "serve", *models, "--port", "0", "--device", "cpu", "--json"]
    begun = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            address = json.loads(process.stdout.readline())["address"]
            assert httpx.get(f"{address}healthz", trust_env=False).status_code == 200
            yield address, process.pid, time.perf_counter() - begun
        except httpx.TransportError:
            log.seek(0)
            ended = process.poll()
            print(f"the server {'runs' if ended is None else f'ended with {ended}'}; its log:", log.read()[-3000:])
            raise
        finally:
            process.terminate()


@dataclass(frozen=True)
class Kind:
    """A kind of request: how a table names it, request i, whether an answer is to it, and what the library answers."""

    title: str
    request: Callable[[int], Request]
    fits: Callable[[int, dict[str, Any]], bool]
    essence: Callable[[dict[str, Any]], Any]
    alone: Callable[[cedd.LanguageModel, int], Any]
    model: str


def completion(i: int) -> Request:
    """A text of the tiny model; requests differ in seed, prompt and temperature."""
    prompt = "the "[: i % 5]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 32 - len(prompt), "steps": 64, "seed": i}
    return "v1/completions", {**body, "temperature": (0.7, 1.0)[i % 2]}


def completed(model: cedd.LanguageModel, i: int) -> str:
    """The same by the library."""
    body = completion(i)[1]
    options = {name: body[name] for name in ("prompt", "steps", "seed", "temperature")}
    return model.generate(1, length=32, **options)[0][len(body["prompt"]) :]


def correction(i: int) -> Request:
    """A sentence with a mistake that many make; no two are the same."""
    return "correct", {"model": CORRECTOR, "text": SENTENCES[i % len(SENTENCES)].format(1000 + i)}


def new_mistake(i: int) -> Request:
    """A sentence with letters exchanged at places that no other request has."""
    return "correct", {"model": CORRECTOR, "text": swap_letters(RIGHT[i % len(RIGHT)].format(1000 + i), 0.03, i).text}


def corrections(title: str, make: Callable[[int], Request]) -> Kind:
    """A kind of correction."""
    return Kind(
        title,
        make,
        lambda i, record: record["original"] == make(i)[1]["text"],
        lambda record: record["text"],
        lambda model, i: str(model.correct(make(i)[1]["text"])),
        CORRECTOR,
    )


KINDS = {
    "completions": Kind(
        "completions of `tiny`, 32 tokens, 64 steps",
        completion,
        lambda i, record: record["seed"] == i,
        lambda record: record["choices"][0]["text"],
        completed,
        "tiny",
    ),
    "corrections": corrections(f"corrections by `{CORRECTOR}`: sentences with a common misspelling", correction),
    "new mistakes": corrections(
        f"corrections by `{CORRECTOR}`: longer sentences, letters transposed at random", new_mistake
    ),
}


class Client:
    """A client with a connection of its own."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.host, self._reader, self._writer = httpx.URL(address).netloc.decode(), reader, writer
        self.answered = self.refused = 0

    @classmethod
    async def connect(cls, address: str) -> Client:
        """One that is connected."""
        url = httpx.URL(address)
        return cls(address, *await asyncio.open_connection(url.host, url.port))

    async def ask(self, request: Request) -> dict[str, Any]:
        """The answer to a request, asked again as long as the queue is full."""
        while True:
            status, headers, body = await self._post(request)
            if status == 200:
                self.answered += 1
                return json.loads(body)
            if status != 503:
                raise RuntimeError(f"{request[0]} was answered {status}: {body[:200]!r}")
            self.refused += 1
            await asyncio.sleep(float(headers["retry-after"]) * random.uniform(0.5, 1.5))

    async def _post(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        body = json.dumps(request[1]).encode()
        lines = (f"POST /{request[0]} HTTP/1.1", f"Host: {self.host}", "Content-Type: application/json")
        self._writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        first, *rest = (await self._reader.readuntil(b"\r\n\r\n")).decode().strip().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in rest)
        return int(first.split()[1]), headers, await self._reader.readexactly(int(headers["content-length"]))

    def close(self) -> None:
        """Go away."""
        self._writer.close()


async def measured(
    address: str, process: int, kind: Kind, one_by_one: int, clients: int, each: int
) -> tuple[dict[str, Any], list[Any]]:
    """Figures for requests one at a time (a number of them, or ALONE seconds), then for many at once, and the answers
    of the latter."""
    total, numbers = clients * each, itertools.count()
    single = await Client.connect(address)
    for i in range(total + one_by_one, total + one_by_one + WARMING):  # what the first requests load
        await single.ask(kind.request(i))
    begun, computed = time.perf_counter(), processor_seconds(process)
    asked = 0
    while asked < one_by_one and time.perf_counter() - begun < ALONE:
        await single.ask(kind.request(total + asked))
        asked += 1
    alone = asked / (time.perf_counter() - begun)
    alone_computed = (processor_seconds(process) - computed) / asked
    single.close()
    crowd = [await Client.connect(address) for _ in range(clients)]
    answers, waits = list[Any]([None] * total), list[float]()

    async def ask_all(client: Client) -> None:
        for _ in range(each):
            i, sent = next(numbers), time.perf_counter()
            answers[i] = await client.ask(kind.request(i))
            waits.append(time.perf_counter() - sent)

    begun, computed, clients_computed = time.perf_counter(), processor_seconds(process), time.process_time()
    await asyncio.gather(*map(ask_all, crowd))
    together = total / (time.perf_counter() - begun)
    together_computed = (processor_seconds(process) - computed) / total
    clients_computed = (time.process_time() - clients_computed) / total
    for client in crowd:
        client.close()
    waits.sort()
    figures = {
        "one_by_one": asked,
        "clients": clients,
        "each": each,
        "answered": sum(client.answered for client in crowd),
        "refused": sum(client.refused for client in crowd),
        "mixed_up": sum(not kind.fits(i, record) for i, record in enumerate(answers)),
        "alone_per_second": alone,
        "together_per_second": together,
        "gain": together / alone,
        "alone_computed_ms": 1000 * alone_computed,
        "together_computed_ms": 1000 * together_computed,
        "of_these_by_clients_ms": 1000 * clients_computed,
        "median_seconds": waits[len(waits) // 2],
        "longest_seconds": waits[-1],
    }
    return figures, [kind.essence(record) for record in answers]


def sentence(row: dict[str, Any]) -> str:
    """The figures of a kind."""
    return (
        f"{row['answered']} answered, {row['refused']} refused for a while, {row['mixed_up']} mixed up, "
        f"{row['wrong']} of {row['checked']} other than alone; {row['alone_per_second']:.2f}/s one at a time, "
        f"{row['together_per_second']:.2f}/s with {row['clients']} clients ({row['gain']:.1f} times); "
        f"{row['alone_computed_ms']:.1f} and {row['together_computed_ms']:.1f} ms computed for each; median "
        f"{row['median_seconds']:.1f} s, longest {row['longest_seconds']:.1f} s"
    )


COLUMNS = ("one at a time", "with 200 clients", "gain", "CPU time per request")


def table(found: dict[str, Any]) -> str:
    """The figures for a page."""
    lines = [f"| requests | {' | '.join(COLUMNS)} |", f"|---|{'--:|' * len(COLUMNS)}"]
    rows = {name: found[name] for name in KINDS if name in found}
    for name, row in rows.items():
        cells = (
            f"{row['alone_per_second']:.2f}/s",
            f"{row['together_per_second']:.2f}/s",
            f"{row['gain']:.1f} times",
            f"{row['alone_computed_ms']:.0f}, {row['together_computed_ms']:.0f} ms",
        )
        lines.append(f"| {KINDS[name].title} | {' | '.join(cells)} |")
    answered, refused, wrong = (
        sum(row[one] for row in rows.values() for one in names)
        for names in (("answered",), ("refused",), ("mixed_up", "wrong"))
    )
    text = (
        f"Single run on {found['cores']} cores ({found['machine']}, load average {found['load_average']:.1f} before). "
        f"{answered:,} requests were answered ({refused} refused at first), and {wrong} answers were wrong. "
        f"The server started in {found['start_seconds']:.1f} s"
    )
    if memory := found.get("memory"):
        text += (
            f" and used {memory['least_mib']:.0f} to {memory['most_mib']:.0f} MiB over {memory['requests']:,} small "
            "requests, half of them corrections"
        )
    return "\n".join([*lines, "", textwrap.fill(f"{text}.", 120)])


def family(process: int) -> Iterator[list[str]]:
    """The fields of /proc/PID/stat of a process and its children, from the state on (`man 5 proc`; Linux)."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            said = (folder / "stat").read_text().rpartition(")")[2].split()
            if process in (int(said[1]), int(folder.name)):
                yield said


def resident(process: int) -> float:
    """Their memory, in MiB."""
    return sum(int(said[21]) for said in family(process)) * os.sysconf("SC_PAGE_SIZE") / 2**20


def processor_seconds(process: int) -> float:
    """The seconds that they and the clients have computed."""
    ticks = sum(int(said[11]) + int(said[12]) for said in family(process))
    return ticks / os.sysconf("SC_CLK_TCK") + time.process_time()


async def memory(address: str, process: int, requests: int, clients: int = 16) -> dict[str, Any]:
    """The server's memory over many small requests of both kinds, after the first tenth."""
    sizes, numbers = list[float](), itertools.count()

    async def ask_all(client: Client) -> None:
        while (i := next(numbers)) < requests:
            path, body = (completion, correction)[i % 2](i)
            await client.ask((path, {**body, "steps": 2} if path == "v1/completions" else body))
            if i >= requests // 10 and i % max(1, requests // 100) == 0:
                sizes.append(resident(process))
        client.close()

    await asyncio.gather(*[ask_all(await Client.connect(address)) for _ in range(clients)])
    return {
        "requests": requests,
        "least_mib": min(sizes),
        "most_mib": max(sizes),
        "spread": max(sizes) / min(sizes) - 1,
    }


def main() -> None:
    """Measure, print, and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--clients", type=int, default=200, help="clients at the same time")
    parser.add_argument("--each", type=int, default=5, help="requests per client")
    parser.add_argument(
        "--one-by-one", type=int, default=240, help="largest number of requests of a kind sent one at a time"
    )
    parser.add_argument("--checked", type=int, default=24, help="answers to compare with the library's")
    parser.add_argument("--memory", type=int, default=5000, help="small requests during which memory is measured")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, help="kinds of requests")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--page", type=Path, help="page with a table of the results")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        tiny = str(save_tiny(Path(folder) / "tiny"))
        with running([tiny, CORRECTOR]) as (address, process, seconds):
            found |= {"start_seconds": seconds, "load_average": os.getloadavg()[0]}
            print(f"started in {seconds:.1f} s; load average {found['load_average']:.1f}", flush=True)
            for name in arguments.kinds:
                kind = KINDS[name]
                load = measured(address, process, kind, arguments.one_by_one, arguments.clients, arguments.each)
                row, answers = asyncio.run(load)
                model = cedd.load(tiny if kind.model == "tiny" else kind.model, "cpu")
                checked = range(0, len(answers), max(1, len(answers) // arguments.checked))
                row["checked"] = len(checked)
                row["wrong"] = sum(kind.alone(model, i) != answers[i] for i in checked)
                found[name] = row
                keep(found, arguments.out)
                print(f"{name}: {sentence(row)}", flush=True)
            if arguments.memory:
                found["memory"] = row = asyncio.run(memory(address, process, arguments.memory))
                print(f"memory over {row['requests']} requests: {row['least_mib']:.0f} to {row['most_mib']:.0f} MiB")
                keep(found, arguments.out)
    if arguments.page is not None:
        write_page(arguments.page, {"load": table(found)})


def keep(found: dict[str, Any], out: Path | None) -> None:
    """Write what was found so far."""
    if out is not None:
        write_json(out, found)


if __name__ == "__main__":
    main()
