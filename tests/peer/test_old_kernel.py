"""Spile as on Linux 4.19, without any system call that is newer: the filter is in old_kernel.py."""

import pathlib
import platform
import re
import signal
import subprocess
import sys
import time

import old_kernel
from support import LIMIT_S, MIB, STANDIN, PeerTest, Server, check, run, spile, spile_binary, text

FILTER = [sys.executable, str(pathlib.Path(old_kernel.__file__))]
LOAD = ["--rw", "randrw", "--verify", "--span", 32 * MIB]


def old(*words, without=()):
    """The words of a command that runs `spile` under the filter."""
    without = [word for call in without for word in ("--without", call)]
    return [*FILTER, *without, spile_binary(), *map(str, words)]


class OldServer(Server):
    def command(self, disks, address, extra):
        return old("serve", *disks, "--nbd", address, *extra)


class OldKernel(PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("is about Spile")
        if platform.machine() not in old_kernel.MACHINES:
            self.skipTest(f"the numbers of the system calls of {platform.machine()} are not known")
        if run(*FILTER, "true", ok=None).returncode != 0:
            self.skipTest("no seccomp here")
        super().setUp()

    def start(self, *words):
        """Starts `spile` under the filter; it is killed at the end of the test."""
        process = subprocess.Popen(
            old(*words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder,
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def serving(self, *words):
        """A server for guests under the filter, once it says that it serves."""
        server = self.start("serve", *words)
        line = server.stdout.readline()
        self.assertTrue(line.startswith(b"serving "), text(line + (b"" if line else server.stdout.read())))
        return server

    def end(self, process, how=signal.SIGTERM):
        process.send_signal(how)
        self.assertEqual(process.wait(LIMIT_S), 0, text(process.stdout.read()))

    def disk(self, kind):
        if kind == "raw":
            return self.empty("disk.raw", 64 * MIB)
        spile("create", self.path("parent.vhd"), "--size", 64 * MIB)
        spile("create", self.path("disk.vhd"), "--parent", self.path("parent.vhd"))
        return self.path("disk.vhd")

    def test_the_filter_refuses_what_is_newer(self):
        call = "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.syscall(%d, 0, 0, 0), ctypes.get_errno())"
        last = old_kernel.MACHINES[platform.machine()][1]
        # io_uring_setup has the same number everywhere; the last known call, rseq, is there.
        self.assertEqual(run(*FILTER, sys.executable, "-c", call % 425).stdout, b"-1 38\n")
        self.assertNotIn(b" 38", run(*FILTER, sys.executable, "-c", call % last).stdout)

    def test_demo(self):
        said = text(run(*old("demo", "--seconds", "2")).stdout)
        self.assertIn("(engine aio, ", said)
        self.assertIn("all right", said)

    def test_nbd(self):
        for kind in ("raw", "vhd"):
            disk = self.disk(kind)
            for cache in ("direct", "page"):
                with self.subTest(kind=kind, cache=cache), OldServer(self.folder, disk, extra=["--cache", cache]) as server:
                    run(*old("load", server.uri(), *LOAD, "--ios", 5000, "--flush-every", 100))
                    self.assertEqual(server.stop(), 0)
                    self.assertIn("engine aio (Linux AIO), ", server.output())
                    self.assertIn("io_uring cannot be used here: ", server.output())

    def test_without_aio(self):
        server = subprocess.run(
            old("demo", "--seconds", "1", without=["io_setup"]), stdout=subprocess.PIPE, timeout=LIMIT_S,
        )
        self.assertEqual(server.returncode, 0)
        self.assertIn("(engine threads, ", text(server.stdout))

    def guest(self, *words):
        return self.start("load", f"vhost-user:{self.path('v')}", *LOAD, "--reconnect", "60s", *words)

    def test_takeovers_and_kills_under_load(self):
        words = [self.disk("vhd"), "--vhost-user", self.path("v"), "--control", self.path("c")]
        server = self.serving(*words)
        guest = self.guest("--runtime", "6s", "--queues", 2)
        for turn in range(4):
            time.sleep(0.7)
            if turn % 2 == 0:
                successor = self.serving(*words, "--takeover")
                self.assertEqual(server.wait(LIMIT_S), 0)
            else:
                server.kill()
                server.wait()
                successor = self.serving(*words)
            server = successor
        said = text(guest.communicate(timeout=LIMIT_S)[0])
        self.assertEqual(guest.returncode, 0, said)
        self.assertIn("all right", said)
        self.end(server)
        check(self.path("disk.vhd"))

    def test_xen(self):
        lab, run_dir = self.path("lab"), self.path("run")
        xen = self.start("xen-lab", lab)
        self.assertIn(b"a Xen of", xen.stdout.readline())
        backend = self.start("xen-backend", "--lab", lab, "--run-dir", run_dir)
        self.assertIn(b"serving the disks", backend.stdout.readline())
        params = ["--params", f"vhd:{self.disk('vhd')}", "--domain", 3]
        guest = self.start("load", f"xen-lab:{lab}", *params, *LOAD, "--queues", 2, "--runtime", "4s")
        killed = set()
        while guest.poll() is None and len(killed) < 2:
            time.sleep(0.7)
            for file in run_dir.glob("*.pid"):
                pid = int(re.match(r"\d+", file.read_text() or "0")[0])
                if pid and pid not in killed:
                    killed.add(pid)
                    subprocess.run(["kill", "-KILL", str(pid)], check=False)
        said = text(guest.communicate(timeout=LIMIT_S)[0])
        self.assertEqual((guest.returncode, len(killed)), (0, 2), said)
        self.assertIn("all right", said)
        self.end(backend)
        self.end(xen)
