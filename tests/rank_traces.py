"""Traces of many ranks with a planted straggler: the generator of benchmarks/many_ranks.py."""

import importlib.util
import sys
from pathlib import Path

_SCRIPT = Path(__file__).parents[1] / "benchmarks" / "many_ranks.py"
_SPEC = importlib.util.spec_from_file_location("many_ranks_script", _SCRIPT)
made = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = made  # dataclasses look their module up
_SPEC.loader.exec_module(made)
Job, write, offsets, CAUSES, CASES = made.Job, made.write, made.offsets, made.CAUSES, made.CASES
