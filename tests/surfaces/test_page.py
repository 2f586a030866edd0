"""The page in a real headless Chromium, on a stand-in server in a process of its own."""

from __future__ import annotations

import asyncio
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

import standin
from omlx_admission.surfaces.demo.client import LOCAL, Client
from omlx_admission.surfaces.demo.server import free_port
from standin import tinymodels
from standin.server import Server

from . import browser as chromium

pytestmark = pytest.mark.skipif(
    chromium.missing() is not None, reason=f"page not tested: {chromium.missing()}"
)

KEY = "page-test-key"
SIZES = {"a": 1_650_000_000, "b": 1_650_000_000, "x": 5_000_000_000}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed, (name, size) in enumerate(SIZES.items()):
        tinymodels.make_text_model(root, name=name, counted_bytes=size, seed=seed)
    return root


@pytest.fixture
def serve(models: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server; ``port`` and ``base`` are the same for every one of a test."""
    running: list[Server] = []
    port = free_port()

    def start(*, load_s: float = 0.0, key: bool = False, **environment: str) -> Server:
        server = Server(
            models,
            tmp_path / "base",
            patched=True,
            source=standin.PATH,
            plan={"load_s": load_s},
            environment=environment,
            arguments=("--api-key", KEY) if key else (),
            port=port,
        )
        server.__enter__()
        running.append(server)
        return server

    yield start
    for server in running:
        server.__exit__()


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    with chromium.browser(tmp_path_factory.mktemp("browser")) as one:
        yield one


@pytest.fixture
def page(window: chromium.Browser) -> Iterator[chromium.Browser]:
    """A tab of its own; each test has a server at another port, so nothing is shared."""
    before = window.tabs()
    window.tab()
    window.look(dark=False)
    yield window
    errors = window.errors()
    window.close_all_but(before)
    assert errors == []


class Asking:
    """Requests from a thread of their own, so that the browser can be looked at meanwhile."""

    def __init__(self, server: Server) -> None:
        self._client = Client(server.url)
        self._threads: list[threading.Thread] = []
        self.answers: list[Any] = []

    def ask(self, model: str, request: str, **values: Any) -> None:
        def run() -> None:
            headers = {"X-Request-ID": request}
            call = self._client.chat(model, headers=headers, **values)
            self.answers.append(asyncio.run(call))

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
        assert all(a.ok for a in self.answers), self.answers


def shows(page: chromium.Browser, id_: str, text: str) -> None:
    script = "return document.getElementById(arguments[0]).innerText.includes(arguments[1])"
    page.until(script, id_, text)


def logs(server: Server, text: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while text not in server.log:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)


def test_it_is_live_through_a_swap_with_waiters(
    serve: Callable[..., Server], page: chromium.Browser
) -> None:
    server = serve(load_s=3.0)
    page.open(f"{server.url}/admission")
    shows(page, "now", "No model is loaded")
    assert page.text("health") == "healthy"
    asking = Asking(server)
    asking.ask("a", "first")
    shows(page, "now", "Loading a")
    shows(page, "now", "a is loaded")
    for i in range(4):
        asking.ask("b", f"agent-{i}")
    shows(page, "now", "Loading b in place of a")
    shows(page, "now", "4 requests wait for it")
    rows = page.run(
        "return [...document.querySelectorAll('#queue tbody tr')].map(r =>"
        " [...r.cells].map(c => c.innerText))"
    )
    assert [row[:2] for row in rows] == [["1", "b"], ["2", "b"], ["3", "b"], ["4", "b"]]
    assert {row[5] for row in rows} == {f"agent-{i}" for i in range(4)}
    # First the old model is unloaded; the new one's own load comes after that.
    label = "return document.getElementById('bar').getAttribute('aria-label')"
    page.until(f"{label} === arguments[0]", "b 1.61 GB loading, of a ceiling of 2.70 GB")
    page.until("return document.querySelectorAll('#line svg .f-loading').length >= 2")
    page.until("return document.querySelectorAll('#line svg .f-wait').length >= 1")
    shows(page, "now", "b is loaded")
    assert page.run("return document.getElementById('queue').hidden")
    asking.join()
    shows(page, "swaps", "b")


def test_it_survives_a_restart_of_the_server(
    serve: Callable[..., Server], page: chromium.Browser
) -> None:
    server = serve()
    page.open(f"{server.url}/admission")
    shows(page, "link", "live")
    server.__exit__()
    shows(page, "link", "does not answer")
    assert page.run("return document.getElementById('all').className") == "stale"
    asking = Asking(serve())
    shows(page, "link", "live")
    assert page.run("return document.getElementById('all').className") == ""
    asking.ask("a", "after")
    shows(page, "now", "a is loaded")
    asking.join()


def test_an_open_page_does_not_keep_the_server_from_ending(
    serve: Callable[..., Server], page: chromium.Browser
) -> None:
    server = serve()
    page.open(f"{server.url}/admission")
    shows(page, "link", "live")
    # Server ends its process by force after 15 s, and then with another log.
    server.__exit__()
    assert "Finished server process" in server.log


#: How often a page has asked for status.
ASKED = """return performance.getEntriesByType("resource")
    .filter(e => e.name.includes("/status")).length"""
HIDE = """Object.defineProperty(document, "hidden", {value: arguments[0], configurable: true});
    document.dispatchEvent(new Event("visibilitychange"))"""


def test_c11_seven_tabs_are_live_and_leave_the_server_within_reach(
    serve: Callable[..., Server], page: chromium.Browser
) -> None:
    """A browser has six connections to one server, for all of its tabs together."""
    server = serve()
    tabs = []
    for _ in range(7):
        tabs.append(page.tab())
        page.open(f"{server.url}/admission")
        page.run(HIDE, False)
        shows(page, "link", "live")
    page.tab()
    page.open(f"{server.url}/admission/status")
    assert page.run("return document.body.innerText.startsWith('{')")
    for tab in tabs:
        page.go_to(tab)
        before = page.run(ASKED)
        page.until(f"{ASKED} > arguments[0]", before)


def test_c11_a_tab_that_is_not_seen_asks_nothing(
    serve: Callable[..., Server], page: chromium.Browser
) -> None:
    server = serve()
    hidden = page.tab()
    page.open(f"{server.url}/admission")
    shows(page, "link", "live")
    page.run(HIDE, True)
    # What it asked when it was hidden may be under way, and one more pause begun.
    before = page.run(ASKED)
    seen = page.tab()
    page.open(f"{server.url}/admission")
    page.run(HIDE, False)
    page.until(f"{ASKED} >= 6")
    page.go_to(hidden)
    assert page.run(ASKED) <= before + 1
    page.go_to(seen)
    asyncio.run(Client(server.url).chat("a"))
    page.go_to(hidden)
    assert "No model is loaded" in page.text("now")
    page.run(HIDE, False)
    shows(page, "now", "a is loaded")


class Proxy(http.server.BaseHTTPRequestHandler):
    """Hands ``/omlx/...`` on to the server at ``behind``, without the prefix."""

    behind = ""
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if not self.path.startswith("/omlx/"):
            self.send_error(404)
            return
        answer = httpx.get(self.behind + self.path.removeprefix("/omlx"), **LOCAL)
        self.send_response(answer.status_code)
        for name in ("content-type", "content-security-policy"):
            if name in answer.headers:
                self.send_header(name, answer.headers[name])
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Not to the screen."""


def test_c14_it_is_live_behind_a_path_prefix(
    serve: Callable[..., Server], page: chromium.Browser
) -> None:
    server = serve()
    Proxy.behind = server.url
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            page.open(f"http://127.0.0.1:{proxy.server_port}/omlx/admission")
            shows(page, "link", "live")
            asyncio.run(Client(server.url).chat("a"))
            shows(page, "now", "a is loaded")
            page.open("about:blank")
        finally:
            proxy.shutdown()
            thread.join()
    assert all(path.startswith("/omlx/admission") for path in Proxy.asked)


def test_it_asks_for_the_key_and_forgets_it(
    serve: Callable[..., Server], page: chromium.Browser
) -> None:
    server = serve(key=True)
    page.open(f"{server.url}/admission")
    page.until("return !document.getElementById('key').hidden")
    focused = "return document.activeElement.id"
    assert page.run(focused) == "key-in", "one types at once"
    page.press(*"wrong", "\ue007")
    shows(page, "key-why", "refused")
    page.press(*KEY, "\ue007")
    shows(page, "now", "No model is loaded")
    shows(page, "link", "live")
    page.open(f"{server.url}/admission")
    shows(page, "link", "live")
    assert KEY not in page.run("return document.documentElement.outerHTML")
    page.run("document.getElementById('forget').click()")
    page.until("return !document.getElementById('key').hidden")


def test_a_refusal_and_what_is_stuck_are_shown(
    serve: Callable[..., Server], page: chromium.Browser
) -> None:
    server = serve(load_s=9.0, OMLX_ADMISSION_STUCK_S="1")
    page.open(f"{server.url}/admission")
    shows(page, "link", "live")
    refused = asyncio.run(Client(server.url).chat("x"))
    assert refused.status == 507
    shows(page, "refusals", "does not fit under the memory ceiling")
    asking = Asking(server)
    asking.ask("a", "first")
    shows(page, "alerts", "the load of 'a' has lasted")
    assert page.text("health") == "needs attention"
    logs(server, "admission: stuck: the load of 'a'")
    shows(page, "health", "healthy")
    assert page.text("alerts") == ""
    asking.join()
    logs(server, "admission: the load of 'a' goes on")


def test_it_works_with_a_keyboard_and_a_screen_reader(
    serve: Callable[..., Server], page: chromium.Browser
) -> None:
    server = serve()
    page.open(f"{server.url}/admission")
    shows(page, "link", "live")
    page.press("\ue004")
    assert page.run("return document.activeElement.className") == "skip"
    page.press("\ue007")
    assert page.run("return document.activeElement.id") == "main"
    opened = False
    for _ in range(20):
        page.press("\ue004")
        if page.run("return document.activeElement.id") == "absent-n":
            page.press(" ")
            opened = bool(
                page.run("return document.getElementById('absent').parentElement.open")
            )
            break
    assert opened
    shows(page, "absent", "x (4.89 GB)")
    tree = page.cdp("Accessibility.getFullAXTree")["nodes"]
    named = {
        (n["role"]["value"], n.get("name", {}).get("value", ""))
        for n in tree
        if not n["ignored"]
    }
    assert ("heading", "Waiting requests") in named
    assert ("main", "") in named
    assert any(role == "status" for role, _ in named)
    images = [name for role, name in named if role in ("img", "image")]
    assert images
    assert all(images), "every picture has words"
    assert page.run("return document.documentElement.lang") == "en"


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_and_can_be_read_in_both_colours(
    dark: bool, serve: Callable[..., Server], page: chromium.Browser
) -> None:
    server = serve()
    page.look(dark=dark, width=360, height=740)
    page.open(f"{server.url}/admission")
    asking = Asking(server)
    asking.ask("a", "first")
    asking.join()
    asyncio.run(Client(server.url).chat("x"))
    shows(page, "refusals", "does not fit")
    shows(page, "now", "a is loaded")
    wide = "return document.documentElement.scrollWidth <= window.innerWidth"
    assert page.run(wide), "nothing is cut off or scrolls sideways"
    for selector in ("body", ".soft", "#models .badge", "#bar div", "th", "summary"):
        ratio = page.run(CONTRAST, selector)
        assert ratio is not None, selector
        assert ratio >= 4.5, f"{selector}: {ratio:.2f}"


#: How often what is shown was drawn anew.
DRAWN = """if (!window.drawn) { window.drawn = 0; const plain = draw;
    draw = () => { plain(); window.drawn += 1; }; } return window.drawn"""
SELECT = """const cell = document.querySelector(arguments[0]);
    getSelection().selectAllChildren(cell); return getSelection().toString()"""


def test_what_is_selected_and_pointed_at_stays(
    serve: Callable[..., Server], page: chromium.Browser
) -> None:
    server = serve(load_s=1.0)
    page.open(f"{server.url}/admission")
    shows(page, "link", "live")
    client = Client(server.url)
    asyncio.run(client.chat("x", headers={"X-Request-ID": "the-refused-one"}))
    asyncio.run(client.chat("a"))
    shows(page, "refusals", "the-refused-one")
    shows(page, "now", "a is loaded")
    selected = page.run(SELECT, "#refusals tbody tr td:last-child")
    assert selected == "the-refused-one"
    page.run("window.band = document.querySelector('#line svg .f-resident')")
    before = page.run(DRAWN)
    # A row comes in front of it, a model's state changes.
    asyncio.run(client.chat("x", headers={"X-Request-ID": "another"}))
    asyncio.run(client.chat("b"))
    shows(page, "refusals", "another")
    shows(page, "now", "b is loaded")
    page.until(f"{DRAWN.replace('return window.drawn', '')} return window.drawn > {before + 2}")
    assert page.run("return getSelection().toString()") == "the-refused-one"
    assert page.run("return window.band.isConnected"), "its tooltip stays"
    rows = (
        "return [...document.querySelectorAll('#refusals tbody tr')]"
        ".map(r => r.lastChild.innerText)"
    )
    assert page.run(rows) == ["another", "the-refused-one"]
    widths = "return [...document.querySelectorAll('#bar div')].map(d => d.style.flexBasis)"
    assert all(width.endswith("%") for width in page.run(widths))


def test_it_can_be_paused(serve: Callable[..., Server], page: chromium.Browser) -> None:
    server = serve()
    paused = page.tab()
    page.open(f"{server.url}/admission")
    page.run(HIDE, False)
    shows(page, "link", "live")
    page.run("document.getElementById('pause').click()")
    shows(page, "link", "paused")
    asyncio.run(Client(server.url).chat("a"))
    before = page.run(ASKED)
    page.tab()
    page.open(f"{server.url}/admission")
    page.run(HIDE, False)
    page.until(f"{ASKED} >= 3")
    shows(page, "now", "a is loaded")
    page.go_to(paused)
    assert page.run(ASKED) <= before + 1
    assert "No model is loaded" in page.text("now")
    assert page.run("return document.getElementById('pause').getAttribute('aria-pressed')") == (
        "true"
    )
    page.run("document.getElementById('pause').click()")
    shows(page, "now", "a is loaded")
    shows(page, "link", "live")


FAULTS = """const exposure = {busy_s: {"0": 0, "1": 5, "2": 7200}, lockups: 2,
    advice: "what may help", faults: [], replays: {count: 2, tokens: 222000, seconds: 240,
    failed: 1}, last_faults: [{at: 1, engine: "glm", fault: "Hang",
    circumstances: "busy: glm, qwen"}]};
    paused = true; doc.exposure = exposure; draw()"""
TURN = """paused = true; doc.features.find(f => f.name === "gpu_turn").state = arguments[0];
    doc.features.find(f => f.name === "gpu_turn").reasons = ["a reason"]; draw()"""


def test_faults_and_replays_of_the_gpu_are_shown(
    serve: Callable[..., Server], page: chromium.Browser
) -> None:
    server = serve()
    page.open(f"{server.url}/admission")
    shows(page, "link", "live")
    assert page.text("turn") == "Engines do not take turns on the GPU."
    shows(page, "sites-n", "the turn would cover")
    page.run(FAULTS)
    assert page.text("exposure").startswith("Since the start two or more engines were busy for")
    assert "2 h; 2 lockups. MTP computed 222000 tokens again in 2 replays" in page.text(
        "exposure"
    )
    assert page.text("advice") == "What may help."
    assert "Hang" in page.text("faults") and "busy: glm, qwen" in page.text("faults")
    page.run(TURN, "refused")
    assert (
        page.text("turn") == "Engines take no turns on the GPU; the turn is refused: a reason."
    )


def test_what_the_server_answers_is_told(
    serve: Callable[..., Server], page: chromium.Browser
) -> None:
    server = serve()
    page.open(f"{server.url}/admission")
    shows(page, "link", "live")
    page.run("window.fetch = async () => new Response('', {status: 503})")
    shows(page, "link", "The server answers 503; trying again")
    page.run("window.fetch = async () => new Response('', {status: 404})")
    shows(page, "link", "has no omlx-admission")


#: WCAG contrast of an element's text with the nearest background below it.
CONTRAST = """
const node = document.querySelector(arguments[0]);
if (!node) return null;
const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
const light = c => {
  const [r, g, b] = parse(c).slice(0, 3).map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
};
let below = node, back = [0, 0, 0, 0];
while (below) {
  back = parse(getComputedStyle(below).backgroundColor);
  if (back.length === 3 || back[3] > 0) break;
  below = below.parentElement;
}
const a = light(getComputedStyle(node).color), b = light(`rgb(${back.slice(0, 3)})`);
return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
"""
