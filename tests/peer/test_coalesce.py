"""Layers are merged and disks flattened while a client writes and the server is killed; 7-Zip and qemu-img read what is left."""

import json
import random
import shutil
import threading
import time

from support import (
    KIB, LIMIT_S, MIB, PeerTest, STANDIN, apply_change, check, need, need_module, overwrite_some, run, spile,
    spile_json,
)

SIZE_BYTES = 96 * MIB


class Writer:
    """A client that writes without an end, one request after the other, and knows what the disk holds."""

    def __init__(self, content, seed):
        self.content, self.dice = bytearray(content), random.Random(seed)
        self.nbd = need_module("nbd", "python3-libnbd")
        self.torn = None
        self.stops = False
        self.writes = 0

    def work(self, uri):
        """Writes until it is told to stop, or the server is gone."""
        handle = self.nbd.NBD()
        handle.connect_uri(uri)
        try:
            while not self.stops:
                self.step(handle)
            handle.flush()
            handle.shutdown()
        except self.nbd.Error:
            if self.stops:
                raise

    def step(self, handle):
        length = self.dice.randrange(1, 128) * 512
        at = self.dice.randrange(0, len(self.content) - length) // 512 * 512
        if self.torn:
            # The write that a kill has cut off is done again: nobody knows what it did.
            at, data = self.torn
        else:
            data = self.dice.randbytes(length)
        self.torn = (at, data)
        handle.pwrite(data, at)
        self.torn = None
        self.content[at:at + len(data)] = data
        self.writes += 1


