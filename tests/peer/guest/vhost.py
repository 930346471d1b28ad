"""Disks on vhost-user-blk: a server of them, and a guest that uses them.

Each disk has a socket for each place that QEMU can have in a test: two machines that are attached to
one disk, as in a migration, have a socket each. `SPILE_STANDIN=qemu-storage-daemon` puts that program
in the server's place.
"""

import json
import os
import pathlib
import re
import shutil
import socket
import tempfile
import time
import unittest

from emulated import BOOT_LIMIT_S, Commands
from machine import Machine
from qmp import Qmp
from support import LIMIT_S, STANDIN, Server, need, run, spile, spile_binary, text

QUEUES = 2
PLACES = ("a", "b")
# After this time without an answer the command is sent again: the line sometimes loses bytes.
ASK_AGAIN_S = 10


def need_server():
    """Skips the tests when the stand-in cannot do vhost-user."""
    if STANDIN == "qemu-storage-daemon":
        need("qemu-storage-daemon", "qemu-utils")
    elif STANDIN:
        raise unittest.SkipTest(f"{STANDIN} has no vhost-user")


def wait_until(true, limit_s, what):
    """Waits until `true()` returns something true; returns that."""
    end = time.monotonic() + limit_s
    while not (value := true()):
        if time.monotonic() > end:
            raise AssertionError(f"not in {limit_s} s: {what}")
        time.sleep(0.05)
    return value


def listens(path):
    """Does a server listen on this socket? Spile gives its sockets their names when they listen already, so the kernel
    knows them by other names; but connecting does not disturb it, as it would the stand-in."""
    if STANDIN:
        lines = pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]
        rows = [line.split(None, 7) for line in lines]
        # Bit 16 of the flags is SO_ACCEPTCON.
        return any(len(row) == 8 and row[7] == str(path) and int(row[3], 16) & 0x10000 for row in rows)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


class Sockets:
    """A folder of sockets. A socket's path has to be short, so it is not in the test's folder."""

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="spile-vhost-"))
        self.control = self.folder / "control"

    def of(self, name, place):
        return self.folder / f"{name}-{place}"

    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)


class VhostServer(Server):
    """Serves `disks`, a path for each name, on `sockets`, with a control socket."""

    def __init__(self, folder, disks, sockets, takeover_from=None, options=None):
        self.disks = disks
        self.sockets = sockets
        self.takeover_from = takeover_from
        self.options = options or {}
        extra = ["--takeover"] if takeover_from else []
        super().__init__(folder, extra=extra, at=sockets.of(next(iter(disks)), PLACES[0]))

    def command(self, _disks, _address, extra):
        if STANDIN:
            return self.standin_command()
        command = [spile_binary(), "serve"]
        command += [f"{path},name={name},serial={serial(name)}{self.options.get(name, '')}" for name, path in self.disks.items()]
        for name, place in self.attachments():
            command += ["--vhost-user", f"{self.sockets.of(name, place)},export={name}"]
        return [*command, "--queues", str(QUEUES), "--control", str(self.sockets.control), *extra]

    def standin_command(self):
        monitor = f"socket,id=control,path={self.sockets.control},server=on,wait=off"
        command = ["qemu-storage-daemon", "--chardev", monitor, "--monitor", "chardev=control"]
        for name, path in self.disks.items():
            file = f"driver=file,node-name={name}-file,filename={path},discard=unmap"
            command += ["--blockdev", file]
            command += ["--blockdev", f"driver=raw,node-name={name},file={name}-file,discard=unmap"]
        for attachment in self.attachments():
            command += ["--export", json.dumps(self.standin_export(*attachment))]
        return command

    def standin_export(self, name, place):
        return {
            "type": "vhost-user-blk", "id": f"{name}-{place}", "node-name": name, "writable": True,
            "num-queues": QUEUES, "addr": {"type": "unix", "path": str(self.sockets.of(name, place))},
        }

    def attachments(self):
        return [(name, place) for name in self.disks for place in PLACES]

    def answers(self):
        """True when this server listens. After a takeover the old one listened there, too, so it must be gone."""
        old = self.takeover_from
        if old and old.ended is None:
            old.ended = old.process.poll()
            return False
        return all(listens(self.sockets.of(*attachment)) for attachment in self.attachments())

    def resize(self, name, size_bytes, used_place):
        """Grows a disk under the guest that uses it from `used_place`."""
        if STANDIN:
            self.standin_resize(name, size_bytes, used_place)
        else:
            spile("resize", self.sockets.control, size_bytes, "--name", name)

    def standin_resize(self, name, size_bytes, used_place):
        """Removes the exports that nobody uses while the disk grows: QEMU 10.0 breaks when it notifies those."""
        control = Qmp.connect(self.sockets.control)
        unused = [place for place in PLACES if place != used_place]
        for place in unused:
            control.execute("block-export-del", id=f"{name}-{place}")
            control.wait_event("BLOCK_EXPORT_DELETED", LIMIT_S, id=f"{name}-{place}")
        control.execute("block_resize", node_name=name, size=size_bytes)
        for place in unused:
            control.execute("block-export-add", **self.standin_export(name, place))
        control.close()

    def holdings(self):
        """Returns the number of open descriptors, and that of mappings of guests' memory."""
        process = pathlib.Path("/proc") / str(self.process.pid)
        maps = (process / "maps").read_text()
        return len(list((process / "fd").iterdir())), maps.count("/memfd:")


