"""run.sh with a real venv and a real pip, offline: a tiny project and a tiny "torch" wheel instead of the downloads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BACKEND = """
import pathlib, zipfile

METADATA = "Metadata-Version: 2.1\\nName: dflash-recipe\\nVersion: 0.1.0\\nProvides-Extra: test\\n"

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "dflash_recipe-0.1.0-py3-none-any.whl"
    info = "dflash_recipe-0.1.0.dist-info"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w") as wheel:
        wheel.writestr("dflash_recipe.pth", str(pathlib.Path(__file__).parent))
        wheel.writestr(f"{info}/METADATA", METADATA)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""


class Checkout:
    """A folder with run.sh, a project without dependencies, and wheels to install from."""

    def __init__(self, folder: Path) -> None:
        self.root, self.wheels = folder / "a checkout", folder / "wheels"
        self.root.mkdir()
        self.wheels.mkdir()
        shutil.copy(ROOT / "run.sh", self.root)
        (self.root / "constraints.txt").write_text("torch==2.13.0\n")
        (self.root / "backend.py").write_text(BACKEND)
        (self.root / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbackend-path = ["."]\nbuild-backend = "backend"\n'
        )
        (self.root / "recipe").mkdir()
        (self.root / "recipe" / "__init__.py").touch()
        (self.root / "recipe" / "__main__.py").write_text("import sys; print('recipe', sys.argv[1:])")
        self.add_torch()
        self.add_wheel("dflash", "0.1.0")

    def add_torch(self) -> None:
        self.add_wheel("torch", "2.13.0")

    def add_wheel(self, name: str, version: str) -> None:
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(self.wheels / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = dict(os.environ, PYTHON=sys.executable, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(self.wheels))
        command = [str(self.root / "run.sh"), *arguments]
        return subprocess.Popen(
            command, cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=180)
        return process.returncode, out, err


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.slow
def test_set_up_once_then_start_at_once_from_any_folder(checkout: Checkout) -> None:
    code, out, err = checkout.run("plan", "a b", "--tp", "5")
    assert code == 0, err
    assert "recipe ['plan', 'a b', '--tp', '5']" in out
    assert "[setup] done" in err
    code, out, err = checkout.run()
    assert (code, out, err) == (0, "recipe ['demo']\n", "")
    (checkout.root / "constraints.txt").write_text("torch==2.13.0\n# changed\n")
    code, _, err = checkout.run("setup")
    assert code == 0 and "[setup] done" in err and "anew" not in err


@pytest.mark.slow
def test_a_set_up_that_was_cut_short_is_made_anew(checkout: Checkout) -> None:
    torch = next(checkout.wheels.glob("torch*"))
    torch.unlink()
    code, _, err = checkout.run("setup")
    assert code == 1 and "could not install torch" in err
    checkout.add_torch()
    code, _, err = checkout.run("setup")
    assert code == 0 and "cut short" in err
    (checkout.root / ".venv" / "bin" / "python").unlink()
    code, out, err = checkout.run("status")
    assert code == 0 and "anew" in err and "recipe ['status']" in out


@pytest.mark.slow
def test_two_at_once_set_up_only_once(checkout: Checkout) -> None:
    both = [checkout.start("status"), checkout.start("status")]
    results = [process.communicate(timeout=180) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [out.splitlines()[-1] for out, _ in results] == ["recipe ['status']"] * 2
    assert sum("[setup] done" in err for _, err in results) == 1


def test_no_suitable_python_is_said_plainly(checkout: Checkout, tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        [checkout.root / "run.sh", "setup"], env=dict(os.environ, PYTHON=str(old)), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == f"error: PYTHON={old} is not a Python >= 3.10\n"


def test_help_needs_no_set_up(checkout: Checkout) -> None:
    code, out, _ = checkout.run("--help")
    assert code == 0 and "./run.sh test" in out
    assert not (checkout.root / ".venv").exists()