class Coalesce(PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("needs spile coalesce")
        super().setUp()

    def chain(self, levels):
        """A chain of so many images, 1.vhd to disk.vhd; returns a raw file of what the disk holds."""
        raw = self.raw("content.raw", size_bytes=SIZE_BYTES)
        names = [f"{level}.vhd" for level in range(1, levels)] + ["disk.vhd"]
        spile("convert", raw, self.path(names[0]))
        for parent, name in zip(names, names[1:]):
            spile("create", self.path(name), "--parent", self.path(parent))
            before = self.path("before.raw")
            shutil.copy(raw, before)
            overwrite_some(raw, seed=len(name) + int(parent[0]))
            server = self.serve(self.path(name))
            apply_change(server, before, raw)
            self.assertEqual(server.stop(), 0)
        return raw

    def layers(self):
        return [layer["path"].rsplit("/", 1)[-1] for layer in spile_json("info", "--chain", self.path("disk.vhd"))["layers"]]

    def assertReads(self, raw):
        """Checks the disk by Spile, and by 7-Zip where that is installed."""
        out = self.path("out.raw")
        out.unlink(missing_ok=True)
        spile("convert", self.path("disk.vhd"), out)
        self.assertSame(raw, out, "(spile)")
        for name in self.layers():
            check(self.path(name))
        program = shutil.which("7z") or shutil.which("7zz")
        if program:
            out.write_bytes(run(program, "e", "-so", "-tVHD", self.path("disk.vhd"), limit_s=300).stdout)
            self.assertSame(raw, out, "(7-Zip)")

    def test_files_that_nobody_serves(self):
        need_module("nbd", "python3-libnbd")
        raw = self.chain(4)
        done = spile_json("coalesce", self.path("disk.vhd"), "--layer", "2")
        self.assertEqual((done["kind"], done["state"]), ("coalesce", "done"))
        self.assertEqual(self.layers(), ["disk.vhd", "3.vhd", "1.vhd"])
        self.assertFalse(self.path("2.vhd").exists())
        self.assertReads(raw)
        spile("coalesce", self.path("disk.vhd"))
        self.assertEqual(self.layers(), ["disk.vhd", "1.vhd"])
        self.assertFalse(self.path("3.vhd").exists())
        self.assertReads(raw)
        spile("flatten", self.path("disk.vhd"))
        self.assertEqual(self.layers(), ["disk.vhd"])
        self.path("1.vhd").unlink()
        self.assertReads(raw)
        need("qemu-img", "qemu-utils")
        run("qemu-img", "compare", "-f", "vpc", "-F", "raw", self.path("disk.vhd"), raw)

    def test_what_another_disk_needs_is_refused(self):
        need_module("nbd", "python3-libnbd")
        self.chain(3)
        spile("create", self.path("other.vhd"), "--parent", self.path("1.vhd"))
        parents = [self.path("1.vhd"), self.path("2.vhd")]
        before = [path.stat().st_mtime_ns for path in parents]
        refused = spile("coalesce", self.path("disk.vhd"), "--layer", "2", ok=False)
        self.assertIn(b"other.vhd is a child of this image, too", refused.stderr)
        # A child needs no extension to be one.
        self.path("other.vhd").rename(self.path("other"))
        refused = spile("coalesce", self.path("disk.vhd"), "--layer", "2", ok=False)
        self.assertIn(b"other is a child of this image, too", refused.stderr)
        self.assertEqual(before, [path.stat().st_mtime_ns for path in parents])

    def work_with_kills(self, command, jobs_left):
        """Has `command` do its work under a client's writes while the server is killed again and again. Returns the content."""
        raw = self.chain(3)
        writer = Writer(raw.read_bytes(), seed=7)
        for turn in range(3):
            server = self.serve(self.path("disk.vhd"))
            client = threading.Thread(target=writer.work, args=[server.uri()])
            client.start()
            if turn == 0:
                # So slow that neither of the kills finds a job that is over.
                begun = spile_json(*command, "--rate", "256K")
                self.assertEqual(begun["state"], "running")
            if turn < 2:
                time.sleep(0.4)
                server.kill()
                client.join(LIMIT_S)
                self.assertTrue(self.note().exists(), "the job has ended too soon to be killed")
                spile("info", self.path("disk.vhd"))
                continue
            spile("job", "disk", "rate", "none")
            self.wait_for_job(server)
            writes = writer.writes
            writer.stops = True
            client.join(LIMIT_S)
            self.assertGreater(writes, 0)
            self.assertEqual(server.stop(), 0)
        self.assertEqual(self.layers(), jobs_left)
        content = self.path("model.raw")
        content.write_bytes(writer.content)
        return content

    def wait_for_job(self, server):
        """Waits until nothing is left to do."""
        end = time.monotonic() + LIMIT_S
        while self.note().exists():
            self.assertLess(time.monotonic(), end, server.output())
            time.sleep(0.05)
        for job in json.loads(spile("jobs", "--json").stdout)["jobs"]:
            self.assertEqual(job["state"], "done", job)

    def note(self):
        """The file that says which job is under way."""
        return self.path(".disk.vhd.spile-job")

    def test_a_middle_layer_under_load_and_kills(self):
        model = self.work_with_kills(["coalesce", self.path("disk.vhd"), "--layer", "2"], ["disk.vhd", "1.vhd"])
        self.assertReads(model)

    def test_the_leaf_under_load_and_kills(self):
        model = self.work_with_kills(["coalesce", self.path("disk.vhd")], ["disk.vhd", "1.vhd"])
        self.assertFalse(self.path("2.vhd").exists())
        self.assertReads(model)

    def test_flatten_under_load_and_kills(self):
        model = self.work_with_kills(["flatten", self.path("disk.vhd")], ["disk.vhd"])
        self.assertReads(model)

    def test_a_job_is_paused_slowed_and_cancelled(self):
        need_module("nbd", "python3-libnbd")
        raw = self.chain(3)
        server = self.serve(self.path("disk.vhd"))
        job = spile_json("coalesce", self.path("disk.vhd"), "--rate", str(256 * KIB))
        spile("job", job["id"], "pause")
        listed = json.loads(spile("jobs", "--json").stdout)["jobs"]
        self.assertEqual([(one["id"], one["state"]) for one in listed], [(job["id"], "paused")])
        busy = spile("flatten", self.path("disk.vhd"), ok=False)
        self.assertIn(job["id"].encode(), busy.stderr)
        spile("job", job["id"], "rate", "none")
        spile("job", job["id"], "cancel")
        end = time.monotonic() + LIMIT_S
        while (state := json.loads(spile("jobs", "--json").stdout)["jobs"][0]["state"]) != "cancelled":
            self.assertIn(state, ("running", "paused"))
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)
        self.assertEqual(server.stop(), 0)
        self.assertEqual(self.layers(), ["disk.vhd", "2.vhd", "1.vhd"])
        self.assertReads(raw)
