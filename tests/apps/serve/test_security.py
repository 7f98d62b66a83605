"""Access: programs on this machine and the server's own page are accepted, pages of other sites are rejected."""

import json
import threading
from typing import Any

import pytest

from tests.apps.serve.servers import (
    LOCAL_CLIENT,
    Headers,
    SecurityMiddleware,
    host_name,
    httpx,
    make_app,
    page_policy,
    served,
    site,
)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1:8008", "[::1]:8008", "10.1.2.3"])
def test_local_host_names_are_accepted(client: Any, host: str):
    assert client.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8008", "", "[::1"])
def test_other_host_names_are_rejected(client: Any, host: str):
    reply = client.post("/correct", json={"text": "a"}, headers={"Host": host})
    assert reply.status_code == 421


def test_additional_host_names_can_be_given(registry):
    guard = SecurityMiddleware(make_app(site(registry)), {"Models.Example"})
    for host, status in (("models.example:80", None), ("other.example", 421)):
        refusal = guard.refusal("GET", Headers({"Host": host}))
        assert (refusal.status if refusal else None) == status


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    ],
)
def test_requests_of_other_sites_are_rejected(client: Any, headers: dict[str, str]):
    for reply in (
        client.post("/correct", json={"text": "a"}, headers=headers),
        client.get("/healthz", headers=headers),
    ):
        assert reply.status_code == 403
        assert "other sites" in reply.json()["error"]["message"]
        assert "access-control-allow-origin" not in reply.headers
    assert client.options("/correct", headers={**headers, "Access-Control-Request-Method": "POST"}).status_code == 403


def test_own_page_and_links_to_it_are_accepted(client: Any, server: tuple[str, object]):
    own = {"Origin": server[0].rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    assert client.post("/correct", json={"text": "a"}, headers=own).status_code == 200
    assert client.get("/", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}).status_code == 200


def test_every_response_has_security_headers(client: Any):
    for reply in (
        client.get("/"),
        client.get("/healthz"),
        client.get("/nothing"),
        client.get("/", headers={"Host": "x"}),
    ):
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["x-frame-options"] == "DENY"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert "server" not in reply.headers


def test_page_policy_allows_only_its_own_script_and_style(client: Any):
    policy = client.get("/").headers["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 2
    assert "connect-src 'self'" in policy
    page = client.get("/").text
    assert page_policy(page) == policy
    assert page_policy(page.replace("use strict", "use Strict")) != policy
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert "innerHTML" not in page


def test_texts_are_returned_unchanged(client: Any):
    text = "<script>alert(1)</script> \u202eabc\u202c \x00\x1b[31m \ud800 </textarea>&amp;"
    body = json.dumps({"text": text, "change": "letters", "threshold": 0})
    reply = client.post("/correct", content=body, headers={"Content-Type": "application/json"})
    assert reply.json()["text"] == text
    assert reply.headers["content-type"] == "application/json"


def test_log_contains_no_texts(registry, monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    others = set(threading.enumerate())  # a server of an earlier test may still write to the log

    def note(form: str, *values: object) -> None:
        if threading.current_thread() not in others:
            lines.append(form % values)

    monkeypatch.setattr("cedd.apps.serve.app.LOG.info", note)
    with served(registry) as (address, _):
        httpx.post(f"{address}correct?secret=1", json={"text": "my secret"}, **LOCAL_CLIENT)
        httpx.get(f"{address}secret/path", **LOCAL_CLIENT)
        httpx.get(f"{address}v1/models/small", **LOCAL_CLIENT)
        httpx.get(f"{address}v1/models/secret", **LOCAL_CLIENT)
    assert len(lines) == 4
    assert lines[0].startswith("POST /correct 200 ")
    assert lines[1].startswith("GET (unknown path) 404 ")
    assert lines[2].startswith("GET /v1/models/{name} 200 ")
    assert "secret" not in "".join(lines)


def test_host_names_are_normalized():
    assert [host_name(host) for host in ("a.B.:80", "[::1]:80", "[::1]", "::1")] == ["a.b", "::1", "::1", ":"]
