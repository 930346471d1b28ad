"""fio's own latency, rate and depth of a run beside what the server has counted of the same run, within 2 %."""

import json
import os
import subprocess
import time

from support import LIMIT_S, STANDIN, PeerTest, need, run

# A store that takes so long: the way between client and server is then too short to matter.
DELAY_MS = 400
DEPTH = 8
REQUESTS = 120
TOLERANCE = 0.02


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

    def near(self, ours, theirs, what):
        self.assertLess(abs(ours - theirs), TOLERANCE * theirs, f"{what}: {ours} here, {theirs} by fio")

    def test_a_run_of_fio(self):
        control = self.path("control")
        server = self.serve(self.slow_store() + ",name=d", extra=["--control", control])
        job = ["fio", "--name=job", "--ioengine=nbd", f"--uri={server.uri('d')}", "--thread", "--rw=randread", "--bs=4k"]
        job += ["--size=64m", f"--number_ios={REQUESTS}", f"--iodepth={DEPTH}", "--output-format=json"]
        before = self.stats(control)
        told = run(*job).stdout.decode()
        after = self.stats(control)
        told = json.loads(told[told.index("{"):])["jobs"][0]
        theirs = told["read"]
        self.assertEqual(told["error"], 0)
        front = after["front"]
        ours = self.reads(front)
        self.assertEqual((ours["requests"], ours["bytes"]), (theirs["total_ios"], theirs["io_bytes"]))
        mean_ns = ours["latency_sum_ns"] / ours["requests"]
        self.near(mean_ns, theirs["lat_ns"]["mean"], "the mean latency")
        # The interval from the first request to the last answer is fio's: our two looks lie outside of it.
        run_ns = theirs["runtime"] * 1e6
        self.near(ours["requests"] / (run_ns / 1e9), theirs["iops"], "requests per second")
        queue_ns = front["queue_time_ns"] - before["front"]["queue_time_ns"]
        # fio tells no average depth: by Little's law it is its rate times its latency.
        self.near(queue_ns / run_ns, theirs["iops"] * theirs["lat_ns"]["mean"] / 1e9, "the average depth")
        self.assertEqual(queue_ns, ours["latency_sum_ns"], "nothing is in flight at either end")
        # Each layer holds a request for a part of the time that the one above holds it, and the delay is below all of them.
        held = [self.reads(after[kind])["latency_sum_ns"] for kind in ("front", "disk", "image", "store")]
        self.assertEqual(held, sorted(held, reverse=True))
        self.assertGreaterEqual(held[-1], REQUESTS * DELAY_MS * 1e6)
