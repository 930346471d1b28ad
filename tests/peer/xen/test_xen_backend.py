"""`spile xen-backend` under Linux's blkfront on a real Xen: in dom0 itself, and in a domain that boots from a chain.

One boot serves all tests that leave the host well. What the front saw of each image is compared, at the end, with
what is in the image on the machine that runs the tests.
"""

import shutil

from backends import backend, need_backend
from base import XenTest
from disks import Vbd
from guests import Guest, domu_root
from lab import chain
from support import MIB, STANDIN, check, run, sha256, spile, write_scattered

SIZE_MIB = 64
KILLS = 10
# Requests from one kill to the next.
STEP = 100
# How the backend reaches the front's memory, and what the front is told to use: indirect segments, queues, and
# pages of its ring; what is not named has the kernel's default.
MODES = (
    ("copy", ""),
    ("copy", "max_indirect_segments=0 max_queues=1"),
    ("map", "max_indirect_segments=256 max_ring_page_order=4"),
    ("map-copy", "max_queues=2 max_ring_page_order=1"),
    ("persistent", ""),
)


class XenBackend(XenTest):
    @classmethod
    def setUpClass(cls):
        need_backend()
        super().setUpClass()

    @classmethod
    def images(cls, folder):
        raws = [domu_root(folder, folder / f"{name}.raw", seed) for seed, name in enumerate(("xl", "hand"))]
        raws += [write_scattered(folder / f"{name}.raw", SIZE_MIB * MIB, 9) for name in ("files", "work")]
        cls.disks = {raw.stem: f"/data/{chain(raw).name}" for raw in raws}
        plain = folder / "plain.raw"
        plain.write_bytes(b"")
        cls.disks["plain"] = "/data/plain.raw"
        cls.parents = {path.name: sha256(path) for path in folder.glob("*-parent.vhd")}
        # The sums that fronts saw, by image.
        cls.seen = {"files": sha256(folder / "files.raw")}
        children = [] if STANDIN else [folder / f"{raw.stem}.vhd" for raw in raws]
        return [*(children or raws), plain, *folder.glob("*-parent.vhd")]

    @classmethod
    def prepare(cls, host):
        host.ask(f"truncate -s {SIZE_MIB}M /data/plain.raw && mkdir -p /mnt")
        cls.backend = backend(host)

    @classmethod
    def tearDownClass(cls):
        if cls.running:
            cls.backend.stop()
        super().tearDownClass()
        if cls.running:
            cls.compare_images()

    @classmethod
    def compare_images(cls):
        """Looks at the images as the host left them."""
        for name, before in cls.parents.items():
            if sha256(cls.fetch(f"{name}")) != before:
                raise AssertionError(f"{name} changed under its child")
        for name, path in cls.disks.items():
            image = cls.fetch(path.removeprefix("/data/"))
            if image.suffix == ".vhd":
                check(image)
                spile("convert", image, image.with_suffix(".flat"))
                image = image.with_suffix(".flat")
            if name in cls.seen and sha256(image) != cls.seen[name]:
                raise AssertionError(f"{name} holds something else than the front saw")
            if name in ("xl", "hand"):
                run("e2fsck", "-fn", image)

    def attach(self, name, device="xvda", access="copy"):
        host = self.running
        host.ask("load xen_blkfront")
        return Vbd(host, device, self.backend.nodes(self.disks[name], access)).attach().wait_connected()

    def detach(self, vbd, name):
        """Takes the disk away; what the front saw last is what shall be in the image."""
        self.seen[name] = self.running.ask(f"sum_of /dev/{vbd.device}")
        vbd.detach()
        self.backend.release(self.disks[name])

    def story(self):
        words = super().story()
        if self.running is None or self.running.process.poll() is not None:
            return words
        return f"the backend:\n{self.backend.said()}\n{words}"

    def test_files_in_every_mode_of_the_front(self):
        with self.host() as host:
            for access, options in MODES[:1] if STANDIN else MODES:
                with self.subTest(access=access, options=options):
                    host.ask(f"[ ! -e /sys/module/xen_blkfront ] || rmmod xen_blkfront; load xen_blkfront {options}")
                    self.write_and_check_files(host, access)
            host.ask("rmmod xen_blkfront")

    def write_and_check_files(self, host, access):
        vbd = self.attach("files", access=access)
        self.assertEqual(vbd.sectors(), SIZE_MIB << 11)
        self.assertEqual(host.ask("sum_of /dev/xvda"), self.seen["files"])
        self.assertEqual(vbd.queue("write_cache"), "write back")
        _, before = vbd.done()
        host.ask("mke2fs -q -F -t ext4 /dev/xvda && mount -t ext4 /dev/xvda /mnt")
        host.ask("dd if=/dev/urandom of=/mnt/file bs=100k count=100 && sync && umount /mnt")
        host.ask("e2fsck -fn /dev/xvda && verified /dev/xvda 16 1 --size=8m")
        _, after = vbd.done()
        self.assertGreater(after, before, "no flush")
        # A flush that was refused would have switched it off.
        self.assertEqual(vbd.queue("write_cache"), "write back")
        self.detach(vbd, "files")

    def test_discard_gives_the_space_back(self):
        with self.host() as host:
            vbd = self.attach("plain")
            host.ask("dd if=/dev/urandom of=/dev/xvda bs=1M count=48 oflag=direct")
            filled = self.allocated("plain")
            self.assertGreaterEqual(filled, 48 * MIB)
            kept = host.ask("dd if=/dev/xvda bs=1M count=16 iflag=direct 2>/dev/null | sha256sum")
            host.ask(f"blkdiscard -o {16 * MIB} -l {32 * MIB} /dev/xvda")
            self.assertLessEqual(self.allocated("plain"), filled - 32 * MIB)
            self.assertEqual(host.ask("dd if=/dev/xvda bs=1M count=16 iflag=direct 2>/dev/null | sha256sum"), kept)
            self.detach(vbd, "plain")

    def allocated(self, name):
        """Bytes that an image takes on dom0's disk."""
        return int(self.running.ask(f"sync; stat -c %b {self.disks[name]}")) * 512

    def test_disk_grows_while_it_is_used(self):
        with self.host() as host:
            vbd = self.attach("plain")
            old, more = vbd.sectors(), 16 << 11
            host.ask("start hammer hammer /dev/xvda 4")
            self.backend.resize(vbd, self.disks["plain"], (old + more) * 512)
            host.ask(f"until_true '[ $(cat /sys/block/xvda/size) = {old + more} ]'")
            self.end_hammer(host)
            host.ask("dd if=/dev/urandom of=/tmp/last bs=4k count=1")
            seek = (old + more) // 8 - 1
            host.ask(f"dd if=/tmp/last of=/dev/xvda bs=4k seek={seek} oflag=direct conv=notrunc,fsync")
            host.ask(f"dd if=/dev/xvda bs=4k skip={seek} iflag=direct | cmp - /tmp/last")
            self.detach(vbd, "plain")

    def end_hammer(self, host):
        """Lets the pass be finished that the verified work is in; it must not have found anything."""
        host.ask("touch /tmp/stop && until_true '[ -e /tmp/hammer.status ]'")
        log = host.ask("cat /tmp/hammer.log")
        if host.ask("cat /tmp/hammer.status") != "0" or "pass 1" not in log:
            raise AssertionError(f"the work failed: {log[-3000:]}")

    def test_disk_goes_and_comes_again(self):
        with self.host() as host:
            for turn in range(3):
                vbd = self.attach("work")
                if turn:
                    self.assertEqual(host.ask("sum_of /dev/xvda"), self.seen["work"])
                host.ask(f"dd if=/dev/urandom of=/dev/xvda bs=64k count=20 seek={turn * 30} oflag=direct")
                self.detach(vbd, "work")

    def test_process_of_the_disk_is_killed_under_verified_work(self):
        if STANDIN:
            self.skipTest("the kernel cannot be killed")
        with self.host() as host:
            vbd = self.attach("work")
            host.ask("start hammer hammer /dev/xvda 16")
            for _ in range(KILLS):
                self.wait_progress(host, vbd)
                self.backend.kill(vbd)
            self.wait_progress(host, vbd)
            self.end_hammer(host)
            self.detach(vbd, "work")

    def wait_progress(self, host, vbd):
        goal = vbd.done()[0] + STEP
        done = "set -- $(cat /sys/block/xvda/stat); [ $(($1 + $5)) -ge %d ] || [ -e /tmp/hammer.status ]" % goal
        host.ask(f"until_true '{done}'")
        if host.ask_status("[ -e /tmp/hammer.status ]")[0] == 0:
            raise AssertionError(f"the work ended by itself: {host.ask('tail -c 3000 /tmp/hammer.log')}")

    def test_domain_boots_from_a_chain_by_the_toolstack(self):
        with self.host() as host:
            Guest(host, "xl", self.backend.words(self.disks["xl"])).run()
            self.backend.release(self.disks["xl"])

    def test_domain_boots_from_a_chain_beside_the_kernels_backend(self):
        if STANDIN:
            self.skipTest("the kernel's backend is the stand-in")
        with self.host() as host:
            host.ask("load xen_blkback")
            beside = backend(host, "uvbd")
            guest = Guest(host, "hand")
            domain = guest.create()
            vbd = Vbd(host, "xvda", beside.nodes(self.disks["hand"]), domain, "uvbd").attach()
            guest.finish()
            vbd.remove()
            beside.release(self.disks["hand"])
            beside.stop()
            host.ask("rmmod xen_blkback")
