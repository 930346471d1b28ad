"""Footers as other programs write them: what other readers make of a size that the geometry puts differently, and of two
footers that differ. The images are made by qemu-img, with and without force_size, and then given another footer."""

import struct

from support import MIB, PeerTest, STANDIN, need, qemu_img_json, read_by_seven_zip, run, spile, spile_json

SIZE_BYTES = 40 * MIB
FOOTER_BYTES = 512
CREATOR_AT, SIZE_AT, GEOMETRY_AT, SUM_AT = 28, 48, 56, 64
# A cylinder of this geometry has 512 KiB.
SMALLER = struct.pack(">HBB", 60, 16, 64)
LARGER = struct.pack(">HBB", 90, 16, 64)
CYLINDER_BYTES = 16 * 64 * 512


def summed(footer):
    footer = footer[:SUM_AT] + bytes(4) + footer[SUM_AT + 4:]
    return footer[:SUM_AT] + struct.pack(">I", ~sum(footer) & 0xFFFFFFFF) + footer[SUM_AT + 4:]


def changed(footer, **fields):
    places = {"creator": CREATOR_AT, "size": SIZE_AT, "geometry": GEOMETRY_AT}
    for name, value in fields.items():
        footer = footer[:places[name]] + value + footer[places[name] + len(value):]
    return summed(footer)


def edit(image, start=True, end=True, **fields):
    """Changes fields in the footers of a dynamic image."""
    with open(image, "r+b") as file:
        for at, wanted in ((0, start), (image.stat().st_size - FOOTER_BYTES, end)):
            if wanted:
                file.seek(at)
                footer = changed(file.read(FOOTER_BYTES), **fields)
                file.seek(at)
                file.write(footer)


class Footers(PeerTest):
    def setUp(self):
        need("qemu-img", "qemu-utils")
        if STANDIN:
            self.skipTest("needs spile info")
        super().setUp()
        self.source = self.raw(size_bytes=SIZE_BYTES)

    def image(self, force_size=True):
        image = self.path("a.vhd")
        image.unlink(missing_ok=True)
        options = "subformat=dynamic" + (",force_size=on" if force_size else "")
        run("qemu-img", "convert", "-f", "raw", "-O", "vpc", "-o", options, self.source, image)
        return image

    def size(self, image):
        return spile_json("info", image)["virtual_size_bytes"]

    def other_size(self, image):
        return spile_json("info", image)["layers"][0]["facts"]["geometry_size_bytes"]

    def libvhdi_size(self, image):
        need("vhdiinfo", "libvhdi-utils")
        line = next(line for line in run("vhdiinfo", image).stdout.decode().splitlines() if "Media size" in line)
        return int(line.split("(")[1].split()[0]) if "(" in line else int(line.split(":")[1].split()[0])

    def seven_zip_size(self, image):
        return len(read_by_seven_zip(image))

    def test_each_creator_with_a_smaller_and_a_larger_geometry(self):
        for creator in (b"vpc ", b"qemu", b"qem2", b"win ", b"tap\0", b"zzzz"):
            for geometry, cylinders in ((SMALLER, 60), (LARGER, 90)):
                with self.subTest(creator=creator, cylinders=cylinders):
                    image = self.image()
                    edit(image, creator=creator, geometry=geometry)
                    self.assertEqual(self.size(image), SIZE_BYTES)
                    self.assertEqual(self.other_size(image), cylinders * CYLINDER_BYTES)
                    spile("compare", self.source, image)
                    # Two independent readers go by the current size as well.
                    self.assertEqual(self.libvhdi_size(image), SIZE_BYTES)
                    self.assertEqual(self.seven_zip_size(image), SIZE_BYTES)

    def test_qemu_goes_by_the_geometry_and_info_says_that_size_too(self):
        image = self.image()
        edit(image, creator=b"vpc ", geometry=SMALLER)
        self.assertEqual(self.other_size(image), qemu_img_json("info", "-f", "vpc", image)["virtual-size"])
        self.assertIn(f"{self.other_size(image)} bytes", spile("info", image).stdout.decode())
        edit(image, geometry=LARGER)
        self.assertNotEqual(run("qemu-img", "info", "-f", "vpc", image, ok=None).returncode, 0, "QEMU cannot read it")
        spile("compare", self.source, image)

    def test_what_qemu_rounds_up_is_the_current_size(self):
        image = self.image(force_size=False)
        size = qemu_img_json("info", "-f", "vpc", image)["virtual-size"]
        self.assertGreater(size, SIZE_BYTES)
        self.assertEqual((self.size(image), self.other_size(image)), (size, None))

    def test_the_footer_at_the_end_counts_and_a_repair_mends_the_copy(self):
        """libvhdi and 7-Zip look at the footer at the end, QEMU at the copy: after a repair, all agree."""
        image, smaller = self.image(), struct.pack(">Q", SIZE_BYTES - MIB)
        edit(image, end=False, size=smaller)
        self.assertEqual(self.size(image), SIZE_BYTES)
        self.assertEqual(self.libvhdi_size(image), SIZE_BYTES)
        found = spile("check", image, "--json", ok=False)
        self.assertNotEqual(found.returncode, 0)
        self.assertIn("differs", found.stdout.decode())
        self.assertIn("differs", spile("info", image).stdout.decode())
        spile("check", "--repair", image)
        spile("check", image)
        self.assertEqual(qemu_img_json("info", "-f", "vpc", image)["virtual-size"], SIZE_BYTES)
        self.assertEqual(self.seven_zip_size(image), SIZE_BYTES)

    def test_a_footer_of_511_bytes(self):
        for subformat in ("dynamic", "fixed"):
            with self.subTest(subformat=subformat):
                image = self.path(f"{subformat}.vhd")
                run("qemu-img", "convert", "-f", "raw", "-O", "vpc", "-o", f"subformat={subformat},force_size=on",
                    self.source, image)
                with open(image, "r+b") as file:
                    file.truncate(image.stat().st_size - 1)
                self.assertEqual(self.size(image), SIZE_BYTES)
                spile("compare", self.source, image)
