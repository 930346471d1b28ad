"""A host with Xen: that it comes up, and that the kernel's own backend and front work on it.

Nothing here is served by Spile; it shows that what is asked of Spile elsewhere can be had.
"""

from backends import Kernel
from base import XenTest
from disks import Vbd
from guests import Guest, domu_root
from served import ServedTest

SIZE_MIB = 64


class XenHost(XenTest):
    @classmethod
    def images(cls, folder):
        return [domu_root(folder, folder / "root.raw", seed=11)]

    def setUp(self):
        # The kernel's backend serves the same kind of disks.
        ServedTest.stop_backend()

    def test_dom0_has_what_a_backend_needs(self):
        with self.host() as host:
            self.assertRegex(host.ask("xl list"), r"Domain-0 +0 ")
            self.assertEqual(host.ask("xenstore-read /local/domain/0/name"), "Domain-0")
            for name in ("gntdev", "gntalloc", "evtchn", "xenbus"):
                host.ask(f"[ -c /dev/xen/{name} ]")
            self.assertRegex(host.ask("spile --version"), r"^spile \d")

    def test_kernel_serves_dom0_itself(self):
        with self.host() as host:
            host.ask(f"load xen_blkfront && truncate -s {SIZE_MIB}M /data/kernel.raw")
            kernel = Kernel(host)
            vbd = Vbd(host, "xvda", kernel.nodes("/data/kernel.raw")).attach().wait_connected()
            self.assertEqual(vbd.sectors(), SIZE_MIB << 11)
            host.ask("mke2fs -q -t ext4 /dev/xvda && mkdir -p /mnt && mount -t ext4 /dev/xvda /mnt")
            host.ask("dd if=/dev/urandom of=/mnt/file bs=64k count=160 && sync && umount /mnt")
            host.ask("e2fsck -fn /dev/xvda && verified /dev/xvda 16 1 --size=8m")
            inside = host.ask("sum_of /dev/xvda")
            vbd.detach()
            kernel.release("/data/kernel.raw")
            kernel.stop()
            self.assertEqual(host.ask("sum_of /data/kernel.raw"), inside)

    def test_kernel_serves_a_domain(self):
        with self.host() as host:
            kernel = Kernel(host)
            guest = Guest(host, "kernel", kernel.words("/data/root.raw"))
            guest.run()
            kernel.release("/data/root.raw")
            kernel.stop()
            host.ask("e2fsck -fn /data/root.raw")
