"""A trained model speaks."""

import msgspec
import pytest
from click.testing import CliRunner

import flopwise
from flopwise.cli.main import flopwise as program
from flopwise.errors import FlopwiseError
from flopwise.render.generate_view import speed

MODEL = {"d_model": 48, "d_ff": 96, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "head_dim": 24, "vocab": 270}


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    sizes = {"batch": 16, "context": 16, "set": MODEL}
    return flopwise.train("tiny", data=corpus, steps=80, rate=1e-2, device="cpu", runs=runs, **sizes)


def test_it_says_words_of_its_text(trained):
    found = flopwise.generate(trained.path, prompt="the loss", tokens=30, temperature=0.0, device="cpu")
    words = set(" ".join(found.texts).split()[1:-1])
    assert words
    assert words <= {"the", "loss", "fell", "and", "rose", "again", "while", "nobody", "watched", "it", "train"}
    assert (found.step, found.new_tokens, found.limit_ns) == (80, 30, None)
    assert found.tokens_per_s > 0


def test_several_prompts_each_several_times(trained):
    found = flopwise.generate(trained.path, prompt=["the", "rose and"], batch=2, tokens=5, device="cpu", cache="bf16")
    assert found.prompts == ("the", "the", "rose and", "rose and")
    assert len(found.texts) == 4
    assert "4 sequences" in " ".join(speed(found))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"tokens": 0}, "tokens = 0 is not allowed"),
        ({"temperature": -1.0}, "temperature = -1.0 is not allowed"),
        ({"top_p": 2.0}, "top_p = 2.0 is not allowed"),
        ({"cache": "int4"}, "cache = 'int4' is not allowed"),
        ({"graph": "on"}, "graph = 'on' needs an NVIDIA GPU"),
        ({"checkpoint": "/nowhere.pt"}, "cannot read /nowhere.pt"),
    ],
)
def test_bad_input_is_one_line(trained, given, error):
    with pytest.raises(FlopwiseError, match=error):
        flopwise.generate(trained.path, device="cpu", **given)


def test_the_command_line_shows_texts_and_speed(trained):
    asked = ["generate", str(trained.path), "--prompt", "the", "--tokens", "5", "--device", "cpu"]
    shown = CliRunner().invoke(program, asked, catch_exceptions=False).output
    assert "tokens/s of 1 sequence" in shown


def test_texts_are_shown_as_they_are_but_steer_no_terminal(trained):
    found = flopwise.generate(trained.path, prompt="the", tokens=2, device="cpu")
    shown = str(msgspec.structs.replace(found, prompts=("if x:\n",), texts=(f"    y\x1b[2J\n{'z ' * 100}",)))
    assert "\nif x:\n    y␛[2J\nz z" in shown
    assert max(map(len, shown.splitlines())) <= 80
