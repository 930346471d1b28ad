"""Makes the modules of ../guest importable: a kernel from a package, archives, a guest's words."""

import pathlib
import sys

# Behind this folder, whose modules come first.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "guest"))
