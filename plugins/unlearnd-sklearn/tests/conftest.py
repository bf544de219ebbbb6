"""What the tests of the scikit-learn plugin share."""

import sys
from pathlib import Path

# The tests run from a clone too, before the plugin is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))
