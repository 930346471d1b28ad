"""qcow2 images that keep their data in another file, raw and not: QEMU and Spile make them, and write to them in turns.

qemu-img checks each image after each step, and what it reads is the truth. A raw data file is compared byte by byte with that.
"""

import os
import random

from support import KIB, MIB, need, qemu_img_json, run, spile, spile_json, text
from test_qcow2 import SIZE_BYTES, Qcow2

OPTIONS = ("", ",extended_l2=on", ",cluster_size=4k", ",cluster_size=2M")


class DataFiles(Qcow2):
    def apart(self, is_raw, options="", seed=None, backing=None):
        """An image of qemu-img with its data in data.raw."""
        data = self.path("data.raw")
        data.unlink(missing_ok=True)
        raw = "on" if is_raw else "off"
        return self.image(f"data_file={data},data_file_raw={raw}" + options, seed=seed, backing=backing), data

    def assertHolds(self, image, data, truth, is_raw):
        """Nothing is wrong with the image, both programs read the truth in it, and a raw data file is the truth."""
        run("qemu-img", "check", "-q", "-f", "qcow2", image)
        spile("check", image, "--allow-data-file")
        run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", image, truth)
        spile("compare", image, truth, "--allow-data-file")
        # QEMU has a data file end with a whole cluster. What is behind the disk is zero.
        self.assertGreaterEqual(data.stat().st_size, truth.stat().st_size)
        if is_raw:
            run("qemu-img", "compare", "-f", "raw", "-F", "raw", data, truth)
        said = qemu_img_json("info", "-f", "qcow2", image)["format-specific"]["data"]
        self.assertEqual(said["data-file-raw"], is_raw)

    def turns(self, image, data, is_raw, seed, kills=False):
        """Spile and QEMU write in turns; a copy gets the same."""
        for turn in range(3):
            truth = self.raw_of(image)
            server = self.serve(image, extra=("--allow-data-file",))
            self.fill(server.uri(), seed + turn, "raw", discards=False)
            self.fill(truth, seed + turn, "raw", discards=False)
            if kills:
                server.kill()
                self.wait_for_lock(image)
                run("qemu-img", "check", "-q", "-f", "qcow2", "-r", "leaks", image)
            else:
                self.assertEqual(server.stop(), 0)
            self.assertHolds(image, data, truth, is_raw)
            self.fill(image, seed + 50 + turn)

    def test_qemu_makes_them(self):
        for number, options in enumerate(OPTIONS):
            for is_raw in (False, True):
                with self.subTest(options, is_raw=is_raw):
                    image, data = self.apart(is_raw, options, seed=20 + number)
                    self.turns(image, data, is_raw, 30 + number)

    def test_a_data_file_that_is_a_block_device(self):
        """QEMU makes the image over a loop device that is full of junk; both write to it in turns, also behind kills."""
        need("losetup", "mount")
        if os.geteuid() != 0:
            self.skipTest("loop devices need root")
        for is_raw in (False, True):
            with self.subTest(is_raw=is_raw):
                junk = self.path(f"device-{is_raw}")
                junk.write_bytes(random.Random(7).randbytes(16 * MIB))
                made = run("losetup", "--find", "--show", junk, ok=None)
                if made.returncode != 0:
                    self.skipTest(f"no loop device: {text(made.stderr).strip()}")
                device = text(made.stdout).strip()
                self.addCleanup(run, "losetup", "--detach", device)
                raw = "on" if is_raw else "off"
                image = self.image(f"data_file={device},data_file_raw={raw}")
                for turn in range(4):
                    truth = self.raw_of(image)
                    server = self.serve(image, extra=("--allow-data-file", "--allow-parents", "/dev"))
                    self.fill(server.uri(), 80 + turn, "raw", discards=False)
                    self.fill(truth, 80 + turn, "raw", discards=False)
                    if turn % 2:
                        server.kill()
                        self.wait_for_lock(image)
                        run("qemu-img", "check", "-q", "-f", "qcow2", "-r", "leaks", image)
                    else:
                        self.assertEqual(server.stop(), 0)
                    run("qemu-img", "check", "-q", "-f", "qcow2", image)
                    run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", image, truth)
                    spile("compare", image, truth, "--allow-data-file", "--allow-parents", "/dev")
                    if is_raw:
                        self.assertEqual(junk.read_bytes()[:SIZE_BYTES], truth.read_bytes())
                    self.fill(image, 90 + turn)

    def test_kills(self):
        for is_raw in (False, True):
            for options in ("", ",extended_l2=on"):
                with self.subTest(options, is_raw=is_raw):
                    image, data = self.apart(is_raw, options, seed=None)
                    self.turns(image, data, is_raw, 60, kills=True)

    def test_spile_makes_them(self):
        for number, options in enumerate(OPTIONS):
            for is_raw in (False, True):
                with self.subTest(options, is_raw=is_raw):
                    image, data = self.path("s.qcow2"), self.path("s.raw")
                    for path in (image, data):
                        path.unlink(missing_ok=True)
                    words = ["-o", options[1:]] if options else []
                    words += ["--data-file-raw"] if is_raw else []
                    spile("create", image, "--size", str(SIZE_BYTES), "--data-file", data, *words)
                    empty = self.path("zeroes.raw")
                    with open(empty, "wb") as file:
                        file.truncate(SIZE_BYTES)
                    self.assertHolds(image, data, empty, is_raw)
                    self.fill(image, 70 + number, discards=False)
                    self.fill(empty, 70 + number, "raw", discards=False)
                    self.assertHolds(image, data, empty, is_raw)
                    self.turns(image, data, is_raw, 80 + number)

    def test_what_qemu_has_discarded_is_written(self):
        """QEMU drops entries when it discards, also with a raw data file."""
        for is_raw in (False, True):
            with self.subTest(is_raw=is_raw):
                image, data = self.apart(is_raw, seed=5)
                run("qemu-io", "-f", "qcow2", "-d", "unmap", "-c", "discard 1M 4M", "-c", "write -z -u 6M 2M", image)
                self.turns(image, data, is_raw, 90)

    def test_over_a_parent(self):
        base = self.raw_of(self.image(seed=11), "base.raw")
        for options in ("", ",extended_l2=on"):
            with self.subTest(options):
                image, data = self.apart(False, options, seed=12, backing=(base.name, "raw"))
                self.turns(image, data, False, 300)

    def test_sizes_and_space(self):
        for is_raw in (False, True):
            with self.subTest(is_raw=is_raw):
                image, data = self.apart(is_raw, seed=1)
                truth = self.raw_of(image)
                for size_bytes in (20 * MIB, 6 * MIB + 512, 9 * MIB):
                    shrink = ("--shrink", "--discard") if size_bytes < truth.stat().st_size else ()
                    spile("resize", image, str(size_bytes), *shrink, "--allow-data-file")
                    with open(truth, "r+b") as file:
                        file.truncate(size_bytes)
                    self.assertHolds(image, data, truth, is_raw)
                server = self.serve(image, extra=("--allow-data-file",))
                run("qemu-io", "-f", "raw", "-c", f"write -P 5 0 {9 * MIB}", "-c", "flush", server.uri())
                before = data.stat().st_blocks
                run("qemu-io", "-f", "raw", "-d", "unmap", "-c", f"discard 0 {8 * MIB}", "-c", "flush", server.uri())
                self.assertEqual(server.stop(), 0)
                self.assertLessEqual(data.stat().st_blocks * 512, before * 512 - 7 * MIB)
                run("qemu-img", "check", "-q", "-f", "qcow2", image)

    def test_the_life_of_a_disk(self):
        for is_raw in (False, True):
            with self.subTest(is_raw=is_raw):
                image, data = self.apart(is_raw, seed=2)
                for name in ("monday.qcow2", "clone.qcow2"):
                    self.path(name).unlink(missing_ok=True)
                allow = "--allow-data-file"
                truth = self.raw_of(image)
                for words in (("coalesce", image), ("move", image, "--to", self.path("m.qcow2"))):
                    before = image.read_bytes(), data.read_bytes()
                    spile(*words, allow, ok=False)
                    self.assertEqual((image.read_bytes(), data.read_bytes()), before)
                server = self.serve(image, extra=(allow,))
                spile("snapshot", image, "--name", "monday")
                spile("clone", self.path("monday.qcow2"), self.path("clone.qcow2"), allow)
                self.fill(server.uri(), 3, "raw", discards=False)
                self.assertEqual(server.stop(), 0)
                self.assertHolds(self.path("monday.qcow2"), data, truth, is_raw)
                run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", self.path("clone.qcow2"), truth)
                self.fill(truth, 3, "raw", discards=False)
                run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", image, truth)
                refused = spile("coalesce", image, allow, ok=False)
                self.assertIn("keeps its data in another file", text(refused.stderr))
                refused = spile("delete", data, ok=False)
                self.assertIn("monday.qcow2", text(refused.stderr))
                for path in (image, self.path("clone.qcow2")):
                    spile("flatten", path, allow)
                    run("qemu-img", "check", "-q", "-f", "qcow2", path)
                run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", image, truth)
                spile("delete", self.path("monday.qcow2"), allow, "--with-data-file")
                self.assertFalse(data.exists() or self.path("monday.qcow2").exists())
                spile("check", image)

    def test_what_is_refused(self):
        image, data = self.apart(False, seed=4)
        refused = spile("serve", image, "--nbd", "unix:/nowhere", ok=False)
        self.assertIn("--allow-data-file", text(refused.stderr))
        # Nothing that is there is overwritten, or comes to light.
        for words in (("--data-file", data), ("-o", f"data_file={data}")):
            refused = spile("create", self.path("n.qcow2"), "--size", "1M", *words, ok=False)
            self.assertIn("something of this name", text(refused.stderr))
            self.assertFalse(self.path("n.qcow2").exists())
        elsewhere = self.path("elsewhere")
        elsewhere.mkdir()
        refused = spile("create", elsewhere / "n.qcow2", "--size", "1M", "--data-file", self.path("n.raw"), ok=False)
        self.assertIn("--allow-parents", text(refused.stderr))
        self.assertFalse(self.path("n.raw").exists())
        # Two images of one data file.
        two = self.path("two.qcow2")
        two.write_bytes(image.read_bytes())
        refused = spile("serve", two, "--allow-data-file", "--nbd", "unix:/nowhere", ok=False)
        self.assertIn(image.name, text(refused.stderr))
        refused = spile("delete", two, "--allow-data-file", ok=False)
        self.assertTrue(data.exists() and two.exists(), text(refused.stderr))
        two.unlink()
        server = self.serve(image, extra=("--allow-data-file",))
        refused = spile("serve", data, "--nbd", "unix:/nowhere", ok=False)
        self.assertNotEqual(text(refused.stderr), "")
        self.assertEqual(server.stop(), 0)
        refused = spile("internal-snapshot", image, "--create", "s", "--allow-data-file", ok=False)
        self.assertIn("data file", text(refused.stderr))

    def test_the_map_says_where_data_lie(self):
        image, data = self.apart(True, seed=None)
        run("qemu-io", "-f", "qcow2", "-c", f"write -P 1 {3 * MIB} {64 * KIB}", image)
        said = spile_json("map", image, "--allow-data-file")
        self.assertEqual(said["layers"][0]["path"], str(data.resolve()))
        found = [run for run in said["runs"] if run["kind"] == "data"]
        self.assertEqual([run["file_offset_bytes"] for run in found], [run["offset_bytes"] for run in found])
        self.assertIn(3 * MIB, [run["offset_bytes"] for run in found])

    def test_a_random_load(self):
        """Longer, and with a flush before each kill: what was flushed is there for QEMU."""
        for is_raw in (False, True):
            with self.subTest(is_raw=is_raw):
                image, data = self.apart(is_raw, seed=None)
                dice, truth = random.Random(9), self.raw_of(image)
                for _ in range(4):
                    server = self.serve(image, extra=("--allow-data-file",))
                    seed = dice.randrange(1 << 30)
                    self.fill(server.uri(), seed, "raw", discards=False)
                    self.fill(truth, seed, "raw", discards=False)
                    server.kill()
                    self.wait_for_lock(image)
                    run("qemu-img", "check", "-q", "-f", "qcow2", "-r", "leaks", image)
                    self.assertHolds(image, data, truth, is_raw)
