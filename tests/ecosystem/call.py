"""Call functions in the environment of the tools: `python call.py MODULE CALLS RESULTS`.

CALLS is a JSON file with a list of `[function, arguments]`. The results are written to the JSON file RESULTS.
"""

import importlib
import json
import sys
from pathlib import Path

module = importlib.import_module(sys.argv[1])
calls = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
results = [getattr(module, function)(**arguments) for function, arguments in calls]
Path(sys.argv[3]).write_text(json.dumps(results, default=lambda array: array.tolist()), encoding="utf-8")
