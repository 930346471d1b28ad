"""Locks that a file system refuses, and locks that are lost while a disk is served."""

import errno

import fuse
from support import MIB, PeerTest, STANDIN, need, run, spile

REFUSALS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO, errno.ESTALE)


class Locks(PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("needs spile serve")
        super().setUp()

    def file_system(self, content=bytes(4 * MIB)):
        files = fuse.OneFile(self.path("mounted"), content)
        self.addCleanup(files.__exit__)
        return files

    def qemu_io(self, server, *commands):
        """The exit code of qemu-io with these commands on the export."""
        need("qemu-io", "qemu-utils")
        words = [word for command in commands for word in ("-c", command)]
        return run("qemu-io", "-f", "raw", *words, server.uri(), ok=None).returncode

    def test_no_command_goes_on_without_a_lock_unless_told_to(self):
        files = self.file_system()
        for number in REFUSALS:
            files.lock_errno = number
            for command in (["info"], ["check"], ["map"], ["compare", files.path]):
                with self.subTest(errno=errno.errorcode[number], command=command[0]):
                    refused = spile(*command, files.path, ok=False)
                    self.assertNotEqual(refused.returncode, 0)
                    self.assertIn("--no-lock", refused.stderr.decode())
                    self.assertIn("cannot be locked", refused.stderr.decode())
                    spile(*command, files.path, "--no-lock")
            refused = spile("serve", files.path, "--nbd", f"unix:{self.path('nbd.sock')}", "--control", "none", ok=False)
            self.assertIn("--no-lock", refused.stderr.decode())
        with self.serve(files.path, extra=["--no-lock"]) as server:
            self.assertEqual(self.qemu_io(server, "write -P 7 0 4k", "flush", "read -P 7 0 4k"), 0)
        self.assertEqual(files.content[:4096], bytes([7]) * 4096)

    def test_a_lock_of_another_is_respected_there(self):
        files = self.file_system()
        with self.serve(files.path):
            self.assertIn("in use", spile("check", files.path, ok=False).stderr.decode())

    def test_a_lost_lock_stops_writes(self):
        files = self.file_system()
        with self.serve(files.path) as server:
            self.assertEqual(self.qemu_io(server, "write -P 7 0 4k"), 0)
            # The server of the files has forgotten this host, as after a lease that ended.
            files.forget_locks()
            files.write_errno = errno.EIO
            self.assertNotEqual(self.qemu_io(server, "write -P 8 0 4k"), 0)
            self.assertTrue(fuse.until(lambda: "the lock on the file was lost" in server.output()), server.output())
            # The files can be written again, and another host may do so now. This server must not.
            files.write_errno, before = 0, files.writes
            self.assertNotEqual(self.qemu_io(server, "write -P 9 0 4k"), 0)
            self.assertNotEqual(self.qemu_io(server, "discard 0 64k", "write -z 64k 64k"), 0)
            self.assertEqual(files.writes, before)
            self.assertEqual(self.qemu_io(server, "read -P 7 0 4k"), 0)

    def test_a_write_that_fails_under_a_good_lock_is_an_error_of_its_own(self):
        files = self.file_system()
        with self.serve(files.path) as server:
            files.write_errno = errno.EIO
            self.assertNotEqual(self.qemu_io(server, "write -P 8 0 4k"), 0)
            files.write_errno = 0
            self.assertEqual(self.qemu_io(server, "write -P 8 0 4k", "read -P 8 0 4k"), 0)
            self.assertNotIn("was lost", server.output())
