"""Thin images on block devices that grow while a client writes: loop devices over files, and a hook that makes them longer.

A loop device is made longer as a logical volume is: the file below it first, then the device (`losetup --set-capacity`). The clients are fio, which
verifies what it has written, and libnbd. `qemu-img check` looks at what is left.
"""

import json
import os
import stat
import subprocess
import threading
import time

from support import KIB, LIMIT_S, MIB, STANDIN, PeerTest, check_by_qemu, need, need_module, run, spile, spile_binary, text

nbd = need_module("nbd", "python3-libnbd")

DISK_BYTES = 256 * MIB
FIRST_BYTES = 8 * MIB


class Thin(PeerTest):
    """A disk of 256 MiB on a loop device of 8 MiB."""

    def setUp(self):
        if STANDIN:
            self.skipTest("the stand-in does not have devices grow")
        need("qemu-img", "qemu-utils")
        super().setUp()

    def loop(self):
        """A loop device over a file full of junk, as a volume is."""
        self.file = self.path("device.raw")
        self.file.write_bytes(os.urandom(FIRST_BYTES))
        return self.loop_device(self.file)

    def thin(self, form):
        """A device with an empty thin image."""
        device = self.loop()
        if form == "qcow2":
            run("qemu-img", "create", "-q", "-f", "qcow2", device, DISK_BYTES)
        else:
            # What makes a VHD on a volume writes it there from its start.
            spile("create", self.path("empty.vhd"), "--size", DISK_BYTES)
            run("dd", f"if={self.path('empty.vhd')}", f"of={device}", "conv=notrunc", "status=none")
        return device

    def hook(self, body, name="hook"):
        """A command for `--grow`. It notes its arguments, and does what `body` says."""
        hook = self.path(name)
        script = f"""#!/bin/sh
            set -e
            echo "$@" "$SPILE_DISK" >> {self.path("calls")}
            longer() {{
                # The file gains junk, as a volume gains what lay there before.
                test "$(stat -c %s {self.file})" -ge "$3" ||
                    head -c $(($3 - $(stat -c %s {self.file}))) /dev/urandom >> {self.file}
                losetup --set-capacity "$1"
            }}
            {body}
        """
        hook.write_text("\n".join(line.strip() for line in script.strip().splitlines()) + "\n")
        hook.chmod(hook.stat().st_mode | stat.S_IXUSR)
        return hook

    def calls(self):
        path = self.path("calls")
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def serve_thin(self, device, form, *options):
        return self.serve(f"{device},name=thin,format={form}", extra=options)

    def show(self):
        return json.loads(spile("show", "thin", "--json").stdout)

    def client(self, server):
        handle = nbd.NBD()
        handle.connect_uri(server.uri("thin"))
        return handle

    def eventually(self, what, is_so):
        end = time.monotonic() + LIMIT_S
        while not is_so():
            self.assertLess(time.monotonic(), end, what)
            time.sleep(0.05)

    def check_image(self, device, form, was_killed=False):
        """Nothing contradicts itself. Clusters that a killed server had prepared are leaks (exit code 3)."""
        if form != "qcow2":
            return check_on_device(device)
        check_by_qemu(device, was_killed)

    def fio(self, server, *options):
        need("fio")
        if "nbd" not in text(run("fio", "--enghelp").stdout).split():
            self.skipTest("this fio has no nbd engine")
        job = ["fio", "--name=job", "--ioengine=nbd", f"--uri={server.uri('thin')}", "--thread", "--verify_state_save=0"]
        done = run(*job, "--output-format=json", "--randseed=7", *options)
        out = text(done.stdout)
        result = json.loads(out[out.index("{"):])
        self.assertEqual([job["error"] for job in result["jobs"]], [0] * len(result["jobs"]))

    def test_a_client_writes_through_many_growths_and_sees_no_error(self):
        for form in ("qcow2", "vhd"):
            with self.subTest(form):
                device = self.thin(form)
                hook = self.hook('sleep 0.1; longer "$@"')
                server = self.serve_thin(device, form, "--grow", hook, "--grow-ahead", "4M")
                options = ["--rw=randwrite", "--bs=64k", "--size=96m", "--iodepth=16", "--verify=crc32c"]
                self.fio(server, *options, "--do_verify=1", "--verify_fatal=1", "--verify_backlog=64")
                self.eventually("no hook runs", lambda: not self.show()["room"]["is_growing"])
                room = self.show()["room"]
                self.assertEqual((room["device"], room["failed_total"]), (device, 0), server.output())
                self.assertGreater(room["grown_total"], 3)
                self.assertEqual(room["grown_total"], len(self.calls()))
                self.assertEqual({call[0] for call in self.calls()}, {device})
                self.assertEqual({call[3] for call in self.calls()}, {"thin"})
                # Each call gets the length that the last one has made.
                lengths = [int(call[1]) for call in self.calls()]
                self.assertEqual(lengths, sorted(set(lengths)))
                self.assertEqual(server.stop(), 0)
                self.check_image(device, form)
                # What was written is there for the next server, too.
                server = self.serve_thin(device, form)
                self.fio(server, *options, "--verify_only=1")
                self.assertEqual(server.stop(), 0)
                self.path("calls").unlink()

    def test_a_server_that_is_killed_in_the_midst_has_lost_nothing(self):
        for form in ("qcow2", "vhd"):
            with self.subTest(form):
                device = self.thin(form)
                hook = self.hook('sleep 0.2; longer "$@"')
                written, at = {}, 0
                for _ in range(4):
                    server = self.serve_thin(device, form, "--grow", hook, "--grow-ahead", "1M")
                    handle = self.client(server)
                    before = len(self.calls())
                    while len(self.calls()) < before + 2:
                        data = os.urandom(64 * KIB)
                        handle.pwrite(data, at)
                        written[at] = data
                        at += 64 * KIB
                    # The hook has begun, and goes on without its server.
                    server.kill()
                    self.eventually("the hook ends", lambda: not is_running(hook))
                    self.check_image(device, form, was_killed=True)
                server = self.serve_thin(device, form)
                handle = self.client(server)
                for at, data in written.items():
                    self.assertEqual(handle.pread(len(data), at), data, f"{form}: {at}")
                handle.shutdown()
                self.assertEqual(server.stop(), 0)
                self.path("calls").unlink()

    def fill(self, handle, results):
        """Writes until there is an error, or enough is written. Notes what came."""
        try:
            for at in range(0, 32 * MIB, 256 * KIB):
                handle.pwrite(os.urandom(256 * KIB), at)
            results.append("written")
        except nbd.Error as problem:
            results.append(problem.errnum)

    def test_a_hook_that_fails_gives_no_space_and_is_not_run_for_each_write(self):
        device = self.thin("qcow2")
        hook = self.hook("echo 'no extents are free' >&2; exit 5")
        server = self.serve_thin(device, "qcow2", "--grow", hook, "--grow-ahead", "1M")
        handle, results = self.client(server), []
        begun = time.monotonic()
        self.fill(handle, results)
        self.assertEqual(results, [28], "ENOSPC")
        for at in range(64, 128):
            self.assertRaises(nbd.Error, handle.pwrite, bytes(64 * KIB), at * MIB)
        # The pauses are 1, 2, 4 … seconds.
        self.assertLessEqual(len(self.calls()), 2 + (time.monotonic() - begun))
        room = self.show()["room"]
        self.assertIn("no extents are free", room["last_failure"]["message"])
        self.assertGreater(room["wants_bytes"], FIRST_BYTES)
        self.assertIn("no extents are free", server.output())
        self.assertIn("no room was made the last time", text(spile("show", "thin").stdout))
        # Reads and rewrites go on.
        handle.pwrite(b"again".ljust(512, b"!"), 0)
        self.assertEqual(handle.pread(512, 0), b"again".ljust(512, b"!"))
        handle.shutdown()
        self.assertEqual(server.stop(), 0)
        self.check_image(device, "qcow2")

    def test_a_hook_that_hangs_is_ended_and_one_that_succeeds_late_is_waited_for(self):
        device = self.thin("qcow2")
        hook = self.hook("sleep 1000")
        server = self.serve_thin(device, "qcow2", "--grow", hook, "--grow-ahead", "1M", "--grow-timeout", "500ms")
        handle, results = self.client(server), []
        self.fill(handle, results)
        self.assertEqual(results, [28])
        self.assertIn("has not ended", self.show()["room"]["last_failure"]["message"])
        self.assertFalse(is_running(hook), "the hook was not ended")
        handle.shutdown()
        self.assertEqual(server.stop(), 0)
        # One that takes its time is waited for: the disk says so, and the client hears of no error.
        gate = self.path("gate")
        hook = self.hook(f'while ! test -e {gate}; do sleep 0.05; done; longer "$@"')
        server = self.serve_thin(device, "qcow2", "--grow", hook, "--grow-ahead", "16M")
        handle, results = self.client(server), []
        writer = threading.Thread(target=self.fill, args=(handle, results))
        writer.start()
        self.eventually("the disk waits", lambda: self.show()["state"] == "waiting")
        self.assertTrue(self.show()["room"]["is_growing"])
        self.assertEqual(results, [])
        gate.touch()
        writer.join(LIMIT_S)
        self.assertEqual(results, ["written"])
        handle.shutdown()
        self.assertEqual(server.stop(), 0)
        self.check_image(device, "qcow2")

    def test_without_a_hook_whoever_watches_makes_the_device_longer(self):
        for form in ("qcow2", "vhd"):
            with self.subTest(form):
                device = self.thin(form)
                by_hand = self.hook('longer "$@"', "by-hand")
                server = self.serve_thin(device, form, "--on-error", "pause", "--grow-ahead", "1M")
                handle, results = self.client(server), []
                writer = threading.Thread(target=self.fill, args=(handle, results))
                watch = [spile_binary(), "events", "thin", "--follow", "--json"]
                watcher = subprocess.Popen(watch, stdout=subprocess.PIPE, text=True)
                self.addCleanup(watcher.kill)
                heard = []

                def act():
                    for line in watcher.stdout:
                        what = json.loads(line)["what"]
                        heard.extend(what)
                        if wanted := what.get("room_wanted"):
                            run(by_hand, wanted["device"], wanted["device_bytes"], wanted["wants_bytes"])
                            spile("resume", "thin")

                actor = threading.Thread(target=act)
                actor.start()
                writer.start()
                writer.join(LIMIT_S)
                self.assertEqual(results, ["written"], server.output())
                self.assertIn("spile resume thin", server.output())
                handle.shutdown()
                self.assertEqual(server.stop(), 0)
                actor.join(LIMIT_S)
                self.assertEqual(watcher.wait(LIMIT_S), 0, "it ends with the server")
                self.assertLessEqual({"room_wanted", "room_made"}, set(heard))
                self.check_image(device, form)

    def test_what_needs_no_command_refuses_one(self):
        device = self.loop()
        hook = self.hook("exit 0")
        refused = [f"{self.empty()},format=raw", f"{device},format=raw"]
        spile("create", self.path("file.qcow2"), "--size", "64M")
        refused.append(str(self.path("file.qcow2")))
        for disk in refused:
            done = spile("serve", disk, "--grow", hook, "--nbd", "unix:refused.sock", ok=False, cwd=self.folder)
            self.assertIn("--grow is for", text(done.stderr))
        done = spile("serve", refused[-1], "--grow", "hook", "--nbd", "unix:refused.sock", ok=False, cwd=self.folder)
        self.assertIn("no absolute path", text(done.stderr))

    def test_an_idle_disk_wakes_nobody(self):
        device = self.thin("qcow2")
        hook = self.hook('longer "$@"')
        server = self.serve_thin(device, "qcow2", "--grow", hook, "--grow-ahead", "1M")
        handle = self.client(server)
        handle.pwrite(bytes(64 * KIB), 0)
        handle.shutdown()
        self.eventually("nobody wakes up for two seconds", lambda: self.is_quiet(server.process.pid))
        self.assertEqual(self.calls(), [])

    def is_quiet(self, pid):
        """True when no thread of the process has run for two seconds."""
        before = switches(pid)
        time.sleep(2)
        return switches(pid) == before


def is_running(hook):
    """True while a shell runs the script."""
    return run("pgrep", "--full", f"/bin/sh {hook}", ok=None).returncode == 0


def switches(pid):
    """How often the threads of a process have begun to sleep."""
    count = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/status") as status:
            count += sum(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))
    return count


def check_on_device(device):
    """`spile check` finds nothing but leaks."""
    done = spile("check", device, "--format", "vhd", ok=None)
    if done.returncode not in (0, 4):
        raise AssertionError(f"check {device}: {done.returncode}\n{text(done.stdout + done.stderr)}")
