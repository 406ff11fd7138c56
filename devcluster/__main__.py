"""python3 -m devcluster"""

import os
import sys

from devcluster.cli import main

sys.exit(main(sys.argv[1:], os.environ))
