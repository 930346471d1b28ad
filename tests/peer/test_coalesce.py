"""Layers are merged and disks flattened while a client writes and the server, or the command, is killed; 7-Zip and qemu-img read what is left."""

import json
import random
import shutil
import subprocess
import threading
import time

from support import (
    KIB, LIMIT_S, MIB, PeerTest, STANDIN, apply_change, check, check_by_qemu, need, need_module, overwrite_some,
    qemu_img_json, read_by_seven_zip, run, seven_zip, spile, spile_binary, spile_json, text,
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
    END = "vhd"

    def setUp(self):
        if STANDIN:
            self.skipTest("needs spile coalesce")
        super().setUp()

    def named(self, stem):
        return f"{stem}.{self.END}"

    def image(self, stem):
        return self.path(self.named(stem))

    def chain(self, levels, runs=20):
        """A chain of so many images, the lowest of the name 1; returns a raw file of what the disk holds."""
        raw = self.raw("content.raw", size_bytes=SIZE_BYTES)
        names = [self.named(level) for level in range(1, levels)] + [self.named("disk")]
        spile("convert", raw, self.path(names[0]))
        for parent, name in zip(names, names[1:]):
            spile("create", self.path(name), "--parent", self.path(parent))
            before = self.path("before.raw")
            shutil.copy(raw, before)
            overwrite_some(raw, seed=len(name) - len(self.END) + 3 + int(parent[0]), runs=runs)
            server = self.serve(self.path(name))
            apply_change(server, before, raw)
            self.assertEqual(server.stop(), 0)
        return raw

    def layers(self):
        return [layer["path"].rsplit("/", 1)[-1] for layer in spile_json("info", "--chain", self.image("disk"))["layers"]]

    def assertReads(self, raw):
        """Checks the disk by Spile, and by 7-Zip where that is installed."""
        out = self.path("out.raw")
        out.unlink(missing_ok=True)
        spile("convert", self.image("disk"), out)
        self.assertSame(raw, out, "(spile)")
        for name in self.layers():
            check(self.path(name))
        self.assertOthersRead(raw, out)

    def assertOthersRead(self, raw, out):
        if seven_zip():
            out.write_bytes(read_by_seven_zip(self.image("disk")))
            self.assertSame(raw, out, "(7-Zip)")

    def test_files_that_nobody_serves(self):
        need_module("nbd", "python3-libnbd")
        raw = self.chain(4)
        done = spile_json("coalesce", self.image("disk"), "--layer", "2")
        self.assertEqual((done["kind"], done["state"]), ("coalesce", "done"))
        self.assertEqual(self.layers(), [self.named("disk"), self.named("3"), self.named("1")])
        self.assertFalse(self.image("2").exists())
        self.assertReads(raw)
        spile("coalesce", self.image("disk"))
        self.assertEqual(self.layers(), [self.named("disk"), self.named("1")])
        self.assertFalse(self.image("3").exists())
        self.assertReads(raw)
        spile("flatten", self.image("disk"))
        self.assertEqual(self.layers(), [self.named("disk")])
        self.image("1").unlink()
        self.assertReads(raw)
        need("qemu-img", "qemu-utils")
        form = {"vhd": "vpc"}.get(self.END, self.END)
        run("qemu-img", "compare", "-f", form, "-F", "raw", self.image("disk"), raw)

    def test_what_another_disk_needs_is_refused(self):
        need_module("nbd", "python3-libnbd")
        self.chain(3)
        spile("create", self.image("other"), "--parent", self.image("1"))
        parents = [self.image("1"), self.image("2")]
        before = [path.stat().st_mtime_ns for path in parents]
        refused = spile("coalesce", self.image("disk"), "--layer", "2", ok=False)
        self.assertIn(self.named("other").encode() + b" is a child of this image, too", refused.stderr)
        # A child needs no extension to be one.
        self.image("other").rename(self.path("other"))
        refused = spile("coalesce", self.image("disk"), "--layer", "2", ok=False)
        self.assertIn(b"other is a child of this image, too", refused.stderr)
        self.assertEqual(before, [path.stat().st_mtime_ns for path in parents])

    def work_with_kills(self, command, jobs_left):
        """Has `command` do its work under a client's writes while the server is killed again and again. Returns the content."""
        raw = self.chain(3)
        writer = Writer(raw.read_bytes(), seed=7)
        for turn in range(3):
            server = self.serve(self.image("disk"))
            client = threading.Thread(target=writer.work, args=[server.uri()])
            client.start()
            if turn == 0:
                # So slow that neither of the kills finds a job that is over.
                begun = spile_json(*command, "--rate", "256K", "--background")
                self.assertEqual(begun["state"], "running")
            if turn < 2:
                time.sleep(0.4)
                server.kill()
                client.join(LIMIT_S)
                self.assertTrue(self.note().exists(), "the job has ended too soon to be killed")
                spile("info", self.image("disk"))
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
        return self.path(f".{self.named('disk')}.spile-job")

    def test_a_middle_layer_under_load_and_kills(self):
        model = self.work_with_kills(["coalesce", self.image("disk"), "--layer", "2"], [self.named("disk"), self.named("1")])
        self.assertReads(model)

    def test_the_leaf_under_load_and_kills(self):
        model = self.work_with_kills(["coalesce", self.image("disk")], [self.named("disk"), self.named("1")])
        self.assertFalse(self.image("2").exists())
        self.assertReads(model)

    def test_flatten_under_load_and_kills(self):
        model = self.work_with_kills(["flatten", self.image("disk")], [self.named("disk")])
        self.assertReads(model)

    def test_a_job_is_paused_slowed_and_cancelled(self):
        need_module("nbd", "python3-libnbd")
        raw = self.chain(3)
        server = self.serve(self.image("disk"))
        job = spile_json("coalesce", self.image("disk"), "--rate", str(256 * KIB), "--background")
        spile("job", job["id"], "pause")
        listed = json.loads(spile("jobs", "--json").stdout)["jobs"]
        self.assertEqual([(one["id"], one["state"]) for one in listed], [(job["id"], "paused")])
        busy = spile("flatten", self.image("disk"), ok=False)
        self.assertIn(job["id"].encode(), busy.stderr)
        spile("job", job["id"], "rate", "none")
        spile("job", job["id"], "cancel")
        end = time.monotonic() + LIMIT_S
        while (state := json.loads(spile("jobs", "--json").stdout)["jobs"][0]["state"]) != "cancelled":
            self.assertIn(state, ("running", "paused"))
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)
        self.assertEqual(server.stop(), 0)
        self.assertEqual(self.layers(), [self.named("disk"), self.named("2"), self.named("1")])
        self.assertReads(raw)


