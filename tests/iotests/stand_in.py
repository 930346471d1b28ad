#!/usr/bin/env python3
"""Stands in the place of one of QEMU's programs while one of QEMU's block tests runs, and has Spile do a part of the work.

    stand_in.py qemu-img|qemu-io|qemu-system-x86_64 [ARGUMENTS]

`SPILE_IOTESTS_WAY` says which part:

- `images`: `qemu-img create` of a qcow2. QEMU makes the image first, so that its messages and refusals are those that the
  test expects. Then Spile makes the same image anew in its place, by what QEMU's header says.
- `server`: `qemu-io` with a qcow2. `spile serve` has the image, and the real qemu-io is a client of it, by NBD. When qemu-io
  ends, the server is ended in order. When qemu-io ends by `abort`, the server is killed.
- `verbs`: those verbs of qemu-img that Spile has in the same sense.

Whatever is not of that kind is left to QEMU. In all three, what `qemu-img check` says of a qcow2 is held against `spile check`.
Where the distribution's QEMU has no accelerator `qtest` (a machine whose processor does nothing), qemu-system gets one that
halts at its first instruction.

Each act of Spile is a line `spile WHAT` in the file that `SPILE_IOTESTS_LOG` names, and each that was left to QEMU a line
`left WHAT: REASON`. Where Spile fails or contradicts QEMU, a line beginning with `SPILE` is printed, which no test expects.
"""

import getopt
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time

WAY = os.environ["SPILE_IOTESTS_WAY"]
SPILE = os.environ["SPILE_BIN"]
# Nothing here takes nearly as long; the runner ends a test that does.
LIMIT_S = 120

# Spile has no preallocated child without extended L2 entries, which would hide its parent: QEMU's image stays then.
REFUSED = re.compile("preallocat")


def log(line):
    with open(os.environ["SPILE_IOTESTS_LOG"], "a") as file:
        file.write(line.replace("\n", " ") + "\n")


def real(tool):
    return os.environ["SPILE_IOTESTS_" + tool.replace("-", "_").upper()]


def leave(tool, words, reason):
    """Becomes the real program."""
    log(f"left {tool} {words[0] if words else ''}: {reason}")
    become(tool, words)


def become(tool, words):
    sys.stdout.flush()
    os.execv(real(tool), [tool, *words])


