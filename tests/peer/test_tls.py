"""TLS with certificates that openssl made, seen by libnbd and by QEMU (both on GnuTLS), and our client on the servers
of QEMU and nbdkit."""

import socket
import subprocess
import time

from support import MIB, STANDIN, PeerTest, free_port, need, run, sha256, spile, text, write_scattered

SIZE_BYTES = 16 * MIB


class Certificates:
    """Makes certificates in the test's folder."""

    def certificates(self, name, host):
        """A folder with certificates of an authority, a server and a client, named as GnuTLS programs expect."""
        folder = self.path(name)
        folder.mkdir()
        self.authority(folder)
        self.certificate(folder, "server", host)
        self.certificate(folder, "client", "client")
        return folder

    def authority(self, folder):
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        names = ["-subj", "/CN=test authority", "-keyout", "ca-key.pem", "-out", "ca-cert.pem"]
        uses = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        run("openssl", "req", "-x509", *key, *names, *uses, "-days", 2, cwd=folder)

    def certificate(self, folder, role, host):
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        names = ["-subj", f"/CN={host}", "-keyout", f"{role}-key.pem", "-out", f"{role}.csr"]
        run("openssl", "req", *key, *names, cwd=folder)
        (folder / f"{role}.ext").write_text(
            f"basicConstraints=CA:FALSE\nsubjectAltName=DNS:{host},IP:127.0.0.1\n"
            f"extendedKeyUsage={role}Auth\nkeyUsage=digitalSignature\n"
        )
        run(
            "openssl", "x509", "-req", "-in", f"{role}.csr", "-CA", "ca-cert.pem", "-CAkey", "ca-key.pem",
            "-CAcreateserial", "-extfile", f"{role}.ext", "-out", f"{role}-cert.pem", "-days", 2,
            cwd=folder,
        )


