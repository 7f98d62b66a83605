"""`cedd correct`: correct the spelling of texts, files and folders."""

from __future__ import annotations

import codecs
import difflib
import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rich.style import Style

from cedd import __version__
from cedd.apps.correct.annotations import Located, github_annotation, located, sarif
from cedd.apps.correct.prose import identifiers, mask, mask_ignored, restored, syntax_of
from cedd.apps.correct.text_files import CorrectSettings, read_settings, text_files
from cedd.apps.correct.word_by_word import words_folder
from cedd.apps.correct.word_corrector import WordCorrector, can_correct
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
LONGEST_MARKUP = 1 << 24
"""Bytes of a file whose markup is recognized; longer files are corrected as plain text."""
FIRST_PIECE, PIECE = 1 << 11, 1 << 14
"""Characters of the first and of the largest piece; each piece is up to twice as long as the one before, so that the
first result appears soon."""
BACKUP = ".bak"
CorrectText = Callable[..., Corrected]
"""(text, names) -> the corrected text; names are words that are correct because the code of the text has them."""
UNREADABLE = 2
"""The exit code if files were skipped."""
LONGEST_LIST = 1 << 24
"""Characters of a file of words to ignore."""


def run(arguments: Correct) -> int:
    """Correct one text or several files, and show the results."""
    settings = read_settings(Path())
    check_options(arguments)
    arguments = with_settings(arguments, settings)
    if arguments.lsp:
        from cedd.apps.correct.language_server import serve

        if arguments.words:
            raise UserError(f"unexpected argument {arguments.words[0]!r}; --lsp takes texts from its client")
        correct = corrector(packaged(DEFAULT_CORRECTOR), arguments, True, settings.ignore_words)
        return serve(correct, sys.stdin.buffer, sys.stdout.buffer, __version__)
    name, sources = model_and_sources(arguments, settings)
    if arguments.in_place and any(source.path is None for source in sources):
        raise UserError("--in-place needs files")
    everything, sources = len(sources), readable(sources)
    few = all(source.size is not None and source.size <= A_FEW_LINES for source in sources)
    correct = corrector(locate(name), arguments, few, settings.ignore_words)
    found, records, annotated = False, list[dict[str, object]](), list[tuple[str, list[Located]]]()
    with progress_bar("correcting", not (few or arguments.json)) as progress:
        for source in sources:
            parts = corrected_pieces(source, correct, progress)
            if arguments.json:
                records.append(record(source, joined(parts), arguments.suggest))
            elif arguments.format in ("github", "sarif"):
                whole = joined(parts)
                annotated.append((source.name, list(located(whole, whole.changes))))
                found = found or bool(whole.changes)
            else:
                found = show(arguments, source, parts) or found
    if arguments.json:
        print(json.dumps(records[0] if len(records) == 1 else records))
        found = any(record["changes"] for record in records)
    elif arguments.format == "sarif":
        print(sarif(annotated, __version__))
    for file, changes in annotated if arguments.format == "github" else ():
        for one in changes:
            write_output(for_terminal(github_annotation(file, one) + "\n"))
    if len(sources) < everything:
        return UNREADABLE
    return int(found and (arguments.check or arguments.diff))


def show(arguments: Correct, source: TextSource, parts: Iterable[Corrected]) -> bool:
    """Print or write the result for one text, and return whether it was changed."""
    if arguments.in_place:
        return rewrite_file(source, parts)
    if arguments.diff:
        return show_diff(source, joined(parts))
    if arguments.check or arguments.suggest is not None:
        return show_lines(source, joined(parts), arguments.suggest)
    stream(source, parts)
    return False


