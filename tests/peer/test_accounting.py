"""fio's own latency, rate and depth of a run beside what the server has counted of the same run, by its own clock."""

import json
import os
import subprocess
import time

from support import LIMIT_S, STANDIN, PeerTest, need, run

# How long the store takes.
DELAY_MS = 20
DEPTH = 8
REQUESTS = 2400
# fio's latency has the way between client and server, which the server does not see.
WAY_MS = 0.2
TOLERANCE = 0.02 + WAY_MS / DELAY_MS
# On a host that does other things, the way may take longer.
TRIES = 6


class Accounting(PeerTest):
    def setUp(self):
        need("fio")
        need("nbdkit")
        need("curl")
        if STANDIN:
            self.skipTest("it is about what Spile counts")
        if "nbd" not in run("fio", "--enghelp").stdout.decode().split():
            self.skipTest("this fio has no nbd engine")
        super().setUp()

    def slow_store(self):
        """Starts a server whose reads take `DELAY_MS`, and returns the locator of its export."""
        path = self.path("slow.sock")
        command = ["nbdkit", "--foreground", "--unix", path, "--threads", "64", "--filter=delay", "memory", "64M"]
        server = subprocess.Popen([*command, f"delay-read={DELAY_MS}ms"])
        self.addCleanup(server.wait, LIMIT_S)
        self.addCleanup(server.terminate)
        end = time.monotonic() + LIMIT_S
        while not os.path.exists(path):
            self.assertLess(time.monotonic(), end, "nbdkit does not answer")
            time.sleep(0.05)
        return f"nbd+unix:///?socket={path}"

    def stats(self, control):
        answer = run("curl", "--silent", "--fail", "--unix-socket", control, "http://spile/v1/stats").stdout
        return {layer["kind"]: layer for layer in json.loads(answer)["disks"][0]["layers"]}

    def reads(self, layer):
        return next(op for op in layer["operations"] if op["operation"] == "read")

    def run_fio(self, server, control):
        """A run of fio. Returns its own figures, and what the server has counted up to some moments of it."""
        job = ["fio", "--name=job", "--ioengine=nbd", f"--uri={server.uri('d')}", "--thread", "--rw=randread", "--bs=4k"]
        job += ["--size=64m", f"--number_ios={REQUESTS}", f"--iodepth={DEPTH}", "--output-format=json"]
        looks = [self.stats(control)]
        fio = subprocess.Popen(job, stdout=subprocess.PIPE)
        self.addCleanup(fio.wait)
        self.addCleanup(fio.kill)
        while fio.poll() is None:
            time.sleep(0.02)
            looks.append(self.stats(control))
        told = fio.stdout.read().decode()
        told = json.loads(told[told.index("{"):])["jobs"][0]
        self.assertEqual((fio.returncode, told["error"]), (0, 0))
        return told, [*looks, self.stats(control)]

    def compare(self, told, looks):
        """Numbers of one run, by name: the server's and fio's."""
        fronts = [look["front"] for look in looks]
        # The part of the run in which fio had all of its requests in flight or was about to send the next one.
        in_flight = [sum(op["in_flight"] for op in front["operations"]) for front in fronts]
        begun = [sum(op["begun"] for op in front["operations"]) for front in fronts]
        base, steady = begun[0], [at for at, count in enumerate(in_flight) if count == DEPTH]
        steady = [at for at in steady if begun[at] - base < REQUESTS]
        first, last = fronts[steady[0]], fronts[steady[-1]]
        elapsed_ns = last["at_ns"] - first["at_ns"]
        self.assertGreater(elapsed_ns, 0.8 * REQUESTS / DEPTH * DELAY_MS * 1e6, "the looks span most of the run")
        before, after = self.counted(fronts[0]), self.counted(fronts[-1])
        requests, latency_ns = (after[key] - before[key] for key in ("requests", "latency_sum_ns"))
        answered = self.counted(last)["requests"] - self.counted(first)["requests"]
        theirs = told["read"]
        self.assertEqual((requests, after["bytes"] - before["bytes"]), (theirs["total_ios"], theirs["io_bytes"]))
        queue_ns = fronts[-1]["queue_time_ns"] - fronts[0]["queue_time_ns"]
        self.assertEqual(queue_ns, latency_ns, "nothing is in flight at either end")
        self.assertGreater(told["iodepth_level"][str(DEPTH)], 99)
        return {
            "mean latency in ns": (latency_ns / requests, theirs["lat_ns"]["mean"]),
            "requests per second": (answered / (elapsed_ns / 1e9), theirs["iops"]),
            "average depth": ((last["queue_time_ns"] - first["queue_time_ns"]) / elapsed_ns, DEPTH),
        }

    def counted(self, front):
        none = {"requests": 0, "bytes": 0, "latency_sum_ns": 0}
        return next((op for op in front["operations"] if op["operation"] == "read"), none)

    def test_a_run_of_fio(self):
        control = self.path("control")
        server = self.serve(self.slow_store() + ",name=d", extra=["--control", control])
        for left in reversed(range(TRIES)):
            told, looks = self.run_fio(server, control)
            numbers = self.compare(told, looks)
            apart = {name: pair for name, pair in numbers.items() if abs(pair[0] / pair[1] - 1) > TOLERANCE}
            if not apart:
                break
            self.assertGreater(left, 0, f"the server's and fio's: {apart}")
        # Each layer holds a request for a part of the time that the one above holds it, and the delay is below all of them.
        after = looks[-1]
        held = [self.reads(after[kind])["latency_sum_ns"] for kind in ("front", "disk", "image", "store")]
        self.assertEqual(held, sorted(held, reverse=True))
        self.assertGreaterEqual(held[-1], REQUESTS * DELAY_MS * 1e6)
