"""`cedd serve`: a web page and an HTTP API for generation, infilling and correction."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import webbrowser

from cedd import __version__
from cedd.cli import UserError
from cedd.cli.arguments import Serve
from cedd.names import printable

MAX_PROCESSES = 64


def run(arguments: Serve) -> int:
    """Serve until a signal ends the server."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} must be installed: pip install 'cedd[serve]'")
    from cedd.apps.serve.app import Handlers, make_app
    from cedd.apps.serve.endpoints import MAX_SEED
    from cedd.apps.serve.reader_pool import default_processes
    from cedd.apps.serve.registry import ModelRegistry
    from cedd.apps.serve.scheduler import Scheduler
    from cedd.apps.serve.server import Server, bind_socket, url_of

    check_range("--port", arguments.port, 2**16 - 1)
    check_range("--lookup-processes", arguments.lookup_processes, MAX_PROCESSES)
    check_range("--seed", arguments.seed, MAX_SEED)
    show_log()
    with bind_socket(arguments.host, arguments.port) as bound:
        processes = default_processes() if arguments.lookup_processes is None else arguments.lookup_processes
        registry = ModelRegistry.load(arguments.runs, arguments.device, processes)
        scheduler, address = Scheduler(arguments.limits), url_of(bound)
        handlers = Handlers(registry, scheduler, __version__, arguments.log_texts, arguments.seed)
        app = make_app(handlers, {arguments.host, *arguments.allow_host})

        def started() -> None:
            models = ", ".join(registry)
            record = json.dumps({"address": address, "models": list(registry)}) if arguments.json else None
            print(record or printable(f"serving {models} at {address} (Ctrl-C to stop)"), flush=True)
            if arguments.open:
                webbrowser.open(address)

        Server(app, scheduler, started).run([bound])
    if not arguments.json:
        print("stopped")
    return 0


def check_range(option: str, value: int | None, highest: int) -> None:
    """Refuse a value of an option that is negative or too large."""
    if value is not None and not 0 <= value <= highest:
        raise UserError(f"{option} must be between 0 and {highest} (got {value})")


def show_log() -> None:
    """Log requests and errors of the event loop to standard error."""
    from cedd.apps.serve.connections import RateLimit

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.addFilter(RateLimit())
    for name, level in (("cedd.apps.serve", logging.INFO), ("asyncio", logging.WARNING)):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(level)
