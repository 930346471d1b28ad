"""The backends that `compare.py` puts side by side: one disk each for Linux's blkfront in the first domain.

All are attached all the time and used in turn. Each has a device of null_blk of its own below: a block
device that completes each request at once and touches no data, as a device with DMA would, so that
what differs is the way from the front to the device and back. All are opened past the page cache.
"""

import os
import unittest

from backends import Spile
from disks import Vbd
from qdisk import PLACE, PROGRAM, qdisk_image

# The backend whose ratio is 1.
REFERENCE = "spile copy"
# The reference once more, as another disk with another process. The difference between the two is noise.
AGAIN = "spile copy again"
DEVICE = "no Xen: the device"
QDISK = "qemu qdisk"
QDISK_FILE = "qdisk.img"

# xl's type of disks that the kernel's backend leaves alone.
SPILE_TYPE = "uvbd"
SPILE = {
    REFERENCE: "copy", "spile map": "map", "spile map-copy": "map-copy",
    "spile persistent": "persistent", AGAIN: "copy",
}
# By its module's parameter `feature_persistent`, which a disk takes over when it is attached.
BLKBACK = {"blkback map": "N", "blkback persistent": "Y"}


class Side:
    """`name`, and what fio opens: `path`."""

    def __init__(self, name, path, vbd=None):
        self.name = name
        self.path = path
        self.vbd = vbd

    def offers(self):
        """What of the protocol was negotiated, as far as it changes how many requests there are."""
        if self.vbd is None:
            return {}
        names = ("feature-persistent", "feature-max-indirect-segments", "multi-queue-max-queues")
        command = "; ".join(f"xenstore-read {self.vbd.back}/{name} 2>/dev/null || echo 0" for name in names)
        values = map(int, self.vbd.host.ask(command).split())
        most = int(self.vbd.queue("max_sectors_kb")) << 10
        return {**dict(zip(names, values)), "largest_request_bytes": most}


class Sides:
    """Attaches them, with what `files` has made; `list` has them in the order of the table."""

    def __init__(self, host, made):
        self.host = host
        self.letters = iter("abcdefghijklmnop")
        names = [*SPILE, *BLKBACK, QDISK, DEVICE]
        self.storage = {name: f"/dev/nullb{at}" for at, name in enumerate(names)}
        for path in made:
            if path.suffix == ".ko":
                options = f"nr_devices={len(names)} gb=1" if path.stem == "null_blk" else ""
                host.ask(f"insmod /data/{path.name} {options}")
        # QEMU writes the nodes of both sides, one after the other, so the front's driver must not be there yet.
        first = self.start_qemu() if any(path.name == QDISK_FILE for path in made) else None
        host.ask("load xen_blkfront")
        found = {side.name: side for side in (*self.qdisk(first), *self.spile(), *self.blkback())}
        found[DEVICE] = Side(DEVICE, self.storage[DEVICE])
        self.list = [found[name] for name in names if name in found]
        # No scheduler: its work is the same for all backends, and is not theirs.
        host.ask("for queue in /sys/block/xvd* /sys/block/nullb*; do echo none >$queue/queue/scheduler; done")

    def start_qemu(self):
        """Returns QEMU with its disk. Prints the reason and returns None when that is not possible."""
        vbd = Vbd(self.host, f"xvd{next(self.letters)}", {}, kind="qdisk")
        self.host.ask(f"load loop && mkdir {PLACE} && mount -o loop,ro /data/{QDISK_FILE} {PLACE}")
        words = "-xen-attach -xen-domid 0 -M xenpv -nodefaults -no-user-config -display none -monitor none -serial none"
        # The toolstack's way to a direct disk wants Linux's own asynchronous I/O, which this package may be built
        # without; on the command line threads can be had.
        disk = f"driver=host_device,node-name=disk,filename={self.storage[QDISK]},cache.direct=on,aio=threads"
        self.host.ask(
            f"start qemu env LD_LIBRARY_PATH=$(echo {PLACE}/lib/*-linux-gnu) {PROGRAM} {words}"
            f" -blockdev {disk} -device xen-disk,drive=disk,vdev={vbd.device}"
        )
        ready = f'[ -e /tmp/qemu.status ] || [ "$(xenstore-read {vbd.back}/state 2>/dev/null)" = 2 ]'
        status, _ = self.host.ask_status(f"until_true '{ready}' && [ ! -e /tmp/qemu.status ]")
        if status != 0:
            print(f"SKIP {QDISK}: QEMU does not start: {self.host.ask('tail -n 3 /tmp/qemu.log')}", flush=True)
            return None
        return vbd

    def qdisk(self, vbd):
        return [Side(QDISK, f"/dev/{vbd.device}", vbd.wait_connected())] if vbd else []

    def spile(self):
        backend = Spile(self.host, SPILE_TYPE)
        return [self.attach(name, SPILE_TYPE, backend.nodes(self.storage[name], SPILE[name])) for name in SPILE]

    def blkback(self):
        self.host.ask("load xen_blkback")
        for name, persistent in BLKBACK.items():
            self.host.ask(f"echo {persistent} >/sys/module/xen_blkback/parameters/feature_persistent")
            device = self.storage[name]
            number = self.host.ask(f"stat -c %t:%T {device}")
            nodes = {"params": device, "physical-device": number, "hotplug-status": "connected"}
            yield self.attach(name, "vbd", nodes)

    def attach(self, name, kind, nodes):
        vbd = Vbd(self.host, f"xvd{next(self.letters)}", nodes, kind=kind).attach().wait_connected()
        return Side(name, f"/dev/{vbd.device}", vbd)


def files(parts, folder):
    """The files that dom0 needs under /data; without qdisk's image when that cannot be had."""
    made = []
    for name, code in parts.kernel.with_dependencies("null_blk"):
        made.append(folder / f"{name}.ko")
        made[-1].write_bytes(code)
    try:
        os.link(qdisk_image(), folder / QDISK_FILE)
        return [*made, folder / QDISK_FILE]
    except unittest.SkipTest as problem:
        print(f"SKIP {QDISK}: {problem}", flush=True)
        return made
