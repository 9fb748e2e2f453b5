"""`flopwise mcp` where it cannot serve."""

import subprocess
import sys


def flopwise(*words, cwd, path=""):
    code = (
        f"import sys; sys.path[:0] = {[path] if path else []}; from flopwise.cli.main import main; main(sys.argv[1:])"
    )
    return subprocess.run([sys.executable, "-c", code, *words], cwd=cwd, capture_output=True, text=True, check=False)


def test_without_the_sdk_it_says_what_to_install(tmp_path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "mcp.py").write_text("raise ModuleNotFoundError('no mcp here', name='mcp')")
    done = flopwise("mcp", cwd=tmp_path, path=str(tmp_path / "hidden"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["error: the MCP SDK is not installed", "hint: pip install 'flopwise[mcp]'"]


def test_a_root_that_is_no_folder_is_refused(tmp_path):
    done = flopwise("mcp", "--root", "missing", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot serve missing" in done.stderr
