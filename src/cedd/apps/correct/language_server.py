"""A language server: diagnostics for misspelled words, and their replacements as code actions.

It implements the Language Server Protocol 3.17 on two byte streams. Diagnostics are published when no message is
waiting, so that not every keystroke is checked.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from cedd.apps.correct.annotations import message
from cedd.apps.correct.prose import identifiers, mask, mask_ignored, restored, syntax_of
from cedd.spelling.changes import Change, Corrected
from cedd.storage import JSONObject

SOURCE = "cedd"
LONGEST_DOCUMENT = 1 << 20
"""Characters of a document that is checked."""
WARNING, QUICK_FIX, INCREMENTAL = 2, "quickfix", 2
METHOD_NOT_FOUND, INVALID_REQUEST, NOT_INITIALIZED, INTERNAL_ERROR = -32601, -32600, -32002, -32603
_BAD_MESSAGE = (KeyError, TypeError, ValueError, AttributeError)
_SYNTAX_OF_LANGUAGE = {
    "markdown": "markdown",
    "restructuredtext": "rst",
    "html": "html",
    "latex": "tex",
    "tex": "tex",
    "python": "python",
    "javascript": "javascript",
    "typescript": "javascript",
    "javascriptreact": "javascript",
    "typescriptreact": "javascript",
    "shellscript": "shell",
    "yaml": "shell",
    "toml": "shell",
    "ruby": "shell",
    "sql": "dashes",
    "lua": "dashes",
    "haskell": "dashes",
    "css": "css",
    "go": "go",
    "rust": "rust",
    **dict.fromkeys(("c", "cpp", "csharp", "java", "kotlin", "swift", "scala", "dart", "php"), "c"),
}


@dataclass
class Document:
    """An open document, and its changes, which are None until it is checked."""

    text: str
    syntax: str | None
    version: int | None = None
    changes: tuple[Change, ...] | None = None


class Lines:
    """Converts positions of a text between characters and the protocol's lines and UTF-16 code units."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.replace("\r\n", " \n").replace("\r", "\n").split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)

    def offset(self, position: dict[str, int]) -> int:
        """The character at a position; positions after the end of a line mean its end."""
        number = min(position["line"], len(self.lines) - 1)
        if position["line"] >= len(self.lines):
            return len(self.text)
        line, units = self.text[self.starts[number] : self.starts[number + 1] - 1], position["character"]
        for place, character in enumerate(line):
            if units <= 0:
                return self.starts[number] + place
            units -= 1 + (ord(character) > 0xFFFF)
        return self.starts[number] + len(line)

    def position(self, offset: int) -> dict[str, int]:
        """The position of a character."""
        low, high = 0, len(self.lines) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.starts[middle] <= offset else (low, middle - 1)
        before = self.text[self.starts[low] : offset]
        return {"line": low, "character": len(before) + sum(ord(character) > 0xFFFF for character in before)}

    def range(self, span: tuple[int, int]) -> JSONObject:
        """A range of the protocol."""
        return {"start": self.position(span[0]), "end": self.position(span[1])}


