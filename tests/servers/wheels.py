"""The sources of the servers that docs/servers.md is about, from their wheels: downloaded once, nothing installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from recipe.drafter.export_layout import VERSIONS

CACHE = Path(__file__).resolve().parents[2] / "wheels"  # git ignores it; some 280 MB


def sources(name: str) -> Path:
    """A folder with the Python files of ``name``'s wheel and its metadata."""
    wanted, place = f"{name}-{VERSIONS[name]}", CACHE / "sources" / f"{name}-{VERSIONS[name]}"
    if place.is_dir():
        return place
    if not list(CACHE.glob(f"{wanted}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
        done = subprocess.run([*command, str(CACHE), f"{name}=={VERSIONS[name]}"], capture_output=True, text=True)
        assert done.returncode == 0, f"{wanted} cannot be downloaded: {done.stderr[-1000:]}"
    staging = place.with_suffix(".tmp")
    with zipfile.ZipFile(next(CACHE.glob(f"{wanted}-*.whl"))) as wheel:
        for member in wheel.namelist():
            if member.endswith((".py", "/METADATA")):
                wheel.extract(member, staging)
    staging.rename(place)
    return place
