"""Fault scripts: what a line may be, and that every error names its line."""

from __future__ import annotations

import re

import pytest

from elastix.backends.simulated import SimulatedBackend, VirtualClock
from elastix.cli import main
from elastix.command import parse
from elastix.faults import Hang, Lose, Return, Script, parse_script, validate

SCRIPT = """
    lose 1@12        # a comment
    # lose 2@13

    hang  0@20
    return 1@12.5s
"""


def test_a_script_has_a_fault_a_line():
    faults = parse_script(SCRIPT)
    assert faults == (Lose(1, step=12), Hang(0, step=20), Return(1, time=12.5))
    assert [fault.written for fault in faults] == [f"fault script, line {n}" for n in (2, 5, 6)]
    assert [str(fault) for fault in faults] == ["--lose 1@12", "--hang 0@20", "--return 1@12.5s"]
    assert parse_script("") == parse_script("# nothing\n") == ()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "loose 1@12",
            "'loose 1@12': write lose, hang, corrupt or return, then SLICE@STEP such as 1@40, "
            "or SLICE@SECONDSs",
        ),
        ("lose", "lose '': write SLICE@STEP such as 1@40, or SLICE@SECONDSs"),
        ("lose 1", "lose '1': write SLICE@STEP such as 1@40, or SLICE@SECONDSs"),
        ("lose 1@2 2@3", "lose '1@2 2@3': write SLICE@STEP such as 1@40, or SLICE@SECONDSs"),
        ("hang 1@0", "hang 1@0: steps count from 1"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line, told):
    with pytest.raises(ValueError, match=f"^{re.escape(f'fault script, line 3: {told}')}$"):
        parse_script(f"# first\nlose 0@1\n{line}  # and why")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("lose 4@9", "lose 4@9: there are slices 0 to 3 only"),
        ("lose 2@41", "lose 2@41: the run has 40 steps only"),
        ("return 2@9", "return 2@9: slice 2 is not lost before that; lose it first"),
        ("lose 1@9", "lose 1@9: slice 1 was lost before; return it first"),
    ],
)
def test_a_line_that_cannot_happen_is_named(line, told):
    with pytest.raises(ValueError, match=f"^{re.escape(f'f.txt, line 3: {told}')}$"):
        validate(parse_script(f"lose 1@8\n\n{line}", "f.txt"), range(4), 40)


def test_the_command_reads_a_script(tmp_path):
    path = tmp_path / "faults.txt"
    path.write_text(SCRIPT)
    command = parse(["run", "r.py", "--faults", str(path), "--lose", "3@5"])
    assert command.faults == (Lose(3, step=5), *parse_script(SCRIPT))
    flags = "--lose 3@5 --lose 1@12 --hang 0@20 --return 1@12.5s"
    assert flags in " ".join(command.child_arguments("d", with_faults=True))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"\nloose 1@2", "PATH, line 2: 'loose 1@2': write lose, hang, corrupt or return"),
        (b"\xff", "--faults PATH cannot be read (no text): name a file"),
        (None, "--faults PATH cannot be read (No such file or directory): name a file"),
    ],
)
def test_the_command_names_file_and_line(tmp_path, capsys, text, told):
    path = tmp_path / "faults.txt"
    if text is not None:
        path.write_bytes(text)
    assert main(["run", "tests/recipes/tiny.py", "--faults", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"elastix: {told}".replace("PATH", str(path)))


def test_a_return_that_is_due_before_its_loss_does_not_stop_the_clock():
    clock = VirtualClock()
    slices = SimulatedBackend(2, 1, parse_script("lose 1@6\nreturn 1@6"), clock)
    slices.idle(2.0)  # twenty steps' worth: the return is due, and slice 1 is not lost
    for _ in range(3):
        slices.idle(0.5)
    assert clock.now() >= 2.0
    slices.dispatched(6, {0, 1})
    slices.idle(0.5)
    assert slices.unfired_faults() == []


def test_a_fault_that_is_due_in_no_time_lets_some_pass():
    """Steps add up in floats: what is left of one may be less than a clock can show."""
    script = Script([Return(0, time=1e9 + 1e-7)])
    assert script.next_return_in(1e9) == pytest.approx(1e-3)
