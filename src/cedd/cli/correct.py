"""`cedd correct`: correct the spelling of a text."""

from __future__ import annotations

import codecs
import difflib
import errno
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rich.style import Style

from cedd.apps.correct.left_to_right import load_left_to_right, reads_without_torch
from cedd.apps.correct.word_by_word import LazyScores, lexicon_in, reader_in, word_by_word, words_folder
from cedd.cli import UserError
from cedd.cli.arguments import Correct
from cedd.cli.console import PlainConsole
from cedd.cli.inputs import DEFAULT_CORRECTOR, TextSource, file_source, is_file, model_and_source
from cedd.cli.progress import progress_bar
from cedd.cli.unused import refuse_unused
from cedd.models.locate import CONFIG_FILE, is_model, locate, packaged, pretrained_names
from cedd.names import printable
from cedd.spelling.changes import Change, Corrected, correction_record
from cedd.spelling.code import open_block
from cedd.spelling.engines import default_engine
from cedd.spelling.options import LETTER_OPTIONS
from cedd.storage import atomic_file, check_writable, read_json, write_durably

if TYPE_CHECKING:
    from cedd.tasks import LanguageModel

A_FEW_LINES = 1000
"""Largest number of characters."""
FIRST_PIECE, PIECE = 1 << 11, 1 << 14
"""Characters of the first and of the largest piece; each piece is up to twice as long as the one before, so that the
first result appears soon."""
BACKUP = ".bak"
LONGEST_LIST = 1 << 24
"""Characters of a file of words to ignore."""


def run(arguments: Correct) -> int:
    """Correct one text or several files, and print the result in the requested form."""
    if sum((arguments.diff, arguments.in_place, arguments.check, arguments.suggest is not None)) > 1:
        raise UserError("--diff, --in-place, --check and --suggest are different results; give one of them")
    if arguments.in_place and arguments.json:
        raise UserError("--in-place writes the files and prints nothing; give --json without it to see the changes")
    if arguments.suggest is not None and arguments.suggest < 1:
        raise UserError(f"--suggest needs a number of candidates, 1 or more (got {arguments.suggest})")
    if (arguments.steps or 1) == 1:
        refuse_unused(arguments, ("temperature", "seed"), "without --steps 2 or more")
    else:
        refuse_unused(arguments, ("swaps",), f"with --steps {arguments.steps}")
    name, sources = model_and_sources(arguments)
    if arguments.in_place and any(source.path is None for source in sources):
        raise UserError("--in-place corrects files; give their names")
    few = all(source.size is not None and source.size <= A_FEW_LINES for source in sources)
    correct = corrector(locate(name), arguments, few)
    found, records = False, list[dict[str, object]]()
    with progress_bar("correcting", not (few or arguments.json)) as progress:
        for source in sources:
            changed, parts = False, corrected_pieces(source, correct, progress)
            if arguments.in_place:
                changed = rewrite_file(source, parts)
            elif arguments.json:
                records.append(record(source, joined(parts), arguments.suggest))
                changed = bool(records[-1]["changes"])
            elif arguments.diff:
                changed = show_diff(source, joined(parts))
            elif arguments.check or arguments.suggest is not None:
                changed = show_lines(source, joined(parts), arguments.suggest)
            else:
                stream(source, parts)
            found = found or changed
    if arguments.json:
        print(json.dumps(records[0] if len(records) == 1 else records))
    return int(found and arguments.check)


# ----------------------------------------------------------------------------------------------------------------
# Texts and models


def model_and_sources(arguments: Correct) -> tuple[str | Path, list[TextSource]]:
    """The model and the texts of a command line [MODEL] TEXT or [MODEL] FILE..."""
    words = list(arguments.words)
    if words and all(word != "-" for word in words):
        model = words[0] if words[0] and (words[0] in pretrained_names() or is_model(words[0])) else None
        files = words[model is not None :]
        on_files = arguments.diff or arguments.in_place or arguments.check
        named = [is_file(word) for word in files]
        if files and (on_files or all(named) or (len(files) > 1 and any(named))):
            if arguments.file is not None:
                raise UserError("give files by their names or by --file, not both")
            return packaged(DEFAULT_CORRECTOR) if model is None else locate(model), [
                file_source(Path(f)) for f in files
            ]
    name, source = model_and_source(words, arguments.file, DEFAULT_CORRECTOR, 'cedd correct "I hav a speling mistke"')
    return name, [source]


