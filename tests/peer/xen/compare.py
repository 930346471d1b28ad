#!/usr/bin/env python3
"""What a request costs by each backend, on a real Xen: Spile's four ways to memory, blkback, qdisk.

    tests/peer/xen/compare.py [--quick] [--rounds N] [--json]

Boots one nested Xen with one processor that counts: QEMU's virtual clock goes on by 1 ns for each
instruction that is executed (`-icount shift=0`), so the time that fio sees for N requests is the number
of instructions of front, hypervisor, backend and fio together. Nothing is idle meanwhile, for the
storage answers at once. Prints each cost relative to Spile's grant copy of the same round: the median of
the rounds and half the distance of its extremes. Only ratios: an instruction is not a unit of time.

A program, and no test: nothing here passes or fails, and what cannot be had is left out with a reason.
"""

import argparse
import itertools
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from backends import need_backend  # noqa: E402: the folders above come first
from host import Host  # noqa: E402
from parts import parts  # noqa: E402
from sides import AGAIN, DEVICE, REFERENCE, Sides, files  # noqa: E402
from support import KIB, TARGET  # noqa: E402

# Requests of each size, so many that fio's clock, which is read in milliseconds, is exact to two per cent.
REQUESTS = {4 * KIB: 4000, 44 * KIB: 2000, 128 * KIB: 1000}
DEPTHS = (1, 32)
OPERATIONS = ("read", "write")
# A limit for a long run of fio on a busy machine.
FIO_LIMIT_S = 600
# fio's terse output, version 3: the job's name, and for each operation the runtime in milliseconds.
NAME_FIELD = 2
RUNTIME_FIELD = {"read": 8, "write": 49}


class CountingHost(Host):
    """A host whose time is a count of instructions. Idle time still passes as on a clock."""

    EMULATION = ("-accel", "tcg", "-icount", "shift=0,align=off")
    PROCESSORS = 1


class Point:
    """Requests of one kind."""

    def __init__(self, operation, size_bytes, depth, requests):
        self.operation = operation
        self.size_bytes = size_bytes
        self.depth = depth
        self.requests = requests
        self.name = f"{operation}-{size_bytes}-{depth}"

    def job(self):
        """A section of fio's job file; `stonewall`: it waits for the one before."""
        return (
            f"[{self.name}]\nstonewall\nrw=rand{self.operation}\nbs={self.size_bytes}\n"
            f"iodepth={self.depth}\nnumber_ios={self.requests}\n"
        )


GLOBAL = """[global]
filename=${DISK}
size=1g
direct=1
ioengine=libaio
thread=1
norandommap=1
"""


