"""Bitmaps inside qcow2 images, which QEMU and Spile keep up by turns: nothing that changed is ever missing, and nothing is leaked."""

import json
import os
import random
import subprocess
import time

from support import KIB, LIMIT_S, MIB, STANDIN, PeerTest, need, qemu_img_json, run, spile, spile_binary, spile_json, text

BLOCK = 64 * KIB
SIZE_BYTES = 64 * MIB


class Bitmaps(PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("needs spile checkpoint")
        need("qemu-img", "qemu-utils")
        need("qemu-io", "qemu-utils")
        super().setUp()
        self.disk = self.path("disk.qcow2")
        self.create(self.disk)

    def create(self, disk, *options):
        run("qemu-img", "create", "-q", "-f", "qcow2", *options, disk, SIZE_BYTES)
        self.add(disk, "b")

    def add(self, disk, name, *options):
        run("qemu-img", "bitmap", "--add", *options, disk, name)

    def bitmaps(self, disk=None):
        """The flags of each bitmap, as QEMU tells them."""
        info = qemu_img_json("info", disk or self.disk)
        listed = info["format-specific"]["data"].get("bitmaps", [])
        return {bitmap["name"]: sorted(bitmap["flags"]) for bitmap in listed}

    def set_in(self, name, disk=None):
        """The blocks that QEMU finds set in a bitmap: it serves the image, and its own client maps the bitmap."""
        need("qemu-nbd", "qemu-utils")
        socket = self.path(f"qemu-{random.getrandbits(32):x}")
        command = ["qemu-nbd", "-r", "-f", "qcow2", "-k", socket, "-t", "-B", name, disk or self.disk]
        server = subprocess.Popen(command)
        try:
            for _ in range(500):
                if os.path.exists(socket):
                    break
                self.assertIsNone(server.poll(), "qemu-nbd does not serve the bitmap")
                time.sleep(0.02)
            options = f"driver=nbd,server.type=unix,server.path={socket},x-dirty-bitmap=qemu:dirty-bitmap:{name}"
            entries = json.loads(run("qemu-img", "map", "--output=json", "--image-opts", options).stdout)
        finally:
            server.terminate()
            server.wait(60)
        return {
            block
            for entry in entries if not entry["data"]
            for block in range(entry["start"] // BLOCK, (entry["start"] + entry["length"] - 1) // BLOCK + 1)
        }

    def changed(self, name, disk=None):
        """The blocks that Spile says have changed, and its warning."""
        found = spile_json("changed", disk or self.disk, "--since", name)
        blocks = {
            block
            for entry in found["ranges"]
            for block in range(entry["offset_bytes"] // BLOCK, (entry["offset_bytes"] + entry["length_bytes"] - 1) // BLOCK + 1)
        }
        return blocks, found["warning"]

    def write(self, uri, blocks, pattern):
        commands = [word for block in blocks for word in ("-c", f"write -P {pattern} {block * BLOCK + 512} 4096")]
        run("qemu-io", "-f", "raw", *commands, uri)

    def write_by_qemu(self, blocks, pattern, disk=None):
        commands = [word for block in blocks for word in ("-c", f"write -P {pattern} {block * BLOCK} 4096")]
        run("qemu-io", "-f", "qcow2", *commands, disk or self.disk)

    def kill(self, server, disk=None):
        """Kills the server, and waits until the kernel has let go of its locks."""
        server.kill()
        for _ in range(500):
            if subprocess.run(["qemu-img", "info", disk or self.disk], capture_output=True).returncode == 0:
                return
            time.sleep(0.02)
        self.fail("the image of the killed server stays locked")

    def assert_no_leak(self, disk=None):
        run("qemu-img", "check", "-q", disk or self.disk)

    def test_turns_of_both(self):
        """Spile writes, QEMU reads the bitmap, writes and goes on with it, and Spile takes it up."""
        self.add(self.disk, "off", "--disable")
        self.add(self.disk, "fine", "-g", "4096")
        written = set()
        for turn in range(3):
            server = self.serve(self.disk)
            blocks = {turn * 7 + 1, turn * 90 + 5, 1000 + turn}
            self.write(server.uri(), blocks, turn + 1)
            written |= blocks
            listed = {one["name"]: one for one in spile_json("checkpoint", self.disk, "--list")["checkpoints"]}
            self.assertTrue(listed["b"]["in_image"] and listed["fine"]["in_image"] and "off" not in listed)
            self.assertEqual(self.changed("b")[0], written)
            server.stop()
            self.assertEqual(self.bitmaps(), {"b": ["auto"], "off": [], "fine": ["auto"]})
            self.assertEqual(self.set_in("b"), written)
            self.assertEqual(self.set_in("fine"), written)
            self.assertEqual(self.set_in("off"), set())
            self.assert_no_leak()
            blocks = {500 + turn, 300 + 9 * turn}
            self.write_by_qemu(blocks, 9)
            written |= blocks
            self.assertEqual(self.changed("b"), (written, None))

    def test_a_kill_and_the_next_end_in_order(self):
        server = self.serve(self.disk)
        self.write(server.uri(), {3, 8}, 1)
        self.assertIn("in-use", self.bitmaps_while_open()["b"])
        self.kill(server)
        self.assertIn("in-use", self.bitmaps()["b"])
        self.assertLessEqual({3, 8}, self.changed("b")[0])
        server = self.serve(self.disk)
        self.write(server.uri(), {12}, 2)
        self.assertEqual(self.changed("b"), ({3, 8, 12}, None))
        server.stop()
        self.assertEqual((self.bitmaps()["b"], self.set_in("b")), (["auto"], {3, 8, 12}))

    def test_a_kill_and_a_write_of_qemu_behind_it(self):
        """QEMU does not note it in a bitmap that is in use, and nobody may believe that without it."""
        server = self.serve(self.disk)
        self.write(server.uri(), {3}, 1)
        self.kill(server)
        self.write_by_qemu({700}, 9)
        everything = set(range(SIZE_BYTES // BLOCK))
        self.assertEqual(self.changed("b")[0], everything)
        server = self.serve(self.disk)
        self.write(server.uri(), {12}, 2)
        self.assertEqual(self.changed("b")[0], everything)
        server.stop()
        self.assertIn("in-use", self.bitmaps()["b"])

    def test_a_write_to_the_parent(self):
        """The bitmap of a child does not tell it."""
        child = self.path("child.qcow2")
        run("qemu-img", "create", "-q", "-f", "qcow2", "-b", self.disk, "-F", "qcow2", child)
        self.add(child, "m")
        server = self.serve(child)
        self.write(server.uri(), {3}, 1)
        server.stop()
        self.assertEqual(self.changed("m", child), ({3}, None))
        self.write_by_qemu({500}, 7)
        for _ in range(2):
            found, warning = self.changed("m", child)
            self.assertIn(500, found)
            self.assertIsNotNone(warning)
            server = self.serve(child)
            self.assertIn(500, self.changed("m", child)[0])
            self.write(server.uri(), {12}, 1)
            self.kill(server, child)
        self.assertIn(500, self.changed("m", child)[0])

    def test_a_write_to_the_parent_and_a_session_that_changes_nothing(self):
        """The session that notices it is closed in order, and the next one is killed before its first change: no later one believes the bitmap as it was."""
        child = self.path("child.qcow2")
        run("qemu-img", "create", "-q", "-f", "qcow2", "-b", self.disk, "-F", "qcow2", child)
        self.add(child, "m")
        self.serve(child).stop()
        self.write_by_qemu({500}, 7)
        before = open(child, "rb").read()
        self.assertIn(500, self.changed("m", child)[0])
        self.assertTrue(before == open(child, "rb").read(), "a question has changed the image")
        server = self.serve(child)
        self.assertIn(500, self.changed("m", child)[0])
        server.stop()
        everything = set(range(SIZE_BYTES // BLOCK))
        self.assertEqual((self.bitmaps(child), self.set_in("m", child)), ({"m": ["auto"]}, everything))
        for _ in range(2):
            self.assertEqual(self.changed("m", child)[0], everything)
            server = self.serve(child)
            self.assertEqual(self.changed("m", child)[0], everything)
            self.kill(server, child)
        self.assertEqual(self.changed("m", child)[0], everything)
        # Another program begins the bitmap anew: from then on it is exact.
        self.serve(child).stop()
        run("qemu-img", "bitmap", "--clear", child, "m")
        self.assertEqual(self.changed("m", child), (set(), None))
        self.assert_no_leak(child)

    def bitmaps_while_open(self):
        info = json.loads(run("qemu-img", "info", "-U", "--output=json", self.disk).stdout)
        return {bitmap["name"]: bitmap["flags"] for bitmap in info["format-specific"]["data"]["bitmaps"]}

    def test_one_that_was_lost_is_never_believed(self):
        server = self.serve(self.disk)
        self.write(server.uri(), {3}, 1)
        self.kill(server)
        os.remove(self.path(".disk.qcow2.spile-changes"))
        server = self.serve(self.disk)
        self.write(server.uri(), {4}, 1)
        self.assertEqual(spile_json("checkpoint", self.disk, "--list")["checkpoints"], [])
        server.stop()
        self.assertIn("in-use", self.bitmaps()["b"])
        self.assertIn(b"not usable", spile("info", self.disk).stdout)

    def test_a_bitmap_is_removed_and_its_name_is_taken(self):
        self.add(self.disk, "c")
        server = self.serve(self.disk)
        self.write(server.uri(), {3}, 1)
        self.assertIn(b"already", spile("checkpoint", self.disk, "b", ok=False).stderr)
        spile("checkpoint", self.disk, "b", "--remove")
        server.stop()
        self.assertEqual((self.bitmaps(), self.set_in("c")), ({"c": ["auto"]}, {3}))
        self.assert_no_leak()
        spile("checkpoint", self.disk, "c", "--remove")
        self.assertEqual(self.bitmaps(), {})
        self.assert_no_leak()
        self.add(self.disk, "d")
        self.assertEqual(self.bitmaps(), {"d": ["auto"]})

    def test_takeovers_while_a_guest_writes(self):
        """Each server takes the disk over in the middle of a load: what was written under any of them is in the bitmap that QEMU finds."""
        before = {600, 800, 1000}
        self.write_by_qemu(before, 7)
        self.add(self.disk, "late")
        guest, socket = self.path("v"), self.path("n.sock")
        words = ("--vhost-user", guest, "--control", self.path("c"))
        server = self.serve(self.disk, at=socket, extra=words)
        load = [spile_binary(), "load", f"vhost-user:{guest}", "--rw", "randrw", "--verify", "--span", 32 * MIB, "--rate", 400]
        load += ["--reconnect", "60s", "--runtime", "4s"]
        with open(self.path("load.log"), "w+b") as log:
            load = subprocess.Popen([str(word) for word in load], stdout=log, stderr=log)
            for _ in range(3):
                time.sleep(0.8)
                self.assertIn("in-use", self.bitmaps_while_open()["late"])
                successor = self.serve(self.disk, at=socket, extra=(*words, "--takeover"))
                self.assertEqual(server.process.wait(LIMIT_S), 0)
                server.ended, server = 0, successor
                self.assertIsNone(load.poll(), "the load ended before the takeover")
            ended = load.wait(LIMIT_S)
            log.seek(0)
            said = text(log.read())
        self.assertEqual(ended, 0, said)
        self.assertIn("all right", said)
        self.assertEqual(server.stop(), 0)
        self.assertEqual(self.bitmaps(), {"b": ["auto"], "late": ["auto"]})
        raw = self.path("now.raw")
        run("qemu-img", "convert", "-O", "raw", self.disk, raw)
        with open(raw, "rb") as file:
            data = {block for block in range(SIZE_BYTES // BLOCK) if any(file.read(BLOCK))}
        self.assertGreater(len(data), 100)
        self.assertLessEqual(before, data)
        self.assertEqual((self.set_in("late"), self.set_in("b")), (data - before, data))
        self.assert_no_leak()

    def test_growth_and_snapshot(self):
        server = self.serve(self.disk)
        self.write(server.uri(), {3}, 1)
        spile("resize", self.disk, 2 * SIZE_BYTES)
        spile("snapshot", self.disk, "--name", "below")
        self.write(server.uri(), {7}, 1)
        gained = set(range(SIZE_BYTES // BLOCK, 2 * SIZE_BYTES // BLOCK))
        self.assertEqual(self.changed("b")[0], {3, 7} | gained)
        server.stop()
        below = next(self.path(name) for name in os.listdir(self.path("")) if "below" in name and name.endswith(".qcow2"))
        self.assertEqual(self.bitmaps(below), {"b": ["auto"]})
        found = self.set_in("b", below)
        self.assertLessEqual({3} | gained, found)
        self.assertLessEqual(found, {3, 7} | gained)
        self.assertEqual((self.bitmaps(), self.changed("b")[0]), ({}, {3, 7} | gained))

    def test_what_has_changed_since_a_bitmap_makes_an_older_copy_a_newer_one(self):
        """The copy and the bitmap are QEMU's; the blocks to copy are those that Spile names."""
        self.write_by_qemu(range(0, 1000, 37), 3)
        base, now = self.path("base.raw"), self.path("now.raw")
        run("qemu-img", "convert", "-O", "raw", self.disk, base)
        run("qemu-img", "bitmap", "--clear", self.disk, "b")
        server = self.serve(self.disk)
        self.write(server.uri(), {5, 77, 900}, 8)
        # A backup of Spile knows which checkpoint it is of, and this is none.
        refused = spile("backup", self.disk, base, "--since", "b", "--wait", ok=False)
        self.assertIn(b"manifest", refused.stderr)
        blocks, _ = self.changed("b")
        server.stop()
        self.assertEqual((blocks, self.set_in("b")), ({5, 77, 900}, {5, 77, 900}))
        run("qemu-img", "convert", "-O", "raw", self.disk, now)
        with open(now, "rb") as new, open(base, "r+b") as old:
            for block in blocks:
                new.seek(block * BLOCK)
                old.seek(block * BLOCK)
                old.write(new.read(BLOCK))
        self.assertSame(base, now)


if __name__ == "__main__":
    import unittest

    unittest.main()