def corrector(folder: Path, arguments: Correct, few: bool) -> Callable[[str], Corrected]:
    """The function that corrects a text with the model of a folder.

    A packaged model that corrects words loads its network when it is first needed, and does not import torch.
    """
    engine = arguments.engine or default_engine(folder, read_json(folder / CONFIG_FILE))
    options = {name: value for name in sorted(LETTER_OPTIONS) if (value := getattr(arguments, name)) is not None}
    others = options.keys() - {"threshold"} if engine == "words" else set()
    if others:
        raise UserError(f"--{min(others).replace('_', '-')} is an option of --engine letters; this is --engine words")
    if engine == "letters" and arguments.ignore_words is not None:
        raise UserError("--ignore-words is an option of --engine words; this is --engine letters")
    words = {} if engine == "letters" else {"ignored_words": ignored_words(arguments)}
    if engine == "words" and folder in map(packaged, pretrained_names()) and arguments.device in ("auto", "cpu"):
        beside = words_folder(folder, read_json(folder / CONFIG_FILE))
        if lexicon_in(beside) is not None and reads_without_torch(read_json(beside / CONFIG_FILE)):
            scores = LazyScores(partial(load_left_to_right, beside))
            return partial(
                word_by_word,
                reader_in(beside),
                scores=scores,
                threshold=arguments.threshold,
                ignored=words["ignored_words"],
            )
    from cedd.apps.correct.engine import corrector_folder

    model = loaded(corrector_folder(folder, engine), arguments, few)
    return partial(model.correct, engine=engine, **options, **words, seed=arguments.seed)


def loaded(folder: Path, arguments: Correct, few: bool) -> LanguageModel:
    """The model of a folder; torch is imported here."""
    import torch

    from cedd.tasks import load

    if few:
        torch.set_num_threads(1)  # read in hundredths of a second: on a busy machine threads would wait for each other
    return load(folder, arguments.device)


def ignored_words(arguments: Correct) -> frozenset[str]:
    """The words of a list, which are correct even if the lexicon does not have them."""
    if arguments.ignore_words is None:
        return frozenset()
    path = arguments.ignore_words.expanduser()
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(LONGEST_LIST + 1)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if len(text) > LONGEST_LIST:
        raise UserError(f"{path} is longer than {LONGEST_LIST:,} characters, too long for a list of words")
    return frozenset(text.split())


# ----------------------------------------------------------------------------------------------------------------
# Piece by piece


def pieces(stream: BinaryIO) -> Iterator[tuple[str, str]]:
    """The text of a stream in pieces of up to twice `PIECE` characters, cut after a line if possible, otherwise after a
    space, and not within a code block unless it is longer than that. Bytes that are not UTF-8 become lone surrogates,
    which are never corrected.

    With each piece comes the opening fence of the code block that it continues, or an empty string.
    """
    decoder, kept, size, fence = codecs.getincrementaldecoder("utf-8")("surrogateescape"), "", FIRST_PIECE, ""
    while True:
        content = stream.read(size)
        kept += decoder.decode(content, final=not content)
        if not content:
            if kept:
                yield fence, kept
            return
        if len(kept) > size:
            cut = 1 + max(kept.rfind("\n"), -1)
            cut = cut or 1 + kept.rfind(" ") or len(kept) - 1  # never between \r and \n
            start, mark = open_block(fence + kept[:cut]) or (0, "")
            if start > len(fence):
                cut, mark = start - len(fence), ""  # the next piece begins with the block itself
            yield fence, kept[:cut]
            kept, size, fence = kept[cut:], min(2 * size, PIECE), mark and mark + "\n"


def corrected_pieces(
    source: TextSource, correct: Callable[[str], Corrected], progress: Callable[[float, float], None]
) -> Iterator[Corrected]:
    """The corrected pieces of a text; `progress` is called with (done, planned) bytes after each. A source with a zero
    byte is not text, and stays unchanged from that piece on."""
    with source.opened() as stream:
        text, done, size = True, 0, source.size
        for fence, piece in pieces(stream):
            text = text and "\0" not in piece
            yield after(fence, correct(fence + piece)) if text else Corrected(piece, piece, ())
            done += len(piece.encode("utf-8", "surrogateescape"))
            progress(done, done if size is None else size)


def after(fence: str, corrected: Corrected) -> Corrected:
    """A corrected piece without the fence that was put before it."""
    if not fence:
        return corrected
    changes, suspicious = (
        [one.moved(-len(fence)) for one in found] for found in (corrected.changes, corrected.suspicious)
    )
    return Corrected(corrected.removeprefix(fence), corrected.original.removeprefix(fence), changes, suspicious)


