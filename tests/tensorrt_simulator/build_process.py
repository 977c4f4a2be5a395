"""The process of a build with the simulator for its library; the version is its argument."""

from __future__ import annotations

import os
import sys

from edgespec.backends.tensorrt import bindings, build_process
from edgespec.backends.tensorrt.versions import Library, capabilities_of
from tests.tensorrt_simulator.library import simulator


def load(library: Library) -> bindings.TrtBindings:
    """The simulator as the library."""
    version = sys.argv[1]
    trt = simulator(version)
    return bindings.TrtBindings(library, trt, version, capabilities_of(library, version))


if __name__ == "__main__":
    bindings.load = load
    code = build_process.main()
    sys.stderr.flush()
    os._exit(code)
