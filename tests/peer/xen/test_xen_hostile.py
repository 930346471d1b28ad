"""Hostile front ends on a real Xen: a program that breaks the rules of blkif, beside Linux's own front end.

The program is `hostile_front`, an example of the crate `spile-lab`: it grants pages of its own and does with them, with
the ring, its event channel and its states what no driver does. Here it is Xen that grants, copies and maps; cases in
which Xen has no part are those of `crates/front-blkif/tests/it/hostile_*.rs`.

After each case the other disk is at work without an error, the process of the rude one's disk is the same, with as many
descriptors and mapped pages as before, and a connection that keeps to the rules moves data. At the end Xen knows of no
page that is still mapped.
"""

import os
import pathlib
import re
import shutil
import time
import unittest
from contextlib import contextmanager

from disks import Vbd
from served import SIZE_MIB, ServedTest
from support import MIB, STANDIN, TARGET, chain, write_scattered

# Cases that do no harm to pages that another disk in dom0 could be granted next.
BESIDE_WORK = ("kicks", "grants", "readonly", "ring-grants", "ring-freed")
ALONE = ("freed", "revoked")
IN_THE_STORE = ("states",)
KILLS = 2
UNMAP_LIMIT_S = 1200
# Messages of dom0's kernel about pages that it can never take back.
LEAKS = "g.e. .*leaking|WARNING:"


def hostile_front():
    """Returns the program; skips when it was not built."""
    named = os.environ.get("SPILE_HOSTILE_FRONT") or TARGET / "release/examples/hostile_front"
    if not pathlib.Path(named).exists():
        raise unittest.SkipTest(f"no {named} (cargo build --release -p spile-lab --example hostile_front)")
    return named


class Victim(Vbd):
    """A disk whose front end is the program. Its nodes lie where the kernel's own front end does not look."""

    def __init__(self, test, access):
        self.backend = test.backend
        super().__init__(test.running, "xvdb", self.backend.nodes(test.disks["rude"], access))
        self.front = f"/local/domain/0/hostile/{self.number}"
        self.backend_nodes["frontend"] = self.front
        self.attach()
        self.wait_state(self.back, 2)
        # The disk has been used once, so that everything that stays for ever exists.
        self.does("good")
        self.before = self.has()

    def does(self, case):
        self.host.ask(f"/data/hostile_front {self.back} {case}")

    def has(self):
        """Returns the process that serves the disk, and its numbers of descriptors and of mappings of grants."""
        pid = self.backend.pid(self)
        files = f"ls /proc/{pid}/fd | wc -l; grep -c gntdev /proc/{pid}/maps; true"
        return (pid, *self.host.ask(files).split())

    def detach(self):
        self.host.ask(f"xenstore-write {self.back}/online 0 {self.back}/state 5 {self.front}/state 6")
        self.wait_state(self.back, 6)
        self.remove()


