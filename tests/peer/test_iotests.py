"""The runner of QEMU's own block tests (tests/iotests), over a tree of our own: that Spile does its part, and that a wrong result is seen.

QEMU's tests themselves are not here: they run from a source tree (`make iotests`).
"""

import sys
import unittest

import support

RUNNER = support.TOP / "tests" / "iotests" / "run.py"

# What QEMU's `check` does for one test, as far as the runner looks.
CHECK = """
import os, pathlib, subprocess, sys
name = sys.argv[-1]
folder = pathlib.Path(os.environ["TEST_DIR"], "qcow2-file-" + name)
folder.mkdir()
said = subprocess.run(["bash", os.path.abspath(name)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
(folder / (name + ".out.bad")).write_bytes(said)
same = said == pathlib.Path(name + ".out").read_bytes()
print(f"{name}   {'pass' if same else 'fail'}   [00:00:00] [00:00:01]   1.0s")
"""

CREATE = "$QEMU_IMG_PROG create -q -f qcow2 t.qcow2 64M\n"
WRITE = CREATE + "$QEMU_IO_PROG -f qcow2 -c 'write -q -P 5 64k 64k' t.qcow2\n"
READ = WRITE + "qemu-io -r -f qcow2 -c 'read -q -P 5 64k 64k' -c 'read -q -P 0 0 64k' t.qcow2 && echo the same\n"
RESIZE = CREATE + "$QEMU_IMG_PROG resize -q t.qcow2 +64M; qemu-img info t.qcow2 | grep -o '128 MiB'\n"
ABORT = CREATE + "exec 2>/dev/null; $QEMU_IO_PROG -f qcow2 -c 'write -q -P 5 0 64k' -c abort t.qcow2; echo $(($? > 128))\n" \
    "qemu-io -r -f qcow2 -c 'read -q -P 5 0 64k' t.qcow2 && echo kept\n"


class Runner(support.PeerTest):
    def setUp(self):
        super().setUp()
        support.need("qemu-io", "qemu-utils")
        support.need("qemu-system-x86_64", "qemu-system-x86")
        support.need("qemu-storage-daemon", "qemu-utils")
        self.tests = self.path("tree") / "tests" / "qemu-iotests"
        self.tests.mkdir(parents=True)
        (self.tests / "check").write_text(CHECK)

    def given(self, name, script, expected):
        (self.tests / name).write_text(script)
        (self.tests / f"{name}.out").write_text(expected)

    def results(self, *lines, ok=True):
        """What the runner says of the tree, when the list is these lines."""
        listed = self.path("list.txt")
        listed.write_text("".join(f"{line}\n" for line in lines))
        done = support.run(
            sys.executable, RUNNER, "--qemu-tree", self.path("tree"), "--list", listed, ok=ok,
            env={"SPILE_BIN": support.spile_binary(), "SPILE_TARGET": str(self.folder)},
        )
        return support.text(done.stdout)

    def test_spile_does_its_part_in_each_way(self):
        self.given("001", READ, "the same\n")
        self.given("002", RESIZE, "128 MiB\n")
        said = self.results("001 images,server pass", "001 verbs skip no verb", "002 verbs pass", "002 images,server skip same")
        for name, acts in [("images/001", 1), ("server/001", 1), ("verbs/002", 1)]:
            self.assertRegex(said, rf"passed +{name} \(.*; {acts} acts of Spile")
        self.assertTrue(said.endswith("3 passed, 0 failed, 3 skipped\n"), said)

    def test_an_abort_is_the_death_of_the_server_and_the_write_stays(self):
        self.given("001", ABORT, "1\nkept\n")
        self.assertIn("1 passed, 0 failed", self.results("001 server pass"))

    def test_other_output_than_expected_is_a_failure_and_is_shown(self):
        self.given("001", WRITE + "echo found\n", "expected\n")
        said = self.results("001 server pass", ok=False)
        self.assertRegex(said, r"(?s)failed  server/001.*-expected\n +\+found")

    def test_a_listed_difference_is_a_skip_until_it_is_gone(self):
        self.given("001", WRITE + "echo found\n", "expected\n")
        self.assertIn("SKIP server/001: so it is meant", self.results("001 server differs so it is meant"))
        self.given("001", WRITE, "")
        self.assertIn("passes, though list.txt says: so it is meant", self.results("001 server differs so it is meant", ok=False))

    def test_a_test_in_which_spile_does_nothing_does_not_pass(self):
        self.given("001", "qemu-img create -q -f qcow2 t.qcow2 1M\n", "")
        self.assertIn("but Spile did nothing in it", self.results("001 images pass", ok=False))

    def test_a_server_that_cannot_open_the_image_is_seen(self):
        # The header says version 9.
        self.given("001", CREATE + "printf '\\0\\0\\0\\11' | dd of=t.qcow2 bs=1 seek=4 conv=notrunc status=none\n"
                   "$QEMU_IO_PROG -f qcow2 -c 'read -q 0 512' t.qcow2\n", "")
        self.assertIn("can't open device", self.results("001 server pass", ok=False))


if __name__ == "__main__":
    unittest.main()
