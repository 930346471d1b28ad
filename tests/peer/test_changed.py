"""Changed blocks as other programs see them: QEMU's metadata contexts by nbdinfo, libnbd and qemu-img, and backups made with them."""

import json
import os

from support import KIB, MIB, STANDIN, PeerTest, need, need_module, run, spile

BLOCK = 64 * KIB
SIZE_BYTES = 64 * MIB


class Changed(PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("needs spile checkpoint")
        need("nbdinfo", "libnbd-bin")
        super().setUp()
        self.disk = self.path("disk.vhd")
        spile("create", self.disk, "--size", SIZE_BYTES)
        self.server = self.serve(self.disk)

    def checkpoint(self, name):
        spile("checkpoint", self.disk, name)

    def write(self, *ranges, pattern=7):
        need("qemu-io", "qemu-utils")
        commands = [word for at, length in ranges for word in ("-c", f"write -P {pattern} {at} {length}")]
        run("qemu-io", "-f", "raw", *commands, self.server.uri())

    def map(self, context):
        """What nbdinfo prints of a context: (offset, length, value), which cover the disk."""
        entries = json.loads(run("nbdinfo", f"--map={context}", "--json", self.server.uri()).stdout)
        at = 0
        for entry in entries:
            self.assertEqual(entry["offset"], at)
            at += entry["length"]
        self.assertEqual(at, SIZE_BYTES)
        return [(entry["offset"], entry["length"], entry["type"]) for entry in entries]

    def changed(self, name):
        """What spile itself says."""
        ranges = json.loads(spile("changed", self.disk, "--since", name, "--json").stdout)["ranges"]
        return [(entry["offset_bytes"], entry["length_bytes"]) for entry in ranges]

    def test_contexts_are_listed(self):
        contexts = lambda: json.loads(run("nbdinfo", "--json", self.server.uri()).stdout)["exports"][0]["contexts"]
        self.assertEqual(contexts(), ["base:allocation", "qemu:allocation-depth"])
        self.checkpoint("monday")
        self.checkpoint("a name: with all")
        self.assertEqual(
            contexts(),
            [
                "base:allocation",
                "qemu:allocation-depth",
                "qemu:dirty-bitmap:monday",
                "qemu:dirty-bitmap:a name: with all",
            ],
        )
        listed = run("nbdinfo", "--list", "--json", self.server.uri())
        self.assertIn(b"qemu:dirty-bitmap:monday", listed.stdout)
        spile("checkpoint", self.disk, "monday", "--remove")
        self.assertNotIn("qemu:dirty-bitmap:monday", contexts())

    def test_nbdinfo_maps_a_bitmap(self):
        self.write((0, MIB))
        self.checkpoint("monday")
        self.write((3 * BLOCK, BLOCK), (SIZE_BYTES - 4 * KIB, 4 * KIB))
        self.checkpoint("tuesday")
        self.write((9 * BLOCK + 512, 512))
        dirty = lambda name: [entry[:2] for entry in self.map(f"qemu:dirty-bitmap:{name}") if entry[2] & 1]
        self.assertEqual(dirty("monday"), [(3 * BLOCK, BLOCK), (9 * BLOCK, BLOCK), (SIZE_BYTES - BLOCK, BLOCK)])
        self.assertEqual(dirty("tuesday"), [(9 * BLOCK, BLOCK)])
        self.assertEqual(dirty("monday"), self.changed("monday"))

    def test_nbdinfo_maps_the_depth(self):
        self.write((0, 2 * MIB))
        spile("snapshot", self.disk, "--name", "below")
        self.write((2 * MIB, 2 * MIB))
        depths = self.map("qemu:allocation-depth")
        self.assertEqual(depths, [(0, 2 * MIB, 2), (2 * MIB, 2 * MIB, 1), (4 * MIB, SIZE_BYTES - 4 * MIB, 0)])

    def test_several_contexts_at_once(self):
        nbd = need_module("nbd", "python3-libnbd")
        self.write((0, MIB))
        self.checkpoint("monday")
        self.write((4 * MIB, 2 * BLOCK))
        self.checkpoint("tuesday")
        self.write((8 * MIB, BLOCK))
        handle = nbd.NBD()
        names = ["qemu:dirty-bitmap:tuesday", "base:allocation", "qemu:allocation-depth", "qemu:dirty-bitmap:monday"]
        for name in names:
            handle.add_meta_context(name)
        handle.connect_uri(self.server.uri())
        self.assertTrue(all(handle.can_meta_context(name) for name in names))
        found = {}

        def hear(name, offset, entries, error):
            found.setdefault(name, []).append((offset, list(zip(entries[::2], entries[1::2]))))

        handle.block_status(SIZE_BYTES, 0, hear)
        self.assertEqual(set(found), set(names))
        for name, chunks in found.items():
            self.assertEqual([chunk[0] for chunk in chunks], [0], name)
            self.assertEqual(sum(length for length, _ in chunks[0][1]), SIZE_BYTES, name)
        self.assertEqual([e for e in found[names[0]][0][1] if e[1]], [(BLOCK, 1)])
        self.assertEqual([e for e in found[names[3]][0][1] if e[1]], [(2 * BLOCK, 1), (BLOCK, 1)])
        # One descriptor for each context, and none longer than what was asked for.
        for at, length in ((4 * MIB - 4096, 8192), (4 * MIB, 4096), (4 * MIB + BLOCK, 3 * BLOCK), (8 * MIB, MIB)):
            found.clear()
            handle.block_status(length, at, hear, flags=nbd.CMD_FLAG_REQ_ONE)
            for name, chunks in found.items():
                self.assertEqual((len(chunks), chunks[0][0], len(chunks[0][1])), (1, at, 1), name)
                self.assertLessEqual(chunks[0][1][0][0], length, name)
            is_dirty = 4 * MIB <= at < 4 * MIB + 2 * BLOCK or at == 8 * MIB
            self.assertEqual(found[names[3]][0][1][0][1], int(is_dirty), at)
        handle.shutdown()

    def test_qemu_img_reads_the_bitmap(self):
        need("qemu-img", "qemu-utils")
        self.write((0, MIB))
        self.checkpoint("monday")
        self.write((2 * BLOCK, BLOCK), (30 * MIB, MIB))
        path = self.server.uri().split("socket=")[1]
        options = f"driver=nbd,server.type=unix,server.path={path},x-dirty-bitmap=qemu:dirty-bitmap:monday"
        entries = json.loads(run("qemu-img", "map", "--output=json", "--image-opts", options).stdout)
        # qemu-img shows what the bitmap calls dirty as not allocated: its map was made for another context.
        dirty = [(entry["start"], entry["length"]) for entry in entries if not entry["data"]]
        self.assertEqual(dirty, [(2 * BLOCK, BLOCK), (30 * MIB, MIB)])

    def test_an_incremental_backup_by_the_bitmap_is_the_disk(self):
        nbd = need_module("nbd", "python3-libnbd")
        self.write((0, MIB), (20 * MIB, MIB))
        self.checkpoint("full")
        backup = self.path("backup.raw")
        run("nbdcopy", self.server.uri(), backup)
        self.write((5 * MIB, 3 * BLOCK), (40 * MIB - 512, 1024), pattern=9)
        run("qemu-io", "-f", "raw", "-c", "write -z 20M 128k", "-c", "discard 0 64k", self.server.uri())
        copied = 0
        handle = nbd.NBD()
        handle.connect_uri(self.server.uri())
        with open(backup, "r+b") as file:
            for at, length, value in self.map("qemu:dirty-bitmap:full"):
                if value & 1:
                    os.pwrite(file.fileno(), handle.pread(length, at), at)
                    copied += length
        handle.shutdown()
        self.assertEqual(copied, (3 + 2 + 2 + 1) * BLOCK)
        spile("compare", self.server.uri(), backup)

    def test_a_chain_of_increments_by_the_bitmaps_is_the_disk(self):
        """As a backup program does it with the tools of others: a full copy by qemu-img, and after each checkpoint what nbdinfo says has changed, put
        into an overlay of the copy before by qemu-io."""
        need("qemu-img", "qemu-utils")
        self.write((0, MIB), (20 * MIB, MIB), (63 * MIB, MIB))
        self.checkpoint("c0")
        full = self.path("c0.qcow2")
        run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", self.server.uri(), full)
        below, path = full, self.server.uri().split("socket=")[1]
        rounds = [
            [(5 * MIB, 3 * BLOCK), (40 * MIB - 512, 1024)],
            [(5 * MIB + BLOCK, BLOCK), (63 * MIB, 4 * KIB), (SIZE_BYTES - 512, 512)],
            [(0, 8 * MIB)],
        ]
        for number, ranges in enumerate(rounds, 1):
            self.write(*ranges, pattern=number)
            if number == 2:
                run("qemu-io", "-f", "raw", "-c", "discard 20M 128k", self.server.uri())
            context = f"qemu:dirty-bitmap:c{number - 1}"
            dirty = [entry[:2] for entry in self.map(context) if entry[2] & 1]
            self.assertEqual(dirty, self.changed(f"c{number - 1}"))
            # qemu-img sees the same ranges.
            options = f"driver=nbd,server.type=unix,server.path={path},x-dirty-bitmap={context}"
            entries = json.loads(run("qemu-img", "map", "--output=json", "--image-opts", options).stdout)
            self.assertEqual([(entry["start"], entry["length"]) for entry in entries if not entry["data"]], dirty)
            self.checkpoint(f"c{number}")
            child, part = self.path(f"c{number}.qcow2"), self.path("part.raw")
            run("qemu-img", "create", "-f", "qcow2", "-b", below, "-F", "qcow2", child)
            for at, length in dirty:
                run("qemu-img", "dd", "-f", "raw", "-O", "raw", "bs=65536", f"skip={at // BLOCK}",
                    f"count={(at + length) // BLOCK}", f"if={self.server.uri()}", f"of={part}")
                self.assertEqual(part.stat().st_size, length)
                run("qemu-io", "-f", "qcow2", "-c", f"write -s {part} {at} {length}", child)
            # What an older copy holds stays as it is: all of them are looked at once more at the end.
            run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", child, self.server.uri())
            below = child
        spile("convert", self.server.uri(), self.path("now.raw"))
        run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", below, self.path("now.raw"))

    def test_a_disk_for_reading_only_has_its_contexts(self):
        self.write((0, MIB))
        self.checkpoint("monday")
        self.write((3 * BLOCK, BLOCK))
        self.assertEqual(self.server.stop(), 0)
        self.server = self.serve(f"{self.disk},read-only")
        dirty = [entry[:2] for entry in self.map("qemu:dirty-bitmap:monday") if entry[2] & 1]
        self.assertEqual(dirty, [(3 * BLOCK, BLOCK)])