def points(quick):
    """Returns all points, or a few of them with few requests for a quick run."""
    sizes = list(REQUESTS)[:2] if quick else REQUESTS
    operations = OPERATIONS[:1] if quick else OPERATIONS
    each = itertools.product(operations, sizes, DEPTHS)
    return [Point(operation, size, depth, REQUESTS[size] // (4 if quick else 1)) for operation, size, depth in each]


def measure(host, side, at):
    """Instructions of one request, in thousands, for each point by its name."""
    words = host.ask(f"DISK={side.path} fio --minimal --terse-version=3 /data/points.fio", FIO_LIMIT_S)
    costs = {}
    for fields in (line.split(";") for line in words.splitlines() if line.startswith("3;")):
        point = at[fields[NAME_FIELD]]
        costs[point.name] = int(fields[RUNTIME_FIELD[point.operation]]) * 1000 / point.requests
    if set(costs) != set(at) or not all(costs.values()):
        raise AssertionError(f"fio on {side.name} said:\n{words[-3000:]}")
    return costs


def compare(host, sides, at, rounds):
    """For each side and point the ratio to the reference in each round."""
    ratios = {(side.name, point): [] for side in sides for point in at}
    for number in range(rounds):
        # Each round begins with another backend.
        turn = number % len(sides)
        costs = {side.name: measure(host, side, at) for side in (*sides[turn:], *sides[:turn])}
        for side, point in ratios:
            ratios[side, point].append(costs[side][point] / costs[REFERENCE][point])
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return ratios


# The names that dom0's kernel gives to events that go to a front end and to a backend.
TO_FRONT = ("blkif",)
TO_BACK = ("evtchn:spile-blkif", "blkif-backend", "evtchn:qemu")


class Counters:
    """Counters of dom0's kernel: events to front ends and to backends, and context switches."""

    def __init__(self, host):
        words = host.ask("cat /proc/interrupts; grep ctxt /proc/stat")
        lines = [line.split() for line in words.splitlines()]
        self.to_front = sum(int(line[1]) for line in lines if line and line[-1] in TO_FRONT)
        self.to_back = sum(int(line[1]) for line in lines if line and line[-1].startswith(TO_BACK))
        self.switches = next(int(line[1]) for line in lines if line and line[0] == "ctxt")


def events(host, side, point):
    """Events and switches for one request of a point."""
    before = Counters(host)
    host.ask(f"DISK={side.path} fio --minimal --section={point.name} /data/points.fio", FIO_LIMIT_S)
    after = Counters(host)
    each = {name: (getattr(after, name) - getattr(before, name)) / point.requests for name in vars(after)}
    of = {"side": side.name, "op": point.operation, "request_bytes": point.size_bytes, "depth": point.depth}
    return {**of, **{f"{name}_per_request": value for name, value in each.items()}}


def table(sides, ratios, at, operation):
    """One line a side, one column a point."""
    columns = [point for point in at.values() if point.operation == operation]
    heads = "".join(f"{f'{point.size_bytes // KIB} KiB x{point.depth}':>14}" for point in columns)
    yield f"{operation:<20}{heads}"
    for side in sides:
        cells = (ratios[side.name, point.name] for point in columns)
        yield f"{side.name:<20}" + "".join(
            f"{statistics.median(cell):>8.2f} ±{(max(cell) - min(cell)) / 2:.2f}" for cell in cells
        )


def events_table(rows):
    yield f"{'for a read of 4 KiB':<20}{'depth':>7}{'to back':>10}{'to front':>10}{'switches':>10}"
    for row in rows:
        counts = (row["to_back_per_request"], row["to_front_per_request"], row["switches_per_request"])
        yield f"{row['side']:<20}{row['depth']:>7}" + "".join(f"{count:>10.2f}" for count in counts)


def as_rows(sides, ratios, at):
    for side, point in itertools.product(sides, at.values()):
        cell = ratios[side.name, point.name]
        yield {
            "side": side.name, "op": point.operation, "request_bytes": point.size_bytes, "depth": point.depth,
            "requests": point.requests, "ratio_median": statistics.median(cell), "ratio_min": min(cell),
            "ratio_max": max(cell), "rounds": len(cell),
        }


def run(folder, options):
    at = {point.name: point for point in points(options.quick)}
    (folder / "points.fio").write_text(GLOBAL + "".join(point.job() for point in at.values()))
    need_backend()
    made = parts()
    carried = [*files(made, folder), folder / "points.fio"]
    host = CountingHost(made, folder, carried)
    try:
        host.wait_ready()
        sides = Sides(host, carried).list
        ratios = compare(host, sides, at, options.rounds)
        small = [point for point in at.values() if (point.operation, point.size_bytes) == ("read", 4 * KIB)]
        counted = [events(host, side, point) for side in sides for point in small if side.name != DEVICE]
        show(options, sides, ratios, at, counted)
    except AssertionError as problem:
        raise AssertionError(f"{problem}\n{logs(host)}")
    finally:
        host.close()


def logs(host):
    """Returns the last messages of dom0's programs and kernel."""
    try:
        return host.ask("tail -n 20 /tmp/*.log; dmesg | tail -n 20", limit_s=30)
    except (AssertionError, OSError):
        return host.said()


def show(options, sides, ratios, at, counted):
    if options.json:
        told = {"reference": REFERENCE, "same_again": AGAIN, "unit": "instructions relative to the reference"}
        offers = {side.name: side.offers() for side in sides}
        print(json.dumps({**told, "rows": list(as_rows(sides, ratios, at)), "events": counted, "offers": offers}))
        return
    print(f"instructions for a request, {REFERENCE} = 1")
    for operation in dict.fromkeys(point.operation for point in at.values()):
        print("\n" + "\n".join(table(sides, ratios, at, operation)))
    print("\nevents and switches\n" + "\n".join(events_table(counted)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of a few reads, to see it work")
    parser.add_argument("--rounds", type=int, default=0, help="turns that each backend gets (3; 1 when quick)")
    parser.add_argument("--json", action="store_true", help="one object with plain fields instead of the table")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    TARGET.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="xen-compare-", dir=TARGET))
    try:
        run(folder, options)
    except unittest.SkipTest as problem:
        print(f"SKIP compare: {problem}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
