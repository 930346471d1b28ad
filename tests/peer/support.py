"""What every peer test shares: where Spile is, a server with a bounded life, sums of content.

Rules kept here so that each test need not: a program that is missing is a skip with a reason;
everything runs in a folder of its own; every wait has an end; a server is ended with SIGTERM and
must then end with exit code 0.

`SPILE_BIN` names the program. `SPILE_STANDIN=qemu-nbd` puts qemu-nbd in the server's place, to see
that a test asks only for what the protocol promises.
"""

import atexit
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import pathlib
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

TOP = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("SPILE_TARGET", TOP / "target"))
STANDIN = os.environ.get("SPILE_STANDIN", "")

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Python packages that `scripts/setup.sh test` has put there, because Debian has none of them.
sys.path.append(str(TOP / "target" / "python"))

# Control sockets and the marks of failed syncs: the host's own must not decide what a test sees, nor the other way round.
RUN_DIR = tempfile.mkdtemp(prefix="spile-run-")
os.environ["SPILE_RUN_DIR"] = RUN_DIR
atexit.register(shutil.rmtree, RUN_DIR, ignore_errors=True)

# What takes longer hangs. On a quiet machine nothing takes a tenth of it.
LIMIT_S = 600


def spile_binary():
    """The program under test: SPILE_BIN, else the newest build in the target folder."""
    named = os.environ.get("SPILE_BIN")
    if named:
        return named
    built = [TARGET / "release" / "spile", TARGET / "debug" / "spile"]
    built = [path for path in built if path.exists()]
    if not built:
        raise FileNotFoundError("spile is not built: cargo build --release -p spile")
    return str(max(built, key=lambda path: path.stat().st_mtime))


def need(program, package=None):
    """Skips the test unless `program` is installed."""
    if shutil.which(program) is None:
        raise unittest.SkipTest(f"{program} is not installed (package {package or program})")


def need_module(name, package):
    """The Python module `name`, or a skip."""
    try:
        return __import__(name)
    except ImportError:
        raise unittest.SkipTest(f"Python module {name} is not installed (package {package})")


def need_package(name):
    """The folder of a Python package of `scripts/setup.sh test`, which is not imported; or a skip."""
    found = importlib.util.find_spec(name)
    if found is None:
        raise unittest.SkipTest(f"Python package {name} is not installed (scripts/setup.sh test)")
    return pathlib.Path(found.origin).parent


def run(*command, ok=True, stdin=None, limit_s=LIMIT_S, env=None, cwd=None):
    """Runs a program to its end. With `ok` it must succeed, without it must fail."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=limit_s,
        env={**os.environ, **(env or {})}, cwd=cwd,
    )
    if ok is not None and (done.returncode == 0) != ok:
        raise AssertionError(
            f"{' '.join(words)}: exit code {done.returncode}\n"
            f"{text(done.stdout)[-2000:]}\n{text(done.stderr)[-4000:]}"
        )
    return done


def text(raw):
    return raw.decode("utf-8", "replace")


def spile(*command, ok=True, **options):
    """Runs `spile`; see `run`."""
    return run(spile_binary(), *command, ok=ok, **options)


def spile_json(*command):
    """The JSON that `spile … --json` prints."""
    return json.loads(spile(*command, "--json").stdout)


def check(image):
    """Runs `spile check`, which must find nothing but leaks (exit code 4): the next writer uses that space."""
    done = spile("check", image, ok=None)
    if done.returncode not in (0, 4):
        raise AssertionError(f"check {image}: {done.returncode}\n{text(done.stdout + done.stderr)}")


def check_by_qemu(image, was_killed=False):
    """Runs `qemu-img check` on a qcow2 image, which must find nothing but leaks (exit code 3) when its writer was killed, and nothing otherwise."""
    done = run("qemu-img", "check", "-f", "qcow2", image, ok=None)
    if done.returncode not in ((0, 3) if was_killed else (0,)):
        raise AssertionError(f"qemu-img check {image}: {done.returncode}\n{text(done.stdout + done.stderr)}")


def qemu_img_json(*command):
    return json.loads(run("qemu-img", *command, "--output=json").stdout)


def seven_zip():
    """7-Zip's program under one of its names, or None: p7zip-full calls it 7z, some versions of 7zip only 7zz."""
    return shutil.which("7z") or shutil.which("7zz")


def need_seven_zip():
    """7-Zip's program, or a skip."""
    if program := seven_zip():
        return program
    raise unittest.SkipTest("neither 7z nor 7zz is installed (package 7zip or p7zip-full)")


def read_by_seven_zip(image):
    """The content of a VHD as 7-Zip reads it."""
    return run(need_seven_zip(), "e", "-so", "-tVHD", image).stdout


