#!/usr/bin/env python3
"""qmp_once.py SOCKET COMMAND: has QEMU's monitor do one command, and prints the answer. Quotes in the command may be single ones."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from qmp import Qmp  # noqa: E402

command = json.loads(sys.argv[2].replace("'", '"'))
print(json.dumps(Qmp.connect(sys.argv[1]).execute(command["execute"], **command.get("arguments", {}))))
