"""Disks that `spile xen-backend` serves to Linux's blkfront: what the tests of them share.

What the front saw of each image is compared, at the end, with what is in the image on the machine that runs the tests.
"""

from backends import backend, need_backend
from base import XenTest
from disks import Vbd
from guests import domu_root
from support import MIB, STANDIN, chain, check, run, sha256, spile, write_scattered

SIZE_MIB = 64


class ServedTest(XenTest):
    # Of all classes together: the backend that runs, the path of each image on the host, the checksums of parents, and the
    # checksums that front ends have read, by image.
    backend = None
    disks = {}
    parents = {}
    seen = {}

    @classmethod
    def setUpClass(cls):
        need_backend()
        super().setUpClass()

    @staticmethod
    def images(folder):
        raws = [domu_root(folder, folder / f"{name}.raw", seed) for seed, name in enumerate(("xl", "hand"))]
        raws += [write_scattered(folder / f"{name}.raw", SIZE_MIB * MIB, 9) for name in ("files", "work")]
        ServedTest.disks = {raw.stem: f"/data/{chain(raw).name}" for raw in raws}
        plain = folder / "plain.raw"
        plain.write_bytes(b"")
        ServedTest.disks["plain"] = "/data/plain.raw"
        ServedTest.parents = parents(folder, raws)
        ServedTest.seen = {"files": sha256(folder / "files.raw")}
        ServedTest.backend = None
        children = [] if STANDIN else [folder / f"{raw.stem}.vhd" for raw in raws]
        return [*(children or raws), plain, *(folder / name for name in ServedTest.parents)]

    @staticmethod
    def prepare(host):
        host.ask(f"[ -s /data/plain.raw ] || truncate -s {SIZE_MIB}M /data/plain.raw; mkdir -p /mnt")
        ServedTest.backend = backend(host)

    @staticmethod
    def stop_backend():
        """Ends the backend in order, if one runs. The next test that needs one starts another."""
        if XenTest.running and ServedTest.backend:
            ServedTest.backend.stop()
            ServedTest.backend = None
            XenTest.prepared.discard(ServedTest)

    @staticmethod
    def compare_images():
        """Checks the images as the host has left them."""
        cls = ServedTest
        for name, before in cls.parents.items():
            if sha256(cls.fetch(f"{name}")) != before:
                raise AssertionError(f"{name} changed under its child")
        for name, path in cls.disks.items():
            image = cls.fetch(path.removeprefix("/data/"))
            if image.suffix == ".vhd":
                check(image)
                flat = cls.folder / f"flat-{name}.raw"
                spile("convert", image, flat)
                image = flat
            if name in cls.seen and sha256(image) != cls.seen[name]:
                raise AssertionError(f"{name} holds something else than the front saw")
            if name in ("xl", "hand"):
                run("e2fsck", "-fn", image)

    def attach(self, name, device="xvda", access="copy"):
        host = self.running
        host.ask("load xen_blkfront")
        return Vbd(host, device, self.backend.nodes(self.disks[name], access)).attach().wait_connected()

    def detach(self, vbd, name):
        """Notes the checksum of what the front end reads, which the image must hold, and detaches the disk."""
        self.seen[name] = self.running.ask(f"sum_of /dev/{vbd.device}")
        vbd.detach()
        self.backend.release(self.disks[name])

    @classmethod
    def story(cls):
        words = super().story()
        # A host that has not come up has no backend yet.
        if cls.running is None or cls.backend is None:
            return words
        return f"the backend:\n{cls.last_words(cls.backend.said)}\n{words}"


def parents(folder, raws):
    """Returns the name and the checksum of each parent that the chains of these images have."""
    paths = [folder / f"{raw.stem}-parent.vhd" for raw in raws]
    return {path.name: sha256(path) for path in paths if path.exists()}
