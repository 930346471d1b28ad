"""The guest's kernel, and an initramfs that fits it.

The package is found by the name that always means the newest kernel; nothing is pinned.
"""

import re
import unittest

from emulated import Kernel, apt_cache, locked, unpack_packages, write_initramfs
from support import TARGET

CACHE = TARGET / "guest-cache"

# Names that depend on the newest kernel; the small ones for virtual machines first.
NAMES = ("linux-image-cloud-amd64", "linux-image-virtual", "linux-image-amd64")
# Modules that the root file system needs.
MODULES = ("virtio_pci", "virtio_blk", "ext4")


def kernel():
    """Returns the cached kernel. Downloads it when there is none; skips the test when that is not possible."""
    return Kernel(locked(CACHE, lambda: unpack_packages(CACHE, wanted)))


def wanted():
    """The packages of the first kernel that apt knows, or a skip."""
    packages = next(filter(None, map(packages_of, NAMES)), None)
    if packages is None:
        raise unittest.SkipTest(f"apt knows none of {', '.join(NAMES)} (apt-get update?)")
    return packages


def packages_of(name):
    """The packages that hold the kernel which `name` depends on, by name."""
    listed = apt_cache("depends", "--important", "--recurse", name)
    found = re.findall(r"Depends: <?(linux-(?:image|modules)-\d[^\s>]*)", listed)
    return sorted({package for package in found if "-extra-" not in package})


def initramfs(path, for_kernel):
    """Writes an initramfs whose script loads the modules, mounts /dev/vda and goes on from there."""
    modules = for_kernel.with_dependencies(*MODULES)
    loads = "".join(f"insmod /modules/{name}.ko\n" for name, _ in modules)
    init = ("init", 0o100755, INIT.replace("LOADS", loads).encode())
    return write_initramfs(path, ("bin", "dev", "proc", "sys", "mnt"), modules, [init])


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