class Tls(Certificates, PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("the stand-in is started without TLS")
        need("openssl")
        need("nbdinfo", "libnbd-bin")
        super().setUp()
        self.certificates("own", "localhost")

    def serve_tls(self, *more, required=True):
        own = self.path("own")
        extra = ["--tls-cert", own / "server-cert.pem", "--tls-key", own / "server-key.pem", *more]
        extra += ["--tls-required"] if required else []
        return self.serve(self.empty("disk.raw", SIZE_BYTES), tcp=True, extra=extra)

    def libnbd_uri(self, server, folder="own"):
        return f"{server.uri(scheme='nbds')}?tls-certificates={self.path(folder)}"

    def qemu_io(self, server, folder="own", ok=True):
        need("qemu-io", "qemu-utils")
        creds = f"tls-creds-x509,id=t,dir={self.path(folder)},endpoint=client"
        disk = f"driver=nbd,host=localhost,port={server.port},tls-creds=t"
        commands = ["-c", "write -P 0x5a 1M 2M", "-c", "read -P 0x5a 1M 2M", "-c", "flush"]
        done = run("qemu-io", "--object", creds, "--image-opts", *commands, disk, ok=ok)
        self.assertNotIn("verification failed", text(done.stdout))

    def start_tls_server(self, *command):
        """Runs another program's server on a free port, which stands behind the command; returns its URI without a query."""
        port = free_port()
        log = open(self.path("server.log"), "wb")
        self.addCleanup(log.close)
        words = [str(word).replace("PORT", str(port)) for word in command]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        end = time.monotonic() + 30
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return f"nbds://localhost:{port}/"
            self.assertIsNone(process.poll(), self.path("server.log").read_text())
            self.assertLess(time.monotonic(), end, f"{command} is not ready")
            time.sleep(0.02)

    def qemu_nbd_tls(self, image):
        need("qemu-nbd", "qemu-utils")
        creds = f"tls-creds-x509,id=t,dir={self.path('own')},endpoint=server,verify-peer=yes"
        options = ["--persistent", "--shared=8", "--format=raw", "--bind=127.0.0.1", "--port=PORT"]
        return self.start_tls_server("qemu-nbd", "--object", creds, "--tls-creds=t", *options, image)

    def nbdkit_tls(self, image):
        need("nbdkit")
        tls = ["--tls=require", f"--tls-certificates={self.path('own')}", "--tls-verify-peer"]
        return self.start_tls_server("nbdkit", "--foreground", "--port=PORT", *tls, "file", image)

    def assertOurClientWorks(self, uri, image):
        """Our client copies the image, writes to it with many requests in flight, and says what is wrong."""
        own = f"{uri}?tls-certificates={self.path('own')}"
        spile("convert", own, self.path("copy.raw"))
        self.assertEqual(sha256(image), sha256(self.path("copy.raw")))
        spile("load", own, "--rw", "randrw", "--ios", 500, "--verify", "--connections", 2, "--flush-every", 50)
        self.certificates("other", "localhost")
        done = spile("info", f"{uri}?tls-certificates={self.path('other')}", ok=False)
        self.assertIn("no authority that is believed", text(done.stderr))
        done = spile("info", f"{own}&tls-hostname=example.org", ok=False)
        self.assertIn("another host", text(done.stderr))
        done = spile("info", uri.replace("nbds:", "nbd:"), ok=False)
        self.assertIn("TLS", text(done.stderr))

    def test_our_client_on_qemu_nbd(self):
        image = write_scattered(self.path("source.raw"), SIZE_BYTES, seed=3)
        self.assertOurClientWorks(self.qemu_nbd_tls(image), image)

    def test_our_client_on_nbdkit(self):
        image = write_scattered(self.path("source.raw"), SIZE_BYTES, seed=4)
        self.assertOurClientWorks(self.nbdkit_tls(image), image)

    def test_our_client_on_a_server_without_tls(self):
        need("nbdkit")
        uri = self.start_tls_server("nbdkit", "--foreground", "--port=PORT", "--tls=off", "memory", SIZE_BYTES)
        done = spile("info", f"{uri}?tls-certificates={self.path('own')}", ok=False)
        self.assertIn("does not offer TLS", text(done.stderr))

    def test_libnbd_over_tls(self):
        server = self.serve_tls()
        done = run("nbdinfo", self.libnbd_uri(server))
        self.assertIn("with TLS", text(done.stdout))

    def test_copy_over_tls(self):
        source, back = self.raw("source.raw", SIZE_BYTES), self.path("back.raw")
        server = self.serve_tls()
        run("nbdcopy", "--flush", source, self.libnbd_uri(server))
        run("nbdcopy", self.libnbd_uri(server), back)
        self.assertSame(source, back)

    def test_qemu_over_tls(self):
        self.qemu_io(self.serve_tls())

    def test_plain_clients_are_refused(self):
        server = self.serve_tls()
        run("nbdinfo", server.uri(), ok=False)

    def test_plain_clients_are_served_where_tls_is_not_required(self):
        server = self.serve_tls(required=False)
        run("nbdinfo", server.uri())
        run("nbdinfo", self.libnbd_uri(server))

    def test_a_client_of_another_authority_refuses_the_server(self):
        self.certificates("other", "localhost")
        server = self.serve_tls()
        run("nbdinfo", self.libnbd_uri(server, "other"), ok=False)
        self.qemu_io(server, "other", ok=False)
        run("nbdinfo", self.libnbd_uri(server))

    def test_client_certificates_are_asked_for(self):
        self.certificates("other", "localhost")
        # Trusts the server, but shows a certificate that the server does not trust.
        own, other = self.path("own"), self.path("other")
        (other / "ca-cert.pem").write_bytes((own / "ca-cert.pem").read_bytes())
        server = self.serve_tls("--tls-ca", own / "ca-cert.pem")
        run("nbdinfo", self.libnbd_uri(server))
        run("nbdinfo", self.libnbd_uri(server, "other"), ok=False)
        self.qemu_io(server)

    def test_a_client_that_stops_in_the_handshake_holds_nobody(self):
        server = self.serve_tls()
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{server.port}"]
        silent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        self.addCleanup(silent.wait)
        self.addCleanup(silent.kill)
        time.sleep(0.2)
        run("nbdinfo", self.libnbd_uri(server))