def spile(*words):
    """Runs Spile; returns the exit code, its output and its errors without the program's name."""
    done = subprocess.run(
        [SPILE, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=LIMIT_S,
    )
    error = done.stderr.decode("utf-8", "replace").strip()
    return done.returncode, done.stdout.decode("utf-8", "replace"), re.sub(r"^(error|spile\S*): ", "", error)


def parents_of(path):
    """Has Spile follow parents in the image's folder and the test's, as QEMU follows them anywhere."""
    folders = {os.path.dirname(os.path.abspath(path)), os.environ.get("TEST_DIR") or "/nonexistent", os.getcwd()}
    return [word for folder in sorted(folders) if os.path.isdir(folder) for word in ("--allow-parents", folder)]


class Options:
    """The options and the other words of a command, as getopt tells them."""

    def __init__(self, words, short, long):
        pairs, self.rest = getopt.gnu_getopt(words, short, long)
        self.pairs = [(name.lstrip("-"), value) for name, value in pairs]

    def all(self, *names):
        return [value for name, value in self.pairs if name in names]

    def last(self, *names):
        return (self.all(*names) or [None])[-1]

    def has(self, *names):
        return bool(self.all(*names))

    def only(self, *names):
        """True when no option but these is there."""
        return all(name in names for name, _ in self.pairs)


class Header:
    """What the first bytes of a qcow2 say."""

    def __init__(self, path):
        with open(path, "rb") as file:
            raw = file.read(4096)
            magic, self.version, backing_at, backing_len, cluster_bits, self.size_bytes, encrypted = \
                struct.unpack_from(">IIQIIQI", raw)
            if magic != 0x514649FB:
                raise ValueError("not a qcow2")
            self.encrypted = encrypted != 0
            self.cluster_bytes = 1 << cluster_bits
            file.seek(backing_at)
            self.backing = file.read(backing_len).decode("utf-8", "replace") if backing_at else None
        incompatible = compatible = autoclear = length = 0
        self.refcount_bits = 16
        if self.version >= 3:
            incompatible, compatible, autoclear, order, length = struct.unpack_from(">QQQII", raw, 72)
            self.refcount_bits = 1 << order
        self.data_file = bool(incompatible & 4)
        self.extended = bool(incompatible & 16)
        self.bitmaps = bool(autoclear & 1)
        self.lazy = bool(compatible & 1)
        self.zstd = length > 104 and bool(raw[104])


def is_qcow2(path):
    """True for an ordinary file, named by its path, that begins as a qcow2 does."""
    try:
        if not os.path.isfile(path) or os.path.islink(path):
            return False
        Header(path)
        return True
    except (OSError, ValueError, struct.error):
        return False


# ---- qemu-img ----

def qemu_img(words):
    verbs = {} if WAY == "qemu" else {"check": check}
    if WAY == "images":
        verbs["create"] = create
    if WAY == "verbs":
        verbs.update(
            resize=resize, snapshot=snapshot, compare=compare, convert=convert, rebase=rebase, amend=amend,
            measure=measure,
        )
    if not words or words[0] not in verbs:
        become("qemu-img", words)
    try:
        verbs[words[0]](words)
    except getopt.GetoptError as error:
        leave("qemu-img", words, f"options that are not known here ({error})")


def create(words):
    options = Options(words[1:], "f:o:b:F:uq", [
        "format=", "options=", "backing=", "backing-format=", "backing-unsafe", "quiet", "object=",
    ])
    if options.last("f", "format") != "qcow2" or not options.rest:
        become("qemu-img", words)
    path = options.rest[0]
    if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
        leave("qemu-img", words, "no ordinary file")
    code = subprocess.call([real("qemu-img"), *words])
    if code == 0:
        remake(path, options)
    sys.exit(code if code >= 0 else 128 - code)


def remake(path, options):
    """Has Spile make the image that QEMU has just made."""
    if not is_qcow2(path):
        return log("left qemu-img create: no ordinary file")
    header = Header(path)
    told = ",".join(options.all("o", "options"))
    wanted = dict(word.partition("=")[::2] for word in told.split(","))
    for bad, reason in [
        (header.encrypted, "an encrypted image"), (header.data_file, "an external data file"),
        (header.size_bytes == 0, "a disk of no bytes"),
        ("extent_size_hint" in wanted or "nocow" in wanted, "an attribute of the file"),
        (header.backing and ":" in header.backing, "a parent that is no path"),
        (options.has("u", "backing-unsafe"), "a parent that need not be there"),
    ]:
        if bad:
            return log(f"left qemu-img create: {reason}")
    command = make_options(header)
    if header.backing:
        form = options.last("F", "backing-format") or wanted.get("backing_fmt")
        command += ["--parent", os.path.join(os.path.dirname(path), header.backing), *parents_of(path)]
        command += ["--parent-format", {"vpc": "vhd"}.get(form, form)]
    if wanted.get("preallocation", "off") != "off":
        command.append("--preallocate=" + wanted["preallocation"])
    kept = path + ".of-qemu"
    os.rename(path, kept)
    code, _, error = spile("create", path, "--format", "qcow2", "--size", str(header.size_bytes), *command)
    if code == 0:
        os.unlink(kept)
        return log("spile create")
    os.rename(kept, path)
    if REFUSED.search(error):
        return log(f"left qemu-img create: {error}")
    print(f"SPILE cannot create {path}: {error}", flush=True)


def make_options(header):
    """The options of `spile create` for an image like this one."""
    options = ["--cluster-size", str(header.cluster_bytes), "--extended-l2", "on" if header.extended else "off"]
    options += ["--refcount-bits", str(header.refcount_bits), "--compat", "1.1" if header.version >= 3 else "0.10"]
    options += ["--compression-type", "zstd" if header.zstd else "deflate"]
    return options + ["--lazy-refcounts"] * header.lazy


def check(words):
    """QEMU's check, and Spile's beside it: both must come to the same judgement."""
    options = Options(words[1:], "f:r:T:qU", [
        "format=", "repair=", "output=", "cache=", "quiet", "force-share", "object=", "image-opts",
    ])
    code = subprocess.call([real("qemu-img"), *words])
    path = (options.rest or [""])[0]
    judged = {0: "sound", 2: "corrupt", 3: "leaks"}
    plain = options.last("f", "format") in ("qcow2", None) and not options.has("image-opts", "object", "U", "force-share")
    if plain and code in judged and is_qcow2(path):
        ours, said, error = spile("check", path, "--format", "qcow2", "--allow-data-file", *parents_of(path))
        ours = {0: "sound", 3: "corrupt", 4: "leaks"}.get(ours, f"exit code {ours} ({error})")
        log("spile check")
        if ours != judged[code] and not known_difference(path, ours, said):
            print(f"SPILE check says {ours}, QEMU says {judged[code]}", flush=True)
    sys.exit(code if code >= 0 else 128 - code)


def known_difference(path, ours, said):
    """True where Spile looks at something that `qemu-img check` does not look at: it opens the parents, too, and a table in a
    cluster of data is damage to it whatever the refcount is. A COPIED bit that is clear without need costs a copy, and is a
    leak to it."""
    header = Header(path)
    damage = [line for line in said.splitlines() if line.startswith("corruption:")]
    if ours == "corrupt" and damage and all("overlaps" in line for line in damage):
        return True
    if ours == "leaks" and "COPIED" in said:
        return True
    return ours.startswith("exit code 1 ") and (header.backing is not None or header.data_file or header.encrypted)


def answer(verb, result, said=None):
    """Ends as qemu-img would after what Spile did. Its text replaces that of QEMU, which no filter could make the same."""
    code, _, error = result
    log(f"spile {verb}")
    if code == 0:
        if said:
            print(said)
    else:
        print(f"qemu-img: {error}", file=sys.stderr)
    sys.exit(min(code, 1))


def resize(words):
    options = Options([word for word in words[1:] if not re.fullmatch(r"-\d.*", word)], "f:q", [
        "format=", "shrink", "preallocation=", "quiet", "object=", "image-opts",
    ])
    size = words[-1]
    path = options.rest[0] if options.rest else ""
    if not options.only("f", "format", "shrink", "q", "quiet") or not is_qcow2(path):
        leave("qemu-img", words, "no plain qcow2, or a preallocation")
    try:
        size_bytes = new_size(Header(path).size_bytes, size)
    except ValueError as error:
        leave("qemu-img", words, str(error))
    if size_bytes < Header(path).size_bytes and not options.has("shrink"):
        leave("qemu-img", words, "a refusal of QEMU")
    shrink = ["--shrink", "--discard"] if options.has("shrink") and size_bytes < Header(path).size_bytes else []
    result = spile(
        "resize", path, str(size_bytes), "--format", "qcow2", "--write-parent", *shrink, *parents_of(path),
    )
    answer("resize", result, None if options.has("q", "quiet") else "Image resized.")


def new_size(old_bytes, text):
    """The size in bytes that `qemu-img resize` is asked for, rounded up to sectors."""
    match = re.fullmatch(r"([+-]?)(\d+)([bkKMGTPE]?)", text)
    if not match:
        raise ValueError("no size that Spile would be asked for")
    sign, digits, unit = match.groups()
    size_bytes = int(digits) << 10 * "_kMGTPE".index({"K": "k", "b": "_", "": "_"}.get(unit, unit))
    size_bytes = old_bytes + int(sign + str(size_bytes)) if sign else size_bytes
    if size_bytes < 0:
        raise ValueError("less than nothing")
    return -(-size_bytes // 512) * 512


def snapshot(words):
    options = Options(words[1:], "lc:a:d:qUf:", ["object=", "image-opts", "force-share", "quiet"])
    path = (options.rest or [""])[0]
    kinds = [(name, value) for name, value in options.pairs if name in ("c", "a", "d")]
    if len(kinds) != 1 or not options.only("c", "a", "d", "q", "quiet") or not is_qcow2(path):
        leave("qemu-img", words, "no plain qcow2, or a list")
    (kind, name), = kinds
    answer("internal-snapshot", spile(
        "internal-snapshot", "-" + kind, name, path, "--format", "qcow2", "--write-parent", *parents_of(path),
    ))


def compare(words):
    options = Options(words[1:], "f:F:T:psqU", [
        "object=", "image-opts", "a-format=", "b-format=", "cache=", "strict", "progress", "quiet", "force-share",
    ])
    one, other = (options.rest + ["", ""])[:2]
    if len(options.rest) != 2 or not options.only("f", "F", "T") or not (is_qcow2(one) or is_qcow2(other)):
        leave("qemu-img", words, "no plain qcow2, or options")
    formats = [options.last("f"), options.last("F")]
    forms = [form or ("qcow2" if is_qcow2(path) else "raw") for form, path in zip(formats, (one, other))]
    if not {*forms} <= {"qcow2", "raw"} or not (os.path.isfile(one) and os.path.isfile(other)):
        leave("qemu-img", words, "formats of QEMU alone")
    code, out, error = spile(
        "compare", one, other, "--from", forms[0], "--to", forms[1], *parents_of(one), "--json",
    )
    log("spile compare")
    if code > 1:
        print(f"qemu-img: {error}", file=sys.stderr)
        sys.exit(2)
    told = json.loads(out)
    sizes = told["a"]["virtual_size_bytes"], told["b"]["virtual_size_bytes"]
    # QEMU speaks of the sizes when it has found no difference before the end of the shorter one.
    if sizes[0] != sizes[1] and (code == 0 or told["differs_at_offset_bytes"] >= min(sizes)):
        print("Warning: Image size mismatch!")
    print("Images are identical." if code == 0 else f"Content mismatch at offset {told['differs_at_offset_bytes']}!")
    sys.exit(code)


def convert(words):
    options = Options(words[1:], "f:O:co:S:t:T:pm:WUqnB:F:l:C:r:", [
        "object=", "source-image-opts", "target-image-opts", "target-is-zero", "salvage", "bitmaps", "skip-broken-bitmaps",
    ])
    if not options.only("f", "O", "c", "o", "t", "T", "p", "m", "W", "q") or len(options.rest) != 2:
        leave("qemu-img", words, "options of QEMU alone")
    source, target = options.rest
    form, to = options.last("f") or ("qcow2" if is_qcow2(source) else "raw"), options.last("O") or "raw"
    wanted = dict(word.partition("=")[::2] for word in ",".join(options.all("o")).split(",") if word)
    if not {form, to} <= {"qcow2", "raw"} or "qcow2" not in (form, to) or not os.path.isfile(source) \
            or (os.path.exists(target) and not os.path.isfile(target)) or ":" in target \
            or {"backing_file", "backing_fmt", "data_file", "preallocation"} & wanted.keys() \
            or any(name.startswith("encrypt") for name in wanted):
        leave("qemu-img", words, "formats or options of QEMU alone")
    asked = ["-o", ",".join(f"{name}={value}" for name, value in wanted.items())] if wanted else []
    # qemu-img overwrites the file that is there; Spile makes a new one, and gives it the name at the end.
    kept = target + ".of-test"
    if os.path.exists(target):
        os.rename(target, kept)
    result = spile(
        "convert", source, target, "--from", form, "--to", to, *asked, *["--compress"] * options.has("c"),
        *parents_of(source),
    )
    if os.path.exists(kept):
        os.unlink(kept) if os.path.exists(target) else os.rename(kept, target)
    answer("convert", result)


def rebase(words):
    options = Options(words[1:], "f:t:T:b:F:upqUc", ["object=", "image-opts", "compress"])
    path = (options.rest or [""])[0]
    parent, form = options.last("b"), options.last("F") or "raw"
    if not options.only("f", "b", "F", "u", "q", "t", "T") or not parent or ":" in parent or not is_qcow2(path) \
            or form not in ("qcow2", "raw", "vpc"):
        leave("qemu-img", words, "no plain qcow2, or no parent that is a path")
    if Header(path).backing is None:
        leave("qemu-img", words, "Spile gives a disk without a parent none")
    parent = os.path.join(os.path.dirname(path), parent)
    answer("rebase", spile(
        "rebase", path, "--parent", parent, "--parent-format", {"vpc": "vhd"}.get(form, form), "--format", "qcow2",
        "--trust" if options.has("u") else "--copy", *parents_of(path),
    ))


def amend(words):
    options = Options(words[1:], "o:f:t:pq", ["object=", "image-opts", "force"])
    path = (options.rest or [""])[0]
    if not options.only("o", "f", "q") or not is_qcow2(path) or "help" in options.all("o") or "?" in options.all("o"):
        leave("qemu-img", words, "no plain qcow2, or a question")
    asked = [word for told in options.all("o") for word in ("-o", told)]
    answer("amend", spile("amend", path, "--format", "qcow2", "--write-parent", *asked, *parents_of(path)))


def measure(words):
    options = Options(words[1:], "O:f:o:U", ["size=", "output=", "object=", "image-opts", "snapshot=", "force-share"])
    told = ",".join(options.all("o"))
    source = options.rest[0] if options.rest else None
    if not options.only("O", "f", "o", "size", "output") or options.last("O") != "qcow2" or len(options.rest) > 1 \
            or re.search("help|preallocation|encrypt|data_file|backing", told) \
            or (source and (options.last("f") not in ("qcow2", None) or not is_qcow2(source) or Header(source).bitmaps)):
        leave("qemu-img", words, "formats or options of QEMU alone")
    of = [source, "--from", "qcow2", *parents_of(source)] if source else []
    size = ["--size", options.last("size")] if options.has("size") else []
    code, out, error = spile("measure", *of, "--to", "qcow2", *size, *(["-o", told] if told else []), "--json")
    log("spile measure")
    if code:
        print(f"qemu-img: {error}", file=sys.stderr)
        sys.exit(1)
    told = json.loads(out)
    needed, whole = told["file_bytes"], told["fully_allocated_file_bytes"]
    # What QEMU says of bitmaps where the source can have some. Spile does not speak of them.
    has_figure = source and Header(source).version >= 3
    if options.last("output") == "json":
        print(json.dumps({**({"bitmaps": 0} if has_figure else {}), "required": needed, "fully-allocated": whole}, indent=4))
    else:
        print(f"required size: {needed}\nfully allocated size: {whole}" + "\nbitmaps size: 0" * bool(has_figure))


# ---- qemu-io ----

# Commands that speak of the image itself and not of the disk that it shows.
OF_THE_IMAGE = re.compile(
    r"^\s*(open|reopen|close|map|alloc|info|truncate|break|remove_break|resume|wait_break|zone\w*|sleep|quit .*)\b"
    r"|^\s*(aio_)?(write|read)v?\b.*\s-[A-Za-z]*[bc]"
)


def qemu_io(words):
    try:
        options = Options(words, "c:f:rsnCmki:t:d:T:UhV", [
            "cmd=", "format=", "read-only", "snapshot", "nocache", "copy-on-read", "misalign", "native-aio", "aio=",
            "cache=", "discard=", "trace=", "force-share", "help", "version", "object=", "image-opts",
        ])
    except getopt.GetoptError:
        become("qemu-io", words)
    if WAY != "server":
        become("qemu-io", words)
    path = (options.rest or [""])[0]
    orders = options.all("c", "cmd")
    given = None
    if not orders and options.rest and is_qcow2(path) and not sys.stdin.isatty():
        given = sys.stdin.buffer.read()
        orders = given.decode("utf-8", "replace").splitlines()
    reason = why_not(options, path, orders)
    if reason:
        log(f"left qemu-io: {reason}")
        if given is not None:
            sys.exit(pass_on(subprocess.run([real("qemu-io"), *words], input=given).returncode))
        become("qemu-io", words)
    served(options, path, given)


def why_not(options, path, orders):
    """Why this call cannot go to a server; None if it can."""
    if options.has("image-opts", "object", "s", "snapshot", "C", "copy-on-read", "T", "trace", "U", "force-share"):
        return "options that speak of the image"
    if options.last("f", "format") not in ("qcow2", None) or len(options.rest) != 1 or not is_qcow2(path):
        return "no plain qcow2"
    header = Header(path)
    if header.encrypted or header.data_file or ":" in (header.backing or ""):
        return "an encrypted image, one with a data file, or with a parent that is no path"
    for order in orders:
        if OF_THE_IMAGE.search(order):
            return f"`{order.split()[0]}` speaks of the image"
    return None


def served(options, path, given):
    """Runs the real qemu-io as a client of `spile serve`."""
    folder = tempfile.mkdtemp(prefix="io-", dir=os.environ["SPILE_IOTESTS_SOCKETS"])
    socket = os.path.join(folder, "nbd")
    read_only = options.has("r", "read-only")
    disk = path.replace(",", ",,") + ",format=qcow2" + ",read-only" * read_only
    writes = [] if read_only else ["--write-parent"]
    server = subprocess.Popen(
        [SPILE, "serve", disk, "--nbd", f"unix:{socket}", "--control", "none", "--workers", "1", "--cache", "page",
         *writes, *parents_of(path)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )
    end = time.monotonic() + LIMIT_S
    while not os.path.exists(socket) and server.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    log("spile serve")
    if server.poll() is not None:
        error = server.stderr.read().decode("utf-8", "replace").strip()
        print(f"qemu-io: can't open device {path}: {error}", file=sys.stderr)
        sys.exit(1)
    kept = [f"-{name}" if len(name) == 1 else f"--{name}" for name, _ in options.pairs]
    words = [word for flag, (name, value) in zip(kept, options.pairs) if name not in ("f", "format")
             for word in ([flag, value] if value else [flag])]
    words += ["-f", "raw", f"nbd+unix:///?socket={socket}"]
    # As its own name, not as that of the stand-in.
    code = subprocess.run(["qemu-io", *words], executable=real("qemu-io"), input=given).returncode
    finish(server, path, killed=code < 0)
    os.path.exists(socket) and os.unlink(socket)
    os.rmdir(folder)
    sys.exit(pass_on(code))


def finish(server, path, killed):
    """Ends the server: in order, or as the death of the process that had the image. The kernel may keep a dead server's files
    for a moment, with their locks, until it has wound up its io_uring."""
    server.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
    _, said = server.communicate(timeout=LIMIT_S)
    if server.returncode != (-signal.SIGKILL if killed else 0):
        print(f"SPILE's server ended with {server.returncode}: {said.decode('utf-8', 'replace')}", flush=True)
    end = time.monotonic() + LIMIT_S
    while killed and time.monotonic() < end and is_locked(path):
        time.sleep(0.02)


def is_locked(path):
    done = subprocess.run([real("qemu-img"), "info", path], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return b"lock" in done.stderr


def pass_on(code):
    """Ends by the same signal as the real program."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


# ---- qemu-system ----

def qemu_system(words):
    firmware = os.environ["SPILE_IOTESTS_FIRMWARE"]
    halting = ["tcg", "-bios", firmware] if firmware else ["qtest"]
    words = [part for word, before in zip(words, ["", *words])
             for part in (halting if (before, word) == ("-accel", "qtest") else [word])]
    become("qemu-system-x86_64", words)


if __name__ == "__main__":
    {"qemu-img": qemu_img, "qemu-io": qemu_io, "qemu-system-x86_64": qemu_system}[sys.argv[1]](sys.argv[2:])