class XenHostile(ServedTest):
    @classmethod
    def setUpClass(cls):
        if STANDIN:
            raise unittest.SkipTest("what is refused, and how, is Spile's")
        hostile_front()
        super().setUpClass()

    @classmethod
    def images(cls, folder):
        try:
            found = hostile_front()
        except unittest.SkipTest:
            return []
        program = folder / "hostile_front"
        shutil.copy(found, program)
        raw = write_scattered(folder / "rude.raw", SIZE_MIB * MIB, 9)
        child = chain(raw)
        ServedTest.disks["rude"] = f"/data/{child.name}"
        return [program, child, folder / "rude-parent.vhd"]

    def test_requests_by_grant_copy(self):
        self.rude("copy", BESIDE_WORK, ALONE)

    def test_requests_by_grant_map(self):
        self.rude("map", BESIDE_WORK, ALONE)

    def test_requests_by_persistent_grants(self):
        self.rude("persistent", BESIDE_WORK, ALONE)

    def test_states(self):
        for access in ("copy", "persistent"):
            self.rude(access, IN_THE_STORE)

    def test_front_end_is_killed(self):
        for access in ("copy", "map", "persistent"):
            with self.beside(access) as (host, victim, work):
                with self.at_rest(work):
                    for _ in range(KILLS):
                        self.kill_at_work(host, victim)
                    victim.does("good")
                self.assert_well(victim, work)

    def rude(self, access, *groups):
        """Runs the cases of one group while the other disk is under load, those of a second while it is idle."""
        with self.beside(access) as (_, victim, work):
            for case in groups[0]:
                self.does(victim, work, case)
            for case in groups[1] if len(groups) > 1 else ():
                with self.at_rest(work):
                    victim.does(case)
                self.assert_well(victim, work)

    def does(self, victim, work, case):
        victim.does(case)
        self.assert_well(victim, work)

    @contextmanager
    def beside(self, access):
        """Attaches a hostile front end's disk and another one under load. Detaches both at the end."""
        with self.host() as host:
            work = self.attach("work")
            host.ask("start hammer hammer /dev/xvda 4 2m")
            victim = Victim(self, access)
            yield host, victim, work
            host.commands.end_hammer()
            victim.detach()
            self.detach(work, "work")
            self.backend.release(self.disks["rude"])
            self.assert_nothing_granted(host)
            self.assertEqual(host.ask_status(f"dmesg | grep -E '{LEAKS}'")[1], "")

    @contextmanager
    def at_rest(self, work):
        """Stops the load on the other disk meanwhile. A request of it would be granted pages that the hostile front end has had, and
        dom0's kernel gives a disk up for ever when such a page is still in use."""
        self.running.ask("until_true 'rests fio xvda'")
        before = work.done()
        yield
        self.assertEqual(work.done(), before, "the load was not at rest")
        self.running.ask("killall -CONT fio; true")

    def kill_at_work(self, host, victim):
        """Kills a front end whose ring is full. Its pages are gone while requests still use them."""
        host.ask(f"start work /data/hostile_front {victim.back} work")
        host.ask("until_true 'grep -q \"at work\" /tmp/work.log || [ -e /tmp/work.status ]'; sleep 0.3")
        if host.ask_status("[ -e /tmp/work.status ]")[0] == 0:
            raise AssertionError(f"the program ended by itself: {host.ask('cat /tmp/work.log')}")
        host.ask("kill -9 $(cat /tmp/work.pid) && until_true '[ -e /tmp/work.status ]'")

    def assert_well(self, victim, work):
        """Checks that the load goes on, and that the hostile disk has the same process with the same resources."""
        self.assertEqual(victim.has(), victim.before)
        self.assertEqual(self.running.ask_status(f"grep panicked /tmp/{self.backend.name}.log")[1], "")
        goal = work.done()[0] + 20
        self.running.ask(f"until_true '[ $(done_on xvda) -ge {goal} ] || [ -e /tmp/hammer.status ]'")
        if self.running.ask_status("[ -e /tmp/hammer.status ]")[0] == 0:
            raise AssertionError(f"the work ended by itself: {self.running.ask('tail -c 3000 /tmp/hammer.log')}")
        self.assertEqual(self.complaints(), "")

    def assert_nothing_granted(self, host):
        """Checks that Xen soon knows of no grant that is mapped or being copied. gntdev unmaps a page later, by a timer, when somebody
        else holds it at that moment."""
        deadline = time.monotonic() + UNMAP_LIMIT_S
        while granted := self.granted(host):
            # The last line is what a summary shows.
            self.assertLess(time.monotonic(), deadline, f"Xen knows of pages that are still granted:\n{'; '.join(granted)}")
            time.sleep(0.2)

    def granted(self, host):
        """Returns Xen's own list of grants that are mapped or being copied."""
        host.ask("xl dmesg -c >/dev/null; xl debug-keys g")
        words = host.ask("xl dmesg")
        self.assertIn("grant-table for remote", words)
        return re.findall(r"\[0x[0-9a-f]+\].*", words)
