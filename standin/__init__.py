"""An oMLX-shaped server with oMLX's defects, for tests, the demo and CI.

The package ``omlx`` lives in this folder so that it is found only by whoever
puts the folder on ``PYTHONPATH``. No wheel of omlx-admission has it.
"""

from pathlib import Path

#: Folder to put on ``PYTHONPATH`` so that ``import omlx`` finds the stand-in.
PATH = Path(__file__).parent
