"""`spile top` on a real terminal (a pseudo-terminal): keys, sizes, signals, servers that hang; and iostat beside what Spile says."""

import fcntl
import json
import os
import pathlib
import pty
import re
import select
import signal
import struct
import subprocess
import tempfile
import termios
import time
import unittest

from support import LIMIT_S, MIB, STANDIN, PeerTest, need, run, spile_binary, spile_json, text, tries

ENTERS, LEAVES = b"\x1b[?1049h", b"\x1b[?1049l"


class Picture:
    """What a terminal shows: as much of its language as the program speaks."""

    PIECE = re.compile(r"\x1b\[(?P<values>[?0-9;]*)(?P<order>[A-Za-z])|\x1b.|(?P<text>[^\x1b]+)", re.S)

    def __init__(self):
        self.cells = {}

    def show(self, raw):
        """The lines after all of this was written."""
        at = (0, 0)
        for piece in self.PIECE.finditer(text(raw)):
            values, order = piece["values"], piece["order"]
            if order == "H":
                row, column = (values.split(";") + ["1"])[:2] if values else ("1", "1")
                at = (int(row) - 1, int(column) - 1)
            elif order == "J" or values == "?1049" and order == "h":
                self.cells.clear()
            for character in piece["text"] or "":
                self.cells[at] = character
                at = (at[0], at[1] + 1)
        rows = range(max((row for row, _ in self.cells), default=-1) + 1)
        columns = range(max((column for _, column in self.cells), default=-1) + 1)
        return "\n".join("".join(self.cells.get((row, column), " ") for column in columns).rstrip() for row in rows)


class Terminal:
    """A program on a pseudo-terminal of its own."""

    def __init__(self, *command, size=(100, 24), env=None):
        self.master, slave = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.seen = b""
        # It needs the terminal as its own, or the kernel does not tell it of a new size.
        self.process = subprocess.Popen(
            [str(word) for word in command], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **(env or {})},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def resize(self, columns, rows):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys):
        os.write(self.master, keys)

    def shows(self):
        return Picture().show(self.seen)

    def sees(self, pattern):
        """Waits until the picture has this."""
        end = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.shows(), re.S):
            if time.monotonic() > end:
                raise AssertionError(f"never seen: {pattern}\n{self.shows()}\n{text(self.seen)[-1000:]!r}")
            self.read()

    def read(self, wait_s=0.2):
        if select.select([self.master], [], [], wait_s)[0]:
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:
                pass

    def is_stopped(self):
        """Waits until the program is stopped; True then, False when it has ended."""
        end = time.monotonic() + LIMIT_S
        while (status := os.waitpid(self.process.pid, os.WUNTRACED | os.WNOHANG)) == (0, 0):
            if time.monotonic() > end:
                raise AssertionError(f"it does not stop\n{text(self.seen)[-3000:]}")
            self.read(0.01)
        self.drain()
        return os.WIFSTOPPED(status[1])

    def drain(self):
        """Reads what there is."""
        while select.select([self.master], [], [], 0)[0]:
            before = len(self.seen)
            self.read(0)
            if len(self.seen) == before:
                break

    def end(self):
        """Waits for the program's end; its exit code."""
        end = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            if time.monotonic() > end:
                self.process.kill()
                raise AssertionError(f"it did not end\n{text(self.seen)[-3000:]}")
            self.read()
        self.drain()
        return self.process.returncode

    def is_as_before(self):
        """True when the terminal has its modes, its cursor and its old picture again."""
        return (
            termios.tcgetattr(self.slave) == self.before
            and self.seen.rfind(LEAVES) > self.seen.rfind(ENTERS)
            and self.seen.rfind(b"\x1b[?25h") > self.seen.rfind(b"\x1b[?25l")
        )

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


