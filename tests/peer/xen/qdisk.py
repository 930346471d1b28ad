"""QEMU's own backend (qdisk) for dom0: its program and libraries, on an image of their own.

Only the comparison wants it, so the tools' disk of the tests does not carry it, and only the first
comparison downloads it. Nothing is installed.
"""

import functools
import hashlib
import pathlib
import re
import shutil
import unittest

from emulated import apt_cache, ext4_image, locked, unpack_packages
from packages import compare
from parts import copy_program
from support import MIB, TARGET, need, run, text

CACHE = TARGET / "xen-qdisk-cache"
PACKAGE = "qemu-system-xen"
IMAGE_BYTES = 256 * MIB
# Where dom0 mounts the image, and which program it starts there.
PLACE = "/qdisk"
PROGRAM = f"{PLACE}/bin/qemu"


def qdisk_image():
    """Returns the image. Makes it when it is missing; skips with a reason when that is not possible."""
    for program, package in (("apt-get", "apt"), ("dpkg-deb", "dpkg"), ("mke2fs", "e2fsprogs"), ("ldd", "libc-bin")):
        need(program, package)
    return locked(CACHE, make)


def make():
    # A change of this file makes it again.
    name = "qdisk-" + hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:12]
    made = CACHE / f"{name}.img"
    if not made.exists():
        shutil.rmtree(CACHE, ignore_errors=True)
        top = unpack_packages(CACHE, wanted)
        put_together(top, CACHE / "new.img")
        shutil.rmtree(top)
        (CACHE / "new.img").rename(made)
    return made


def wanted():
    """`PACKAGE=VERSION` of all that would have to be installed for the newest version that fits this machine."""
    listed = re.findall(rf"^ *{PACKAGE} \| *(\S+) \|.*Packages", apt_cache("madison", PACKAGE), re.M)
    for version in sorted(set(listed), key=functools.cmp_to_key(compare), reverse=True):
        words = ("-s", "install", "--no-install-recommends", "--no-remove", f"{PACKAGE}={version}")
        done = run("apt-get", *words, ok=None, env={"LC_ALL": "C"})
        # A line for each package: `Inst NAME [OLD] (NEW SUITE …)`.
        found = re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+) ", text(done.stdout), re.M)
        if done.returncode == 0 and found:
            return [f"{name}={version}" for name, version in found]
    raise unittest.SkipTest(f"apt has no {PACKAGE} that fits this machine (apt-get update?)")


def put_together(top, path):
    """The image: /bin/qemu, and its libraries in /lib."""
    programs = sorted(top.glob("usr/libexec/xen-qemu-system-*")) or sorted(top.glob("usr/lib/xen*/bin/qemu-system-*"))
    if not programs:
        raise unittest.SkipTest(f"{PACKAGE} holds no program where one was looked for")
    folders = sorted({found.parent for found in top.glob("usr/lib/**/*.so.*")})
    inside = path.with_suffix(".top")
    copy_program(programs[0], inside / "bin/qemu", inside, folders)
    ext4_image(path, IMAGE_BYTES, inside)
