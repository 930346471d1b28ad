"""tapdisk's known fault, a mirror that fails silently: the new place fails, hangs up, or acknowledges what it loses. Guests go on, the disk is never handed over
to it, and nobody calls the copy whole until it is."""

import json
import pathlib
import subprocess
import tempfile
import threading
import time

from support import LIMIT_S, MIB, STANDIN, PeerTest, need, need_module, spile, spile_json
from test_coalesce import Writer

SIZE_BYTES = 48 * MIB


class MirrorFaults(PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("needs spile move")
        super().setUp()
        need("nbdkit")
        need_module("nbd", "python3-libnbd")
        raw = self.raw("content.raw", size_bytes=SIZE_BYTES)
        spile("convert", raw, self.path("disk.vhd"))
        self.server = self.serve(self.path("disk.vhd"))
        self.writer = Writer(raw.read_bytes(), seed=7)
        self.client = threading.Thread(target=self.writer.work, args=[self.server.uri()])
        self.addCleanup(setattr, self.writer, "stops", True)
        self.at = pathlib.Path(tempfile.mktemp(".sock", "spile-nbdkit-"))
        self.addCleanup(self.at.unlink, missing_ok=True)
        self.empty("far.raw", SIZE_BYTES)
        self.fails = self.path("fails")

    def far(self, *filters, options=()):
        """The other place: nbdkit over `far.raw`."""
        self.at.unlink(missing_ok=True)
        command = ["nbdkit", "--foreground", "--exit-with-parent", "--unix", str(self.at)]
        command += [f"--filter={name}" for name in filters]
        command += ["file", str(self.path("far.raw")), *options]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        end = time.monotonic() + LIMIT_S
        while not self.at.exists():
            self.assertIsNone(process.poll(), "nbdkit ended")
            self.assertLess(time.monotonic(), end, "nbdkit is not ready")
            time.sleep(0.01)
        return process

    def failing_far(self):
        return self.far("error", options=["error=EIO", "error-rate=100%", f"error-file={self.fails}"])

    def begin(self, *options):
        self.client.start()
        return spile_json("move", self.path("disk.vhd"), "--to", f"nbd+unix:///?socket={self.at}", "--background", *options)["id"]

    def job(self, name):
        return next(job for job in json.loads(spile("jobs", "--json").stdout)["jobs"] if job["id"] == name)

    def wait(self, name, what):
        end = time.monotonic() + 2 * LIMIT_S
        while not what(job := self.job(name)):
            self.assertLess(time.monotonic(), end, job)
            time.sleep(0.02)
        return job

    def goes_on(self):
        writes, end = self.writer.writes, time.monotonic() + LIMIT_S
        while self.writer.writes < writes + 50:
            self.assertLess(time.monotonic(), end, "the client does not go on")
            time.sleep(0.01)

    def assertStays(self, name):
        """The copy is not whole, that is said, and the disk is where it was."""
        job = self.wait(name, lambda job: job["motion"]["phase"] == "failing")
        self.goes_on()
        time.sleep(0.5)
        job = self.job(name)
        self.assertEqual((job["state"], job["motion"]["phase"]), ("running", "failing"), job)
        self.assertTrue(job["motion"]["trouble"], job)
        self.assertGreater(job["motion"]["lag_bytes"], 0, job)
        self.assertTrue(self.path("disk.vhd").exists(), "the disk was handed over")

    def assertCopied(self):
        self.writer.stops = True
        self.client.join(LIMIT_S)
        self.assertEqual(self.server.stop(), 0)
        self.assertEqual(self.path("far.raw").read_bytes(), bytes(self.writer.content))

    def stop_writing(self):
        self.writer.stops = True
        self.client.join(LIMIT_S)

    def test_a_place_whose_writes_fail_is_never_in_step(self):
        self.failing_far()
        name = self.begin("--rate", "8M")
        self.goes_on()
        self.fails.touch()
        spile("job", name, "rate", "none")
        self.assertStays(name)
        self.fails.unlink()
        self.assertEqual(self.wait(name, lambda job: job["state"] != "running")["state"], "done")
        self.assertFalse(self.path("disk.vhd").exists())
        self.goes_on()
        self.assertCopied()

    def test_a_copy_whose_place_fails_once_it_was_in_step_is_not_finished(self):
        self.failing_far()
        name = self.begin("--mirror-only")
        self.wait(name, lambda job: job["motion"]["phase"] in ("in step", "catching up"))
        self.fails.touch()
        spile("job", name, "finish")
        self.assertStays(name)
        self.fails.unlink()
        self.stop_writing()
        self.assertEqual(self.wait(name, lambda job: job["state"] != "running")["state"], "done")
        self.assertCopied()

    def test_a_place_that_hangs_up_is_not_in_step(self):
        far = self.far()
        name = self.begin("--rate", "8M")
        self.goes_on()
        far.kill()
        far.wait()
        spile("job", name, "rate", "none")
        self.assertStays(name)
        self.far()
        self.assertEqual(self.wait(name, lambda job: job["state"] != "running")["state"], "done")
        self.goes_on()
        self.assertCopied()

    def test_a_place_that_loses_what_it_has_acknowledged_gets_it_again(self):
        """nbdkit's cache keeps what was not flushed in a file without a name: a kill loses it."""
        far = self.far("cache", options=["cache=writeback"])
        name = self.begin("--mirror-only", "--rate", "16M")
        for _ in range(2):
            time.sleep(0.7)
            self.goes_on()
            far.kill()
            far.wait()
            self.assertStays(name)
            far = self.far("cache", options=["cache=writeback"])
            self.wait(name, lambda job: job["motion"]["phase"] != "failing")
        spile("job", name, "rate", "none")
        self.stop_writing()
        spile("job", name, "finish")
        self.assertEqual(self.wait(name, lambda job: job["state"] != "running")["state"], "done")
        self.assertCopied()
