"""systemd's own journal takes a server's log with its fields, and journalctl finds it by them."""

import json
import os
import subprocess
import unittest

from support import LIMIT_S, MIB, STANDIN, PeerTest, need, spile_binary, text

JOURNALD = "/lib/systemd/systemd-journald"
# All in a mount namespace of its own, so that the host's journal neither takes part nor changes. Every read fails below the disk.
SCRIPT = r"""
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/journal /run/log/journal || exit 77
[ -s /etc/machine-id ] || { echo 0123456789abcdef0123456789abcdef > /run/id; mount --bind /run/id /etc/machine-id || exit 77; }
JOURNALD & journald=$!
for turn in $(seq 600); do [ -S /run/systemd/journal/stdout ] && break; sleep 0.1; done
[ -S /run/systemd/journal/stdout ] || { kill $journald; exit 77; }
nbdkit --foreground --unix /run/bad.sock --filter=error memory 16M error-pread=EIO error-pread-rate=100% 2>/run/nbdkit.log & nbdkit=$!
for turn in $(seq 600); do [ -S /run/bad.sock ] && break; sleep 0.1; done
systemd-cat sh -c 'JOURNAL_STREAM=$(stat -L -c %d:%i /proc/self/fd/2) exec SPILE serve "nbd+unix:///?socket=/run/bad.sock,name=bad" --nbd unix:/run/n.sock --control none' & server=$!
for turn in $(seq 600); do [ -S /run/n.sock ] && break; sleep 0.1; done
SPILE load "nbd+unix:///bad?socket=/run/n.sock" --bs 4k --ios 8 --depth 1 >/run/load.log 2>&1
kill $server; wait $server
journalctl --sync
journalctl --file /run/log/journal/*/system.journal -o json --no-pager SPILE_DISK=bad SPILE_ERROR_KIND=io
kill $nbdkit $journald
wait
"""


class Journal(PeerTest):
    def setUp(self):
        for program, package in (("unshare", "util-linux"), ("journalctl", "systemd"), ("systemd-cat", "systemd"), ("nbdkit", None)):
            need(program, package)
        if not os.path.exists(JOURNALD):
            self.skipTest("systemd-journald is not installed (package systemd)")
        if os.geteuid() != 0:
            self.skipTest("needs root for a mount namespace")
        if STANDIN:
            self.skipTest("needs Spile's log")
        super().setUp()

    def test_a_failed_request_is_found_by_its_fields(self):
        script = SCRIPT.replace("JOURNALD", JOURNALD, 1).replace("SPILE serve", f"{os.path.abspath(spile_binary())} serve")
        script = script.replace("SPILE load", f"{os.path.abspath(spile_binary())} load")
        # With a namespace of processes nothing is left over, however the script ends.
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", script]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=LIMIT_S)
        if done.returncode == 77:
            self.skipTest("systemd-journald cannot run here")
        said = text(done.stdout + done.stderr)
        records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
        self.assertTrue(records, said[-3000:])
        record = records[0]
        wanted = {
            "_TRANSPORT": "journal", "SYSLOG_IDENTIFIER": "spile", "PRIORITY": "4", "_COMM": "spile", "SPILE_FRONT": "NBD",
            "SPILE_LEN_BYTES": "4096", "SPILE_COUNT": "1", "SPILE_MODULE": "spile_front::log",
        }
        self.assertEqual({name: record.get(name) for name in wanted}, wanted, record)
        self.assertLess(int(record["SPILE_OFFSET_BYTES"]), 16 * MIB)
        self.assertIn("bad.sock", record["SPILE_PATH"])
        self.assertTrue(record["MESSAGE"].startswith("NBD request failed"), record["MESSAGE"])


if __name__ == "__main__":
    unittest.main()
