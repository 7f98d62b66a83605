"""Who may ask, and what a browser may do with the page.

A server on one's own machine can be reached by every page that its browser opens. Such requests bear the name of
another site, in Origin or Sec-Fetch-Site, or, where that site's name was made to point here (DNS rebinding), in Host. A
numeric address in Host is nobody's name, and so is always taken.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cedd.serve.events import refused
from cedd.serve.limits import Refused

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "no-store",
}
NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def page_policy(page: str) -> str:
    """A Content-Security-Policy under which this very page works, and no other script or style, nor another host."""

    def hashes(element: str) -> str:
        found = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"{NOTHING}; connect-src 'self'; img-src data:; script-src {hashes('script')}; style-src {hashes('style')}; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def host_name(host: str) -> str:
    """The name of a Host header, without its port, in small letters."""
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) and not host.endswith("]") else host
    return name.strip("[]").rstrip(".").lower()


def is_address(name: str) -> bool:
    """Whether a name is a numeric address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    """Refuses requests that other sites' pages make, and adds the headers of every answer.

    Args:
        app: what is guarded.
        hosts: names by which the server may be called, beside localhost and numeric addresses.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        self.app, self.hosts = app, {"localhost", *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in {**HEADERS, "Content-Security-Policy": NOTHING}.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self.refusal(scope["method"], Headers(scope=scope))
        await (self.app if refusal is None else refused(refusal))(scope, receive, send_guarded)

    def refusal(self, method: str, headers: Headers) -> Refused | None:
        """Why a request is not answered; None where it is."""
        host = headers.get("host", "")
        name = host_name(host)
        if name not in self.hosts and not is_address(name):
            return Refused(421, "this server does not go by that name; cedd serve --allow-host NAME adds one")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            return Refused(403, "requests from pages of other sites are refused")
        opened = method == "GET" and headers.get("sec-fetch-mode") == "navigate"  # by a link or an address
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not opened:
            return Refused(403, "requests from pages of other sites are refused")
        if method == "POST" and headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            return Refused(415, "send JSON, with the header Content-Type: application/json")
        return None
