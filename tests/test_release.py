"""The release: one version, an sdist that builds the wheel, and a wheel that works without the repository."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

import cedd

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
DATA = [file.relative_to(SOURCE) for kind in ("model.safetensors", "page.html") for file in SOURCE.rglob(kind)]


def run(words: list[str], folder: Path, **environment: str) -> str:
    """Run a command in a folder and return its output."""
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


HATCHLING_WITHOUT_COMPRESSION = (
    "import zlib; pack = zlib.compressobj; zlib.compressobj = lambda level, *more: pack(0, *more)\n"
    "import sys; from hatchling.cli import hatchling; sys.exit(hatchling())"
)
"""Hatchling, storing files uncompressed: most of its time goes into weights that hardly get smaller."""


def build(source: Path, target: str, folder: Path) -> Path:
    """Build a wheel or an sdist, as `make build` does, and return the file."""
    run([sys.executable, "-c", HATCHLING_WITHOUT_COMPRESSION, "build", "-t", target, "-d", str(folder)], source)
    (file,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return file


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built only from the sdist."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build(folder / f"cedd-{cedd.__version__}", "wheel", tmp_path_factory.mktemp("wheel"))


def test_version_is_defined_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/cedd/__init__.py"


def test_artifact_names_contain_version(wheel: Path, sdist: Path):
    assert wheel.name == f"cedd-{cedd.__version__}-py3-none-any.whl"
    assert sdist.name == f"cedd-{cedd.__version__}.tar.gz"


def test_wheel_contains_all_package_files(wheel: Path):
    tracked = run(["git", "ls-files", "src/cedd"], ROOT).split() if (ROOT / ".git").exists() else []
    expected = {name.removeprefix("src/") for name in tracked if (ROOT / name).exists()}
    assert {*expected, *map(str, DATA), "cedd/py.typed"} <= set(ZipFile(wheel).namelist())


@pytest.mark.slow
def test_wheel_works_in_fresh_environment(wheel: Path, tmp_path: Path):
    """Its dependencies come from the environment that runs the tests: nothing is downloaded."""
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    # A folder listed in a .pth file is searched, but .pth files in it are not read: no editable cedd is found.
    packages = Path(
        run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).strip()
    )
    (packages / "dependencies.pth").write_text("\n".join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    install += ["--no-compile"]  # the few modules that are needed are compiled on import
    run([*install, str(wheel)], tmp_path)

    def there(*words: str) -> str:
        return run([str(python.parent / words[0]), *words[1:]], tmp_path, PYTHONPATH="").strip()

    assert there("cedd", "--version") == f"cedd {cedd.__version__}"
    assert "correct" in there("cedd", "--help")
    # Run the installed script in a process that first prints which package it imports.
    words, script = ["cedd", "correct", "teh cat sat on teh mat"], str(python.parent / "cedd")
    code = f"import cedd, runpy, sys; print(cedd.__file__); sys.argv = {words}; "
    code += f"runpy.run_path({script!r}, run_name='__main__')"
    assert there("python", "-c", code).splitlines() == [
        str(packages / "cedd" / "__init__.py"),
        "the cat sat on the mat",
    ]


def test_build_includes_packaged_models():
    """Hatch includes everything in src/cedd that git does not ignore; no setting may exclude the weights."""
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["packages"] == ["src/cedd"]
    assert "src" in targets["sdist"]["include"]
    assert not any("exclude" in target for target in targets.values())
    assert {file.name for file in DATA} == {"model.safetensors", "page.html"}
    if (ROOT / ".git").exists():
        for file in DATA:
            assert subprocess.run(["git", "check-ignore", "-q", str(SOURCE / file)], cwd=ROOT).returncode == 1


def test_sdist_includes_files_referenced_by_readme():
    """Every listed entry exists, and so does every file of the repository that README runs or links to."""
    target = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["sdist"]
    included = set(target["include"])
    assert all((ROOT / name).exists() for name in included)
    text = (ROOT / "README.md").read_text("utf-8")
    named = re.findall(r"\]\((?!http)([\w./-]+)", text) + re.findall(r"\bpython ([\w/]+\.py)", text)
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).exists(), name
        assert name.split("/")[0] in included, name


# ----------------------------------------------------------------------------------------------------------------
# Continuous integration, pre-commit and citation


def test_workflow_commands_are_documented_in_readme():
    """README lists its commands and the variables it sets; its Python versions are those of pyproject.toml."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text("utf-8"))
    readme, job = (ROOT / "README.md").read_text("utf-8"), workflow["jobs"]["test"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == "make test"
    for name in (*commands, *(f"{variable}=" for variable in job["env"])):
        assert name in readme
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(job["strategy"]["matrix"]["python"]) == {
        version for line in project["classifiers"] if (version := line.rpartition(" :: ")[2]).startswith("3.")
    }


def test_pre_commit_hooks_match_make_lint():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    hooks = [hook["entry"] for repository in config["repos"] for hook in repository["hooks"]]
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert recipe is not None
    assert hooks == [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]


def test_citation_matches_version_and_paper():
    """The format requires the first four keys; README has the paper's title and authors."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == cedd.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (citation["authors"], citation["license"]) == (project["authors"], project["license"])
    (paper,) = citation["references"]
    bibtex = (ROOT / "README.md").read_text("utf-8").partition("```bibtex")[2]
    assert f"{{{paper['title']}}}" in bibtex
    assert " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"]) in bibtex
