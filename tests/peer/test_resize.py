"""VHDs that `spile resize` has made longer, read by qemu-img, 7-Zip and libvhdi; and images of QEMU's making that grow."""

import re
import shutil

from support import (
    GIB, MIB, PeerTest, STANDIN, check, need, qemu_img_json, read_by_seven_zip, run, seven_zip, spile, spile_json, text,
)

SIZE_BYTES = 48 * MIB
# A size in the last sector of the table, one that needs a longer table, and one with a table of many sectors.
NEW_SIZES_BYTES = (50 * MIB + 512, 600 * MIB, 20 * GIB)


class Resize(PeerTest):
    def setUp(self):
        need("qemu-img", "qemu-utils")
        if STANDIN:
            self.skipTest("needs spile resize")
        super().setUp()

    def assertPeersAgree(self, image, raw):
        """Each peer sees the size of `raw`, which is sparse, and its content."""
        size_bytes = raw.stat().st_size
        self.assertEqual(spile_json("info", image)["virtual_size_bytes"], size_bytes)
        self.assertEqual(qemu_img_json("info", "-f", "vpc", image)["virtual-size"], size_bytes)
        run("qemu-img", "compare", "-f", "vpc", "-F", "raw", image, raw)
        if shutil.which("vhdiinfo"):
            self.assertRegex(text(run("vhdiinfo", image).stdout), rf"\({size_bytes} bytes\)|\b{size_bytes} bytes")
        if seven_zip() and size_bytes < GIB:
            out = self.path("seven.raw")
            out.write_bytes(read_by_seven_zip(image))
            self.assertSame(raw, out)
        check(image)

    def grow(self, image, raw, sizes_bytes=NEW_SIZES_BYTES):
        for number, size_bytes in enumerate(sizes_bytes):
            spile("resize", image, size_bytes)
            with open(raw, "r+b") as file:
                file.truncate(size_bytes)
            self.assertPeersAgree(image, raw)
            # QEMU writes into what was gained, and Spile goes on from there.
            byte = 0x40 + number
            run("qemu-io", "-f", "vpc", "-c", f"write -P {byte} {size_bytes - 64 * 1024 - 512} 64k", image)
            with open(raw, "r+b") as file:
                file.seek(size_bytes - 64 * 1024 - 512)
                file.write(bytes([byte]) * (64 * 1024))
            self.assertPeersAgree(image, raw)

    def test_dynamic(self):
        raw, image = self.raw(size_bytes=SIZE_BYTES), self.path("a.vhd")
        spile("convert", raw, image)
        self.grow(image, raw)

    def test_fixed(self):
        raw, image = self.raw(size_bytes=SIZE_BYTES), self.path("a.vhd")
        spile("convert", raw, image, "--subformat", "fixed")
        self.grow(image, raw, NEW_SIZES_BYTES[:2])

    def grow_served(self, image, raw, sizes_bytes):
        """Each growth is seen by the next client; what it writes is there when the server has ended."""
        control = self.path("c")
        with self.serve(f"{image},name=a", extra=["--control", control]) as server:
            for number, size_bytes in enumerate(sizes_bytes):
                spile("resize", control, size_bytes)
                at, byte = size_bytes - 64 * 1024, 0x50 + number
                run("qemu-io", "-f", "raw", "-c", f"write -P {byte} {at} 64k", server.uri("a"))
                with open(raw, "r+b") as file:
                    file.truncate(size_bytes)
                    file.seek(at)
                    file.write(bytes([byte]) * (64 * 1024))

    def test_served(self):
        for subformat, sizes_bytes in (("dynamic", (50 * MIB, 600 * MIB, 20 * GIB)), ("fixed", (50 * MIB, 600 * MIB))):
            with self.subTest(subformat):
                raw, image = self.raw(size_bytes=SIZE_BYTES), self.path(f"{subformat}.vhd")
                spile("convert", raw, image, "--subformat", subformat)
                self.grow_served(image, raw, sizes_bytes)
                self.assertPeersAgree(image, raw)

    def test_a_child(self):
        raw, parent, child = self.raw(size_bytes=SIZE_BYTES), self.path("p.vhd"), self.path("c.vhd")
        spile("convert", raw, parent)
        spile("create", child, "--parent", parent)
        spile("resize", child, 600 * MIB)
        with open(raw, "r+b") as file:
            file.truncate(600 * MIB)
        spile("compare", child, raw)
        check(child)
        if shutil.which("vhdiinfo"):
            out = text(run("vhdiinfo", child).stdout)
            self.assertTrue(re.search("Differential", out) and f"{600 * MIB} bytes" in out, out)

    def test_images_of_qemus_making(self):
        for options in ("subformat=dynamic", "subformat=dynamic,force_size=on", "subformat=fixed,force_size=on"):
            with self.subTest(options=options):
                raw, image = self.raw(size_bytes=SIZE_BYTES), self.path("theirs.vhd")
                image.unlink(missing_ok=True)
                run("qemu-img", "convert", "-f", "raw", "-O", "vpc", "-o", options, raw, image)
                with open(raw, "r+b") as file:
                    file.truncate(qemu_img_json("info", "-f", "vpc", image)["virtual-size"])
                self.grow(image, raw, NEW_SIZES_BYTES[:2])
