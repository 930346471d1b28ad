"""A server, a guest and their images, which the vhost-user tests disturb.

The guest has a root on a chain (vda), a disk for verified work, a chain too (vdb), and a plain raw one
with an ext4 (vdc); a fourth, `spare`, is there to be plugged in.
"""

import os
import shutil

from kernel import initramfs
from machine import root_image
from support import LIMIT_S, MIB, STANDIN, chain, check, check_by_qemu, run, sha256, spile, spile_json, write_scattered
from vhost import PLACES, Sockets, VhostMachine, VhostServer, qemu_version, wait_until

ROOT_BYTES = 512 * MIB
DISK_BYTES = 128 * MIB
DEVICES = {"root": "vda", "work": "vdb", "plain": "vdc"}
# Jobs and depth of the verified work. The stand-in has no inflight region: what it held when it was
# killed is lost, unless it is the one request after the last that was answered.
WORK = "/dev/vdb 1 1" if STANDIN else "/dev/vdb 4 16"
# Requests from one disturbance to the next.
STEP = 400
# Before this version, emulation of several processors may use its map of memory after it was freed, while a guest maps its devices (commit
# 2865bf1c5795 of QEMU). QEMU then ends by this assertion, or the guest's kick or the device's interrupt goes nowhere, and nothing moves.
QEMU_MENDED = (10, 0, 4)
QEMU_FAULT = "iotlb_to_section: Assertion"
COMPLAINTS = "I/O error|EXT4-fs (error|warning)|is not a head|blocked for more than|Call Trace"


