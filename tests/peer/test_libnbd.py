"""libnbd (what nbdsh is made of) as client: each command and flag of the protocol, on raw and VHD."""

import errno
import random

from support import KIB, MIB, STANDIN, PeerTest, need_module, run, spile

nbd = need_module("nbd", "python3-libnbd")

SIZE_BYTES = 64 * MIB
HOLE = 1
ZERO = 2


def vhd(path, size_bytes=SIZE_BYTES):
    """An empty dynamic VHD."""
    if STANDIN:
        options = "subformat=dynamic,force_size=on"
        run("qemu-img", "create", "-f", "vpc", "-o", options, path, size_bytes)
    else:
        spile("create", path, "--size", size_bytes)
    return path


class Client:
    """A connection that is closed with its test. libnbd checks nothing itself, so that the server must check."""

    def __init__(self, test, server, name="", contexts=(), strict=True):
        self.handle = nbd.NBD()
        for context in contexts:
            self.handle.add_meta_context(context)
        if not strict:
            self.handle.set_strict_mode(0)
        test.addCleanup(self.close)
        self.handle.connect_uri(server.uri(name))

    def close(self):
        handle, self.handle = self.handle, None
        if handle is not None and handle.aio_is_ready():
            try:
                handle.shutdown()
            except nbd.Error:
                # The server was killed, so the connection cannot be shut down in order.
                pass


def error_of(call, *arguments, **options):
    """Returns the errno of a call; 0 when it succeeds."""
    try:
        call(*arguments, **options)
        return 0
    except nbd.Error as problem:
        return problem.errnum


