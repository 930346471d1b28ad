"""A paused disk: what cp copies of its file is what the disk holds, as qemu-img and 7-Zip read it, while a client waits."""

import shutil
import threading
import time

from support import LIMIT_S, MIB, PeerTest, STANDIN, read_by_seven_zip, run, seven_zip, spile, spile_json
from test_coalesce import Writer

SIZE_BYTES = 16 * MIB


class Pause(PeerTest):
    def setUp(self):
        if STANDIN:
            self.skipTest("needs spile pause")
        super().setUp()

    def wait_for_writes(self, writer, count):
        end = time.monotonic() + LIMIT_S
        while writer.writes < count:
            self.assertLess(time.monotonic(), end, "the client does not write")
            time.sleep(0.01)

    def contents(self, image):
        """What each program that is here reads of an image."""
        out = self.path("out.raw")
        spile("convert", image, out)
        yield "spile", out.read_bytes()
        out.unlink()
        if shutil.which("qemu-img"):
            run("qemu-img", "convert", "-O", "raw", image, out)
            yield "qemu-img", out.read_bytes()[:SIZE_BYTES]
            out.unlink()
        if seven_zip():
            yield "7-Zip", read_by_seven_zip(image)

    def test_cp_of_a_paused_disk(self):
        disk, copy = self.path("disk.vhd"), self.path("copy.vhd")
        spile("create", disk, "--size", str(SIZE_BYTES))
        server = self.serve(disk)
        writer = Writer(bytes(SIZE_BYTES), 3)
        work = threading.Thread(target=writer.work, args=(server.uri(),))
        work.start()
        for _ in range(4):
            self.wait_for_writes(writer, writer.writes + 50)
            pause = spile_json("pause", disk)["id"]
            # The write that waits now may be in no copy; one that was being answered is in it.
            time.sleep(0.2)
            writes, expected, torn = writer.writes, bytes(writer.content), writer.torn
            self.assertIsNotNone(torn, "the client does not wait")
            run("cp", disk, copy)
            time.sleep(0.1)
            self.assertEqual(writer.writes, writes, "a write of a paused disk was answered")
            self.assertIn("after a pause of", resume(disk, pause))
            for program, content in self.contents(copy):
                self.assertEqual(content, expected, f"{program} reads something else")
        writer.stops = True
        work.join(LIMIT_S)
        self.assertEqual(server.stop(), 0)


def resume(disk, pause):
    """Ends this pause; what the command says."""
    state = spile_json("show", disk)["state"]
    assert state == "paused", state
    return spile("resume", disk, "--pause", pause).stdout.decode()
