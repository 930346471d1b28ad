"""`spile xen-backend` on a real Xen: domains that boot from a chain, disks that come and go, processes killed."""

from backends import backend
from disks import Vbd
from guests import Guest
from served import ServedTest
from support import STANDIN

# For each way to the front's memory.
KILLS = 4
# Requests from one kill to the next.
STEP = 100


class XenDomain(ServedTest):
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
            for access in ("copy", "map", "persistent"):
                vbd = self.attach("work", access=access)
                host.ask("start hammer hammer /dev/xvda 16")
                for _ in range(KILLS):
                    self.wait_progress(host, vbd)
                    self.backend.kill(vbd)
                self.wait_progress(host, vbd)
                host.commands.end_hammer()
                self.detach(vbd, "work")

    def wait_progress(self, host, vbd):
        goal = vbd.done()[0] + STEP
        host.ask(f"until_true '[ $(done_on xvda) -ge {goal} ] || [ -e /tmp/hammer.status ]'")
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
