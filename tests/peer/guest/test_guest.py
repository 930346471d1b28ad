"""A real guest: a distribution's kernel with its ext4 root on a chain that Spile serves.

Each test boots, lets the guest write and sync, ends something with SIGKILL while the guest is in
the middle of more writes, and boots again. Three ends: QEMU only; Spile and then QEMU; Spile alone
under the running guest, which then has to go on as if nothing had been.
"""

from kernel import initramfs, kernel
from machine import NbdMachine, root_image
from support import MIB, STANDIN, PeerTest, Server, chain, check, need, run, same_content, sha256, spile, text

ROOT_BYTES = 512 * MIB
# Rounds of writes before the kill: enough to reach many blocks of the disk.
ROUNDS = 6


class Guest(PeerTest):
    def setUp(self):
        for program, package in (
            ("qemu-system-x86_64", "qemu-system-x86"), ("e2fsck", "e2fsprogs"), ("nbdcopy", "libnbd-bin"),
        ):
            need(program, package)
        self.kernel = kernel()
        super().setUp()
        self.initramfs = initramfs(self.path("initramfs"), self.kernel)
        raw = root_image(self.folder, self.path("root.raw"), ROOT_BYTES)
        self.disk = chain(raw)
        if not STANDIN:
            self.parent = self.path("root-parent.vhd")
            self.parent_sum = sha256(self.parent)

    def boot(self, server, phase, last=0):
        machine = NbdMachine(self.kernel, self.initramfs, server, phase, last)
        self.addCleanup(machine.close)
        return machine

    def server(self, at=None):
        server = Server(self.folder, self.disk, at=at)
        self.addCleanup(server.__exit__, None, None, None)
        return server

    def check_after_crash(self, last):
        """Replays the journal on a copy and checks it. Then boots again, and the guest checks all sums."""
        server = self.server()
        copy = self.path("copy.raw")
        run("nbdcopy", server.uri(), copy)
        # Exit code 1 means that something was repaired. A replay counts as a repair.
        replay = run("e2fsck", "-E", "journal_only", "-p", copy, ok=None)
        self.assertIn(replay.returncode, (0, 1), text(replay.stdout + replay.stderr))
        run("e2fsck", "-fn", copy)
        self.check_by_boot(server, last)

    def check_by_boot(self, server, last):
        machine = self.boot(server, "verify", last)
        told = machine.console.wait_for(rb"SPILE (VERIFIED \d+|BROKEN [^\r\n]*)\r?\n").group(1)
        self.assertEqual(told.decode(), f"VERIFIED {last}")
        machine.console.wait_for(rb"SPILE DONE")
        machine.process.wait(60)
        run("nbdcopy", server.uri(), self.path("copy.raw"))
        run("e2fsck", "-fn", self.path("copy.raw"))
        self.assertEqual(server.stop(), 0)
        self.check_images()

    def check_images(self):
        if STANDIN:
            return
        check(self.disk)
        self.assertEqual(sha256(self.parent), self.parent_sum, "the parent changed")
        spile("convert", self.disk, self.path("flat.raw"))
        self.assertTrue(same_content(self.path("flat.raw"), self.path("copy.raw")))

    def test_qemu_is_killed(self):
        server = self.server()
        machine = self.boot(server, "write")
        last = machine.wait_for_round(ROUNDS)
        last = max(last, machine.kill())
        self.assertEqual(server.stop(), 0)
        self.check_after_crash(last)

    def test_spile_and_qemu_are_killed(self):
        server = self.server()
        machine = self.boot(server, "write")
        last = machine.wait_for_round(ROUNDS)
        server.kill()
        last = max(last, machine.kill())
        self.check_after_crash(last)

    def test_spile_is_killed_and_the_guest_goes_on(self):
        server = self.server()
        machine = self.boot(server, "write")
        before = machine.wait_for_round(ROUNDS)
        server.kill()
        again = self.server(at=server.socket)
        last = machine.wait_for_round(before + ROUNDS)
        last = max(last, machine.kill())
        self.assertEqual(again.stop(), 0)
        self.check_after_crash(last)
