"""A word in the wrong place is told where it belongs."""

import pytest


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["bench", "train.py"], "flopwise run train.py"),
        (["bench", "tiny", "--versus", "atention=naive"], "did you mean 'attention'?"),
        (["bench", "tiny", "--versus", "norm_kin=rms"], "did you mean 'norm_kind'? allowed"),
        (["run", "last"], "flopwise runs"),
        (["run", "train.py:make"], "flopwise bench train.py:make"),
        (["runs", "last"], "flopwise runs show last"),
        (["runs", "train.py"], "flopwise run train.py"),
        (["runs", "shwo"], "did you mean 'show'? commands"),
        (["run", "--stps", "3", "train.py"], "did you mean '--steps'?"),
        (["account", "train.py:make"], "leave out a number read from a tensor"),
    ],
)
def test_it_says_what_to_type(cli, tmp_path, words, hint):
    (tmp_path / "train.py").write_text(
        "import torch\n\n\ndef make(device):\n    x = torch.ones(4, device=device)\n    return lambda: x[x > 0].sum()\n"
    )
    done = cli(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2
    assert hint in done.stderr
    if words[0] == "account":
        assert "train.py:6 in <lambda>" in done.stderr