def joined(parts: Iterable[Corrected]) -> Corrected:
    """Consecutive corrected pieces joined into one, with positions in the whole text."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    offset, changes, suspicious = 0, list[Change](), list[Change]()
    for part in parts:
        changes += [change.moved(offset) for change in part.changes]
        suspicious += [change.moved(offset) for change in part.suspicious]
        offset += len(part.original)
    return Corrected("".join(parts), "".join(part.original for part in parts), changes, suspicious)


def stream(source: TextSource, parts: Iterable[Corrected]) -> None:
    """Print the corrected text piece by piece; on a terminal, changes are coloured."""
    style = terminal_style()
    for corrected in parts:
        write_output(for_terminal(corrected.text) if style is None else coloured(corrected, style))
    if source.text is not None:
        write_output("\n")


# ----------------------------------------------------------------------------------------------------------------
# Results


def record(source: TextSource, corrected: Corrected, suggest: int | None) -> dict[str, object]:
    """Print the result as JSON."""
    result = correction_record(corrected, suggest)
    return {**result, "file": source.name} if source.path is not None else result


def show_diff(source: TextSource, corrected: Corrected) -> bool:
    """Print a unified diff that `patch` accepts."""
    before, after = (io.StringIO(text, newline="\n").readlines() for text in (corrected.original, corrected.text))
    for line in difflib.unified_diff(before, after, source.name, source.name):
        write_output(for_terminal(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"))
    return bool(corrected.changes)


def show_lines(source: TextSource, corrected: Corrected, suggest: int | None) -> bool:
    """Print a line for each change, and with suggestions also for each suspicious word."""
    listed = sorted(
        [*corrected.changes, *(corrected.suspicious if suggest else ())], key=lambda change: change.position
    )
    line, start, at = 1, 0, 0
    for change in listed:
        line += corrected.original.count("\n", at, change.position)
        start, at = corrected.original.rfind("\n", 0, change.position) + 1, change.position
        said = change.after
        if suggest:
            said = ", ".join(f"{text} {probability:.2f}" for text, probability in change.candidates[:suggest])
        place = f"{source.name}:{line}:{change.position - start + 1}"
        write_output(for_terminal(f"{place}: {change.before} -> {said}\n"))
    return bool(corrected.changes)


def rewrite_file(source: TextSource, parts: Iterable[Corrected]) -> bool:
    """Write the corrected text to the file and the original to FILE.bak, if anything changed.

    Both are complete on disk before either replaces a file. Nothing changes if one cannot be written, or if the file
    changes while it is read.
    """
    assert source.path is not None
    path = source.path.resolve()
    before = state(path)
    corrected = joined(parts)
    if not corrected.changes:
        return False
    backup = path.with_name(path.name + BACKUP)
    if state(path) != before:
        raise UserError(f"{source.name} was changed by another program while it was read; nothing was written")
    check_writable(path)
    try:
        if backup.is_symlink():
            raise OSError(errno.EEXIST, "it is a link", str(backup))
        with atomic_file(path, like=path) as new:
            write_durably(new, corrected.text.encode("utf-8", "surrogateescape"))
            with atomic_file(backup, like=path) as copy:
                shutil.copyfile(path, copy)
            shutil.copystat(path, backup)
    except OSError as error:
        said = f"{error.filename or path} cannot be written ({error.strerror})"
        raise UserError(f"{said}, so {source.name} was left as it is") from error
    return True


def state(path: Path) -> tuple[int, int, int]:
    """Properties of a file that differ after a change."""
    about = path.stat()
    return about.st_mtime_ns, about.st_size, about.st_ino


def write_output(text: str) -> None:
    """Write bytes unchanged to standard output, or as text if it has been replaced by a text stream."""
    sys.stdout.flush()
    if hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()
    else:
        sys.stdout.write(text)


def for_terminal(text: str) -> str:
    """The text; with control characters escaped if standard output is a terminal."""
    return printable(text) if sys.stdout.isatty() else text


def terminal_style() -> Style | None:
    """The style of changes; None if standard output is not a terminal with styles."""
    console = PlainConsole()
    if not sys.stdout.isatty() or console.color_system is None or console.legacy_windows:
        return None
    return Style(bold=True, color=None if console.no_color else "green")


def coloured(corrected: Corrected, style: Style) -> str:
    """The corrected text for a terminal, with changes in this style."""
    shown: list[str] = []
    end = 0
    for change in corrected.changes:
        start, stop = change.corrected_span
        shown += [printable(corrected.text[end:start]), style.render(printable(corrected.text[start:stop]))]
        end = stop
    return "".join([*shown, printable(corrected.text[end:])])
