"""A Xen guest moves to another host together with its disk, by docs/move.md, while it works; and all that can come in between.

The other host is a network namespace of the first domain, with a link, TLS, a `spile receive` and a backend of its own. Both share one Xen, so the
guest that is left behind has another name while the one that goes on has its own.
"""

import json
import os
import re
import shlex
import shutil
import unittest

from disks import Vbd
from guests import Guest, domu_root
from served import ServedTest, parents
from support import STANDIN, TOP, chain, need
from test_tls import Certificates

PAGE = TOP / "docs" / "move.md"
SECTION = "## The guest moves too, on Xen\n"
# Its memory, in MiB: the guest that is left behind and the one that goes on are there at the same time.
MEMORY = 112
# Runs on the first domain. The other host's folder is that of the page.
MAKE_HOSTS = """
echo hosts: files >/etc/nsswitch.conf
echo 10.77.15.2 host2 >>/etc/hosts
mkdir -p /data/disks /srv /etc/pki
ln -s /data/disks /srv/disks
ln -s /data /etc/pki/spile
load veth
ip netns add there
ip link add lan type veth peer name lan netns there
ip address add 10.77.15.1/24 dev lan
ip link set lan up
ip -n there address add 10.77.15.2/24 dev lan
ip -n there link set lan up
ip -n there link set lo up
"""
PEM = ("ca-cert.pem", "server-cert.pem", "server-key.pem", "client-cert.pem", "client-key.pem")


