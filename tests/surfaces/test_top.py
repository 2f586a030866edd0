"""``omlx-admission top``: what it prints, whom it follows, and how it fails."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from omlx_admission.surfaces import cli, status, top

from .samples import Sample, draining, loading


def document(sample: Sample) -> dict[str, Any]:
    return status.build(sample.facts(), sample.observer)


class Answers:
    """A server that gives the answers it was given, the last one again and again."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.left: list[tuple[int, bytes]] = []
        self.keys: list[str | None] = []

    def give(self, *answers: Any) -> None:
        self.left = [
            a if isinstance(a, tuple) else (200, json.dumps(a).encode()) for a in answers
        ]


@pytest.fixture
def server() -> Iterator[Answers]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.keys.append(self.headers.get("Authorization"))
            code, body = answers.left.pop(0) if len(answers.left) > 1 else answers.left[0]
            if self.path != "/admission/status":
                code = 404
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    answers = Answers(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield answers
    http.shutdown()
    thread.join()
    http.server_close()


def call(*arguments: str) -> int:
    return cli.main(["top", *arguments])


def test_once_prints_a_whole_report(
    server: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = loading()
    sample.observer.refused("x", "model_too_large", "does not fit", 0.0, None)
    server.give(document(sample))
    assert call("--once", "--url", server.url + "/") == 0
    text = capsys.readouterr().out
    for part in (
        "in oMLX 0.6.3, up 8.5 s",
        "healthy",
        "Loading b in place of a: 1.5 s so far",
        "6.00 GB of 10.00 GB",
        "waiting 4",
        "1. b",
        "agent-0: its model is being loaded",
        "4. a",
        "GPU turn: off",
        "model_too_large: does not fit",
        "b for a: running, drain 2.0 s",
    ):
        assert part in text, part
    assert "\x1b" not in text


def test_once_tells_by_its_status_that_the_server_needs_help(
    server: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = loading()
    sample.now += 100
    server.give(document(sample))
    assert call("--once", "--url", server.url) == 1
    assert "NEEDS ATTENTION: the load of 'b' has lasted" in capsys.readouterr().out


def sleeper(rounds: int) -> Callable[[float], None]:
    left = [rounds]

    def sleep(_seconds: float) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    return sleep


def test_without_a_terminal_only_what_changed_is_printed(
    server: Answers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drain, load = draining(), loading()
    drain_later = document(drain)
    drain_later["at"] += 5
    server.give(document(drain), drain_later, (503, b""), (503, b""), document(load))
    monkeypatch.setattr(top.time, "sleep", sleeper(4))
    assert call("--url", server.url) == 0
    out = capsys.readouterr()
    lines = out.out.splitlines()
    assert len(lines) == 3, lines
    assert "a=draining  waiting 4 (b 3, a 1)" in lines[0]
    assert "answered 503; trying again" in lines[1]
    assert "b=loading  waiting 4" in lines[2]
    assert out.err == "", "as it says, Ctrl-C ends it"


def screen(sample: Sample, note: str | None) -> str:
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(top.screen(document(sample), note))
    return console.export_text()


def test_the_screen_says_the_same_in_colour() -> None:
    text = screen(loading(), "it does not answer; trying again")
    for part in (
        "it does not answer; trying again. What follows is old.",
        "healthy",
        "Loading b in place of a",
        "loading",
        "agent-2",
        "'b' is loaded first",
        "GPU turn: off",
    ):
        assert part in text, part


def test_a_model_name_is_no_markup() -> None:
    sample = Sample()
    sample.sizes["[red]m[/red]"] = 1
    sample.resident("[red]m[/red]")
    # In the sentence and in the table.
    assert screen(sample, None).count("[red]m[/red]") == 2


def test_without_rich_a_terminal_gets_lines_too(
    server: Answers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(top.time, "sleep", sleeper(0))
    server.give(document(draining()))
    assert call("--url", server.url) == 0
    assert "waiting 4" in capsys.readouterr().out


def test_the_gpu_turn_in_words() -> None:
    shown = document(draining())
    turn = {
        "on": True,
        "holder": "a",
        "site": "decode burst",
        "held_s": 2.0,
        "stuck": True,
        "waiting": [{"engine": "b"}, {"engine": "c"}],
    }
    shown["gpu_turn"] = turn
    assert "GPU turn: a (decode burst) for 2.0 s, STUCK; waiting: b, c" in top.report(shown)
    turn["holder"] = None
    assert "GPU turn: free" in top.report(shown)


def test_faults_and_replays_of_the_gpu_are_shown() -> None:
    shown = document(draining())
    shown["exposure"] = {
        "busy_s": {"0": 1.0, "1": 2.0, "2": 7200.0},
        "overlap_serialised_s": 0.0,
        "lockups": 2,
        "advice": "what may help",
        "faults": [],
        "last_faults": [
            {"at": 0.0, "engine": "glm", "fault": "Hang", "circumstances": "busy: glm, qwen"}
        ],
        "replays": {"count": 2, "tokens": 222_000, "seconds": 240.0, "failed": 1},
    }
    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(top.screen(shown, None))
    for lines in ("\n".join(top.report(shown)), console.export_text()):
        assert "GPU: two or more engines busy for 2 h, 2 lockups" in lines
        assert "MTP replays: 2 of 222000 tokens in 4 min 0 s, 1 failed" in lines
        assert "Hang in glm: busy: glm, qwen" in lines
        assert "what may help" in lines


@pytest.mark.parametrize("interval", ["abc", "0", "nan", "99999"])
def test_an_interval_that_is_none_says_what_is_allowed(
    interval: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        call("--interval", interval)
    assert ended.value.code == 2
    assert f"{interval} is not a number from 0.1 to 3600" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["option", "variable"])
def test_the_key_is_sent(given: str, server: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    server.give(document(draining()))
    arguments = ["--once", "--url", server.url]
    if given == "option":
        arguments += ["--api-key", "k-1"]
    else:
        monkeypatch.setenv("OMLX_API_KEY", "k-1")
    assert call(*arguments) == 0
    assert server.keys == ["Bearer k-1"]


@pytest.mark.parametrize(
    ("code", "key", "says"),
    [
        (401, None, "it wants an API key; give --api-key or set OMLX_API_KEY"),
        (401, "bad", "the API key was refused"),
        (404, None, "omlx-admission is not active there"),
        (500, None, "answered 500"),
    ],
)
def test_a_server_that_refuses_is_one_line(
    code: int,
    key: str | None,
    says: str,
    server: Answers,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMLX_API_KEY", raising=False)
    server.give((code, b"{}"))
    assert call("--url", server.url, *(["--api-key", key] if key else [])) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert "bad" not in error.replace(server.url, "")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"schema": 2}'])
def test_what_is_no_status_is_one_line(
    body: bytes, server: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    server.give((200, body))
    assert call("--url", server.url) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--url", "http://127.0.0.1:1") == 2
    assert "does not answer" in capsys.readouterr().err
    assert call("--url", "ftp://x") == 2
    assert "expected http" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "nan", "1e9"])
def test_an_interval_that_makes_no_sense(interval: str) -> None:
    with pytest.raises(SystemExit):
        call("--interval", interval)
