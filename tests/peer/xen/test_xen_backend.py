"""`spile xen-backend` under Linux's blkfront in dom0 itself, on a real Xen: every way to the front's memory, and disks that grow."""

import os
import shutil

from backends import Spile
from disks import Vbd
from served import SIZE_MIB, ServedTest
from support import MIB, STANDIN, check_by_qemu, need, run, sha256

VOLUME_MIB = 4
# Makes a loop device longer as a volume is: first the file below it. What it has gained is junk.
GROW = """#!/bin/busybox sh
set -e
have=$(stat -c %s /data/volume.raw)
[ $have -ge $3 ] || head -c $(($3 - have)) /dev/urandom >> /data/volume.raw
losetup -c $1
"""


class XenBackend(ServedTest):
    # The front is told what to use of indirect segments, queues and pages of its ring, or goes by its defaults.
    def test_files_by_grant_copy(self):
        self.files("copy", "", "max_indirect_segments=0 max_queues=1")

    def test_files_by_grant_map(self):
        self.files("map", "max_indirect_segments=256 max_ring_page_order=4")

    def test_files_by_grant_map_and_a_copy(self):
        self.files("map-copy", "max_queues=2 max_ring_page_order=1")

    def test_files_by_persistent_grants(self):
        self.files("persistent", "")

    def files(self, access, *fronts):
        """Uses a disk with this access to the front end's memory, with each of these options in turn."""
        if STANDIN and access != "copy":
            self.skipTest("the kernel has one way to reach the front's memory")
        with self.host() as host:
            for options in fronts:
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
        # If a flush had been refused, the front end would have switched flushes off.
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
            host.commands.end_hammer()
            host.ask("dd if=/dev/urandom of=/tmp/last bs=4k count=1")
            seek = (old + more) // 8 - 1
            host.ask(f"dd if=/tmp/last of=/dev/xvda bs=4k seek={seek} oflag=direct conv=notrunc,fsync")
            host.ask(f"dd if=/dev/xvda bs=4k skip={seek} iflag=direct | cmp - /tmp/last")
            self.detach(vbd, "plain")

    @classmethod
    def images(cls, folder):
        if STANDIN or not shutil.which("qemu-img"):
            return []
        volume, hook = folder / "volume.raw", folder / "grow"
        run("qemu-img", "create", "-q", "-f", "qcow2", volume, SIZE_MIB * MIB)
        used = volume.stat().st_size
        with volume.open("ab") as file:
            file.write(os.urandom(VOLUME_MIB * MIB - used))
        hook.write_text(GROW)
        hook.chmod(0o755)
        # What front ends have read of volumes, by name.
        cls.volumes = {}
        return [volume, hook]

    def test_thin_qcow2_on_a_device_that_grows(self):
        if STANDIN:
            self.skipTest("the kernel's back end knows no qcow2")
        need("qemu-img", "qemu-utils")
        with self.host() as host:
            host.ask("load loop && load xen_blkfront && losetup /dev/loop0 /data/volume.raw")
            thin = Spile(host, "thin", "--grow /data/grow --grow-ahead 2M")
            nodes = {"params": "qcow2:/dev/loop0", "spile-access": "copy"}
            vbd = Vbd(host, "xvdb", nodes, kind="thin").attach().wait_connected()
            # A disk that cannot need the command is served beside it.
            plain = Vbd(host, "xvdc", thin.nodes("/data/work.vhd"), kind="thin").attach().wait_connected()
            self.assertEqual((vbd.sectors(), plain.sectors()), (SIZE_MIB << 11, SIZE_MIB << 11))
            host.ask("dd if=/dev/urandom of=/tmp/data bs=1M count=24 && dd if=/tmp/data of=/dev/xvdb bs=1M seek=8 oflag=direct")
            thin.kill(vbd)
            host.ask("dd if=/dev/xvdb bs=1M skip=8 count=24 iflag=direct | cmp - /tmp/data")
            length = int(host.ask("stat -c %s /data/volume.raw"))
            self.assertTrue(32 * MIB > length > 24 * MIB, f"the device has {length} bytes")
            seen = host.ask("sum_of /dev/xvdb")
            for disk in (vbd, plain):
                disk.detach()
            host.ask("until_true 'losetup -d /dev/loop0' && rm /tmp/data")
            thin.stop()
        self.volumes["volume.raw"] = seen

    @classmethod
    def compare_images(cls):
        for name, seen in getattr(cls, "volumes", {}).items():
            image, flat = cls.fetch(name), cls.folder / "flat-volume.raw"
            check_by_qemu(image)
            run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", image, flat)
            if sha256(flat) != seen:
                raise AssertionError(f"{name} holds something else than the front saw")
