"""qcow2 images that keep their data in another file, raw and not: QEMU and Spile make them, and write to them in turns.

qemu-img checks each image after each step, and what it reads is the truth. A raw data file is compared byte by byte with that.
"""

import os
import pathlib
import random
import unittest.mock

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
                spile("snapshot", image, "--name", "monday.qcow2")
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

    def test_a_data_file_on_a_block_device(self):
        """The device is longer than the disk, and what is behind the disk's end stays as it is."""
        for is_raw in (False, True):
            with self.subTest(is_raw=is_raw):
                file = self.path(f"device-{is_raw}")
                file.write_bytes(b"\x5a" * (16 * MIB))
                self.on_device(self.loop_device(file), is_raw)

    def on_device(self, device, is_raw):
        raw = "on" if is_raw else "off"
        image = self.image(f"data_file={device},data_file_raw={raw}", seed=31)
        truth = self.raw_of(image)
        allow = ("--allow-data-file", "--allow-parents", "/dev")
        for seed, kills in ((32, False), (33, True), (34, False)):
            server = self.serve(image, extra=allow)
            self.fill(server.uri(), seed, "raw", discards=False)
            self.fill(truth, seed, "raw", discards=False)
            if kills:
                server.kill()
                self.wait_for_lock(image)
            else:
                self.assertEqual(server.stop(), 0)
            run("qemu-img", "check", "-q", "-f", "qcow2", *(("-r", "leaks") if kills else ()), image)
            run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", image, truth)
            spile("compare", image, truth, *allow)
        with open(device, "rb") as file:
            if is_raw:
                self.assertTrue(file.read(SIZE_BYTES) == truth.read_bytes(), "the raw data file is not the disk")
            file.seek(13 * MIB)
            self.assertTrue(file.read() == b"\x5a" * (3 * MIB), "what is behind the disk's end has changed")

    def test_failed_syncs_of_the_data_file(self):
        """A flush fails then, also in the next server, until the loss is accepted; and no entry shows a first write that may be lost."""
        need("cc", "gcc")
        library = self.path("faulty_sync.so")
        source = pathlib.Path(__file__).resolve().parents[2] / "crates/spile/tests/it/common/faulty_sync.c"
        run("cc", "-shared", "-fPIC", "-o", library, source, "-ldl")
        where = {"LD_PRELOAD": str(library), "FAULTS": str(self.folder)}
        for is_raw in (False, True):
            with self.subTest(is_raw=is_raw):
                image, data = self.apart(is_raw, seed=None)
                truth = self.raw_of(image)
                told = self.path("fail-sync-of")
                with unittest.mock.patch.dict(os.environ, where):
                    server = self.serve(image, extra=("--allow-data-file", "--control", self.path("c")))
                self.io(server, "write -P 1 0 4k", "flush")
                # In place: the flush has to sync the data file.
                told.write_text(str(data.stat().st_ino))
                self.io(server, "write -P 2 0 4k", "flush", fails=True)
                self.assertFalse(told.exists(), "no sync of the data file was tried")
                self.io(server, "flush", fails=True)
                server.kill()
                self.wait_for_lock(image)
                with unittest.mock.patch.dict(os.environ, where):
                    server = self.serve(image, extra=("--allow-data-file", "--control", self.path("c")))
                self.io(server, "flush", fails=True)
                self.assertIn("a sync has failed", text(spile("accept-loss", self.path("c")).stdout))
                self.io(server, "flush")
                lines = ["write -P 2 0 4k"]
                if not is_raw:
                    # The first write to a cluster waits for a sync of its own.
                    told.write_text(str(data.stat().st_ino))
                    self.io(server, "write -P 3 1M 4k", fails=True)
                    self.assertFalse(told.exists(), "no sync of the data file was tried")
                    self.io(server, "read -P 0 1M 4k")
                    server.kill()
                    self.wait_for_lock(image)
                    run("qemu-io", "-r", "-f", "qcow2", "-c", "read -P 0 1M 4k", image)
                    server = self.serve(image, extra=("--allow-data-file", "--control", self.path("c")))
                    spile("accept-loss", self.path("c"))
                self.io(server, "write -P 4 1M 4k", "flush")
                self.assertEqual(server.stop(), 0)
                for line in (*lines, "write -P 4 1M 4k"):
                    run("qemu-io", "-f", "raw", "-c", line, truth)
                run("qemu-img", "check", "-q", "-f", "qcow2", "-r", "leaks", image)
                self.assertHolds(image, data, truth, is_raw)

    def io(self, server, *lines, fails=False):
        """What qemu-io does with a server; it ends with an error where one of them fails."""
        words = [word for line in lines for word in ("-c", line)]
        # Its own flush at the end tells nothing that is asked here.
        done = run("qemu-io", "-t", "writeback", "-f", "raw", *words, server.uri(), ok=None)
        said = text(done.stdout) + text(done.stderr)
        self.assertEqual(done.returncode != 0, fails, said)
        self.assertNotIn("Pattern verification failed", said)

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
