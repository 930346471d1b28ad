"""qemu-img on the images that Spile made, and Spile on those that qemu-img made.

qemu-img knows no chains (it takes a differencing image for one that stands alone): chains are
judged by 7-Zip and libvhdi.
"""

import json

from support import (
    GIB, MIB, STANDIN, PeerTest, apply_change, check, need, overwrite_some, qemu_img_json, run, spile,
    spile_json,
)

# Sizes that the CHS geometry of a VHD cannot express, some that it can, and the limits.
SIZES_BYTES = (
    512, 3 * 512, 64 * 1024, 2 * MIB - 512, 10 * MIB + 512, 64 * MIB, 127 * MIB + 3 * 512, GIB,
    4 * GIB + 512, 127 * GIB + 512 * 17, 1000 * 1000 * 1000 * 512, 2040 * GIB,
)

QEMU_KINDS = {
    "dynamic": "subformat=dynamic",
    "dynamic, exact": "subformat=dynamic,force_size=on",
    "fixed": "subformat=fixed",
    "fixed, exact": "subformat=fixed,force_size=on",
}


class QemuImg(PeerTest):
    def setUp(self):
        need("qemu-img", "qemu-utils")
        if STANDIN:
            self.skipTest("needs spile create")
        super().setUp()

    def write_over_nbd(self, image, raw):
        """Copies the content of `raw` into `image` through a server."""
        need("nbdcopy", "libnbd-bin")
        server = self.serve(image)
        run("nbdcopy", "--flush", raw, server.uri())
        self.assertEqual(server.stop(), 0)

    def change_over_nbd(self, image, raw, seed):
        """Changes some places of a raw file, and of an image over NBD. Returns a copy of the file as it was."""
        before = self.path("before.raw")
        before.write_bytes(raw.read_bytes())
        overwrite_some(raw, seed)
        server = self.serve(image)
        apply_change(server, before, raw)
        self.assertEqual(server.stop(), 0)
        return before

    def assertQemuReads(self, image, raw):
        run("qemu-img", "compare", "-f", "vpc", "-F", "raw", image, raw)
        back = self.path("qemu-back.raw")
        run("qemu-img", "convert", "-f", "vpc", "-O", "raw", image, back)
        self.assertSame(raw, back)


class OursByQemu(QemuImg):
    def test_sizes(self):
        for size_bytes in SIZES_BYTES:
            with self.subTest(size_bytes=size_bytes):
                image = self.path("size.vhd")
                image.unlink(missing_ok=True)
                spile("create", image, "--size", size_bytes)
                self.assertEqual(spile_json("info", image)["virtual_size_bytes"], size_bytes)
                info = qemu_img_json("info", "-f", "vpc", image)
                self.assertEqual(info["virtual-size"], size_bytes)

    def test_converted_raw_is_the_same(self):
        raw = self.raw(size_bytes=96 * MIB + 512)
        spile("convert", raw, self.path("a.vhd"))
        check(self.path("a.vhd"))
        self.assertQemuReads(self.path("a.vhd"), raw)

    def test_zeros_take_no_space(self):
        raw = self.empty(size_bytes=512 * MIB)
        spile("convert", raw, self.path("a.vhd"))
        self.assertLess(self.path("a.vhd").stat().st_blocks * 512, 8 * MIB)
        self.assertQemuReads(self.path("a.vhd"), raw)

    def test_fixed(self):
        raw, image = self.raw(size_bytes=20 * MIB), self.path("a.vhd")
        spile("create", image, "--size", 20 * MIB, "--subformat", "fixed")
        self.write_over_nbd(image, raw)
        self.assertQemuReads(image, raw)

    def test_dynamic_written_over_nbd(self):
        raw, image = self.raw(size_bytes=96 * MIB), self.path("a.vhd")
        spile("create", image, "--size", 96 * MIB)
        self.write_over_nbd(image, raw)
        check(image)
        self.assertQemuReads(image, raw)

    def test_rewritten_and_trimmed(self):
        raw, image = self.raw(size_bytes=64 * MIB), self.path("a.vhd")
        spile("convert", raw, image)
        for seed in (5, 6):
            self.change_over_nbd(image, raw, seed)
        server = self.serve(image)
        run("qemu-io", "-f", "raw", "-c", "write -z -u 8M 16M", "-c", "flush", server.uri())
        self.assertEqual(server.stop(), 0)
        with open(raw, "r+b") as file:
            file.seek(8 * MIB)
            file.write(bytes(16 * MIB))
        check(image)
        self.assertQemuReads(image, raw)

    def test_map_agrees(self):
        raw, image = self.raw(size_bytes=64 * MIB), self.path("a.vhd")
        spile("convert", raw, image)
        ours = spile_json("map", image)["runs"]
        self.assertEqual(sum(run["len_bytes"] for run in ours), 64 * MIB)
        theirs = qemu_img_json("map", "-f", "vpc", image)
        # QEMU looks at blocks only. What it calls a hole must be a hole to Spile, too.
        data = [(r["offset_bytes"], r["len_bytes"]) for r in ours if r["kind"] == "data"]
        holes = [(e["start"], e["start"] + e["length"]) for e in theirs if not e["data"]]
        for at, length in data:
            for begin, end in holes:
                self.assertTrue(at + length <= begin or at >= end, f"data at {at} in a hole of QEMU's")
        self.assertTrue(data)

    def test_qemu_may_write_to_it(self):
        """A program that knows neither batmap nor journal writes to an image of Spile, and Spile uses it again."""
        raw, image = self.raw(size_bytes=64 * MIB), self.path("a.vhd")
        spile("convert", raw, image)
        run("qemu-io", "-f", "vpc", "-c", "write -P 0x77 0 6M", "-c", "write -P 0x78 33M 5M", image)
        with open(raw, "r+b") as file:
            file.write(b"\x77" * (6 * MIB))
            file.seek(33 * MIB)
            file.write(b"\x78" * (5 * MIB))
        spile("convert", image, self.path("back.raw"))
        self.assertSame(raw, self.path("back.raw"))
        self.change_over_nbd(image, raw, 9)
        self.assertQemuReads(image, raw)


