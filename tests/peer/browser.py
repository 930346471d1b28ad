"""Chromium without a window: what it draws of a page, and what it finds there.

A page of one's own has the page under test in frames of several widths, and a script that looks at what is in them. Both come
from one small web server, because a script may look only into frames of its own origin.
"""

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import tempfile
import threading
import unittest

from support import text

# A limit for one start of the browser.
LIMIT_S = 600

FRAMES = """<!doctype html><title>frames</title><meta name="color-scheme" content="light dark">
{frames}
<pre id="found"></pre>
<script>
{looks}
const frames = [...document.querySelectorAll('iframe')];
const loaded = frame => new Promise(done => frame.contentDocument.readyState === 'complete' && frame.contentWindow.location.href !== 'about:blank'
  ? done() : frame.addEventListener('load', done));
Promise.all(frames.map(loaded)).then(() => {{
  const found = frames.map(frame => look(frame.contentWindow, frame.contentDocument));
  document.getElementById('found').textContent = JSON.stringify(found);
}});
</script>
"""


def binary():
    """The browser's program, or a skip."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise unittest.SkipTest("chromium is not installed (package chromium)")


class Pages:
    """A web server on this host for the files of a folder."""

    def __init__(self, folder):
        class Quiet(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_):
                pass

        handler = functools.partial(Quiet, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.folder = folder
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def url(self, name):
        return f"http://127.0.0.1:{self.server.server_address[1]}/{name}"


def look(pages, page, looks, widths, is_dark):
    """What the script `looks`, which defines `look(window, document)`, returns for `page` at each width, and the console's messages."""
    frame = '<iframe src="{}" width="{}" height="3000" style="border:0;display:block"></iframe>'
    frames = "".join(frame.format(page, width) for width in widths)
    name = f"frames-{'dark' if is_dark else 'light'}.html"
    (pages.folder / name).write_text(FRAMES.format(frames=frames, looks=looks))
    shown = start(pages.url(name), is_dark, "--window-size=1600,1200", "--virtual-time-budget=60000", "--dump-dom")
    answer = re.search(r'<pre id="found">(.+?)</pre>', text(shown.stdout), re.DOTALL)
    if answer is None:
        raise AssertionError(f"the script did not end: {text(shown.stderr)[-3000:]}")
    console = [line for line in text(shown.stderr).splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(answer[1])), console


def start(url, is_dark, *options):
    """Runs the browser on `url`, with a profile of its own."""
    with tempfile.TemporaryDirectory(prefix="spile-browser-", ignore_cleanup_errors=True) as profile:
        command = [binary(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--no-first-run", *options]
        if is_dark:
            command += ["--blink-settings=preferredColorScheme=0"]
        return subprocess.run([*command, url], capture_output=True, timeout=LIMIT_S, check=False)