class Top(PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("the stand-in has no control socket")
        super().setUp()
        # A folder of control sockets that no other test has.
        self.run_dir = tempfile.mkdtemp(prefix="spile-top-")
        self.before = os.environ["SPILE_RUN_DIR"]
        os.environ["SPILE_RUN_DIR"] = self.run_dir
        self.addCleanup(os.environ.__setitem__, "SPILE_RUN_DIR", self.before)
        self.addCleanup(subprocess.run, ["rm", "-r", self.run_dir], check=False)

    def top(self, *words, **options):
        terminal = Terminal(spile_binary(), "top", "--interval", "0.2", *words, **options)
        self.addCleanup(terminal.close)
        return terminal

    def load(self, server, *words):
        command = [spile_binary(), "load", server.uri(), "--rw", "randread", "--runtime", "1h", *words]
        load = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(load.wait)
        self.addCleanup(load.kill)

    def test_keys_and_sizes(self):
        server = self.serve(f"{self.empty('a.raw')},name=boot")
        self.load(server)
        top = self.top()
        top.sees(r"boot")
        self.assertIn(ENTERS, top.seen)
        self.assertNotEqual(termios.tcgetattr(top.slave), top.before, "raw mode")
        top.press(b"l")
        top.sees(r"LAYER")
        top.sees(r"image a\.raw +\d")
        top.press(b"h")
        top.sees("█.*now")
        top.press(b"?")
        top.sees(r"heat map of the chosen disk")
        top.press(b"\x1b")
        top.sees(r"NAME")
        top.press(b"/zzz")
        top.sees(r"no disk has this text")
        top.press(b"\x1b")
        top.sees(r"boot")
        for size in [(1, 1), (5, 2), (300, 3), (30, 80)]:
            top.resize(*size)
            top.read()
            top.read()
        top.seen = b""
        top.resize(101, 25)
        top.sees(r"NAME.*boot +\d")
        top.press(b"q")
        self.assertEqual(top.end(), 0)
        self.assertTrue(top.is_as_before(), text(top.seen)[-500:])

    def test_a_key_in_the_moment_of_a_new_size_is_heard(self):
        self.serve(f"{self.empty('a.raw')},name=boot")
        top = self.top()
        top.sees(r"boot")
        # About one in thirty meets the moment.
        for turn in range(150):
            top.seen = b""
            top.resize(101 + turn % 7, 24)
            top.press(b" ")
            top.sees(r"every 0\.2 s  held\n" if turn % 2 == 0 else r"every 0\.2 s\n")

    def test_signals_give_the_terminal_back(self):
        self.serve(f"{self.empty('a.raw')},name=boot")
        for sent in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            with self.subTest(sent.name):
                top = self.top()
                top.sees(r"boot")
                top.process.send_signal(sent)
                self.assertEqual(top.end(), 128 + sent)
                self.assertTrue(top.is_as_before(), text(top.seen)[-500:])

    def test_it_can_be_suspended(self):
        self.serve(f"{self.empty('a.raw')},name=boot")
        top = self.top()
        top.sees(r"boot")
        top.press(b"\x1a")
        self.assertTrue(top.is_stopped())
        self.assertTrue(top.is_as_before())
        top.seen = b""
        top.process.send_signal(signal.SIGCONT)
        top.sees(r"NAME.*boot")
        top.press(b"\x03")
        self.assertEqual(top.end(), 0)
        self.assertTrue(top.is_as_before())

    def test_a_server_that_hangs_is_marked_and_holds_up_no_other(self):
        hung = self.serve(f"{self.empty('a.raw')},name=stopped")
        self.load(self.serve(f"{self.empty('b.raw')},name=lively"))
        top = self.top()
        top.sees(r"stopped")
        top.sees(r"lively")
        hung.process.send_signal(signal.SIGSTOP)
        try:
            top.sees(r"no answer")
            self.assert_only_one_is_silent(next(iter(self.sockets())))
        finally:
            hung.process.send_signal(signal.SIGCONT)
        hung.stop()
        top.press(b"/stopped")
        top.sees(r"no disk has this text")
        top.press(b"\x1b")
        # Not at once: Esc and a key together are Alt and that key.
        top.sees(r"NAME.*lively")
        top.press(b"q")
        self.assertEqual(top.end(), 0)

    def assert_only_one_is_silent(self, socket):
        """The other server is told as before, in every interval. On a busy host it may answer too late: a few tries."""
        for _ in range(5):
            lines = spile_lines(3, "top", "--json", "--count", "3", "--interval", "0.5")
            if all([server["server"] for server in line["silent_servers"]] == [str(socket)] for line in lines):
                break
        for line in lines:
            self.assertEqual([server["server"] for server in line["silent_servers"]], [str(socket)])
            rates = {disk["name"]: disk["layers"] for disk in line["disks"]}
            self.assertGreater(rates["lively"][0]["reads_per_s"], 0, line)

    def sockets(self):
        """The control sockets of the server that is to hang."""
        for path in pathlib.Path(self.run_dir).glob("*.control"):
            if path.stem == "stopped":
                yield path

    def test_no_terminal_is_refused(self):
        done = run(spile_binary(), "top", ok=False, stdin=b"")
        self.assertIn("--batch", text(done.stderr))
        self.assertEqual(done.returncode, 2)

    @tries(3)
    def test_the_columns_of_iostat(self):
        need("iostat", "sysstat")
        server = self.serve(f"{self.empty('a.raw')},name=boot")
        self.load(server)
        ours = run(spile_binary(), "top", "--batch", "iostat", "--count", "1", "--interval", "0.3").stdout
        theirs = run("iostat", "-xm", "-d", "1", "1").stdout
        head = [line for line in text(theirs).splitlines() if line.startswith("Device")]
        lines = text(ours).splitlines()
        self.assertEqual(lines[0].split(), head[0].split())
        self.assertEqual(len(lines[1].split()), len(head[0].split()), ours)
        self.assertTrue(lines[1].startswith("boot "), ours)


class Device(PeerTest):
    """The host's device below a disk, beside iostat."""

    def setUp(self):
        if STANDIN:
            self.skipTest("the stand-in has no control socket")
        need("iostat", "sysstat")
        super().setUp()

    def loop(self):
        return self.loop_device(self.empty("device.raw", 256 * MIB))

    def test_iostat_says_the_same(self):
        device = self.loop()
        server = self.serve(f"{device},name=loop,format=raw")
        command = [spile_binary(), "load", server.uri(), "--rw", "randread", "--depth", "4", "--runtime", "1h"]
        load = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self.assert_same(device)
        finally:
            load.kill()
            load.wait()

    def assert_same(self, device):
        """Each number is the same in one interval at least. The intervals of the two programs do not begin at the same moment, and the
        host has other work: a few tries."""
        found, open_numbers = [], {"reads_per_s", "queue_size_iostat", "latency_mean_us"}
        while open_numbers and len(found) < 10:
            found.append(self.compare(device))
            open_numbers -= {name for name, (a, b) in found[-1].items() if abs(a - b) <= 0.05 * max(a, b, 0.1)}
        self.assertFalse(open_numbers, found)

    def compare(self, device):
        name = os.path.basename(device)
        iostat = subprocess.Popen(["iostat", "-x", "-y", "-d", "-o", "JSON", name, "3", "1"], stdout=subprocess.PIPE)
        stat = spile_json("stat", "loop", "--layers", "--interval", "3")
        told = json.loads(iostat.communicate(timeout=LIMIT_S)[0])
        disk = told["sysstat"]["hosts"][0]["statistics"][0]["disk"][0]
        self.assertEqual((stat["host_device"], disk["disk_device"]), (name, name))
        ours = next(layer for layer in stat["layers"] if layer["kind"] == "device")
        return {
            "reads_per_s": (ours["reads_per_s"], disk["r/s"]),
            "queue_size_iostat": (ours["queue_size_iostat"], disk["aqu-sz"]),
            "latency_mean_us": (ours["latency_mean_us"] / 1e3, disk["r_await"]),
        }

    def test_the_device_of_a_file_system(self):
        device = self.loop()
        need("mkfs.ext4", "e2fsprogs")
        run("mkfs.ext4", "-q", device)
        folder = self.path("mounted")
        folder.mkdir()
        if run("mount", device, folder, ok=None).returncode != 0:
            self.skipTest("this host does not mount ext4")
        self.addCleanup(run, "umount", folder)
        with open(folder / "disk.raw", "wb") as file:
            file.truncate(MIB)
        server = self.serve(f"{folder / 'disk.raw'},name=onfs")
        stat = spile_json("stat", "onfs", "--interval", "0.1")
        self.assertEqual((stat["host_device"], stat["no_host_device"]), (os.path.basename(device), None))
        self.assertEqual(server.stop(), 0)


def spile_lines(count, *command):
    """The JSON objects that a command prints, each in a line."""
    lines = text(run(spile_binary(), *command).stdout).splitlines()
    if len(lines) != count:
        raise AssertionError(f"{len(lines)} lines, not {count}: {lines}")
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    unittest.main()
