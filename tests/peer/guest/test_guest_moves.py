"""A guest moves to another host together with its disk, by docs/move.md, while it works; and all that can come in between.

The hosts are network namespaces. Its root, which is moved, has the verified load as well.
"""

import pathlib
import shutil
import sys
import tempfile
import time
import unittest

from kernel import initramfs, kernel
from lab import COMPLAINTS
from machine import root_image
from moving import Hosts, need_namespaces, recipe
from support import LIMIT_S, MIB, STANDIN, TARGET, need, run, spile
from vhost import need_server, wait_until

DISK_BYTES = 256 * MIB
# Writes from one disturbance to the next.
STEP = 150


class GuestMoves(unittest.TestCase):
    def setUp(self):
        if STANDIN:
            self.skipTest("needs spile move")
        need_server()
        for program, package in (
            ("qemu-system-x86_64", "qemu-system-x86"), ("qemu-img", "qemu-utils"), ("mke2fs", "e2fsprogs"), ("e2fsck", "e2fsprogs"),
            ("busybox", "busybox-static"), ("fio", "fio"), ("ldd", "libc-bin"), ("ip", "iproute2"), ("jq", "jq"),
        ):
            need(program, package)
        need_namespaces()
        self.kernel = kernel()
        TARGET.mkdir(parents=True, exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="moves-", dir=TARGET))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.machines = []
        self.hosts = Hosts(self.folder, DISK_BYTES)
        self.addCleanup(self.hosts.destroy)
        self.here, self.there = self.hosts.here, self.hosts.there
        self.initramfs = initramfs(self.folder / "initramfs", self.kernel)
        raw = root_image(self.folder, self.folder / "root.raw", DISK_BYTES, ["fio"])
        spile("convert", raw, self.here.folder / "disk.vhd")
        raw.unlink()

    def boot(self):
        self.here.serve_words = ["disk.vhd,name=disk,serial=SPILE-disk", "--vhost-user", "disk.sock"]
        self.here.start_server()
        self.here.start_machine(self)
        self.guest = self.here.machine
        self.guest.wait_ready()
        self.guest.ask("start hammer hammer /data/work 1 8")
        self.wait_progress()

    def wait_progress(self):
        """Waits until the verified load has made progress. On a busy host that may take long; it must not stand still."""
        at = self.guest.done("vda")
        goal = at + STEP
        while at < goal:
            before = at
            at = wait_until(lambda: self.done_beyond(before), LIMIT_S, "progress of the work")
        self.assertNotEqual(self.guest.ask_status("[ -e /tmp/hammer.status ]")[0], 0, "the work has ended")

    def done_beyond(self, before):
        done = self.guest.done("vda")
        return done if done > before else None

    def refused(self, host, script, *words):
        said = host.shell(script, ok=False)
        for word in words:
            self.assertIn(word, said)

    def settle(self):
        """The guest goes on at the other host: all of it is well, and the disk is what it should be."""
        self.here.end_machine()
        self.assertEqual(self.here.server.stop(), 0)
        self.guest = self.there.machine
        self.wait_progress()
        self.guest.commands.end_hammer()
        self.assertEqual(self.guest.ask_status(f"dmesg -c | grep -E '{COMPLAINTS}'")[1], "")
        self.guest.leave()
        self.assertEqual(self.there.server.stop(), 0)
        run("e2fsck", "-fn", self.there.folder / "disk.raw")

    def hand_over_and_go_on(self, blocks, begin):
        """From `begin`, which ends with the hand-over, to the end of the page."""
        self.here.follow(self, begin)
        # The guest runs nowhere, and nothing changes any more.
        new, self.moment = self.there.folder / "disk.raw", self.folder / "moment.raw"
        self.assertOldIs(new)
        self.assertEqual(self.state(self.here), "handed_over")
        self.assertEqual(self.state(self.there), "incoming")
        run("cp", "--sparse=always", new, self.moment)
        begun = time.monotonic()
        for which, script in blocks[2:]:
            {"this": self.here, "the other": self.there}[which].follow(self, script)
        wait_until(lambda: self.there.machine.qmp.execute("query-status")["running"], LIMIT_S, "the guest to run on")
        print(f"from the hand-over to a guest that runs there: {time.monotonic() - begun:.1f} s", file=sys.stderr)
        self.guest = self.there.machine

    def assertOldIs(self, image):
        """The old image holds what the raw file `image` holds."""
        run("qemu-img", "compare", "-U", "-f", "vpc", "-F", "raw", self.here.folder / "disk.vhd", image)

    def state(self, host):
        return host.shell("spile ls --json | jq -r '.disks[0].state'").strip()

    def wait_told(self, host, words):
        wait_until(lambda: words in host.server.output(), LIMIT_S, f"{words!r} in the server's log")

    def test_by_the_page(self):
        blocks = recipe()
        self.boot()
        self.there.follow(self, blocks[0][1])
        self.hand_over_and_go_on(blocks, blocks[1][1])
        # The guest here is stopped. Whoever has it go on all the same does not get it to the disk.
        self.here.machine.qmp.execute("cont")
        self.wait_told(self.here, "was handed over")
        self.settle()
        self.assertOldIs(self.moment)

    def test_whatever_comes_in_between(self):
        blocks = recipe()
        receive = blocks[0][1][blocks[0][1].index("start_qemu"):]
        migrate = blocks[1][1][blocks[1][1].index("qmp"):blocks[1][1].index("spile job $JOB")]
        self.boot()
        self.there.follow(self, blocks[0][1])
        self.copy_under_troubles()
        job = self.here.wait_phase("in step")
        hand_over = f"spile job {job} hand-over"
        self.refused(self.here, hand_over, "a guest uses the disk")
        self.refused(self.there, "spile resume disk", "has not handed it over")
        self.wait_progress()
        # A migration that is cancelled before the hand-over: the copy goes on.
        self.here.follow(self, migrate)
        self.cancel()
        self.assertEqual(self.here.job(job)["state"], "running")
        # One that is cancelled after it, when this host's server was killed as well: the guest waits until it may go on.
        self.there.follow(self, receive)
        self.here.follow(self, migrate + hand_over)
        self.here.server.kill()
        self.here.start_server()
        self.here.machine.qmp.execute("migrate_cancel")
        self.wait_told(self.here, "was handed over")
        self.assertEqual(self.state(self.here), "handed_over")
        self.here.shell("spile resume disk")
        self.cancel()
        # A guest that is started on the other host before its time waits, too.
        self.there.start_machine(self)
        self.wait_told(self.there, "still on its way")
        self.there.end_machine()
        self.there.follow(self, receive)
        self.hand_over_and_go_on(blocks, blocks[1][1])
        # The other host's server is killed, and started with the same words: a guest that has used the disk there does not wait again. One that
        # has not, because the server was killed before it heard of the guest's queues, would wait for another `spile resume`.
        self.wait_progress()
        self.there.server.kill()
        self.there.start_server()
        self.settle()
        self.assertOldIs(self.moment)

    def copy_under_troubles(self):
        """The link is cut, and each server is killed, while the disk is copied."""
        job = self.here.begin_mirror("--rate", "3M")
        self.refused(self.here, f"spile job {job} hand-over", "not in step")
        self.hosts.cut(True)
        self.wait_progress()
        self.assertEqual(self.here.job()["state"], "running")
        self.hosts.cut(False)
        self.there.server.kill()
        self.wait_progress()
        self.here.wait_phase("failing")
        self.refused(self.here, f"spile job {job} hand-over", "failing")
        self.there.start_server()
        self.here.server.kill()
        self.here.start_server()
        self.wait_progress()
        # The next server has begun anew, as another job.
        job = wait_until(self.here.job, LIMIT_S, "the job")["id"]
        self.assertEqual(self.here.job(job)["motion"]["phase"], "copying")
        self.here.shell(f"spile job {job} rate none")

    def cancel(self):
        """Ends the guest's migration: it goes on here, and the QEMU on the other host ends."""
        if self.here.machine.qmp.execute("query-migrate")["status"] not in ("cancelled", "failed"):
            self.here.machine.qmp.execute("migrate_cancel")
        self.there.end_machine()
        wait_until(lambda: self.here.machine.qmp.execute("query-status")["running"], LIMIT_S, "the guest to go on")
        self.wait_progress()
