#!/usr/bin/env python3
"""Runs the peer tests, a few files at a time, and prints the sums.

    tests/peer/run.py [--folder guest] [--jobs N | --together] [WORD…]

A WORD selects tests whose names hold it. With --together all files run in one process, in the order of their names,
and may share what is dear: one emulated machine. Prints one line a test, `SKIP name: reason` for each that
could not run here, and last `N passed, N failed, N skipped`. Exit code 1 when one failed.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
# A test file that takes longer hangs, and is a failure that is told by its name. No file takes a tenth of it, so it holds
# on a machine that does a lot of other work.
FILE_LIMIT_S = 3600


class Recorder(unittest.TestResult):
    """Keeps (name, outcome, detail, seconds) of each test."""

    def __init__(self):
        super().__init__()
        self.records = []
        self.begun = time.monotonic()

    def startTest(self, test):
        super().startTest(test)
        self.begun = time.monotonic()

    def keep(self, test, outcome, detail=""):
        name = test.id().replace("__main__.", "")
        self.records.append((name, outcome, detail, time.monotonic() - self.begun))

    def addSuccess(self, test):
        self.keep(test, "passed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.keep(test, "skipped", reason)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.keep(test, "failed", self.failures[-1][1])

    def addError(self, test, error):
        super().addError(test, error)
        self.keep(test, "failed", self.errors[-1][1])

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.keep(subtest, "failed", (self.failures + self.errors)[-1][1])


def selected(suite, words):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from selected(test, words)
        elif not words or any(word in test.id() for word in words):
            yield test


def run_here(paths, words):
    """Runs files in this process and prints their records as JSON."""
    sys.path[:0] = [str(HERE), str(paths[0].parent)]
    recorder = Recorder()
    loaded = []
    for path in paths:
        try:
            __import__(path.stem)
            loaded.append(path.stem)
        except unittest.SkipTest as reason:
            recorder.records.append((path.stem, "skipped", str(reason), 0))
    suite = unittest.TestLoader().loadTestsFromNames(loaded)
    unittest.TestSuite(selected(suite, words)).run(recorder)
    print(json.dumps(recorder.records))


def run_files(paths, words):
    """Runs files in a process of their own; returns their records."""
    command = [sys.executable, __file__, "--here", *map(str, paths), "--", *words]
    path = paths[0]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=FILE_LIMIT_S)
        *said, records = done.stdout.decode().splitlines()
        # At once, for files run at the same time.
        sys.stdout.write("".join(f"{line}\n" for line in said))
        return json.loads(records)
    except subprocess.TimeoutExpired:
        return [(path.stem, "failed", f"not done after {FILE_LIMIT_S} s", FILE_LIMIT_S)]
    except ValueError:
        return [(path.stem, "failed", f"broke with exit code {done.returncode}", 0)]


def show(records, sums):
    for name, outcome, detail, seconds in records:
        sums[outcome] += 1
        if outcome == "skipped":
            print(f"SKIP {name}: {detail}")
        else:
            print(f"{outcome:<7} {name} ({seconds:.1f} s)")
        if outcome == "failed":
            print("    " + detail.strip().replace("\n", "\n    "))
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--here", type=pathlib.Path, nargs="+")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    if options.here:
        run_here(options.here, options.words)
        return 0
    # The larger ones take longer: at the end all jobs have something to do.
    files = sorted((HERE / options.folder).glob("test_*.py"), key=lambda path: -path.stat().st_size)
    turns = [sorted(files)] if options.together else [[path] for path in files]
    sums = {"passed": 0, "failed": 0, "skipped": 0}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(run_files, paths, options.words) for paths in turns]
        for job in concurrent.futures.as_completed(jobs):
            show(job.result(), sums)
    print(f"{sums['passed']} passed, {sums['failed']} failed, {sums['skipped']} skipped")
    return 1 if sums["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
