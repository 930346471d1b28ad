"""A file system of one file, by the kernel's own FUSE interface, that does to its users what file servers do: it refuses
locks, forgets them, fails transfers, and cuts its file short.

The bytes are in memory. Needs /dev/fuse and the right to mount.
"""

import ctypes
import errno
import fcntl
import os
import pathlib
import struct
import threading
import time
import unittest

LOOKUP, FORGET, GETATTR, SETATTR = 1, 2, 3, 4
OPEN, READ, WRITE, STATFS, RELEASE = 14, 15, 16, 17, 18
FSYNC, FLUSH, INIT, OPENDIR, RELEASEDIR = 20, 25, 26, 27, 29
GETLK, SETLK, SETLKW, ACCESS, INTERRUPT, DESTROY, BATCH_FORGET, LSEEK = 31, 32, 33, 34, 36, 38, 42, 46
POSIX_LOCKS, BIG_WRITES = 1 << 1, 1 << 5
SIZE_VALID = 1 << 3
REQUEST_BYTES = 1 << 20
ROOT, FILE = 1, 2
MNT_DETACH = 2

libc = ctypes.CDLL(None, use_errno=True)


def mount(fd, at):
    """Mounts the file system that is served through `fd`; a skip where that is not allowed."""
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,max_read=131072".encode()
    if libc.mount(b"spile-test", str(at).encode(), b"fuse", 0, options) != 0:
        raise unittest.SkipTest(f"cannot mount FUSE: {os.strerror(ctypes.get_errno())}")


class OneFile:
    """The file system, mounted at `folder`. Its only file is `path`."""

    def __init__(self, folder, content, name="disk.raw"):
        self.content = bytearray(content)
        self.name = name.encode()
        self.folder = pathlib.Path(folder)
        self.path = self.folder / name
        # Errnos to answer with; 0 = none.
        self.lock_errno = self.write_errno = self.read_errno = 0
        self.writes = 0
        self.locks = []
        try:
            self.fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise unittest.SkipTest(f"cannot open /dev/fuse: {error.strerror}") from error
        self.folder.mkdir(exist_ok=True)
        try:
            mount(self.fd, self.folder)
        except unittest.SkipTest:
            os.close(self.fd)
            raise
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        libc.umount2(str(self.folder).encode(), MNT_DETACH)
        # The thread ends when the kernel has let go of the file system.
        self.thread.join(timeout=600)
        os.close(self.fd)

    def forget_locks(self):
        """Takes all locks away, as a server does whose lease has ended."""
        self.locks = []

    def serve(self):
        while True:
            try:
                request = os.read(self.fd, REQUEST_BYTES + 4096)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return
            _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
            answer = self.answer(opcode, node, request[40:])
            if answer is None:
                continue
            code, body = (answer, b"") if isinstance(answer, int) else (0, answer)
            try:
                os.write(self.fd, struct.pack("<IiQ", 16 + len(body), -code, unique) + body)
            except OSError as error:
                # The one who asked was ended by a signal.
                if error.errno != errno.ENOENT:
                    return

    def answer(self, opcode, node, body):
        """The body of an answer, an errno, or None where none is expected."""
        if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
            return None
        if opcode == INIT:
            major, minor = struct.unpack_from("<II", body)
            assert major == 7
            flags = POSIX_LOCKS | BIG_WRITES
            return struct.pack("<IIIIHHIIHHI28x", 7, min(minor, 31), 0, flags, 16, 12, 131072, 1, 0, 0, 0)
        if opcode == LOOKUP:
            if body.rstrip(b"\0") != self.name:
                return errno.ENOENT
            return struct.pack("<QQQQII", FILE, 0, 0, 0, 0, 0) + self.attributes(FILE)
        if opcode == GETATTR:
            return struct.pack("<QII", 0, 0, 0) + self.attributes(node)
        if opcode == SETATTR:
            valid, _, _, size = struct.unpack_from("<IIQQ", body)
            if valid & SIZE_VALID:
                del self.content[size:]
                self.content.extend(bytes(size - len(self.content)))
            return struct.pack("<QII", 0, 0, 0) + self.attributes(node)
        if opcode in (OPEN, OPENDIR):
            return struct.pack("<QII", 0, 0, 0)
        if opcode == READ:
            _, at, length = struct.unpack_from("<QQI", body)
            return self.read_errno or bytes(self.content[at:at + length])
        if opcode == WRITE:
            return self.write(body)
        if opcode in (GETLK, SETLK, SETLKW):
            return self.lock(opcode, body)
        if opcode == STATFS:
            return struct.pack("<QQQQQIIII24x", 1 << 20, 1 << 19, 1 << 19, 100, 50, 4096, 255, 4096, 0)
        if opcode in (FSYNC, FLUSH, RELEASE, RELEASEDIR, ACCESS, DESTROY):
            return b""
        return errno.ENOSYS

    def attributes(self, node):
        size, mode = (len(self.content), 0o100644) if node == FILE else (0, 0o040755)
        return struct.pack("<QQQQQQIIIIIIIIII", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def write(self, body):
        if self.write_errno:
            return self.write_errno
        _, at, length = struct.unpack_from("<QQI", body)
        self.content[at:at + length] = body[40:40 + length]
        self.writes += 1
        return struct.pack("<II", length, 0)

    def lock(self, opcode, body):
        if self.lock_errno:
            return self.lock_errno
        _, owner, start, end, kind, pid = struct.unpack_from("<QQQQII", body)
        others = [lock for lock in self.locks if lock[0] != owner and lock[1] <= end and start <= lock[2]]
        conflict = next((lock for lock in others if fcntl.F_WRLCK in (lock[3], kind)), None)
        if opcode == GETLK:
            found = conflict or (0, start, end, fcntl.F_UNLCK)
            return struct.pack("<QQII", found[1], found[2], found[3], 0)
        if kind != fcntl.F_UNLCK and conflict:
            return errno.EAGAIN
        self.locks = [lock for lock in self.locks if lock[0] != owner or not (start <= lock[1] and lock[2] <= end)]
        if kind != fcntl.F_UNLCK:
            self.locks.append((owner, start, end, kind))
        return b""


def until(condition, limit_s=30):
    """Waits until `condition()` holds; false when it does not for so long."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
