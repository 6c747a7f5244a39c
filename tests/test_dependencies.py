"""The bounds of dependencies exclude known vulnerabilities, and constraints.txt pins a version within each."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# the first version without the vulnerability
FIXED = {
    "flask": ("3.1.3", "CVE-2026-27205"),
    "onnx": ("1.21", "CVE-2026-27489, CVE-2026-34445"),
    "opencv-python-headless": ("4.12", "CVE-2025-53644"),
    "pillow": ("12.3", "CVE-2026-25990, CVE-2026-59199"),
    "protobuf": ("6.33.5", "CVE-2026-0994"),
    "pyarrow": ("23.0.1", "PYSEC-2026-113"),
    "python-multipart": ("0.0.31", "CVE-2026-24486, CVE-2026-42561, GHSA-v9pg-7xvm-68hf"),
    "starlette": ("1.3", "CVE-2026-48710, PYSEC-2026-248"),
    "torch": ("2.10", "CVE-2025-32434, CVE-2026-24747"),
}


def declared() -> list[Requirement]:
    """The dependencies of the package and of its extras."""
    lines = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
    return [found for line in lines if (found := Requirement(line)).name != "penstock"]


def pins() -> dict[str, Version]:
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, _, version in (line.partition("==") for line in lines)}


def lower_bound(requirement: Requirement) -> Version | None:
    return max((Version(s.version) for s in requirement.specifier if s.operator in (">=", "==")), default=None)


def test_every_dependency_has_a_lower_bound_above_known_vulnerabilities() -> None:
    bounds = {str(found): (lower_bound(found), FIXED.get(found.name, ("0", ""))) for found in declared()}
    assert not [text for text, (least, (fixed, _)) in bounds.items() if least is None or least < Version(fixed)]
    assert not FIXED.keys() - {found.name for found in declared()}


def test_every_dependency_has_a_pin_within_its_bounds() -> None:
    known = pins()
    assert not [str(found) for found in declared() if canonicalize_name(found.name) not in known]
    assert not [
        str(found) for found in declared() if not found.specifier.contains(known[canonicalize_name(found.name)])
    ]


def test_everything_that_an_installation_brings_is_pinned() -> None:
    """Follows the requirements of what is installed here."""
    known, seen, left = pins(), set[tuple[str, str]](), declared()
    unpinned = set()
    while left:
        found = left.pop()
        if found.name == "setuptools" or (found.name, str(found.extras)) in seen:
            continue
        seen.add((found.name, str(found.extras)))
        try:
            lines = requires(found.name) or []
        except PackageNotFoundError:  # of the extras docs and gpu
            continue
        if canonicalize_name(found.name) not in known:
            unpinned.add(found.name)
        for each in map(Requirement, lines):
            extras = found.extras or {""}
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
                left.append(each)
    assert not unpinned
