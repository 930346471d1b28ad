"""Chromium shows a page of `spile report`: what is drawn is looked at, in light and dark, on a screen and on a phone."""

import json
import pathlib
import re
import shutil
import subprocess
import time
import urllib.request

import browser
from support import MIB, PeerTest, spile, spile_binary, text

HERE = pathlib.Path(__file__).resolve().parent
LOOKS = (HERE / "report_looks.js").read_text()
# A result of every experiment, with as many points as a long run has. Its numbers are made up.
RESULTS = HERE.parent.parent / "crates" / "bench" / "tests" / "results"
WIDTHS = (1280, 390)
# As WCAG 2.1 asks for ordinary texts.
CONTRAST = 4.5


class Looked(PeerTest):
    """A test that judges what is drawn on a page."""

    def setUp(self):
        browser.binary()
        super().setUp()
        self.pages = browser.Pages(self.folder)
        self.addCleanup(self.pages.close)

    def look(self, page, is_dark):
        found, console = browser.look(self.pages, page, LOOKS, WIDTHS, is_dark)
        self.assertEqual(console, [])
        self.assertEqual([one["dark"] for one in found], [is_dark, is_dark])
        self.assertEqual([one["width"] for one in found], list(WIDTHS))
        return found

    def judge(self, found):
        for one in found:
            at = f"at {one['width']} px"
            self.assertLessEqual(one["overflow"], 0, at)
            self.assertGreaterEqual(one["contrast"]["ratio"], CONTRAST, one["contrast"])
            self.assertTrue(one["reachable"] and one["links"], at)
            for figure in one["figures"]:
                self.judge_figure(figure, f"{figure['name']} {at}")

    def judge_figure(self, figure, at):
        for fact in ("focused", "outlined", "named", "axes", "ticks", "inside"):
            self.assertTrue(figure[fact], f"{fact}: {at}")
        self.assertEqual(figure["faults"], [], at)
        self.assertEqual(figure["marks"], figure["values"], at)
        self.assertGreater(figure["marks"], 0, at)
        self.assertGreater(figure["narrowest"], 300, at)


class Report(Looked):
    def setUp(self):
        super().setUp()
        results = self.path("results")
        shutil.copytree(RESULTS, results)
        (results / "broken.json").write_text("{")
        made = spile("report", results, "-o", self.path("report.html"))
        self.assertIn("broken.json is not understood", text(made.stderr))

    def test_light_and_dark_on_a_screen_and_on_a_phone(self):
        for is_dark in (False, True):
            found = self.look("report.html", is_dark)
            self.judge(found)
            figures = {figure["name"]: figure for figure in found[0]["figures"]}
            for experiment in RESULTS.glob("*.json"):
                self.assertTrue(any(name.startswith(experiment.stem) for name in figures), experiment.stem)
            # A panel for each size and direction, with a name for each path.
            self.assertEqual((figures["aggregate-ratio"]["panels"], figures["aggregate-ratio"]["series"]), (6, 3))
            self.assertEqual((figures["paths-ratio"]["panels"], figures["paths-ratio"]["series"]), (6, 9))
            self.assertEqual(figures["exchange-ratio"]["marks"], 1)

    def test_what_is_looked_for_is_found(self):
        page = self.path("report.html").read_text()
        # A text on top of another one, one without contrast, something too wide, an axis with a wrong text, and an error.
        bad = '<text x="60" y="60" font-size="20" class="x" style="fill:#eee">on top</text>'
        broken = page.replace("</svg>", f"{bad}<text x='61' y='61'>of this</text></svg>", 1)
        broken = broken.replace("</main>", "<div style='width:2000px'>wide</div><script>console.error('no')</script></main>")
        broken, count = re.subn(r'(text-anchor="end">)0(</text>)', r"\g<1>0.1\2", broken)
        self.assertGreater(count, 0)
        self.path("broken.html").write_text(broken)
        found, console = browser.look(self.pages, "broken.html", LOOKS, WIDTHS, False)
        self.assertEqual(len(console), len(WIDTHS), console)
        faults = [fault for figure in found[0]["figures"] for fault in figure["faults"]]
        self.assertTrue(any('"on top" overlaps "of this"' in fault for fault in faults), json.dumps(faults))
        self.assertTrue(any("make no scale" in fault or "starts at 0.1" in fault for fault in faults), json.dumps(faults))
        self.assertLess(found[0]["contrast"]["ratio"], CONTRAST)
        self.assertGreater(found[0]["overflow"], 0)


class Live(Looked):
    def test_a_running_server_is_shown(self):
        server = self.serve(self.empty("disk.raw", 16 * MIB), extra=["--control", self.path("c")])
        command = [spile_binary(), "report", "--live", self.path("c")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as live:
            try:
                url = live.stdout.readline().decode().strip()
                load = ["load", server.uri(), "--rw", "randread", "--runtime", "4s"]
                with subprocess.Popen([spile_binary(), *load], stdout=subprocess.DEVNULL):
                    for _ in range(4):
                        time.sleep(1)
                        urllib.request.urlopen(f"{url}figures", timeout=10).close()
                shown = browser.start(url, False, "--virtual-time-budget=3000", "--dump-dom")
                refused = browser.start(re.sub(r"/[0-9a-f]{32}/$", "/", url), False, "--dump-dom")
            finally:
                live.terminate()
        page = text(shown.stdout)
        for part in ("<h2>disk</h2>", "average queue size", "requests per second", "How latencies are spread"):
            self.assertTrue(part in page, part)
        self.assertRegex(page, '<path d="[^"]*" class="m ')
        self.assertEqual([line for line in text(shown.stderr).splitlines() if "CONSOLE" in line], [])
        self.assertIn("read the address that spile report has printed", text(refused.stdout))
        # The page as it is now, without the script that asks for more.
        self.path("live.html").write_text(re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL))
        for is_dark in (False, True):
            found = self.look("live.html", is_dark)
            self.judge(found)
            self.assertEqual([figure["name"] for figure in found[0]["figures"]], ["moved", "waits", "latencies"])