def recipe():
    """The blocks of the page's section: (host, commands) of each, in their order."""
    section = PAGE.read_text().split(SECTION)[1].split("\n## ")[0]
    blocks = re.findall(r"```sh[^\n]*\n# on (this|the other) host\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 4, f"the recipe in {PAGE} has {len(blocks)} blocks"
    return [script for _, script in blocks]


class Pki(Certificates):
    def __init__(self, folder):
        self.folder = folder

    def path(self, name):
        return self.folder / name


class XenMoves(ServedTest):
    @classmethod
    def setUpClass(cls):
        if STANDIN:
            raise unittest.SkipTest("needs spile move")
        need("openssl")
        super().setUpClass()
        # Two guests with a disk each, and a second host in a namespace: a first domain of its own has room for them.
        cls.finish()

    @classmethod
    def images(cls, folder):
        if STANDIN or not shutil.which("openssl"):
            return []
        pki = Pki(folder).certificates("pki", "host2")
        raws = [domu_root(folder, folder / f"{name}.raw", seed) for seed, name in enumerate(("web", "mail"))]
        cls.disks = {raw.stem: f"/data/{chain(raw).name}" for raw in raws}
        below = parents(folder, raws)
        ServedTest.parents.update(below)
        return [folder / name for name in (*(f"{raw.stem}.vhd" for raw in raws), *below)] + [pki / name for name in PEM]

    @classmethod
    def prepare(cls, host):
        host.ask(" && ".join(MAKE_HOSTS.strip().splitlines()))

    def on(self, host, script):
        """Runs a script as one shell on a host: `this` or `other`."""
        lines = " ".join(map(shlex.quote, script.strip().splitlines()))
        inside = "/tools/bin/ip netns exec there " if host == "other" else ""
        return self.running.ask(f"cd /data && printf '%s\\n' {lines} >/tmp/script && {inside}sh -eu /tmp/script")

    def receive(self):
        command = recipe()[0].strip().removesuffix("&")
        self.running.ask(f"cd /data && start receive /tools/bin/ip netns exec there {command}")
        self.running.ask("until_true 'grep -q \"takes in\" /tmp/receive.log'")

    def begin(self, name):
        """A guest at work, on this host; the commands name the page's disk, and so do we."""
        guest = Guest(self.running, name, self.backend.words(self.disks[name]), "work", MEMORY)
        guest.create()
        guest.start()
        guest.wait_passes(1)
        self.here = Vbd(self.running, "xvda", {}, guest.domain)
        return guest

    def jobs(self):
        return json.loads(self.running.ask("spile jobs --json"))["jobs"]

    def in_step(self):
        """The job that keeps the copy, once it is in step."""
        self.running.ask(
            "until_true \"spile jobs --json | jq -e '.jobs[] | select(.state == \\\"running\\\" and .motion.phase == \\\"in step\\\")'\" >/dev/null"
        )
        return next(job["id"] for job in self.jobs() if job["state"] == "running")

    def assertWaits(self, guest):
        """The guest runs here, and gets nothing to its disk, which was handed over."""
        image, host = self.disks[guest.name], self.running
        before, passes = host.ask(f"sha256sum <{image}"), guest.passes()
        host.ask(f"xl unpause {guest.name} && sleep 5")
        self.assertEqual(host.ask(f"spile ls --json | jq -r '.disks[] | select(.name == \"{guest.name}\") | .state'"), "handed_over")
        self.assertEqual((host.ask(f"sha256sum <{image}"), guest.passes()), (before, passes))

    def settle(self, guest, new, vbd=None):
        """The guest goes on at the other host to the end of its work: all of it is well, and the disk holds what it has written."""
        guest.wait_passes(2)
        guest.stop_work()
        guest.wait_end()
        if vbd:
            vbd.remove()
        self.backend.release(new)
        self.running.ask(
            f"spile compare {self.disks[guest.name]} /data/moment.vhd && spile convert {new} /data/flat.raw && e2fsck -fn /data/flat.raw"
            " && rm -f /data/flat.raw /data/moment.vhd"
        )

    def test_by_the_page(self):
        with self.host() as host:
            blocks = recipe()
            self.receive()
            guest = self.begin("web")
            self.on("this", blocks[1])
            host.ask("cp /srv/disks/web.vhd /data/moment.vhd")
            self.assertWaits(guest)
            guest.leave_behind("web-here")
            guest.configure(self.backend.words("/srv/disks/web.vhd"), "/data/web.cfg")
            self.on("other", blocks[2])
            self.on("this", blocks[3].replace("xl destroy web", "xl destroy web-here"))
            self.settle(guest, "/srv/disks/web.vhd")
            host.ask("kill $(cat /tmp/receive.pid) && until_true '[ -e /tmp/receive.status ]' && rm -f web.saved")

    def test_whatever_comes_in_between(self):
        if not os.environ.get("SPILE_LONG"):
            self.skipTest("takes some minutes: `make test-xen` runs it")
        with self.host() as host:
            self.receive()
            guest = self.begin("mail")
            self.copy_under_troubles(guest)
            self.in_step()
            host.ask("xl save -p mail /data/saved")
            self.backend.kill(self.here)
            host.ask(f"spile job {self.in_step()} hand-over")
            self.backend.kill(self.here)
            self.assertWaits(guest)
            # The guest's move fails after all.
            host.ask("spile resume mail")
            guest.wait_passes(1)
            # And now it succeeds, to a backend of the other host's own.
            self.move("again.vhd")
            job = self.in_step()
            host.ask(f"rm /data/saved && xl save -p mail /data/saved && spile job {job} hand-over")
            host.ask("kill $(cat /tmp/receive.pid) && cp /srv/disks/again.vhd /data/moment.vhd")
            self.backend.kill(self.here)
            self.assertWaits(guest)
            guest.leave_behind("mail-here")
            vbd = self.restore_there(guest)
            host.ask("xl destroy mail-here")
            self.settle(guest, "/srv/disks/again.vhd", vbd)
            host.ask("kill $(cat /tmp/there.pid) && until_true '[ -e /tmp/there.status ]'")

    def move(self, name, *words):
        to = f"nbds://host2/{name}?tls-certificates=/etc/pki/spile"
        return json.loads(self.running.ask(f"spile move mail --to '{to}' --mirror-only --json {' '.join(words)}"))["id"]

    def copy_under_troubles(self, guest):
        """The link is cut, and each side is killed, while the disk is copied."""
        host = self.running
        job = self.move("mail.vhd", "--rate", "300K")
        status, words = host.ask_status(f"spile job {job} hand-over")
        self.assertTrue(status != 0 and "not in step" in words, words)
        host.ask("ip link set lan down")
        guest.wait_passes(2)
        self.assertEqual(self.jobs()[0]["state"], "running")
        host.ask("ip link set lan up && kill -9 $(cat /tmp/receive.pid) && until_true '[ -e /tmp/receive.status ]'")
        guest.wait_passes(1)
        self.receive()
        self.backend.kill(self.here)
        guest.wait_passes(1)
        # The next process goes on, as another job.
        host.ask("until_true 'spile jobs --json | jq -e .jobs[0]' >/dev/null")
        new = self.jobs()[0]["id"]
        self.assertNotEqual(new, job)
        host.ask(f"spile job {new} rate none")

    def restore_there(self, guest):
        """The guest is restored without its disk, which a backend in the other host's namespace gives it before it runs."""
        host = self.running
        host.ask("start there /tools/bin/ip netns exec there spile xen-backend --run-dir /run/there --type uvbd")
        guest.configure(None, "/tmp/mail.cfg")
        host.ask("xl restore -p /tmp/mail.cfg /data/saved && rm /data/saved")
        domain = int(host.ask("xl domid mail"))
        vbd = Vbd(host, "xvda", self.backend.nodes("/srv/disks/again.vhd"), domain, "uvbd").attach()
        guest.start()
        return vbd
