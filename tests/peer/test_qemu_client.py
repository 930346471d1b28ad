"""QEMU's NBD client: qemu-io's patterns, qemu-img's commands and its load generator."""

import json

from support import MIB, STANDIN, PeerTest, need, run, spile, text

SIZE_BYTES = 64 * MIB


class QemuClient(PeerTest):
    def setUp(self):
        need("qemu-img", "qemu-utils")
        need("qemu-io", "qemu-utils")
        super().setUp()

    def vhd(self):
        if STANDIN:
            return self.empty("disk.raw", SIZE_BYTES)
        spile("create", self.path("disk.vhd"), "--size", SIZE_BYTES)
        return self.path("disk.vhd")

    def io(self, server, *commands):
        words = [word for command in commands for word in ("-c", command)]
        done = run("qemu-io", "-f", "raw", *words, server.uri())
        # qemu-io reports a wrong pattern and goes on.
        self.assertNotIn("Pattern verification failed", text(done.stdout))
        return text(done.stdout)

    def test_patterns(self):
        server = self.serve(self.vhd())
        self.io(
            server,
            "write -P 0x11 0 1M", "write -P 0x22 1536k 3M", "write -f -P 0x33 10M 4k", "flush",
            "read -P 0x11 0 1M", "read -P 0 1M 512k", "read -P 0x22 1536k 3M", "read -P 0x33 10M 4k",
            "write -z 2M 1M", "read -P 0 2M 1M", "write -z -u 3M 512k", "read -P 0 3M 512k",
            "write -P 0x44 64512 1k", "read -P 0x44 64512 1k", "read -P 0x11 0 64512",
        )
        self.io(server, "discard 0 1M", "read -P 0x22 1536k 512k", "read -P 0x33 10M 4k")

    def test_patterns_in_flight(self):
        server = self.serve(self.vhd())
        writes = [f"aio_write -P {turn + 1} {turn * 100}k 100k" for turn in range(60)]
        reads = [f"read -P {turn + 1} {turn * 100}k 100k" for turn in range(60)]
        self.io(server, *writes, "aio_flush", *reads)

    def test_what_was_written_is_there_after_a_restart(self):
        disk = self.vhd()
        server = self.serve(disk)
        self.io(server, "write -P 0x55 5M 7M", "write -z 8M 1M")
        self.assertEqual(server.stop(), 0)
        self.io(self.serve(disk), "read -P 0x55 5M 3M", "read -P 0 8M 1M", "read -P 0x55 9M 3M")

    def test_bench_reads_and_writes(self):
        server = self.serve(self.vhd())
        run("qemu-img", "bench", "-f", "raw", "-c", 4000, "-d", 64, "-s", 4096, server.uri())
        writes = ["-w", "--pattern=85", "--flush-interval=100"]
        run("qemu-img", "bench", "-f", "raw", "-c", 4000, "-d", 64, "-s", 4096, *writes, server.uri())
        self.io(server, f"read -P 85 0 {4000 * 4096}")

    def test_convert_to_and_from(self):
        source, back = self.raw("source.raw", SIZE_BYTES), self.path("back.raw")
        server = self.serve(self.vhd())
        run("qemu-img", "convert", "-n", "-W", "-m", 8, "-f", "raw", "-O", "raw", source, server.uri())
        run("qemu-img", "compare", "-f", "raw", "-F", "raw", source, server.uri())
        run("qemu-img", "convert", "-f", "raw", "-O", "raw", server.uri(), back)
        self.assertSame(source, back)

    def test_compare_sees_a_difference(self):
        source = self.raw("source.raw", SIZE_BYTES)
        server = self.serve(source)
        self.io(server, "write -P 0x66 33M 512")
        other = self.raw("other.raw", SIZE_BYTES)
        done = run("qemu-img", "compare", "-f", "raw", "-F", "raw", other, server.uri(), ok=False)
        self.assertEqual(done.returncode, 1)

    def test_map_tells_data_from_holes(self):
        server = self.serve(self.vhd())
        self.io(server, "write -P 0x77 4M 2M", "flush")
        done = run("qemu-img", "map", "-f", "raw", "--output=json", server.uri())
        entries = json.loads(done.stdout)
        data = [(entry["start"], entry["length"]) for entry in entries if entry["data"]]
        self.assertEqual(data, [(4 * MIB, 2 * MIB)])
        self.assertEqual(sum(entry["length"] for entry in entries), SIZE_BYTES)

    def test_a_read_only_export_is_not_opened_for_writing(self):
        server = self.serve(f"{self.empty()},read-only")
        done = run("qemu-io", "-f", "raw", "-c", "write 0 4k", server.uri(), ok=None)
        self.assertTrue(done.returncode != 0 or b"failed" in done.stdout + done.stderr)
        run("qemu-io", "-r", "-f", "raw", "-c", "read -P 0 0 4k", server.uri())
