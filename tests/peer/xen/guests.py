"""Unprivileged domains: what their root holds, and how xl starts them."""

import os
import random
import shlex

import neighbour  # noqa: F401: before what comes from there
from kernel import busybox
from parts import HERE, image
from support import MIB, run, sha256, text

ROOT_BYTES = 64 * MIB


def domu_root(folder, path, seed):
    """An ext4 root with busybox, domu.sh, and files whose sums it checks."""
    top = folder / "root"
    for name in ("bin", "sbin", "dev", "proc", "sys", "tmp", "checked"):
        (top / name).mkdir(parents=True)
    (top / "bin/busybox").write_bytes(busybox())
    os.chmod(top / "bin/busybox", 0o755)
    for name in text(run("busybox", "--list").stdout).split():
        if name != "busybox":
            (top / "bin" / name).symlink_to("busybox")
    (top / "sbin/init").write_bytes((HERE / "domu.sh").read_bytes())
    os.chmod(top / "sbin/init", 0o755)
    fill(top / "checked", random.Random(seed))
    image(path, ROOT_BYTES, top)
    run("rm", "-r", top)
    return path


def fill(folder, dice):
    """Files of odd sizes, some of them with long runs of zeros, and their sums."""
    for number in range(12):
        data = dice.randbytes(dice.randrange(1000, 900_000))
        (folder / str(number)).write_bytes(bytes(100_000 * (number % 3)) + data)
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "sums").write_text("".join(lines))


class Guest:
    """A domain of paravirtual kind that xl makes; `disk` is its root in the words of xl's `disk=[…]`, or left out."""

    def __init__(self, host, name, disk=None):
        self.host = host
        self.name = name
        self.config = [
            f'name="{name}"', 'type="pv"', "memory=256", "vcpus=1", 'kernel="/tools/boot/vmlinux"',
            'ramdisk="/data/domu.cpio"', 'extra="console=hvc0 panic=-1 loglevel=4"',
            *(f'on_{event}="destroy"' for event in ("poweroff", "reboot", "crash")),
            *([f"disk=['vdev=xvda,{disk}']"] if disk else []),
        ]

    def create(self):
        """Makes it, not yet running; its number."""
        lines = " ".join(map(shlex.quote, self.config))
        self.host.ask(f"printf '%s\\n' {lines} >/tmp/{self.name}.cfg && xl create -p /tmp/{self.name}.cfg")
        self.domain = int(self.host.ask(f"xl domid {self.name}"))
        return self.domain

    def run(self):
        """Makes it, and lets it come to its end, which has to be a good one."""
        self.create()
        self.finish()

    def finish(self):
        """Lets the domain that was made run until it is powered off and forgotten."""
        self.host.ask(f"xl unpause {self.name}")
        gone = f"until_true '! xenstore-exists /local/domain/{self.domain}'"
        status, words = self.host.ask_status(gone)
        said = self.host.ask(f"cat /run/console/guest-{self.name}.log")
        if status != 0 or "SPILE VERIFIED domU" not in said:
            tail = self.host.ask("xenstore-ls -f | grep -E 'vbd|51712'; tail -n 20 /var/log/xen/*")
            raise AssertionError(f"the domain did not end well: {words[-300:]}\n{said[-3000:]}\n{tail}")
