"""A real guest whose thin disk has no space on the host: it waits, and loses nothing when there is space again."""

import contextlib
import os
import pathlib
import tempfile
import unittest

from kernel import kernel
from lab import Lab
from support import LIMIT_S, MIB, STANDIN, TARGET, need, run, spile_json
from vhost import need_server, wait_until

# What the host's file system holds at first, and what the guest writes in all: 8 MiB in each file.
HOST_BYTES = 32 * MIB
FILES = 8


class FullLab(Lab):
    """The disk `plain` lies in a small file system of the host, and waits for space."""

    OPTIONS = {"plain": ",on-error=pause"}

    def make_disks(self):
        disks = super().make_disks()
        self.small = self.folder / "small"
        self.small.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={HOST_BYTES}", "spile-full", self.small)
        run("cp", "--sparse=always", disks["plain"], self.small)
        return {**disks, "plain": self.small / disks["plain"].name}

    def add_space(self):
        run("mount", "-o", f"remount,size={HOST_BYTES + (FILES + 2) * 8 * MIB}", self.small)

    def destroy(self):
        if self.server and self.server.ended is None:
            self.server.kill()
        if self.small.is_mount():
            run("umount", self.small)
        super().destroy()


class Trouble(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_server()
        if STANDIN:
            raise unittest.SkipTest("the stand-in has another policy")
        if os.geteuid() != 0:
            raise unittest.SkipTest("a small file system is mounted by root only")
        for program, package in (
            ("qemu-system-x86_64", "qemu-system-x86"), ("mke2fs", "e2fsprogs"), ("e2fsck", "e2fsprogs"),
            ("busybox", "busybox-static"), ("fio", "fio"), ("ldd", "libc-bin"),
        ):
            need(program, package)
        cls.kernel = kernel()

    @contextlib.contextmanager
    def guest(self):
        TARGET.mkdir(parents=True, exist_ok=True)
        lab = FullLab(self.kernel, pathlib.Path(tempfile.mkdtemp(prefix="full-", dir=TARGET)))
        try:
            lab.start()
            yield lab
        except Exception as problem:
            raise AssertionError(f"{problem}\n{lab.story()}") from problem
        finally:
            lab.destroy()

    def state(self, lab):
        disks = spile_json("ls", lab.sockets.control)["disks"]
        return next(disk for disk in disks if disk["name"] == "plain")

    def test_a_thin_disk_that_fills_up_waits_and_loses_nothing(self):
        with self.guest() as lab:
            lab.machine.ask("mkdir -p /tmp/plain && mount -t ext4 /dev/vdc /tmp/plain")
            lab.machine.ask(f"start fill fill /tmp/plain {FILES}")
            wait_until(lambda: self.state(lab)["state"] == "waiting", LIMIT_S, "the disk waits")
            waiting = self.state(lab)["waiting"]
            self.assertEqual((waiting["operation"], waiting["error"]["kind"]), ("write", "no_space"))
            # The guest and its other disks go on.
            lab.machine.ask("echo well > /data/well && sync -d /data/well; cat /data/well")
            self.assertNotEqual(lab.machine.ask_status("[ -e /tmp/fill.status ]")[0], 0, "the guest did not wait")
            lab.add_space()
            wait_until(lambda: lab.machine.ask_status("[ -e /tmp/fill.status ]")[0] == 0, LIMIT_S, "the guest goes on")
            self.assertEqual(lab.machine.ask("cat /tmp/fill.status; tail -n 1 /tmp/fill.log").split(), ["0", "whole"])
            self.assertEqual(self.state(lab)["state"], "running")
            self.assertIn(" rw,", lab.machine.ask("grep /tmp/plain /proc/mounts"))
            self.assertEqual(lab.complaints(), "")
            # Nothing comes from the guest's memory any more.
            lab.machine.ask("umount /tmp/plain && mount -t ext4 /dev/vdc /tmp/plain")
            lab.machine.ask("cd /tmp/plain && sha256sum -c sums >/dev/null && cd / && umount /tmp/plain")
            lab.finish()
            run("e2fsck", "-fn", lab.disks["plain"])
