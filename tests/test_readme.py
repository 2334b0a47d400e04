"""The generated parts of the README are what the code and the results say."""

import subprocess
import sys

from conftest import ROOT


def test_generated_parts_are_up_to_date():
    command = [sys.executable, ROOT / "benchmarks" / "readme.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_two_commands_are_there_and_ci_runs_the_second():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert "pip install -r requirements.txt && python grpo.py" in readme
    assert "pip install -r requirements.txt && python -m pytest" in readme
    assert "pip install -r requirements.txt && python -m pytest" in ci
