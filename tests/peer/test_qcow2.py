"""Spile on qcow2 images that qemu-img made, with every option that it has.

qemu-img and qemu-io make and fill the images; what qemu-img reads from them is the truth, and what
qemu-img check says of them is what spile check has to say.
"""

import json
import random
import struct
import time

from support import (
    KIB, LIMIT_S, MIB, STANDIN, PeerTest, check_by_qemu, need, qemu_img_json, run, spile, spile_json, text,
)

SIZE_BYTES = 12 * MIB + 3 * 512

# A name for each kind of image, and its options.
KINDS = {
    "default": "",
    "version 2": "compat=0.10",
    "clusters of 512 bytes": "cluster_size=512",
    "clusters of 4 KiB": "cluster_size=4k",
    "clusters of 2 MiB": "cluster_size=2M",
    "version 2, clusters of 1 KiB": "compat=0.10,cluster_size=1k",
    "refcounts of 1 bit": "refcount_bits=1",
    "refcounts of 2 bits": "refcount_bits=2,cluster_size=4k",
    "refcounts of 4 bits": "refcount_bits=4",
    "refcounts of 8 bits": "refcount_bits=8",
    "refcounts of 32 bits": "refcount_bits=32",
    "refcounts of 64 bits": "refcount_bits=64,cluster_size=512",
    "extended L2": "extended_l2=on",
    "extended L2, clusters of 16 KiB": "extended_l2=on,cluster_size=16k",
    "extended L2, clusters of 2 MiB": "extended_l2=on,cluster_size=2M",
    "lazy refcounts": "lazy_refcounts=on",
    "zstd": "compression_type=zstd",
    "preallocated metadata": "preallocation=metadata",
    "preallocated metadata, extended L2": "preallocation=metadata,extended_l2=on",
    "preallocated by falloc": "preallocation=falloc",
    "preallocated in full": "preallocation=full,cluster_size=4k",
}

COMPRESSED = {
    "deflate": "",
    "deflate, version 2": "compat=0.10",
    "deflate, clusters of 512 bytes": "cluster_size=512",
    "deflate, clusters of 2 MiB": "cluster_size=2M",
    "deflate, extended L2": "extended_l2=on",
    "zstd": "compression_type=zstd",
    "zstd, clusters of 4 KiB": "compression_type=zstd,cluster_size=4k",
    "zstd, clusters of 2 MiB": "compression_type=zstd,cluster_size=2M",
    "zstd, extended L2": "compression_type=zstd,extended_l2=on,cluster_size=16k",
}

# The exit code of spile check for each one of qemu-img check.
VERDICTS = {0: 0, 2: 3, 3: 4}


def commands(dice, turns=60, discards=True):
    """Commands for qemu-io: data, zeroes with and without unmapping, and discards, at odd sectors."""
    discard = "discard" if discards else "write -z"
    for turn in range(turns):
        length = min(dice.randrange(512, 700 * KIB), SIZE_BYTES) // 512 * 512
        at = dice.randrange(0, SIZE_BYTES - length + 1) // 512 * 512
        how = ("write -P {}", "write -P {}", "write -P {}", "write -z", "write -z -u", discard)[turn % 6]
        yield f"{how.format(dice.randrange(1, 256))} {at} {length}"
    yield f"write -P 77 {SIZE_BYTES - 512} 512"


class Qcow2(PeerTest):
    def setUp(self):
        need("qemu-img", "qemu-utils")
        if STANDIN:
            self.skipTest("needs more of spile than a server")
        super().setUp()

    def image(self, options="", name="a.qcow2", seed=1, size_bytes=SIZE_BYTES, backing=None):
        """A new image, filled by qemu-io unless there is no seed."""
        path = self.path(name)
        path.unlink(missing_ok=True)
        words = ["-o", options] if options else []
        words += ["-b", backing[0], "-F", backing[1]] if backing else []
        run("qemu-img", "create", "-q", "-f", "qcow2", *words, path, size_bytes)
        if seed is not None:
            self.fill(path, seed)
        return path

    def fill(self, path, seed, image_format="qcow2", discards=True):
        """Writes to an image with qemu-io. After discards, its content depends on the format."""
        lines = [word for line in commands(random.Random(seed), discards=discards) for word in ("-c", line)]
        run("qemu-io", "-f", image_format, *lines, path)

    def wait_for_lock(self, image):
        """Waits until the kernel has let go of the lock of a process that was killed, as QEMU does not."""
        end = time.monotonic() + LIMIT_S
        while run("qemu-img", "info", "-f", "qcow2", image, ok=None).returncode != 0:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def raw_of(self, image, name="truth.raw"):
        raw = self.path(name)
        raw.unlink(missing_ok=True)
        run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", image, raw)
        return raw

    def compressed(self):
        """Makes an image of each kind that qemu-img can compress, one after the other. Random bytes lie beside words in them."""
        source = self.raw_of(self.image(seed=7))
        with open(source, "r+b") as file:
            file.seek(3 * MIB)
            file.write(random.Random(3).randbytes(2 * MIB))
            file.write(b"some words, and " * 100_000)
        for kind, options in COMPRESSED.items():
            image = self.path("c.qcow2")
            image.unlink(missing_ok=True)
            words = ["-o", options] if options else []
            run("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", *words, source, image)
            yield kind, image

    def assertReadsAlike(self, image, *options):
        """Checks that Spile reads what qemu-img reads: by compare, by convert, and in small pieces."""
        raw = self.raw_of(image)
        spile("compare", image, raw, *options)
        back = self.path("back.raw")
        back.unlink(missing_ok=True)
        spile("convert", image, back, *options)
        self.assertSame(raw, back)
        runs = spile_json("map", image, *options)["runs"]
        self.assertEqual(sum(run["len_bytes"] for run in runs), raw.stat().st_size)

    def assertChecksAlike(self, image, *options):
        theirs = run("qemu-img", "check", "-q", "-f", "qcow2", image, ok=None)
        ours = spile("check", image, *options, ok=None)
        said = text(ours.stdout + ours.stderr + theirs.stdout + theirs.stderr)
        self.assertEqual(ours.returncode, VERDICTS[theirs.returncode], said)
        return ours.returncode


