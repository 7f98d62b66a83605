"""The server under load: one request at a time, many clients at once, and its memory over thousands of requests.

    python benchmarks/serving.py --out serving.json

A server is started as a user would, with english-char and a network of the preset `tiny` (its weights by chance, which
does not change what it costs). For each kind of request, some different ones are asked one after the other; then 200
clients ask 5 each at once. Every answer must be that of the same request alone, or a 503 of the queue's limit, which is
asked again. Then small requests are made by the thousand, and the server's memory is read from the system.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import nn

import cedd
from cedd.data.tokenizers import CharTokenizer
from cedd.models.folder import ModelFolder, save_folder
from cedd.models.transformer import Transformer, config_from_preset
from cedd.storage import write_json

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,\nABCDEFGHIJKLMNOPQRSTUVWXYZ"
SENTENCES = (
    "She beleived every word of it.",
    "We will recieve the leters tomorrow.",
    "The goverment has decided otherwise.",
    "He went to the libary and read.",
    "It was definately the last train.",
    "They seperated after the dinner.",
    "A new bycicle stood in the yard.",
    "The wheather was fine all week.",
)
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


@contextmanager
def running(models: list[str]) -> Iterator[tuple[str, int, float]]:
    """A server's address, its process, and the seconds until it answered."""
    words = [sys.executable, "-m", "cedd", "serve", *models, "--port", "0", "--device", "cpu", "--json"]
    begun = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            address = json.loads(process.stdout.readline())["address"]
            assert httpx.get(f"{address}healthz", trust_env=False).status_code == 200
            yield address, process.pid, time.perf_counter() - begun
        finally:
            process.terminate()


def completion(i: int) -> Request:
    """A text of the tiny model; requests differ in seed, prompt and temperature."""
    body = {"model": "tiny", "prompt": "the "[: i % 5], "max_tokens": 32 - min(i % 5, 4), "steps": 64, "seed": i}
    return "v1/completions", {**body, "temperature": (0.7, 1.0)[i % 2]}


def correction(i: int) -> Request:
    """A sentence with a mistake; no two are the same."""
    return "correct", {"model": "english-char", "text": f"{SENTENCES[i % len(SENTENCES)]} That was in {1800 + i}."}


KINDS: dict[str, Callable[[int], Request]] = {"completions of tiny": completion, "corrections": correction}


def essence(reply: httpx.Response) -> str:
    """What must be the same in every answer to one request."""
    record = reply.json()
    return json.dumps([choice["text"] for choice in record["choices"]] if "choices" in record else record["text"])


async def asked(client: httpx.AsyncClient, request: Request, counts: dict[str, int]) -> str:
    """The answer to a request, asked again as long as the queue is full."""
    while True:
        reply = await client.post(request[0], json=request[1])
        if reply.status_code == 200:
            counts["answered"] += 1
            return essence(reply)
        if reply.status_code != 503:
            raise RuntimeError(f"{request[0]} was answered {reply.status_code}: {reply.text[:200]}")
        counts["refused"] += 1
        await asyncio.sleep(float(reply.headers["retry-after"]) * random.uniform(0.5, 1.5))


async def measured(
    address: str, make: Callable[[int], Request], different: int, clients: int, each: int
) -> dict[str, Any]:
    """One at a time, then many at once."""
    limits = httpx.Limits(max_connections=clients)
    counts = {"answered": 0, "refused": 0}
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits, trust_env=False) as client:
        await asked(client, make(different), counts)  # what is loaded by the first request
        begun = time.perf_counter()
        alone = [await asked(client, make(i), counts) for i in range(different)]
        alone_seconds = time.perf_counter() - begun
        counts.update(answered=0, refused=0)
        numbers, wrong, waits = itertools.count(), 0, list[float]()

        async def one_client() -> None:
            nonlocal wrong
            for _ in range(each):
                i, sent = next(numbers) % different, time.perf_counter()
                wrong += await asked(client, make(i), counts) != alone[i]
                waits.append(time.perf_counter() - sent)

        begun = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(clients)))
        seconds = time.perf_counter() - begun
    waits.sort()
    return {
        "different": different,
        "clients": clients,
        "each": each,
        **counts,
        "wrong": wrong,
        "alone_per_second": different / alone_seconds,
        "together_per_second": clients * each / seconds,
        "gain": clients * each / seconds * alone_seconds / different,
        "median_seconds": waits[len(waits) // 2],
        "longest_seconds": waits[-1],
    }


def resident(process: int) -> float:
    """The memory of a process in MiB (Linux)."""
    fields = Path(f"/proc/{process}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def memory(address: str, process: int, requests: int, clients: int = 16) -> dict[str, Any]:
    """The server's memory over so many small requests, from a tenth of them on."""
    sizes, numbers = list[float](), itertools.count()
    async with httpx.AsyncClient(base_url=address, timeout=600, trust_env=False) as client:

        async def one_client() -> None:
            while (i := next(numbers)) < requests:
                path, body = completion(i)
                await asked(client, (path, {**body, "steps": 2, "stream": False}), {"answered": 0, "refused": 0})
                if i >= requests // 10 and i % max(1, requests // 100) == 0:
                    sizes.append(resident(process))

        await asyncio.gather(*(one_client() for _ in range(clients)))
    return {
        "requests": requests,
        "least_mib": min(sizes),
        "most_mib": max(sizes),
        "spread": max(sizes) / min(sizes) - 1,
    }


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--each", type=int, default=5, help="requests of each client")
    parser.add_argument("--different", type=int, default=40, help="different requests of a kind")
    parser.add_argument("--memory", type=int, default=5000, help="small requests over which memory is read")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        tiny = str(save_tiny(Path(folder) / "tiny"))
        with running([tiny, "english-char"]) as (address, process, seconds):
            found["start_seconds"] = seconds
            print(f"started in {seconds:.1f} s; load average {os.getloadavg()[0]:.1f}", flush=True)
            for kind in arguments.kinds:
                load = measured(address, KINDS[kind], arguments.different, arguments.clients, arguments.each)
                found[kind] = row = asyncio.run(load)
                print(
                    f"{kind}: {row['answered']} answered, {row['refused']} refused for a while, {row['wrong']} wrong; "
                    f"{row['alone_per_second']:.2f}/s one at a time, {row['together_per_second']:.2f}/s with "
                    f"{row['clients']} clients ({row['gain']:.1f} times); median {row['median_seconds']:.1f} s, "
                    f"longest {row['longest_seconds']:.1f} s",
                    flush=True,
                )
            if arguments.memory:
                found["memory"] = row = asyncio.run(memory(address, process, arguments.memory))
                print(f"memory over {row['requests']} requests: {row['least_mib']:.0f} to {row['most_mib']:.0f} MiB")
    if arguments.out is not None:
        write_json(arguments.out, found)


if __name__ == "__main__":
    main()
