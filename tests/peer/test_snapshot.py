"""Snapshots of a disk while a client writes and the server is killed: each holds exactly what was written by one moment of its making, as
7-Zip and qemu-img read it, and never changes."""

import shutil
import threading
import time

from support import LIMIT_S, MIB, PeerTest, STANDIN, check, read_by_seven_zip, run, seven_zip, spile, spile_json
from test_coalesce import Writer

SIZE_BYTES = 16 * MIB


class Remembering(Writer):
    """A client that remembers all its writes in their order."""

    def __init__(self, content, seed):
        super().__init__(content, seed)
        self.base, self.issued, self.torn_at = bytes(content), [], 0

    def step(self, handle):
        if self.torn:
            return super().step(handle)
        state = self.dice.getstate()
        length = self.dice.randrange(1, 128) * 512
        at = self.dice.randrange(0, len(self.content) - length) // 512 * 512
        self.issued.append((at, self.dice.randbytes(length)))
        self.dice.setstate(state)
        super().step(handle)

    def state_after(self, count):
        content = bytearray(self.base)
        for at, data in self.issued[:count]:
            content[at:at + len(data)] = data
        return content

    def find(self, frozen, least, most):
        """True when `frozen` is what the disk held after some number of writes between these."""
        content = self.state_after(least)
        for at, data in self.issued[least:most]:
            if content == frozen:
                return True
            content[at:at + len(data)] = data
        return content == frozen


class Snapshots(PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("needs spile snapshot")
        super().setUp()

    def read(self, image):
        """What an image holds: by Spile, and by 7-Zip where that is installed."""
        out = self.path("out.raw")
        out.unlink(missing_ok=True)
        spile("convert", image, out)
        content = out.read_bytes()
        if seven_zip():
            self.assertEqual(read_by_seven_zip(image), content, f"7-Zip reads {image} otherwise")
        if shutil.which("qemu-img"):
            found = run("qemu-img", "info", "-U", image).stdout
            self.assertIn(b"vpc", found)
        return content

    def wait_for_writes(self, writer, count):
        end = time.monotonic() + LIMIT_S
        while writer.writes < count:
            self.assertLess(time.monotonic(), end, "the client does not write")
            time.sleep(0.01)

    def freeze(self, writer, name):
        """A snapshot under load; returns what it may hold."""
        self.wait_for_writes(writer, writer.writes + 20)
        least = writer.writes
        made = spile_json("snapshot", self.path("disk.vhd"), "--name", name)
        most = len(writer.issued)
        self.assertEqual(made["snapshot_path"], str(self.path(f"disk-{name}.vhd").resolve()))
        self.assertNotIn("trouble", made)
        self.assertGreater(made["longest_stall_us"], 0)
        return name, least, most

    def test_snapshots_under_load_and_kills(self):
        disk = self.path("disk.vhd")
        spile("create", disk, "--size", str(SIZE_BYTES))
        writer, frozen = Remembering(bytes(SIZE_BYTES), 1), []
        for life in range(3):
            server = self.serve(disk)
            writer.stops = False
            work = threading.Thread(target=writer.work, args=(server.uri(),))
            work.start()
            for number in range(3):
                frozen.append(self.freeze(writer, f"s{life}{number}"))
            writer.stops = life == 2
            if life == 2:
                work.join(LIMIT_S)
                self.assertEqual(server.stop(), 0)
            else:
                server.kill()
                work.join(LIMIT_S)
            # The first command that writes to the disk waits for the lock of the process that was killed.
            spile("info", disk)
            for name, least, most in frozen:
                content = self.read(self.path(f"disk-{name}.vhd"))
                self.assertTrue(writer.find(content, least, most), f"{name} holds no moment of its making")
        self.assertEqual(self.read(disk), bytes(writer.content))
        layers = spile_json("info", "--chain", disk)["layers"]
        self.assertEqual(len(layers), 10)
        for layer in layers:
            check(layer["path"])
        left = sorted(path.name for path in disk.parent.iterdir() if ".spile-" in path.name)
        self.assertEqual(left, [])
