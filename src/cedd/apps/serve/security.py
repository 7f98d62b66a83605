"""Which requests are accepted, and what a browser may do with the page.

Any web page can send requests to a server on the machine that its browser runs on. Such requests name another site in
Origin or Sec-Fetch-Site, or in Host if that site's name was made to resolve to this machine (DNS rebinding). A numeric
address in Host belongs to no site and is always accepted.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cedd.apps.serve.limits import RequestError
from cedd.apps.serve.responses import error_response

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
    """A Content-Security-Policy that allows this page's own scripts and styles, and no other ones and no other host."""

    def hashes(element: str) -> str:
        found = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"{NOTHING}; connect-src 'self'; img-src data:; script-src {hashes('script')}; style-src {hashes('style')}; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def host_name(host: str) -> str:
    """The name in a Host header, in lower case and without its port."""
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) and not host.endswith("]") else host
    return name.strip("[]").rstrip(".").lower()


def is_address(name: str) -> bool:
    """Whether a name is a numeric address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class SecurityMiddleware:
    """Refuses requests from pages of other sites, and adds security headers to every response.

    Args:
        app: the application.
        hosts: accepted host names in addition to localhost and numeric addresses.
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
        await (self.app if refusal is None else error_response(refusal))(scope, receive, send_guarded)

    def refusal(self, method: str, headers: Headers) -> RequestError | None:
        """The error for a request that is refused, otherwise None."""
        host = headers.get("host", "")
        name = host_name(host)
        if name not in self.hosts and not is_address(name):
            return RequestError(421, "unknown host name; cedd serve --allow-host NAME accepts it")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            return RequestError(403, "requests from pages of other sites are refused")
        opened = method == "GET" and headers.get("sec-fetch-mode") == "navigate"  # a link or the address bar
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not opened:
            return RequestError(403, "requests from pages of other sites are refused")
        if method == "POST" and headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            return RequestError(415, "send JSON, with the header Content-Type: application/json")
        return None
