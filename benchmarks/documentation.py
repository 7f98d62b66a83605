"""False changes of `cedd correct --in-place` in the documentation of projects, and whether each page stays well formed.

    pip download --no-binary :all: --no-deps attrs==24.2.0 && tar xzf attrs-24.2.0.tar.gz
    python benchmarks/documentation.py attrs-24.2.0/docs

Each folder is copied and corrected in the copy. All changes are printed, so that they can be read: whether a change is
right is decided by a person. The pages of reStructuredText (with docutils, from PyPI) and of Markdown (with
markdown-it-py) are parsed before and after; the trees must be equal apart from their text.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

from helps import parser_of

from cedd.apps.correct.prose import syntax_of
from cedd.apps.correct.text_files import text_files


def structure(text: str, syntax: str | None) -> list[str] | None:
    """The kinds of the nodes of a page's tree, in order; None for other syntaxes."""
    if syntax == "markdown":
        from markdown_it import MarkdownIt

        tokens = MarkdownIt("commonmark").enable("table").parse(text)
        return [one.type for token in tokens for one in (token, *(token.children or ()))]
    if syntax == "rst" and importlib.util.find_spec("docutils") is not None:
        from docutils.core import publish_doctree  # pyright: ignore

        tree = publish_doctree(
            text, settings_overrides={"report_level": 5, "halt_level": 5, "file_insertion_enabled": 0}
        )
        return [type(node).__name__ for node in tree.findall()]
    return None


def changed_words(before: str, after: str) -> Iterator[tuple[str, str]]:
    """The words that differ, and what replaced them."""
    old, new = before.split(), after.split()
    for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            yield " ".join(old[a:b]), " ".join(new[c:d])


def test_folder(folder: Path) -> bool:
    """Correct a copy of a folder and print what changed; whether all pages are well formed."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(shutil.copytree(folder, Path(temporary) / "copy", symlinks=True))
        files = list(text_files(copy))
        words = sum(len(file.read_text("utf-8", errors="replace").split()) for file in files)
        subprocess.run([sys.executable, "-m", "cedd", "correct", str(copy), "--in-place"], check=True)
        changes, compared, broken = 0, 0, list[str]()
        for file in files:
            backup = file.with_name(file.name + ".bak")
            if not backup.exists():
                continue
            name, before, after = file.relative_to(copy), *(one.read_text("utf-8") for one in (backup, file))
            for old, new in changed_words(before, after):
                changes += 1
                print(f"{name}: {old} -> {new}")
            if (tree := structure(before, syntax_of(file.name))) is not None:
                compared += 1
                if tree != structure(after, syntax_of(file.name)):
                    broken.append(str(name))
    print(f"{folder}: {words:,} words, {changes} changes, {1000 * changes / max(words, 1):.2f} per 1,000 words")
    print(f"{compared} changed pages compared; {len(broken)} have another structure: {', '.join(broken) or 'none'}\n")
    return not broken


def main() -> int:
    """Test the folders."""
    parser = parser_of(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="folders with documentation")
    folders: list[Path] = parser.parse_args().folders
    if absent := [str(folder) for folder in folders if not folder.is_dir()]:
        parser.error(f"{absent[0]} is not a folder")
    sound = [test_folder(folder) for folder in folders]
    return 0 if all(sound) else 1


if __name__ == "__main__":
    sys.exit(main())
