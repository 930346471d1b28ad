"""libvhdi reads images that Spile wrote: the program vhdiinfo shows facts, the Python binding reads content and chains.

It takes a bitmap's byte for one bit, so the content here is written in pieces of 4 KiB.
"""

import random
import re

from support import MIB, PeerTest, STANDIN, apply_change, need, need_module, run, spile, spile_json, text

SIZE_BYTES = 48 * MIB


def written_in_pages(path, size_bytes, seed, runs=30):
    """A sparse raw file whose data begin and end on 4 KiB; written over when it exists."""
    dice = random.Random(seed)
    with open(path, "r+b" if path.exists() else "w+b") as file:
        file.truncate(size_bytes)
        for _ in range(runs):
            pages = dice.randrange(1, 80)
            at = dice.randrange(0, size_bytes // 4096 - pages) * 4096
            file.seek(at)
            file.write(dice.randbytes(pages * 4096))
    return path


class Libvhdi(PeerTest):
    def setUp(self):
        need("vhdiinfo", "libvhdi-utils")
        if STANDIN:
            self.skipTest("needs spile create")
        super().setUp()

    def facts(self, image):
        out = text(run("vhdiinfo", image).stdout)
        return {key.strip(): value.strip() for key, value in re.findall(r"^\s*([^:\n]+):(.*)$", out, re.M)}

    def test_dynamic(self):
        image = self.path("a.vhd")
        spile("create", image, "--size", SIZE_BYTES)
        facts = self.facts(image)
        self.assertIn("Dynamic", facts["Disk type"])
        self.assertIn(f"{SIZE_BYTES} bytes", facts["Media size"])
        self.assertEqual(facts["Identifier"], spile_json("info", image)["layers"][0]["facts"]["uuid"])

    def test_fixed(self):
        image = self.path("a.vhd")
        spile("create", image, "--size", SIZE_BYTES, "--subformat", "fixed")
        facts = self.facts(image)
        self.assertIn("Fixed", facts["Disk type"])
        self.assertIn(f"{SIZE_BYTES} bytes", facts["Media size"])

    def test_differencing(self):
        parent, child = self.path("p.vhd"), self.path("c.vhd")
        spile("create", parent, "--size", SIZE_BYTES)
        spile("create", child, "--parent", parent)
        facts = self.facts(child)
        self.assertIn("Differential", facts["Disk type"])
        self.assertEqual(facts["Parent identifier"], self.facts(parent)["Identifier"])
        self.assertIn("p.vhd", facts["Parent filename"])

    def read_by_libvhdi(self, *layers):
        """The content of a chain, leaf first, as a raw file."""
        pyvhdi = need_module("pyvhdi", "python3-libvhdi")
        files = [pyvhdi.file() for _ in layers]
        for file, path in zip(files, layers):
            file.open(str(path))
        for file, parent in zip(files, files[1:]):
            file.set_parent(parent)
        out = self.path("libvhdi.raw")
        with open(out, "wb") as raw:
            for at in range(0, files[0].get_media_size(), MIB):
                length = min(MIB, files[0].get_media_size() - at)
                raw.write(files[0].read_buffer_at_offset(length, at))
        for file in files:
            file.close()
        return out

    def test_content_of_a_dynamic_image(self):
        raw = written_in_pages(self.path("a.raw"), SIZE_BYTES, 1)
        spile("convert", raw, self.path("a.vhd"))
        self.assertSame(raw, self.read_by_libvhdi(self.path("a.vhd")))

    def test_content_of_a_fixed_image(self):
        need("nbdcopy", "libnbd-bin")
        raw, image = written_in_pages(self.path("a.raw"), SIZE_BYTES, 2), self.path("a.vhd")
        spile("create", image, "--size", SIZE_BYTES, "--subformat", "fixed")
        server = self.serve(image)
        run("nbdcopy", "--flush", raw, server.uri())
        self.assertEqual(server.stop(), 0)
        self.assertSame(raw, self.read_by_libvhdi(image))

    def test_content_of_a_chain(self):
        raw = written_in_pages(self.path("a.raw"), SIZE_BYTES, 3)
        layers = [self.path("1.vhd")]
        spile("convert", raw, layers[0])
        for level in (2, 3):
            layers.insert(0, self.path(f"{level}.vhd"))
            spile("create", layers[0], "--parent", layers[1])
            before = self.path("before.raw")
            before.write_bytes(raw.read_bytes())
            written_in_pages(raw, SIZE_BYTES, 10 + level, runs=12)
            server = self.serve(layers[0])
            apply_change(server, before, raw)
            self.assertEqual(server.stop(), 0)
        self.assertSame(raw, self.read_by_libvhdi(*layers))
