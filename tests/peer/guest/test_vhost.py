"""A real guest with its disks on vhost-user-blk: a distribution's kernel, root on a chain of VHDs, and of qcow2 images.

One boot of each serves all tests that leave the guest well. A test that fails ends it, and the next boots
again; the last ends it on purpose.
"""

import hashlib
import os
import pathlib
import random
import tempfile
import time
import unittest
from contextlib import contextmanager

from kernel import kernel
from lab import DEVICES, Lab, Qcow2Lab
from support import GIB, LIMIT_S, MIB, STANDIN, TARGET, need, run, text
from vhost import PLACES, QUEUES, need_server, serial, wait_until

KILLS = 6
# Rounds of writes before the end of both: enough to reach many blocks of the disk.
ROUNDS = 6


class GuestTests:
    """Tests that share a guest, for each kind of disks."""

    LAB = Lab
    lab = None

    @classmethod
    def setUpClass(cls):
        need_server()
        for program, package in (
            ("qemu-system-x86_64", "qemu-system-x86"), ("mke2fs", "e2fsprogs"), ("e2fsck", "e2fsprogs"),
            ("busybox", "busybox-static"), ("fio", "fio"), ("ldd", "libc-bin"),
        ):
            need(program, package)
        cls.kernel = kernel()
        cls.addClassCleanup(cls.drop)

    @classmethod
    def tearDownClass(cls):
        if cls.lab:
            cls.lab.finish()

    @classmethod
    def drop(cls):
        lab, cls.lab = cls.lab, None
        if lab:
            lab.destroy()

    @contextmanager
    def guest(self):
        """Returns the running guest, or a new one. A test that fails ends the guest."""
        cls, well = type(self), False
        try:
            if cls.lab is None:
                TARGET.mkdir(parents=True, exist_ok=True)
                cls.lab = cls.LAB(cls.kernel, pathlib.Path(tempfile.mkdtemp(prefix="vhost-", dir=TARGET)))
                cls.lab.start()
            yield cls.lab
            self.assertEqual(cls.lab.complaints(), "")
            well = True
        except Exception as problem:
            raise AssertionError(f"{problem}\n{cls.lab.story() if cls.lab else ''}") from problem
        finally:
            if not well:
                cls.drop()

    def test_server_is_killed_under_verified_work(self):
        with self.guest() as lab:
            dice = random.Random(5)
            lab.begin_work()
            for turn in range(KILLS):
                lab.server.kill()
                lab.start_server()
                # Sometimes the next kill comes while QEMU connects and the server recovers.
                if turn % 3 == 1:
                    time.sleep(dice.uniform(0, 0.3))
                else:
                    lab.wait_progress()
            lab.end_work()

    # Its name makes it the last test: it ends the guest that the others share.
    def test_what_was_synced_survives_the_end_of_all(self):
        with self.guest() as lab:
            lab.machine.ask("start rounds write")
            wait_until(lambda: self.told(lab) >= ROUNDS, LIMIT_S, f"{ROUNDS} rounds")
            last = self.told(lab)
            lab.die()
            copy = lab.flat("root")
            # Exit code 1 means that something was repaired. The replay of the journal counts as a repair.
            replay = run("e2fsck", "-E", "journal_only", "-p", copy, ok=None)
            self.assertIn(replay.returncode, (0, 1), text(replay.stdout + replay.stderr))
            run("e2fsck", "-fn", copy)
            lab.start_server()
            lab.boot()
            self.assertEqual(lab.machine.ask(f"last={last}; verify"), f"SPILE VERIFIED {last}")

    def told(self, lab):
        """The last round that the guest has synced, 0 before the first."""
        words = lab.machine.ask("grep SYNCED /tmp/rounds.log | tail -n 1").split()
        return int(words[-1]) if words else 0


class Qcow2Guest(GuestTests, unittest.TestCase):
    """Its disks are qcow2 chains."""

    LAB = Qcow2Lab

    @classmethod
    def setUpClass(cls):
        if STANDIN:
            raise unittest.SkipTest("the stand-in is given no chains")
        need("qemu-img", "qemu-utils")
        super().setUpClass()


