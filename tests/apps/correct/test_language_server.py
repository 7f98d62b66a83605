"""The language server, tested with its messages and with a client library."""

import asyncio
import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedd.apps.correct.language_server import LanguageServer, Lines, serve
from cedd.spelling.changes import Change, Corrected

URI = "file:///folder/notes.md"


def correct(text, names=()):
    """Every "teh" becomes "the"."""
    found = [at for at in range(len(text)) if text.startswith("teh", at) and "teh" not in names]
    candidates = (("the", 0.9), ("teh", 0.06), ("tea", 0.04))
    return Corrected(text, text, [Change(at, "teh", "the", 0.9, 0.9, candidates=candidates) for at in found])


def framed(*messages):
    contents = [json.dumps({"jsonrpc": "2.0", **message}).encode() for message in messages]
    return b"".join(b"Content-Length: %d\r\n\r\n" % len(content) + content for content in contents)


def answers(*messages):
    """The exit code of a server, and what it sent."""
    sink = io.BytesIO()
    code = serve(correct, io.BytesIO(framed(*messages)), sink, "1")
    sink.seek(0)
    found = []
    while head := sink.readline():
        sink.readline()
        found.append(json.loads(sink.read(int(head.split(b":")[1]))))
    return code, found


START = {"id": 0, "method": "initialize", "params": {}}
END = ({"id": 9, "method": "shutdown"}, {"method": "exit"})


def opened(text, language="markdown"):
    item = {"uri": URI, "languageId": language, "version": 1, "text": text}
    return {"method": "textDocument/didOpen", "params": {"textDocument": item}}


def changed(*changes):
    return {
        "method": "textDocument/didChange",
        "params": {"textDocument": {"uri": URI, "version": 2}, "contentChanges": [*changes]},
    }


def span(first, start, last, stop):
    return {"start": {"line": first, "character": start}, "end": {"line": last, "character": stop}}


def actions(where, **context):
    params = {"textDocument": {"uri": URI}, "range": where, "context": {"diagnostics": [], **context}}
    return {"id": 5, "method": "textDocument/codeAction", "params": params}


def test_misspelled_words_are_diagnostics_and_candidates_are_code_actions():
    text = "A `abc` \N{GRINNING FACE} teh\n"
    code, found = answers(START, opened(text), actions(span(0, 12, 0, 12)), *END)
    assert code == 0
    assert found[0]["result"]["capabilities"]["codeActionProvider"]
    by_id = {one["id"]: one for one in found if "id" in one}
    (first, second) = by_id[5]["result"]
    assert first["edit"] == {"changes": {URI: [{"range": span(0, 11, 0, 14), "newText": "the"}]}}
    assert (first["isPreferred"], second["title"]) == (True, "Change to 'tea'")


def published(found):
    return [one["params"] for one in found if one.get("method") == "textDocument/publishDiagnostics"]


def run(*messages):
    """The messages of a server that publishes diagnostics after each message."""
    found = []
    server = LanguageServer(correct, found.append, "1")
    for message in messages:
        server.handle(message)
        server.publish_pending()
    return found


def test_diagnostics_follow_changes_of_document():
    whole, insertion = {"text": "ab\nteh"}, {"range": span(1, 0, 1, 0), "text": "\N{GRINNING FACE} "}
    closed = {"method": "textDocument/didClose", "params": {"textDocument": {"uri": URI}}}
    found = published(run(START, opened("teh"), changed(whole), changed(insertion, insertion), closed))
    ranges = [[one["range"] for one in params["diagnostics"]] for params in found]
    assert ranges == [[span(0, 0, 0, 3)], [span(1, 0, 1, 3)], [span(1, 6, 1, 9)], []]
    assert [params.get("version") for params in found] == [1, 2, 2, None]


def test_only_comments_of_source_code_are_checked():
    (found,) = published(run(START, opened("teh = 1  # teh\nx = 2  # 'tehe'", "python")))
    assert found["diagnostics"] == []  # it is a name
    (found,) = published(run(START, opened("x = 1  # teh\n", "python")))
    assert [one["range"] for one in found["diagnostics"]] == [span(0, 9, 0, 12)]
    (found,) = published(run(START, opened("fn f<'a, teh: Copy + 'a>() {}", "rust")))
    assert found["diagnostics"] == []  # between lifetimes


