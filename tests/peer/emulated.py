"""Parts of emulated machines that the tests with KVM guests (`guest`) and with Xen (`xen`) share.

Kernels and other programs come from the distribution's packages, unpacked and not installed. What was
fetched is kept in a folder below the target folder, so that only the first run needs the network.
"""

import fcntl
import lzma
import os
import pathlib
import re
import select
import shutil
import subprocess
import time
import unittest

from support import need, run, text

# What takes longer hangs. On a quiet machine a boot takes ten to twenty seconds.
BOOT_LIMIT_S = 1200
# A limit for an answer of a mirror that is slow but alive.
FETCH_LIMIT_S = 900


def locked(cache, what):
    """Runs `what` while no other process uses the folder `cache`: test files run at the same time."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with open(cache.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return what()


def unpack_packages(cache, wanted):
    """Downloads the packages that `wanted` names and unpacks them; the folder they are in.

    Downloads nothing when that was done before. To be called through `locked`.
    """
    if os.uname().machine != "x86_64":
        raise unittest.SkipTest("these tests know only the kernels of x86_64")
    top = cache / "root"
    if (cache / "complete").exists():
        return top
    need("apt-get", "apt")
    need("dpkg-deb", "dpkg")
    debs = cache / "debs"
    shutil.rmtree(cache, ignore_errors=True)
    debs.mkdir(parents=True)
    names = wanted()
    try:
        run("apt-get", "download", "-q", *names, cwd=debs, limit_s=FETCH_LIMIT_S)
    except (AssertionError, subprocess.TimeoutExpired) as problem:
        reason = str(problem).strip().splitlines()[-1]
        raise unittest.SkipTest(f"{' '.join(names)} cannot be downloaded: {reason}")
    for deb in debs.glob("*.deb"):
        run("dpkg-deb", "-x", deb, top)
    shutil.rmtree(debs)
    (cache / "complete").touch()
    return top


def apt_cache(*words):
    return text(run("apt-cache", *words, ok=None, env={"LC_ALL": "C"}).stdout)


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

    def with_dependencies(self, *names):
        """(name, bytes) of each module, in the order to load them. Built-in modules are left out."""
        ordered = {}
        for name in names:
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


def busybox():
    """The static busybox, or a skip."""
    need("busybox", "busybox-static")
    return pathlib.Path(shutil.which("busybox")).resolve().read_bytes()


def write_initramfs(path, folders, modules, files):
    """Writes an initramfs: busybox, the modules, their names in the order to load them, and `files`.

    `files` are (name, mode, bytes) each; one of them has to be `init`. `modules` are as `with_dependencies` gives them.
    """
    entries = [(folder, 0o040755, b"") for folder in (*folders, "modules")]
    entries.append(("bin/busybox", 0o100755, busybox()))
    entries += [(f"modules/{name}.ko", 0o100644, code) for name, code in modules]
    path.write_bytes(archive([*entries, *files]))
    return path


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


def busybox_root(top, folders, init):
    """Fills the folder `top` with a root: busybox under all its names, and the script `init` as the first process."""
    for name in ("bin", "sbin", "dev", "proc", "sys", "tmp", *folders):
        (top / name).mkdir(parents=True)
    (top / "bin/busybox").write_bytes(busybox())
    os.chmod(top / "bin/busybox", 0o755)
    for name in text(run("busybox", "--list").stdout).split():
        if name != "busybox":
            (top / "bin" / name).symlink_to("busybox")
    shutil.copy(init, top / "sbin/init")
    os.chmod(top / "sbin/init", 0o755)


def copy_program(source, target, place_of, folders=()):
    """Copies a program, and each of its libraries to `place_of(library)`; `folders` hold some of these."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
    paths = ":".join(str(folder) for folder in folders)
    listed = text(run("ldd", source, env={"LD_LIBRARY_PATH": paths} if paths else None).stdout)
    if missing := re.findall(r"(\S+) => not found", listed):
        raise FileNotFoundError(f"{source} needs {', '.join(missing)}")
    for library in map(pathlib.Path, re.findall(r"(/\S+) \(0x", listed)):
        place = place_of(library)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, place)


def ext4_image(path, size_bytes, top):
    """Moves the files in `top` into an ext4 image, made as an ordinary user."""
    need("mke2fs", "e2fsprogs")
    with open(path, "wb") as file:
        file.truncate(size_bytes)
    run("mke2fs", "-q", "-F", "-t", "ext4", "-E", "root_owner=0:0", "-d", top, path)
    shutil.rmtree(top)
    return path


class Stream:
    """The output of a machine on one line. It is kept until a caller waits for it, and all of it goes to a log."""

    def __init__(self, number, log):
        self.number = number
        self.log = log
        self.held = b""

    def wait_for(self, pattern, limit_s=BOOT_LIMIT_S):
        """Returns the next match, and drops the output before it."""
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
        """Returns the rest of the output. The machine must be about to end."""
        while self.read():
            pass
        held, self.held = self.held, b""
        return held

    def drain(self):
        """Returns the last output so far."""
        while select.select([self.number], [], [], 0)[0] and self.read():
            pass
        return self.tail()

    def tail(self):
        return text(pathlib.Path(self.log.name).read_bytes()[-1500:])


class Commands:
    """A line on which a machine takes shell commands. `near` is our end of it. All answers go to `log_path`, too."""

    # A command that takes longer hangs. Commands that wait for something give up by themselves before that (dom0.sh).
    LIMIT_S = 1200

    def __init__(self, near, log_path, where):
        self.near = near
        self.where = where
        self.number = 0
        self.log = open(log_path, "ab")
        self.answers = Stream(near.fileno(), self.log)

    def wait_ready(self):
        """Waits until a booting machine takes commands."""
        self.answers.wait_for(rb"SPILE READY\n", BOOT_LIMIT_S)

    def ask(self, command, limit_s=None, ok=True):
        """Runs a shell command on the machine and returns its output. With `ok`, it must succeed."""
        status, words = self.ask_status(command, limit_s)
        if ok and status != 0:
            raise AssertionError(f"in {self.where}: {command}: exit code {status}\n{words[-3000:]}")
        return words

    def ask_status(self, command, limit_s=None):
        """Runs a command; returns its exit code and its output."""
        self.number += 1
        answer = rb"SPILE ANSWER %d (\d+)\n((?s:.*?))SPILE END %d\n" % (self.number, self.number)
        match = self.exchange(f"{self.number} {command}", answer, limit_s or self.LIMIT_S)
        return int(match.group(1)), text(match.group(2)).strip()

    def exchange(self, words, answer, limit_s):
        """Sends the text and waits until the answer matches."""
        self.near.sendall(f"{words}\n".encode())
        return self.answers.wait_for(answer, limit_s)

    def end_hammer(self):
        """Lets the verified load end the pass that it is in. The load must not have found a mismatch."""
        self.ask("touch /tmp/stop && until_true '[ -e /tmp/hammer.status ]'")
        log = self.ask("cat /tmp/hammer.log")
        if self.ask("cat /tmp/hammer.status") != "0" or "pass 1" not in log:
            raise AssertionError(f"the work failed: {log[-4000:]}")

    def close(self):
        """May be called again."""
        self.near.close()
        self.log.close()
