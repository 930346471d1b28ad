"""Disks are moved while a client writes and the server is killed; qemu-img and 7-Zip read what is left."""

import json
import random
import threading
import time

from support import (
    LIMIT_S, PeerTest, STANDIN, check, need, need_module, read_by_seven_zip, run, seven_zip, spile, spile_json,
)
from test_coalesce import Writer


class Move(PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("needs spile move")
        super().setUp()
        need_module("nbd", "python3-libnbd")
        need("qemu-img", "qemu-utils")
        for folder in ("old", "new"):
            self.path(folder).mkdir()

    def disk(self):
        """`old/disk.vhd` with a parent; returns what it holds."""
        raw = self.raw("content.raw")
        spile("convert", raw, self.path("old/parent.vhd"))
        spile("create", self.path("old/disk.vhd"), "--parent", self.path("old/parent.vhd"))
        return raw

    def assertReads(self, disk, content):
        model = self.path("model.raw")
        model.write_bytes(content)
        check(disk)
        kind = "vpc" if disk.suffix == ".vhd" else "raw"
        run("qemu-img", "compare", "-f", kind, "-F", "raw", disk, model)
        if seven_zip() and kind == "vpc":
            out = self.path("out.raw")
            out.write_bytes(read_by_seven_zip(disk))
            self.assertSame(model, out, "(7-Zip)")

    def where(self):
        """The one of both paths that there is; in the middle of a hand-over there is none, and the disk is where it was."""
        there = [path for path in (self.path("old/disk.vhd"), self.path("new/disk.vhd")) if path.exists()]
        self.assertLessEqual(len(there), 1, "there is an image at both paths")
        self.last = there[0] if there else self.last
        return self.last

    def test_there_and_back_in_other_formats(self):
        raw = self.disk()
        content = raw.read_bytes()
        spile("move", self.path("old/disk.vhd"), "--to", self.path("new/disk.raw"))
        self.assertReads(self.path("new/disk.raw"), content)
        # Holes stay holes.
        self.assertLess(self.path("new/disk.raw").stat().st_blocks * 512, len(content) * 3 // 4)
        spile("move", self.path("new/disk.raw"), "--to", self.path("new/disk.vhd"))
        self.assertReads(self.path("new/disk.vhd"), content)

    def test_under_load_and_kills(self):
        """The server is killed at any moment of a move, often near its end, and started where the disk is."""
        raw, dice = self.disk(), random.Random(11)
        writer = Writer(raw.read_bytes(), seed=7)
        done = kills = 0
        for turn in range(60):
            disk = self.where()
            server = self.serve(disk)
            writer.stops = False
            client = threading.Thread(target=writer.work, args=[server.uri()])
            client.start()
            # A kill may have come before the old image was deleted.
            disk.with_name("disk.moved.vhd").unlink(missing_ok=True)
            there = self.path("new/disk.vhd") if disk.parent.name == "old" else self.path("old/disk.vhd")
            if not disk.with_name(f".{disk.name}.spile-job").exists():
                spile("move", disk, "--to", there, "--delete-source", ok=None)
            # A move takes some tenths of a second here.
            time.sleep(dice.random() * 0.5)
            if turn % 3 < 2:
                server.kill()
                kills += 1
                client.join(LIMIT_S)
            else:
                end = time.monotonic() + LIMIT_S
                while disk.exists():
                    self.assertLess(time.monotonic(), end, server.output())
                    time.sleep(0.01)
                writer.stops = True
                client.join(LIMIT_S)
                self.assertEqual(server.stop(), 0)
                done += 1
            if self.where().exists():
                spile("info", self.where())
        self.assertGreaterEqual(done, 10)
        self.assertGreater(writer.writes, 100)
        server = self.serve(self.where())
        end = time.monotonic() + LIMIT_S
        while any(self.folder.glob("*/.disk.vhd.spile-job")):
            self.assertLess(time.monotonic(), end, server.output())
            time.sleep(0.05)
        writer.stops = True
        handle = writer.nbd.NBD()
        handle.connect_uri(server.uri())
        if writer.torn:
            writer.step(handle)
        handle.flush()
        handle.shutdown()
        self.assertEqual(server.stop(), 0)
        self.assertReads(self.where(), writer.content)

    def test_the_pause_is_short_under_load(self):
        raw = self.disk()
        writer = Writer(raw.read_bytes(), seed=3)
        server = self.serve(self.path("old/disk.vhd"))
        client = threading.Thread(target=writer.work, args=[server.uri()])
        client.start()
        # There and back: a busy host may hold one of them up.
        stalls = []
        for source, target in [("old", "new"), ("new", "old"), ("old", "new"), ("new", "old"), ("old", "new")]:
            moved = spile_json("move", self.path(f"{source}/disk.vhd"), "--to", self.path(f"{target}/disk.vhd"),
                               "--delete-source", "--wait")
            print(f"the hand-over: {json.dumps(moved['motion'])}")
            self.assertEqual(moved["state"], "done")
            stalls.append(moved["motion"]["longest_stall_us"])
        # What is promised: 100 ms.
        self.assertLess(min(stalls), 100_000, stalls)
        self.assertGreater(min(stalls), 0, stalls)
        writes = writer.writes
        end = time.monotonic() + LIMIT_S
        while writer.writes == writes:
            self.assertLess(time.monotonic(), end, "the client does not go on")
            time.sleep(0.01)
        writer.stops = True
        client.join(LIMIT_S)
        self.assertEqual(server.stop(), 0)
        self.assertReads(self.path("new/disk.vhd"), bytes(writer.content))
