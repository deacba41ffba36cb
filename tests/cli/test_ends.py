"""Exit statuses and messages of commands for failures of their input and output."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import commands

ROOT = Path(__file__).resolve().parents[2]
START = """
from tformer_jax.cli import interrupt
interrupt.install_handler()
import sys, time
from tformer_jax.cli.common import run_main
def say(text):
    print(text, flush=True)
def pause():
    for _ in range(600): time.sleep(0.1)
"""
"""Defines `pause`: one long sleep would miss a signal that arrives just before it."""


def started(program: str, **options) -> subprocess.Popen:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", START + program], cwd=ROOT, env=environment, text=True, **pipes)


def shell(command: str) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("program", "signals"),
    [
        ("def main():\n say('on'); pause()\nrun_main(main)", 1),
        ("say('on'); pause()", 1),
        (
            "def main():\n say('on')\n while True:\n  try: pause()\n  except KeyboardInterrupt: say('lost')\n"
            "run_main(main)",
            1,
        ),
        (
            "def main():\n say('on')\n try: pause()\n finally: pause()\nrun_main(main)",
            2,
        ),
        (
            "class A:\n def __del__(_): say('on'); pause()\ndef main(): A(); pause()\nrun_main(main)",
            1,
        ),
    ],
    ids=["at work", "in imports", "where the exception is lost", "while it ends", "in a destructor"],
)
def test_ctrl_c_ends_with_130_and_one_line(program, signals):
    with started(program) as process:
        assert process.stdout.readline() == "on\n"
        start = time.monotonic()
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "interrupted\n"
    assert time.monotonic() - start < 10


def test_ctrl_c_skips_interpreter_shutdown():
    program = "import atexit\natexit.register(say, 'taken down')\ndef main():\n say('on'); pause()\nrun_main(main)"
    with started(program) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=30)
    assert (process.returncode, out, said) == (130, "", "interrupted\n")


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_scripts_handle_ctrl_c_before_their_imports(path):
    imports = [line.strip() for line in path.read_text().splitlines() if "import" in line and "tformer" in line]
    assert imports[0] == "from tformer_jax.cli import interrupt"
    before, _, after = path.read_text().partition("interrupt.install_handler()\n")
    assert before.count("import ") == 1
    assert "run_main" in after


PRINTS = "from tformer_jax.cli.common import run_main; run_main(lambda: [print(n) for n in range(100_000)])"


def test_a_full_device_is_reported():
    status, _, said = shell(f'$PYTHON -c "{PRINTS}" > /dev/full')
    assert status == 1
    assert said == "error: the output cannot be written: No space left on device\n"


def test_a_closed_pipe_ends_the_command_silently():
    status, out, said = shell(f'$PYTHON -c "{PRINTS}" | head -1; exit ${{PIPESTATUS[0]}}')
    assert (status, out, said) == (0, "0\n", "")


def test_closed_standard_streams():
    assert shell(f'$PYTHON -c "{PRINTS}" >&-') == (0, "", "")
    status, _, said = shell("$PYTHON scripts/translate.py --run nowhere <&-")
    assert (status, said) == (2, "error: standard input is closed: give texts or --input FILE\n")


PROGRAM = "import time; open('on', 'w'); time.sleep(2); open('off', 'w'); print(7)"


@pytest.mark.parametrize(("presses", "status", "said"), [(1, 0, "7\n"), (2, 130, "")])
def test_the_first_ctrl_c_leaves_a_program_of_an_evaluation_alone(presses, status, said, tmp_path):
    """The second one ends it: it has its own process group, which the terminal's Ctrl-C does not reach."""
    program = f"""
from tformer_jax.base import programs
from tformer_jax.runs.endings import GracefulStop
def main():
    import os
    os.chdir({str(tmp_path)!r})
    with GracefulStop():
        print(programs.run([sys.executable, "-c", {PROGRAM!r}], "", 60).stdout, end="")
run_main(main)
"""
    with started(program, start_new_session=True) as process:
        while not (tmp_path / "on").exists():
            assert process.poll() is None
            time.sleep(0.05)
        for _ in range(presses):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.3)
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (status, said)
    time.sleep(2)
    assert (tmp_path / "off").exists() == (status == 0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ctrl_c_at_any_moment_of_a_translation(runs, tmp_path):
    """The command ends with status 130 and one line, never by a crash; resumed, it gives the same output."""
    draw, run = random.Random(0), runs["seq2seq"]
    (tmp_path / "in.txt").write_text("".join(f"{'abc'[n % 3] * (1 + n % 15)}\n" for n in range(3000)))
    files = ["--input", str(tmp_path / "in.txt"), "--beams", "2"]
    command = [sys.executable, "scripts/translate.py", "--run", str(run), *files]

    def translating(name: str, *flags: str):
        return commands.start([*command, "--output", str(tmp_path / name), *flags], tmp_path / "cache")

    limited = "3,000 outputs end at decode.max_new_tokens=6 and may be incomplete\n"
    assert translating("expected.txt").communicate(timeout=300)[1] == limited
    for moment in ["imports"] * 3 + ["at work"] * 9:
        with translating("out.txt", "--resume") as process:
            maps, partial = Path(f"/proc/{process.pid}/maps"), tmp_path / "out.txt.partial"
            while "jaxlib" not in maps.read_text() or (moment == "at work" and not partial.exists()):
                time.sleep(0.02)
            time.sleep(draw.uniform(0, 1.5))
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60)[1] == "interrupted\n"
            assert process.returncode == 130
    assert translating("out.txt", "--resume").wait(300) == 0
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "expected.txt").read_bytes()


PARENT = """
import sys
from tformer_jax.cli.children import Children

child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
with Children() as children:
    children.run([sys.executable, "-c", child])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a child that its parent was killed")
def test_children_end_with_a_parent_that_is_killed():
    """Regression test: a killed sweep left its training running, and the next one found the run in use."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
        assert parent.wait() == -signal.SIGKILL
        for _ in range(100):
            if not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text():
                return
            time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child still runs")