def check_options(arguments: Correct) -> None:
    """Refuse options that contradict each other."""
    if arguments.suggest is not None and arguments.suggest < 1:
        raise UserError(f"--suggest must be at least 1 (got {arguments.suggest})")
    if (arguments.steps or 1) == 1:
        refuse_unused(arguments, ("temperature", "seed"), "without --steps 2 or more")
    else:
        refuse_unused(arguments, ("swaps",), f"with --steps {arguments.steps}")
    given = [name for name in ("diff", "in_place", "suggest") if getattr(arguments, name)]
    if arguments.check and given != ["diff"]:
        given.append("check")
    if len(given) > 1:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in given[:2])
        raise UserError(f"{options} are different results; give one of them")
    if arguments.in_place and arguments.json:
        raise UserError("--in-place writes the files and prints nothing; give --json without it to see the changes")
    if arguments.format is not None and (given not in ([], ["check"]) or arguments.json):
        raise UserError("--format only applies to --check; leave out the other output options")


def with_settings(arguments: Correct, settings: CorrectSettings) -> Correct:
    """The arguments, with the settings of pyproject.toml where the command line has none."""
    engine = arguments.engine or settings.engine
    threshold = settings.threshold if arguments.threshold is None else arguments.threshold
    return replace(arguments, engine=engine, threshold=threshold, check=arguments.check or arguments.format is not None)


# ----------------------------------------------------------------------------------------------------------------
# Texts and models


def model_and_sources(arguments: Correct, settings: CorrectSettings) -> tuple[str | Path, list[TextSource]]:
    """The model and the texts of a command line [MODEL] TEXT or [MODEL] FILE|FOLDER..."""
    words = list(arguments.words)
    if words and all(word != "-" for word in words):
        model = words[0] if words[0] and (words[0] in pretrained_names() or is_model(words[0])) else None
        files = words[model is not None :]
        on_files = arguments.diff or arguments.in_place or arguments.check
        named = [is_file(word) or is_folder(word) for word in files]
        if files and (on_files or all(named) or (len(files) > 1 and any(named))):
            if arguments.file is not None:
                raise UserError("give files by their names or by --file, not both")
            if not (on_files or arguments.json) and (folder := next(filter(is_folder, files), None)) is not None:
                raise UserError(f"{folder} is a folder; add --check, --diff, --in-place or --json")
            sources: dict[str, TextSource] = {}
            for source in (source for file in files for source in sources_of(Path(file), settings)):
                sources.setdefault(os.path.realpath(source.name), source)  # "docs/a.md docs" has a file twice
            return packaged(DEFAULT_CORRECTOR) if model is None else locate(model), list(sources.values())
    name, source = model_and_source(words, arguments.file, DEFAULT_CORRECTOR, 'cedd correct "I hav a speling mistke"')
    return name, [source]


def is_folder(word: str) -> bool:
    """Whether a word names a folder that is not a model."""
    try:
        return bool(word) and Path(word).expanduser().is_dir() and not is_model(word)
    except (OSError, ValueError, RuntimeError):
        return False


def sources_of(path: Path, settings: CorrectSettings) -> Iterator[TextSource]:
    """A file, or the text files of a folder."""
    if is_folder(str(path)):
        yield from (TextSource(str(file), path=file) for file in text_files(path.expanduser(), settings))
    else:
        yield file_source(path)


def readable(sources: Sequence[TextSource]) -> Sequence[TextSource]:
    """The texts that can be read; of several files, the others are named on standard error."""
    found = [source for source in sources if source.path is None or os.access(source.path, os.R_OK)]
    if not found:
        return sources
    for source in sources:
        if source not in found:
            print(f"cedd: warning: {printable(source.name)} cannot be read; it is skipped", file=sys.stderr)
    return found


