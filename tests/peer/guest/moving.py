"""Two hosts, which are network namespaces with a link between them: a guest with its QEMU and its server moves from the one to the other.

What is done on the hosts is what docs/move.md says, block by block.
"""

import json
import os
import pathlib
import re
import shlex
import string
import sys
import unittest

from support import LIMIT_S, TOP, Server, run, spile_binary, text
from vhost import VhostMachine, listens, wait_until

PAGE = TOP / "docs" / "move.md"
SECTION = "## The guest moves too\n"
QMP = pathlib.Path(__file__).with_name("qmp_once.py")


def recipe():
    """The blocks of the page's section: (host, commands) of each, in their order."""
    section = PAGE.read_text().split(SECTION)[1].split("\n## ")[0]
    blocks = re.findall(r"```sh[^\n]*\n# on (this|the other) host\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 4, f"the recipe in {PAGE} has {len(blocks)} blocks"
    return blocks


class Host:
    """A namespace with a folder, a server and a QEMU of its own."""

    def __init__(self, name, folder, address, environment):
        self.name = f"spile-{os.getpid()}-{name}"
        self.folder = folder / name
        self.folder.mkdir()
        self.address = address
        self.server = self.machine = self.serve_words = None
        self.environment = {**environment, "SPILE_RUN_DIR": str(self.folder / "run")}
        (self.folder / "run").mkdir()
        run("ip", "netns", "add", self.name)

    def inside(self, *command):
        return ["ip", "netns", "exec", self.name, *map(str, command)]

    def start_server(self):
        """Starts the server as before, or as `serve_words` say."""
        self.server = HostServer(self, self.serve_words)

    def start_machine(self, lab, incoming=False):
        self.machine = VhostMachine(
            lab.kernel, lab.initramfs, self.folder, self, ["disk"], self.name[-4:], incoming,
            more=["-qmp", "unix:vm.qmp,server=on,wait=off"], prefix=self.inside(), cwd=self.folder,
        )
        lab.machines.append(self.machine)

    def of(self, _name, _place):
        """The disk's socket, as QEMU finds it from its folder."""
        return "disk.sock"

    def shell(self, script, ok=True):
        """Runs a block of the page. Programs that are to go on are not in it."""
        prelude = f'set -euo pipefail\nqmp() {{ {sys.executable} {QMP} vm.qmp "$1"; }}\n'
        prelude += f'spile() {{ "{spile_binary()}" "$@"; }}\n'
        done = run(
            *self.inside("timeout", LIMIT_S, "bash", "-c", prelude + script), ok=ok, env=self.environment, cwd=self.folder,
            limit_s=LIMIT_S + 10,
        )
        return text(done.stdout) + text(done.stderr)

    def follow(self, lab, script):
        """Does a block of the page. What goes on in the background is started from here: the server and QEMU."""
        lines = []
        for line in script.splitlines():
            if line.startswith(("spile serve ", "start_qemu")):
                self.shell("\n".join(lines))
                lines = []
            if line.startswith("spile serve "):
                self.serve_words = shlex.split(string.Template(line.removesuffix("&")).substitute(self.environment))[2:]
                self.start_server()
            elif line.startswith("start_qemu"):
                self.start_machine(lab, incoming="-incoming" in line)
            else:
                lines.append(line)
        return self.shell("\n".join(lines))

    def begin_mirror(self, *words):
        """Begins to copy the disk; returns the job's name."""
        begun = self.shell(f"spile move disk --to nbd://$THERE:10809/disk --mirror-only --json {' '.join(words)}")
        return json.loads(begun)["id"]

    def job(self, name=None):
        """What is told of the last job, or of the one of that name."""
        jobs = json.loads(self.shell("spile jobs --json"))["jobs"]
        return next((one for one in reversed(jobs) if name in (None, one["id"])), None)

    def wait_phase(self, phase):
        """Waits until the last job is at this phase; returns the job's name."""
        def there():
            job = self.job()
            return job and job["state"] == "running" and (job.get("motion") or {}).get("phase") == phase and job["id"]

        return wait_until(there, LIMIT_S, f"the phase {phase}: {self.job()}")

    def end_machine(self):
        if self.machine:
            self.machine.close()
        self.machine = None

    def destroy(self):
        self.end_machine()
        if self.server and self.server.ended is None:
            self.server.kill()
        run("ip", "netns", "del", self.name, ok=None)


class HostServer(Server):
    """A server in a host's namespace, started as on the page."""

    def __init__(self, host, words):
        self.host = host
        self.words = words
        super().__init__(host.folder, at=host.folder / "disk.sock")

    def command(self, _disks, _address, _extra):
        folder, run_dir = self.host.folder, self.host.environment["SPILE_RUN_DIR"]
        return self.host.inside("env", "-C", folder, f"SPILE_RUN_DIR={run_dir}", spile_binary(), "serve", *self.words)

    def answers(self):
        return listens(self.socket)


class Hosts:
    """Both hosts, the link between them, and what is moved."""

    def __init__(self, folder, size_bytes):
        there = "10.77.14.2"
        environment = {"THERE": there, "SIZE": str(size_bytes), "SERIAL": "SPILE-disk"}
        self.here = self.there = None
        try:
            self.here = Host("here", folder, "10.77.14.1", environment)
            self.there = Host("away", folder, there, environment)
            run("ip", "-n", self.here.name, "link", "add", "lan", "type", "veth", "peer", "name", "lan", "netns", self.there.name)
            for host in (self.here, self.there):
                run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "lan")
                for link in ("lan", "lo"):
                    run("ip", "-n", host.name, "link", "set", link, "up")
        except BaseException:
            self.destroy()
            raise

    def cut(self, is_cut):
        run("ip", "-n", self.here.name, "link", "set", "lan", "down" if is_cut else "up")

    def destroy(self):
        for host in (self.here, self.there):
            if host:
                host.destroy()


def need_namespaces():
    """Skips the tests where no namespaces can be made."""
    name = f"spile-{os.getpid()}-try"
    if os.geteuid() != 0 or run("ip", "netns", "add", name, ok=None).returncode != 0:
        raise unittest.SkipTest("network namespaces need root")
    run("ip", "netns", "del", name)
