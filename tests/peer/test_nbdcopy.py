"""nbdcopy as client: whole disks in and out, over many connections."""

from support import MIB, STANDIN, PeerTest, check, need, run, spile

SIZE_BYTES = 96 * MIB


class Nbdcopy(PeerTest):
    def setUp(self):
        need("nbdcopy", "libnbd-bin")
        super().setUp()

    def disk(self, kind):
        if kind == "raw":
            return self.empty("disk.raw", SIZE_BYTES)
        if STANDIN:
            self.skipTest("needs spile create")
        spile("create", self.path("disk.vhd"), "--size", SIZE_BYTES)
        return self.path("disk.vhd")

    def round_trip(self, kind):
        source, back = self.raw("source.raw", SIZE_BYTES), self.path("back.raw")
        disk = self.disk(kind)
        server = self.serve(disk)
        run("nbdcopy", "--flush", source, server.uri())
        run("nbdcopy", server.uri(), back)
        self.assertSame(source, back)
        self.assertEqual(server.stop(), 0)
        again = self.serve(disk)
        run("nbdcopy", "--connections=1", "--request-size=262144", again.uri(), back)
        self.assertSame(source, back, "after a restart")
        self.assertEqual(again.stop(), 0)
        return disk

    def test_raw(self):
        self.round_trip("raw")

    def test_vhd(self):
        disk = self.round_trip("vhd")
        check(disk)
        self.assertLess(disk.stat().st_blocks * 512, SIZE_BYTES, "zeros were kept out")

    def test_from_export_to_export(self):
        if STANDIN:
            self.skipTest("the stand-in serves one disk")
        source = self.raw("source.raw", SIZE_BYTES)
        target = self.disk("vhd")
        server = self.serve(f"{source},name=from,read-only", f"{target},name=to")
        run("nbdcopy", "--destination-is-zero", server.uri("from"), server.uri("to"))
        run("nbdcopy", server.uri("to"), self.path("back.raw"))
        self.assertSame(source, self.path("back.raw"))