class CoalesceQcow2(Coalesce):
    END = "qcow2"

    def setUp(self):
        need("qemu-img", "qemu-utils")
        super().setUp()

    def assertOthersRead(self, raw, _out):
        self.assertSound(raw)

    def assertSound(self, raw):
        """qemu-img finds nothing in the images but leaks, which a killed process may leave, and reads what `raw` holds."""
        for name in self.layers():
            check_by_qemu(self.path(name), was_killed=True)
        run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", self.image("disk"), raw)

    def bytes_of(self, depth, *words):
        """So much of what the disk shows lies in the layer of this depth. `words` are more options of qemu-img."""
        runs = qemu_img_json("map", *words, "-f", "qcow2", self.image("disk"))
        return sum(run["length"] for run in runs if run["depth"] == depth and (run["data"] or run["zero"]))

    def kill_when(self, command, has_come):
        """Runs the command until `has_come` says so, and kills it."""
        with subprocess.Popen([spile_binary(), *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            end = time.monotonic() + LIMIT_S
            while process.poll() is None and not has_come():
                self.assertLess(time.monotonic(), end, "the command does not come so far")
                time.sleep(0.005)
            process.kill()
            output = text(process.stdout.read())
        self.assertTrue(self.note().exists(), f"the command has ended too soon to be killed: {output}")
        # The kernel lets go of a killed process's files a moment later.
        end = time.monotonic() + LIMIT_S
        while b"lock" in run("qemu-img", "info", "--backing-chain", self.image("disk"), ok=None).stderr:
            self.assertLess(time.monotonic(), end, "a killed process has its files open still")
            time.sleep(0.01)

    def work_with_killed_commands(self, parent, *words, depth):
        """Has `spile coalesce` do its work, killed again and again: while it writes to the parent, and when the layer has given something up. In between
        and at the end qemu-img agrees."""
        # Several times what is moved in one batch.
        raw = self.chain(3, runs=3000)
        command = ["coalesce", str(self.image("disk")), *words]
        left = [self.bytes_of(depth)]
        for turn in range(4):
            written = parent.stat().st_mtime_ns
            is_written = lambda: parent.stat().st_mtime_ns != written
            # The space comes back later, when all may be moved: only the tables tell.
            has_given_up = lambda: self.bytes_of(depth, "--force-share") < left[0]
            self.kill_when([*command, "--rate", "32M"], has_given_up if turn == 1 else is_written)
            left.append(self.bytes_of(depth))
            self.assertSound(raw)
        self.assertTrue(0 < left[-1] < left[0], f"no kill found a layer that is moved in part: {left}")
        spile(*command)
        self.assertEqual(self.layers(), [self.named("disk"), self.named("1")])
        self.assertFalse(self.image("2").exists())
        self.assertReads(raw)

    def test_a_middle_layer_while_the_command_is_killed(self):
        need_module("nbd", "python3-libnbd")
        self.work_with_killed_commands(self.image("1"), "--layer", "2", depth=1)

    def test_the_leaf_while_the_command_is_killed(self):
        need_module("nbd", "python3-libnbd")
        self.work_with_killed_commands(self.image("2"), depth=0)
