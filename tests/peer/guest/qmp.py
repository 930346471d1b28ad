"""QEMU's machine protocol: JSON lines, a greeting, commands that are answered, events in between."""

import json
import socket
import time

# A limit for the answer to a command. Only a busy machine in software emulation takes more than a moment.
ANSWER_LIMIT_S = 600


class QmpError(Exception):
    """The other side refused a command."""


class Qmp:
    """A connection to a monitor in control mode. Events are kept until somebody waits for them."""

    def __init__(self, connected):
        self.socket = connected
        self.held = b""
        self.events = []
        self.next_message(time.monotonic() + ANSWER_LIMIT_S)
        self.execute("qmp_capabilities")

    @classmethod
    def connect(cls, path):
        """Connects to a monitor that listens at `path`."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(ANSWER_LIMIT_S)
        connected.connect(str(path))
        return cls(connected)

    def execute(self, command, **arguments):
        """Executes `command`; returns the answer. An underscore in the name of an argument stands for a dash."""
        arguments = {name.replace("_", "-"): value for name, value in arguments.items()}
        request = {"execute": command, "arguments": arguments}
        self.socket.sendall(json.dumps(request).encode() + b"\n")
        end = time.monotonic() + ANSWER_LIMIT_S
        while True:
            message = self.next_message(end)
            if "return" in message:
                return message["return"]
            if "error" in message:
                raise QmpError(f"{request}: {message['error']['desc']}")
            self.events.append(message)

    def wait_event(self, name, limit_s, **data):
        """Removes and returns the next event of that name whose data contain `data`."""
        end = time.monotonic() + limit_s
        while True:
            for event in self.events:
                if event.get("event") == name and data.items() <= event.get("data", {}).items():
                    self.events.remove(event)
                    return event
            self.events.append(self.next_message(end))

    def next_message(self, end):
        while b"\n" not in self.held:
            left = end - time.monotonic()
            if left <= 0:
                raise AssertionError(f"the monitor said nothing more; events so far: {self.events}")
            self.socket.settimeout(left)
            try:
                chunk = self.socket.recv(65536)
            except TimeoutError:
                continue
            if not chunk:
                raise AssertionError("the monitor hung up")
            self.held += chunk
        line, _, self.held = self.held.partition(b"\n")
        return json.loads(line)

    def close(self):
        self.socket.close()
