#!/usr/bin/env python3
"""Runs QEMU's own block tests (qemu-iotests) for qcow2, with Spile in the place of a part of QEMU's programs.

    tests/iotests/run.py [--qemu-tree DIR] [--way WAY] [--all] [--jobs N] [NAME…]

DIR is a source tree of QEMU, best of the version that is installed here; it need not be built. Without it, `QEMU_TREE`
in the environment names it; where that is empty, too, all is one skip. QEMU's own programs are those
of this machine. Each test runs in up to three ways (`stand_in.py` says how):

- `images`: qcow2 images are made by `spile create`, and used by QEMU;
- `server`: `qemu-io` reads and writes qcow2 images through `spile serve`;
- `verbs`: verbs of qemu-img that Spile has in the same sense are done by Spile.

A fourth way, `qemu`, runs the tests without Spile, to see what fails here by itself; it is compared with nothing.

`list.txt` says what is expected of each test in each way. What a test prints is compared with QEMU's own expectation after
filters for differences that are known (`FILTERS`). A test that is listed as different is a skip, but a failure when it finds
other data than were written. Prints a line for each test, `SKIP name: reason` for each that cannot run, and last
`N passed, N failed, N skipped`. A test that does other than the list says is a failure, also one that passes against it.
`--all` runs also what the list skips. The exit code is 1 when one failed.
"""

import argparse
import concurrent.futures
import difflib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parents[1]
sys.path.insert(0, str(TOP / "tests" / "peer"))
from support import TARGET, spile_binary  # noqa: E402

WAYS = ("images", "server", "verbs")
TOOLS = ("qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon", "qemu-system-x86_64")
STOOD_IN = ("qemu-img", "qemu-io", "qemu-system-x86_64")
# On a busy machine the longest of them takes three minutes.
LIMIT_S = 600
# What a listed difference may not say: other data than were written, or something of Spile's that has failed.
WRONG = re.compile(r"^\+.*(Pattern verification failed|Content mismatch|panicked)|^\+SPILE", re.M)

# Differences that are meant: (name, ways, pattern, what stands for it in both outputs).
FILTERS = [
    # Versions of qemu-img word wrong usage in different ways.
    ("usage", WAYS, r"qemu-img: Invalid image size specified.*(?:\nqemu-img: kilobytes, .*)?", "qemu-img: (SIZE)"),
    ("usage", WAYS, r"qemu-img: --output (?:must be used|expects).*(?:\nTry 'qemu-img .*)?", "qemu-img: (OUTPUT)"),
    # Spile names a parent by its path from the child's folder, so that the folder can be moved. QEMU writes it as it was told.
    ("name of a parent", ("images", "verbs"), r"backing file: \S+ \(actual path: (\S+)\)", r"backing file: \1"),
    ("name of a parent", ("images", "verbs"), r'("backing-filename": ")(?:TEST_DIR/)?', r"\1"),
    # The words of another program.
    ("text of an error", ("server",), r"(qemu-io: can't open(?: device)? [^:\n]*): .*", r"\1: (ERROR)"),
    # What QEMU says on stderr when it finds damage. Spile's server says it in its own log.
    ("word of damage", ("server",), r"qcow2: (?:Marking image as|Image is) corrupt: .*\n", ""),
    ("text of an error", ("verbs",), r"qemu-img: (?!Could not open).*", "qemu-img: (ERROR)"),
]


class Expected:
    """A line of `list.txt`: what one test does in one way, and why."""

    def __init__(self, line):
        name, ways, self.outcome, *reason = line.split(None, 3)
        self.keys = [(name, way) for way in ways.split(",")]
        self.reason = " ".join(reason)
        if self.outcome not in ("pass", "differs", "skip"):
            raise ValueError(f"list.txt: {line}: an outcome is pass, differs or skip")
        if self.outcome != "pass" and not self.reason:
            raise ValueError(f"list.txt: {line}: why?")
        if not {way for _, way in self.keys} <= {*WAYS}:
            raise ValueError(f"list.txt: {line}: ways are {', '.join(WAYS)}")


def read_list(path):
    """What is expected, by (test, way)."""
    expected = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            one = Expected(line)
            for key in one.keys:
                if key in expected:
                    raise ValueError(f"list.txt: {key} is there twice")
                expected[key] = one
    return expected


def halting_firmware(path, qemu):
    """Writes a firmware that halts at once, where QEMU has no `qtest`; returns its path, else nothing."""
    known = subprocess.run([qemu, "-accel", "help"], stdout=subprocess.PIPE).stdout.decode()
    if "qtest" in known.split():
        return ""
    # An x86 processor begins 16 bytes below the end: cli, hlt, and back to the hlt.
    path.write_bytes(b"\xf4" * 0xFFF0 + b"\xfa\xf4\xeb\xfd".ljust(16, b"\xf4"))
    return str(path)


