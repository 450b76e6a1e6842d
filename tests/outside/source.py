"""Where PyTorch's tests are: the unpacked source of PyTorch 2.6.0, as Debian 13 has it.

`--root` or `$PYTORCH_SOURCE` names an unpacked source; without either it is in a folder of this user's cache, where
`--fetch` puts it. Debian's package manager fetches it from where this machine gets its packages. It is given a list of
sources of its own, so the system's lists stay as they are.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

VARIABLE = "PYTORCH_SOURCE"
RELEASE, PACKAGE = "trixie", "pytorch"


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytorch-source-2.6"


def named(root: str | None) -> Path:
    return Path(root or os.environ.get(VARIABLE) or default_folder())


def root_below(folder: Path) -> Path | None:
    """The root of the source that a folder is or holds."""
    candidates = (folder, *sorted(folder.glob("pytorch*")))
    return next((path.resolve() for path in candidates if (path / "test" / "dynamo").is_dir()), None)


def find(folder: Path) -> Path:
    """Raises `SystemExit` with what to do if there is no source."""
    root = root_below(folder)
    if root is None:
        raise SystemExit(
            f"{folder} is no source of PyTorch with its tests. Name one by --root or ${VARIABLE}, or let "
            f"`python -m tests.outside --fetch` get Debian's source package {PACKAGE} of {RELEASE} (27 MB)."
        )
    return root


def fetch(folder: Path) -> None:
    """Download and unpack it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="apt-") as state:
        entry = Path(state, "sources.list")
        entry.write_text(f"deb-src {_mirror()} {RELEASE} main\n")
        settings: dict[str, object] = {
            "Dir::Etc::sourcelist": entry,
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": Path(state, "lists"),
            "Dir::Cache": Path(state, "cache"),
        }
        if os.geteuid() == 0:
            settings["APT::Sandbox::User"] = "root"  # another user could not write here
        apt = ["apt-get", "--quiet", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
        for folder_of_apt in ("lists/partial", "cache/archives/partial"):
            Path(state, folder_of_apt).mkdir(parents=True)
        for words in (["update"], ["source", "--download-only", PACKAGE]):
            subprocess.run([*apt, *words], cwd=state, check=True)
        (archive,) = Path(state).glob(f"{PACKAGE}_*.orig.tar.xz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")


def _mirror() -> str:
    """The address of the Debian archive that this machine's packages come from."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Component: main"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    archives = [address for address in found if address.rstrip("/").endswith("/debian")]
    if not archives:
        raise SystemExit(
            f"this machine's list of packages names no archive of Debian: unpack {PACKAGE} of {RELEASE} by hand"
        )
    return archives[0]
