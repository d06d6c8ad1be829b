"""Prints, of each process of a Slurm job, the variables that are set among those named, as one line of JSON.

A short one: srun writes the output of several processes into one file in pieces.
"""

from __future__ import annotations

import json
import os
import sys

variables = {name: os.environ[name] for name in sys.argv[1:] if name in os.environ}
os.write(1, (json.dumps({"rank": int(os.environ["SLURM_PROCID"]), "variables": variables}) + "\n").encode())
