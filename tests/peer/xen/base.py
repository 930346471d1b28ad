"""The base of tests on Xen: one host for all tests of a class, and a new one after a test that failed."""

import pathlib
import shutil
import tempfile
import unittest
from contextlib import contextmanager

from host import Host
from parts import parts
from support import TARGET, need, run, text

# Messages that dom0's kernel must not log while a disk is used.
COMPLAINTS = (
    "I/O error|EXT4-fs (error|warning)|vbd.*(fatal|error)|blkfront:.*(unknown|error|failed)"
    "|blocked for more than|Call Trace|Oops|BUG:|not unmapped grant|disabled for further use"
)


class XenTest(unittest.TestCase):
    running = None
    folder = None

    @classmethod
    def setUpClass(cls):
        for program, package in (
            ("qemu-system-x86_64", "qemu-system-x86"), ("busybox", "busybox-static"), ("debugfs", "e2fsprogs"),
        ):
            need(program, package)
        cls.parts = parts()
        cls.addClassCleanup(cls.drop)

    @classmethod
    def tearDownClass(cls):
        if cls.running:
            cls.running.leave()

    @classmethod
    def drop(cls):
        host, cls.running = cls.running, None
        if host:
            host.close()
        if cls.folder:
            shutil.rmtree(cls.folder, ignore_errors=True)

    @classmethod
    def start(cls):
        """Starts a host with the class's images. An emulated host that does not come up is told, and another one is
        started, once: no test has begun by then."""
        try:
            cls.boot()
        except AssertionError as problem:
            words = f"{problem}\n{cls.story()}".strip().replace("\n", "\n    ")
            print(f"NOTE {cls.__name__}: a host with Xen did not come up, and another one was started: {words}")
            cls.drop()
            cls.boot()
        cls.prepare(cls.running)

    @classmethod
    def boot(cls):
        TARGET.mkdir(parents=True, exist_ok=True)
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="xen-", dir=TARGET))
        cls.running = Host(cls.parts, cls.folder, cls.images(cls.folder))
        cls.running.wait_ready()
        cls.running.ask("true")

    @classmethod
    def images(cls, folder):
        """Returns the files that dom0 finds under /data."""
        return []

    @classmethod
    def prepare(cls, host):
        """Prepares a new host for the first test."""

    @contextmanager
    def host(self):
        """Returns the running host, or a new one. A test that fails ends the host."""
        cls, well = type(self), False
        try:
            if cls.running is None:
                cls.start()
            yield cls.running
            self.assertEqual(self.complaints(), "")
            well = True
        except Exception as problem:
            raise AssertionError(f"{problem}\n{self.story()}") from problem
        finally:
            if not well:
                cls.drop()

    def complaints(self):
        """Returns the complaints of dom0's kernel since the last call."""
        return self.running.ask_status(f"dmesg -c | grep -E '{COMPLAINTS}'")[1]

    @classmethod
    def story(cls):
        """Returns the last words of the host, for a message. Never fails: it is called where something else has."""
        if cls.running is None:
            return ""
        kernel = cls.last_words(lambda: cls.running.ask("dmesg | tail -n 30", limit_s=10))
        return f"dom0's kernel:\n{kernel}\nthe console:\n{cls.running.said()}"

    @staticmethod
    def last_words(asked):
        """Returns what a host says when it is asked, or why it says nothing."""
        try:
            return asked()
        except (AssertionError, OSError) as problem:
            return str(problem)

    @classmethod
    def fetch(cls, name):
        """Copies a file out of the disk of a host that has ended."""
        path = cls.folder / f"fetched-{pathlib.Path(name).name}"
        done = run("debugfs", "-R", f"dump /{name} {path.name}", "data", cwd=cls.folder)
        if not path.exists():
            raise AssertionError(f"no {name} on the host's disk: {text(done.stderr)}")
        return path
