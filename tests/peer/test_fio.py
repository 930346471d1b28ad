"""fio's nbd engine as client: random and overlapping loads, with a crc32c of every block checked."""

import json

from support import GIB, MIB, STANDIN, PeerTest, check, need, run, spile

VERIFY = ["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--verify_backlog=512"]


class Fio(PeerTest):
    def setUp(self):
        need("fio")
        if "nbd" not in run("fio", "--enghelp").stdout.decode().split():
            self.skipTest("this fio has no nbd engine")
        super().setUp()

    def fio(self, server, *options):
        job = ["fio", "--name=job", "--ioengine=nbd", f"--uri={server.uri()}", "--thread"]
        # Without this, fio leaves a file for each job in the folder where the tests were started.
        job += ["--verify_state_save=0"]
        done = run(*job, "--output-format=json", "--randseed=7", *options)
        out = done.stdout.decode()
        result = json.loads(out[out.index("{"):])
        self.assertEqual(sum(job["error"] for job in result["jobs"]), 0)
        return result

    def disk(self, size_bytes):
        if STANDIN:
            return self.empty("disk.raw", size_bytes)
        spile("create", self.path("disk.vhd"), "--size", size_bytes)
        return self.path("disk.vhd")

    def check(self, disk):
        if not STANDIN:
            check(disk)

    def test_random_blocks_on_raw(self):
        server = self.serve(self.empty("disk.raw", 32 * MIB))
        self.fio(server, "--rw=randwrite", "--bs=4k", "--size=32m", "--iodepth=32", *VERIFY)

    def test_random_blocks_on_vhd(self):
        disk = self.disk(GIB)
        server = self.serve(disk)
        options = ["--rw=randwrite", "--bs=4k", "--size=1g", "--io_size=24m", "--iodepth=32"]
        self.fio(server, *options, *VERIFY)
        self.assertEqual(server.stop(), 0)
        self.check(disk)

    def test_mixed_sizes_and_odd_sectors(self):
        disk = self.disk(256 * MIB)
        server = self.serve(disk)
        options = ["--rw=randwrite", "--bsrange=512-512k", "--blockalign=512", "--size=128m"]
        self.fio(server, *options, "--io_size=64m", "--iodepth=16", *VERIFY)
        self.assertEqual(server.stop(), 0)
        self.check(disk)

    def test_four_connections_each_its_part(self):
        disk = self.disk(256 * MIB)
        server = self.serve(disk)
        options = ["--rw=randwrite", "--bs=4k", "--numjobs=4", "--size=8m", "--offset_increment=32m"]
        result = self.fio(server, *options, "--iodepth=16", *VERIFY)
        self.assertEqual(len(result["jobs"]), 4)
        self.assertEqual(server.stop(), 0)
        self.check(disk)

    def test_trims_between_writes(self):
        disk = self.disk(256 * MIB)
        server = self.serve(disk)
        self.fio(server, "--rw=randtrimwrite", "--bs=64k", "--size=64m", "--iodepth=8")
        self.assertEqual(server.stop(), 0)
        self.check(disk)

    def test_what_was_written_verifies_after_a_restart(self):
        disk = self.disk(256 * MIB)
        options = ["--rw=randwrite", "--bs=8k", "--size=32m", "--iodepth=16", "--verify=crc32c"]
        server = self.serve(disk)
        self.fio(server, *options, "--do_verify=0", "--end_fsync=1")
        server.kill()
        server = self.serve(disk)
        self.fio(server, *options, "--verify_only=1")
        self.assertEqual(server.stop(), 0)
        self.check(disk)
