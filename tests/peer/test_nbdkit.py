"""nbdkit's nbd plugin as client, with filters in front that delay, fail and reopen."""

import pathlib
import subprocess
import tempfile
import time

from support import KIB, MIB, STANDIN, PeerTest, need, need_module, run, spile

nbd = need_module("nbd", "python3-libnbd")

SIZE_BYTES = 16 * MIB


class Nbdkit(PeerTest):
    def setUp(self):
        need("nbdkit")
        super().setUp()

    def disk(self):
        if STANDIN:
            return self.empty("disk.raw", SIZE_BYTES)
        spile("create", self.path("disk.vhd"), "--size", SIZE_BYTES)
        return self.path("disk.vhd")

    def proxy(self, server, *filters, options=()):
        """Starts nbdkit in front of `server`; returns the address on which it listens."""
        at = pathlib.Path(tempfile.mktemp(".sock", "spile-nbdkit-"))
        command = ["nbdkit", "--foreground", "--exit-with-parent", "--unix", str(at)]
        command += [f"--filter={name}" for name in filters]
        command += ["nbd", f"uri={server.uri()}", *options]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(at.unlink, missing_ok=True)
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)
        end = time.monotonic() + 30
        while not at.exists():
            self.assertIsNone(process.poll(), "nbdkit ended")
            self.assertLess(time.monotonic(), end, "nbdkit is not ready")
            time.sleep(0.01)
        return f"nbd+unix:///?socket={at}"

    def copy_both_ways(self, uri):
        need("nbdcopy", "libnbd-bin")
        source, back = self.raw("source.raw", SIZE_BYTES), self.path("back.raw")
        run("nbdcopy", "--flush", source, uri)
        run("nbdcopy", uri, back)
        self.assertSame(source, back)

    def test_a_connection_for_each_client(self):
        self.copy_both_ways(self.proxy(self.serve(self.disk())))

    def test_one_connection_for_all_clients(self):
        self.copy_both_ways(self.proxy(self.serve(self.disk()), options=["shared=true"]))

    def test_delays(self):
        delays = ["rdelay=3ms", "wdelay=5ms", "delay-zero=4ms", "delay-trim=4ms"]
        self.copy_both_ways(self.proxy(self.serve(self.disk()), "delay", options=delays))

    def test_errors_that_the_client_retries(self):
        """A tenth of all requests fail before they reach Spile. The client repeats them until all arrive."""
        rates = ["error=EIO", "error-pread-rate=10%", "error-pwrite-rate=10%", "error-zero-rate=10%"]
        disk = self.disk()
        server = self.serve(disk)
        handle = nbd.NBD()
        handle.connect_uri(self.proxy(server, "error", options=rates))
        failures = 0
        for turn in range(200):
            data, at = bytes([turn + 1]) * (20 * KIB), turn * 32 * KIB
            failures += self.until_done(handle.pwrite, data, at)
            if turn % 10 == 9:
                failures += self.until_done(handle.zero, 8 * KIB, at)
        self.assertGreater(failures, 0, "the filter made no error: this test tests nothing")
        direct = nbd.NBD()
        direct.connect_uri(server.uri())
        for turn in range(200):
            zeros = 8 * KIB if turn % 10 == 9 else 0
            want = bytes(zeros) + bytes([turn + 1]) * (20 * KIB - zeros)
            self.assertEqual(direct.pread(20 * KIB, turn * 32 * KIB), want, f"turn {turn}")
        for each in (handle, direct):
            each.shutdown()

    def until_done(self, call, *arguments):
        """Repeats a call until it succeeds; returns how often it failed."""
        for failures in range(100):
            try:
                call(*arguments)
                return failures
            except nbd.Error:
                pass
        self.fail("a hundred failures of one request")

    def test_a_killed_server_that_comes_back(self):
        disk = self.disk()
        server = self.serve(disk)
        options = ["retries=20", "retry-delay=1", "retry-exponential=no"]
        handle = nbd.NBD()
        handle.connect_uri(self.proxy(server, "retry", options=options))
        handle.pwrite(b"before" * 1000, 0)
        server.kill()
        self.serve(disk, at=server.socket)
        self.assertEqual(handle.pread(6000, 0), b"before" * 1000)
        handle.pwrite(b"after" * 1000, 0)
        self.assertEqual(handle.pread(5000, 0), b"after" * 1000)
        handle.shutdown()