def corrector(folder: Path, arguments: Correct, few: bool, right: Collection[str] = ()) -> CorrectText:
    """The corrector that belongs to the model in a folder; words that are `right` are not changed.

    A packaged model that corrects words loads its network at the first undecided word, and needs no torch.
    """
    engine = arguments.engine or default_engine(folder, read_json(folder / CONFIG_FILE))
    options = {name: value for name in sorted(LETTER_OPTIONS) if (value := getattr(arguments, name)) is not None}
    others = options.keys() - {"threshold"} if engine == "words" else set()
    if others:
        raise UserError(f"--{min(others).replace('_', '-')} is an option of --engine letters; this is --engine words")
    if engine == "letters" and arguments.ignore_words is not None:
        raise UserError("--ignore-words is an option of --engine words; this is --engine letters")
    ignored = ignored_words(arguments) | frozenset(right)
    if engine == "words" and folder in map(packaged, pretrained_names()) and arguments.device in ("auto", "cpu"):
        beside = words_folder(folder, read_json(folder / CONFIG_FILE))
        if can_correct(beside):
            own, threshold = WordCorrector(beside), arguments.threshold
            return lambda text, names=(): own.correct(text, threshold=threshold, ignored_words=ignored.union(names))
    from cedd.apps.correct.engine import corrector_folder

    model = loaded(corrector_folder(folder, engine), arguments, few)
    correct = partial(model.correct, engine=engine, **options, seed=arguments.seed)
    if engine == "letters":
        return lambda text, names=(): correct(text)
    return lambda text, names=(): correct(text, ignored_words=ignored.union(names))


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
    """The text of a stream in pieces of up to twice `PIECE` characters.

    A piece ends before a blank line if possible, otherwise after a line or a space, and not within a code block unless
    that is longer than a piece. Bytes that are not UTF-8 become lone surrogates, which are never corrected.

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
            blank = max(kept.rfind(mark, size // 2) for mark in ("\n\n", "\n\r\n"))
            cut = 1 + (blank if blank >= 0 else kept.rfind("\n"))
            cut = cut or 1 + kept.rfind(" ") or len(kept) - 1  # never between \r and \n
            start, mark = open_block(fence + kept[:cut]) or (0, "")
            if start > len(fence):
                cut, mark = start - len(fence), ""  # the next piece begins with the block itself
            yield fence, kept[:cut]
            kept, size, fence = kept[cut:], min(2 * size, PIECE), mark and mark + "\n"


def corrected_pieces(
    source: TextSource, correct: CorrectText, progress: Callable[[float, float], None]
) -> Iterator[Corrected]:
    """The pieces of a text, corrected; `progress` is called with (done, planned) bytes after each.

    Markup and code are masked by the syntax of the file. A piece with a zero byte is not text: it is left as it is, and
    so is what follows.
    """
    size, syntax = source.size, syntax_of(source.name) if source.path else None
    names, whole, masked = frozenset[str](), None, ""
    if syntax is not None and size is not None and size <= LONGEST_MARKUP:
        whole = source.read()
        masked = mask(whole, syntax)
        names = identifiers(whole, masked)
    with source.opened() if whole is None else io.BytesIO(masked.encode("utf-8", "surrogateescape")) as stream:
        text, done, at = True, 0, 0
        for fence, piece in pieces(stream):
            text = text and "\0" not in piece
            original = piece if whole is None else whole[at : at + len(piece)]
            at += len(piece)
            if text:
                piece = mask_ignored(piece, original)
                yield restored(original, after(fence, correct(fence + piece, names)), syntax)
            else:
                yield Corrected(original, original, ())
            done += len(original.encode("utf-8", "surrogateescape"))
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
    """The result as JSON."""
    result = correction_record(corrected, suggest)
    return {**result, "file": source.name} if source.path is not None else result


def show_diff(source: TextSource, corrected: Corrected) -> bool:
    """Print a unified diff that `patch` accepts."""
    before, after = (io.StringIO(text, newline="\n").readlines() for text in (corrected.original, corrected.text))
    for line in difflib.unified_diff(before, after, source.name, source.name):
        write_output(for_terminal(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"))
    return bool(corrected.changes)


def show_lines(source: TextSource, corrected: Corrected, suggest: int | None) -> bool:
    """Print a line for each change; with suggestions, also for each suspicious word."""
    for one in located(corrected, [*corrected.changes, *(corrected.suspicious if suggest else ())]):
        change = one.change
        new = change.after
        if suggest:
            new = ", ".join(f"{text} {probability:.2f}" for text, probability in change.candidates[:suggest])
        write_output(for_terminal(f"{source.name}:{one.line}:{one.column}: {change.before} -> {new}\n"))
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
