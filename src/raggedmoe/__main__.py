"""`python -m raggedmoe`, which is the console script: in a new process, as this one has loaded JAX already."""

import os
import sys

os.execv(sys.executable, (sys.executable, "-m", "raggedmoe_command", *sys.argv[1:]))