class TheirsByUs(QemuImg):
    def made_by_qemu(self, options, raw):
        image = self.path("theirs.vhd")
        image.unlink(missing_ok=True)
        run("qemu-img", "convert", "-f", "raw", "-O", "vpc", "-o", options, raw, image)
        return image

    def test_each_kind_reads_right(self):
        raw = self.raw(size_bytes=40 * MIB + 7 * 512)
        for kind, options in QEMU_KINDS.items():
            with self.subTest(kind=kind):
                image = self.made_by_qemu(options, raw)
                info = qemu_img_json("info", "-f", "vpc", image)
                ours = spile_json("info", image)
                self.assertEqual(ours["virtual_size_bytes"], info["virtual-size"])
                check(image)
                back = self.path("back.raw")
                back.unlink(missing_ok=True)
                spile("convert", image, back)
                self.assertEqual(back.stat().st_size, info["virtual-size"])
                self.assertSame(raw, back)

    def test_each_kind_can_be_written(self):
        for kind, options in QEMU_KINDS.items():
            with self.subTest(kind=kind):
                raw = self.raw(size_bytes=40 * MIB)
                image = self.made_by_qemu(options, raw)
                self.change_over_nbd(image, raw, 11)
                check(image)
                self.assertQemuReads(image, raw)

    def test_empty_sizes(self):
        for size_bytes in SIZES_BYTES[2:]:
            for options in ("subformat=dynamic", "subformat=dynamic,force_size=on"):
                with self.subTest(size_bytes=size_bytes, options=options):
                    image = self.path("theirs.vhd")
                    image.unlink(missing_ok=True)
                    done = run("qemu-img", "create", "-f", "vpc", "-o", options, image, size_bytes, ok=None)
                    if done.returncode != 0:
                        # Without force_size, QEMU refuses sizes that the geometry cannot express.
                        self.assertNotIn("force_size", options)
                        continue
                    info = qemu_img_json("info", "-f", "vpc", image)
                    self.assertEqual(spile_json("info", image)["virtual_size_bytes"], info["virtual-size"])

    def test_compare_by_us(self):
        raw = self.raw(size_bytes=40 * MIB)
        image = self.made_by_qemu("subformat=dynamic,force_size=on", raw)
        spile("compare", raw, image)
        with open(raw, "r+b") as file:
            file.seek(17 * MIB)
            file.write(b"different")
        self.assertEqual(spile("compare", raw, image, ok=False).returncode, 1)

    def test_a_parent_of_qemus_making(self):
        """Spile makes a child of a dynamic image that QEMU made."""
        raw = self.raw(size_bytes=40 * MIB)
        image = self.made_by_qemu("subformat=dynamic,force_size=on", raw)
        child = self.path("child.vhd")
        spile("create", child, "--parent", image)
        before = self.change_over_nbd(child, raw, 12)
        spile("convert", child, self.path("back.raw"))
        self.assertSame(raw, self.path("back.raw"))
        self.assertQemuReads(image, before)


class RawStaysRaw(QemuImg):
    def test_a_vhd_inside_a_raw_disk_is_only_data(self):
        """A guest writes a whole VHD into its raw disk, which stays a raw disk."""
        inner, disk = self.path("inner.vhd"), self.empty("disk.raw", 16 * MIB)
        run("qemu-img", "create", "-f", "vpc", "-o", "subformat=dynamic,force_size=on", inner, "1G")
        with open(disk, "r+b") as file:
            file.write(inner.read_bytes()[:4 * MIB])
            file.seek(16 * MIB - 512)
            file.write(inner.read_bytes()[:512])
        self.assertEqual(spile_json("info", disk)["virtual_size_bytes"], 16 * MIB)
        server = self.serve(disk)
        size = json.loads(run("nbdinfo", "--json", server.uri()).stdout)["exports"][0]["export-size"]
        self.assertEqual(size, 16 * MIB)
