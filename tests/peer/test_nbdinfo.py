"""nbdinfo as client: the properties and the map of exports."""

import json

from support import MIB, STANDIN, PeerTest, need, run, spile

SIZE_BYTES = 64 * MIB


class Nbdinfo(PeerTest):
    def setUp(self):
        need("nbdinfo", "libnbd-bin")
        super().setUp()

    def info(self, server, name=""):
        done = run("nbdinfo", "--json", server.uri(name))
        return json.loads(done.stdout)["exports"][0]

    def test_flags_and_size(self):
        export = self.info(self.serve(self.empty(size_bytes=SIZE_BYTES)))
        self.assertEqual(export["export-size"], SIZE_BYTES)
        self.assertFalse(export["is_read_only"])
        for promise in (
            "can_cache", "can_df", "can_fast_zero", "can_flush", "can_fua", "can_multi_conn",
            "can_trim", "can_zero",
        ):
            self.assertTrue(export[promise], promise)
        self.assertIn("base:allocation", export["contexts"])

    def test_block_sizes_are_stated(self):
        export = self.info(self.serve(self.empty()))
        self.assertEqual(export["block_size_minimum"], 1)
        self.assertGreaterEqual(export["block_size_preferred"], 4096)
        self.assertGreaterEqual(export["block_size_maximum"], 32 * MIB)

    def test_read_only(self):
        self.assertTrue(self.info(self.serve(f"{self.empty()},read-only"))["is_read_only"])

    def test_list(self):
        if STANDIN:
            self.skipTest("the stand-in serves one disk")
        disks = [f"{self.empty('a.raw')},name=a", f"{self.empty('b.raw', 8 * MIB)},name=b"]
        done = run("nbdinfo", "--json", "--list", self.serve(*disks).uri())
        sizes = {e["export-name"]: e["export-size"] for e in json.loads(done.stdout)["exports"]}
        self.assertEqual((sizes["a"], sizes["b"]), (64 * MIB, 8 * MIB))

    def test_map_of_a_vhd(self):
        if STANDIN:
            self.skipTest("needs spile create")
        disk = self.path("disk.vhd")
        spile("create", disk, "--size", SIZE_BYTES)
        server = self.serve(disk)
        need("qemu-io", "qemu-utils")
        run("qemu-io", "-f", "raw", "-c", "write 4M 2M", server.uri())
        done = run("nbdinfo", "--map", "--json", server.uri())
        entries = json.loads(done.stdout)
        self.assertEqual(sum(entry["length"] for entry in entries), SIZE_BYTES)
        data = [(e["offset"], e["length"]) for e in entries if e["type"] == 0]
        self.assertEqual(data, [(4 * MIB, 2 * MIB)])
