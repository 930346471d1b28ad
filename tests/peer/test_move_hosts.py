"""A disk is moved to another host, which is a network namespace, by TLS with certificates, while a client writes. The link is cut and the other
host's server is killed meanwhile."""

import json
import os
import threading
import time
import unittest

from support import LIMIT_S, MIB, STANDIN, PeerTest, Server, need, need_module, run, spile, spile_binary, spile_json
from test_coalesce import Writer
from test_tls import Certificates

NEAR, FAR, PORT = "10.77.13.1", "10.77.13.2", 10809


class HostServer(Server):
    """A server in a network namespace."""

    def __init__(self, netns, *arguments, **options):
        self.netns = netns
        super().__init__(*arguments, **options)

    def command(self, disks, address, extra):
        return ["ip", "netns", "exec", self.netns, *super().command(disks, address, extra)]


class HostReceiver(HostServer):
    """Takes disks in, in a network namespace; by TLS also on its Unix socket."""

    def command(self, disks, address, extra):
        return ["ip", "netns", "exec", self.netns, spile_binary(), "receive", *disks, "--nbd", address, *extra]


class MoveHosts(Certificates, PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("needs spile move")
        need("ip", "iproute2")
        need("openssl")
        if os.geteuid() != 0 or run("ip", "netns", "add", f"spile-{os.getpid()}-try", ok=None).returncode != 0:
            raise unittest.SkipTest("network namespaces need root")
        run("ip", "netns", "del", f"spile-{os.getpid()}-try")
        need_module("nbd", "python3-libnbd")
        super().setUp()
        self.certificates("own", "localhost")
        self.near, self.far = (f"spile-{os.getpid()}-{host}" for host in ("near", "far"))
        for host in (self.near, self.far):
            run("ip", "netns", "add", host)
            self.addCleanup(run, "ip", "netns", "del", host)
        run("ip", "-n", self.near, "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", self.far)
        for host, link, address in ((self.near, "here", NEAR), (self.far, "there", FAR)):
            run("ip", "-n", host, "address", "add", f"{address}/24", "dev", link)
            run("ip", "-n", host, "link", "set", link, "up")
            run("ip", "-n", host, "link", "set", "lo", "up")

    def link(self, state):
        run("ip", "-n", self.near, "link", "set", "here", state)

    def serve_on(self, host, disk, *extra):
        server = HostServer(host, self.folder, disk, extra=extra)
        self.addCleanup(server.__exit__, None, None, None)
        return server

    def receive_far(self):
        own, folder = self.path("own"), self.path("far")
        folder.mkdir(exist_ok=True)
        server = HostReceiver(
            self.far, self.folder, folder, extra=[
                "--nbd", f"tcp:{FAR}:{PORT}", "--tls-cert", own / "server-cert.pem", "--tls-key",
                own / "server-key.pem", "--tls-ca", own / "ca-cert.pem",
            ],
        )
        self.addCleanup(server.__exit__, None, None, None)
        return server

    def serve_far(self):
        own = self.path("own")
        return self.serve_on(
            self.far, self.path("come.raw"), "--nbd", f"tcp:{FAR}:{PORT}", "--control", "none", "--tls-required",
            "--tls-cert", own / "server-cert.pem", "--tls-key", own / "server-key.pem",
            "--tls-ca", own / "ca-cert.pem",
        )

    def job(self, name):
        return next(job for job in json.loads(spile("jobs", "--json").stdout)["jobs"] if job["id"] == name)

    def test_under_load_with_a_link_that_is_cut_and_a_server_that_is_killed(self):
        raw = self.raw("content.raw", size_bytes=96 * MIB)
        spile("convert", raw, self.path("disk.vhd"))
        spile("create", self.path("come.raw"), "--size", "96M")
        near, far = self.serve_on(self.near, self.path("disk.vhd")), self.serve_far()
        writer = Writer(raw.read_bytes(), seed=5)
        client = threading.Thread(target=writer.work, args=[near.uri()])
        client.start()
        to = f"nbds://{FAR}:{PORT}/?tls-certificates={self.path('own')}&tls-hostname=localhost"
        begun = spile_json("move", self.path("disk.vhd"), "--to", to, "--rate", "8M", "--background")
        for trouble in ("cut", "kill", "cut"):
            time.sleep(0.5)
            if trouble == "cut":
                self.link("down")
            else:
                far.kill()
            writes, end = writer.writes, time.monotonic() + LIMIT_S
            while writer.writes < writes + 50:
                self.assertLess(time.monotonic(), end, "the client waits for the other host")
                time.sleep(0.01)
            self.assertEqual(self.job(begun["id"])["state"], "running")
            if trouble == "cut":
                self.link("up")
            else:
                far = self.serve_far()
        spile("job", begun["id"], "rate", "none")
        end = time.monotonic() + 2 * LIMIT_S
        while (job := self.job(begun["id"]))["state"] == "running":
            self.assertLess(time.monotonic(), end, job)
            time.sleep(0.05)
        print(f"the hand-over: {json.dumps(job['motion'])}")
        self.assertEqual(job["state"], "done", job)
        self.assertFalse(self.path("disk.vhd").exists())
        writes = writer.writes
        while writer.writes < writes + 50:
            self.assertLess(time.monotonic(), end, "the client does not go on")
            time.sleep(0.01)
        writer.stops = True
        client.join(LIMIT_S)
        self.assertEqual(near.stop(), 0)
        self.assertEqual(far.stop(), 0)
        self.assertEqual(self.path("come.raw").read_bytes(), bytes(writer.content))
        # A server that is started with the old path is told where the disk is.
        refused = spile("serve", self.path("disk.vhd"), "--nbd", f"unix:{self.path('n')}", ok=False)
        self.assertIn(b"was moved to nbds://", refused.stderr)

    def goes_on(self, writer):
        writes, end = writer.writes, time.monotonic() + LIMIT_S
        while writer.writes < writes + 50:
            self.assertLess(time.monotonic(), end, "the client does not go on")
            time.sleep(0.01)

    def wait_for_done(self, name):
        end = time.monotonic() + 2 * LIMIT_S
        while (job := self.job(name))["state"] == "running":
            self.assertLess(time.monotonic(), end, job)
            time.sleep(0.05)
        self.assertEqual(job["state"], "done", job)
        return job

    def move_to_receiver(self, *options):
        """A server on the near host with a client that writes, and a move to the far one that has begun."""
        raw = self.raw("content.raw", size_bytes=96 * MIB)
        spile("convert", raw, self.path("disk.vhd"))
        self.near_server, self.far_server = self.serve_on(self.near, self.path("disk.vhd")), self.receive_far()
        self.writer = Writer(raw.read_bytes(), seed=6)
        self.client = threading.Thread(target=self.writer.work, args=[self.near_server.uri()])
        self.client.start()
        to = f"nbds://{FAR}:{PORT}/come.vhd?tls-certificates={self.path('own')}&tls-hostname=localhost"
        return to, spile_json("move", self.path("disk.vhd"), "--to", to, "--background", *options)

    def stop_writing(self):
        self.writer.stops = True
        self.client.join(LIMIT_S)
        self.assertFalse(self.client.is_alive())

    def far_bytes(self):
        run("qemu-img", "convert", "-f", "vpc", "-O", "raw", self.path("far") / "come.vhd", self.path("far.raw"))
        return self.path("far.raw").read_bytes()

    def test_taken_in_over_cut_links_and_kills_of_both_hosts(self):
        need("qemu-img", "qemu-utils")
        to, begun = self.move_to_receiver("--rate", "8M")
        for trouble in ("cut", "kill", "cut"):
            time.sleep(0.5)
            self.link("down") if trouble == "cut" else self.far_server.kill()
            self.goes_on(self.writer)
            self.assertEqual(self.job(begun["id"])["state"], "running")
            self.assertFalse((self.path("far") / "come.vhd").exists(), "a half is visible as a disk")
            if trouble == "cut":
                self.link("up")
            else:
                self.far_server = self.receive_far()
        # The near host dies, and its next server goes on with its own half.
        self.near_server.kill()
        self.client.join(LIMIT_S)
        half = (self.path("far") / ".come.vhd.spile-receiving").stat().st_ino
        self.near_server = self.serve_on(self.near, self.path("disk.vhd"))
        self.client = threading.Thread(target=self.writer.work, args=[self.near_server.uri()])
        self.client.start()
        jobs = json.loads(spile("jobs", "--json").stdout)["jobs"]
        begun = next(job for job in jobs if job["kind"] == "move" and job["path"] == str(self.path("disk.vhd")))
        spile("job", begun["id"], "rate", "none")
        job = self.wait_for_done(begun["id"])
        print(f"the hand-over: {json.dumps(job['motion'])}")
        self.assertEqual((self.path("far") / "come.vhd").stat().st_ino, half)
        self.assertFalse(self.path("disk.vhd").exists())
        self.goes_on(self.writer)
        self.stop_writing()
        self.assertEqual(self.near_server.stop(), 0)
        self.assertEqual(self.far_server.stop(), 0)
        self.assertEqual(self.far_bytes(), bytes(self.writer.content))

    def test_with_its_parents_over_cut_links_and_kills_of_both_hosts(self):
        raw = self.raw("content.raw", size_bytes=96 * MIB)
        spile("convert", raw, self.path("golden.vhd"))
        spile("create", self.path("disk.vhd"), "--parent", self.path("golden.vhd"))
        near, far = self.serve_on(self.near, self.path("disk.vhd")), self.receive_far()
        writer = Writer(raw.read_bytes(), seed=7)
        client = threading.Thread(target=writer.work, args=[near.uri()])
        client.start()
        to = f"nbds://{FAR}:{PORT}/come.vhd?tls-certificates={self.path('own')}&tls-hostname=localhost"
        # Little of the parent is data.
        begun = spile_json("move", self.path("disk.vhd"), "--to", to, "--chain", "keep", "--rate", "256K", "--background")
        for trouble in ("cut", "kill", "cut"):
            time.sleep(0.5)
            self.link("down") if trouble == "cut" else far.kill()
            self.goes_on(writer)
            self.assertEqual(self.job(begun["id"])["state"], "running")
            self.assertFalse((self.path("far") / "golden.vhd").exists(), "half a parent has its name")
            if trouble == "cut":
                self.link("up")
            else:
                far = self.receive_far()
        near.kill()
        client.join(LIMIT_S)
        near = self.serve_on(self.near, self.path("disk.vhd"))
        client = threading.Thread(target=writer.work, args=[near.uri()])
        client.start()
        jobs = json.loads(spile("jobs", "--json").stdout)["jobs"]
        begun = next(job for job in jobs if job["kind"] == "move" and job["path"] == str(self.path("disk.vhd")))
        spile("job", begun["id"], "rate", "none")
        job = self.wait_for_done(begun["id"])
        self.assertEqual((job["motion"]["parents_done"], job["motion"]["parents_total"]), (1, 1))
        self.goes_on(writer)
        writer.stops = True
        client.join(LIMIT_S)
        self.assertEqual((near.stop(), far.stop()), (0, 0))
        spile("convert", self.path("far") / "come.vhd", self.path("far.raw"))
        self.assertEqual(self.path("far.raw").read_bytes(), bytes(writer.content))
        spile("compare", self.path("golden.vhd"), self.path("far") / "golden.vhd")

    def test_a_copy_for_a_guest_that_moves_itself_is_whole_or_not_there(self):
        need("qemu-img", "qemu-utils")
        to, begun = self.move_to_receiver("--mirror-only")
        end = time.monotonic() + 2 * LIMIT_S
        while self.job(begun["id"])["motion"]["phase"] not in ("in step", "catching up"):
            self.assertLess(time.monotonic(), end, "it does not come in step")
            time.sleep(0.05)
        self.stop_writing()
        self.link("down")
        spile("job", begun["id"], "finish")
        time.sleep(0.5)
        self.assertEqual(self.job(begun["id"])["state"], "running", "finished without the other host")
        self.assertFalse((self.path("far") / "come.vhd").exists())
        self.link("up")
        self.wait_for_done(begun["id"])
        # Nobody has the far image open any more: a server of that host takes it.
        server = self.serve_on(self.far, self.path("far") / "come.vhd", "--control", "none")
        self.assertEqual(server.stop(), 0)
        self.assertEqual(self.near_server.stop(), 0)
        self.assertEqual(self.far_server.stop(), 0)
        self.assertEqual(self.far_bytes(), bytes(self.writer.content))

    def test_nobody_without_a_certificate_gets_a_disk_in_or_out(self):
        self.receive_far()
        spile("create", self.path("disk.vhd"), "--size", "8M")
        for scheme, query in (("nbd", ""), ("nbds", "?tls-hostname=localhost")):
            near = ["ip", "netns", "exec", self.near, spile_binary()]
            to = f"{scheme}://{FAR}:{PORT}/come.vhd{query}"
            refused = run(*near, "move", self.path("disk.vhd"), "--to", to, ok=None)
            self.assertNotEqual(refused.returncode, 0)
            self.assertEqual(list(self.path("far").iterdir()), [])
