"""python3 -m devcluster"""

import os
import sys

from devcluster.cli import main

try:
    code = main(sys.argv[1:], os.environ)
    sys.stdout.flush()
except BrokenPipeError:  # the reader has seen enough, as in `status | head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    code = 1
sys.exit(code)
