"""The server's addresses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cedd.names import printable, suggestion
from cedd.serve.desk import Desk, Jobs, refusal
from cedd.serve.events import answer, refused, stream
from cedd.serve.fields import Fields
from cedd.serve.limits import Refused
from cedd.serve.models import TASKS, Shelf
from cedd.serve.noise import noise_curves
from cedd.serve.requests import ADDRESSES, SEEDS, Asked, model_of
from cedd.serve.security import Guard, page_policy

LOG = logging.getLogger("cedd.serve")
BODY_SECONDS = 20.0
"""How long a body may take to arrive."""
SMALL = 2048
"""Bytes of a body that is understood at once; a longer one has a thread, so that others need not wait for it."""
GONE = 499
"""Of a request whose client went away; nobody reads it but the log."""


@dataclass(frozen=True)
class Site:
    """What the addresses share."""

    shelf: Shelf
    desk: Desk
    version: str
    log_texts: bool = False
    seed: int | None = None

    async def health(self, request: Request) -> Response:
        """`GET /healthz`"""
        del request
        waiting, running = self.desk.counts
        return answer({"status": "ok", "version": self.version, "waiting": waiting, "under_way": running})

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`: OpenAI's form, and what each can do."""
        del request
        limits, listed = self.desk.limits, [self.listed(name) for name in self.shelf]
        most = {
            "texts": limits.most_texts,
            "steps": limits.most_steps,
            "blank": limits.most_blank,
            "characters": limits.most_characters,
        }
        defaults = {task: self.shelf.able(task)[:1] for task in TASKS}
        return answer({"object": "list", "data": listed, "limits": most, "defaults": defaults})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`: one of them."""
        name = request.path_params["name"]
        if name not in self.shelf:
            raise Refused(404, f"there is no model {name[:80]!r} here{suggestion(name[:80], self.shelf)}")
        return answer(self.listed(name))

    def listed(self, name: str) -> dict[str, Any]:
        """What the list has of a model."""
        return {"id": name, "object": "model", "created": 0, "owned_by": "cedd", **self.shelf.about[name]}

    async def noise(self, request: Request) -> Response:
        """`POST /noise`: what a sentence becomes, at every time."""
        fields = Fields(await self.body(request))
        _, model = model_of(fields, self.shelf, "write")
        text = fields.text("text", 2000)
        seed = fields.whole("seed", 0, SEEDS, 0)
        fields.end()
        return answer(await run_in_threadpool(noise_curves, model.tokenizer, text, seed))

    def work(self, make: Callable[..., Asked]) -> Callable[[Request], Awaitable[Response]]:
        """An address that does work."""

        async def endpoint(request: Request) -> Response:
            body, limits = await self.body(request), self.desk.limits
            asking = partial(make, Fields(body, {"seed": self.seed}), self.shelf, limits)
            asked = asking() if len(body) <= SMALL else await run_in_threadpool(asking)
            jobs = Jobs(asked.works, limits.deadline, asked.streams)
            self.desk.take(*jobs.all)
            return Shown(jobs, asked) if asked.streams else await self.awaited(jobs, asked, request)

        return endpoint

    async def awaited(self, jobs: Jobs, asked: Asked, request: Request) -> Response:
        """The answer of a request's jobs; when the client goes away first, they end."""
        answering = asyncio.ensure_future(jobs.answers())
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=GONE)
            records = answering.result()
            return refused(records) if isinstance(records, Refused) else answer(asked.joined(records))
        finally:
            jobs.drop()
            for task in (answering, leaving):
                task.cancel()

    async def body(self, request: Request) -> bytes:
        """A request's body, if it is neither too large nor too slow."""
        most, parts, size = self.desk.limits.most_bytes, list[bytes](), 0
        too_large = Refused(413, f"a request may have {most:,} bytes; this one has more", {"Connection": "close"})
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and (len(declared) > 15 or int(declared) > most):
            raise too_large
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            raise Refused(408, "the request's body did not arrive in time") from None
        if self.log_texts:
            LOG.info("%s %s", request.url.path, printable(b"".join(parts).decode("utf-8", "replace")))
        return b"".join(parts)


class Shown(StreamingResponse):
    """The steps of a request's jobs and their answers; when nobody reads them any more, they end."""

    def __init__(self, jobs: Jobs, asked: Asked) -> None:
        async def records() -> AsyncIterator[dict[str, object] | Refused]:
            async for number, record in jobs.records():
                yield record if isinstance(record, Refused) else asked.chunk(number, record)

        super().__init__(stream(records()), media_type="text/event-stream")
        self._drop = jobs.drop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._drop()


async def _left(request: Request) -> None:
    """Returns when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class RequestLog:
    """Writes a line for each request: what it asked for, how it ended, how long it took. Never a text."""

    def __init__(self, app: ASGIApp, routes: Collection[Route]) -> None:
        self.app, self.routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, begun = 0, time.monotonic()

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        finally:
            ours = (route.path for route in self.routes if route.matches(scope)[0] is not Match.NONE)
            path = next(ours, "(no address of ours)")
            LOG.info("%s %s %d %.0f ms", scope["method"], path, status, 1000 * (time.monotonic() - begun))


async def on_refused(request: Request, error: Exception) -> Response:
    """What is said of a request that is not answered."""
    del request
    return refused(error if isinstance(error, Refused) else refusal(error))


async def on_http(request: Request, error: Exception) -> Response:
    """What the routes refuse, in our form."""
    del request
    assert isinstance(error, HTTPException)
    said = {404: "there is no such address here", 405: "this address does not take this method"}
    sentence = said.get(error.status_code, error.detail)
    return refused(Refused(error.status_code, sentence, dict(error.headers or {})))


def make_app(site: Site, hosts: Collection[str] = ()) -> ASGIApp:
    """The server's application."""
    page = resources.files("cedd.serve").joinpath("page.html").read_text("utf-8")
    policy = {"Content-Security-Policy": page_policy(page)}

    async def home(request: Request) -> Response:
        del request
        return HTMLResponse(page, headers=policy)

    routes = [
        Route("/", home),
        Route("/healthz", site.health),
        Route("/v1/models", site.models),
        Route("/v1/models/{name}", site.model),
        Route("/noise", site.noise, methods=["POST"]),
        *(Route(path, site.work(make), methods=["POST"]) for path, make in ADDRESSES.items()),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        site.desk.start()
        site.shelf.readers.begin()
        yield
        site.shelf.readers.end()

    handlers = {Refused: on_refused, ValueError: on_refused, HTTPException: on_http, ClientDisconnect: on_gone}
    handlers[Exception] = on_refused  # of ours: it is logged, and answered in our form
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False  # an address has one name; /healthz/ is none of ours, and not a redirection
    return RequestLog(Guard(app, hosts), routes)


async def on_gone(request: Request, error: Exception) -> Response:
    """The client went away before its request was read."""
    del request, error
    return Response(status_code=GONE)
