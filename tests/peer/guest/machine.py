"""A virtual machine in software emulation whose root is an NBD export, and the root itself."""

import os
import shutil
import subprocess

from kernel import busybox
from support import need, read_until, run

# Software emulation on a busy machine is slow; a boot takes some ten seconds on a quiet one.
BOOT_LIMIT_S = 240

# Runs as the guest's first process. `write`: rounds of files, their sums and a sync, each told on
# the console; between two rounds something that no sync covers. Nothing is removed or shortened,
# so that the file system has no orphans to tidy and a check after the journal's replay is exact.
# `verify`: every round up to the last that was told has to be there, whole.
INIT = """#!/bin/sh
export PATH=/bin
phase= last=0
for word in $(cat /proc/cmdline); do
  case "$word" in
    spile.phase=*) phase=${word#spile.phase=} ;;
    spile.last=*) last=${word#spile.last=} ;;
  esac
done

write() {
  round=0
  while [ $round -lt 60 ]; do
    round=$((round + 1))
    folder=/data/$round
    mkdir -p $folder
    for size in 1 4 7 10 13 16 19 22; do
      dd if=/dev/urandom of=$folder/$size bs=13000 count=$size 2>/dev/null
    done
    (cd $folder && sha256sum * >sums.new && mv sums.new sums)
    sync
    echo "SPILE SYNCED $round"
    dd if=/dev/urandom of=/data/unsynced-$round bs=65536 count=8 2>/dev/null
  done
  while :; do
    dd if=/dev/urandom of=/data/unsynced bs=65536 count=8 conv=notrunc 2>/dev/null
  done
}

verify() {
  good=0
  while [ $good -lt $last ]; do
    next=$((good + 1))
    if ! (cd /data/$next && sha256sum -c sums >/dev/null 2>&1); then
      echo "SPILE BROKEN round $next"
      return
    fi
    good=$next
  done
  echo "SPILE VERIFIED $good"
}

mount -o remount,rw /
mkdir -p /data
echo "SPILE BOOTED $phase"
case "$phase" in
  write) write ;;
  verify) verify ;;
esac
sync
mount -o remount,ro /
echo "SPILE DONE"
reboot -f
"""


def root_image(folder, path, size_bytes):
    """Makes an ext4 file system with the script above in it, as an ordinary user."""
    need("mke2fs", "e2fsprogs")
    top = folder / "root"
    for name in ("bin", "sbin", "dev", "proc", "sys", "data"):
        (top / name).mkdir(parents=True)
    (top / "bin/busybox").write_bytes(busybox())
    os.chmod(top / "bin/busybox", 0o755)
    for name in ("sh", "cat", "mkdir", "dd", "sha256sum", "mv", "sync", "mount", "reboot", "echo"):
        (top / "bin" / name).symlink_to("busybox")
    (top / "sbin/init").write_text(INIT)
    os.chmod(top / "sbin/init", 0o755)
    with open(path, "wb") as file:
        file.truncate(size_bytes)
    run("mke2fs", "-q", "-F", "-t", "ext4", "-E", "root_owner=0:0", "-d", top, path)
    shutil.rmtree(top)
    return path


class Machine:
    """A running guest. `server` exports its disk; `wait_for` reads its console."""

    def __init__(self, kernel, initramfs, server, phase, last=0):
        need("qemu-system-x86_64", "qemu-system-x86")
        options = f"console=ttyS0 panic=-1 quiet spile.phase={phase} spile.last={last}"
        disk = (
            f"driver=nbd,node-name=disk,server.type=unix,server.path={server.socket},export=,"
            "reconnect-delay=60,discard=unmap"
        )
        self.log = open(server.folder / f"console-{phase}.log", "ab")
        self.process = subprocess.Popen(
            [
                "qemu-system-x86_64", "-accel", "tcg", "-m", "256", "-nodefaults", "-no-user-config",
                "-display", "none", "-serial", "stdio", "-no-reboot",
                "-kernel", str(kernel.image), "-initrd", str(initramfs), "-append", options,
                "-blockdev", disk, "-device", "virtio-blk-pci,drive=disk",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )

    def wait_for(self, pattern, limit_s=BOOT_LIMIT_S):
        """The first match on the console from here on."""
        match = read_until(self.process.stdout, pattern, limit_s, self.log)
        if match is None:
            self.log.flush()
            with open(self.log.name, "rb") as log:
                raise AssertionError(f"no {pattern} on the console:\n{log.read()[-3000:].decode('utf-8', 'replace')}")
        return match

    def wait_for_round(self, least):
        """Waits until `least` rounds are told; the last one that was."""
        while True:
            round_number = int(self.wait_for(rb"SPILE SYNCED (\d+)\r?\n").group(1))
            if round_number >= least:
                return round_number

    def kill(self):
        """SIGKILL; the last round told before the end, 0 when none was in what is left to read."""
        self.process.kill()
        rest = self.process.stdout.read()
        self.log.write(rest)
        self.process.wait()
        told = [word.split()[0] for word in rest.split(b"SPILE SYNCED ")[1:] if b"\n" in word]
        return int(told[-1]) if told else 0

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()
