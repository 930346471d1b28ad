"""Prometheus scrapes a served disk, classic and with native histograms, and answers each question of the dashboard; promtool checks what a
loaded server says, and the alert rules."""

import json
import os
import signal
import subprocess
import tempfile
import time
import unittest
import urllib.error
import urllib.parse
import urllib.request

from support import LIMIT_S, MIB, STANDIN, TOP, PeerTest, need, own_address, run, spile, spile_binary, text, tries

DETAILS = ("disk", "layer", "queue")
# A store that takes so long: what the client, the server and Prometheus say of a request is then nearly the same.
DELAY_S = 0.02
RATE = 100
LOAD_S = 12
# A scrape that takes longer is lost. It is an interval, too, because Prometheus wants it no longer than that.
SCRAPE = "1s"
FRONT = '{disk="d",layer="front",operation="read"}'
BOARD = TOP / "docs" / "grafana" / "spile.json"
ALERTS = TOP / "docs" / "prometheus" / "alerts.yml"


def get(url, accept="*/*"):
    request = urllib.request.Request(url, headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return answer.read()


def fetch_ready(url):
    """Asks until there is an answer."""
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            return get(url)
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


class Prometheus:
    """A Prometheus that scrapes one server every second, and ends with the test."""

    def __init__(self, test, target, *options):
        folder = test.path("prometheus")
        folder.mkdir()
        scrape = {"job_name": "spile", "static_configs": [{"targets": [target]}]}
        # JSON is YAML.
        config = {"global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE}, "scrape_configs": [scrape]}
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self.address = own_address()
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                   f"--web.listen-address={self.address}", *options]
        self.log = open(folder / "log", "a+b")
        test.addCleanup(self.log.close)
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)
        test.addCleanup(self.end)
        fetch_ready(f"http://{self.address}/-/ready")

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def series(self, query):
        """The series that a query finds now."""
        answer = json.loads(get(f"http://{self.address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"))
        return answer["data"]["result"]

    def ask(self, query, at_s=None):
        """The value of a query that has one, at a time; None when it has none, as after a scrape that was lost."""
        words = {"query": query, **({"time": f"{at_s:.3f}"} if at_s else {})}
        answer = json.loads(get(f"http://{self.address}/api/v1/query?{urllib.parse.urlencode(words)}"))
        found = answer["data"]["result"]
        if len(found) > 1:
            raise AssertionError(f"{query}: {found}")
        return float(found[0]["value"][1]) if found else None

    def wait_for(self, query, is_right):
        end = time.monotonic() + LIMIT_S
        while not is_right(value := self.ask(query)):
            if time.monotonic() > end:
                raise AssertionError(f"{query} stays {value}\n{self.log.name}: {open(self.log.name).read()[-3000:]}")
            time.sleep(0.1)


