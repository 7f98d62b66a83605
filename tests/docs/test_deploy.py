"""The files of the deployment page: the image starts the current server, and the proxy fits its defaults."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cedd.apps.serve.limits import Limits
from cedd.cli.arguments import Serve, parse
from docs.refresh import ROOT

FOLDER = ROOT / "docs" / "deploy"
INSTRUCTIONS = {"FROM", "RUN", "COPY", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "WORKDIR"}


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments."""
    lines = re.sub(r"\\\\\n", " ", text).splitlines()
    found = [line.split(None, 1) for line in lines if line.strip() and not line.startswith("#")]
    return [(name, rest) for name, rest in found]


def problems(dockerfile: str) -> list[str]:
    """What is wrong with a Dockerfile."""
    found = instructions(dockerfile)
    names = [name for name, _ in found]
    arguments = dict(found)
    checks = {
        "an unknown instruction": set(names) <= INSTRUCTIONS,
        "does not begin with FROM": names[0] == "FROM",
        "no tag of the base image": re.fullmatch(r"[\w./-]+:[\w.-]+", arguments["FROM"]),
        "pip keeps its cache": all("--no-cache-dir" in rest for name, rest in found if "pip install" in rest),
        "runs as root": arguments.get("USER", "root") not in ("root", "0"),
        "root at the end": names.index("USER") < names.index("ENTRYPOINT") if "USER" in names else False,
        "no health check": "healthz" in arguments.get("HEALTHCHECK", ""),
        "an entry point that is a shell": arguments["ENTRYPOINT"].startswith("["),
    }
    return [problem for problem, fine in checks.items() if not fine]


def test_image_starts_server_with_current_options():
    text = (FOLDER / "Dockerfile").read_text("utf-8")
    assert problems(text) == []
    program, command, *words = json.loads(dict(instructions(text))["ENTRYPOINT"])
    assert (program, command) == ("cedd", "serve")
    started = parse("serve", words)
    assert isinstance(started, Serve)
    assert started.host == "0.0.0.0"
    assert dict(instructions(text))["EXPOSE"] == str(started.port)
    assert f":{started.port}/healthz" in text
    assert (ROOT / ".dockerignore").is_file()


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("USER cedd", "USER root", "runs as root"),
        ("python:3.12-slim", "python", "no tag of the base image"),
        ("--no-cache-dir ", "", "pip keeps its cache"),
        (
            'ENTRYPOINT ["cedd", "serve", "--host", "0.0.0.0"]',
            "ENTRYPOINT cedd serve",
            "an entry point that is a shell",
        ),
    ],
)
def test_mistakes_in_dockerfile_are_detected(old: str, new: str, problem: str):
    text = (FOLDER / "Dockerfile").read_text("utf-8")
    assert old in text
    assert problem in problems(text.replace(old, new))


@pytest.mark.slow
def test_image_builds():
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        pytest.skip("there is no Docker daemon here")
    words = [docker, "build", "-q", "-f", str(FOLDER / "Dockerfile"), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def directives(text: str) -> dict[str, str]:
    """The directives of an nginx configuration; every block is closed."""
    assert text.count("{") == text.count("}")
    return dict(re.findall(r"^\s*(\w+)\s+(.+?)\s*[;{]$", text, re.MULTILINE))


def test_proxy_matches_server_defaults():
    found = directives((FOLDER / "nginx.conf").read_text("utf-8"))
    usual, limits = parse("serve", []), Limits()
    assert found["proxy_pass"] == f"http://127.0.0.1:{usual.port}/"
    assert re.fullmatch(r"/\w+/", found["location"]), "the prefix is removed only if both end in a slash"
    assert found["proxy_buffering"] == "off"
    assert found["proxy_set_header"] == "Host $host"
    assert float(found["proxy_read_timeout"].rstrip("s")) > limits.timeout
    assert int(found["client_max_body_size"].rstrip("k")) * 1024 >= limits.max_body_bytes


def test_page_works_under_prefix():
    """All addresses that it requests are relative."""
    page = (Path(ROOT) / "src" / "cedd" / "apps" / "serve" / "page.html").read_text("utf-8")
    names = "v1|infill|correct|noise|healthz"
    assert re.search(rf"""["'`](?:{names})""", page)
    assert not re.findall(rf"""["'`]/(?:{names})""", page)
