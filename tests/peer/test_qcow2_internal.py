"""Snapshots inside qcow2 images: qemu-img makes, applies and deletes them, and Spile does, in turns.

What qemu-img reads is the truth; it checks each image after each step.
"""

import subprocess

from support import LIMIT_S, MIB, need, qemu_img_json, run, spile, spile_json, text
from test_qcow2 import KINDS, Qcow2

# Refcounts of 1 and 2 bits have no room for the references that these turns take.
NARROW = ("refcounts of 1 bit", "refcounts of 2 bits")


class Internal(Qcow2):
    def qemu(self, letter, name, image):
        run("qemu-img", "snapshot", letter, name, image)

    def spile(self, letter, name, image):
        spile("internal-snapshot", letter, name, image)

    def assertSound(self, image):
        """Both find nothing wrong, not even a leak, and read the same."""
        run("qemu-img", "check", "-q", "-f", "qcow2", image)
        spile("check", image)
        spile("compare", image, self.raw_of(image))

    def assertHolds(self, image, name, raw):
        """Checks what qemu-img reads in a snapshot."""
        seen = self.path("seen.raw")
        seen.unlink(missing_ok=True)
        run("qemu-img", "convert", "-l", f"snapshot.name={name}", "-f", "qcow2", "-O", "raw", image, seen)
        self.assertSame(seen, raw)

    def turns(self, image, seed, makes, applies, deletes):
        """Two snapshots, back to each, and both go."""
        truths = {}
        for number, name in enumerate("ab"):
            self.fill(image, seed + number)
            makes("-c", name, image)
            self.assertSound(image)
            truths[name] = self.raw_of(image, f"{name}.raw")
        self.fill(image, seed + 2)
        for name, raw in truths.items():
            self.assertHolds(image, name, raw)
        applies("-a", "a", image)
        self.assertSound(image)
        self.assertSame(self.raw_of(image), truths["a"])
        self.fill(image, seed + 3)
        self.assertSound(image)
        deletes("-d", "a", image)
        self.assertSound(image)
        self.assertHolds(image, "b", truths["b"])
        applies("-a", "b", image)
        self.assertSame(self.raw_of(image), truths["b"])
        deletes("-d", "b", image)
        self.assertSound(image)
        self.assertSame(self.raw_of(image), truths["b"])
        self.assertEqual(text(run("qemu-img", "snapshot", "-l", image).stdout), "")

    def test_every_kind(self):
        both = (self.spile, self.qemu)
        for number, (kind, options) in enumerate(KINDS.items()):
            if kind in NARROW:
                continue
            with self.subTest(kind):
                makes = both[number % 2]
                others = both[1 - number % 2]
                self.turns(self.image(options, seed=number), number, makes, others, both[number // 2 % 2])

    def test_one_does_all(self):
        for kind in ("default", "version 2", "extended L2", "clusters of 512 bytes"):
            with self.subTest(kind):
                self.turns(self.image(KINDS[kind], seed=3), 3, self.spile, self.spile, self.spile)

    def test_compressed(self):
        for kind, image in self.compressed():
            with self.subTest(kind):
                self.turns(image, 9, self.spile, self.qemu, self.spile)

    def test_with_a_backing_file(self):
        base = (self.raw_of(self.image(seed=20), "base.raw").name, "raw")
        for options in ("", "extended_l2=on", "compat=0.10"):
            with self.subTest(options):
                self.turns(self.image(options, "child.qcow2", 4, backing=base), 5, self.spile, self.spile, self.qemu)

    def test_another_size(self):
        image = self.image(seed=1)
        self.spile("-c", "small", image)
        small = self.raw_of(image, "small.raw")
        run("qemu-img", "resize", "-q", "-f", "qcow2", image, "700M")
        run("qemu-io", "-f", "qcow2", "-c", "write -P 5 699M 1M", image)
        self.qemu("-c", "large", image)
        for applies in (self.spile, self.qemu):
            applies("-a", "small", image)
            self.assertSound(image)
            self.assertSame(self.raw_of(image), small)
            applies("-a", "large", image)
            self.assertSound(image)
            run("qemu-io", "-f", "qcow2", "-c", "read -P 5 699M 1M", image)
            self.assertEqual(spile_json("info", image)["virtual_size_bytes"], 700 * MIB)

    def test_both_list_the_same(self):
        image = self.image(seed=2)
        self.spile("-c", "one", image)
        self.qemu("-c", "zw\u00f6i", image)
        self.spile("-c", "three", image)
        self.spile("-d", "one", image)
        ours = spile_json("internal-snapshot", "-l", image)["snapshots"]
        theirs = qemu_img_json("info", "-f", "qcow2", image)["snapshots"]
        self.assertEqual(
            [(one["id"], one["name"], one["taken_unix_s"], one["guest_state_bytes"]) for one in ours],
            [(one["id"], one["name"], one["date-sec"], one["vm-state-size"]) for one in theirs],
        )
        self.assertNotIn("icount", theirs[-1])
        self.assertEqual([one["id"] for one in ours], ["2", "3"])

    def test_refcounts_without_room(self):
        for kind, most in (("refcounts of 1 bit", 0), ("refcounts of 2 bits", 2)):
            with self.subTest(kind):
                image = self.image(KINDS[kind], seed=3)
                for number in range(most):
                    self.spile("-c", f"s{number}", image)
                before = image.read_bytes()
                said = text(spile("internal-snapshot", "-c", "more", image, ok=False).stderr)
                self.assertIn("refcounts of", said)
                self.assertEqual(image.read_bytes(), before)
                self.assertSound(image)
                for number in range(most):
                    self.qemu("-d", f"s{number}", image)
                self.assertSound(image)

    def test_the_state_of_a_machine(self):
        need("qemu-system-x86_64", "qemu-system-x86")
        image = self.image(seed=4)
        before = self.raw_of(image, "before.raw")
        words = ["qemu-system-x86_64", "-S", "-M", "pc", "-m", "8M", "-display", "none", "-nodefaults", "-monitor", "stdio"]
        drive = f"if=virtio,format=qcow2,file={image}"
        subprocess.run([*words, "-drive", drive], input=b"savevm ran\nquit\n", check=True, capture_output=True, timeout=LIMIT_S)
        self.fill(image, 5)
        one = spile_json("internal-snapshot", "-l", image)["snapshots"][0]
        self.assertGreater(one["guest_state_bytes"], 0)
        self.assertSound(image)
        said = text(spile("internal-snapshot", "-a", "ran", image).stdout)
        self.assertIn("is not restored", said)
        self.assertSound(image)
        self.assertSame(self.raw_of(image), before)
        # The machine's state is there for QEMU still.
        subprocess.run(
            [*words, "-drive", drive, "-loadvm", "ran"], input=b"quit\n", check=True, capture_output=True, timeout=LIMIT_S,
        )
        self.spile("-d", "ran", image)
        self.assertSound(image)
        self.assertSame(self.raw_of(image), before)

    def test_an_image_that_qemu_has_open_is_refused(self):
        need("qemu-nbd", "qemu-utils")
        image = self.image(seed=6)
        socket = self.path("q.sock")
        with subprocess.Popen(["qemu-nbd", "-f", "qcow2", "-t", "-k", str(socket), str(image)]) as server:
            while not socket.exists():
                self.assertIsNone(server.poll())
            spile("internal-snapshot", "-c", "x", image, ok=False)
            server.terminate()
        self.spile("-c", "x", image)
        self.assertSound(image)