class Scraped(PeerTest):
    def setUp(self):
        need("prometheus")
        need("promtool", "prometheus")
        if STANDIN:
            self.skipTest("needs Spile's metrics")
        super().setUp()

    def serve_with_metrics(self, *disks, detail="disk"):
        address = own_address()
        return self.serve(*disks, extra=["--metrics", address, "--metrics-detail", detail]), address

    def slow_disk(self):
        """A disk whose reads take DELAY_S."""
        need("nbdkit")
        # Not in the folder: a socket's path has to be short.
        at = tempfile.mktemp(".sock", "spile-slow-")
        delay = f"rdelay={DELAY_S * 1000:.0f}ms"
        command = ["nbdkit", "--foreground", "--exit-with-parent", "--unix", at, "--filter=delay", "memory", "64M", delay]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.addCleanup(lambda: os.path.exists(at) and os.unlink(at))
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)
        end = time.monotonic() + LIMIT_S
        while not os.path.exists(at):
            self.assertIsNone(process.poll(), "nbdkit ended")
            self.assertLess(time.monotonic(), end, "nbdkit is not ready")
            time.sleep(0.02)
        return f"nbd+unix:///?socket={at},name=d"

    def load(self, prometheus, server):
        """Reads for a while. Returns what `spile load` says, and the window in which that was, with a scrape before and after it."""
        count = "spile_disk_requests_total" + FRONT
        prometheus.wait_for(count, lambda value: value is not None)
        begun_s = time.time() - 2
        words = ["--bs", "4k", "--depth", "4", "--rate", RATE, "--runtime", f"{LOAD_S}s", "--json"]
        done = json.loads(spile("load", server.uri("d"), *words).stdout)
        prometheus.wait_for(count, lambda value: value is not None and value >= done["read"]["requests"])
        self.assertGreater(done["read"]["requests"], RATE * LOAD_S / 3)
        ended_s = time.time()
        return done["read"], f"{ended_s - begun_s:.0f}s", ended_s

    def assertNear(self, found, wanted, share, what):
        self.assertIsNotNone(found, what)
        self.assertLessEqual(abs(found - wanted), share * wanted, f"{what}: {found} and {wanted}")

    @tries(3)
    def test_rates_and_quantiles_of_classic_histograms(self):
        server, target = self.serve_with_metrics(self.slow_disk())
        prometheus = Prometheus(self, target)
        read, window, at_s = self.load(prometheus, server)
        seconds = float(window[:-1])
        self.assertEqual(prometheus.ask("spile_disk_requests_total" + FRONT), read["requests"])
        self.assertEqual(prometheus.ask("spile_disk_request_bytes_total" + FRONT), read["bytes"])
        self.assertEqual(prometheus.ask("spile_disk_request_duration_seconds_count" + FRONT), read["requests"])
        rate = prometheus.ask(f"rate(spile_disk_requests_total{FRONT}[{window}])", at_s)
        # Prometheus extrapolates to the ends of the window, by less than two scrapes.
        self.assertNear(rate * seconds, read["requests"], 0.2, "rate()")
        of = f"spile_disk_request_duration_seconds_%s{FRONT}[{window}]"
        mean_s = prometheus.ask(f"rate({of % 'sum'}) / rate({of % 'count'})", at_s)
        self.assertNear(mean_s, read["latency_mean_us"] / 1e6, 0.15, "await")
        for quantile, name in ((0.5, "latency_p50_us"), (0.99, "latency_p99_us")):
            found_s = prometheus.ask(f"histogram_quantile({quantile}, rate({of % 'bucket'}))", at_s)
            self.assertNear(found_s, read[name] / 1e6, 1, f"histogram_quantile({quantile})")
            self.assertGreater(found_s, DELAY_S / 2)
        # Little's law: the average queue is the rate of requests times their mean time.
        depth = prometheus.ask(f'rate(spile_disk_request_depth_seconds_total{{disk="d"}}[{window}])', at_s)
        self.assertNear(depth, rate * mean_s, 0.05, "aqu-sz")
        prometheus.wait_for("up", lambda value: value == 1)

    @tries(3)
    def test_native_histograms(self):
        server, target = self.serve_with_metrics(self.slow_disk())
        prometheus = Prometheus(self, target, "--enable-feature=native-histograms")
        read, window, at_s = self.load(prometheus, server)
        name = "spile_disk_request_duration_seconds" + FRONT
        self.assertEqual(prometheus.ask(f"histogram_count({name})"), read["requests"])
        sum_s = prometheus.ask(f"histogram_sum({name})")
        self.assertNear(sum_s, read["requests"] * read["latency_mean_us"] / 1e6, 0.15, "histogram_sum")
        median_s = prometheus.ask(f"histogram_quantile(0.5, rate({name}[{window}]))", at_s)
        # A native bucket is 9 % wide.
        self.assertNear(median_s, read["latency_p50_us"] / 1e6, 0.15, "histogram_quantile(0.5)")
        slow = prometheus.ask(f"histogram_fraction({DELAY_S / 2}, +Inf, {name})")
        self.assertGreater(slow, 0.9)

    def test_each_question_of_the_dashboard_has_an_answer(self):
        server, target = self.serve_with_metrics(f"{self.empty('a.raw', 16 * MIB)},name=d")
        prometheus = Prometheus(self, target)
        command = [spile_binary(), "load", server.uri("d"), "--rw", "randrw", "--rate", "200", "--flush-every", "10", "--runtime", "1h"]
        load = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(load.wait)
        self.addCleanup(load.kill)
        board = json.loads(BOARD.read_text())
        asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
        self.assertGreater(len(asked), 15)
        # What Grafana puts in for its variables.
        for name, value in (("$disk", "d"), ("$instance", ".+"), ("$__rate_interval", "15s"), ("$__range", "1m")):
            asked = [query.replace(name, value) for query in asked]
        end = time.monotonic() + LIMIT_S
        while unanswered := [query for query in asked if not prometheus.series(query)]:
            self.assertLess(time.monotonic(), end, unanswered)
            time.sleep(1)

    def test_promtool_finds_nothing_to_say_about_a_loaded_server(self):
        disks = [f"{self.empty('a.raw', 16 * MIB)},name=d", f"{self.empty('b.raw', 16 * MIB)},name=\"e\\"]
        server, target = self.serve_with_metrics(*disks, detail="queue")
        spile("load", server.uri("d"), "--rw", "randrw", "--ios", 500, "--flush-every", 10)
        sizes = []
        for detail in DETAILS:
            answer = get(f"http://{target}/metrics?detail={detail}", "text/plain")
            sizes.append(len(answer))
            self.assertIn(b"spile_disk_request_duration_seconds_bucket", answer)
            done = run("promtool", "check", "metrics", stdin=answer, ok=None)
            self.assertEqual((done.returncode, text(done.stdout + done.stderr)), (0, ""), detail)
        self.assertLess(sizes[0], sizes[1])

    def test_alert_rules(self):
        done = run("promtool", "check", "rules", ALERTS)
        self.assertIn("SUCCESS", text(done.stdout))
        run("promtool", "test", "rules", "tests/peer/alerts_test.yml", cwd=TOP)


if __name__ == "__main__":
    unittest.main()
