"""The door: exit codes, messages, and that it opens fast."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from recipe.errors import ConfigError
from recipe.run import cli

ROOT = Path(__file__).resolve().parents[3]


def recipe(*arguments: str, **how: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recipe", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, **how)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Puts a verb `probe` behind the door whose ``run`` does what the test wants."""

    def put(body: Callable[[], int]) -> None:
        module = types.ModuleType("probe_verb", "A probe.")
        module.add_arguments = lambda parser: parser.add_argument("--number", type=int)  # type: ignore[attr-defined]
        module.run = lambda args: body()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "probe_verb", module)
        monkeypatch.setitem(cli.VERBS, "probe", cli.Verb("probe_verb", "a probe"))

    return put


def test_help_lists_every_verb_and_imports_nothing_heavy() -> None:
    code = "import sys; from recipe.run.cli import main; main(['--help']); print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    text, modules = done.stdout.rsplit("\n[", 1)
    assert all(verb in text for verb in cli.VERBS)
    assert not {"'torch'", "'pydantic'", "'transformers'", "'deepspeed'"} & set(modules.rstrip("]\n").split(", "))


def test_no_verb_is_help_and_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "verbs:" in capsys.readouterr().out


def test_misspelt_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert "'train'" in capsys.readouterr().err


def test_wrong_option_exits_2_without_a_usage_block(
    verb: Callable[[Callable[[], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(lambda: 0)
    for arguments in (["--nonsense"], ["--number", "x"], ["--num", "3"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(["probe", *arguments])
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and "--help" in error


def test_the_exit_code_is_the_verbs(verb: Callable[[Callable[[], int]], None]) -> None:
    verb(lambda: 4)
    assert cli.main(["probe"]) == 4


def test_a_users_mistake_exits_2_without_traceback(
    verb: Callable[[Callable[[], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> int:
        raise ConfigError("dflash.x", 3, "is wrong", "mend it")

    verb(body)
    assert cli.main(["probe"]) == 2
    error = capsys.readouterr().err
    assert error == "error: dflash.x = 3: is wrong\n  Fix: mend it\n"


def test_an_interrupt_exits_130(verb: Callable[[Callable[[], int]], None]) -> None:
    def body() -> int:
        raise KeyboardInterrupt

    verb(body)
    assert cli.main(["probe"]) == 130


def test_a_fault_keeps_its_traceback(verb: Callable[[Callable[[], int]], None]) -> None:
    def body() -> int:
        raise RuntimeError("a bug")

    verb(body)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["probe"])


def test_a_closed_pipe_is_quiet() -> None:
    done = subprocess.run(
        f"{sys.executable} -m recipe --help | head -n 1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere.json",), "no such file"),
        (("ds_configs/demo.json", "--set", "dflash.ring.reus=2"), "dflash.ring.reuse"),
        (("ds_configs/demo.json", "--set", "dflash.drafter.block_size=1"), "at least 2"),
        (("ds_configs/demo.json", "--no-model"), "--check"),
        (("ds_configs/demo.json", "--resume", "--replace"), "give one of the two"),
        (("ds_configs/demo.json", "--master-port", "99999"), "1 … 65535"),
    ],
)
def test_train_refuses_bad_input_before_anything_is_loaded(arguments: tuple[str, ...], words: str) -> None:
    done = recipe("train", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and words in done.stderr and "Fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_reference_config_passes_its_check_anywhere(tmp_path: Path) -> None:
    config = ROOT / "ds_configs" / "qwen3.6_27b_5t3d.json"
    command = [sys.executable, "-m", "recipe", "train", str(config), "--check", "--no-model"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "248070" in done.stdout
    assert not list(tmp_path.iterdir())
