"""plots/viewer.py's page in a real browser: clicks, keys, sizes, light and dark.

    python tests/bench/browser.py                       # a page made here, with hostile answers
    python tests/bench/browser.py runs/grpo-1 --picture plots/viewer.png

Wants Chromium (Debian: apt-get install chromium) and no Python package: it talks the DevTools
protocol through two pipes, one JSON message after the other, a zero byte between them. Every check
prints a line; a console message, an exception or a network request is a failure.
"""

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "plots"), str(ROOT)]
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Tab": 9, "Escape": 27}


class Browser:
    """A headless Chromium with one page; `events` are the messages that it sent by itself."""

    def __init__(self, program, profile):
        to_child, self.write = os.pipe()
        self.read, from_child = os.pipe()
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                   "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]

        def arrange():  # the protocol is at descriptors 3 and 4
            source, target = os.dup(to_child), os.dup(from_child)
            os.dup2(source, 3)
            os.dup2(target, 4)

        self.process = subprocess.Popen(
            command, preexec_fn=arrange, close_fds=False, stderr=subprocess.DEVNULL)
        os.close(to_child)
        os.close(from_child)
        self.number, self.rest, self.events, self.session = 0, b"", [], None
        target = next(t for t in self.send("Target.getTargets")["targetInfos"]
                      if t["type"] == "page")
        self.session = self.send("Target.attachToTarget", targetId=target["targetId"],
                                 flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """Call a method of the protocol; its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def receive(self):
        """The next message."""
        while b"\0" not in self.rest:
            piece = os.read(self.read, 1 << 16)
            if not piece:
                raise RuntimeError("Chromium has ended")
            self.rest += piece
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, address):
        """Go there and wait until it is loaded."""
        self.events.clear()
        self.send("Page.navigate", url=address)
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.receive())

    def ask(self, code):
        """The value of a line of JavaScript."""
        result = self.send("Runtime.evaluate", expression=code, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{code}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def click(self, selector):
        """A real click into the middle of an element."""
        x, y = self.ask(f"""(() => {{
            const node = document.querySelector({json.dumps(selector)});
            node.scrollIntoView({{block: "center"}});
            const box = node.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2]; }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name):
        """A key pressed and let go."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name,
                      windowsVirtualKeyCode=KEYS[name])

    def look(self, width, height=1000, scheme="light"):
        """Another window size and colour scheme."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path):
        """What is in the window, as a PNG."""
        Path(path).write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def complaints(self):
        """Console messages, exceptions, and requests for anything but the page itself."""
        bad = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        said = [json.dumps(e["params"])[:300] for e in self.events if e.get("method") in bad]
        asked = [e["params"]["request"]["url"] for e in self.events
                 if e.get("method") == "Network.requestWillBeSent"]
        return said + asked[1:]

    def close(self):
        """End it."""
        self.send("Browser.close")
        self.process.wait(30)


def check(name, right):
    """Print a verdict; the first wrong one ends the program."""
    print(f"{'ok  ' if right else 'FAIL'}  {name}", flush=True)
    if not right:
        sys.exit(1)


def drive(browser, page):
    """Every control of the page, by mouse and by key."""
    browser.look(1600)
    browser.open(page.resolve().as_uri())
    check("an answer's tokens are drawn", browser.ask("$('answers').querySelector('.token') && 1"))
    check("nothing in an answer ran", browser.ask("window.hacked === undefined && "
                                                  "!document.querySelector('img')"))
    last = browser.ask("now.step")
    browser.key("ArrowLeft")
    check("arrow left goes to the step before", browser.ask("now.step") < last)
    browser.key("ArrowRight")
    check("arrow right comes back", browser.ask("now.step") == last)
    browser.click("#before")
    check("so does the button", browser.ask("now.step") < last)
    browser.ask("(() => { const box = document.querySelector('#curves svg')"
                ".getBoundingClientRect(); document.querySelector('#curves svg').dispatchEvent("
                "new MouseEvent('click', {clientX: box.right, clientY: box.y + 5})); })()")
    check("a click at a curve's right end shows the last step", browser.ask("now.step") == last)
    browser.click("#answers .token")
    browser.ask("document.activeElement.blur()")
    check("a touched token has its equation", "max" in browser.ask("$('equation').textContent"))
    product = browser.ask(
        "(() => { const row = theGroup().rows[now.answer], s = by(row, ownScript()); "
        "return show(at(s.w, now.token) * at(s.term, now.token)); })()")
    check("whose result is policy_loss's", f"= {product}" in
          browser.ask("$('equation').textContent"))
    for colour in browser.ask("[...$('colours').children].map((b) => b.dataset.colour)"):
        browser.click(f"[data-colour={colour}]")
        check(f"colour {colour}", browser.ask(f"now.colour === '{colour}' && !!$('answers')"
                                              ".querySelector('.token[style]')"))
    browser.ask("document.querySelector('#answers .tokens').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    check("arrows walk through an answer's tokens", browser.ask("now.token") == 2)
    browser.key("Escape")
    browser.key("ArrowLeft")
    check("after Escape they walk through steps again", browser.ask("now.step") < last)
    for sort in browser.ask("[...$('sort').options].map((o) => o.value)"):
        browser.ask(f"$('sort').value = '{sort}'; $('sort').dispatchEvent(new Event('change'))")
        values = browser.ask("[...document.querySelectorAll('.answer')].map((a) => SORTS"
                             f"['{sort}'](theGroup().rows[a.dataset.answer]))")
        check(f"sorted by {sort}", values == sorted(values))
    for kind in browser.ask("[...$('filter').options].map((o) => o.value)"):
        browser.ask(f"$('filter').value = '{kind}'; $('filter').dispatchEvent(new Event('change'))")
        check(f"only {kind}", browser.ask(f"(theGroup() ? passing(theGroup()) : []).every((row) =>"
                                          f" FILTERS['{kind}'](row, theGroup()))"))
    browser.ask("$('filter').value = 'all'; $('filter').dispatchEvent(new Event('change'))")
    browser.ask("$('sort').value = 'order'; $('sort').dispatchEvent(new Event('change'))")
    reached = set()
    browser.ask("document.activeElement.blur()")
    for _ in range(60):
        browser.key("Tab")
        reached.add(browser.ask("document.activeElement.id || document.activeElement.className"))
    answer = browser.ask("document.querySelector('#answers [tabindex]').className")  # may be text
    wanted = {"group", "filter", "sort", "before", answer}
    check("Tab reaches everything", wanted <= reached)
    for width in (360, 1600):
        browser.look(width)
        wide = browser.ask("[...document.querySelectorAll('main *')].filter((node) => "
                           "node.getBoundingClientRect().right > innerWidth && !node.closest("
                           "'#others, svg')).map((node) => node.id || node.className)")
        check(f"nothing sticks out at {width} pixels {wide}", not wide and browser.ask(
            "document.documentElement.scrollWidth <= innerWidth"))
    backs = []
    for scheme in ("light", "dark"):
        browser.look(1600, scheme=scheme)
        backs.append(browser.ask("getComputedStyle(document.body).backgroundColor"))
    check("light and dark differ", backs[0] != backs[1])
    browser.ask("0")  # what is said late has come by now
    complaints = browser.complaints()
    check(f"no console message, no request {complaints}", not complaints)
    browser.ask("(() => { const code = document.createElement('script'); code.textContent = "
                "'window.hacked = 1'; const picture = document.createElement('img'); picture.src ="
                " 'http://127.0.0.1:9/x.png'; document.body.append(code, picture); })()")
    check("the page's policy stops code and pictures put into it by force", browser.ask(
        "window.hacked === undefined && document.querySelector('img').naturalWidth === 0")
        and any("Content Security Policy" in text for text in browser.complaints()))


def pictures(browser, path):
    """The README's picture: the group with most to see, a clipped token touched; and its sisters
    in the dark and on a telephone."""
    browser.look(1600, 1000)
    browser.ask("""(() => {
        const clips = (g) => g.rows.reduce((n, row) => n + (by(row, ownScript())?.clip.length ?? 0),
            0) * (new Set(g.rows.map((row) => row.correct)).size > 1);
        const best = [...theRun().groups].sort((a, b) => clips(b) - clips(a))[0];
        go({step: best.step});
        now.colour = "ratio";
        go({step: best.step, group: groupsNow().indexOf(best)});
        const span = document.querySelector("#answers .clip") ??
            document.querySelector("#answers .token");
        span.click(); scrollTo(0, 0); })()""")
    browser.picture(path)
    browser.look(1600, 1000, "dark")
    browser.picture(path.with_name(f"{path.stem}-dark.png"))
    browser.look(360, 800)
    browser.picture(path.with_name(f"{path.stem}-360.png"))


def main():
    """Drive the page of a run, or of one that the tests make up."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument("--picture", type=Path, help="also write this PNG")
    args = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if not program:
        print("skipped: no Chromium here (Debian: apt-get install chromium)")
        return
    import test_viewer
    import viewer

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runs = args.runs or [test_viewer.make_run(Path(folder) / "run", "grpo", hostile=True)]
        page = Path(folder) / "page.html"
        viewer.main([*map(str, runs), "--out", str(page)])
        browser = Browser(program, Path(folder) / "profile")
        try:
            drive(browser, page)
            if args.picture:
                pictures(browser, args.picture)
        finally:
            browser.close()


if __name__ == "__main__":
    main()