class Commands:
    """The tests that are the same for each format. `disk` makes an empty disk of SIZE_BYTES."""

    def connect(self, **options):
        server = self.serve(self.disk())
        return server, Client(self, server, **options).handle

    def test_written_bytes_come_back(self):
        _, handle = self.connect()
        dice = random.Random(3)
        written = {}
        for at in range(0, SIZE_BYTES, 3 * MIB):
            written[at] = dice.randbytes(dice.randrange(1, 70) * 512)
            handle.pwrite(written[at], at)
        for at, data in written.items():
            self.assertEqual(handle.pread(len(data), at), data)

    def test_any_byte_can_be_read_and_written(self):
        _, handle = self.connect()
        minimum = handle.get_block_size(nbd.SIZE_MINIMUM)
        self.assertLessEqual(minimum, 1, "byte-granular access is promised")
        handle.pwrite(b"\xaa" * 8192, 1 * MIB)
        handle.pwrite(b"middle", 1 * MIB + 4093)
        want = bytearray(b"\xaa" * 8192)
        want[4093:4099] = b"middle"
        self.assertEqual(handle.pread(8192, 1 * MIB), want)
        self.assertEqual(handle.pread(1, 1 * MIB + 4094), b"i")
        handle.pwrite(b"z", SIZE_BYTES - 1)
        self.assertEqual(handle.pread(3, SIZE_BYTES - 3), b"\0\0z")

    def test_32_mib_in_one_request(self):
        _, handle = self.connect()
        data = random.Random(4).randbytes(32 * MIB)
        handle.pwrite(data, 16 * MIB)
        self.assertEqual(handle.pread(32 * MIB, 16 * MIB), data)

    def test_many_requests_in_flight(self):
        _, handle = self.connect()
        dice = random.Random(5)
        blocks = {at: dice.randbytes(4 * KIB) for at in dice.sample(range(0, SIZE_BYTES, 4 * KIB), 500)}
        self.finish(handle, [handle.aio_pwrite(data, at) for at, data in blocks.items()])
        buffers = {at: nbd.Buffer(4 * KIB) for at in blocks}
        self.finish(handle, [handle.aio_pread(buffer, at) for at, buffer in buffers.items()])
        for at, data in blocks.items():
            self.assertEqual(bytes(buffers[at].to_bytearray()), data, f"at {at}")

    def finish(self, handle, cookies):
        for cookie in cookies:
            while not handle.aio_command_completed(cookie):
                self.assertGreater(handle.poll(30_000), 0, "no answer in 30 s")

    def test_flush_and_fua(self):
        _, handle = self.connect()
        self.assertTrue(handle.can_flush())
        self.assertTrue(handle.can_fua())
        handle.pwrite(b"a" * 4096, 0, nbd.CMD_FLAG_FUA)
        handle.pwrite(b"b" * 4096, 4096)
        handle.flush()
        self.assertEqual(handle.pread(8192, 0), b"a" * 4096 + b"b" * 4096)

    def test_trim_reads_as_zeros_or_old(self):
        _, handle = self.connect()
        self.assertTrue(handle.can_trim())
        handle.pwrite(b"t" * (4 * MIB), 0)
        handle.trim(2 * MIB, MIB)
        got = handle.pread(4 * MIB, 0)
        self.assertEqual(got[:MIB] + got[3 * MIB:], b"t" * (2 * MIB))
        self.assertTrue(set(got[MIB:3 * MIB]) <= {0, ord("t")})
        handle.trim(4096, 0, nbd.CMD_FLAG_FUA)

    def test_zeroes_with_each_flag(self):
        _, handle = self.connect()
        self.assertTrue(handle.can_zero())
        flags = [0, nbd.CMD_FLAG_NO_HOLE, nbd.CMD_FLAG_FUA, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA]
        for flag in flags:
            handle.pwrite(b"x" * MIB, 0)
            handle.zero(MIB - 1000, 500, flag)
            want = b"x" * 500 + bytes(MIB - 1000) + b"x" * 500
            self.assertEqual(handle.pread(MIB, 0), want, f"flag {flag}")

    def test_fast_zero_is_fast_or_refused(self):
        _, handle = self.connect()
        self.assertTrue(handle.can_fast_zero())
        handle.pwrite(b"x" * MIB, 0)
        problem = error_of(handle.zero, MIB, 0, nbd.CMD_FLAG_FAST_ZERO)
        self.assertIn(problem, (0, errno.ENOTSUP, errno.EOPNOTSUPP))
        want = b"x" if problem else b"\0"
        self.assertEqual(handle.pread(MIB, 0), want * MIB)

    def test_cache(self):
        _, handle = self.connect()
        self.assertTrue(handle.can_cache())
        handle.cache(MIB, 0)
        handle.cache(MIB, SIZE_BYTES - MIB)

    def test_structured_reads_cover_all_once(self):
        _, handle = self.connect()
        self.assertTrue(handle.get_structured_replies_negotiated())
        self.assertTrue(handle.can_df())
        handle.pwrite(b"d" * MIB, 4 * MIB)
        for flags, most in ((0, 10**6), (nbd.CMD_FLAG_DF, 1)):
            chunks = []
            keep = lambda data, at, status, error: chunks.append((at, len(data), status)) and 0
            got = handle.pread_structured(8 * MIB, 2 * MIB, keep, flags)
            self.assertEqual(got, bytes(2 * MIB) + b"d" * MIB + bytes(5 * MIB))
            self.assertLessEqual(len(chunks), most)
            end = 2 * MIB
            for at, length, _ in sorted(chunks):
                self.assertEqual(at, end)
                end += length
            self.assertEqual(end, 10 * MIB)

    def test_block_status_finds_data_and_holes(self):
        _, handle = self.connect(contexts=["base:allocation"])
        self.assertTrue(handle.can_meta_context("base:allocation"))
        handle.pwrite(b"d" * (2 * MIB), 8 * MIB)
        kinds = self.allocation(handle)
        self.assertTrue(all(kind == 0 for at, kind in kinds if 8 * MIB <= at < 10 * MIB), kinds)
        for at in (0, 40 * MIB):
            self.assertTrue(dict(kinds)[at] & ZERO, f"{at} was never written: {kinds}")

    def allocation(self, handle):
        """(offset, flags) for each MiB of the disk."""
        at, kinds = 0, []
        while at < SIZE_BYTES:
            entries = []
            keep = lambda _name, _at, found, _error: entries.extend(found) and 0
            handle.block_status(SIZE_BYTES - at, at, keep)
            self.assertGreater(len(entries), 1, "an answer makes progress")
            for length, flags in zip(entries[::2], entries[1::2]):
                self.assertGreater(length, 0)
                kinds += [(mib, flags) for mib in range(-(-at // MIB) * MIB, at + length, MIB)]
                at += length
        return kinds

    def test_outside_the_disk_is_an_error_and_no_end(self):
        _, handle = self.connect(strict=False)
        beyond = (errno.EINVAL, errno.ENOSPC, errno.EIO)
        self.assertIn(error_of(handle.pread, 512, SIZE_BYTES), beyond)
        self.assertIn(error_of(handle.pread, 1024, SIZE_BYTES - 512), beyond)
        self.assertIn(error_of(handle.pwrite, b"x" * 1024, SIZE_BYTES - 512), beyond)
        self.assertIn(error_of(handle.zero, 1024, SIZE_BYTES - 512), beyond)
        self.assertIn(error_of(handle.trim, 1024, SIZE_BYTES - 512), beyond)
        self.assertIn(error_of(handle.pread, 512, 2**63), beyond)
        self.assertEqual(handle.pread(512, 0), bytes(512), "the connection goes on")

    def test_a_flush_covers_the_other_connections(self):
        server = self.serve(self.disk())
        first, second = Client(self, server).handle, Client(self, server).handle
        self.assertTrue(first.can_multi_conn())
        first.pwrite(b"1" * MIB, 20 * MIB)
        self.assertEqual(second.pread(MIB, 20 * MIB), b"1" * MIB)
        second.flush()
        server.kill()
        self.check_after_kill(server, 20 * MIB, b"1" * MIB)

    def test_an_acknowledged_write_survives_a_kill(self):
        server, handle = self.connect()
        handle.pwrite(b"k" * (3 * MIB), 5 * MIB)
        server.kill()
        self.check_after_kill(server, 5 * MIB, b"k" * (3 * MIB))

    def check_after_kill(self, server, at, data):
        again = self.serve(self.last)
        self.assertEqual(Client(self, again).handle.pread(len(data), at), data)

    def test_read_only_refuses_every_change(self):
        server = self.serve(f"{self.disk()},read-only")
        handle = Client(self, server, strict=False).handle
        self.assertTrue(handle.is_read_only())
        changes = [(handle.pwrite, b"x" * 512, 0), (handle.zero, 512, 0), (handle.trim, 512, 0)]
        for change, *arguments in changes:
            self.assertIn(error_of(change, *arguments), (errno.EPERM, errno.EINVAL, errno.EROFS))
        self.assertEqual(handle.pread(512, 0), bytes(512))

    def test_sigterm_with_a_client_connected_ends_well(self):
        server, handle = self.connect()
        handle.pwrite(b"s" * 4096, 0)
        self.assertEqual(server.stop(), 0)


class Raw(Commands, PeerTest):
    def disk(self):
        self.last = self.empty("disk.raw", SIZE_BYTES)
        return self.last


class Vhd(Commands, PeerTest):
    def disk(self):
        self.last = vhd(self.path("disk.vhd"))
        return self.last


class Handshake(PeerTest):
    def in_option_mode(self, server, name=""):
        handle = nbd.NBD()
        handle.set_opt_mode(True)
        handle.set_export_name(name)
        handle.connect_unix(str(server.socket))
        return handle

    def test_list_names_every_export(self):
        first, second = self.empty("a.raw"), self.empty("b.raw", 32 * MIB)
        if STANDIN:
            self.skipTest("the stand-in serves one disk")
        server = self.serve(f"{first},name=one", f"{second},name=two")
        handle = self.in_option_mode(server)
        names = []
        handle.opt_list(lambda name, _about: names.append(name) and 0)
        handle.opt_abort()
        self.assertLessEqual({"one", "two"}, set(names))

    def test_info_tells_the_size_without_going(self):
        server = self.serve(f"{self.empty()},name=one")
        handle = self.in_option_mode(server, "one")
        handle.opt_info()
        self.assertEqual(handle.get_size(), SIZE_BYTES)
        self.assertTrue(handle.can_flush())
        handle.opt_go()
        self.assertEqual(handle.pread(512, 0), bytes(512))
        handle.shutdown()

    def test_an_unknown_export_is_refused_and_another_can_follow(self):
        server = self.serve(f"{self.empty()},name=one")
        handle = self.in_option_mode(server, "no such name")
        self.assertEqual(error_of(handle.opt_go), errno.ENOENT)
        handle.set_export_name("x" * 4096)
        self.assertNotEqual(error_of(handle.opt_go), 0)
        handle.set_export_name("one")
        handle.opt_go()
        self.assertEqual(handle.get_size(), SIZE_BYTES)
        handle.shutdown()

    def test_without_structured_replies(self):
        server = self.serve(self.raw())
        handle = nbd.NBD()
        handle.set_request_structured_replies(False)
        handle.connect_uri(server.uri())
        self.assertFalse(handle.get_structured_replies_negotiated())
        with open(self.path("base.raw"), "rb") as file:
            self.assertEqual(handle.pread(SIZE_BYTES // 4, 0), file.read(SIZE_BYTES // 4))
        handle.shutdown()

    def test_the_oldest_client_that_newstyle_knows(self):
        """A client without fixed newstyle can only send EXPORT_NAME."""
        server = self.serve(self.empty())
        handle = nbd.NBD()
        handle.set_handshake_flags(0)
        handle.connect_uri(server.uri())
        handle.pwrite(b"old", 1000)
        self.assertEqual(handle.pread(5, 999), b"\0old\0")
        handle.shutdown()

    def test_many_connections_at_once(self):
        if STANDIN:
            self.skipTest("the stand-in bounds its connections")
        server = self.serve(self.empty())
        clients = [Client(self, server).handle for _ in range(60)]
        for turn, handle in enumerate(clients):
            handle.pwrite(bytes([turn + 1]) * 4096, turn * 4096)
        for turn, handle in enumerate(reversed(clients)):
            at = len(clients) - 1 - turn
            self.assertEqual(handle.pread(4096, turn * 4096), bytes([turn + 1]) * 4096, at)

    def test_tcp(self):
        server = self.serve(self.empty(), tcp=True)
        handle = Client(self, server).handle
        handle.pwrite(b"tcp", 0)
        self.assertEqual(handle.pread(3, 0), b"tcp")

    def test_a_stopped_client_does_not_hold_the_others(self):
        """One client asks for much and reads nothing; the other one still gets its answers."""
        server = self.serve(self.empty())
        slow = Client(self, server).handle
        # libnbd moves bytes only inside its calls, so answers pile up in the socket.
        held = [nbd.Buffer(MIB) for _ in range(64)]
        for turn, buffer in enumerate(held):
            slow.aio_pread(buffer, turn * MIB)
        quick = Client(self, server).handle
        for turn in range(50):
            quick.pwrite(bytes([turn]) * 512, turn * 512)
            self.assertEqual(quick.pread(512, turn * 512), bytes([turn]) * 512)
