"""A host with Xen: QEMU in software emulation, the first domain, and a line on which it takes commands."""

import ctypes
import os
import pathlib
import shutil
import signal
import socket
import subprocess

from emulated import BOOT_LIMIT_S, Commands, ext4_image
from parts import dom0_initramfs, domu_initramfs
from support import MIB, need, spile_binary, text

DATA_BYTES = 2048 * MIB
XEN_WORDS = (
    "console=com1 com1=115200,8n1 dom0_mem=640M,max:640M"
    # Without it programs in dom0 crash now and then: lazily restored registers and emulation do not agree.
    " spec-ctrl=eager-fpu"
)
DOM0_WORDS = "console=hvc0 panic=-1 loglevel=4"


class Host:
    """A running host. `images` are files that dom0 finds under /data, where it can write."""

    # How QEMU emulates processors, and how many.
    EMULATION = ("-accel", "tcg,thread=multi")
    PROCESSORS = 2

    def __init__(self, parts, folder, images):
        need("qemu-system-x86_64", "qemu-system-x86")
        self.folder = folder
        for name in ("hypervisor", "vmlinux", "tools"):
            (folder / name).symlink_to(getattr(parts, name))
        dom0_initramfs(folder / "dom0.cpio", parts.kernel)
        self.make_data(parts, images)
        near, far = socket.socketpair()
        # To a file and not to a pipe: a pipe that nobody reads would stop the host.
        self.console = open(folder / "console.log", "ab")
        # In the folder, so that no name here holds a comma or a blank, which have a meaning to QEMU.
        self.process = subprocess.Popen(
            self.command(far.fileno()), cwd=folder, stdin=subprocess.DEVNULL, stdout=self.console,
            stderr=subprocess.STDOUT, pass_fds=[far.fileno()], preexec_fn=end_with_parent,
        )
        far.close()
        self.commands = Commands(near, folder / "asked.log", "dom0")
        self.ask, self.ask_status = self.commands.ask, self.commands.ask_status

    def make_data(self, parts, images):
        top = self.folder / "top"
        (top / "bin").mkdir(parents=True)
        # The libraries of this program are on the tools' disk already.
        shutil.copy(spile_binary(), top / "bin/spile")
        domu_initramfs(top / "domu.cpio", parts.kernel)
        for path in images:
            os.link(path, top / path.name)
        ext4_image(self.folder / "data", DATA_BYTES, top)

    def wait_ready(self):
        """Waits until dom0 has started Xen's tool stack and takes commands."""
        try:
            self.commands.wait_ready()
        except AssertionError as problem:
            raise AssertionError(f"dom0 did not come up: {problem}\n{self.said()}")

    def said(self):
        """Returns the last output of Xen, dom0 and QEMU on the console."""
        return text(pathlib.Path(self.console.name).read_bytes()[-1500:])

    def leave(self):
        """Ends the host in order, so that its disk can be read."""
        self.ask("leave")
        self.process.wait(BOOT_LIMIT_S)
        if "SPILE DONE" not in self.said():
            raise AssertionError(f"dom0 did not end in order:\n{self.said()}")

    def close(self):
        """Ends it if it runs; may be called again."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.commands.close()
        self.console.close()

    def command(self, line):
        """Returns the arguments of QEMU: an emulated processor for Xen, two disks, and a port for commands."""
        words = ["qemu-system-x86_64", *self.EMULATION, "-machine", "q35", "-cpu", "qemu64,+rdrand"]
        words += ["-smp", f"{self.PROCESSORS}", "-m", "1G", "-nodefaults", "-no-user-config", "-display", "none"]
        words += ["-no-reboot", "-serial", "stdio", "-kernel", "hypervisor"]
        words += ["-append", f"{XEN_WORDS} dom0_max_vcpus={self.PROCESSORS}"]
        # A comma ends the arguments of a module.
        words += ["-initrd", f"vmlinux {DOM0_WORDS.replace(',', ',,')},dom0.cpio"]
        for name, how in (("tools", "read-only=on"), ("data", "discard=unmap,cache.no-flush=on")):
            words += ["-blockdev", f"driver=raw,node-name={name},file.driver=file,file.filename={name},{how}"]
            words += ["-device", f"virtio-blk-pci,drive={name}"]
        words += ["-device", "virtio-serial-pci", "-chardev", f"socket,id=line,fd={line}"]
        return [*words, "-device", "virtserialport,chardev=line,name=line"]


def end_with_parent():
    """A test file that takes too long is killed; what it has started ends with it (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