class Lab:
    # More options of a disk, by its name, as `spile serve` takes them behind a comma.
    OPTIONS = {}

    def __init__(self, kernel, folder):
        self.kernel = kernel
        self.folder = folder
        self.sockets = Sockets()
        self.server = self.machine = None
        self.machines = []

    def start(self):
        self.initramfs = initramfs(self.folder / "initramfs", self.kernel)
        self.disks = self.make_disks()
        self.parents = {path: sha256(path) for path in self.folder.glob("*-parent.*")}
        self.start_server()
        self.boot()

    def make_disks(self):
        plain = empty(self.folder / "plain.raw", DISK_BYTES)
        run("mke2fs", "-q", "-F", "-t", "ext4", plain)
        root = root_image(self.folder, self.folder / "root.raw", ROOT_BYTES, ["fio"])
        work = write_scattered(self.folder / "work.raw", DISK_BYTES, seed=3)
        return {
            **self.chains(root, work),
            "plain": plain,
            "spare": empty(self.folder / "spare.raw", DISK_BYTES),
        }

    def chains(self, root, work):
        """The disks of the guest's root and of its work, with these contents."""
        return {"root": chain(root), "work": chain(work)}

    def start_server(self):
        self.server = VhostServer(self.folder, self.disks, self.sockets, options=self.OPTIONS)

    def take_over(self):
        """Starts a server that takes over from the running one; returns the old one."""
        old = self.server
        self.server = VhostServer(self.folder, self.disks, self.sockets, takeover_from=old, options=self.OPTIONS)
        return old

    def boot(self):
        self.machine = self.start_machine(PLACES[0])
        try:
            self.machine.wait_ready()
        except AssertionError:
            told = self.machine.console.drain()
            if not self.is_qemus_fault(told):
                raise
            why = "QEMU died, or its guest hung with no request at the server, and was started again"
            print(f"NOTE guest {why}: {' '.join(told.split())}")
            self.machine.close()
            self.machine = self.start_machine(PLACES[0])
            self.machine.wait_ready()

    def is_qemus_fault(self, told):
        """True when a guest that does not boot, and whose console has told this, may be a victim of QEMU's known fault."""
        if QEMU_FAULT in told:
            return True
        # A request that the server has taken and not answered would be the server's fault.
        hangs = "blocked for more than" in told and qemu_version() < QEMU_MENDED
        return hangs and not STANDIN and not self.in_flight()

    def start_machine(self, place, incoming=False):
        machine = VhostMachine(
            self.kernel, self.initramfs, self.folder, self.sockets, DEVICES, place, incoming,
        )
        self.machines.append(machine)
        return machine

    def allocated(self, name):
        """Bytes that the image takes on the host."""
        return os.stat(self.disks[name]).st_blocks * 512

    def begin_work(self):
        self.machine.ask(f"start hammer hammer {WORK}")
        self.wait_progress()

    def wait_progress(self):
        """Waits until the verified load has made progress."""
        start = self.machine.done("vdb")

        def further():
            return self.machine.done("vdb") >= start + STEP or self.work_has_ended()

        wait_until(further, LIMIT_S, "progress of the work")
        if self.work_has_ended():
            raise AssertionError(f"the work ended by itself: {self.machine.ask('cat /tmp/hammer.log')[-4000:]}")

    def work_has_ended(self):
        return self.machine.ask_status("[ -e /tmp/hammer.status ]")[0] == 0

    def end_work(self):
        self.machine.commands.end_hammer()

    def complaints(self):
        """Returns the complaints of the guest's kernel since the last call."""
        return self.machine.ask_status(f"dmesg -c | grep -E '{COMPLAINTS}'")[1]

    def story(self):
        """Returns the last output of server and guest, as far as there is any."""
        server = self.server.output()[-2000:] if self.server else ""
        if self.server and self.server.ended is None and not STANDIN:
            try:
                server += f"\nits requests in flight: {self.in_flight()}"
            except AssertionError as problem:
                server += f"\n{problem}"
        if self.machine is None:
            return f"the server:\n{server}"
        try:
            guest = self.machine.ask("dmesg | tail -n 30; cat /sys/block/vd?/inflight", limit_s=10)
        except (AssertionError, OSError) as problem:
            guest = f"{problem}\n{self.machine.console.drain()}"
        return f"the server:\n{server}\nthe guest:\n{guest}"

    def in_flight(self):
        """Returns the requests that the server has taken and not answered: when a guest hangs, this tells who has them."""
        told = (spile_json("slow", self.sockets.control, "--name", name) for name in self.disks)
        return [request for slow in told for request in slow["in_flight"]]

    def die(self):
        """Kills the server and QEMU at the same time."""
        self.server.process.kill()
        self.machine.kill()
        self.server.kill()

    def finish(self):
        """Ends everything in order and checks the images."""
        self.machine.leave()
        code = self.server.stop()
        if code != 0:
            raise AssertionError(f"the server ended with {code}:\n{self.server.output()}")
        for path in self.disks.values():
            self.check_image(path)
        for path, before in self.parents.items():
            if sha256(path) != before:
                raise AssertionError(f"{path} changed under its child")

    def check_image(self, path):
        if path.suffix == ".vhd":
            check(path)

    def destroy(self):
        """Ends everything that still runs, wherever the test has stopped."""
        for machine in self.machines:
            machine.close()
        if self.server and self.server.ended is None:
            self.server.kill()
        self.sockets.remove()
        shutil.rmtree(self.folder, ignore_errors=True)

    def flat(self, name):
        """Copies the content of an image that nobody uses into a raw file; returns that file."""
        copy = self.folder / "flat.raw"
        copy.unlink(missing_ok=True)
        if STANDIN:
            shutil.copy(self.disks[name], copy)
        else:
            spile("convert", self.disks[name], copy)
        return copy


class Qcow2Lab(Lab):
    """The root is Spile's child of a compressed image by QEMU, as distributions publish them; the disk for the work is QEMU's child of an image by
    Spile. QEMU reads and checks what they are left with."""

    def chains(self, root, work):
        below = [path.with_name(f"{path.stem}-parent.qcow2") for path in (root, work)]
        above = [path.with_suffix(".qcow2") for path in (root, work)]
        run("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", root, below[0])
        spile("create", above[0], "--parent", below[0])
        spile("convert", work, below[1])
        run("qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", below[1], above[1])
        return {"root": above[0], "work": above[1]}

    def check_image(self, path):
        if path.suffix == ".qcow2":
            check_by_qemu(path, was_killed=True)
            # What killed servers have left is given back, and nothing else is found.
            spile("check", path, "--repair")
            check_by_qemu(path)

    def flat(self, name):
        # Spile waits until the kernel has given up the files of a server that was killed.
        copy, disk = super().flat(name), self.disks[name]
        check_by_qemu(disk, was_killed=True)
        run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", disk, copy)
        return copy


def empty(path, size_bytes):
    with open(path, "wb") as file:
        file.truncate(size_bytes)
    return path
