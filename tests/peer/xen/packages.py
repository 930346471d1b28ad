"""Xen and a kernel that can be its first domain, from the distribution's packages.

Nothing is pinned: the newest kernel that apt knows is taken, from a suite of backports where the
machine has one, and Xen in the version that apt would install.
"""

import functools
import re
import unittest

from emulated import Kernel, apt_cache, unpack_packages
from support import TARGET, run

CACHE = TARGET / "xen-cache"

# Names that depend on the newest kernel, of the kinds that can be a first domain: kernels made for
# virtual machines leave Xen's own drivers out.
KERNELS = ("linux-image-amd64", "linux-image-generic")
# Depends on the hypervisor and on its tools, of whatever version there is.
XEN = "xen-system-amd64"

# What Xen's tools need and load first; a module that is built in drops out.
STORAGE = ("virtio_pci", "virtio_blk", "virtio_console", "crc32c_generic", "ext4")
DEVICES = ("xenfs", "xen_privcmd", "xen_evtchn", "xen_gntdev", "xen_gntalloc")
# Modules that are loaded only by the tests that need them.
SPARE = ("xen_blkfront", "xen_blkback", "loop", "veth")


class Packages:
    """The unpacked packages; `top` is the folder with their files."""

    def __init__(self, top):
        self.top = top
        self.kernel = Kernel(top)
        self.hypervisor = newest(top.glob("boot/xen-*.gz"), top)
        self.tools = newest(top.glob("usr/lib/xen-*/bin/xl"), top).parent
        found = [*top.glob("lib/*/*.so.*"), *top.glob("usr/lib/**/*.so.*")]
        self.libraries = sorted({path.parent for path in found})


def newest(found, top):
    found = sorted(found)
    if not found:
        raise FileNotFoundError(f"the hypervisor or its tools are not in {top}")
    return found[-1]


def packages():
    """The unpacked packages, fetched first when they are not there; a skip when they cannot be had.

    To be called through `locked`.
    """
    return Packages(unpack_packages(CACHE, lambda: [*kernel_packages(), *xen_packages()]))


def kernel_packages():
    """The packages of the newest kernel that apt knows in any suite."""
    for name in KERNELS:
        versions = re.findall(rf"^ *{name} \| *(\S+) \|.*Packages", apt_cache("madison", name), re.M)
        if versions:
            return packages_of(name, max(versions, key=functools.cmp_to_key(compare)))
    raise unittest.SkipTest(f"apt knows none of {', '.join(KERNELS)} (apt-get update?)")


def packages_of(name, version):
    """`PACKAGE=VERSION` of the packages with the kernel that this version of `name` depends on."""
    shown = apt_cache("show", f"{name}={version}")
    image = re.search(r"^Depends:.*?(linux-image-\d[^\s,]*)(?: \(= ([^)]*)\))?", shown, re.M)
    if image is None:
        raise unittest.SkipTest(f"{name} {version} depends on no kernel")
    exact = f"{image[1]}={image[2]}" if image[2] else image[1]
    others = re.findall(r"linux-modules-\d[^\s,|]*", apt_cache("show", exact))
    # Where the modules have packages of their own, Xen's are among the less common ones.
    more = {other.replace("linux-modules-", "linux-modules-extra-") for other in others}
    return [exact, *sorted({*others, *more})]


def compare(one, other):
    """Compares two versions as dpkg does."""
    if one == other:
        return 0
    return 1 if run("dpkg", "--compare-versions", one, "gt", other, ok=None).returncode == 0 else -1


def xen_packages():
    """The hypervisor, its tools, and the libraries that they name."""
    listed = apt_cache("depends", "--important", "--recurse", XEN).splitlines()
    ours = sorted({name for name in listed if re.match(r"(xen-(hypervisor|utils)|xenstore-utils|libxen)", name)})
    if not ours:
        raise unittest.SkipTest(f"apt knows no {XEN} (apt-get update?)")
    named = re.findall(r"^ *Depends: (lib[^\s:]+)$", apt_cache("depends", "--important", *ours), re.M)
    # The C library has to be the one that this machine's own programs run with.
    return sorted({*ours, *named} - {"libc6"})