class Reading(Qcow2):
    def test_every_kind(self):
        for seed, (kind, options) in enumerate(KINDS.items()):
            with self.subTest(kind):
                image = self.image(options, seed=seed)
                self.assertReadsAlike(image)
                self.assertChecksAlike(image)
                self.assertEqual(spile_json("info", image)["virtual_size_bytes"], SIZE_BYTES)

    def test_compressed(self):
        for kind, image in self.compressed():
            with self.subTest(kind):
                self.assertReadsAlike(image)
                self.assertChecksAlike(image)
                # Some clusters are written again: then compressed and plain ones lie side by side, and some
                # compressed streams are not used any more.
                self.fill(image, 9)
                self.assertReadsAlike(image)
                self.assertChecksAlike(image)

    def test_over_nbd(self):
        need("nbdcopy", "libnbd-bin")
        for kind in ("default", "extended L2", "clusters of 512 bytes", "zstd"):
            with self.subTest(kind):
                image = self.image(KINDS[kind], seed=4)
                raw = self.raw_of(image)
                server = self.serve(f"{image},read-only")
                run("nbdcopy", server.uri(), self.path("over-nbd.raw"))
                run("qemu-img", "compare", "-f", "raw", "-F", "raw", server.uri(), raw)
                self.assertEqual(server.stop(), 0)
                self.assertSame(raw, self.path("over-nbd.raw"))

    def test_sizes(self):
        for size_bytes in (512, 65536 - 512, 65536 + 512, MIB, 512 * MIB + 512, 16 << 40):
            with self.subTest(size_bytes=size_bytes):
                image = self.image(seed=None, size_bytes=size_bytes)
                run("qemu-io", "-f", "qcow2", "-c", f"write -P 9 {size_bytes - 512} 512", image)
                self.assertEqual(spile_json("info", image)["virtual_size_bytes"], size_bytes)
                runs = spile_json("map", image)["runs"]
                self.assertEqual(sum(run["len_bytes"] for run in runs), size_bytes)
                self.assertEqual(runs[-1]["kind"], "data")
                self.assertChecksAlike(image)

    def test_map_agrees(self):
        for kind in ("default", "extended L2", "preallocated metadata"):
            with self.subTest(kind):
                image = self.image(KINDS[kind], seed=6)
                content = self.raw_of(image).read_bytes()
                ours = [False] * (SIZE_BYTES // 512)
                for entry in spile_json("map", image)["runs"]:
                    first, last = entry["offset_bytes"], entry["offset_bytes"] + entry["len_bytes"]
                    if entry["kind"] != "data":
                        self.assertFalse(any(content[first:last]), f"{entry} holds data")
                    for sector in range(first // 512, last // 512):
                        ours[sector] = entry["kind"] == "data"
                for entry in qemu_img_json("map", "-f", "qcow2", image):
                    first, last = entry["start"] // 512, (entry["start"] + entry["length"]) // 512
                    if entry["zero"]:
                        self.assertFalse(any(ours[first:last]), f"{entry} is zero to QEMU")

    def test_data_file(self):
        for raw in ("on", "off"):
            with self.subTest(data_file_raw=raw):
                data = self.path("data.raw")
                data.unlink(missing_ok=True)
                image = self.image(f"data_file={data},data_file_raw={raw}", seed=8)
                refused = spile("convert", image, self.path("no.raw"), ok=False)
                self.assertIn("--allow-data-file", text(refused.stderr))
                self.assertReadsAlike(image, "--allow-data-file")
                self.assertChecksAlike(image, "--allow-data-file")

    def test_encrypted_is_refused(self):
        image = self.path("luks.qcow2")
        run(
            "qemu-img", "create", "-q", "-f", "qcow2", "--object", "secret,id=s,data=word", "-o",
            "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10", image, "8M",
        )
        self.assertIn("LUKS", text(spile("info", image, ok=False).stderr))
        # What is not read need not be damaged: its metadata are no secret. qemu-img wants the key all the same.
        self.assertIn("sound", text(spile("check", image).stdout))

    def test_snapshots_and_bitmaps_are_listed(self):
        image = self.image(seed=2)
        run("qemu-img", "snapshot", "-c", "before the storm", image)
        self.fill(image, 3)
        run("qemu-img", "snapshot", "-c", "after", image)
        run("qemu-img", "snapshot", "-a", "before the storm", image)
        self.assertReadsAlike(image)
        self.assertEqual(self.assertChecksAlike(image), 0)
        run("qemu-img", "bitmap", "--add", image, "changes")
        run("qemu-img", "bitmap", "--add", "--disable", "-g", "4096", image, "fine")
        self.fill(image, 4)
        said = json.dumps(spile_json("info", image))
        for name in ("before the storm", "after", "changes", "fine"):
            self.assertIn(name, said)
        self.assertReadsAlike(image)
        self.assertEqual(self.assertChecksAlike(image), 0)


class Writing(Qcow2):
    """Spile writes, QEMU reads and checks, and the reverse."""

    def both_write(self, image, seed, kills=False):
        """Turns of Spile and QEMU at one image, and a copy that only QEMU has written."""
        for turn in range(3):
            truth = self.raw_of(image)
            server = self.serve(image)
            self.fill(server.uri(), seed + turn, "raw", discards=False)
            self.fill(truth, seed + turn, "raw", discards=False)
            if kills:
                server.kill()
                self.wait_for_lock(image)
            else:
                self.assertEqual(server.stop(), 0)
            check_by_qemu(image, was_killed=kills)
            run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", image, truth)
            if kills:
                run("qemu-img", "check", "-q", "-f", "qcow2", "-r", "leaks", image)
            self.fill(image, seed + 50 + turn)

    def test_every_kind(self):
        for seed, (kind, options) in enumerate(KINDS.items()):
            with self.subTest(kind):
                self.both_write(self.image(options, seed=seed), seed + 100)

    def test_kills(self):
        for kind in ("default", "version 2", "clusters of 512 bytes", "extended L2", "refcounts of 1 bit"):
            with self.subTest(kind):
                self.both_write(self.image(KINDS[kind], seed=3), 200, kills=True)

    def test_over_every_format(self):
        base = self.raw_of(self.image(seed=11), "base.raw")
        vhd, other = self.path("base.vhd"), self.path("base.qcow2")
        run("qemu-img", "convert", "-f", "raw", "-O", "vpc", "-o", "force_size=on", base, vhd)
        run("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", base, other)
        for path, name in ((base, "raw"), (vhd, "vpc"), (other, "qcow2")):
            before = path.read_bytes()
            for options in ("", "extended_l2=on", "compat=0.10"):
                with self.subTest(below=name, options=options):
                    self.both_write(self.image(options, backing=(path.name, name), seed=12), 300)
            self.assertEqual(path.read_bytes(), before)

    def test_compressed(self):
        source = self.raw_of(self.image(seed=7))
        for kind, options in COMPRESSED.items():
            with self.subTest(kind):
                image = self.path("c.qcow2")
                image.unlink(missing_ok=True)
                words = ["-o", options] if options else []
                run("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", *words, source, image)
                self.both_write(image, 400)

    def test_a_snapshot_keeps_what_it_has(self):
        for options in ("", "extended_l2=on", "compat=0.10"):
            with self.subTest(options=options):
                image = self.image(options, seed=2)
                run("qemu-img", "snapshot", "-c", "before", image)
                truth = self.raw_of(image, "before.raw")
                self.both_write(image, 500)
                run("qemu-img", "snapshot", "-a", "before", image)
                run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", image, truth)
                self.assertEqual(self.assertChecksAlike(image), 0)

    def test_an_image_whose_writer_was_killed(self):
        """Spile makes its refcounts anew when it opens it for writing, and says so."""
        kinds = ("", ",extended_l2=on", ",cluster_size=512,refcount_bits=32", ",refcount_bits=8")
        for number, options in enumerate(kinds):
            with self.subTest(options):
                image = self.image("lazy_refcounts=on" + options, seed=90 + number)
                words = ("write -P 5 3M 1M", "write -z -u 5M 1M", "flush", "sigraise 9")
                run("qemu-io", "-f", "qcow2", *(word for line in words for word in ("-c", line)), image, ok=False)
                self.assertTrue(spile_json("info", image)["layers"][0]["facts"]["dirty"])
                self.assertNotEqual(run("qemu-img", "check", "-f", "qcow2", image, ok=None).returncode, 0)
                truth = self.raw_of(image)
                server = self.serve(image)
                run("qemu-img", "compare", "-f", "raw", "-F", "raw", server.uri(), truth)
                for target, kind in ((server.uri(), "raw"), (truth, "raw")):
                    self.fill(target, 95 + number, kind, discards=False)
                self.assertEqual(server.stop(), 0)
                self.assertIn("its refcounts are made anew", server.output())
                run("qemu-img", "check", "-q", "-f", "qcow2", image)
                run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", image, truth)
                self.assertTrue(qemu_img_json("info", "-f", "qcow2", image)["format-specific"]["data"]["lazy-refcounts"])

    def test_what_is_refused(self):
        image = self.image()
        original = image.read_bytes()
        l1 = struct.unpack_from(">Q", original, 40)[0]
        looped = original[:l1] + struct.pack(">Q", l1 | 1 << 63) + original[l1 + 8 :]
        for content, bit, words in ((original, 2, "marked corrupt"), (looped, 1, "cannot be made anew")):
            image.write_bytes(content[:79] + bytes([bit]) + content[80:])
            before = image.read_bytes()
            self.assertIn(words, text(spile("serve", image, "--nbd", "unix:/nowhere", ok=False).stderr))
            self.assertEqual(image.read_bytes(), before)


class Chains(Qcow2):
    def test_every_format_below(self):
        base = self.raw_of(self.image(seed=11), "base.raw")
        vhd = self.path("base.vhd")
        run("qemu-img", "convert", "-f", "raw", "-O", "vpc", "-o", "force_size=on", base, vhd)
        other = self.path("base.qcow2")
        run("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", base, other)
        for path, name in ((base, "raw"), (vhd, "vpc"), (other, "qcow2")):
            for options in ("", "extended_l2=on", "compat=0.10", "cluster_size=512"):
                with self.subTest(below=name, options=options):
                    image = self.image(options, backing=(path.name, name), seed=12)
                    self.assertReadsAlike(image)
                    self.assertChecksAlike(image)

    def test_a_long_chain_of_different_sizes(self):
        below = (self.raw_of(self.image(seed=20), "0.raw").name, "raw")
        for number in range(1, 8):
            size_bytes = SIZE_BYTES + (number % 3 - 1) * 777 * 512
            options = ("", "cluster_size=4k", "extended_l2=on", "compat=0.10")[number % 4]
            image = self.image(options, f"{number}.qcow2", None, size_bytes, below)
            lines = [f"write -P {number} {number * MIB} 700k", f"write -z {number * MIB + 512} 5k"]
            run("qemu-io", "-f", "qcow2", *[word for line in lines for word in ("-c", line)], image)
            below = (image.name, "qcow2")
        self.assertReadsAlike(image)
        self.assertEqual(len(spile_json("info", "--chain", image)["layers"]), 8)

    def test_a_parent_without_a_named_format(self):
        self.raw_of(self.image(seed=30), "base.raw")
        image = self.image(backing=("base.raw", "raw"), seed=31)
        run("qemu-img", "rebase", "-u", "-f", "qcow2", "-b", "base.raw", "-F", "raw", image)
        raw = bytearray(image.read_bytes())
        at = raw.index(struct.pack(">I", 0xE2792ACA))
        raw[at:at + 4] = b"none"
        image.write_bytes(raw)
        self.assertIn("--backing-format", text(spile("info", "--chain", image, ok=False).stderr))
        self.assertIsNone(spile_json("info", image)["layers"][0]["facts"]["parent_format"])
        truth = self.path("truth.raw")
        run("qemu-img", "convert", "--image-opts", "-O", "raw",
            f"driver=qcow2,file.filename={image},backing.driver=raw,backing.file.filename={self.path('base.raw')}", truth)
        spile("compare", image, truth, "--backing-format", "raw")

    def test_a_vhd_over_a_qcow2(self):
        for options in ("", "extended_l2=on", "compression_type=zstd"):
            with self.subTest(options=options):
                image = self.image(options, seed=40)
                leaf, before = self.path("leaf.vhd"), image.read_bytes()
                leaf.unlink(missing_ok=True)
                spile("create", leaf, "--parent", image)
                spile("compare", leaf, self.raw_of(image))
                server = self.serve(leaf)
                self.fill(server.uri(), 41, "raw", discards=False)
                self.assertEqual(server.stop(), 0)
                self.assertEqual(image.read_bytes(), before)
                self.fill(image, 41, discards=False)
                truth = self.raw_of(image)
                image.write_bytes(before)
                spile("compare", leaf, truth)
                spile("check", leaf)


class Damage(Qcow2):
    def damage(self, dice, image):
        """Changes one number of the image's metadata."""
        raw = bytearray(image.read_bytes())
        bits, l1 = struct.unpack_from(">I", raw, 20)[0], struct.unpack_from(">Q", raw, 40)[0]
        table = struct.unpack_from(">Q", raw, 48)[0]
        mask = (1 << 56) - 512
        l2 = struct.unpack_from(">Q", raw, l1)[0] & mask
        block = struct.unpack_from(">Q", raw, table)[0]
        used = [n for n in range(1 << bits >> 3) if struct.unpack_from(">Q", raw, l2 + n * 8)[0] & mask]
        place = l2 + dice.choice(used) * 8
        entry = struct.unpack_from(">Q", raw, place)[0]
        clusters = len(raw) >> bits
        kind = dice.randrange(7)
        if kind == 0:
            struct.pack_into(">H", raw, block + dice.randrange(clusters) * 2, dice.randrange(4))
        elif kind == 1:
            struct.pack_into(">Q", raw, place, entry ^ 1 << 63)
        elif kind == 2:
            struct.pack_into(">Q", raw, place, dice.randrange(clusters) << bits | 1 << 63)
        elif kind == 3:
            struct.pack_into(">Q", raw, place, clusters + 5 << bits | 1 << 63)
        elif kind == 4:
            struct.pack_into(">Q", raw, place, 0)
        elif kind == 5:
            struct.pack_into(">Q", raw, place, entry | 1 << dice.choice((1, 5, 57, 60)))
        else:
            struct.pack_into(">Q", raw, l1, struct.unpack_from(">Q", raw, l1)[0] ^ 1 << 63)
        image.write_bytes(raw)
        return kind

    def small(self):
        """An image of 2 MiB with clusters of 4 KiB."""
        image = self.image("cluster_size=4k", seed=None, size_bytes=2 * MIB)
        lines = ["write -P 1 0 300k", "write -z 100k 64k", "write -P 2 1M 64k", "discard 20k 40k"]
        run("qemu-io", "-f", "qcow2", *[word for line in lines for word in ("-c", line)], image)
        return image.read_bytes()


class Checking(Damage):
    def test_damage_is_found_as_qemu_finds_it(self):
        dice, seen = random.Random(5), set()
        original = self.small()
        for turn in range(60):
            image = self.path("damaged.qcow2")
            image.write_bytes(original)
            kind = self.damage(dice, image)
            with self.subTest(turn=turn, kind=kind):
                if kind in (1, 6):
                    # COPIED is clear where the refcount is 1. That costs a copy and harms nobody; QEMU calls it corruption.
                    self.assertEqual(run("qemu-img", "check", "-q", "-f", "qcow2", image, ok=None).returncode, 2)
                    self.assertEqual(spile("check", image, ok=None).returncode, 4)
                    continue
                seen.add(self.assertChecksAlike(image))
        self.assertEqual(seen, {0, 3, 4})

    def test_an_image_whose_writer_was_killed(self):
        image = self.image("lazy_refcounts=on", seed=60)
        run("qemu-io", "-f", "qcow2", "-c", "write -P 5 3M 1M", "-c", "flush", "-c", "sigraise 9", image, ok=False)
        self.assertTrue(json.dumps(spile_json("info", image)).count('"dirty": true'))
        before = image.read_bytes()
        self.assertChecksAlike(image)
        raw = self.path("ours.raw")
        spile("convert", image, raw)
        self.assertEqual(image.read_bytes(), before)
        self.assertSame(self.raw_of(image), raw)


# Options of a new image, as qemu-img spells them.
NEW = [
    "", "compat=0.10", "compat=0.10,cluster_size=512", "lazy_refcounts=on", "compression_type=zstd",
    *[f"cluster_size={512 << shift}" for shift in range(13)],
    *[f"refcount_bits={1 << order}" for order in range(7)],
    *[f"cluster_size=1k,refcount_bits={1 << order}" for order in range(7)],
    *[f"extended_l2=on,cluster_size={size}k" for size in (16, 64, 256, 2048)],
]


class Creating(Qcow2):
    def ours_and_theirs(self, options, size_bytes, *parent):
        """Makes the same image with both programs."""
        ours, theirs = self.path("ours.qcow2"), self.path("theirs.qcow2")
        ours.unlink(missing_ok=True)
        theirs.unlink(missing_ok=True)
        words = ["-o", options] if options else []
        backing = ["-b", parent[0], "-F", parent[1]] if parent else []
        run("qemu-img", "create", "-q", "-f", "qcow2", *words, *backing, theirs, size_bytes)
        spile("create", ours, "--size", size_bytes, *words, *(["--parent", self.path(parent[0])] if parent else []))
        return ours, theirs

    def assertSound(self, image):
        run("qemu-img", "check", "-q", "-f", "qcow2", image)
        spile("check", image)

    def assertInfoAlike(self, ours, theirs):
        one, other = [qemu_img_json("info", "-f", "qcow2", path) for path in (ours, theirs)]
        for info in (one, other):
            for name in ("filename", "actual-size", "children", "full-backing-filename"):
                info.pop(name, None)
        self.assertEqual(one, other)

    def test_every_option_gives_the_same_bytes(self):
        for options in NEW:
            for size_bytes in (512, 12 * MIB + 3 * 512, 64 * MIB):
                with self.subTest(options=options, size_bytes=size_bytes):
                    ours, theirs = self.ours_and_theirs(options, size_bytes)
                    self.assertSame(theirs, ours)
                    self.assertSound(ours)
                    self.assertInfoAlike(ours, theirs)

    def test_large_disks(self):
        for options, size_bytes in (
            ("", 16 << 40), ("", 1 << 50), ("cluster_size=512", 1 << 30), ("cluster_size=512", 100 << 30),
            ("cluster_size=4k,refcount_bits=64", 1 << 40), ("extended_l2=on", 16 << 40), ("cluster_size=2M", 1 << 50),
        ):
            with self.subTest(options=options, size_bytes=size_bytes):
                ours, theirs = self.ours_and_theirs(options, size_bytes)
                if "64" not in options and size_bytes != 100 << 30:
                    self.assertSame(theirs, ours)
                self.assertSound(ours)
                self.assertInfoAlike(ours, theirs)

    def test_preallocated_metadata(self):
        for options in NEW:
            with self.subTest(options=options):
                all_options = f"{options},preallocation=metadata".lstrip(",")
                ours, theirs = self.ours_and_theirs(all_options, SIZE_BYTES)
                bits, order = struct.unpack_from(">I", ours.read_bytes(), 20)[0], 4
                for part in options.split(","):
                    if part.startswith("refcount_bits="):
                        order = int(part[14:]).bit_length() - 1
                # What one refcount block counts has one layout.
                if ours.stat().st_size >> bits <= 1 << bits + 3 - order:
                    self.assertSame(theirs, ours)
                self.assertSound(ours)
                self.assertInfoAlike(ours, theirs)
                # QEMU writes to it, and finds its places.
                self.fill(ours, 5)
                self.assertReadsAlike(ours)
                self.assertSound(ours)

    def test_preallocated_space(self):
        for how in ("falloc", "full"):
            for options in ("", "extended_l2=on,cluster_size=16k", "cluster_size=512"):
                with self.subTest(how=how, options=options):
                    image = self.path("p.qcow2")
                    image.unlink(missing_ok=True)
                    words = ["-o", options] if options else []
                    spile("create", image, "--size", SIZE_BYTES, *words, f"--preallocate={how}")
                    self.assertGreaterEqual(image.stat().st_blocks * 512, SIZE_BYTES)
                    self.assertSound(image)
                    self.fill(image, 3)
                    self.assertReadsAlike(image)

    def test_children(self):
        base = self.raw_of(self.image(seed=50), "base.raw")
        run("qemu-img", "convert", "-f", "raw", "-O", "vpc", "-o", "force_size=on", base, self.path("base.vhd"))
        run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", base, self.path("a:b.qcow2"))
        for name, kind in (("base.raw", "raw"), ("base.vhd", "vpc"), ("a:b.qcow2", "qcow2")):
            for options in ("extended_l2=on", "extended_l2=off", "cluster_size=4k", "compat=0.10", "cluster_size=512"):
                with self.subTest(parent=name, options=options):
                    theirs_name = f"./{name}" if ":" in name else name
                    ours, theirs = self.path("ours.qcow2"), self.path("theirs.qcow2")
                    ours.unlink(missing_ok=True)
                    run("qemu-img", "create", "-q", "-f", "qcow2", "-o", options, "-b", theirs_name, "-F", kind, theirs, SIZE_BYTES)
                    spile("create", ours, "--parent", self.path(name), "-o", options)
                    self.assertSame(theirs, ours)
                    self.assertSound(ours)
                    self.assertReadsAlike(ours)
                    # QEMU writes into the child of ours, and both read the chain alike.
                    self.fill(ours, 51)
                    self.assertReadsAlike(ours)
        child = self.path("child.qcow2")
        spile("create", child, "--parent", self.path("base.raw"))
        self.assertTrue(spile_json("info", child)["layers"][0]["facts"]["extended_l2"])
        grown = self.path("grown.qcow2")
        spile("create", grown, "--parent", child, "--size", 2 * SIZE_BYTES, "--preallocate=metadata")
        self.assertSound(grown)
        self.assertReadsAlike(grown)

    def test_refusals_name_what_can_be(self):
        image = self.path("no.qcow2")
        for words, says in (
            (["--size", "1P", "--cluster-size", "512"], "at most 137438953472 bytes"),
            (["--size", "1M", "--cluster-size", "4M"], "from 512 to 2M"),
            (["--size", "1M", "--cluster-size", "5k"], "power of two"),
            (["--size", "1M", "--refcount-bits", "3"], "1, 2, 4"),
            (["--size", "1M", "--compat", "0.10", "--lazy-refcounts"], "--compat"),
            (["--size", "1M", "--cluster-size", "4k", "--extended-l2", "on"], "16 KiB"),
            (["--size", "1M", "-o", "backing_file=x"], "--parent"),
            (["--size", "1000"], "1024"),
        ):
            with self.subTest(words=words):
                self.assertIn(says, text(spile("create", image, *words, ok=False).stderr))
                self.assertFalse(image.exists())


class Measuring(Qcow2):
    def assertMeasuresAlike(self, options, *which):
        words = ["-o", options] if options else []
        size = ["--size", str(which[0])] if isinstance(which[0], int) else ["-f", "raw", which[0]]
        theirs = qemu_img_json("measure", "-O", "qcow2", *words, *size)
        size = ["--size", str(which[0])] if isinstance(which[0], int) else [which[0]]
        ours = spile_json("measure", "--format", "qcow2", *words, *size)
        found = (ours["file_bytes"], ours["fully_allocated_file_bytes"])
        self.assertEqual(found, (theirs["required"], theirs["fully-allocated"]))
        return ours

    def test_empty_disks(self):
        for options in NEW + ["preallocation=metadata", "preallocation=falloc", "preallocation=full,cluster_size=4k"]:
            for size_bytes in (512, MIB + 512, 5 << 30, 16 << 30):
                with self.subTest(options=options, size_bytes=size_bytes):
                    self.assertMeasuresAlike(options, size_bytes)

    def test_a_disk_with_data(self):
        raw = self.path("sparse.raw")
        with open(raw, "wb") as file:
            file.truncate(3 << 30)
            for at in (0, 5 * MIB + 4096, 700 * MIB, 2 << 30, (3 << 30) - 4096):
                file.seek(at)
                file.write(b"x" * 4096)
        for options in ("", "cluster_size=4k", "cluster_size=2M", "extended_l2=on", "refcount_bits=1"):
            with self.subTest(options=options):
                measured = self.assertMeasuresAlike(options, raw)
                image = self.path("sparse.qcow2")
                image.unlink(missing_ok=True)
                spile("convert", raw, image, *(["-o", options] if options else []))
                self.assertLessEqual(image.stat().st_size, measured["file_bytes"])
                self.assertLessEqual(image.stat().st_blocks * 512, measured["used_bytes"])


# What a converted image is like: options of Spile.
CONVERTED = [
    "", "--compress", "--compress=zstd", "--compat 0.10 --compress", "--cluster-size 512", "--cluster-size 4k --compress=zstd",
    "--cluster-size 2M", "--cluster-size 2M --compress", "--extended-l2 on", "--extended-l2 on --compress=zstd",
    "--extended-l2 on --cluster-size 2M", "--refcount-bits 1", "--refcount-bits 1 --compress",
    "--refcount-bits 2 --compress=zstd --cluster-size 512", "--refcount-bits 64 --cluster-size 512", "-c -o compression_type=zstd",
]


class Converting(Qcow2):
    def source(self):
        """A raw disk with holes, noise, text, and single pages between zeroes."""
        raw = self.raw_of(self.image(seed=70), "source.raw")
        dice = random.Random(71)
        with open(raw, "r+b") as file:
            file.seek(2 * MIB)
            file.write(dice.randbytes(MIB))
            file.write(b"some words, and " * 80_000)
            for _ in range(40):
                file.seek(dice.randrange(8 * MIB, 12 * MIB) // 512 * 512)
                file.write(bytes([dice.randrange(1, 256)]) * 512)
        return raw

    def assertConverted(self, source, image, *words):
        image.unlink(missing_ok=True)
        spile("convert", source, image, *words)
        run("qemu-img", "check", "-q", "-f", "qcow2", image)
        spile("check", image)

    def test_every_kind(self):
        raw = self.source()
        for words in CONVERTED:
            with self.subTest(words):
                image = self.path("new.qcow2")
                self.assertConverted(raw, image, *words.split())
                run("qemu-img", "compare", "-f", "raw", "-F", "qcow2", raw, image)
                self.assertReadsAlike(image)
                if "ompress" in words or "-c" in words.split():
                    checked = qemu_img_json("check", "-f", "qcow2", image)
                    self.assertGreater(checked["compressed-clusters"], checked["allocated-clusters"] // 4)
                # QEMU goes on to write to it.
                self.fill(image, 72)
                self.assertReadsAlike(image)
                run("qemu-img", "check", "-q", "-f", "qcow2", image)

    def test_every_source(self):
        raw = self.source()
        sources = {"raw": raw, "vhd": self.path("s.vhd"), "compressed": self.path("s1.qcow2"), "extended": self.path("s2.qcow2")}
        run("qemu-img", "convert", "-f", "raw", "-O", "vpc", "-o", "force_size=on", raw, sources["vhd"])
        run("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", raw, sources["compressed"])
        run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-o", "extended_l2=on", raw, sources["extended"])
        chain = self.image("extended_l2=on", "chain.qcow2", 73, SIZE_BYTES, (sources["compressed"].name, "qcow2"))
        truth = self.raw_of(chain, "chain.raw")
        for name, source in {**sources, "chain": chain}.items():
            for words in ([], ["--compress=zstd", "--extended-l2", "on"]):
                with self.subTest(source=name, words=words):
                    image = self.path("new.qcow2")
                    self.assertConverted(source, image, *words)
                    run("qemu-img", "compare", "-f", "raw", "-F", "qcow2", truth if name == "chain" else raw, image)

    def test_stdin_and_over_what_is_there(self):
        raw = self.source()
        image = self.path("new.qcow2")
        for words in ([], ["--compress"], ["--cluster-size", "2M"]):
            image.unlink(missing_ok=True)
            spile("convert", "-", image, "--size", SIZE_BYTES, *words, stdin=raw.read_bytes())
            run("qemu-img", "compare", "-f", "raw", "-F", "qcow2", raw, image)
            run("qemu-img", "check", "-q", "-f", "qcow2", image)
        other = self.path("other.qcow2")
        other.write_bytes(b"old" * 10_000_000)
        spile("convert", raw, other, "--onto")
        run("qemu-img", "compare", "-f", "raw", "-F", "qcow2", raw, other)

    def test_many_small_streams(self):
        """More compressed clusters than a refcount of 16 bits counts, in one host cluster; and a file of many blocks."""
        raw = self.path("same.raw")
        with open(raw, "wb") as file:
            for number in range(16):
                file.write(bytes([number + 1]) * (4 * MIB))
        for words in ("--cluster-size 512 --compress", "--cluster-size 512 --compress=zstd --refcount-bits 8", "--compress"):
            with self.subTest(words):
                image = self.path("same.qcow2")
                self.assertConverted(raw, image, *words.split())
                run("qemu-img", "compare", "-f", "raw", "-F", "qcow2", raw, image)

    def test_holes_take_no_space(self):
        raw = self.path("large.raw")
        with open(raw, "wb") as file:
            file.truncate(4 << 40)
            file.seek(3 << 40)
            file.write(b"x" * 4096)
        image = self.path("large.qcow2")
        for words in ([], ["--extended-l2", "on"]):
            self.assertConverted(raw, image, *words)
            self.assertLess(image.stat().st_size, 2 * MIB)


class Repairing(Damage):
    def test_what_is_mended_is_sound_to_qemu_and_lost_nothing(self):
        dice, seen = random.Random(80), set()
        original = self.small()
        for turn in range(80):
            image = self.path("damaged.qcow2")
            image.write_bytes(original)
            kind = self.damage(dice, image)
            with self.subTest(turn=turn, kind=kind):
                damaged = image.read_bytes()
                before = json.loads(spile("check", image, "--json", ok=None).stdout)
                readable = spile("convert", image, "-", ok=None)
                after = spile("check", "--repair", image, ok=None)
                if any(f["severity"] == "corruption" and not f["can_repair"] for f in before["findings"]):
                    self.assertEqual((after.returncode, image.read_bytes()), (3, damaged))
                    seen.add("left")
                    continue
                self.assertEqual(after.returncode, 0, text(after.stdout))
                run("qemu-img", "check", "-q", "-f", "qcow2", image)
                self.assertEqual(spile("convert", image, "-").stdout, readable.stdout)
                seen.add(before["result"])
        self.assertEqual(seen, {"sound", "leaks", "corrupt", "left"})

    def test_a_killed_writer_and_leaks(self):
        for options in ("lazy_refcounts=on", "lazy_refcounts=on,extended_l2=on", "lazy_refcounts=on,cluster_size=512,refcount_bits=32"):
            with self.subTest(options):
                image = self.image(options, seed=81)
                run("qemu-io", "-f", "qcow2", "-c", "write -P 5 3M 1M", "-c", "flush", "-c", "sigraise 9", image, ok=False)
                truth = self.path("truth.raw")
                truth.unlink(missing_ok=True)
                spile("convert", image, truth)
                spile("check", "--repair", image)
                run("qemu-img", "check", "-q", "-f", "qcow2", image)
                self.assertFalse(spile_json("info", image)["layers"][0]["facts"]["dirty"])
                run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", image, truth)

    def test_snapshots_compressed_clusters_and_bitmaps_keep_their_counts(self):
        for options in ("", "refcount_bits=8", "extended_l2=on"):
            with self.subTest(options):
                source = self.raw_of(self.image(seed=82), "s.raw")
                image = self.path("c.qcow2")
                image.unlink(missing_ok=True)
                words = ["-o", options] if options else []
                run("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", *words, source, image)
                run("qemu-img", "snapshot", "-c", "one", image)
                self.fill(image, 83)
                run("qemu-img", "snapshot", "-c", "two", image)
                run("qemu-img", "bitmap", "--add", image, "changes")
                truth = self.raw_of(image)
                raw = bytearray(image.read_bytes())
                table = struct.unpack_from(">Q", raw, 48)[0]
                # All counts are lost: the table points nowhere.
                struct.pack_into(">Q", raw, table, 0)
                image.write_bytes(raw)
                self.assertEqual(spile("check", image, ok=None).returncode, 3)
                spile("check", "--repair", image)
                run("qemu-img", "check", "-q", "-f", "qcow2", image)
                self.assertSame(self.raw_of(image, "again.raw"), truth)
                run("qemu-img", "bitmap", "--remove", image, "changes")
                for name in ("two", "one"):
                    run("qemu-img", "snapshot", "-a", name, image)
                    run("qemu-img", "check", "-q", "-f", "qcow2", image)
                run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", image, source)


class Amending(Qcow2):
    """spile amend, with qemu-img amend of a copy beside it."""

    def revision(self, image):
        """The version and lazy refcounts, as qemu-img and Spile tell them."""
        data = qemu_img_json("info", "-f", "qcow2", image)["format-specific"]["data"]
        theirs = (data["compat"], data.get("lazy-refcounts", False))
        facts = spile_json("info", image)["layers"][0]["facts"]
        ours = ({2: "0.10", 3: "1.1"}[facts["version"]], facts["lazy_refcounts"])
        self.assertEqual(ours, theirs)
        return theirs

    def amend_both(self, image, options):
        """Amends the image, and a copy with qemu-img. Both are sound, and are the same to qemu-img."""
        copy = self.path("copy.qcow2")
        copy.write_bytes(image.read_bytes())
        run("qemu-img", "amend", "-q", "-f", "qcow2", "-o", options, copy)
        spile("amend", image, "-o", options)
        self.assertEqual(self.revision(image), self.revision(copy))
        for each in (image, copy):
            self.assertEqual(self.assertChecksAlike(each), 0)
        run("qemu-img", "compare", "-f", "qcow2", "-F", "qcow2", image, copy)

    def written(self, options, backing=None):
        """An image with data, and without clusters that a flag calls zero."""
        image = self.image(options, seed=None, backing=backing)
        run("qemu-io", "-f", "qcow2", "-c", "write -P 7 64k 300k", "-c", "write -P 9 1M 3k", image)
        return image

    def test_versions_and_lazy_refcounts(self):
        base = self.raw_of(self.image(seed=11), "base.raw")
        for backing in (None, (base.name, "raw")):
            for options in ("compat=0.10", "compat=0.10,cluster_size=512", "cluster_size=4k", "lazy_refcounts=on"):
                with self.subTest(options, backing=backing):
                    image = self.written(options, backing)
                    for to in ("compat=1.1", "lazy_refcounts=on", "lazy_refcounts=off", "compat=0.10", "compat=1.1,lazy_refcounts=on"):
                        self.amend_both(image, to)
                    self.fill(image, 13)
                    self.assertReadsAlike(image)

    def test_what_qemu_does_not_allow_either(self):
        for options, to, words in (
            ("extended_l2=on", "compat=0.10", "extended L2"),
            ("refcount_bits=8", "compat=0.10", "refcounts of 8 bits"),
            ("compat=0.10", "lazy_refcounts=on", "no lazy refcounts"),
            ("", "extended_l2=on", "spile convert"),
            ("", "cluster_size=128k", "spile convert"),
        ):
            with self.subTest(options, to=to):
                image = self.written(options)
                before = image.read_bytes()
                self.assertNotEqual(run("qemu-img", "amend", "-f", "qcow2", "-o", to, image, ok=None).returncode, 0)
                image.write_bytes(before)
                self.assertIn(words, text(spile("amend", image, "-o", to, ok=False).stderr))
                self.assertEqual(image.read_bytes(), before)

    def test_zstd_keeps_the_version(self):
        """qemu-img forgets what the compressed clusters need."""
        image = self.written("compression_type=zstd")
        self.assertIn("zstd", text(spile("amend", image, "-o", "compat=0.10", ok=False).stderr))
        self.assertEqual(self.revision(image), ("1.1", False))

    def test_zero_clusters_keep_the_version(self):
        """qemu-img writes zeroes in their place; Spile changes no data, and says how to get a copy."""
        image = self.written("")
        run("qemu-io", "-f", "qcow2", "-c", "write -z 1M 128k", image)
        before = image.read_bytes()
        self.assertIn("a flag calls zero", text(spile("amend", image, "--compat", "0.10", ok=False).stderr))
        self.assertEqual(image.read_bytes(), before)
        copy = self.path("old.qcow2")
        spile("convert", image, copy, "--compat", "0.10")
        self.assertEqual(self.revision(copy), ("0.10", False))
        run("qemu-img", "compare", "-f", "qcow2", "-F", "qcow2", image, copy)
