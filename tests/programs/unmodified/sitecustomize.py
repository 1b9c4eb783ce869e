"""Hides what the frameworks import where it is installed and none of the programs uses: half of their start.

The tests of holdfast's trackers and stores install these; a user of the framework alone does not have them.
"""

import sys

for name in ("boto3", "datasets", "mlflow", "pandas", "tensorboard", "triton"):
    sys.modules.setdefault(name, None)
