#!/usr/bin/env python3
"""Runs a program as Linux 4.19 would: what is newer is refused, by a seccomp filter.

    tests/peer/old_kernel.py [--without CALL]… PROGRAM [ARGUMENT…]

Every system call with a number that Linux 4.19 does not have fails with ENOSYS; io_uring is among them. So do the calls
named by --without (io_setup is known). Of older calls, what only later kernels do fails as it does on 4.19: a read of an eventfd
that must not wait (EOPNOTSUPP), the pidfd of a peer (ENOPROTOOPT), advice to make pages present (EINVAL).

The filter also holds for all that the program starts.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

# For each machine: its name in audit.h, the last system call of Linux 4.19 (rseq), and the numbers of those filtered below.
MACHINES = {
    "x86_64": (0xC000003E, 334, {"preadv2": 327, "getsockopt": 55, "madvise": 28, "io_setup": 206}),
    "aarch64": (0xC00000B7, 293, {"preadv2": 286, "getsockopt": 209, "madvise": 233, "io_setup": 0}),
}

# linux/bpf_common.h and linux/seccomp.h
LOAD, EQUAL, GREATER, RETURN = 0x20, 0x15, 0x25, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
# struct seccomp_data
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
SO_PEERPIDFD = 77
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23


def step(code, value, if_true=0, if_false=0):
    return struct.pack("HBBI", code, if_true, if_false, value)


def refuse(number):
    return step(RETURN, ERRNO | number)


def refuse_argument(call, index, value, number):
    """Steps that refuse `call` when the low half of its argument has this value."""
    inner = [step(LOAD, ARGUMENTS + 8 * index), step(EQUAL, value, 0, 1), refuse(number), step(LOAD, NUMBER)]
    return [step(EQUAL, call, 0, len(inner)), *inner]


def program(machine, without=()):
    architecture, last, calls = MACHINES[machine]
    steps = [
        step(LOAD, ARCHITECTURE), step(EQUAL, architecture, 1, 0), step(RETURN, ALLOW),
        step(LOAD, NUMBER), step(GREATER, last, 0, 1), refuse(errno.ENOSYS),
        *refuse_argument(calls["preadv2"], 3, 0xFFFFFFFF, errno.EOPNOTSUPP),
        *refuse_argument(calls["getsockopt"], 2, SO_PEERPIDFD, errno.ENOPROTOOPT),
        *refuse_argument(calls["madvise"], 2, MADV_POPULATE_READ, errno.EINVAL),
        *refuse_argument(calls["madvise"], 2, MADV_POPULATE_WRITE, errno.EINVAL),
    ]
    for name in without:
        steps += [step(EQUAL, calls[name], 0, 1), refuse(errno.ENOSYS)]
    return [*steps, step(RETURN, ALLOW)]


def obey(steps):
    """Puts this process, and all that it starts, under the filter."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(b"".join(steps))
    filter_ = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    zero = ctypes.c_ulong(0)
    for call in [(no_new_privileges, ctypes.c_ulong(1), zero), (set_seccomp, ctypes.c_ulong(mode_filter), filter_)]:
        if libc.prctl(*call, zero, zero) != 0:
            raise OSError(ctypes.get_errno(), "seccomp is not to be had")


def main():
    words, without = sys.argv[1:], []
    while words[:1] == ["--without"]:
        without.append(words[1])
        words = words[2:]
    if not words or platform.machine() not in MACHINES:
        sys.exit(__doc__)
    obey(program(platform.machine(), without))
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
