#!/usr/bin/env python3
"""Long hours: a server and its guests, under everything that can happen to them, with verified loads.

    tests/soak/soak.py [--hours H | --minutes M] [--seed S] [--keep]

Three guests on vhost-user and one on a Xen of ordinary processes write and read stamped blocks: on a raw file, on a
chain of VHDs on a small file system, on an NBD store, and on a raw file through blkif. An NBD client reads the chain
at the same time. Meanwhile the seed draws what happens: the server or the Xen disk's process is killed or panics, a
successor takes over, the server is stopped for a while, the store hangs, the file system is full or frozen for a
while, a disk grows, a disk comes and goes, signals arrive. At the end of each round the loads end, every acknowledged
block is read back, the images are checked, and a new round begins.

Prints a line for each event, a `SKIP soak: reason` for what cannot be done here, and last `N passed, N failed,
N skipped`: rounds that were right, that were not, and kinds of events that were left out. The first fault ends the
run with exit code 1 and keeps the folder.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "peer"))
from support import KIB, LIMIT_S, MIB, TARGET, run, spile_binary, text  # noqa: E402

# The small file system, and what a full one leaves free.
SMALL_BYTES = 512 * MIB
# Guests' disks; the chain's lies on the small file system, and what is written to it fits.
DISK_BYTES = 96 * MIB
# Seconds of a round.
ROUND_S = 25


class Fault(AssertionError):
    """What should not have happened."""


def wait_for(what, is_so, limit_s=LIMIT_S):
    end = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end:
            raise Fault(f"not within {limit_s} s: {what}")
        time.sleep(0.02)


class SmallFileSystem:
    """An ext4 of its own in a file, where that can be mounted."""

    def __init__(self, folder):
        self.path = folder / "small"
        self.path.mkdir()
        self.why_not = None
        image = folder / "small.ext4"
        with open(image, "wb") as file:
            file.truncate(SMALL_BYTES)
        for words in (["mkfs.ext4", "-q", "-F", image], ["mount", "-o", "loop", image, self.path]):
            try:
                done = run(*words, ok=None)
            except OSError as error:
                self.why_not = f"{words[0]}: {error}"
                return
            if done.returncode != 0:
                self.why_not = f"{words[0]}: {text(done.stderr).strip()}"
                return

    def fill(self):
        """Takes all space but a little."""
        stat = os.statvfs(self.path)
        left = stat.f_bavail * stat.f_frsize - 64 * KIB
        if left > 0:
            with open(self.path / "ballast", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, left)

    def empty(self):
        (self.path / "ballast").unlink(missing_ok=True)

    def freeze(self):
        run("fsfreeze", "--freeze", self.path)

    def thaw(self):
        run("fsfreeze", "--unfreeze", self.path, ok=None)

    def close(self):
        if self.why_not is None:
            run("umount", "--lazy", self.path, ok=None)


class NbdStore:
    """A qemu-nbd whose file is a disk of ours, so that the store can hang."""

    def __init__(self, folder):
        self.why_not = None if shutil.which("qemu-nbd") else "qemu-nbd is not installed"
        self.process = None
        if self.why_not:
            return
        image, self.socket = folder / "store.raw", folder / "store.sock"
        with open(image, "wb") as file:
            file.truncate(DISK_BYTES)
        command = ["qemu-nbd", "-t", "-e", "8", "-f", "raw", "-k", self.socket, image]
        self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL)
        wait_for("the store's socket", self.socket.exists)

    def signal(self, number):
        self.process.send_signal(number)

    def close(self):
        if self.process:
            self.process.kill()
            self.process.wait()


class Server:
    """`spile serve`, and its successors."""

    def __init__(self, folder, disks):
        self.folder, self.disks = folder, disks
        self.log = open(folder / "server.log", "ab")
        self.process = None

    def command(self, *more):
        sockets = [word for name in self.disks for word in ("--vhost-user", f"{name}.sock,export={name}")]
        disks = [f"{path},name={name}" for name, path in self.disks.items()]
        return [spile_binary(), "serve", *disks, *sockets, "--nbd", "unix:n.sock", "--control", "control.sock",
                "--workers", "2", "--on-error", "pause", *more]

    def spawn(self, *more, env=None):
        """Starts a process; the process, once it serves, or None with what it said."""
        said = self.folder / "said"
        with open(said, "wb") as out:
            process = subprocess.Popen(self.command(*more), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out,
                                       stderr=self.log, env={**os.environ, **(env or {})})
        end = time.monotonic() + LIMIT_S
        while b"serving " not in said.read_bytes():
            if process.poll() is not None:
                return None, process.returncode
            if time.monotonic() > end:
                process.kill()
                raise Fault("a server does not begin to serve")
            time.sleep(0.02)
        return process, None

    def start(self, env=None):
        """Starts as a service manager does: again when it fails, for the kernel may keep a killed process's files."""
        end = time.monotonic() + LIMIT_S
        while True:
            self.process, code = self.spawn(env=env)
            if self.process:
                return
            if time.monotonic() > end:
                raise Fault(f"a server does not start: {code}")
            time.sleep(0.2)

    def check(self):
        if (code := self.process.poll()) is not None:
            raise Fault(f"the server ended with {code}")

    def kill(self):
        self.process.kill()
        self.process.wait(LIMIT_S)

    def take_over(self):
        old = self.process
        new, code = self.spawn("--takeover")
        if new is None:
            raise Fault(f"the successor ended with {code}")
        self.process = new
        if (code := old.wait(LIMIT_S)) != 0:
            raise Fault(f"the server that was taken over ended with {code}")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        if (code := self.process.wait(LIMIT_S)) != 0:
            raise Fault(f"the server ended with {code}")


