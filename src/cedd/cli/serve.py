"""`cedd serve`: the page on which texts are denoised, filled and corrected, and the same over HTTP."""

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

MOST_READERS = 64


def run(arguments: Serve) -> int:
    """Serve until a signal ends it."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} must be installed: pip install 'cedd[serve]'")
    from cedd.serve.app import Site, make_app
    from cedd.serve.desk import Desk
    from cedd.serve.models import Shelf
    from cedd.serve.readers import default_readers
    from cedd.serve.requests import SEEDS
    from cedd.serve.server import Server, address_of, bound_socket

    if not 0 <= arguments.port < 2**16:
        raise UserError(f"--port must lie in 0..65535; got {arguments.port}")
    if arguments.readers is not None and not 0 <= arguments.readers <= MOST_READERS:
        raise UserError(f"--readers must lie in 0..{MOST_READERS}; got {arguments.readers}")
    if arguments.seed is not None and not 0 <= arguments.seed <= SEEDS:
        raise UserError(f"--seed must lie in 0..{SEEDS}; got {arguments.seed}")
    show_log()
    with bound_socket(arguments.host, arguments.port) as bound:
        readers = default_readers() if arguments.readers is None else arguments.readers
        shelf, desk = Shelf.load(arguments.runs, arguments.device, readers), Desk(arguments.limits)
        address = address_of(bound)
        site = Site(shelf, desk, __version__, arguments.log_texts, arguments.seed)
        app = make_app(site, {arguments.host, *arguments.allow_host})

        def started() -> None:
            models = ", ".join(shelf)
            said = json.dumps({"address": address, "models": list(shelf)}) if arguments.json else None
            print(said or printable(f"{models} at {address} (Ctrl-C ends it)"), flush=True)
            if arguments.open:
                webbrowser.open(address)

        Server(app, desk, started).run([bound])
    if not arguments.json:
        print("ended")
    return 0


def show_log() -> None:
    """Lines about requests go to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log = logging.getLogger("cedd.serve")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
