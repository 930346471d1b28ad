"""A virtual machine in software emulation, and the root file system that it starts from."""

import os
import pathlib
import re
import select
import shutil
import subprocess
import time

from kernel import busybox
from support import need, run, text

# Software emulation on a busy machine is slow; a boot takes some ten seconds on a quiet one.
BOOT_LIMIT_S = 240

INIT = pathlib.Path(__file__).with_name("init.sh")


def root_image(folder, path, size_bytes, programs=()):
    """Makes an ext4 file system with busybox, init.sh and `programs`, as an ordinary user."""
    need("mke2fs", "e2fsprogs")
    top = folder / "root"
    for name in ("bin", "sbin", "dev", "proc", "sys", "data", "tmp"):
        (top / name).mkdir(parents=True)
    (top / "bin/busybox").write_bytes(busybox())
    os.chmod(top / "bin/busybox", 0o755)
    for name in text(run("busybox", "--list").stdout).split():
        if name != "busybox":
            (top / "bin" / name).symlink_to("busybox")
    shutil.copy(INIT, top / "sbin/init")
    os.chmod(top / "sbin/init", 0o755)
    for program in programs:
        copy_program(program, top)
    with open(path, "wb") as file:
        file.truncate(size_bytes)
    run("mke2fs", "-q", "-F", "-t", "ext4", "-E", "root_owner=0:0", "-d", top, path)
    shutil.rmtree(top)
    return path


def copy_program(name, top):
    """Copies a program of this machine into `top`/bin, and its libraries to where it looks for them."""
    found = shutil.which(name)
    shutil.copy(found, top / "bin" / name)
    libraries = re.findall(r"(/\S+) \(0x", text(run("ldd", found).stdout))
    for library in libraries:
        target = top / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)


class Stream:
    """What a guest says on one line, kept until somebody waits for it, and all of it in a log."""

    def __init__(self, number, log):
        self.number = number
        self.log = log
        self.held = b""

    def wait_for(self, pattern, limit_s=BOOT_LIMIT_S):
        """The next match; what comes before it is passed over."""
        end = time.monotonic() + limit_s
        while not (match := re.search(pattern, self.held)):
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.number], [], [], left)[0]:
                raise AssertionError(f"no {pattern} in {limit_s} s:\n{self.tail()}")
            if not self.read():
                raise AssertionError(f"the end came before {pattern}:\n{self.tail()}")
        self.held = self.held[match.end():]
        return match

    def read(self):
        """Reads once; False at the end."""
        try:
            chunk = os.read(self.number, 65536)
        except ConnectionResetError:
            chunk = b""
        self.log.write(chunk)
        self.log.flush()
        self.held += chunk
        return chunk != b""

    def rest(self):
        """All that is left up to the end, which has to be near."""
        while self.read():
            pass
        held, self.held = self.held, b""
        return held

    def drain(self):
        """The end of what there is by now."""
        while select.select([self.number], [], [], 0)[0] and self.read():
            pass
        return self.tail()

    def tail(self):
        return text(pathlib.Path(self.log.name).read_bytes()[-1500:])


class Machine:
    """A running guest whose first serial line is `console`."""

    def __init__(self, kernel, initramfs, log_path, phase, options, last=0, pass_fds=()):
        need("qemu-system-x86_64", "qemu-system-x86")
        # Emulation keeps its translation of code until it sees a write to where the code lay. What a
        # vhost-user server writes it does not see; so the guest shall clear each page before its use.
        words = f"console=ttyS0 panic=-1 quiet init_on_alloc=1 spile.phase={phase} spile.last={last}"
        self.log = open(log_path, "ab")
        self.process = subprocess.Popen(
            [
                "qemu-system-x86_64", "-accel", "tcg", "-nodefaults", "-no-user-config",
                "-display", "none", "-serial", "stdio", "-no-reboot",
                "-kernel", str(kernel.image), "-initrd", str(initramfs), "-append", words, *options,
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=pass_fds,
        )
        self.console = Stream(self.process.stdout.fileno(), self.log)

    def kill(self):
        """SIGKILL; what the console held and nobody had waited for."""
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
        """Waits until `least` rounds are told; the last one that was."""
        while True:
            round_number = int(self.console.wait_for(rb"SPILE SYNCED (\d+)\r?\n").group(1))
            if round_number >= least:
                return round_number

    def kill(self):
        """SIGKILL; the last round told before the end, 0 when none was in what is left to read."""
        told = [word.split()[0] for word in super().kill().split(b"SPILE SYNCED ")[1:] if b"\n" in word]
        return int(told[-1]) if told else 0
