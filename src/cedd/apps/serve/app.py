"""The HTTP application: routes, handlers, middleware."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from importlib import resources

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cedd.apps.serve.endpoints import ENDPOINTS, MAX_SEED, ParsedRequest, requested_model, unknown_model
from cedd.apps.serve.limits import RequestError
from cedd.apps.serve.noise import noise_curves
from cedd.apps.serve.openapi import openapi_document
from cedd.apps.serve.registry import TASKS, ModelRegistry
from cedd.apps.serve.request_fields import RequestFields
from cedd.apps.serve.responses import error_response, event_stream, json_response
from cedd.apps.serve.scheduler import JobGroup, Scheduler, error_for
from cedd.apps.serve.security import SecurityMiddleware, page_policy
from cedd.apps.serve.structured_output import asks_for_structure
from cedd.names import printable
from cedd.storage import JSONObject

LOG = logging.getLogger("cedd.apps.serve")
BODY_TIMEOUT = 20.0
"""Time limit for the body of a request."""
SMALL_BODY = 2048
"""Bytes of a body that is parsed in the event loop. A longer one is parsed in a thread, without delaying others."""
CLIENT_CLOSED = 499
"""Status in the log of a request whose client disconnected."""


@dataclass(frozen=True)
class Handlers:
    """What the request handlers share, and the handlers."""

    registry: ModelRegistry
    scheduler: Scheduler
    version: str
    log_texts: bool = False
    seed: int | None = None

    async def health(self, request: Request) -> Response:
        """`GET /healthz`"""
        del request
        waiting, running = self.scheduler.counts
        return json_response({"status": "ok", "version": self.version, "waiting": waiting, "running": running})

    async def openapi(self, request: Request) -> Response:
        """`GET /openapi.json`: the description of these endpoints."""
        del request
        return json_response(openapi_document(self.registry, self.scheduler.limits, self.version))

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`: in OpenAI's form, with the capabilities of each model."""
        del request
        limits = self.scheduler.limits
        most = {
            "texts": limits.max_texts,
            "steps": limits.max_steps,
            "blank_tokens": limits.max_blank_tokens,
            "characters": limits.max_characters,
        }
        listed = [self.model_record(name) for name in self.registry]
        defaults = {task: self.registry.supporting(task)[:1] for task in TASKS}
        return json_response({"object": "list", "data": listed, "limits": most, "defaults": defaults})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`: one model."""
        name = request.path_params["name"]
        if name not in self.registry:
            raise unknown_model(name, self.registry)
        return json_response(self.model_record(name))

    def model_record(self, name: str) -> JSONObject:
        """A model in OpenAI's form."""
        return {"id": name, "object": "model", "created": 0, "owned_by": "cedd", **self.registry.info[name]}

    async def noise(self, request: Request) -> Response:
        """`POST /noise`: how noise changes a sentence, as a function of time."""
        fields = RequestFields(await self.body(request))
        _, model = requested_model(fields, self.registry, "write")
        text = fields.text("text", 2000)
        seed = fields.integer("seed", 0, MAX_SEED, 0)
        fields.end()
        return json_response(await run_in_threadpool(noise_curves, model.tokenizer, text, seed))

    def work(self, parse: Callable[..., ParsedRequest]) -> Callable[[Request], Awaitable[Response]]:
        """A handler that parses a request into tasks and runs them."""

        async def endpoint(request: Request) -> Response:
            body, limits = await self.body(request), self.scheduler.limits
            parsing = partial(parse, RequestFields(body, {"seed": self.seed}), self.registry, limits)
            at_once = len(body) <= SMALL_BODY and not asks_for_structure(body)
            parsed = parsing() if at_once else await run_in_threadpool(parsing)
            jobs = JobGroup(parsed.tasks, limits.timeout, parsed.streams)
            self.scheduler.submit(*jobs.jobs)
            return JobStream(jobs, parsed) if parsed.streams else await self.result(jobs, parsed, request)

        return endpoint

    async def result(self, jobs: JobGroup, parsed: ParsedRequest, request: Request) -> Response:
        """The response of a request's jobs, which are abandoned if the client disconnects first."""
        answering = asyncio.ensure_future(jobs.answers())
        leaving = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=CLIENT_CLOSED)
            records = answering.result()
            if isinstance(records, RequestError):
                return error_response(records)
            return json_response(parsed.joined(records))
        finally:
            jobs.abandon()
            for task in (answering, leaving):
                task.cancel()

    async def body(self, request: Request) -> bytes:
        """The body of a request; an error if it is too large or too slow."""
        most, parts, size = self.scheduler.limits.max_body_bytes, list[bytes](), 0
        too_large = RequestError(413, f"the body has more than {most:,} bytes, the maximum", {"Connection": "close"})
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and (len(declared) > 15 or int(declared) > most):
            raise too_large
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            late = f"the body of the request did not arrive within {BODY_TIMEOUT:g} s"
            raise RequestError(408, late, {"Connection": "close"}) from None
        if self.log_texts:
            LOG.info("%s %s", request.url.path, printable(b"".join(parts).decode("utf-8", "replace")))
        return b"".join(parts)


class JobStream(StreamingResponse):
    """Server-sent events with the steps and results of jobs, which are abandoned if the client disconnects."""

    def __init__(self, jobs: JobGroup, parsed: ParsedRequest) -> None:
        async def records() -> AsyncIterator[dict[str, object] | RequestError]:
            async for number, record in jobs.records():
                yield record if isinstance(record, RequestError) else parsed.chunk(number, record)

        super().__init__(event_stream(records()), media_type="text/event-stream")
        self._abandon = jobs.abandon

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._abandon()


async def _disconnected(request: Request) -> None:
    """Returns when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class RequestLogMiddleware:
    """Logs each request: method, path, status, time. Never its texts."""

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
            path = next(ours, "(unknown path)")
            LOG.info("%s %s %d %.0f ms", scope["method"], path, status, 1000 * (time.monotonic() - begun))


async def on_error(request: Request, error: Exception) -> Response:
    """The response to an exception."""
    del request
    return error_response(error if isinstance(error, RequestError) else error_for(error))


async def on_http_error(request: Request, error: Exception) -> Response:
    """The response to an exception of the router, in OpenAI's form."""
    del request
    assert isinstance(error, HTTPException)
    messages = {404: "no such path", 405: "method not allowed on this path"}
    message = messages.get(error.status_code, error.detail)
    return error_response(RequestError(error.status_code, message, dict(error.headers or {})))


def make_app(handlers: Handlers, hosts: Collection[str] = ()) -> ASGIApp:
    """The server's application."""
    page = resources.files("cedd.apps.serve").joinpath("page.html").read_text("utf-8")
    policy = {"Content-Security-Policy": page_policy(page)}

    async def home(request: Request) -> Response:
        del request
        return HTMLResponse(page, headers=policy)

    routes = [
        Route("/", home),
        Route("/healthz", handlers.health),
        Route("/openapi.json", handlers.openapi),
        Route("/v1/models", handlers.models),
        Route("/v1/models/{name}", handlers.model),
        Route("/noise", handlers.noise, methods=["POST"]),
        *(Route(path, handlers.work(parse), methods=["POST"]) for path, parse in ENDPOINTS.items()),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        handlers.scheduler.start()
        handlers.registry.reader_pool.start()
        yield
        handlers.registry.reader_pool.end()

    on_exception = {RequestError: on_error, ValueError: on_error, HTTPException: on_http_error}
    on_exception |= {ClientDisconnect: on_disconnect, Exception: on_error}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=on_exception)
    app.router.redirect_slashes = False  # /healthz/ is a 404, not a redirection
    return RequestLogMiddleware(SecurityMiddleware(app, hosts), routes)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The client disconnected before its request was read."""
    del request, error
    return Response(status_code=CLIENT_CLOSED)
