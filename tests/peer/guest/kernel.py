"""A distribution's kernel, unpacked and not installed, and an initramfs that fits it.

The package is found by the name that always means the newest kernel; nothing is pinned. What was
fetched is kept in the target folder, so that only the first run needs the network.
"""

import fcntl
import lzma
import os
import pathlib
import re
import shutil
import subprocess
import unittest

from support import TARGET, need, run, text

CACHE = TARGET / "guest-cache"

# Names that depend on the newest kernel; the small ones for virtual machines first.
NAMES = ("linux-image-cloud-amd64", "linux-image-virtual", "linux-image-amd64")
# What the root file system needs; those built into the kernel drop out.
MODULES = ("virtio_pci", "virtio_blk", "ext4")


class Kernel:
    """An unpacked kernel: `image` to boot, and its modules."""

    def __init__(self, top):
        images = sorted((top / "boot").glob("vmlinuz-*"))
        folders = [*top.glob("lib/modules/*"), *top.glob("usr/lib/modules/*")]
        if not images or not folders:
            raise FileNotFoundError(f"no kernel or no modules in {top}")
        self.image = images[-1]
        self.modules = folders[-1]
        found = self.modules.rglob("*.ko*")
        self.files = {module_name(path): path for path in found}
        builtin = self.modules / "modules.builtin"
        self.builtin = {module_name(pathlib.Path(line)) for line in builtin.read_text().split()}

    def needed(self):
        """(name, bytes) of each module to load, in the order to load them."""
        ordered = {}
        for name in MODULES:
            self.collect(name, ordered)
        return list(ordered.items())

    def collect(self, name, ordered):
        if name in self.builtin or name in ordered:
            return
        if name not in self.files:
            raise FileNotFoundError(f"the kernel has no module {name}")
        code = unpacked(self.files[name])
        for other in depends(code):
            self.collect(other, ordered)
        ordered[name] = code


def module_name(path):
    return path.name.split(".ko")[0].replace("-", "_")


def unpacked(path):
    """A module's bytes, however the distribution packs them."""
    raw = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(raw)
    if path.suffix == ".zst":
        need("zstd")
        return run("zstd", "-dc", path).stdout
    return raw


def depends(code):
    """The names in the module's `depends=` entry."""
    found = re.search(rb"\0depends=([^\0]*)\0", code)
    names = found.group(1).decode().split(",") if found else []
    return [name.replace("-", "_") for name in names if name]


def kernel():
    """The cached kernel, fetched first when there is none; a skip when it cannot be had."""
    if os.uname().machine != "x86_64":
        raise unittest.SkipTest("the guest test knows only x86_64 kernels")
    top = CACHE / "root"
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    # Test files run at the same time, each in a process of its own; the first one fetches.
    with open(CACHE.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (CACHE / "complete").exists():
            need("apt-get", "apt")
            need("dpkg-deb", "dpkg")
            fetch(top)
            (CACHE / "complete").touch()
    return Kernel(top)


def fetch(top):
    debs = CACHE / "debs"
    shutil.rmtree(CACHE, ignore_errors=True)
    debs.mkdir(parents=True)
    packages = next(filter(None, map(packages_of, NAMES)), None)
    if packages is None:
        raise unittest.SkipTest(f"apt knows none of {', '.join(NAMES)} (apt-get update?)")
    try:
        run("apt-get", "download", "-q", *packages, cwd=debs, limit_s=600)
    except (AssertionError, subprocess.TimeoutExpired) as problem:
        reason = str(problem).strip().splitlines()[-1]
        raise unittest.SkipTest(f"{' '.join(packages)} cannot be downloaded: {reason}")
    for deb in debs.glob("*.deb"):
        run("dpkg-deb", "-x", deb, top)
    shutil.rmtree(debs)


def packages_of(name):
    """The packages that hold the kernel which `name` depends on, by name."""
    command = ["apt-cache", "depends", "--important", "--recurse", name]
    done = run(*command, ok=None, env={"LC_ALL": "C"})
    found = re.findall(r"Depends: <?(linux-(?:image|modules)-\d[^\s>]*)", text(done.stdout))
    return sorted({package for package in found if "-extra-" not in package})


def initramfs(path, for_kernel):
    """Writes an initramfs: busybox, the modules, and a script that mounts /dev/vda and goes on."""
    modules = for_kernel.needed()
    loads = "".join(f"insmod /modules/{name}.ko\n" for name, _ in modules)
    entries = [(folder, 0o040755, b"") for folder in ("bin", "dev", "proc", "sys", "mnt", "modules")]
    entries.append(("bin/busybox", 0o100755, busybox()))
    entries += [(f"modules/{name}.ko", 0o100644, code) for name, code in modules]
    entries.append(("init", 0o100755, INIT.replace("LOADS", loads).encode()))
    path.write_bytes(archive(entries))
    return path


INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
LOADS
tries=0
while [ ! -b /dev/vda ] && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
mount -t ext4 /dev/vda /mnt || { echo 'SPILE BROKEN the root does not mount'; reboot -f; }
mount --move /dev /mnt/dev
mount --move /proc /mnt/proc
exec switch_root /mnt /sbin/init
"""


def busybox():
    """The static busybox, or a skip."""
    need("busybox", "busybox-static")
    return pathlib.Path(shutil.which("busybox")).resolve().read_bytes()


def archive(entries):
    """A cpio archive in the newc format, which is what a kernel reads; needs no privilege."""
    out = bytearray()
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        links = 2 if mode & 0o040000 else 1
        fields = (number, mode, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        out += b"070701" + b"".join(b"%08x" % field for field in fields)
        out += name.encode() + b"\0"
        out += bytes(-len(out) % 4)
        out += data
        out += bytes(-len(out) % 4)
    return bytes(out)
