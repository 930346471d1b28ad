"""The backends that serve the disks: `spile xen-backend`, or the kernel's blkback in its place.

`SPILE_STANDIN=blkback` names the latter, to see that a test asks only for what the protocol promises.
"""

import unittest

from support import STANDIN, run, spile_binary

RUN_DIR = "/run/spile"


def need_backend():
    """Skips the tests when there is no backend."""
    if STANDIN and STANDIN != "blkback":
        raise unittest.SkipTest(f"{STANDIN} knows nothing of Xen")
    if not STANDIN and run(spile_binary(), "xen-backend", "--help", ok=None).returncode != 0:
        raise unittest.SkipTest(f"{spile_binary()} has no xen-backend")


def backend(host, kind="vbd"):
    return Kernel(host) if STANDIN else Spile(host, kind)


class Spile:
    """`spile xen-backend` in dom0, for disks of type `kind`."""

    def __init__(self, host, kind="vbd", options=""):
        self.host = host
        self.kind = kind
        self.name = f"backend-{kind}"
        host.ask(f"start {self.name} spile xen-backend --run-dir {RUN_DIR} --type {kind} {options}")

    def nodes(self, image, access="copy"):
        """Returns the xenstore nodes of a disk's backend that name this image."""
        return {"params": prefixed(image), "spile-access": access}

    def words(self, image):
        """Returns the entry for this image in xl's `disk=[…]`."""
        return f"format=raw,access=rw,script=/bin/block-spile,target={prefixed(image)}"

    def pid(self, vbd):
        """Returns the id of the process that serves a disk, or None when there is none now."""
        file = f"{RUN_DIR}/{vbd.domain}-{vbd.number}.pid"
        status, words = self.host.ask_status(f"kill -0 $(cat {file}) && cat {file}")
        return int(words) if status == 0 else None

    def kill(self, vbd):
        """Kills the process of a disk; returns when another one has taken its place."""
        old = self.pid(vbd)
        if old is None:
            raise AssertionError(f"nobody serves {vbd.back}:\n{self.said()}")
        file = f"{RUN_DIR}/{vbd.domain}-{vbd.number}.pid"
        is_new = f'[ "$(cat {file})" != {old} ] && kill -0 "$(cat {file})"'
        self.host.ask(f"kill -9 {old} && until_true '{is_new}' 2>/dev/null")

    def resize(self, vbd, image, size_bytes):
        self.host.ask(f"spile resize {RUN_DIR}/{vbd.domain}-{vbd.number}.control {size_bytes}")

    def release(self, image):
        """Waits until no process uses the image any more."""
        self.host.ask(f"until_true 'spile info {image} >/dev/null 2>&1'")

    def said(self):
        return self.host.ask(f"tail -c 3000 /tmp/{self.name}.log", limit_s=10)

    def stop(self):
        """Sends SIGTERM: the backend must end well, and at once."""
        self.host.ask(f"kill $(cat /tmp/{self.name}.pid) && until_true '[ -e /tmp/{self.name}.status ]'")
        status = self.host.ask(f"cat /tmp/{self.name}.status")
        if status != "0":
            raise AssertionError(f"the backend ended with {status}:\n{self.said()}")


def prefixed(image):
    """Returns the name of an image in a toolstack: its format and its path."""
    return f"vhd:{image}" if image.endswith(".vhd") else f"raw:{image}"


class Kernel:
    """blkback, on loop devices."""

    kind = "vbd"

    def __init__(self, host):
        self.host = host
        self.devices = {}
        host.ask("load loop && load xen_blkback")

    def loop(self, image):
        if image not in self.devices:
            self.devices[image] = self.host.ask("losetup -f")
            self.host.ask(f"losetup {self.devices[image]} {image}")
        return self.devices[image]

    def nodes(self, image, access=None):
        device = self.loop(image)
        number = self.host.ask(f"stat -c %t:%T {device}")
        return {"params": device, "physical-device": number, "hotplug-status": "connected"}

    def words(self, image):
        return f"format=raw,access=rw,script=/bin/block-spile,target={self.loop(image)}"

    def resize(self, vbd, image, size_bytes):
        device = self.loop(image)
        # blkback looks at the size when a request comes.
        self.host.ask(
            f"truncate -s {size_bytes} {image} && losetup -c {device}"
            f" && dd if=/dev/{vbd.device} of=/dev/null bs=4k count=1 iflag=direct"
        )

    def release(self, image):
        self.host.ask(f"losetup -d {self.devices.pop(image)}")

    def said(self):
        return "blkback has no words of its own"

    def stop(self):
        self.host.ask("rmmod xen_blkback")