def test_ignored_lines_have_no_diagnostics():
    (found,) = published(run(START, opened("teh <!-- cedd: ignore -->\n")))
    assert found["diagnostics"] == []


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([{"id": 1, "method": "textDocument/codeAction"}], -32002),
        ([START, {"id": 1, "method": "unknown"}], -32601),
        ([START, {"id": 1, "method": "shutdown"}, {"id": 1, "method": "textDocument/codeAction"}], -32600),
        ([START, {"id": 1, "method": "textDocument/codeAction", "params": {}}], -32603),
    ],
)
def test_invalid_requests_return_errors(messages, code):
    assert run(*messages)[-1]["error"]["code"] == code


def test_invalid_notification_is_logged_and_server_continues():
    found = run(START, changed({"text": "teh"}), opened("teh"))
    assert found[1]["method"] == "window/logMessage"
    assert len(published(found)) == 1


def test_exit_without_shutdown_returns_1():
    assert answers(START, {"method": "exit"})[0] == 1
    assert answers(START)[0] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"Content-Length: 5\r\n\r\nhello", "is not a JSON object"),
        (b"Content-Length: 3\r\n\r\n[1]", "is not a JSON object"),
        (b"Content-Length: 1\r\n\r\n\xff", "is not a JSON object"),
        (b"Content-Length: -1\r\n\r\n{}", "has no valid Content-Length"),
        (b"Content-Length: two\r\n\r\n{}", "has no valid Content-Length"),
        (b"Content-Type: x\r\n\r\n{}", "has no valid Content-Length"),
    ],
)
def test_damaged_message_stops_server_with_error(content, message):
    with pytest.raises(ValueError, match=f"a message of the language client {message}"):
        serve(correct, io.BytesIO(content), io.BytesIO(), "1")


@given(st.text(st.sampled_from("ab\n\r\N{GRINNING FACE}"), max_size=12), st.data())
def test_positions_are_in_utf16(text, data):
    offset = data.draw(st.integers(0, len(text)))
    if text[offset - 1 : offset + 1] == "\r\n":
        return  # within a line break
    lines = Lines(text)
    before = text[:offset].replace("\r\n", "\n").replace("\r", "\n")
    position = {"line": before.count("\n"), "character": len(before.rpartition("\n")[2].encode("utf-16-le")) // 2}
    assert lines.position(offset) == position
    assert lines.offset(position) == offset


@pytest.mark.slow
def test_client_library_receives_diagnostics_and_fixes():
    """Runs the command with the client of pygls."""
    types = pytest.importorskip("lsprotocol.types", reason="pygls is not installed")
    client_module = pytest.importorskip("pygls.lsp.client", reason="pygls is not installed")

    async def session():
        client, seen = client_module.LanguageClient("test", "1"), asyncio.Queue()
        client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(lambda parameters: seen.put_nowait(parameters))
        await client.start_io(sys.executable, "-m", "cedd", "correct", "--lsp")
        parameters = types.InitializeParams(capabilities=types.ClientCapabilities())
        await client.initialize_async(parameters)
        client.initialized(types.InitializedParams())
        item = types.TextDocumentItem(URI, "markdown", 1, "We recieve `teh` letters.\n")
        client.text_document_did_open(types.DidOpenTextDocumentParams(item))
        diagnostics = (await asyncio.wait_for(seen.get(), 60)).diagnostics
        document = types.TextDocumentIdentifier(URI)
        context = types.CodeActionContext(diagnostics)
        asked = types.CodeActionParams(document, diagnostics[0].range, context)
        found = await client.text_document_code_action_async(asked)
        await client.shutdown_async(None)
        client.exit(None)
        await client.stop()
        return diagnostics, found

    diagnostics, found = asyncio.run(session())
    assert [(one.range.start.character, one.range.end.character) for one in diagnostics] == [(3, 10)]
    assert found[0].edit.changes[URI][0].new_text == "receive"
