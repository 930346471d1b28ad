"""The parts of a machine with Xen: hypervisor, kernel, the tools' disk, initramfs."""

import gzip
import hashlib
import lzma
import os
import pathlib
import shutil
import struct
import zlib

import emulated
from emulated import ext4_image, locked, write_initramfs
from packages import CACHE, DEVICES, SPARE, STORAGE, packages
from support import MIB, need, run

HERE = pathlib.Path(__file__).parent
TOOLS_BYTES = 512 * MIB
# Programs of Xen that dom0 runs; xl starts the last of them.
XEN_PROGRAMS = ("xl", "xenstored", "xenconsoled", "xenconsole", "xen-init-dom0", "libxl-save-helper")
# Programs of this machine, each with its package.
HOST_PROGRAMS = (
    ("fio", "fio"), ("mke2fs", "e2fsprogs"), ("e2fsck", "e2fsprogs"), ("resize2fs", "e2fsprogs"), ("ip", "iproute2"), ("jq", "jq"),
)
# A folder in which the loader looks without a cache of libraries.
LIBRARIES = "lib/x86_64-linux-gnu"


class Parts:
    """`hypervisor`, `vmlinux` and `tools` (an ext4 image to be read only) are files; `kernel` has the modules."""

    def __init__(self, folder, kernel):
        self.hypervisor = folder / "xen"
        self.vmlinux = folder / "vmlinux"
        self.tools = folder / "tools.img"
        self.kernel = kernel


def parts():
    """Returns the parts that change only with the packages. Makes them when they are missing."""
    for program, package in (("mke2fs", "e2fsprogs"), ("ldd", "libc-bin"), *HOST_PROGRAMS):
        need(program, package)
    return locked(CACHE, make_parts)


def make_parts():
    have = packages()
    # A change of this file makes them again.
    name = "parts-" + hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:12]
    folder = CACHE / name
    if not folder.exists():
        new = CACHE / "parts.new"
        for old in CACHE.glob("parts*"):
            shutil.rmtree(old)
        new.mkdir()
        make_into(new, have)
        new.rename(folder)
    return Parts(folder, have.kernel)


def make_into(folder, have):
    made = Parts(folder, have.kernel)
    made.hypervisor.write_bytes(gzip.decompress(have.hypervisor.read_bytes()))
    made.vmlinux.write_bytes(vmlinux(have.kernel.image))
    top = folder / "tools"
    top.mkdir()
    (top / "boot").mkdir()
    # For xl, which starts guests of paravirtual kind from it.
    os.link(made.vmlinux, top / "boot/vmlinux")
    copy_xen(have, top)
    for program, _ in HOST_PROGRAMS:
        found = pathlib.Path(shutil.which(program))
        copy_program(found, top / "bin" / program, top)
    copy_library("libgcc_s.so.1", top)
    ext4_image(made.tools, TOOLS_BYTES, top)


def copy_xen(have, top):
    """Xen's programs, where they look for each other; those for the shell are in /bin."""
    inside = have.tools.relative_to(have.top)
    for program in XEN_PROGRAMS:
        copy_program(have.tools / program, top / inside / program, top, have.libraries)
        link(top / "bin" / program, f"../{inside}/{program}")
    for found in sorted(have.top.glob("usr/*bin/xenstore-*")):
        # The package has a wrapper that chooses between versions. There is one version here, so a link is enough.
        if not found.is_symlink():
            copy_program(found, top / "bin" / found.name, top, have.libraries)


def link(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def copy_program(source, target, top, folders=()):
    """Copies a program, and its libraries to where the loader looks; `folders` hold some of them."""

    def place_of(library):
        is_loader = library.name.startswith("ld-linux")
        return top / ("lib64" if is_loader else LIBRARIES) / library.name

    emulated.copy_program(source, target, place_of, folders)


def copy_library(name, top):
    """A library that the C library opens by its name when a thread is cancelled, so that ldd does not list it."""
    found = next(filter(pathlib.Path.exists, (pathlib.Path(up) / LIBRARIES / name for up in ("/", "/usr"))), None)
    if found is None:
        raise FileNotFoundError(f"no {name} on this machine")
    shutil.copy(found, top / LIBRARIES / name)


def vmlinux(bzimage):
    """The ELF kernel inside a bzImage: Xen would unpack it too, but slowly, in emulation."""
    raw = bzimage.read_bytes()
    if raw[0x202:0x206] != b"HdrS":
        raise ValueError(f"{bzimage} has no boot header")
    # Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length.
    start = ((raw[0x1F1] or 4) + 1) * 512
    offset, length = struct.unpack_from("<II", raw, 0x248)
    elf = decompressed(raw[start + offset:start + offset + length])
    if elf[:4] != b"\x7fELF":
        raise ValueError(f"{bzimage} does not hold an ELF kernel")
    return elf


def decompressed(payload):
    """Unpacks a payload, which ends with its unpacked length in four bytes of no packer's format."""
    if payload.startswith(b"\x28\xb5\x2f\xfd"):
        need("zstd")
        return run("zstd", "-dc", stdin=payload[:-4]).stdout
    if payload.startswith(b"\x02\x21\x4c\x18"):
        need("lz4")
        return run("lz4", "-dc", stdin=payload[:-4]).stdout
    if payload.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor().decompress(payload)
    return zlib.decompressobj(wbits=31).decompress(payload)


def dom0_initramfs(path, kernel):
    """Busybox, the modules to load and those at hand, and dom0.sh; all else is on the tools' disk."""
    folders = ("bin", "sbin", "dev", "proc", "sys", "tmp", "run", "mnt", "tools", "data", "lib", "var", "etc")
    modules = kernel.with_dependencies(*STORAGE, *DEVICES)
    spare = [item for item in kernel.with_dependencies(*SPARE) if item not in modules]
    order = "".join(f"{name}\n" for name, _ in modules)
    files = [
        ("modules/order", 0o100644, order.encode()),
        ("bin/block-spile", 0o100755, (HERE / "block-spile.sh").read_bytes()),
        ("init", 0o100755, (HERE / "dom0.sh").read_bytes()),
        *links(("lib64", "tools/lib64"), (LIBRARIES, f"/tools/{LIBRARIES}"), ("usr", "tools/usr")),
        # xl reads the first file. The kernel runs modprobe for modules that are missing.
        ("etc/xen/xl.conf", 0o100644, b""),
        *links(("sbin/modprobe", "../bin/busybox"), ("var/run", "/run")),
    ]
    write_initramfs(path, (*folders, "etc/xen"), [*modules, *spare], files)


def domu_initramfs(path, kernel):
    """Busybox, blkfront, ext4, and domu.sh, which does all that a domU does."""
    modules = kernel.with_dependencies("xen_blkfront", "crc32c_generic", "ext4")
    order = "".join(f"{name}\n" for name, _ in modules)
    files = [
        ("modules/order", 0o100644, order.encode()),
        ("init", 0o100755, (HERE / "domu.sh").read_bytes()),
    ]
    write_initramfs(path, ("bin", "dev", "proc", "sys", "tmp", "mnt"), modules, files)


def links(*pairs):
    return [(name, 0o120777, target.encode()) for name, target in pairs]