def sha256(path):
    """The sum of a file's content."""
    sums = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(4 * MIB):
            sums.update(chunk)
    return sums.hexdigest()


def write_scattered(path, size_bytes, seed, runs=40, longest_bytes=300 * KIB):
    """A sparse raw file: runs of seeded random bytes at odd sectors, holes between them."""
    dice = random.Random(seed)
    with open(path, "wb") as file:
        file.truncate(size_bytes)
        for _ in range(runs):
            length = min(dice.randrange(512, longest_bytes) // 512 * 512, size_bytes)
            at = dice.randrange(0, size_bytes - length + 1) // 512 * 512
            file.seek(at)
            file.write(dice.randbytes(length))
        # Off-by-one errors show at the first and at the last sector.
        for at in (0, size_bytes - 512):
            file.seek(at)
            file.write(dice.randbytes(512))
    return path


def overwrite_some(path, seed, runs=20):
    """Writes other runs over a raw file, some of them zeros."""
    dice = random.Random(seed)
    size_bytes = os.path.getsize(path)
    with open(path, "r+b") as file:
        for turn in range(runs):
            length = dice.randrange(1, 200) * 512
            at = dice.randrange(0, size_bytes - length) // 512 * 512
            file.seek(at)
            file.write(bytes(length) if turn % 4 == 0 else dice.randbytes(length))


def same_content(first, second):
    """True when two raw files are the same, but for zeros past the end of the shorter one."""
    with open(first, "rb") as a, open(second, "rb") as b:
        at = 0
        while True:
            left, right = a.read(4 * MIB), b.read(4 * MIB)
            if not left and not right:
                return True
            length = max(len(left), len(right))
            if left.ljust(length, b"\0") != right.ljust(length, b"\0"):
                return False
            at += length


class Server:
    """A running server of disks on a Unix socket (or TCP), ended with SIGTERM.

    `disks` are in the grammar of `spile serve`: a path with `,name=N,format=F,read-only`.
    """

    def __init__(self, folder, *disks, extra=(), tcp=False, ready_s=30, at=None):
        self.folder = pathlib.Path(folder)
        # Not in the folder: a socket's path has to be short, and a checkout may be deep.
        self.socket = at or pathlib.Path(tempfile.mktemp(".sock", "spile-peer-"))
        self.port = free_port() if tcp else None
        self.log = open(self.folder / f"{self.socket.stem}.log", "a+b")
        self.ended = None
        address = f"tcp:127.0.0.1:{self.port}" if tcp else f"unix:{self.socket}"
        command = self.command([str(disk) for disk in disks], address, [str(e) for e in extra])
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
        )
        self.wait_until_ready(ready_s)

    def command(self, disks, address, extra):
        if STANDIN == "qemu-nbd":
            return self.standin(disks)
        return [spile_binary(), "serve", *disks, "--nbd", address, *extra]

    def standin(self, disks):
        need("qemu-nbd", "qemu-utils")
        if len(disks) != 1:
            raise unittest.SkipTest("the stand-in serves one disk")
        path, *words = disks[0].split(",")
        options = dict(word.partition("=")[::2] for word in words)
        given = options.get("format") or ("raw" if not path.endswith("vhd") else "vpc")
        where = ["-p", str(self.port), "-b", "127.0.0.1"] if self.port else ["-k", str(self.socket)]
        command = ["qemu-nbd", "-t", "-e", "8", "-f", given, *where, "-x", options.get("name", "")]
        return [*command, *(["-r"] if "read-only" in options else []), path]

    def wait_until_ready(self, ready_s):
        end = time.monotonic() + ready_s
        while not self.answers():
            if self.process.poll() is not None:
                self.ended = self.process.returncode
                raise AssertionError(f"the server ended with {self.ended}:\n{self.output()}")
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"the server is not ready after {ready_s} s:\n{self.output()}")
            time.sleep(0.01)

    def answers(self):
        """True when a server greets. The socket of a server that is ending may still accept, but sends no greeting."""
        family = socket.AF_INET if self.port else socket.AF_UNIX
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            try:
                probe.connect(("127.0.0.1", self.port) if self.port else str(self.socket))
                return probe.recv(8) == b"NBDMAGIC"
            except OSError:
                return False

    def uri(self, name="", scheme="nbd"):
        """The address of the export `name`."""
        if self.port:
            return f"{scheme}://localhost:{self.port}/{name}"
        return f"{scheme}+unix:///{name}?socket={self.socket}"

    def output(self):
        self.log.flush()
        return text(pathlib.Path(self.log.name).read_bytes())

    def stop(self, limit_s=30):
        """Sends SIGTERM; returns the exit code, which is 0 when the server has ended its requests and synced."""
        if self.ended is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.ended = self.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"the server did not end in {limit_s} s:\n{self.output()}")
        return self.ended

    def kill(self):
        """Kills the server with SIGKILL, as a crash would."""
        self.process.kill()
        self.process.wait()
        self.ended = -signal.SIGKILL

    def __enter__(self):
        return self

    def __exit__(self, problem, _value, _trace):
        if self.ended is not None:
            self.socket.unlink(missing_ok=True)
            return
        code = self.stop()
        self.log.close()
        self.socket.unlink(missing_ok=True)
        if problem is None and code != 0:
            raise AssertionError(f"the server ended with {code}, not 0")


