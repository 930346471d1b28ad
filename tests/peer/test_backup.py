"""Backups of disks while a client writes: each holds exactly what was written by one moment of its making, as qemu-img reads it. A target that
is slow or hangs does not hold up the client."""

import json
import shutil
import signal
import subprocess
import threading
import time

from support import LIMIT_S, MIB, PeerTest, STANDIN, check, need, need_module, run, spile, spile_json
from test_snapshot import Remembering

SIZE_BYTES = 16 * MIB


class Backups(PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("needs spile backup")
        super().setUp()
        need_module("nbd", "python3-libnbd")

    def read(self, image, form):
        """What a backup holds, as qemu-img reads it where that is installed, and Spile."""
        out = self.path("out.raw")
        out.unlink(missing_ok=True)
        spile("convert", image, out)
        if shutil.which("qemu-img"):
            run("qemu-img", "compare", "-f", form, "-F", "raw", image, out)
        content = out.read_bytes()
        self.assertEqual(len(content), SIZE_BYTES)
        return content

    def writing(self, server, content, seed=1, name=""):
        """A client at work on an export."""
        writer = Remembering(content, seed)
        work = threading.Thread(target=writer.work, args=(server.uri(name),))
        work.start()

        def end():
            writer.stops = True
            work.join(LIMIT_S)
        self.addCleanup(end)
        return writer, end

    def wait_for(self, what, is_there):
        end = time.monotonic() + LIMIT_S
        while not is_there():
            self.assertLess(time.monotonic(), end, what)
            time.sleep(0.01)

    def wait_for_writes(self, writer, count):
        goal = writer.writes + count
        self.wait_for("the client does not write", lambda: writer.writes >= goal)

    def job(self, found):
        (one,) = [job for job in spile_json("jobs")["jobs"] if job["id"] == found["id"]]
        return one

    def test_backups_of_a_disk_under_load_hold_one_moment(self):
        for disk_name in ["disk.vhd", "disk.raw"]:
            disk = self.path(disk_name)
            spile("create", disk, "--size", str(SIZE_BYTES))
            server = self.serve(disk)
            writer, end = self.writing(server, bytes(SIZE_BYTES))
            for form, target in [("vpc", self.path(f"{disk_name}-1.vhd")), ("raw", self.path(f"{disk_name}-2.raw"))]:
                self.wait_for_writes(writer, 20)
                least = writer.writes
                begun = spile_json("backup", disk, target, "--rate", "8M", "--background")
                most = len(writer.issued)
                # It is copied while the client goes on.
                self.wait_for_writes(writer, 20)
                job = begun["jobs"][0]
                self.assertEqual((job["kind"], job["to"]), ("backup", str(target)))
                self.wait_for("the backup does not end", lambda: self.job(job)["state"] != "running")
                self.assertEqual(self.job(job)["state"], "done", self.job(job))
                content = self.read(target, form)
                self.assertTrue(writer.find(content, least, most), f"{target.name} holds no moment of its making")
                self.assertTrue(spile_json("verify", target)["is_right"])
                if form == "vpc":
                    check(target)
            end()
            self.assertEqual(server.stop(), 0)
        left = [path.name for path in disk.parent.iterdir() if path.name.startswith(".")]
        self.assertEqual(left, [])

    def test_a_chain_of_increments_holds_its_moments(self):
        """A full backup and two increments under load, as children and in place; the last ones are the disk, as qemu-img reads it."""
        need("qemu-img", "qemu-utils")
        disk = self.path("disk.vhd")
        spile("create", disk, "--size", str(SIZE_BYTES))
        server = self.serve(disk)
        writer, end = self.writing(server, bytes(SIZE_BYTES))
        chain, raw, moments = [], self.path("inplace.raw"), []
        for number in range(3):
            self.wait_for_writes(writer, 20)
            child, since = self.path(f"chain{number}.vhd"), []
            if chain:
                since = ["--since", f"c{number - 1}", "--parent", chain[-1]]
            least = writer.writes
            spile("backup", disk, child, "--checkpoint", f"c{number}", "--wait", *since)
            moments.append((child, least, len(writer.issued)))
            chain.append(child)
            since = ["--since", f"r{number - 1}"] if number else []
            least = writer.writes
            spile("backup", disk, raw, "--checkpoint", f"r{number}", "--wait", *since)
            content = self.read(raw, "raw")
            self.assertTrue(writer.find(content, least, len(writer.issued)), f"{number}: in place it is no moment")
        end()
        # The older ones stay what they were.
        for child, least, most in moments:
            spile("verify", child)
            out = self.path("restored.raw")
            out.unlink(missing_ok=True)
            spile("restore", child, out)
            self.assertTrue(writer.find(out.read_bytes(), least, most), f"{child.name} holds no moment of its making")
        last = self.path("last.vhd")
        spile("backup", disk, last, "--since", "c2", "--parent", chain[-1], "--wait")
        spile("backup", disk, raw, "--since", "r2", "--wait")
        out = self.path("last.raw")
        spile("restore", last, out)
        for image in [out, raw]:
            run("qemu-img", "compare", "-f", "raw", "-F", "raw", image, server.uri())
        self.assertEqual(server.stop(), 0)
        self.assertEqual(out.read_bytes(), bytes(writer.content))

    def test_a_backup_that_was_damaged_is_found_and_not_restored(self):
        disk, target = self.raw(size_bytes=SIZE_BYTES), self.path("backup.raw")
        spile("backup", disk, target)
        restored = self.path("restored.raw")
        spile("restore", target, restored)
        self.assertSame(disk, restored)
        at = 5 * MIB + 4711
        with open(target, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
        done = spile("verify", target, "--json", ok=False)
        self.assertEqual(done.returncode, 3)
        self.assertEqual(json.loads(done.stdout)["differs_at_offset_bytes"], [5 * MIB])
        again = self.path("again.raw")
        refused = spile("restore", target, again, ok=False)
        self.assertIn(b"differs from its digest at offset 0x500000", refused.stderr)
        self.assertFalse(again.exists())

    def nbdkit(self, *words):
        need("nbdkit", "nbdkit")
        socket, log = self.path("target.sock"), open(self.path("nbdkit.log"), "wb")
        server = subprocess.Popen(["nbdkit", "-f", "-U", socket, *words], stderr=log)
        self.addCleanup(lambda: (server.kill(), server.wait()))
        self.wait_for("nbdkit does not listen", socket.exists)
        return server, f"nbd+unix:///?socket={socket}"

    def test_a_target_that_hangs_holds_up_nobody(self):
        disk = self.raw(size_bytes=SIZE_BYTES)
        before = disk.read_bytes()
        target_server, uri = self.nbdkit("memory", str(SIZE_BYTES))
        server = self.serve(disk)
        writer, end = self.writing(server, before)
        def time_of_writes():
            began = time.monotonic()
            self.wait_for_writes(writer, 500)
            return time.monotonic() - began

        quiet = time_of_writes()
        begun = spile_json("backup", disk, uri, "--rate", "4M", "--background")["jobs"][0]
        self.wait_for("the backup does not begin", lambda: self.job(begun)["done_bytes"] > 0)
        target_server.send_signal(signal.SIGSTOP)
        hanging = time_of_writes()
        print(f"500 writes: {quiet:.3f} s without a backup, {hanging:.3f} s while it hung")
        self.assertLess(hanging, 20 * max(quiet, 0.05), "guests wait for a target that hangs")
        self.assertEqual(self.job(begun)["state"], "running")
        spile("job", begun["id"], "cancel")
        self.wait_for("the backup does not end", lambda: self.job(begun)["state"] == "cancelled")
        self.wait_for_writes(writer, 100)
        target_server.send_signal(signal.SIGCONT)
        # Nothing of it stays in the way of the next one.
        target = self.path("next.vhd")
        least = writer.writes
        spile("backup", disk, target, "--wait")
        end()
        self.assertTrue(writer.find(self.read(target, "vpc"), least, len(writer.issued)))
        self.assertEqual(server.stop(), 0)
        self.assertEqual(disk.read_bytes(), bytes(writer.content))

    def test_a_slow_export_gets_one_moment(self):
        disk = self.raw(size_bytes=SIZE_BYTES)
        _, uri = self.nbdkit("--filter=delay", "memory", str(SIZE_BYTES), "delay-write=50ms")
        server = self.serve(disk)
        writer, end = self.writing(server, disk.read_bytes())
        self.wait_for_writes(writer, 20)
        least, manifest = writer.writes, self.path("manifest.json")
        begun = spile_json("backup", disk, uri, "--manifest", manifest, "--background")["jobs"][0]
        most = len(writer.issued)
        self.wait_for("the backup does not end", lambda: self.job(begun)["state"] != "running")
        self.assertEqual(self.job(begun)["state"], "done", self.job(begun))
        end()
        self.assertEqual(server.stop(), 0)
        out = self.path("export.raw")
        spile("restore", uri, out, "--manifest", manifest)
        self.assertTrue(writer.find(out.read_bytes(), least, most), "the export holds no moment of its making")

    def test_two_disks_are_of_one_moment(self):
        disks = [self.path("a.raw"), self.path("b.vhd")]
        for disk in disks:
            spile("create", disk, "--size", str(SIZE_BYTES))
        server = self.serve(*disks)
        nbd = need_module("nbd", "python3-libnbd")
        handles = []
        for name in ["a", "b"]:
            handle = nbd.NBD()
            handle.connect_uri(server.uri(name))
            handles.append(handle)
        stops = threading.Event()

        def count_up():
            number = 0
            while not stops.is_set():
                number += 1
                # The second write begins when the first one was answered.
                for handle in handles:
                    handle.pwrite(number.to_bytes(8, "big") * 64, number % 8 * 2 * MIB)
        work = threading.Thread(target=count_up)
        work.start()
        try:
            for turn in range(4):
                folder = self.path(f"turn{turn}")
                folder.mkdir()
                time.sleep(0.1)
                spile("backup", *disks, folder, "--wait")
                newest = []
                for name in ["a", "b"]:
                    spile("verify", folder / f"{name}.vhd")
                    out = self.path("out.raw")
                    out.unlink(missing_ok=True)
                    spile("convert", folder / f"{name}.vhd", out)
                    content = out.read_bytes()
                    numbers = [int.from_bytes(content[at:at + 8], "big") for at in range(0, SIZE_BYTES, 2 * MIB)]
                    newest.append(max(numbers))
                first, second = newest
                self.assertTrue(first > 0 and first - second in (0, 1), f"{newest} are not of one moment")
        finally:
            stops.set()
            work.join(LIMIT_S)
        self.assertEqual(server.stop(), 0)
