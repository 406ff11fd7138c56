"""`make verify`: CRDs judged by an API server's own code, without a cluster; the cost of CEL rules among it.

python -m devtools.check_crds FILE...

The program is devcluster/go/crdcheck, which `devcluster up` builds too. Where neither has run it is built once: some
90 s on two cores with a cold cache of Go, 3 s with a warm one.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from devcluster import binaries, lifecycle, paths
from devcluster.errors import DevclusterError

LIMIT_S = 60.0  # it takes a tenth of a second


def run(files: Sequence[str], objects: str = "") -> subprocess.CompletedProcess[str]:
    """Exit status 1 where a CRD would be refused, with why on stderr; what the rules cost on stdout.

    With `objects`, a file of objects of these kinds, exit status 1 where one of them would be refused.
    """
    places = paths.from_environment(os.environ)
    wanted = (binaries.CRD_CHECK,)
    if binaries.missing(places, wanted):
        with lifecycle.locked(places.build_lock):
            binaries.ensure(places, wanted)
    program = binaries.folder_of(places, binaries.CRD_CHECK) / binaries.CRD_CHECK.name
    options = ["-objects", objects] if objects else []
    return subprocess.run([program, *options, *files], capture_output=True, text=True, check=False, timeout=LIMIT_S)


def main(files: Sequence[str]) -> int:
    """The program's own exit status and words."""
    try:
        done = run(files)
    except DevclusterError as error:
        print(f"check_crds: {error}", file=sys.stderr)
        return 1
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