def chain(raw):
    """Makes a parent from `raw` and an empty child of it; returns the child. The stand-in uses `raw` itself."""
    if STANDIN:
        return raw
    parent, child = raw.with_name(f"{raw.stem}-parent.vhd"), raw.with_suffix(".vhd")
    spile("convert", raw, parent)
    spile("create", child, "--parent", parent)
    return child


class PeerTest(unittest.TestCase):
    """A test with a folder of its own."""

    def setUp(self):
        # Under the target folder: O_DIRECT and holes work there, which a /tmp in memory may lack.
        TARGET.mkdir(parents=True, exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="peer-", dir=TARGET))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, name):
        return self.folder / name

    def serve(self, *disks, **options):
        """Starts a `Server` that ends with the test and must end well."""
        server = Server(self.folder, *disks, **options)
        self.addCleanup(server.__exit__, None, None, None)
        return server

    def raw(self, name="base.raw", size_bytes=64 * MIB, seed=1):
        return write_scattered(self.path(name), size_bytes, seed)

    def empty(self, name="empty.raw", size_bytes=64 * MIB):
        path = self.path(name)
        with open(path, "wb") as file:
            file.truncate(size_bytes)
        return path

    def loop_device(self, file):
        """A loop device over the file, as a volume is; it goes with the test."""
        need("losetup", "mount")
        if os.geteuid() != 0:
            self.skipTest("loop devices need root")
        made = run("losetup", "--find", "--show", file, ok=None)
        if made.returncode != 0:
            self.skipTest(f"no loop device: {text(made.stderr).strip()}")
        device = text(made.stdout).strip()
        self.addCleanup(run, "losetup", "--detach", device)
        return device

    def assertSame(self, first, second, message=""):
        self.assertTrue(same_content(first, second), f"{first} and {second} differ {message}")


def free_port():
    """Returns a TCP port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


PORTS = itertools.count(9000)


def own_address():
    """Returns a TCP address that no other program listens on, now or later: this process has a loopback address of its own."""
    pid = os.getpid()
    return f"127.{64 | pid >> 16}.{pid >> 8 & 255}.{pid & 255}:{next(PORTS)}"


def tries(count):
    """For a test that compares what two programs measure: on a busy host they may not have measured the same. It passes when one of
    `count` runs does. What is always wrong fails in each of them."""
    def again_and_again(test):
        @functools.wraps(test)
        def run_again(self):
            for _ in range(count - 1):
                try:
                    return test(self)
                except AssertionError as error:
                    print(f"{self.id()}, once more: {error}", file=sys.stderr)
                    self.doCleanups()
                    self.setUp()
            return test(self)
        return run_again
    return again_and_again


def read_until(stream, pattern, limit_s, log=None):
    """Reads lines of a pipe until one matches; the match, or None at the end or after `limit_s`."""
    end = time.monotonic() + limit_s
    held = b""
    while (left := end - time.monotonic()) > 0:
        if not select.select([stream], [], [], left)[0]:
            break
        chunk = os.read(stream.fileno(), 65536)
        if not chunk:
            break
        if log is not None:
            log.write(chunk)
        held += chunk
        if match := re.search(pattern, held):
            return match
        held = held[-65536:]
    return None


def apply_change(server, before, after):
    """Writes the sectors in which `after` differs from `before` to the server's disk, which holds `before`."""
    nbd = need_module("nbd", "python3-libnbd")
    handle = nbd.NBD()
    handle.connect_uri(server.uri())
    for at, data in changed_runs(before, after):
        handle.pwrite(data, at)
    handle.flush()
    handle.shutdown()


def changed_runs(before, after):
    """(offset, new bytes) of each run of sectors in which two raw files differ."""
    old, new = pathlib.Path(before).read_bytes(), pathlib.Path(after).read_bytes()
    begun = None
    for at in range(0, len(new) + 512, 512):
        differs = at < len(new) and old[at:at + 512] != new[at:at + 512]
        if differs and begun is None:
            begun = at
        elif not differs and begun is not None:
            yield begun, new[begun:at]
            begun = None