class Bench:
    """Folders and programs for one way: stand-ins in the place of QEMU's programs."""

    def __init__(self, tree, way, scratch):
        self.tests = tree / "tests" / "qemu-iotests"
        self.way = way
        self.folder = scratch / way
        self.programs = self.folder / "bin"
        self.programs.mkdir(parents=True)
        self.found = {tool: shutil.which(tool) for tool in TOOLS}
        self.firmware = halting_firmware(self.folder / "halt.bin", self.found["qemu-system-x86_64"])
        for tool in STOOD_IN:
            stub = self.programs / tool
            stub.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {HERE}/stand_in.py {tool} "$@"\n')
            stub.chmod(0o755)

    def environment(self, name):
        folder = self.folder / name
        folder.mkdir()
        # A socket's path has to be short.
        sockets = pathlib.Path(tempfile.mkdtemp(prefix="io-"))
        programs = {**self.found, **{tool: str(self.programs / tool) for tool in STOOD_IN}}
        return folder, sockets, {
            **os.environ,
            "QEMU_PROG": programs["qemu-system-x86_64"], "QEMU_IMG_PROG": programs["qemu-img"],
            "QEMU_IO_PROG": programs["qemu-io"], "QEMU_NBD_PROG": programs["qemu-nbd"],
            "QSD_PROG": programs["qemu-storage-daemon"],
            "TEST_DIR": str(folder), "SOCK_DIR": str(sockets), "PYTHONDONTWRITEBYTECODE": "1",
            "SPILE_BIN": os.path.abspath(spile_binary()), "SPILE_IOTESTS_WAY": self.way, "SPILE_IOTESTS_LOG": str(folder / "acts"),
            "SPILE_IOTESTS_SOCKETS": str(sockets), "SPILE_RUN_DIR": str(sockets / "run"),
            **{"SPILE_IOTESTS_" + tool.replace("-", "_").upper(): self.found[tool] for tool in STOOD_IN},
            "SPILE_IOTESTS_FIRMWARE": self.firmware,
        }

    def run(self, name):
        """Runs one test by QEMU's own `check`; returns a `Result`."""
        folder, sockets, env = self.environment(name)
        begun = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "./check", "-qcow2", name], cwd=self.tests, env=env, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        try:
            said = process.communicate(timeout=LIMIT_S)[0].decode("utf-8", "replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            said = f"{name} fail [] [] not done after {LIMIT_S} s"
        result = self.judge(name, folder, said)
        result.seconds = time.monotonic() - begun
        shutil.rmtree(sockets, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        return result

    def judge(self, name, folder, said):
        acts = folder / "acts"
        done = acts.read_text().splitlines() if acts.exists() else []
        match = re.search(rf"(?:^|\r){re.escape(name)}\s+(pass|fail|not run)\s+\[\S*\]\s+\[\S*\]\s*(.*)$", said, re.M)
        if not match:
            # Also where the output is no text, which `check` does not expect.
            return Result("fail", self.difference(name, folder) or said[-2000:], done)
        outcome, why = match.groups()
        if outcome == "not run":
            return Result("not run", re.sub(r"^[\d.]*s?(\.\.\.)?\s*", "", why), done)
        if outcome == "fail":
            difference = self.difference(name, folder)
            if difference:
                return Result("fail", f"{why}\n{difference}", done)
        return Result("pass", "", done)

    def difference(self, name, folder):
        """What the test printed other than was expected, after the filters."""
        at = self.tests / name if name.isdigit() else self.tests / "tests" / name
        expected = next(
            path for path in (at.with_name(at.name + end) for end in (".out.qcow2", ".pc.out", ".out")) if path.exists()
        )
        found = next(folder.glob(f"*/{name}.out.bad"), None)
        if found is None:
            return "no output"
        texts = [self.filtered(path.read_text(errors="replace")) for path in (expected, found)]
        return "\n".join(difflib.unified_diff(*texts, "expected", "found", lineterm="", n=1))

    def filtered(self, text):
        for _, ways, pattern, stands in FILTERS:
            if self.way in ways:
                text = re.sub(pattern, stands, text)
        return [line.rstrip() for line in text.splitlines()]


class Result:
    """How one test ended: `pass`, `fail` or `not run`, what there is to say, and what Spile and QEMU did in it."""

    def __init__(self, outcome, detail, acts):
        self.outcome, self.detail = outcome, detail
        self.of_spile = [line[6:] for line in acts if line.startswith("spile ")]
        self.left = [line[5:] for line in acts if line.startswith("left ")]
        self.seconds = 0.0


def verdict(key, expected, result):
    """`passed`, `failed` or `skipped`, and why."""
    if result.outcome == "not run":
        return "skipped", result.detail
    if key[1] == "qemu":
        return ("failed", result.detail) if result.outcome == "fail" else ("passed", "")
    wanted = expected.outcome if expected else "pass"
    if not expected:
        return "failed", f"list.txt does not name it; it ended with {result.outcome}\n{result.detail}"
    if result.outcome == "fail":
        is_meant = wanted == "differs" and not WRONG.search(result.detail) or wanted == "skip"
        return ("skipped", expected.reason) if is_meant else ("failed", result.detail)
    if not [act for act in result.of_spile if act != "check"]:
        nothing = "Spile did nothing in it"
        return ("failed", f"list.txt says that it passes, but {nothing}") if wanted == "pass" else ("skipped", nothing)
    if wanted != "pass":
        return "failed", f"passes, though list.txt says: {expected.reason}"
    return "passed", ""


def all_tests(tree):
    """The names of all tests in QEMU's tree."""
    folder = tree / "tests" / "qemu-iotests"
    numbered = [path.name for path in folder.glob("[0-9][0-9][0-9]")]
    named = [path.stem for path in (folder / "tests").glob("*.out") if path.with_suffix("").exists()]
    return sorted(numbered) + sorted(named)


def chosen(options, expected):
    """The (test, way) pairs to run, and those that the list skips."""
    names = all_tests(options.qemu_tree)
    if unknown := set(options.names) - set(names):
        raise SystemExit(f"no such test in {options.qemu_tree}: {', '.join(sorted(unknown))}")
    ways = options.way or WAYS
    run, skipped = [], []
    for key in [(name, way) for way in ways for name in options.names or names]:
        if key in expected and expected[key].outcome == "skip" and not options.all:
            skipped.append(key)
        elif key in expected or options.all or key[1] == "qemu":
            run.append(key)
    if not options.names:
        gone = sorted({name for name, _ in expected} - set(names))
        print(f"{len(names)} tests in the tree; the list names {len(gone)} that are not there: {' '.join(gone)}")
        fresh = sorted(set(names) - {name for name, _ in expected})
        print(f"not in the list: {' '.join(fresh)}")
    return run, skipped


def tell(key, outcome, why, result=None):
    name = f"{key[1]}/{key[0]}"
    if outcome == "skipped":
        print(f"SKIP {name}: {why}")
    else:
        acts = f"{len(result.of_spile)} acts of Spile, {len(result.left)} left to QEMU"
        print(f"{outcome:<7} {name} ({result.seconds:.1f} s; {acts})")
    if outcome == "failed":
        print("    " + why.strip().replace("\n", "\n    "))
    sys.stdout.flush()


def record(file, key, outcome, result):
    """One JSON object a line, to make a list of."""
    file.write(json.dumps({"test": key[0], "way": key[1], "verdict": outcome, **vars(result)}) + "\n")
    file.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qemu-tree", type=pathlib.Path, default=os.environ.get("QEMU_TREE") or None)
    parser.add_argument("--way", choices=(*WAYS, "qemu"), action="append")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", type=pathlib.Path, default=HERE / "list.txt", help="what is expected")
    parser.add_argument("--results", type=argparse.FileType("a"), default=os.devnull, metavar="FILE")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if options.qemu_tree is None:
        print("SKIP iotests: no source tree of QEMU is named (make iotests QEMU_TREE=DIR)\n0 passed, 0 failed, 1 skipped")
        return 0
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        print(f"SKIP iotests: not installed: {', '.join(missing)} (qemu-utils, qemu-system-x86)\n0 passed, 0 failed, 1 skipped")
        return 0
    options.qemu_tree = pathlib.Path(options.qemu_tree).resolve()
    expected = read_list(options.list)
    run, skipped = chosen(options, expected)
    sums = {"passed": 0, "failed": 0, "skipped": len(skipped)}
    for key in skipped:
        tell(key, "skipped", expected[key].reason)
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="iotests-", dir=TARGET) as scratch, \
            concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        benches = {way: Bench(options.qemu_tree, way, pathlib.Path(scratch)) for way in (*WAYS, "qemu")}
        jobs = {pool.submit(benches[key[1]].run, key[0]): key for key in run}
        for job in concurrent.futures.as_completed(jobs):
            key, result = jobs[job], job.result()
            outcome, why = verdict(key, expected.get(key), result)
            sums[outcome] += 1
            tell(key, outcome, why, result)
            record(options.results, key, outcome, result)
    print(f"{sums['passed']} passed, {sums['failed']} failed, {sums['skipped']} skipped")
    return 1 if sums["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
