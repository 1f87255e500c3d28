"""Peak memory of this process."""

import re
import resource
import sys
from pathlib import Path


def peak_megabytes() -> float:
    """The most that was resident, in 10^6 bytes.

    Linux hands the parent's peak on to a child in `getrusage`, so there the process's own status is
    read.
    """
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), flags=re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024 / 1e6
    bytes_each = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_each / 1e6
