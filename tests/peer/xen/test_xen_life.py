"""The life of a guest: a disk that is read only, a reboot, save and restore, and an end in the middle of its work."""

from disks import Vbd
from guests import Guest
from served import ServedTest
from support import STANDIN


class XenLife(ServedTest):
    def test_disk_is_only_read(self):
        with self.host() as host:
            host.ask("load xen_blkfront")
            vbd = Vbd(host, "xvda", self.backend.nodes(self.disks["files"]), mode="r").attach().wait_connected()
            self.assertEqual(host.ask("cat /sys/block/xvda/ro"), "1")
            self.assertEqual(host.ask("sum_of /dev/xvda"), self.seen["files"])
            status, words = host.ask_status("dd if=/dev/urandom of=/dev/xvda bs=4k count=1 oflag=direct")
            self.assertNotEqual(status, 0, words)
            self.assertNotEqual(host.ask_status("blkdiscard -l 1048576 /dev/xvda")[0], 0)
            self.assertEqual(host.ask("sum_of /dev/xvda"), self.seen["files"])
            self.detach(vbd, "files")

    def test_domain_reboots(self):
        with self.host() as host:
            guest = Guest(host, "xl", self.backend.words(self.disks["xl"]), "reboot")
            first = guest.create(how="")
            guest.wait_end()
            self.assertEqual(guest.said().count("SPILE BOOTED domU"), 2)
            self.assertEqual(host.ask(f"xenstore-exists /local/domain/{first} || echo gone"), "gone")
            self.backend.release(self.disks["xl"])

    def test_domain_is_saved_and_restored_at_work(self):
        with self.host() as host:
            guest = Guest(host, "hand", self.backend.words(self.disks["hand"]), "work")
            guest.create()
            guest.start()
            guest.wait_passes(1)
            # A checkpoint: the domain goes on, with the same ring.
            host.ask("xl save -c hand /data/saved && rm /data/saved")
            guest.wait_passes(2)
            # Another domain goes on, with another ring, and sends again the requests that were not answered.
            host.ask("xl save hand /data/saved && xl restore /data/saved && rm /data/saved")
            guest.wait_passes(2)
            guest.stop_work()
            guest.wait_end()
            self.backend.release(self.disks["hand"])

    def test_domain_is_destroyed_at_work(self):
        if STANDIN:
            self.skipTest("a way to the guest's memory is chosen")
        with self.host() as host:
            for access in ("copy", "map"):
                guest = Guest(host, "hand", task="work")
                domain = guest.create()
                vbd = Vbd(host, "xvda", self.backend.nodes(self.disks["hand"], access), domain).attach()
                guest.start()
                guest.wait_passes(1)
                host.ask("xl destroy hand")
                # A page of a domain that is still mapped keeps the domain from ending.
                host.ask("until_true '[ $(xl list | wc -l) = 2 ]'")
                vbd.remove()
                self.backend.release(self.disks["hand"])
            self.check_root(host)

    def check_root(self, host):
        """A root file system that was left in the middle of its work recovers, and nothing is lost."""
        vbd = self.attach("hand")
        host.ask("e2fsck -fp /dev/xvda || [ $? = 1 ]")
        host.ask("mount -t ext4 /dev/xvda /mnt && (cd /mnt/checked && sha256sum -c sums >/dev/null) && umount /mnt")
        vbd.detach()
        self.backend.release(self.disks["hand"])
