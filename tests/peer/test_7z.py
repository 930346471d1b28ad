"""7-Zip reads content: of dynamic images, and (as no other packaged program does) of chains."""

import shutil

from support import (
    MIB, PeerTest, STANDIN, apply_change, check, need_module, need_seven_zip, overwrite_some, read_by_seven_zip, run, spile,
)

SIZE_BYTES = 48 * MIB


class SevenZip(PeerTest):
    def setUp(self):
        need_seven_zip()
        if STANDIN:
            self.skipTest("needs spile convert")
        super().setUp()

    def assertReads(self, image, raw):
        """Checks that 7-Zip reads the content of `raw` from `image`."""
        out = self.path("seven.raw")
        out.write_bytes(read_by_seven_zip(image))
        self.assertEqual(out.stat().st_size, raw.stat().st_size)
        self.assertSame(raw, out, f"({image.name})")

    def test_dynamic(self):
        raw = self.raw(size_bytes=SIZE_BYTES)
        spile("convert", raw, self.path("a.vhd"))
        self.assertReads(self.path("a.vhd"), raw)

    def test_empty(self):
        spile("create", self.path("a.vhd"), "--size", SIZE_BYTES)
        self.assertReads(self.path("a.vhd"), self.empty("zeros.raw", SIZE_BYTES))

    def test_written_over_nbd(self):
        raw = self.raw(size_bytes=SIZE_BYTES)
        spile("create", self.path("a.vhd"), "--size", SIZE_BYTES)
        server = self.serve(self.path("a.vhd"))
        run("nbdcopy", "--flush", raw, server.uri())
        self.assertEqual(server.stop(), 0)
        self.assertReads(self.path("a.vhd"), raw)

    def test_chain_of_four(self):
        need_module("nbd", "python3-libnbd")
        raw = self.raw(size_bytes=SIZE_BYTES)
        image = self.path("1.vhd")
        spile("convert", raw, image)
        for level in (2, 3, 4):
            child = self.path(f"{level}.vhd")
            spile("create", child, "--parent", image)
            before = self.path("before.raw")
            shutil.copy(raw, before)
            overwrite_some(raw, seed=level)
            server = self.serve(child)
            apply_change(server, before, raw)
            self.assertEqual(server.stop(), 0)
            check(child)
            self.assertReads(child, raw)
            image = child
        # The levels below have not moved.
        check(self.path("1.vhd"))