class LanguageServer:
    """Answers the messages of a client.

    Args:
        correct: (text, names) -> the corrected text.
        send: sends a message to the client.
        version: the version of the server.
    """

    def __init__(self, correct: Callable[..., Corrected], send: Callable[[JSONObject], None], version: str) -> None:
        self.correct, self._send, self.version = correct, send, version
        self.documents: dict[str, Document] = {}
        self.pending: dict[str, None] = {}
        self.initialized = self.shut_down = False

    def handle(self, message: JSONObject) -> None:
        """Answer a request, or act on a notification."""
        method, number = message.get("method"), message.get("id")
        if method is None:
            return  # a response
        handler = _HANDLERS.get(method)
        if number is None:
            if handler is not None and self.initialized and not self.shut_down:
                try:
                    handler(self, message.get("params") or {})
                except _BAD_MESSAGE as error:
                    params = {"type": WARNING, "message": f"{method}: {type(error).__name__}: {error}"}
                    self._send({"jsonrpc": "2.0", "method": "window/logMessage", "params": params})
            return
        if method != "initialize" and not self.initialized:
            self._fail(number, NOT_INITIALIZED, "the server is not initialized")
        elif self.shut_down:
            self._fail(number, INVALID_REQUEST, "the server is shut down")
        elif handler is None:
            self._fail(number, METHOD_NOT_FOUND, f"method not found: {method}")
        else:
            try:
                result = handler(self, message.get("params") or {})
            except _BAD_MESSAGE as error:
                self._fail(number, INTERNAL_ERROR, f"{method}: {type(error).__name__}: {error}")
            else:
                self._send({"jsonrpc": "2.0", "id": number, "result": result})

    def _fail(self, number: object, code: int, said: str) -> None:
        self._send({"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": said}})

    def initialize(self, params: JSONObject) -> JSONObject:
        """The capabilities of the server."""
        del params
        self.initialized = True
        capabilities = {
            "positionEncoding": "utf-16",
            "textDocumentSync": {"openClose": True, "change": INCREMENTAL},
            "codeActionProvider": {"codeActionKinds": [QUICK_FIX]},
        }
        return {"capabilities": capabilities, "serverInfo": {"name": "cedd", "version": self.version}}

    def shutdown(self, params: JSONObject) -> None:
        """Refuse all further requests."""
        del params
        self.shut_down = True

    def did_open(self, params: JSONObject) -> None:
        """Check a document that was opened."""
        item = params["textDocument"]
        name = PurePosixPath(unquote(urlsplit(item["uri"]).path)).name
        syntax = _SYNTAX_OF_LANGUAGE.get(item.get("languageId", ""), syntax_of(name))
        self.documents[item["uri"]] = Document(item["text"], syntax, item.get("version"))
        self.pending[item["uri"]] = None

    def did_change(self, params: JSONObject) -> None:
        """Apply changes to a document, and check it."""
        uri = params["textDocument"]["uri"]
        document = self.documents[uri]
        for change in params["contentChanges"]:
            if (where := change.get("range")) is None:
                document.text = change["text"]
            else:
                lines = Lines(document.text)
                start, stop = lines.offset(where["start"]), lines.offset(where["end"])
                document.text = document.text[:start] + change["text"] + document.text[stop:]
        document.version, document.changes = params["textDocument"].get("version"), None
        self.pending[uri] = None

    def did_close(self, params: JSONObject) -> None:
        """Forget a document, and withdraw its diagnostics."""
        uri = params["textDocument"]["uri"]
        self.documents.pop(uri, None)
        self.pending.pop(uri, None)
        self._publish(uri, None, [])

    def code_action(self, params: JSONObject) -> list[JSONObject]:
        """A quick fix for each candidate of the misspelled words in a range, the best first."""
        uri = params["textDocument"]["uri"]
        document, only = self.documents[uri], params.get("context", {}).get("only")
        if only is not None and not any(kind == QUICK_FIX or QUICK_FIX.startswith(f"{kind}.") for kind in only):
            return []
        lines, actions = Lines(document.text), list[JSONObject]()
        start, stop = lines.offset(params["range"]["start"]), lines.offset(params["range"]["end"])
        for change in self.check(document):
            if change.span[0] <= stop and start <= change.span[1]:
                others = [text for text, _ in change.candidates if text not in (change.before, change.after)]
                for rank, new in enumerate([change.after, *others[:2]]):
                    edit = {"range": lines.range(change.span), "newText": new}
                    actions.append(
                        {
                            "title": f"Change to {new!r}",
                            "kind": QUICK_FIX,
                            "isPreferred": rank == 0,
                            "diagnostics": [self.diagnostic(lines, change)],
                            "edit": {"changes": {uri: [edit]}},
                        }
                    )
        return actions

    def check(self, document: Document) -> tuple[Change, ...]:
        """The changes of a document."""
        if document.changes is None:
            text = document.text
            if len(text) > LONGEST_DOCUMENT:
                document.changes = ()
            else:
                masked = mask(text, document.syntax)
                names = identifiers(text, masked) if document.syntax is not None else frozenset[str]()
                corrected = self.correct(mask_ignored(masked, text), names)
                document.changes = restored(text, corrected, document.syntax).changes
        return document.changes

    def diagnostic(self, lines: Lines, change: Change) -> JSONObject:
        """A change as a diagnostic."""
        where = {"range": lines.range(change.span), "severity": WARNING}
        return {**where, "source": SOURCE, "code": "spelling", "message": message(change)}

    def publish_pending(self) -> None:
        """Check the documents that were changed, and publish their diagnostics."""
        pending, self.pending = self.pending, {}
        for uri in pending:
            document = self.documents[uri]
            lines = Lines(document.text)
            self._publish(uri, document.version, [self.diagnostic(lines, change) for change in self.check(document)])

    def _publish(self, uri: str, version: int | None, diagnostics: list[JSONObject]) -> None:
        params = {"uri": uri, "diagnostics": diagnostics, **({} if version is None else {"version": version})}
        self._send({"jsonrpc": "2.0", "method": "textDocument/publishDiagnostics", "params": params})


_HANDLERS: dict[str, Callable[[LanguageServer, dict[str, Any]], Any]] = {
    "initialize": LanguageServer.initialize,
    "shutdown": LanguageServer.shutdown,
    "textDocument/didOpen": LanguageServer.did_open,
    "textDocument/didChange": LanguageServer.did_change,
    "textDocument/didClose": LanguageServer.did_close,
    "textDocument/codeAction": LanguageServer.code_action,
}


def read_message(stream: BinaryIO) -> JSONObject | None:
    """The next message of a stream; None at its end."""
    size = None
    while line := stream.readline():
        if not line.strip():
            break
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            size = int(value) if value.strip().isdigit() else None
    if not line:
        return None
    if size is None:
        raise ValueError("a message of the language client has no valid Content-Length")
    if len(content := stream.read(size)) < size:
        return None
    try:
        message = json.loads(content)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ValueError("a message of the language client is not a JSON object")
    return message


def serve(correct: Callable[..., Corrected], source: BinaryIO, sink: BinaryIO, version: str) -> int:
    """Serve one client until it exits; 0 if it asked for the shutdown before, otherwise 1."""

    def send(message: JSONObject) -> None:
        content = json.dumps(message).encode()
        sink.write(b"Content-Length: %d\r\n\r\n" % len(content) + content)
        sink.flush()

    def receive() -> None:
        message: JSONObject | Exception | None = None
        try:
            while (message := read_message(source)) is not None and message.get("method") != "exit":
                received.put(message)
        except ValueError as error:
            received.put(error)
        received.put(None)

    received: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()
    threading.Thread(target=receive, daemon=True).start()
    server = LanguageServer(correct, send, version)
    while (message := received.get()) is not None:
        if isinstance(message, Exception):
            raise message
        server.handle(message)
        if received.empty():
            server.publish_pending()
    return int(not server.shut_down)