class Load:
    """A verified load, which goes on over the ends of servers."""

    def __init__(self, folder, uri, seed, rate, more=(), name=None):
        self.folder, self.uri, self.more = folder, uri, list(more)
        self.name = name or uri
        self.model = folder / f"{self.name.replace(':', '-').replace('/', '-')}.model"
        self.report = self.model.with_suffix(".json")
        command = [spile_binary(), "load", uri, "--rw", "randrw", "--verify", "--runtime", "10h", "--json",
                   "--save-model", self.model, "--flush-every", "50", "--rate", rate, "--seed", seed, "--bs", "16k",
                   "--depth", "16", *self.more]
        with open(self.report, "wb") as out, open(folder / "loads.log", "ab") as log:
            self.process = subprocess.Popen([str(word) for word in command], cwd=folder, stdin=subprocess.DEVNULL,
                                            stdout=out, stderr=log)

    def check(self):
        if self.process.poll() is not None:
            raise Fault(f"the load of {self.name} ended: {self.process.returncode} {self.report.read_text()}")

    def end(self):
        """Ends it: it has seen no error, and all that was acknowledged is there. Returns the requests."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(LIMIT_S)
        report = json.loads(self.report.read_text() or "{}")
        if code != 130 or report.get("error") or report.get("mismatches"):
            raise Fault(f"the load of {self.name} ended with {code}: {report}")
        return report["read"]["requests"] + report["write"]["requests"]

    def verify(self):
        run(spile_binary(), "load", self.uri, *self.more, "--verify-model", self.model, cwd=self.folder)

    def close(self):
        self.process.kill()
        self.process.wait()


class Reader:
    """An NBD client that reads without an end. A server that ends cuts it off; then it comes back."""

    def __init__(self, folder, export):
        uri = f"nbd+unix:///{export}?socket={folder / 'n.sock'}"
        self.command = [spile_binary(), "load", uri, "--rw", "randread", "--rate", "200", "--runtime", "10h"]
        self.process = None

    def check(self):
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                            stderr=subprocess.DEVNULL)

    def close(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None


class Xen:
    """A Xen of ordinary processes, with the back end on it."""

    def __init__(self, folder):
        self.lab = folder / "lab"
        self.lab.mkdir()
        # Pid files and journals have to be in memory.
        self.run_dir = pathlib.Path(tempfile.mkdtemp(prefix="spile-soak-", dir="/dev/shm"))
        self.log = open(folder / "xen.log", "ab")
        self.host = self.spawn("xen-lab", self.lab)
        wait_for("the Xen", (self.lab / "xenstored").exists)
        self.backend = self.spawn("xen-backend", "--lab", self.lab, "--run-dir", self.run_dir)

    def spawn(self, *words):
        command = [spile_binary(), *map(str, words)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    def disks(self):
        found = []
        for file in self.run_dir.glob("*.pid"):
            try:
                found.append(int(file.read_text()))
            except (OSError, ValueError):
                pass
        return found

    def signal(self, number):
        for pid in self.disks():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def close(self):
        for process in (self.backend, self.host):
            process.kill()
            process.wait()
        self.signal(signal.SIGKILL)
        shutil.rmtree(self.run_dir, ignore_errors=True)


class Soak:
    def __init__(self, folder, seed):
        self.folder, self.dice = folder, random.Random(seed)
        self.begun = time.monotonic()
        self.skips, self.counts, self.requests = [], {}, 0
        self.small, self.store = SmallFileSystem(folder), NbdStore(folder)
        self.closing = [self.small.close, self.store.close]
        self.raw_bytes = DISK_BYTES
        self.make_disks()
        self.xen = Xen(folder)
        self.closing.append(self.xen.close)
        self.server = Server(folder, self.disks)
        self.server.start()
        self.reader = Reader(folder, "chain")
        self.loads = []
        self.events = self.possible_events()

    def make_disks(self):
        spile = spile_binary()
        run(spile, "create", "plain.raw", "--size", self.raw_bytes, cwd=self.folder)
        run(spile, "create", "xen.raw", "--size", DISK_BYTES, cwd=self.folder)
        run(spile, "create", "base.vhd", "--size", DISK_BYTES, cwd=self.small.path)
        run(spile, "create", "leaf.vhd", "--parent", "base.vhd", cwd=self.small.path)
        self.disks = {"plain": "plain.raw", "chain": "small/leaf.vhd"}
        if self.store.why_not is None:
            self.disks["remote"] = f"nbd+unix:///?socket={self.store.socket}"

    def possible_events(self):
        """(name, what to do), as far as it can be done here."""
        events = [("kill", self.kill), ("panic", self.panic), ("takeover", self.server.take_over),
                  ("stop", self.stop_server), ("grow", self.grow), ("attach", self.attach),
                  ("signals", self.signals), ("kill the Xen disk", lambda: self.xen.signal(signal.SIGKILL)),
                  ("stop the Xen disk", self.stop_xen_disk)]
        small, store = self.small.why_not, self.store.why_not
        for name, act, why_not in [("freeze", self.freeze, small), ("full", self.full, small),
                                   ("the store hangs", self.hang, store)]:
            if why_not:
                self.skip(f"{name}: {why_not}")
            else:
                events.append((name, act))
        return events

    def skip(self, reason):
        self.skips.append(reason)
        print(f"SKIP soak: {reason}", flush=True)

    def say(self, what):
        print(f"{time.monotonic() - self.begun:7.1f} s  {what}", flush=True)

    def pause(self, longest_s=2.0):
        time.sleep(self.dice.uniform(0.1, longest_s))

    # What can happen.

    def kill(self):
        self.server.kill()
        if self.dice.random() < 0.3:
            self.pause()
        self.server.start()

    def panic(self):
        """The next server panics at some request, and the one after it goes on."""
        self.server.kill()
        self.server.start(env={"SPILE_TEST_PANIC": "500"})
        try:
            self.server.process.wait(15)
        except subprocess.TimeoutExpired:
            self.server.kill()
        self.server.start()

    def stop_server(self):
        self.server.process.send_signal(signal.SIGSTOP)
        self.pause()
        self.server.process.send_signal(signal.SIGCONT)

    def stop_xen_disk(self):
        self.xen.signal(signal.SIGSTOP)
        self.pause()
        self.xen.signal(signal.SIGCONT)

    def grow(self):
        if self.raw_bytes < 4 * DISK_BYTES:
            self.raw_bytes += self.dice.randrange(1, 8) * MIB
            run(spile_binary(), "resize", "control.sock", self.raw_bytes, "--name", "plain", cwd=self.folder)

    def attach(self):
        run(spile_binary(), "attach", "control.sock", "null:1M,name=guest", cwd=self.folder)
        run(spile_binary(), "detach", "control.sock", "--name", "guest", cwd=self.folder)

    def signals(self):
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            self.server.process.send_signal(number)

    def freeze(self):
        self.small.freeze()
        try:
            self.pause(3.0)
        finally:
            self.small.thaw()

    def full(self):
        self.small.fill()
        try:
            self.pause(3.0)
        finally:
            self.small.empty()

    def hang(self):
        self.store.signal(signal.SIGSTOP)
        try:
            self.pause(3.0)
        finally:
            self.store.signal(signal.SIGCONT)

    # A round.

    def begin(self):
        seed = self.dice.randrange(1 << 30)
        more = ["--reconnect", "60s"]
        self.loads = [Load(self.folder, f"vhost-user:{name}.sock", seed + number, 300, more, name)
                      for number, name in enumerate(self.disks)]
        xen = ["--params", f"raw:{self.folder / 'xen.raw'}"]
        self.loads.append(Load(self.folder, f"xen-lab:{self.xen.lab}", seed, 300, xen, "xen"))

    def one_round(self, end):
        self.begin()
        while time.monotonic() < end:
            self.pause()
            name, act = self.dice.choice(self.events)
            self.say(name)
            self.counts[name] = self.counts.get(name, 0) + 1
            act()
            self.server.check()
            self.reader.check()
            for load in self.loads:
                load.check()
        self.pause()
        requests = sum(load.end() for load in self.loads)
        if requests == 0:
            raise Fault("no load has done anything")
        self.requests += requests
        self.reader.close()
        for load in self.loads:
            load.verify()
        # Nobody serves them now: the images are checked as a stranger would.
        self.server.stop()
        for image in ("plain.raw", "small/base.vhd", "small/leaf.vhd", "xen.raw"):
            done = run(spile_binary(), "check", image, cwd=self.folder, ok=None)
            if done.returncode not in (0, 4):
                raise Fault(f"check {image}: {done.returncode}\n{text(done.stdout)}{text(done.stderr)}")
        self.server.start()
        self.say(f"round: {requests} requests, all right")

    def close(self):
        for load in self.loads:
            load.close()
        self.reader.close()
        if self.server.process:
            self.server.process.kill()
            self.server.process.wait()
        for close in reversed(self.closing):
            close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how long it goes on (10)")
    parser.add_argument("--hours", type=float, help="the same in hours")
    parser.add_argument("--seed", type=int, default=None, help="what happens is drawn by it; told when it is not given")
    parser.add_argument("--keep", action="store_true", help="keep the folder also when all is well")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.randrange(1 << 32)
    minutes = args.minutes if args.hours is None else args.hours * 60
    TARGET.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="soak-", dir=TARGET))
    print(f"seed {seed}, {minutes:g} minutes, in {folder}", flush=True)
    end = time.monotonic() + minutes * 60
    rounds, fault, soak = 0, None, None
    try:
        soak = Soak(folder, seed)
        while rounds == 0 or time.monotonic() + ROUND_S / 2 < end:
            soak.one_round(min(end, time.monotonic() + ROUND_S))
            rounds += 1
    except (AssertionError, OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        fault = error
        print(f"FAIL soak, seed {seed}: {type(error).__name__}: {error}", flush=True)
    finally:
        if soak:
            soak.close()
    skips = len(soak.skips) if soak else 0
    if soak:
        print(f"{soak.requests} requests; " + ", ".join(f"{n} × {name}" for name, n in sorted(soak.counts.items())))
    if fault:
        for log in sorted(folder.glob("*.log")):
            print(f"--- the end of {log.name}\n{text(log.read_bytes())[-4000:]}")
    elif not args.keep:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{rounds} passed, {1 if fault else 0} failed, {skips} skipped")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