def serial(name):
    """Returns the serial number that the guest reads from the disk `name`."""
    return "vhost_user_blk" if STANDIN else f"SPILE-{name}"


def qemu_version():
    """Returns the three numbers of the installed QEMU's version."""
    version = re.search(r"version (\d+)\.(\d+)\.(\d+)", text(run("qemu-system-x86_64", "--version").stdout))
    return tuple(map(int, version.groups()))


def reconnecting():
    """Returns the option of QEMU that says how soon it connects again: in milliseconds from QEMU 9.2 on."""
    return "reconnect-ms=100" if qemu_version() >= (9, 2) else "reconnect=1"


class GuestCommands(Commands):
    """The second serial line, which sometimes loses bytes: each command is sent with its length in front."""

    # A command in a guest works on no more than some MiB.
    LIMIT_S = LIMIT_S

    def exchange(self, words, answer, limit_s):
        end = time.monotonic() + limit_s
        while True:
            left = end - time.monotonic()
            try:
                return super().exchange(f"{len(words)} {words}", answer, min(left, ASK_AGAIN_S))
            except AssertionError:
                if left <= ASK_AGAIN_S:
                    raise


class VhostMachine(Machine):
    """A guest with two processors, the disks `names` as vda, vdb, …, and a line for commands.

    With `incoming` it waits for a migration instead of booting. `more` are options of QEMU, `how` says how it is started.
    """

    def __init__(self, kernel, initramfs, folder, sockets, names, place, incoming=False, more=(), **how):
        self.sockets = sockets
        self.place = place
        ask, qmp = socket.socketpair(), socket.socketpair()
        options = self.options(names, ask[1].fileno(), qmp[1].fileno())
        options += ["-incoming", "defer"] if incoming else []
        options += more
        passed = (ask[1].fileno(), qmp[1].fileno())
        super().__init__(
            kernel, initramfs, folder / f"console-{place}.log", "serve", options, pass_fds=passed, **how,
        )
        ask[1].close()
        qmp[1].close()
        self.commands = GuestCommands(ask[0], folder / f"asked-{place}.log", "the guest")
        self.ask, self.ask_status = self.commands.ask, self.commands.ask_status
        self.wait_ready = self.commands.wait_ready
        self.qmp = self.monitor(qmp[0])

    def monitor(self, connected):
        """Connects to QMP. Raises an error with the output of QEMU when it did not start."""
        try:
            return Qmp(connected)
        except (AssertionError, OSError) as problem:
            raise AssertionError(f"{problem}; QEMU said: {text(self.kill())}")

    def options(self, names, ask, qmp):
        memory = "memory-backend-memfd,id=memory,size=384M,share=on"
        options = ["-machine", "pc,memory-backend=memory", "-object", memory, "-m", "384", "-smp", "2"]
        options += ["-chardev", f"socket,id=ask,fd={ask}", "-serial", "chardev:ask"]
        options += ["-chardev", f"socket,id=qmp,fd={qmp}", "-mon", "chardev=qmp,mode=control"]
        again = reconnecting()
        for slot, name in enumerate(names, 4):
            path = self.sockets.of(name, self.place)
            options += ["-chardev", f"socket,id={name},path={path},{again}"]
            device = f"vhost-user-blk-pci,id=disk-{name},chardev={name},num-queues={QUEUES},addr={slot:#x}"
            options += ["-device", device]
        return options

    def leave(self):
        """Ends the guest in order."""
        self.ask("leave")
        self.process.wait(BOOT_LIMIT_S)

    def done(self, device):
        """Reads and writes that `device` has completed."""
        fields = self.ask(f"cat /sys/block/{device}/stat").split()
        return int(fields[0]) + int(fields[4])

    def connections(self):
        """Returns the sockets that QEMU has open, each with a number that is never used again."""
        links = pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir()
        return {name for name in map(os.readlink, links) if name.startswith("socket:")}

    def close(self):
        """Ends it if it runs; may be called again."""
        super().close()
        self.qmp.close()
        self.commands.close()
