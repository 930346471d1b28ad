"""`spile xen-backend` under Linux's blkfront in dom0 itself, on a real Xen: every way to the front's memory."""

from served import SIZE_MIB, ServedTest
from support import MIB, STANDIN


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
