"""A virtual machine in software emulation, and the root file system that it starts from."""

import pathlib
import shutil
import subprocess

from emulated import Stream, busybox_root, copy_program, ext4_image
from support import need

INIT = pathlib.Path(__file__).with_name("init.sh")


def root_image(folder, path, size_bytes, programs=()):
    """Makes an ext4 file system with busybox, init.sh and `programs`."""
    top = folder / "root"
    busybox_root(top, ("data",), INIT)
    for program in programs:
        # A program looks for its libraries at the same places as on this machine.
        copy_program(shutil.which(program), top / "bin" / program, lambda library: top / str(library).lstrip("/"))
    return ext4_image(path, size_bytes, top)


class Machine:
    """A running guest whose first serial line is `console`."""

    def __init__(self, kernel, initramfs, log_path, phase, options, last=0, pass_fds=(), prefix=(), cwd=None):
        need("qemu-system-x86_64", "qemu-system-x86")
        # Emulation keeps its translation of code until it sees a write to where the code lay. What a
        # vhost-user server writes it does not see; so the guest shall clear each page before its use.
        # The kernel's look at its timer fails when this host is busy. What it says of a task that hangs is of no use without the stack.
        words = f"console=ttyS0 panic=-1 loglevel=7 no_timer_check init_on_alloc=1 spile.phase={phase} spile.last={last}"
        self.log = open(log_path, "ab")
        self.process = subprocess.Popen(
            [
                *prefix, "qemu-system-x86_64", "-accel", "tcg", "-nodefaults", "-no-user-config",
                "-display", "none", "-serial", "stdio", "-no-reboot",
                "-kernel", str(kernel.image), "-initrd", str(initramfs), "-append", words, *options,
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=pass_fds, cwd=cwd,
        )
        self.console = Stream(self.process.stdout.fileno(), self.log)

    def kill(self):
        """Kills QEMU; returns the output of the console that no caller has waited for."""
        self.process.kill()
        self.process.wait()
        return self.console.rest()

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()


class NbdMachine(Machine):
    """A guest whose root is the export of an NBD `server`."""

    def __init__(self, kernel, initramfs, server, phase, last=0):
        disk = (
            f"driver=nbd,node-name=disk,server.type=unix,server.path={server.socket},export=,"
            "reconnect-delay=60,discard=unmap"
        )
        options = ["-m", "256", "-blockdev", disk, "-device", "virtio-blk-pci,drive=disk"]
        super().__init__(kernel, initramfs, server.folder / f"console-{phase}.log", phase, options, last)

    def wait_for_round(self, least):
        """Waits until the guest has reported `least` rounds; returns the last one."""
        while True:
            round_number = int(self.console.wait_for(rb"SPILE SYNCED (\d+)\r?\n").group(1))
            if round_number >= least:
                return round_number

    def kill(self):
        """Kills QEMU; returns the last round that the guest has reported, 0 when the rest of the output has none."""
        told = [word.split()[0] for word in super().kill().split(b"SPILE SYNCED ")[1:] if b"\n" in word]
        return int(told[-1]) if told else 0
