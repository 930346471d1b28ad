"""bpftrace on the static probes of a server: each moment of each request is seen, once."""

import json
import signal
import subprocess
import threading

from support import LIMIT_S, PeerTest, STANDIN, need, run, spile, spile_binary

# Each of these a request that needs one operation on a store passes once.
PROBES = (
    "taken", "loaded", "disk_began", "submitted", "completed", "disk_ended", "stored", "shown", "notified",
)
REQUESTS = 200


class Bpftrace(PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("is about Spile")
        need("bpftrace")
        tried = run("bpftrace", "-e", 'BEGIN { exit(); }', ok=None)
        if tried.returncode != 0:
            self.skipTest(f"bpftrace does not work here: {tried.stderr.decode(errors='replace').strip()[-200:]}")
        super().setUp()

    def trace(self, server, *program):
        """Starts bpftrace on the server, and returns once it is attached."""
        program = [*program, 'interval:ms:200 { printf("tick"); }']
        words = ["bpftrace", "-f", "json", "-p", str(server.process.pid), "-e", " ".join(program)]
        tracer = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(tracer.stdout.close)
        self.addCleanup(tracer.stderr.close)
        self.addCleanup(tracer.wait)
        self.addCleanup(tracer.kill)
        # The tick is attached last. A tracer that says nothing is killed, which ends the wait.
        limit = threading.Timer(LIMIT_S, tracer.kill)
        limit.start()
        self.addCleanup(limit.cancel)
        while b"tick" not in (line := tracer.stdout.readline()):
            if not line:
                self.assertNotEqual(tracer.wait(LIMIT_S), -signal.SIGKILL, f"bpftrace says nothing in {LIMIT_S} s")
                why = tracer.stderr.read().decode(errors="replace").strip()
                self.skipTest(f"bpftrace cannot attach to static probes here: {why[-300:]}")
        limit.cancel()
        return tracer

    def test_each_moment_of_each_request_is_seen(self):
        server = self.serve(self.empty())
        where = f"usdt:{spile_binary()}:spile"
        counts = [f"{where}:{probe} /arg0/ {{ @{probe} = count(); }}" for probe in PROBES]
        bytes_taken = f"{where}:taken /arg1 == 1/ {{ @bytes = sum(arg3); }}"
        tracer = self.trace(server, *counts, bytes_taken)
        spile("load", server.uri(), "--rw", "write", "--bs", "4k", "--depth", "4", "--ios", REQUESTS)
        # At SIGINT it prints what it has counted.
        tracer.send_signal(signal.SIGINT)
        output, _ = tracer.communicate(timeout=LIMIT_S)
        maps = [json.loads(line) for line in output.splitlines() if line.strip()]
        seen = {name.lstrip("@"): value for line in maps if line["type"] == "map" for name, value in line["data"].items()}
        self.assertEqual(seen.pop("bytes"), REQUESTS * 4096)
        self.assertEqual(set(seen), set(PROBES))
        self.assertGreaterEqual(min(seen.values()), REQUESTS, seen)
        # Every request that was taken is answered, and passes each moment.
        self.assertEqual(len(set(seen.values())), 1, seen)
