"""Disks of a domain, by xenstore nodes written by hand, as a tool stack would write them."""

import shlex

FIRST_NUMBER = 202 << 8
PARTITIONS = 16


class Vbd:
    """The disk `device` (xvda, xvdb, …) of a domain, whose backend lives in dom0.

    `more` are the nodes that tell the backend what to serve.
    """

    def __init__(self, host, device, more, domain=0, kind="vbd", mode="w"):
        self.host = host
        self.device = device
        self.domain = domain
        self.number = FIRST_NUMBER + PARTITIONS * (ord(device[-1]) - ord("a"))
        self.back = f"/local/domain/0/backend/{kind}/{domain}/{self.number}"
        self.front = f"/local/domain/{domain}/device/vbd/{self.number}"
        self.backend_nodes = {
            "frontend": self.front, "frontend-id": domain, "online": 1, "removable": 1, "state": 1,
            "mode": mode, "device-type": "disk", "dev": device, **more,
        }

    def attach(self):
        """Writes the nodes of both sides at once: the kernel's backend looks only once for its front end."""
        front = {
            "backend": self.back, "backend-id": 0, "virtual-device": self.number, "device-type": "disk",
            "protocol": "x86_64-abi", "state": 1,
        }
        self.host.ask(
            f"xenstore-write {nodes(self.back, self.backend_nodes)} {nodes(self.front, front)}"
            f" && xenstore-chmod -r {self.back} n0 r{self.domain}"
            f" && xenstore-chmod -r {self.front} n{self.domain} r0"
        )
        return self

    def wait_connected(self):
        """Waits until the front end has connected to the disk; in dom0 also until the disk can be opened."""
        self.wait_state(self.front, 4)
        if self.domain == 0:
            self.host.ask(f"until_true '[ -b /dev/{self.device} ]'")
        return self

    def wait_state(self, side, state):
        status, words = self.host.ask_status(f"until_true '[ \"$(xenstore-read {side}/state)\" = {state} ]'")
        if status != 0:
            raise AssertionError(f"{side} does not come to state {state}: {words[-300:]}\n{self.story()}")

    def detach(self):
        """Detaches the disk in order. Then removes its nodes, and with them the front end's device."""
        self.host.ask(f"xenstore-write {self.back}/online 0 {self.back}/state 5")
        self.wait_state(self.front, 6)
        self.wait_state(self.back, 6)
        self.remove()

    def remove(self):
        self.host.ask(f"xenstore-rm {self.front}; xenstore-rm {self.back}; true")
        if self.domain == 0:
            self.host.ask(f"until_true '[ ! -e /dev/{self.device} ]'")

    def sectors(self):
        """Returns the size that the front end sees, in units of 512 bytes."""
        return int(self.host.ask(f"cat /sys/block/{self.device}/size"))

    def queue(self, name):
        """Returns a limit of the front end's queue."""
        return self.host.ask(f"cat /sys/block/{self.device}/queue/{name}")

    def done(self):
        """Returns how many reads and writes the front end has completed, and how many flushes."""
        fields = list(map(int, self.host.ask(f"cat /sys/block/{self.device}/stat").split()))
        return fields[0] + fields[4], fields[15]

    def story(self):
        """Returns the states of both sides."""
        return self.host.ask(f"xenstore-ls -f {self.back}; xenstore-ls -f {self.front}; dmesg | tail -n 20")


def nodes(folder, values):
    """`PATH VALUE` pairs for xenstore-write, which writes them in one transaction."""
    return " ".join(f"{folder}/{name} {shlex.quote(str(value))}" for name, value in values.items())
