"""Unprivileged domains: makes their root file systems, and starts them by xl."""

import random
import shlex

from emulated import busybox_root, ext4_image
from parts import HERE
from support import MIB, sha256

ROOT_BYTES = 64 * MIB


def domu_root(folder, path, seed):
    """An ext4 root with busybox, domu.sh, and files whose sums it checks."""
    top = folder / "root"
    busybox_root(top, ("checked",), HERE / "domu.sh")
    fill(top / "checked", random.Random(seed))
    return ext4_image(path, ROOT_BYTES, top)


def fill(folder, dice):
    """Files of odd sizes, some of them with long runs of zeros, and their sums."""
    for number in range(12):
        data = dice.randbytes(dice.randrange(1000, 900_000))
        (folder / str(number)).write_bytes(bytes(100_000 * (number % 3)) + data)
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "sums").write_text("".join(lines))


class Guest:
    """A domain of paravirtual kind that xl makes; `disk` is its root in the words of xl's `disk=[…]`, or left out.

    `task` is what it does, in the words of domu.sh.
    """

    def __init__(self, host, name, disk=None, task="", memory=256):
        self.host = host
        self.name = name
        self.log = f"/run/console/guest-{name}.log"
        self.common = [
            f'name="{name}"', 'type="pv"', f"memory={memory}", "vcpus=1", 'kernel="/tools/boot/vmlinux"',
            'ramdisk="/data/domu.cpio"', f'extra="console=hvc0 panic=-1 loglevel=4 task={task}"',
            'on_poweroff="destroy"', 'on_reboot="restart"', 'on_crash="destroy"',
        ]
        self.disk = disk

    def configure(self, disk, path):
        """Writes the configuration with this disk, or with none, to a file."""
        lines = " ".join(map(shlex.quote, [*self.common, *([f"disk=['vdev=xvda,{disk}']"] if disk else [])]))
        self.host.ask(f"printf '%s\\n' {lines} >{path}")

    def create(self, how="-p"):
        """Makes the domain, by default paused, as after each new start; returns its number."""
        self.host.ask(f"rm -f {self.log}")
        self.configure(self.disk, f"/tmp/{self.name}.cfg")
        self.host.ask(f"xl create {how} /tmp/{self.name}.cfg")
        self.domain = int(self.host.ask(f"xl domid {self.name}"))
        return self.domain

    def run(self):
        """Makes the domain and lets it run to its end. It must end well."""
        self.create()
        self.finish()

    def start(self):
        """Lets the domain that was made run."""
        self.host.ask(f"xl unpause {self.name}")

    def leave_behind(self, name):
        """The domain that was saved gets another name: both hosts of a test are one Xen, where names are unique."""
        self.host.ask(f"xl rename {self.name} {name}")

    def finish(self):
        """Lets the domain that was made run until it is powered off and forgotten."""
        self.start()
        self.wait_end()

    def wait_end(self):
        """Waits until the domain has done all its work and is gone."""
        self.wait_said("SPILE VERIFIED domU")
        status, words = self.host.ask_status(f"until_true '! xl domid {self.name} >/dev/null 2>&1'")
        if status != 0:
            raise AssertionError(f"the domain does not go: {words[-300:]}\n{self.story()}")

    def wait_said(self, words):
        """Waits until the domain has printed this text, or that something is broken."""
        self.host.ask_status(f"until_true 'grep -qE \"{words}|SPILE BROKEN\" {self.log}' 2>/dev/null")
        if self.host.ask_status(f"grep -qE '{words}' {self.log}")[0] != 0:
            raise AssertionError(f"the domain does not say {words}\n{self.story()}")

    def said(self):
        """Returns everything that the domain has printed."""
        return self.host.ask(f"cat {self.log}")

    def passes(self):
        """Returns how often the domain has written, read and compared."""
        return self.said().count("SPILE PASS")

    def wait_passes(self, count):
        """Waits until the domain has done so that many times more."""
        goal = self.passes() + count
        self.host.ask_status(f"until_true '[ $(grep -c \"SPILE PASS\\|SPILE BROKEN\" {self.log}) -ge {goal} ]'")
        if self.passes() < goal:
            raise AssertionError(f"the domain does not go on\n{self.story()}")

    def stop_work(self):
        """Tells the domain on its console to end its work."""
        domain = self.host.ask(f"xl domid {self.name}")
        self.host.ask(f"echo stop >$(xenstore-read /local/domain/{domain}/console/tty)")

    def story(self):
        nodes = "xenstore-ls -f | grep -E 'vbd|51712'; tail -n 20 /var/log/xen/*"
        return self.host.ask(f"tail -c 3000 {self.log}; {nodes}; xl list")
