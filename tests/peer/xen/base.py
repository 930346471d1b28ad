"""The base of tests on Xen: one host for all tests of a run (but those of moves), and a new one after a test that failed.

A class adds what it needs to that host: `images` returns files for the host's disk, `prepare` is called on the host before
the first test of the class, `compare_images` looks at the disk when the host has ended (test_xen_written.py).
"""

import atexit
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
    # Of all classes together: the host, the folder with its files, and the classes that it is prepared for.
    running = None
    folder = None
    prepared = set()

    @classmethod
    def setUpClass(cls):
        for program, package in (
            ("qemu-system-x86_64", "qemu-system-x86"), ("busybox", "busybox-static"), ("debugfs", "e2fsprogs"),
        ):
            need(program, package)
        XenTest.parts = parts()

    @staticmethod
    def drop():
        host, XenTest.running = XenTest.running, None
        if host:
            host.close()
        if XenTest.folder:
            shutil.rmtree(XenTest.folder, ignore_errors=True)

    @classmethod
    def finish(cls):
        """Ends the host in order, if one runs, and looks at what it has left in the images."""
        if XenTest.running is None:
            return
        try:
            for each in cls.that_define("stop_backend"):
                each.stop_backend()
            XenTest.running.leave()
            for each in cls.that_define("compare_images"):
                each.compare_images()
        finally:
            cls.drop()

    @classmethod
    def start(cls):
        """Starts a host with the images of all classes. An emulated host that does not come up is told, and another one is
        started, once: no test has begun by then."""
        try:
            cls.boot()
        except AssertionError as problem:
            words = f"{problem}\n{cls.story()}".strip().replace("\n", "\n    ")
            print(f"NOTE {cls.__name__}: a host with Xen did not come up, and another one was started: {words}")
            cls.drop()
            cls.boot()

    @staticmethod
    def boot():
        TARGET.mkdir(parents=True, exist_ok=True)
        folder = XenTest.folder = pathlib.Path(tempfile.mkdtemp(prefix="xen-", dir=TARGET))
        XenTest.prepared = set()
        images = [path for cls in XenTest.that_define("images") for path in cls.images(folder)]
        XenTest.running = Host(XenTest.parts, folder, images)
        XenTest.running.wait_ready()
        XenTest.running.ask("true")

    @staticmethod
    def that_define(name):
        """Returns the loaded classes of tests that have a method of this name of their own."""
        found, waiting = [], [XenTest]
        while waiting:
            cls = waiting.pop(0)
            waiting += cls.__subclasses__()
            if name in vars(cls):
                found.append(cls)
        return found

    @classmethod
    def prepare_all(cls):
        """Prepares the host for the class and for those that it is made of, once."""
        for base in reversed(cls.__mro__):
            if "prepare" in vars(base) and base not in XenTest.prepared:
                base.prepare(XenTest.running)
                XenTest.prepared.add(base)

    @contextmanager
    def host(self):
        """Returns the running host, or a new one. A test that fails ends the host."""
        cls, well = type(self), False
        try:
            if cls.running is None:
                cls.start()
            cls.prepare_all()
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


atexit.register(XenTest.drop)