class VhostGuest(GuestTests, unittest.TestCase):
    def test_every_queue_and_the_serial_are_there(self):
        with self.guest() as lab:
            for name, device in DEVICES.items():
                self.assertEqual(lab.machine.ask(f"cat /sys/block/{device}/serial"), serial(name))
                queues = lab.machine.ask(f"ls /sys/block/{device}/mq").split()
                self.assertEqual(len(queues), QUEUES, device)
            # Each processor has a queue of its own, and each of them answers.
            for processor in range(QUEUES):
                before = self.interrupts(lab, processor)
                lab.machine.ask(f"taskset {1 << processor:x} dd if=/dev/vdb of=/dev/null bs=4k count=64 iflag=direct")
                self.assertGreater(self.interrupts(lab, processor), before)

    def interrupts(self, lab, queue):
        """Returns how many interrupts a queue of vdb, the guest's second virtio device, has caused."""
        words = lab.machine.ask(f"grep 'virtio1-req.{queue}$' /proc/interrupts").split()
        return sum(int(word) for word in words[1:1 + QUEUES])

    def test_trim_gives_the_space_back(self):
        with self.guest() as lab:
            lab.machine.ask("mkdir -p /tmp/plain && mount -t ext4 /dev/vdc /tmp/plain")
            for name, mount in (("root", "/"), ("plain", "/tmp/plain")):
                self.fill_and_trim(lab, name, mount)
            lab.machine.ask("umount /tmp/plain")

    def fill_and_trim(self, lab, name, mount):
        size_mib = 48
        before = lab.allocated(name)
        lab.machine.ask(f"dd if=/dev/urandom of={mount}/filler bs=1M count={size_mib} && sync")
        filled = lab.allocated(name)
        self.assertGreaterEqual(filled, before + size_mib * MIB // 2, f"{name} did not grow")
        lab.machine.ask(f"rm {mount}/filler && sync && fstrim -v {mount} && sync")
        # The file system may keep some space for itself, and an image less than one block.
        self.assertLess(lab.allocated(name), filled - size_mib * MIB // 2, f"{name} did not shrink")

    def test_second_server_takes_over_under_verified_work(self):
        if STANDIN:
            self.skipTest("nobody can take over from the stand-in")
        with self.guest() as lab:
            before = lab.machine.connections()
            lab.begin_work()
            for _ in range(2):
                old = lab.take_over()
                self.assertEqual(old.ended, 0, "the first server did not end in order")
                lab.wait_progress()
                self.assertEqual(lab.machine.connections(), before, "QEMU connected again")
            lab.end_work()

    def test_resize_is_seen_at_once(self):
        with self.guest() as lab:
            old_bytes = os.path.getsize(lab.disks["plain"])
            new_bytes = old_bytes + 32 * MIB
            self.assertEqual(self.size_bytes(lab), old_bytes)
            lab.server.resize("plain", new_bytes, lab.machine.place)
            wait_until(lambda: self.size_bytes(lab) == new_bytes, LIMIT_S, "the new size in the guest")
            # The last of the new sectors can be written.
            last = new_bytes // 512 - 1
            lab.machine.ask("yes spile | head -c 512 >/tmp/sector")
            lab.machine.ask(f"dd if=/tmp/sector of=/dev/vdc bs=512 seek={last} oflag=direct conv=notrunc,fsync")
            with open(lab.disks["plain"], "rb") as file:
                file.seek(last * 512)
                self.assertEqual(file.read(), (b"spile\n" * 86)[:512])

    def size_bytes(self, lab):
        return int(lab.machine.ask("cat /sys/block/vdc/size")) * 512

    def test_migration_there_and_back_under_verified_work(self):
        with self.guest() as lab:
            lab.machine.ask("dd if=/dev/urandom of=/data/parts bs=4M count=2 && sync")
            second = lab.machine.ask("dd if=/data/parts bs=4M skip=1 2>/dev/null | sha256sum")
            lab.begin_work()
            # The guest changes memory faster than it is copied, so the migration lasts until it may stop the guest.
            lab.machine.ask("start churn churn")
            for _ in PLACES:
                lab.machine.ask("start parts read_twice /data/parts")
                self.wait_in_guest(lab, "grep first /tmp/parts.log")
                self.migrate(lab)
                lab.machine.ask("touch /tmp/tell")
                self.wait_in_guest(lab, "[ -e /tmp/parts.status ]")
                # The server wrote these bytes to the memory of the first machine, and they have arrived in the second.
                self.assertEqual(lab.machine.ask("tail -n 1 /tmp/parts.log"), second)
                lab.wait_progress()
            lab.end_work()

    def migrate(self, lab):
        source = lab.machine
        target = lab.start_machine(next(place for place in PLACES if place != source.place), incoming=True)
        address = f"unix:{lab.sockets.folder}/migration"
        target.qmp.execute("migrate-incoming", uri=address)
        self.set_migration(source, max_bandwidth=64 * MIB, downtime_limit=1, avail_switchover_bandwidth=1000)
        source.qmp.execute("migrate", uri=address)
        self.wait_migration(source, lambda state: state.get("ram", {}).get("dirty-sync-count", 0) > 1)
        # All memory has been copied once. Only the server's log of dirty pages tells what changes from now on.
        source.ask("touch /tmp/go")
        self.wait_in_guest(lab, "grep second /tmp/parts.log")
        self.assertEqual(source.qmp.execute("query-migrate")["status"], "active")
        self.set_migration(source, max_bandwidth=4 * GIB, downtime_limit=2000, avail_switchover_bandwidth=0)
        self.wait_migration(source, lambda state: state["status"] == "completed")
        wait_until(lambda: target.qmp.execute("query-status")["running"], LIMIT_S, "the guest to run on")
        source.close()
        lab.machine = target

    def set_migration(self, source, **parameters):
        """Sets those of the parameters that this QEMU knows: bytes a second, ms, bytes a second."""
        known = source.qmp.execute("query-migrate-parameters")
        parameters = {name: value for name, value in parameters.items() if name.replace("_", "-") in known}
        source.qmp.execute("migrate-set-parameters", **parameters)

    def wait_migration(self, source, reached):
        def there():
            state = source.qmp.execute("query-migrate")
            self.assertNotIn(state["status"], ("failed", "cancelled"), state)
            return reached(state)

        wait_until(there, LIMIT_S, "the migration")

    def test_unplugged_disk_leaves_nothing_behind(self):
        with self.guest() as lab:
            before = lab.server.holdings()
            for _ in range(2):
                self.plug_use_unplug(lab)
                wait_until(
                    lambda: lab.server.holdings() == before, LIMIT_S,
                    f"the server holds (descriptors, mappings) {lab.server.holdings()}, before {before}",
                )

    def plug_use_unplug(self, lab):
        machine = lab.machine
        address = {"type": "unix", "data": {"path": str(lab.sockets.of("spare", machine.place))}}
        backend = {"type": "socket", "data": {"addr": address, "server": False}}
        machine.qmp.execute("chardev-add", id="spare", backend=backend)
        machine.qmp.execute("device_add", driver="vhost-user-blk-pci", id="disk-spare", chardev="spare", addr="0xa")
        self.wait_in_guest(lab, "[ -b /dev/vdd ]")
        told = machine.ask("copy_and_compare /dev/vdd 8").split()[0]
        machine.qmp.execute("device_del", id="disk-spare")
        machine.qmp.wait_event("DEVICE_DELETED", LIMIT_S, device="disk-spare")
        self.wait_in_guest(lab, "[ ! -e /dev/vdd ]")
        machine.qmp.execute("chardev-remove", id="spare")
        with open(lab.disks["spare"], "rb") as file:
            self.assertEqual(hashlib.sha256(file.read(8 * MIB)).hexdigest(), told)

    def wait_in_guest(self, lab, condition):
        wait_until(lambda: lab.machine.ask_status(condition)[0] == 0, LIMIT_S, condition)
